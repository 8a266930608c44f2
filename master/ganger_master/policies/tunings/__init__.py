"""Cores and memory of gangs: what a tuning is, a pure function over arrays, and what gangs demand.

A rate is of one GPU, in any unit per second; a gang runs at the rate of its slowest piece. Its proportional share is as
large a part of its node's cores and memory as of the GPUs. A demand (Synergy, OSDI 2022, section 4.2) is the smallest
amount with which a gang reaches its best rate on the fewest nodes that hold it, such that cutting it back to the share,
in one resource or both, never makes the gang slower than its whole share would.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
from ganger.cluster.resources import GangShape

from ganger_master.estimators.cores_and_memory import SensitivityMatrix
from ganger_master.policies.orders import Flags, Floats, Integers, chosen

# Sums of shares may miss the whole by rounding, and amounts their grid: relative.
ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, eq=False)
class Profiles:
    """Rates by cores and memory: `rates[k, i, j]` is that of one GPU of profile k with `cores[i]` cores and
    `memory_bytes[j]` bytes for it. Both axes ascend from above zero; rates never fall along them."""

    cores: Floats
    memory_bytes: Floats
    rates: Floats

    def __post_init__(self) -> None:
        if self.rates.ndim != 3 or self.rates.shape[1:] != (len(self.cores), len(self.memory_bytes)):
            raise ValueError(
                f"rates of shape {self.rates.shape} need (profiles, {len(self.cores)}, {len(self.memory_bytes)})"
            )
        for axis in (self.cores, self.memory_bytes):
            if not len(axis) or not axis[0] > 0.0 or np.any(np.diff(axis) <= 0.0):
                raise ValueError("the axes of profiles must ascend from above zero")
        if np.any(np.diff(self.rates, axis=1) < 0.0) or np.any(np.diff(self.rates, axis=2) < 0.0):
            raise ValueError("rates must not fall with cores or memory; make them non-falling first")

    def at(self, profile: Integers, cores: Floats, memory_bytes: Floats) -> Floats:
        """Return the rates with these amounts for each GPU; the three arrays broadcast. As `SensitivityMatrix.rate`: a
        line between measured cores, towards none down to zero; memory counts as the largest measured amount that is
        there, below the least in proportion."""
        column = np.searchsorted(self.memory_bytes, memory_bytes * (1.0 + ROUNDING), side="right") - 1
        share = np.where(column >= 0, 1.0, np.clip(memory_bytes / self.memory_bytes[0], 0.0, 1.0))
        column = np.maximum(column, 0)
        above = np.searchsorted(self.cores, cores, side="left")
        high = np.minimum(above, len(self.cores) - 1)
        low = np.maximum(high - 1, 0)
        low_cores = np.where(high > 0, self.cores[low], 0.0)
        low_rate = np.where(high > 0, self.rates[profile, low, column], 0.0)
        part = np.clip((cores - low_cores) / (self.cores[high] - low_cores), 0.0, 1.0)
        return np.asarray(share * (low_rate + part * (self.rates[profile, high, column] - low_rate)), float)


def sampled(
    rates: Sequence[Callable[[float, float], float]], cores: Sequence[float], memory_bytes: Sequence[float]
) -> Profiles:
    """Return profiles from functions of (cores, memory bytes) for one GPU, read at the points of a grid. Where a rate
    falls with more of either it is made flat: a gang need not use what it is given."""
    table = np.array([[[rate(c, m) for m in memory_bytes] for c in cores] for rate in rates], float)
    table = table.reshape(len(rates), len(cores), len(memory_bytes))
    rising = np.maximum.accumulate(np.maximum.accumulate(table, axis=1), axis=2)
    return Profiles(np.array(cores, float), np.array(memory_bytes, float), rising)


def profiles_of(matrices: Sequence[SensitivityMatrix]) -> Profiles:
    """Return profiles from matrices, on all amounts that any of them measured."""
    cores = sorted({count for matrix in matrices for count in matrix.cores})
    memory = sorted({amount for matrix in matrices for amount in matrix.memory_bytes})
    return sampled([matrix.rate for matrix in matrices], cores, memory)


@dataclass(frozen=True, slots=True, eq=False)
class Gangs:
    """One entry per gang, in the order of the policy."""

    # At least one.
    gpus: Integers
    # Position in `profiles`.
    profile: Integers
    profiles: Profiles
    # Runs on one node or not at all.
    is_local: Flags

    def __len__(self) -> int:
        return len(self.gpus)

    def take(self, gangs: Integers) -> Gangs:
        """Return the gangs at these positions."""
        return Gangs(self.gpus[gangs], self.profile[gangs], self.profiles, self.is_local[gangs])


def gangs(
    gpus: Sequence[int] | Integers,
    profile: Sequence[int] | Integers,
    profiles: Profiles,
    is_local: Sequence[bool] | Flags | None = None,
) -> Gangs:
    """Return `Gangs`. Without `is_local` each may be split."""
    counts = np.asarray(gpus, np.int64)
    if np.any(counts < 1):
        raise ValueError("a gang that is tuned holds at least one GPU")
    return Gangs(
        counts,
        np.asarray(profile, np.int64),
        profiles,
        np.zeros(len(counts), bool) if is_local is None else np.asarray(is_local, bool),
    )


@dataclass(frozen=True, slots=True, eq=False)
class TuningNodes:
    """The part of each node that is divided here: all of it, or what other gangs leave."""

    gpus: Integers
    cores: Floats
    memory_bytes: Floats

    def __len__(self) -> int:
        return len(self.gpus)

    @property
    def share_cores(self) -> Floats:
        """Cores for each GPU."""
        return self.cores / np.maximum(self.gpus, 1)

    @property
    def share_memory(self) -> Floats:
        """Bytes for each GPU."""
        return self.memory_bytes / np.maximum(self.gpus, 1)


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """One row per gang and node it lies on, by gang and then by node; amounts are of the whole piece."""

    gang: Integers
    node: Integers
    gpus: Integers
    cores: Floats
    memory_bytes: Floats
    # Parameter servers that stand there beside the workers.
    parameter_servers: Integers

    def __len__(self) -> int:
        return len(self.gang)

    def given(self, cores: Floats, memory_bytes: Floats) -> Pieces:
        """Return the same places with other amounts."""
        return replace(self, cores=np.asarray(cores, float), memory_bytes=np.asarray(memory_bytes, float))

    def of(self, gang: Integers) -> Pieces:
        """Return the same rows under other numbers of their gangs, which must ascend as theirs do."""
        return replace(self, gang=gang)

    def only(self, rows: Flags) -> Pieces:
        """Return the rows where this mask is true."""
        return Pieces(**{column.name: getattr(self, column.name)[rows] for column in fields(self)})


def pieces(
    gang: Sequence[int] | Integers,
    node: Sequence[int] | Integers,
    gpus: Sequence[int] | Integers,
    parameter_servers: Sequence[int] | Integers | None = None,
) -> Pieces:
    """Return pieces that are placed but not tuned: they have no cores and no memory."""
    order = np.lexsort((np.asarray(node, np.int64), np.asarray(gang, np.int64)))
    servers = np.zeros(len(order), np.int64) if parameter_servers is None else np.asarray(parameter_servers, np.int64)
    nothing = np.zeros(len(order))
    return Pieces(
        np.asarray(gang, np.int64)[order],
        np.asarray(node, np.int64)[order],
        np.asarray(gpus, np.int64)[order],
        nothing,
        nothing,
        servers[order],
    )


def runnable(gangs: Gangs, nodes: TuningNodes) -> Integers:
    """Return the positions, ascending, of the first gangs in order whose GPUs fit together; others are skipped. Only
    GPUs count (Synergy, OSDI 2022, section 4.2), so that no GPU is idle for want of cores or memory."""
    return np.sort(chosen(np.arange(len(gangs)), gangs.gpus, int(nodes.gpus.sum())))


def rates(gangs: Gangs, placed: Pieces) -> Floats:
    """Return the rate of one GPU of each gang in its slowest piece; zero for gangs without a piece."""
    of_piece = gangs.profiles.at(
        gangs.profile[placed.gang], placed.cores / placed.gpus, placed.memory_bytes / placed.gpus
    )
    found = np.full(len(gangs), np.inf)
    np.minimum.at(found, placed.gang, of_piece)
    return np.where(np.isinf(found), 0.0, found)


def proportionally(nodes: TuningNodes, placed: Pieces) -> Pieces:
    """Return every piece with as large a part of its node's cores and memory as of its GPUs."""
    return placed.given(placed.gpus * nodes.share_cores[placed.node], placed.gpus * nodes.share_memory[placed.node])


