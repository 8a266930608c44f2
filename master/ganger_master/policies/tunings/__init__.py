"""Cores and memory of gangs: one file per tuning, each a pure function over arrays.

Two questions, since a policy may place first and tune then, or do both at once:

* `Tuning.tune(gangs, nodes, pieces)`: the GPUs are placed; how much of each node's cores and memory goes to each piece.
* `Tuning.place(gangs, nodes)`: where the gangs go and with how much, gangs given in the order of the policy. Gangs that
  are not in the answer find no place this round. None: the tuning only follows where others place.

A gang's proportional share is that of the node it lies on: as large a part of cores and memory as of the GPUs given. A
rate is of one GPU, in any unit per second; a gang steps together, so it runs at the rate of its slowest piece.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from ganger_master.estimators.cpu_design import SensitivityMatrix
from ganger_master.policies.job_facts import Flags, Floats, Integers
from ganger_master.policies.selection import chosen

# Sums of shares may miss the whole by rounding, and amounts their grid: relative.
ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, eq=False)
class Profiles:
    """What cores and memory do to a rate: `rates[k, i, j]` is that of one GPU of profile k with `cores[i]` cores and
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
        """The rates with these amounts for each GPU; the three arrays broadcast. As `SensitivityMatrix.rate`: a line
        between measured cores, towards none down to zero; memory counts as the largest measured amount that is there,
        below the least in proportion."""
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
    """Profiles from matrices, on all amounts that any of them measured."""
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
    # What its rate, relative to that of its proportional share, counts where gangs compete.
    weight: Floats
    # Runs on one node or not at all.
    is_local: Flags

    def __len__(self) -> int:
        return len(self.gpus)

    def take(self, gangs: Integers) -> Gangs:
        """Those at these positions."""
        return Gangs(self.gpus[gangs], self.profile[gangs], self.profiles, self.weight[gangs], self.is_local[gangs])


def gangs(
    gpus: Sequence[int] | Integers,
    profile: Sequence[int] | Integers,
    profiles: Profiles,
    weight: Sequence[float] | Floats | None = None,
    is_local: Sequence[bool] | Flags | None = None,
) -> Gangs:
    """Each counts one and may be split, unless told."""
    counts = np.asarray(gpus, np.int64)
    if np.any(counts < 1):
        raise ValueError("a gang that is tuned holds at least one GPU")
    return Gangs(
        counts,
        np.asarray(profile, np.int64),
        profiles,
        np.ones(len(counts)) if weight is None else np.asarray(weight, float),
        np.zeros(len(counts), bool) if is_local is None else np.asarray(is_local, bool),
    )


@dataclass(frozen=True, slots=True, eq=False)
class TuningNodes:
    """What of each node is handed out here: whole nodes, or what others leave of them."""

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
        """The same places with other amounts."""
        return replace(self, cores=np.asarray(cores, float), memory_bytes=np.asarray(memory_bytes, float))

    def of(self, gang: Integers) -> Pieces:
        """The same rows under other numbers of their gangs, which must ascend as theirs do."""
        return replace(self, gang=gang)

    def only(self, rows: Flags) -> Pieces:
        """The rows where this mask is true."""
        return Pieces(**{column.name: getattr(self, column.name)[rows] for column in fields(self)})


def pieces(
    gang: Sequence[int] | Integers,
    node: Sequence[int] | Integers,
    gpus: Sequence[int] | Integers,
    parameter_servers: Sequence[int] | Integers | None = None,
) -> Pieces:
    """Placed, not tuned yet: no cores and no memory."""
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
    """Of one GPU of each gang: what its slowest piece makes; zero for gangs without a piece."""
    of_piece = gangs.profiles.at(
        gangs.profile[placed.gang], placed.cores / placed.gpus, placed.memory_bytes / placed.gpus
    )
    found = np.full(len(gangs), np.inf)
    np.minimum.at(found, placed.gang, of_piece)
    return np.where(np.isinf(found), 0.0, found)


def proportional_rates(gangs: Gangs, nodes: TuningNodes, placed: Pieces) -> Floats:
    """What `rates` would say if every piece had its proportional share."""
    return rates(gangs, proportionally(nodes, placed))


def proportionally(nodes: TuningNodes, placed: Pieces) -> Pieces:
    """Every piece with as large a part of its node's cores and memory as of its GPUs."""
    return placed.given(placed.gpus * nodes.share_cores[placed.node], placed.gpus * nodes.share_memory[placed.node])


@dataclass(frozen=True, slots=True)
class Tuning:
    """A division of cores and memory. `by_profiles`: it uses the rate of each gang as a function of these."""

    name: str
    tune: Callable[[Gangs, TuningNodes, Pieces], Pieces]
    place: Callable[[Gangs, TuningNodes], Pieces] | None = None
    by_profiles: bool = True
