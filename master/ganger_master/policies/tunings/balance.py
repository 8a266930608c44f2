"""Placement that separates gangs of large demand: the largest first, each on the node that its demand loads least.

Synergy-Tune fills node after node, so gangs that want many cores end up together and lose them again when gangs of
small demand come last (OSDI 2022, section 4.2). Here only GPUs decide what fits, since shares always suffice. Demands
only decide which gangs are placed together; `exact` divides the amounts afterwards.
"""

from __future__ import annotations

import numpy as np

from ganger_master.policies.tunings import Gangs, Pieces, TuningNodes, pieces
from ganger_master.policies.tunings.demand import TuningDemand
from ganger_master.policies.tunings.round_packing import RoundPacking


def place(gangs: Gangs, nodes: TuningNodes, wanted: TuningDemand) -> Pieces:
    """Place gangs by GPUs, then by the part of a node that they want, most first.

    Each goes on the node that holds it whole and is then least full, by the fuller of cores and memory; ties go to the
    node named first. A gang that no node holds is split over the fewest nodes, if it may be. A gang without GPUs is
    left out.
    """
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
