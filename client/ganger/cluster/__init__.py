"""The resource abstraction: what servers are, what is free, what fits.

Light to import: `resources` and `refusals` are plain Python; only `view` and the modules that scan it need NumPy.
"""
