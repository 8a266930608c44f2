"""The shell around the core: the one writer, its clock, what is shown to the outside, and the processes it keeps."""
