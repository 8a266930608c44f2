"""Scripts that move, rename and merge as docs/design/009 says."""
