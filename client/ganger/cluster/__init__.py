"""The resource abstraction: what servers are, what is free, what fits.

Light to import: `values` and `reasons` are plain; `view` needs NumPy and is imported by who scans.
"""
