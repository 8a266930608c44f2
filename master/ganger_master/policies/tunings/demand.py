"""What a gang asks of each GPU's cores and memory to run as fast as it can (Synergy, OSDI 2022, section 4.2): the
smallest amounts with which it reaches its best rate on as few nodes as can hold it.

The demand of a gang is chosen so that cutting it back to its share, one resource or both, never leaves it slower than
its whole share would: that is what the guarantee of Synergy rests on when a peer is cut.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ganger_master.policies.job_facts import Flags, Floats, Integers
from ganger_master.policies.tunings import ROUNDING, Gangs, Profiles, TuningNodes

# A rate this close to the best is the best: measured rates are not smooth to the last percent.
ENOUGH = 0.99


@dataclass(frozen=True, slots=True, eq=False)
class TuningDemand:
    """For each GPU of each gang."""

    cores: Floats
    memory_bytes: Floats

    def take(self, gangs: Integers) -> TuningDemand:
        """Of those at these positions."""
        return TuningDemand(self.cores[gangs], self.memory_bytes[gangs])


def demands(gangs: Gangs, nodes: TuningNodes) -> TuningDemand:
    """Of every gang: of all amounts that fit its fewest nodes, the fewest cores and then the least memory that reach
    `ENOUGH` of the best rate there, and with which no share of any node is a loss. One look for all sizes of gang
    that could get as much."""
    cores, memory = np.zeros(len(gangs)), np.zeros(len(gangs))
    shares = _Shares.of(gangs.profiles, nodes)
    sizes, size = np.unique(gangs.gpus, return_inverse=True)
    most = [limits(gpus, nodes) for gpus in sizes.tolist()]
    for limit in sorted(set(most)):
        alike = np.flatnonzero(np.array([own == limit for own in most])[size])
        known, profile = np.unique(gangs.profile[alike], return_inverse=True)
        found = _demand(gangs.profiles, known, shares, *limit)
        cores[alike], memory[alike] = found.cores[profile], found.memory_bytes[profile]
    return TuningDemand(cores, memory)


def limits(gpus: int, nodes: TuningNodes) -> tuple[float, float]:
    """The most cores and bytes for each GPU that the best of the fewest nodes could give."""
    together = np.minimum(np.maximum(nodes.gpus, 1), gpus)
    fewest = together == together.max(initial=1)
    return (
        float(np.max(nodes.cores[fewest] / together[fewest], initial=0.0)),
        float(np.max(nodes.memory_bytes[fewest] / together[fewest], initial=0.0)),
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Shares:
    """Proportional shares of nodes with GPUs: every amount there is, and the pairs at which a cut must be no loss for
    it to be none at any."""

    all_cores: Floats
    all_memory: Floats
    cores: Floats
    memory_bytes: Floats

    @classmethod
    def of(cls, profiles: Profiles, nodes: TuningNodes) -> _Shares:
        has_gpus = nodes.gpus > 0
        cores, memory = nodes.share_cores[has_gpus], nodes.share_memory[has_gpus]
        column = np.searchsorted(profiles.memory_bytes, memory * (1.0 + ROUNDING), side="right")
        measured, below = np.flatnonzero(column), np.flatnonzero(column == 0)
        ends = measured[_ends(cores[measured], np.searchsorted(profiles.cores, cores[measured]), column[measured])]
        binding = np.concatenate([ends, below[_front(cores[below], memory[below])]])
        return cls(np.unique(cores), np.unique(memory), cores[binding], memory[binding])


def _ends(cores: Floats, line: Integers, column: Integers) -> Integers:
    """Positions of the fewest and the most cores of each line and column. Rates of a column are straight between
    measured cores, so a gang with c cores that loses nothing at both ends loses nothing between: to have as much with c
    as the most cores would make, it must lose nothing at c itself."""
    order = np.lexsort((cores, line, column))
    differs = (np.diff(line[order]) != 0) | (np.diff(column[order]) != 0)
    is_end = np.ones(len(order), bool)
    is_end[1:-1] = differs[1:] | differs[:-1]
    found: Integers = order[is_end]
    return found


def _front(cores: Floats, memory: Floats) -> Integers:
    """Positions of those of which no other has as many cores and as much memory. Below the least measured amount a rate
    is a part for the memory times one for the cores, and the larger the share, the more of both a cut takes."""
    order = np.lexsort((-memory, -cores))
    most_before = np.maximum.accumulate(np.concatenate([[-1.0], memory[order]]))[:-1]
    found: Integers = order[memory[order] > most_before]
    return found


def _demand(
    profiles: Profiles, known: Integers, shares: _Shares, most_cores: float, most_memory: float
) -> TuningDemand:
    cores = _axis(profiles.cores, shares.all_cores, most_cores)
    memory = _axis(profiles.memory_bytes, shares.all_memory, most_memory)
    if not len(cores) or not len(memory):
        return TuningDemand(np.zeros(len(known)), np.zeros(len(known)))
    wanted = ENOUGH * profiles.at(known, cores[-1], memory[-1])
    floors = profiles.at(known[:, None], shares.cores, shares.memory_bytes) * (1.0 - ROUNDING)

    def is_enough(some: Floats, much: Floats) -> Flags:
        cut_cores, cut_memory = np.minimum(some[:, None], shares.cores), np.minimum(much[:, None], shares.memory_bytes)
        no_loss = (profiles.at(known[:, None], cut_cores, cut_memory) >= floors).all(axis=1)
        return (profiles.at(known, some, much) >= wanted) & no_loss

    # Rates never fall, so what is enough stays enough with more of either.
    fewest = _first(len(known), cores, lambda some: is_enough(some, np.full(len(known), memory[-1])))
    return TuningDemand(fewest, _first(len(known), memory, lambda much: is_enough(fewest, much)))


def _first(count: int, axis: Floats, is_enough: Callable[[Floats], Flags]) -> Floats:
    """For each of so many the least amount of the axis that is enough, as are all above it and the last."""
    low, high = np.zeros(count, np.int64), np.full(count, len(axis) - 1)
    while (low < high).any():
        middle = (low + high) // 2
        enough = is_enough(axis[middle])
        low, high = np.where(enough, low, middle + 1), np.where(enough, middle, high)
    found: Floats = axis[high]
    return found


def _axis(grid: Floats, shares: Floats, most: float) -> Floats:
    """Where to look: measured amounts, shares, and the most that is there."""
    most = max(most, float(shares.max(initial=0.0)))
    points = np.unique(np.concatenate([grid, shares, [most]]))
    return points[(points > 0.0) & (points <= most * (1.0 + ROUNDING))]
