"""Synergy's tunings (Mohan et al., OSDI 2022), and the search for nodes while a round is packed from empty nodes.

**Synergy-OPT** (section 4.3): amounts by an integer program over one super-machine (LP-1), nodes by a second program
(LP-2) that splits few gangs. **Synergy-Tune** and **Synergy-Greedy** (sections 4.1 and 4.2): Tune gives every gang its
demand where it fits, else its share, and takes back from neighbours what they hold beyond theirs. So every gang whose
GPUs are free is placed, none runs slower than with its share, and no node gives more than it has.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from ganger_master.policies.orders import Floats, Integers
from ganger_master.policies.tunings import (
    ROUNDING,
    AmountOptions,
    Gangs,
    Pieces,
    Tuning,
    TuningDemand,
    TuningNodes,
    demands,
    limits,
    options,
    pieces,
    proportionally,
    runnable,
)

# (node, GPUs there) of a gang.
Where: TypeAlias = list[tuple[int, int]]
Amounts: TypeAlias = Floats | float


class RoundPacking:
    """Amounts are for each GPU of the gang in hand, one number or one for each node."""

    def __init__(self, gangs: Gangs, nodes: TuningNodes) -> None:
        self.gangs = gangs
        self.nodes = nodes
        self.free_gpus: Integers = nodes.gpus.copy()
        self.free_cores: Floats = nodes.cores.copy()
        self.free_memory: Floats = nodes.memory_bytes.copy()
        self.share_cores = nodes.share_cores
        self.share_memory = nodes.share_memory
        # By gang: where it lies, and what it holds for each GPU on each of these nodes.
        self.where: dict[int, Where] = {}
        self.held: dict[int, list[tuple[float, float]]] = {}
        self.residents: dict[int, list[int]] = {}
        # What rounding may hide.
        self._slack_cores = ROUNDING * float(nodes.cores.max(initial=1.0))
        self._slack_memory = ROUNDING * float(nodes.memory_bytes.max(initial=1.0))

    def usable(self, cores: Amounts, memory_bytes: Amounts, most: int) -> Integers:
        """Return how many GPUs of each node could be used with these amounts, up to `most`."""
        found = np.minimum(self.free_gpus, most)
        for free, wanted, slack in (
            (self.free_cores, cores, self._slack_cores),
            (self.free_memory, memory_bytes, self._slack_memory),
        ):
            if np.any(np.asarray(wanted) > 0.0):
                with np.errstate(divide="ignore"):
                    found = np.minimum(found, np.floor((free + slack) / wanted))
        return np.asarray(found, np.int64)

    def first(self, gang: int, cores: Amounts, memory_bytes: Amounts) -> Where | None:
        """Return the first node that holds all of it; else the first nodes that do, if it may be split."""
        gpus = int(self.gangs.gpus[gang])
        usable = self.usable(cores, memory_bytes, gpus)
        at = int(np.argmax(usable >= gpus)) if len(usable) else 0
        if len(usable) and usable[at] >= gpus:
            return [(at, gpus)]
        if self.gangs.is_local[gang]:
            return None
        total = np.cumsum(usable)
        if not len(usable) or total[-1] < gpus:
            return None
        last = int(np.searchsorted(total, gpus))
        found = [(int(node), int(usable[node])) for node in np.flatnonzero(usable[:last])]
        return [*found, (last, gpus - sum(count for _, count in found))]

    def tightest(self, gang: int, cores: Amounts, memory_bytes: Amounts, most_free_cores: bool = False) -> Where | None:
        """Return the node with the least free that holds all of it: GPUs, then cores, then memory. Else the fewest
        nodes that do, if it may be split: those that take most of it first, and for the rest the one with the least
        free. `most_free_cores`: of nodes with equally many free GPUs, rather the one with the most cores and memory."""
        gpus = int(self.gangs.gpus[gang])
        usable = self.usable(cores, memory_bytes, gpus)
        whole = np.flatnonzero(usable >= gpus)
        if len(whole):
            return [(self._least_free(whole, most_free_cores), gpus)]
        if self.gangs.is_local[gang] or int(usable.sum()) < gpus:
            return None
        found: Where = []
        left = gpus
        for count in range(int(usable.max()), 0, -1):
            if left > count:
                taken = np.flatnonzero(usable == count)[: (left - 1) // count]
                found += [(int(node), count) for node in taken]
                left -= count * len(taken)
                usable[taken] = 0
            if left <= count:
                rest = np.flatnonzero(usable >= left)
                if len(rest):
                    found.append((self._least_free(rest, most_free_cores), left))
                    left = 0
            if left == 0:
                break
        return sorted(found)

    def take(self, gang: int, where: Where, cores: Amounts, memory_bytes: Amounts) -> None:
        """Take amounts for a gang. A node may be left with less than nothing: `missing` returns how much."""
        each = [(_of(cores, node), _of(memory_bytes, node)) for node, _ in where]
        self.where[gang], self.held[gang] = where, each
        for (node, gpus), (some, much) in zip(where, each, strict=True):
            self.free_gpus[node] -= gpus
            self.free_cores[node] -= gpus * some
            self.free_memory[node] -= gpus * much
            self.residents.setdefault(node, []).append(gang)

    def missing(self, node: int) -> tuple[float, float]:
        """Return the cores and bytes that are held beyond what the node has."""
        cores, memory = -float(self.free_cores[node]), -float(self.free_memory[node])
        return (cores if cores > self._slack_cores else 0.0, memory if memory > self._slack_memory else 0.0)

    def excess(self, gang: int, node: int) -> tuple[float, float]:
        """Return the cores and bytes that it holds on the node beyond its proportional share."""
        at = [there for there, _ in self.where[gang]].index(node)
        gpus, (cores, memory) = self.where[gang][at][1], self.held[gang][at]
        over_cores = gpus * (cores - float(self.share_cores[node]))
        over_memory = gpus * (memory - float(self.share_memory[node]))
        return (
            over_cores if over_cores > self._slack_cores else 0.0,
            over_memory if over_memory > self._slack_memory else 0.0,
        )

    def cut_to_share(self, gang: int) -> None:
        """Give back what it holds beyond its proportional share on all its nodes."""
        for at, (node, gpus) in enumerate(self.where[gang]):
            cores, memory = self.held[gang][at]
            less = min(cores, float(self.share_cores[node])), min(memory, float(self.share_memory[node]))
            self.free_cores[node] += gpus * (cores - less[0])
            self.free_memory[node] += gpus * (memory - less[1])
            self.held[gang][at] = less

    def placed(self) -> Pieces:
        """Return the placed gangs with their amounts."""
        rows = [
            (gang, node, gpus, gpus * cores, gpus * memory)
            for gang in sorted(self.where)
            for (node, gpus), (cores, memory) in zip(self.where[gang], self.held[gang], strict=True)
        ]
        where = pieces([row[0] for row in rows], [row[1] for row in rows], [row[2] for row in rows])
        return where.given(np.array([row[3] for row in rows]), np.array([row[4] for row in rows]))

    def _least_free(self, among: Integers, most_free_cores: bool) -> int:
        for free, sign in (
            (self.free_gpus, 1),
            (self.free_cores, -1 if most_free_cores else 1),
            (self.free_memory, -1 if most_free_cores else 1),
        ):
            if len(among) == 1:
                break
            column = sign * free[among]
            among = among[column == column.min()]
        return int(among[0])


def _of(amounts: Amounts, node: int) -> float:
    return float(amounts) if isinstance(amounts, int | float) else float(amounts[node])


def place(gangs: Gangs, nodes: TuningNodes) -> Pieces:
    """Place the runnable gangs, largest first."""
    demand = demands(gangs, nodes)
    running = runnable(gangs, nodes)
    packing = RoundPacking(gangs, nodes)
    for place in largest_first(gangs.take(running), demand.take(running)).tolist():
        gang = int(running[place])
        settle(packing, gang, float(demand.cores[gang]), float(demand.memory_bytes[gang]))
    return packing.placed()


def largest_first(gangs: Gangs, demand: TuningDemand) -> Integers:
    """Return positions of gangs, largest first: by GPUs, then the gang's cores and memory. Ties keep their order."""
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

    def cut_order(gang: int) -> tuple[int, float, float, int]:
        at = [there for there, _ in packing.where[gang]].index(node)
        cores, memory = packing.held[gang][at]
        return (len(packing.where[gang]), -cores, -memory, gang)

    for peer in sorted(packing.residents[node], key=cut_order):
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
    """Return the result of `tune` with another demand for each gang."""
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
    A gang without such a node waits. This leaves GPUs idle beside gangs of large demand and guarantees nothing."""
    demand = demands(gangs, nodes)
    packing = RoundPacking(gangs, nodes)
    for gang, (cores, memory) in enumerate(zip(demand.cores.tolist(), demand.memory_bytes.tolist(), strict=True)):
        where = packing.first(gang, cores, memory)
        if where is not None:
            packing.take(gang, where, cores, memory)
    return packing.placed()


def tune_greedily(gangs: Gangs, nodes: TuningNodes, placed: Pieces) -> Pieces:
    """Give gangs in order their whole demand where it fits on all their nodes; leave out pieces of others."""
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


# Pairs of gang and node that the second program may have: a few seconds of HiGHS.
MOST_PAIRS = 100_000
# The integer program stops this close to its bound, relative.
_GAP = 1e-4
# A gang of which this part lies on one node lies there.
_WHOLE = 1.0 - 1e-6


@dataclass(frozen=True, slots=True, eq=False)
class _Kind:
    gangs: Integers
    gpus: int
    options: AmountOptions


def upper_bound(gangs: Gangs, nodes: TuningNodes) -> float:
    """Return the most that the rates of all gangs, each relative to its share of the super-machine, can add up
    to: LP-1 with fractions allowed. Valid for every packing of all of them, whole or split, in which none falls below
    that share. A packing that leaves gangs out may reach more with the others."""
    kinds = _kinds(gangs, nodes, is_placeable=False)
    return _super_machine(kinds, nodes, is_integer=False)[1] if kinds else 0.0


def best_amounts(gangs: Gangs, nodes: TuningNodes, is_integer: bool = True) -> TuningDemand:
    """Return the amounts for each GPU of each gang by LP-1: one choice per gang, at most what its fewest nodes could
    give. Without `is_integer`, the few gangs that the relaxed program mixes are rounded, so the sum may exceed the
    cluster a little."""
    cores, memory = np.zeros(len(gangs)), np.zeros(len(gangs))
    kinds = _kinds(gangs, nodes, is_placeable=True)
    if kinds:
        counts, _ = _super_machine(kinds, nodes, is_integer)
        for kind, count in zip(kinds, counts, strict=True):
            choice = np.searchsorted(np.cumsum(count), np.arange(len(kind.gangs)) + 0.5)
            choice = np.minimum(choice, len(kind.options) - 1)
            cores[kind.gangs], memory[kind.gangs] = kind.options.cores[choice], kind.options.memory_bytes[choice]
    return TuningDemand(cores, memory)


def place_optimally(gangs: Gangs, nodes: TuningNodes) -> Pieces:
    """Place the runnable gangs; as Synergy-Tune does where that is too much to solve, or where LP-2 would split gangs
    of one node, so that more GPUs would be idle."""
    running = runnable(gangs, nodes)
    if len(running) * len(nodes) > MOST_PAIRS:
        return place(gangs, nodes)
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
    if len(packing.where) < len(running) and (tuned := place(gangs, nodes)).gpus.sum() > placed.gpus.sum():
        return tuned
    return placed.of(running[placed.gang])


def tune_optimally(gangs: Gangs, nodes: TuningNodes, placed: Pieces) -> Pieces:
    """Give gangs that another placement placed the amounts of LP-1, as far as their nodes have them."""
    present = np.unique(placed.gang)
    of_present = best_amounts(gangs.take(present), nodes)
    wanted = TuningDemand(np.zeros(len(gangs)), np.zeros(len(gangs)))
    wanted.cores[present], wanted.memory_bytes[present] = of_present.cores, of_present.memory_bytes
    return raised(gangs, nodes, placed, wanted)


def _kinds(gangs: Gangs, nodes: TuningNodes, is_placeable: bool) -> list[_Kind]:
    total_gpus = max(1, int(nodes.gpus.sum()))
    share = float(nodes.cores.sum()) / total_gpus, float(nodes.memory_bytes.sum()) / total_gpus
    columns = np.stack([gangs.profile, gangs.gpus], axis=1)
    found, which = np.unique(columns, axis=0, return_inverse=True)
    kinds = []
    for number, (profile, gpus) in enumerate(found.tolist()):
        most = limits(gpus, nodes) if is_placeable else (np.inf, np.inf)
        kinds.append(
            _Kind(
                np.flatnonzero(which.ravel() == number),
                gpus,
                options(gangs.profiles, profile, *share, *most, is_cuttable=is_placeable),
            )
        )
    return kinds


def _super_machine(kinds: list[_Kind], nodes: TuningNodes, is_integer: bool) -> tuple[list[Floats], float]:
    """Solve LP-1: return how many gangs of each kind, one row each, take each option, and what all are worth."""
    rows = np.repeat(np.arange(len(kinds)), [len(kind.options) for kind in kinds])
    gpus = np.array([kind.gpus for kind in kinds], float)[rows]
    cores = gpus * np.concatenate([kind.options.cores for kind in kinds])
    memory = gpus * np.concatenate([kind.options.memory_bytes for kind in kinds])
    value = np.concatenate([kind.options.value for kind in kinds])
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
    """Solve LP-2: return the node of each gang that a vertex of the program puts on one node whole; -1 for others."""
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
    from scipy.optimize import linprog
    from scipy.sparse import coo_array

    matrix = coo_array((np.concatenate(data), (np.concatenate(row), np.concatenate(column)))).tocsr()
    found = linprog(-gangs.gpus[job].astype(float), A_ub=matrix, b_ub=np.concatenate(limit), method="highs-ds")
    assert found.x is not None, "nothing placed at all is always allowed"
    parts = np.asarray(found.x, float).reshape(jobs, places)
    return np.where(parts.max(axis=1) >= _WHOLE, parts.argmax(axis=1), -1)


SYNERGY_OPT = Tuning("synergy-opt", tune_optimally, place_optimally)
