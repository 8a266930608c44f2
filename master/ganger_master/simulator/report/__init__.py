"""What comes out of a simulation: outcomes of jobs, and every figure, table and plot that follows from them."""
