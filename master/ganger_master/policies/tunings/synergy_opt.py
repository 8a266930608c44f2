"""Synergy-OPT (OSDI 2022, section 4.3): the amounts by an integer program over one super-machine that has all the
cluster's cores and memory (LP-1), the nodes by a second program (LP-2) whose solution splits few gangs, and those
rounded.

The relaxed first program bounds what any packing can reach: `upper_bound`, against which Synergy-Tune is measured. Both
are solved by HiGHS. The first grows with the kinds of gangs only; the second with gangs x nodes, so this is a yardstick
for up to some hundreds of each, not a policy for large clusters.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ganger_master.policies.job_facts import Floats, Integers
from ganger_master.policies.tunings import ROUNDING, Gangs, Pieces, Tuning, TuningNodes, runnable
from ganger_master.policies.tunings.demand import AmountOptions, TuningDemand, limits, options
from ganger_master.policies.tunings.round_packing import RoundPacking
from ganger_master.policies.tunings.synergy_tune import largest_first, raised, settle

# Pairs of gang and node that the second program may have: a few seconds of HiGHS.
MOST_PAIRS = 100_000
# The integer program stops this close to its bound, relative.
_GAP = 1e-4
# A gang of which this part lies on one node lies there.
_WHOLE = 1.0 - 1e-6


@dataclass(frozen=True, slots=True, eq=False)
class _Kind:
    """Gangs alike in all that the first program sees."""

    gangs: Integers
    gpus: int
    weight: float
    options: AmountOptions


def upper_bound(gangs: Gangs, nodes: TuningNodes) -> float:
    """The most that the weighted rates of all gangs, each relative to its share of the super-machine, can add up to:
    LP-1 with fractions allowed. Valid for every packing of all of them, whole or split, in which none falls below that
    share. A packing that leaves gangs out may reach more with the others."""
    kinds = _kinds(gangs, nodes, is_placeable=False)
    return _super_machine(kinds, nodes, is_integer=False)[1] if kinds else 0.0


def best_amounts(gangs: Gangs, nodes: TuningNodes, is_integer: bool = True) -> TuningDemand:
    """For each GPU of each gang by LP-1, one choice per gang; no more than its fewest nodes could give it. Not
    `is_integer`: the few that the relaxed program mixes are rounded, which may ask for a little more than there is."""
    cores, memory = np.zeros(len(gangs)), np.zeros(len(gangs))
    kinds = _kinds(gangs, nodes, is_placeable=True)
    if kinds:
        counts, _ = _super_machine(kinds, nodes, is_integer)
        for kind, count in zip(kinds, counts, strict=True):
            choice = np.searchsorted(np.cumsum(count), np.arange(len(kind.gangs)) + 0.5)
            choice = np.minimum(choice, len(kind.options) - 1)
            cores[kind.gangs], memory[kind.gangs] = kind.options.cores[choice], kind.options.memory_bytes[choice]
    return TuningDemand(cores, memory)


def place(gangs: Gangs, nodes: TuningNodes) -> Pieces:
    """The runnable gangs. ValueError where that is too much to solve."""
    if len(gangs) * len(nodes) > MOST_PAIRS:
        raise ValueError(f"{len(gangs)} gangs on {len(nodes)} nodes are more than {MOST_PAIRS} pairs; use synergy-tune")
    running = runnable(gangs, nodes)
    of_round = gangs.take(running)
    wanted = best_amounts(of_round, nodes)
    packing = RoundPacking(of_round, nodes)
    left = []
    on = _nodes_of(of_round, nodes, wanted)
    for gang in largest_first(of_round, wanted).tolist():
        node = int(on[gang])
        cores, memory = float(wanted.cores[gang]), float(wanted.memory_bytes[gang])
        # amounts of LP-2 fit together up to rounding, so one look is enough
        if node >= 0 and packing.usable(cores, memory, int(of_round.gpus[gang]))[node] >= of_round.gpus[gang]:
            packing.take(gang, [(node, int(of_round.gpus[gang]))], cores, memory)
        else:
            left.append(gang)
    # Synergy rounds what is split to slices of a GPU each; ours go as in Tune, on few nodes and never below the share
    for gang in left:
        settle(packing, gang, float(wanted.cores[gang]), float(wanted.memory_bytes[gang]))
    placed = packing.placed()
    return placed.of(running[placed.gang])


def tune(gangs: Gangs, nodes: TuningNodes, placed: Pieces) -> Pieces:
    """Where others placed: the amounts of LP-1 for those gangs, as far as their nodes have them."""
    present = np.unique(placed.gang)
    of_present = best_amounts(gangs.take(present), nodes)
    wanted = TuningDemand(np.zeros(len(gangs)), np.zeros(len(gangs)))
    wanted.cores[present], wanted.memory_bytes[present] = of_present.cores, of_present.memory_bytes
    return raised(gangs, nodes, placed, wanted)


def _kinds(gangs: Gangs, nodes: TuningNodes, is_placeable: bool) -> list[_Kind]:
    total_gpus = max(1, int(nodes.gpus.sum()))
    share = float(nodes.cores.sum()) / total_gpus, float(nodes.memory_bytes.sum()) / total_gpus
    columns = np.stack([gangs.profile.astype(float), gangs.gpus.astype(float), gangs.weight], axis=1)
    found, which = np.unique(columns, axis=0, return_inverse=True)
    kinds = []
    for number, (profile, gpus, weight) in enumerate(found.tolist()):
        most = limits(int(gpus), nodes) if is_placeable else (np.inf, np.inf)
        kinds.append(
            _Kind(
                np.flatnonzero(which.ravel() == number),
                int(gpus),
                weight,
                options(gangs.profiles, int(profile), *share, *most, is_cuttable=is_placeable),
            )
        )
    return kinds


def _super_machine(kinds: list[_Kind], nodes: TuningNodes, is_integer: bool) -> tuple[list[Floats], float]:
    """LP-1: how many gangs of each kind take each option, and what all are worth. All gangs of a kind are one row."""
    rows = np.repeat(np.arange(len(kinds)), [len(kind.options) for kind in kinds])
    gpus = np.array([kind.gpus for kind in kinds], float)[rows]
    cores = gpus * np.concatenate([kind.options.cores for kind in kinds])
    memory = gpus * np.concatenate([kind.options.memory_bytes for kind in kinds])
    value = np.concatenate([kind.weight * kind.options.value for kind in kinds])
    # Imported on demand: loading SciPy takes half a second.
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_array

    each = csr_array((np.ones(len(rows)), (rows, np.arange(len(rows)))))
    counts = np.array([len(kind.gangs) for kind in kinds], float)
    total = np.array([nodes.cores.sum(), nodes.memory_bytes.sum()])
    scale = np.maximum(total, 1e-9)
    found = milp(
        -value,
        constraints=[
            LinearConstraint(each, counts, counts),
            LinearConstraint(np.stack([cores, memory]) / scale[:, None], -np.inf, 1.0 + ROUNDING),
        ],
        bounds=Bounds(0.0, np.inf),
        integrality=np.full(len(rows), int(is_integer)),
        options={"mip_rel_gap": _GAP},
    )
    if found.x is None:
        raise ValueError("the gangs need more than the nodes have even at their proportional shares")
    taken = np.asarray(found.x, float)
    return [taken[rows == kind] for kind in range(len(kinds))], float(value @ taken)


def _nodes_of(gangs: Gangs, nodes: TuningNodes, wanted: TuningDemand) -> Integers:
    """LP-2: the node of each gang that a vertex of the program puts on one node whole; -1 for those it splits."""
    if not len(gangs) or not len(nodes):
        return np.full(len(gangs), -1)
    jobs, places = len(gangs), len(nodes)
    job = np.repeat(np.arange(jobs), places)
    place = np.tile(np.arange(places), jobs)
    pair = np.arange(jobs * places)
    # per gang at most one; per node GPUs, cores and memory
    data: list[Floats] = [np.ones(jobs * places)]
    row, column, limit = [job], [pair], [np.ones(jobs)]
    for number, (each, capacity) in enumerate(
        ((np.ones(jobs), nodes.gpus), (wanted.cores, nodes.cores), (wanted.memory_bytes, nodes.memory_bytes))
    ):
        scale = max(float(np.max(capacity)), 1e-9)
        data.append(np.asarray((gangs.gpus * each)[job] / scale, float))
        row.append(jobs + number * places + place)
        column.append(pair)
        limit.append(np.asarray(capacity / scale, float))
    # Imported on demand, as above.
    from scipy.optimize import linprog
    from scipy.sparse import coo_array

    matrix = coo_array((np.concatenate(data), (np.concatenate(row), np.concatenate(column)))).tocsr()
    found = linprog(-gangs.gpus[job].astype(float), A_ub=matrix, b_ub=np.concatenate(limit), method="highs-ds")
    assert found.x is not None, "nothing placed at all is always allowed"
    parts = np.asarray(found.x, float).reshape(jobs, places)
    return np.where(parts.max(axis=1) >= _WHOLE, parts.argmax(axis=1), -1)


SYNERGY_OPT = Tuning("synergy-opt", tune, place)
