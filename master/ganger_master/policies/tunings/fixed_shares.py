"""Tunings by a fixed rule, without an optimisation: proportional shares, task roles, and no isolation.

They are the baselines of the CPU poster (Xiao et al., SoCC 2018). Proportional shares are also the baseline of Synergy
(OSDI 2022) and the floor of every tuning that guarantees one.
"""

from __future__ import annotations

import numpy as np

from ganger_master.policies.job_facts import Floats
from ganger_master.policies.tunings import Gangs, Pieces, Tuning, TuningNodes, proportionally
from ganger_master.policies.tunings.demand import demands

SERVER_CORES = 3.0
WORKER_CORES = 4.0


def tune_proportionally(gangs: Gangs, nodes: TuningNodes, placed: Pieces) -> Pieces:
    """Give cores and memory in proportion to GPUs, whatever the job: `bind` of the poster (24 cores and 4 GPUs give 6
    each)."""
    return proportionally(nodes, placed)


def tune_by_role(gangs: Gangs, nodes: TuningNodes, placed: Pieces) -> Pieces:
    """Give 3 cores to a parameter server and 4 to a worker with its GPU: the task-role heuristic of the poster.

    It reads neither jobs nor nodes; memory is proportional. Where a node has fewer cores than its tasks would take,
    every piece is reduced in proportion; the plain rule would leave such gangs unplaced.
    """
    wanted = WORKER_CORES * placed.gpus + SERVER_CORES * placed.parameter_servers
    return placed.given(_scaled(placed, wanted, nodes.cores), proportionally(nodes, placed).memory_bytes)


def tune_shared(gangs: Gangs, nodes: TuningNodes, placed: Pieces) -> Pieces:
    """Let all gangs of a node share its cores and memory without isolation; GPUs are exclusive.

    The model is processor sharing: every gang starts as many busy threads as it can use, up to its demand, and the
    operating system serves all threads alike. While they fit, each gang receives its demand, and beyond that a part of
    the node's cores in proportion to its demand; the same holds for the page cache. The cost of context switches is not
    modelled, which flatters sharing.
    """
    demand = demands(gangs, nodes)
    return placed.given(
        _scaled(placed, placed.gpus * demand.cores[placed.gang], nodes.cores),
        _scaled(placed, placed.gpus * demand.memory_bytes[placed.gang], nodes.memory_bytes),
    )


def _scaled(placed: Pieces, wanted: Floats, capacity: Floats) -> Floats:
    """Return the amounts of the pieces, reduced in proportion on nodes that have less."""
    used = np.bincount(placed.node, weights=wanted, minlength=len(capacity))
    part = capacity / np.maximum(used, capacity + (capacity <= 0.0))
    return np.asarray(wanted * part[placed.node], float)


PROPORTIONAL = Tuning("proportional", tune_proportionally, by_profiles=False)
BIND = Tuning("bind", tune_proportionally, by_profiles=False)
ROLE = Tuning("role", tune_by_role, by_profiles=False)
SHARED = Tuning("shared", tune_shared)
