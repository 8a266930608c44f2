"""Search for nodes that hold a gang with given GPUs, cores and memory, while a round is packed from empty nodes.

`RoundPacking` is the mutable state of a pass: what is free on each node, and what each gang holds. Every search is a
few scans over all nodes (about 0.1 ms at 16,000); ties go to the node named first.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np

from ganger_master.policies.job_facts import Floats, Integers
from ganger_master.policies.tunings import ROUNDING, Gangs, Pieces, TuningNodes, pieces

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
        """How many GPUs of each node could be used with these amounts, up to `most`."""
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
        """The first node that holds all of it; else the first nodes that do, if it may be split."""
        gpus = int(self.gangs.gpus[gang])
        usable = self.usable(cores, memory_bytes, gpus)
        at = int(np.argmax(usable >= gpus)) if len(usable) else 0
        if len(usable) and usable[at] >= gpus:
            return [(at, gpus)]
        if self.gangs.is_local[gang]:
            return None
        together = np.cumsum(usable)
        if not len(usable) or together[-1] < gpus:
            return None
        last = int(np.searchsorted(together, gpus))
        found = [(int(node), int(usable[node])) for node in np.flatnonzero(usable[:last])]
        return [*found, (last, gpus - sum(count for _, count in found))]

    def tightest(self, gang: int, cores: Amounts, memory_bytes: Amounts, most_free_cores: bool = False) -> Where | None:
        """The node with the least free that holds all of it: GPUs, then cores, then memory. Else the fewest nodes that
        do, if it may be split: those that take most of it first, and for the rest the one with the least free.
        `most_free_cores`: of nodes with equally many free GPUs, rather the one with the most cores and memory."""
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
        """May leave a node with less than nothing: `missing` says how much, `give_back` makes it up."""
        each = [(_of(cores, node), _of(memory_bytes, node)) for node, _ in where]
        self.where[gang], self.held[gang] = where, each
        for (node, gpus), (some, much) in zip(where, each, strict=True):
            self.free_gpus[node] -= gpus
            self.free_cores[node] -= gpus * some
            self.free_memory[node] -= gpus * much
            self.residents.setdefault(node, []).append(gang)

    def missing(self, node: int) -> tuple[float, float]:
        """Cores and bytes that are held beyond what the node has."""
        cores, memory = -float(self.free_cores[node]), -float(self.free_memory[node])
        return (cores if cores > self._slack_cores else 0.0, memory if memory > self._slack_memory else 0.0)

    def excess(self, gang: int, node: int) -> tuple[float, float]:
        """Cores and bytes it holds on the node beyond its proportional share."""
        at = [there for there, _ in self.where[gang]].index(node)
        gpus, (cores, memory) = self.where[gang][at][1], self.held[gang][at]
        over_cores = gpus * (cores - float(self.share_cores[node]))
        over_memory = gpus * (memory - float(self.share_memory[node]))
        return (
            over_cores if over_cores > self._slack_cores else 0.0,
            over_memory if over_memory > self._slack_memory else 0.0,
        )

    def cut_to_share(self, gang: int) -> None:
        """What it holds beyond its proportional share goes back, on all its nodes; what it holds below stays."""
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
