"""How many GPUs jobs of overlapping partitions can hold together, by counts, and which jobs are chosen by that."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray


class PartitionBounds(Struct, frozen=True, eq=False, gc=False):
    """What the jobs of each partition may hold together.

    partition: by position of a job, the number of its partition. gpus: by set of partitions, the GPUs of the nodes that
    are in just these partitions."""

    partition: Sequence[int]
    gpus: Mapping[frozenset[int], int]

    def most(self) -> dict[int, int]:
        """Return the GPUs of all nodes of each partition that has any."""
        found: dict[int, int] = defaultdict(int)
        for group, gpus in self.gpus.items():
            for partition in group:
                found[partition] += gpus
        return dict(found)

    def beside(self, partition: int) -> frozenset[int]:
        """Return the partitions with nodes in common with one, itself among them."""
        return frozenset({partition}).union(*[group for group in self.gpus if partition in group])


class PartitionRoom:
    """GPUs that are left for jobs of each partition. What jobs hold is a flow from partitions to groups of nodes: for
    another job, other partitions give way to groups that only they have (augmenting paths, Ford and Fulkerson 1956)."""

    def __init__(self, gpus: Mapping[frozenset[int], int]) -> None:
        self._left = dict(gpus)
        # By group, what each partition holds of it.
        self._held: dict[frozenset[int], dict[int, int]] = {group: defaultdict(int) for group in gpus}

    def take(self, partition: int, gpus: int) -> int:
        """Take so many GPUs for a partition, or as many as there are. Return how many were taken."""
        taken = 0
        while taken < gpus and (path := self._path(partition)):
            most = min(gpus - taken, self._left[path[-1][1]])
            for (_, group), (owner, _) in pairwise(path):
                most = min(most, self._held[group][owner])
            self._left[path[-1][1]] -= most
            for owner, group in path:
                self._held[group][owner] += most
            for (_, group), (owner, _) in pairwise(path):
                self._held[group][owner] -= most
            taken += most
        return taken

    def take_all(self, partition: int, gpus: int) -> bool:
        """Take so many GPUs for a partition if there are as many. Return whether they were taken."""
        taken = self.take(partition, gpus)
        if taken < gpus:
            self._give(partition, taken)
        return taken == gpus

    def _give(self, partition: int, gpus: int) -> None:
        for group, held in self._held.items():
            given = min(gpus, held[partition])
            held[partition] -= given
            self._left[group] += given
            gpus -= given

    def _path(self, partition: int) -> list[tuple[int, frozenset[int]]]:
        """Return a shortest path to a group with GPUs left, empty for none: the partition takes of the first group,
        whose part of the next partition goes to the next group, and so on."""
        for group, left in self._left.items():
            if left > 0 and partition in group:
                return [(partition, group)]
        paths = [[(partition, group)] for group in self._left if partition in group]
        seen = {path[-1][1] for path in paths}
        for path in paths:
            last = path[-1][1]
            if self._left[last] > 0:
                return path
            for owner, held in self._held[last].items():
                for group in self._left if held else ():
                    if owner in group and group not in seen:
                        seen.add(group)
                        paths.append([*path, (owner, group)])
        return []


def taken_by_partition(
    ranked: NDArray[np.int64],
    gpus: NDArray[np.int64],
    free: int,
    is_strict: bool,
    guarded: NDArray[np.bool_] | None,
    passing: NDArray[np.bool_] | None,
    bounds: PartitionBounds,
    staying: NDArray[np.int64],
) -> list[int]:
    """Return the positions that `orders.chosen` takes beside those that stay."""
    room = PartitionRoom(bounds.gpus)
    for job in staying.tolist():
        room.take(bounds.partition[job], int(gpus[job]))
    taken: list[int] = []
    # Partitions in which no job, or only a passing one, is taken any more.
    closed: set[int] = set()
    is_guarded: set[int] = set()
    for job, size in zip(ranked.tolist(), gpus[ranked].tolist(), strict=True):
        where = bounds.partition[job]
        if where in closed or (where in is_guarded and passing is not None and not passing[job]):
            continue
        if size <= free and room.take_all(where, size):
            taken.append(job)
            free -= size
        elif is_strict:
            closed |= bounds.beside(where)
        elif guarded is not None and guarded[job]:
            is_guarded |= bounds.beside(where)
    return taken
