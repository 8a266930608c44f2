"""What comes into a simulation: jobs of a trace, the cluster they run on, the models they train."""
