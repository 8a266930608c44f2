"""State of a gang from arena to arena: plain TCP from memory to memory, while the source still fills."""
