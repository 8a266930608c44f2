"""Synergy-Greedy (OSDI 2022, section 4.1), the paper's baseline.

In the order of the policy every gang goes on the first node that holds its whole demand of GPUs, cores and memory; a
gang without such a node waits. It leaves GPUs idle beside gangs of large demand and guarantees nothing.
"""

from __future__ import annotations

import numpy as np

from ganger_master.policies.tunings import ROUNDING, Gangs, Pieces, Tuning, TuningNodes
from ganger_master.policies.tunings.demand import demands
from ganger_master.policies.tunings.round_packing import RoundPacking


def place(gangs: Gangs, nodes: TuningNodes) -> Pieces:
    demand = demands(gangs, nodes)
    packing = RoundPacking(gangs, nodes)
    for gang, (cores, memory) in enumerate(zip(demand.cores.tolist(), demand.memory_bytes.tolist(), strict=True)):
        where = packing.first(gang, cores, memory)
        if where is not None:
            packing.take(gang, where, cores, memory)
    return packing.placed()


def tune(gangs: Gangs, nodes: TuningNodes, placed: Pieces) -> Pieces:
    """In order, the whole demand where it still fits on all nodes of the gang; the pieces of others are left out."""
    demand = demands(gangs, nodes)
    cores = placed.gpus * demand.cores[placed.gang]
    memory = placed.gpus * demand.memory_bytes[placed.gang]
    free_cores, free_memory = nodes.cores * (1.0 + ROUNDING), nodes.memory_bytes * (1.0 + ROUNDING)
    runs = np.zeros(len(placed), bool)
    starts = np.searchsorted(placed.gang, np.arange(len(gangs) + 1))
    for gang in range(len(gangs)):
        rows = slice(int(starts[gang]), int(starts[gang + 1]))
        on = placed.node[rows]
        if np.all(cores[rows] <= free_cores[on]) and np.all(memory[rows] <= free_memory[on]):
            free_cores[on] -= cores[rows]
            free_memory[on] -= memory[rows]
            runs[rows] = True
    return placed.given(cores, memory).only(runs)


SYNERGY_GREEDY = Tuning("synergy-greedy", tune, place)
