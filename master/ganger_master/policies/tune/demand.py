"""What a gang asks of each GPU's cores and memory to run as fast as it can (Synergy, OSDI 2022, section 4.2): the
smallest amounts with which it reaches its best rate on as few nodes as can hold it.

The demand of a gang is chosen so that cutting it back to its share, one resource or both, never leaves it slower than
its whole share would: that is what the guarantee of Synergy rests on when a peer is cut.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ganger_master.policies.facts import Floats, Integers
from ganger_master.policies.tune import ROUNDING, Gangs, Nodes, Profiles

# A rate this close to the best is the best: measured rates are not smooth to the last percent.
ENOUGH = 0.99


@dataclass(frozen=True, slots=True, eq=False)
class Demand:
    """For each GPU of each gang."""

    cores: Floats
    memory_bytes: Floats

    def take(self, gangs: Integers) -> Demand:
        """Of those at these positions."""
        return Demand(self.cores[gangs], self.memory_bytes[gangs])


def demands(gangs: Gangs, nodes: Nodes) -> Demand:
    """Of every gang: of all amounts that fit its fewest nodes, the fewest cores and then the least memory that reach
    `ENOUGH` of the best rate there, and with which no share of any node is a loss. One look for each size of gang."""
    cores, memory = np.zeros(len(gangs)), np.zeros(len(gangs))
    for gpus in np.unique(gangs.gpus).tolist():
        of_size = np.flatnonzero(gangs.gpus == gpus)
        known, profile = np.unique(gangs.profile[of_size], return_inverse=True)
        found = _demand(gangs.profiles, known, nodes, *limits(gpus, nodes))
        cores[of_size], memory[of_size] = found.cores[profile], found.memory_bytes[profile]
    return Demand(cores, memory)


def limits(gpus: int, nodes: Nodes) -> tuple[float, float]:
    """The most cores and bytes for each GPU that the best of the fewest nodes could give."""
    together = np.minimum(np.maximum(nodes.gpus, 1), gpus)
    fewest = together == together.max(initial=1)
    return (
        float(np.max(nodes.cores[fewest] / together[fewest], initial=0.0)),
        float(np.max(nodes.memory_bytes[fewest] / together[fewest], initial=0.0)),
    )


def _demand(profiles: Profiles, known: Integers, nodes: Nodes, most_cores: float, most_memory: float) -> Demand:
    has_gpus = nodes.gpus > 0
    shares = np.unique(np.stack([nodes.share_cores[has_gpus], nodes.share_memory[has_gpus]], axis=1), axis=0)
    most_cores = max(most_cores, float(shares[:, 0].max(initial=0.0)))
    most_memory = max(most_memory, float(shares[:, 1].max(initial=0.0)))
    cores = _axis(profiles.cores, shares[:, 0], most_cores)
    memory = _axis(profiles.memory_bytes, shares[:, 1], most_memory)
    if not len(cores) or not len(memory):
        return Demand(np.zeros(len(known)), np.zeros(len(known)))
    which, some, much = known[:, None, None], cores[None, :, None], memory[None, None, :]
    rates = profiles.at(which, some, much)
    enough = rates >= ENOUGH * rates[:, -1:, -1:]
    for share_cores, share_memory in shares.tolist():
        floor = profiles.at(which, np.array(share_cores), np.array(share_memory))
        cut = profiles.at(which, np.minimum(some, share_cores), np.minimum(much, share_memory))
        enough &= cut >= floor * (1.0 - ROUNDING)
    row = np.argmax(enough.any(axis=2), axis=1)
    column = np.argmax(enough[np.arange(len(known)), row], axis=1)
    return Demand(cores[row], memory[column])


def _axis(grid: Floats, shares: Floats, most: float) -> Floats:
    """Where to look: measured amounts, shares, and the most that is there."""
    points = np.unique(np.concatenate([grid, shares, [most]]))
    return points[(points > 0.0) & (points <= most * (1.0 + ROUNDING))]
