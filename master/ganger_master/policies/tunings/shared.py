"""No isolation: GPUs are a job's own, the node's cores and memory are everybody's (the first baseline of the CPU
poster, Xiao et al., SoCC 2018).

The model is processor sharing: every gang starts as many busy threads as it can use, up to its demand, and a scheduler
of the operating system serves all threads alike. While they fit, each gets what it demands; beyond, each gets the
node's cores in proportion to its demand, and so with the page cache. What switching between threads costs is not
modelled, so this flatters sharing.
"""

from __future__ import annotations

import numpy as np

from ganger_master.policies.job_facts import Floats
from ganger_master.policies.tunings import Gangs, Pieces, Tuning, TuningNodes
from ganger_master.policies.tunings.demand import demands


def tune(gangs: Gangs, nodes: TuningNodes, placed: Pieces) -> Pieces:
    demand = demands(gangs, nodes)
    return placed.given(
        _shared(placed, demand.cores[placed.gang], nodes.cores),
        _shared(placed, demand.memory_bytes[placed.gang], nodes.memory_bytes),
    )


def _shared(placed: Pieces, per_gpu: Floats, capacity: Floats) -> Floats:
    wanted = placed.gpus * per_gpu
    used = np.bincount(placed.node, weights=wanted, minlength=len(capacity))
    part = capacity / np.maximum(used, capacity + (capacity <= 0.0))
    return np.asarray(wanted * part[placed.node], float)


SHARED = Tuning("shared", tune)
