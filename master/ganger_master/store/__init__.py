"""Where the master's state outlives it: one contract, kept by SQL databases and by plain memory."""
