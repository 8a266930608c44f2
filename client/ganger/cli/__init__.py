"""The command line. `main` imports nothing but click; each command's module is imported when it is called."""
