"""What `ganger demo` is made of."""
