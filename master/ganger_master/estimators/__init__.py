"""What is known of jobs, as fits of few measurements: pure functions from points to frozen models with their errors.

cpu, cpu_design       rate by cores, and which numbers of cores to measure
sensitivity           Synergy's matrix of rates by cores and memory, and where its profiling measures
convergence           where a loss is heading, and how many steps are left
server_speed, speed_design, allreduce   rate by parameter servers and workers, or by GPUs and nodes, and what to measure
interference, locality                  what sharing a GPU, sitting close, or lying far apart costs
classes               of which field a model comes
accuracy, posterior   relative errors, and how belief and measurement meet

Measured values that are not finite and above zero are left out everywhere; a fit without a usable point is None.
"""