@dataclass(frozen=True, slots=True)
class Tuning:
    """A division of cores and memory. `by_profiles`: it uses the rate of each gang as a function of these;
    `keeps_requests`: a job that names its cores has exactly these, else they are a wish."""

    name: str
    tune: Callable[[Gangs, TuningNodes, Pieces], Pieces]
    place: Callable[[Gangs, TuningNodes], Pieces] | None = None
    by_profiles: bool = True
    keeps_requests: bool = False

    def decides_cores_of(self, shape: GangShape) -> bool:
        """Return whether the division covers the cores of a gang."""
        return not (self.keeps_requests and any(role.shape.millicores for role in shape.roles))


# A rate this close to the best is the best: measured rates are not smooth to the last percent.
ENOUGH = 0.99


@dataclass(frozen=True, slots=True, eq=False)
class TuningDemand:
    """Cores and bytes for each GPU of each gang."""

    cores: Floats
    memory_bytes: Floats

    def take(self, gangs: Integers) -> TuningDemand:
        """Return the demand of the gangs at these positions."""
        return TuningDemand(self.cores[gangs], self.memory_bytes[gangs])


def demands(gangs: Gangs, nodes: TuningNodes) -> TuningDemand:
    """Return for each gang the fewest cores, and then the least memory, that reach `ENOUGH` of its best rate. Only
    amounts count that fit its fewest nodes, and with which no share of any node is a loss. Sizes of gangs with the same
    limits are searched together."""
    cores, memory = np.zeros(len(gangs)), np.zeros(len(gangs))
    has_gpus = nodes.gpus > 0
    shares = nodes.share_cores[has_gpus], nodes.share_memory[has_gpus]
    binding = _binding(gangs.profiles, *shares)
    sizes, size = np.unique(gangs.gpus, return_inverse=True)
    most = [limits(gpus, nodes) for gpus in sizes.tolist()]
    for limit in sorted(set(most)):
        alike = np.flatnonzero(np.array([own == limit for own in most])[size])
        known, profile = np.unique(gangs.profile[alike], return_inverse=True)
        found = _demand(gangs.profiles, known, shares, binding, limit)
        cores[alike], memory[alike] = found.cores[profile], found.memory_bytes[profile]
    return TuningDemand(cores, memory)


