"""Cores by what a task is: 3 for a parameter server, 4 for a worker and its GPU (the task-role heuristic of the CPU
poster, Xiao et al., SoCC 2018). It knows neither jobs nor nodes; memory is proportional.

Where a node has fewer cores than its tasks would take by this rule, every piece gets as much less: the rule itself
would leave such gangs unplaced.
"""

from __future__ import annotations

import numpy as np

from ganger_master.policies.tunings import Gangs, Pieces, Tuning, TuningNodes, proportionally

SERVER_CORES = 3.0
WORKER_CORES = 4.0


def tune(gangs: Gangs, nodes: TuningNodes, placed: Pieces) -> Pieces:
    wanted = WORKER_CORES * placed.gpus + SERVER_CORES * placed.parameter_servers
    used = np.bincount(placed.node, weights=wanted, minlength=len(nodes))
    part = nodes.cores / np.maximum(used, nodes.cores + (nodes.cores <= 0.0))
    return placed.given(wanted * part[placed.node], proportionally(nodes, placed).memory_bytes)


ROLE = Tuning("role", tune, by_profiles=False)
