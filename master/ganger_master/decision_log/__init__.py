"""Decisions of a master as a file, and decided once more from it."""