def _binding(profiles: Profiles, cores: Floats, memory: Floats) -> Integers:
    """Return the positions of the shares of nodes at which a cut must be no loss for it to be none at any: on large
    clusters nearly every node has a share of its own."""
    column = np.searchsorted(profiles.memory_bytes, memory * (1.0 + ROUNDING), side="right")
    known, below = np.flatnonzero(column), np.flatnonzero(column == 0)
    ends = known[_ends(cores[known], np.searchsorted(profiles.cores, cores[known]), column[known])]
    return np.concatenate([ends, below[_front(cores[below], memory[below])]])


def _ends(cores: Floats, line: Integers, column: Integers) -> Integers:
    """Return the positions of the fewest and the most cores of each line and column. Rates of a column are straight
    between measured cores, so a gang with c cores that loses nothing at both ends loses nothing between: to have as
    much with c as the most cores would make, it must lose nothing at c itself."""
    order = np.lexsort((cores, line, column))
    differs = (np.diff(line[order]) != 0) | (np.diff(column[order]) != 0)
    is_end = np.ones(len(order), bool)
    is_end[1:-1] = differs[1:] | differs[:-1]
    found: Integers = order[is_end]
    return found


def _front(cores: Floats, memory: Floats) -> Integers:
    """Return the positions of shares that no other share equals or exceeds in both cores and memory. Below the least
    measured amount a rate is a part for the memory times one for the cores, and the larger the share, the more of both
    a cut takes."""
    order = np.lexsort((-memory, -cores))
    most_before = np.maximum.accumulate(np.concatenate([[-1.0], memory[order]]))[:-1]
    found: Integers = order[memory[order] > most_before]
    return found


