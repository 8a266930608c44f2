"""State of a gang from arena to arena: plain TCP, hashed frames, while the source still fills."""
