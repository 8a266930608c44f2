"""The planner's process: hears the cluster, has `ganger_master.planner` decide, and proposes plans."""
