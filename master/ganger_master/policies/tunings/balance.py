"""Where gangs go so that the hungry do not meet: the largest first, each on the node that its wish loads least.

Synergy-Tune fills node after node, so that those that want many cores end up together, and takes back what they wanted
when the frugal come last (OSDI 2022, section 4.2). Here only GPUs decide what fits, since shares always suffice, and
wishes only say whom to put together; how much each gets is asked afterwards (see exact).
"""

from __future__ import annotations

import numpy as np

from ganger_master.policies.tunings import Gangs, Pieces, TuningNodes, pieces
from ganger_master.policies.tunings.demand import TuningDemand
from ganger_master.policies.tunings.round_packing import RoundPacking


def place(gangs: Gangs, nodes: TuningNodes, wanted: TuningDemand) -> Pieces:
    """By GPUs, then by the part of a node that they want, most first; each on one of the nodes that hold it whole: the
    one that is then least full, by the fuller of cores and memory; ties go to the node named first. Gangs that no node
    holds are split over the fewest, if they may be; who finds no GPUs is left out."""
    packing = RoundPacking(gangs, nodes)
    capacity = np.maximum(np.stack([nodes.cores, nodes.memory_bytes]), 1e-9)
    each = np.stack([wanted.cores, wanted.memory_bytes])
    whole_gangs = each * gangs.gpus
    part = np.max(whole_gangs / capacity.max(axis=1, initial=1e-9)[:, None], axis=0)
    used = np.zeros_like(capacity)
    for gang in np.lexsort((-part, -gangs.gpus)).tolist():
        gpus = int(gangs.gpus[gang])
        holding = np.flatnonzero(packing.free_gpus >= gpus)
        if len(holding):
            full = np.max((used[:, holding] + whole_gangs[:, gang, None]) / capacity[:, holding], axis=0)
            where = [(int(holding[int(np.argmin(full))]), gpus)]
        else:
            found = packing.tightest(gang, 0.0, 0.0)
            if found is None:
                continue
            where = found
        packing.take(gang, where, 0.0, 0.0)
        for node, count in where:
            used[:, node] += count * each[:, gang]
    rows = [(gang, node, count) for gang in sorted(packing.where) for node, count in packing.where[gang]]
    return pieces([row[0] for row in rows], [row[1] for row in rows], [row[2] for row in rows])