def _demand(
    profiles: Profiles, known: Integers, shares: tuple[Floats, Floats], binding: Integers, most: tuple[float, float]
) -> TuningDemand:
    share_cores, share_memory = shares
    cores = _axis(profiles.cores, np.unique(share_cores), most[0])
    memory = _axis(profiles.memory_bytes, np.unique(share_memory), most[1])
    share_cores, share_memory = share_cores[binding], share_memory[binding]
    if not len(cores) or not len(memory):
        return TuningDemand(np.zeros(len(known)), np.zeros(len(known)))
    wanted = ENOUGH * profiles.at(known, cores[-1], memory[-1])
    floors = profiles.at(known[:, None], share_cores, share_memory) * (1.0 - ROUNDING)

    def is_enough(some: Floats, much: Floats) -> Flags:
        cut_cores, cut_memory = np.minimum(some[:, None], share_cores), np.minimum(much[:, None], share_memory)
        no_loss = (profiles.at(known[:, None], cut_cores, cut_memory) >= floors).all(axis=1)
        return (profiles.at(known, some, much) >= wanted) & no_loss

    # Rates never fall, so what is enough stays enough with more of either.
    fewest = _first(len(known), cores, lambda some: is_enough(some, np.full(len(known), memory[-1])))
    return TuningDemand(fewest, _first(len(known), memory, lambda much: is_enough(fewest, much)))


def _first(count: int, axis: Floats, is_enough: Callable[[Floats], Flags]) -> Floats:
    """Return for each of `count` rows the least amount of the axis that is enough. All larger ones are, too."""
    low, high = np.zeros(count, np.int64), np.full(count, len(axis) - 1)
    while (low < high).any():
        middle = (low + high) // 2
        enough = is_enough(axis[middle])
        low, high = np.where(enough, low, middle + 1), np.where(enough, middle, high)
    return np.asarray(axis[high], float)


def _axis(grid: Floats, shares: Floats, most: float) -> Floats:
    most = max(most, float(shares.max(initial=0.0)))
    points = np.unique(np.concatenate([grid, shares, [most]]))
    return points[(points > 0.0) & (points <= most * (1.0 + ROUNDING))]


def limits(gpus: int, nodes: TuningNodes) -> tuple[float, float]:
    """Return the most cores and bytes for each GPU that the best of the fewest nodes could give."""
    on_one_node = np.minimum(np.maximum(nodes.gpus, 1), gpus)
    fewest = on_one_node == on_one_node.max(initial=1)
    return (
        float(np.max(nodes.cores[fewest] / on_one_node[fewest], initial=0.0)),
        float(np.max(nodes.memory_bytes[fewest] / on_one_node[fewest], initial=0.0)),
    )


@dataclass(frozen=True, slots=True, eq=False)
class Known:
    """Profiles of jobs. `position`: maps numbers of jobs to positions in `profiles`; -1: not measured yet.
    `knows_memory`: whether profiles cover memory, all of them or each. One that does not depends on cores alone, and
    its jobs use their share of memory fully and no more."""

    profiles: Profiles
    position: Callable[[Integers], Integers]
    knows_memory: bool | Flags = True

    def knows_memory_of(self, number: int) -> bool:
        """Return whether the profile of a job covers memory."""
        if isinstance(self.knows_memory, bool):
            return self.knows_memory
        at = int(self.position(np.array([number], np.int64))[0])
        return at >= 0 and bool(self.knows_memory[at])


NOTHING = Known(
    Profiles(np.ones(1), np.ones(1), np.ones((1, 1, 1))), lambda numbers: np.full(len(numbers), -1), knows_memory=False
)


def known_gangs(known: Known, numbers: Integers, gpus: Integers, is_local: Flags, nodes: TuningNodes) -> Gangs:
    """Return gangs by the numbers of their jobs. A job that is not measured uses its proportional share fully and no
    more, so that is what it is given."""
    position = known.position(numbers)
    profiles, knows = known.profiles, known.knows_memory
    if not isinstance(knows, bool) and not knows[position[position >= 0]].any():
        knows = False
    if knows is False:
        # All memory up to the largest share of any node.
        profiles = Profiles(profiles.cores, np.array([_share_of_memory(nodes)]), profiles.rates[:, :, -1:])
    elif knows is not True:
        profiles = _with_ramps(profiles, ~knows, nodes)
    if (position < 0).any():
        profiles = _with_shares(profiles, nodes)
        position = np.where(position < 0, len(profiles.rates) - 1, position)
    return gangs(gpus, position, profiles, is_local=is_local)


