"""The planner process: it observes the cluster, runs `ganger_master.planner`, and proposes plans."""
