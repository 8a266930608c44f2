"""Synergy-Tune and its baseline Synergy-Greedy (Mohan et al., OSDI 2022, sections 4.1 and 4.2).

Synergy-Tune gives every gang its demand where it fits, else its proportional share, and takes back from neighbours what
they hold beyond theirs. Guarantees: every gang whose GPUs are free is placed, so no GPU idles for lack of cores or
memory; no gang runs slower than with its proportional share; no node gives more than it has.

Differences from the public simulator: it gives up the whole round when the GPUs of one gang are scattered (here such a
gang is split, or left out if it must stay on one node), and counts a gang that was cut back as slowed to its share
whatever it still holds (here `rates` reads what it holds).
"""

from __future__ import annotations

import numpy as np

from ganger_master.policies.job_facts import Integers
from ganger_master.policies.tunings import ROUNDING, Gangs, Pieces, Tuning, TuningNodes, proportionally, runnable
from ganger_master.policies.tunings.demand import TuningDemand, demands
from ganger_master.policies.tunings.round_packing import RoundPacking


def place(gangs: Gangs, nodes: TuningNodes) -> Pieces:
    """The runnable gangs, largest first."""
    demand = demands(gangs, nodes)
    running = runnable(gangs, nodes)
    packing = RoundPacking(gangs, nodes)
    for place in largest_first(gangs.take(running), demand.take(running)).tolist():
        gang = int(running[place])
        settle(packing, gang, float(demand.cores[gang]), float(demand.memory_bytes[gang]))
    return packing.placed()


def largest_first(gangs: Gangs, demand: TuningDemand) -> Integers:
    """By GPUs, then cores, then memory of the whole gang, most first; ties in the order given."""
    return np.lexsort((-demand.memory_bytes * gangs.gpus, -demand.cores * gangs.gpus, -gangs.gpus))


def settle(packing: RoundPacking, gang: int, cores: float, memory_bytes: float) -> bool:
    """Place one gang that would like so much for each GPU: with that, else with at most its share where that fits, else
    where its GPUs fit, its neighbours giving back. False if there are no GPUs for it."""
    where = packing.tightest(gang, cores, memory_bytes)
    if where is not None:
        packing.take(gang, where, cores, memory_bytes)
        return True
    less_cores = np.minimum(cores, packing.share_cores)
    less_memory = np.minimum(memory_bytes, packing.share_memory)
    where = packing.tightest(gang, less_cores, less_memory)
    if where is None:
        # the most cores of equally many free GPUs: fewer neighbours have to give back
        where = packing.tightest(gang, 0.0, 0.0, most_free_cores=True)
    if where is None:
        return False
    packing.take(gang, where, less_cores, less_memory)
    for node, _ in where:
        _make_up(packing, node, gang)
    return True


def _make_up(packing: RoundPacking, node: int, newcomer: int) -> None:
    """Cut residents that hold more than their share of what is missing back to it: those on the fewest nodes first,
    then with the most cores for each GPU, then the most memory (`_reallocate_peer` of the public code)."""
    if not any(packing.missing(node)):
        return

    def turn(gang: int) -> tuple[int, float, float, int]:
        at = [there for there, _ in packing.where[gang]].index(node)
        cores, memory = packing.held[gang][at]
        return (len(packing.where[gang]), -cores, -memory, gang)

    for peer in sorted(packing.residents[node], key=turn):
        missing = packing.missing(node)
        if not any(missing):
            return
        over = packing.excess(peer, node)
        if peer != newcomer and any(lack > 0.0 and more > 0.0 for lack, more in zip(missing, over, strict=True)):
            packing.cut_to_share(peer)
    assert not any(packing.missing(node)), "residents at their shares leave every free GPU its own"


def tune(gangs: Gangs, nodes: TuningNodes, placed: Pieces) -> Pieces:
    """Tune gangs that are placed: every gang at no more than its proportional share, then raised to its demand, largest
    first, where that fits on all nodes of the gang."""
    return raised(gangs, nodes, placed, demands(gangs, nodes))


def raised(gangs: Gangs, nodes: TuningNodes, placed: Pieces, demand: TuningDemand) -> Pieces:
    """`tune` with another wish for each gang."""
    wanted_cores = placed.gpus * demand.cores[placed.gang]
    wanted_memory = placed.gpus * demand.memory_bytes[placed.gang]
    share = proportionally(nodes, placed)
    cores = np.minimum(wanted_cores, share.cores)
    memory = np.minimum(wanted_memory, share.memory_bytes)
    more_cores, more_memory = wanted_cores - cores, wanted_memory - memory
    free_cores = nodes.cores * (1.0 + ROUNDING) - np.bincount(placed.node, weights=cores, minlength=len(nodes))
    free_memory = nodes.memory_bytes * (1.0 + ROUNDING) - np.bincount(placed.node, weights=memory, minlength=len(nodes))
    starts = np.searchsorted(placed.gang, np.arange(len(gangs) + 1))
    for gang in largest_first(gangs, demand).tolist():
        rows = slice(int(starts[gang]), int(starts[gang + 1]))
        on = placed.node[rows]
        if np.all(more_cores[rows] <= free_cores[on]) and np.all(more_memory[rows] <= free_memory[on]):
            free_cores[on] -= more_cores[rows]
            free_memory[on] -= more_memory[rows]
            cores[rows], memory[rows] = wanted_cores[rows], wanted_memory[rows]
    return placed.given(cores, memory)


SYNERGY_TUNE = Tuning("synergy-tune", tune, place)


def place_greedily(gangs: Gangs, nodes: TuningNodes) -> Pieces:
    """Place each gang, in the policy's order, on the first node that holds its whole demand of GPUs, cores and memory.

    A gang without such a node waits. This leaves GPUs idle beside gangs of large demand and guarantees nothing.
    """
    demand = demands(gangs, nodes)
    packing = RoundPacking(gangs, nodes)
    for gang, (cores, memory) in enumerate(zip(demand.cores.tolist(), demand.memory_bytes.tolist(), strict=True)):
        where = packing.first(gang, cores, memory)
        if where is not None:
            packing.take(gang, where, cores, memory)
    return packing.placed()


def tune_greedily(gangs: Gangs, nodes: TuningNodes, placed: Pieces) -> Pieces:
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


SYNERGY_GREEDY = Tuning("synergy-greedy", tune_greedily, place_greedily)