def _with_ramps(profiles: Profiles, is_unknown: Flags, nodes: TuningNodes) -> Profiles:
    """Return the profiles where those without memory rise up to the largest share of any node."""
    share = _share_of_memory(nodes)
    memory = np.unique(np.append(profiles.memory_bytes, share))
    count = np.arange(len(profiles.rates))
    rates = profiles.at(count[:, None, None], profiles.cores[None, :, None], memory[None, None, :])
    most = profiles.rates[is_unknown][:, :, -1:]
    rates[is_unknown] = most * np.minimum(memory / share, 1.0)
    return Profiles(profiles.cores, memory, rates)


def _with_shares(profiles: Profiles, nodes: TuningNodes) -> Profiles:
    """Return the profiles and, as the last, one more, which rises up to the largest share of any node."""
    has_gpus = nodes.gpus > 0
    share_cores = max(float(nodes.share_cores[has_gpus].max(initial=0.0)), ROUNDING)
    share_memory = _share_of_memory(nodes)
    cores = np.unique(np.append(profiles.cores, share_cores))
    memory = np.unique(np.append(profiles.memory_bytes, share_memory))
    rates = profiles.at(np.arange(len(profiles.rates))[:, None, None], cores[None, :, None], memory[None, None, :])
    of_cores = np.minimum(cores / share_cores, 1.0)
    unknown = of_cores[:, None] * np.minimum(memory / share_memory, 1.0)[None, :]
    return Profiles(cores, memory, np.concatenate([rates, unknown[None]]))


def _share_of_memory(nodes: TuningNodes) -> float:
    return max(float(nodes.share_memory[nodes.gpus > 0].max(initial=0.0)), 1.0)


@dataclass(frozen=True, slots=True, eq=False)
class AmountOptions:
    """Amounts for each GPU, by cores, then memory, ascending. `value`: the rate relative to that of the share."""

    cores: Floats
    memory_bytes: Floats
    value: Floats

    def __len__(self) -> int:
        return len(self.cores)


def options(
    profiles: Profiles,
    profile: int,
    share_cores: float,
    share_memory: float,
    most_cores: float = np.inf,
    most_memory: float = np.inf,
    is_cuttable: bool = False,
) -> AmountOptions:
    """Return the useful amounts among measured amounts, whole cores and the share, up to the most that is there (never
    less than the share). There is at least one: the cheapest that is as fast as the share. If the share runs nothing,
    every value is one. `is_cuttable`: only amounts that, with one resource or both cut to the share, stay as fast as
    it."""
    most_cores, most_memory = max(most_cores, share_cores), max(most_memory, share_memory)
    whole = np.arange(1.0, np.floor(min(most_cores, float(profiles.cores[-1]))) + 1.0)
    cores = _up_to(np.concatenate([profiles.cores, whole, [share_cores]]), most_cores)
    memory = _up_to(np.concatenate([profiles.memory_bytes, [share_memory]]), most_memory)
    which = np.array(profile)
    rates = profiles.at(which, cores[:, None], memory[None, :])
    floor = float(profiles.at(which, np.array(share_cores), np.array(share_memory)))
    values = rates / floor if floor > 0.0 else np.ones_like(rates)
    if is_cuttable:
        cut = profiles.at(which, np.minimum(cores, share_cores)[:, None], np.minimum(memory, share_memory)[None, :])
        values = np.where(cut >= floor * (1.0 - ROUNDING), values, 0.0)
    # faster than everything with no more of either
    best_before = np.maximum.accumulate(np.maximum.accumulate(values, axis=0), axis=1)
    padded = np.pad(best_before, ((1, 0), (1, 0)), constant_values=-np.inf)
    beaten_by = np.maximum(padded[:-1, 1:], padded[1:, :-1])
    kept = (values >= 1.0 - ROUNDING) & (values > beaten_by * (1.0 + ROUNDING))
    if not kept.any():
        kept[int(np.searchsorted(cores, share_cores)), int(np.searchsorted(memory, share_memory))] = True
    row, column = np.nonzero(kept)
    return AmountOptions(cores[row], memory[column], values[row, column])


def _up_to(points: Floats, most: float) -> Floats:
    found = np.unique(points)
    return found[found <= most * (1.0 + ROUNDING)]
