"""Gangs given back to a capacity index and taken from it, all of it undone later: affinities too."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

from ganger.cluster.capacity_index import CapacityIndex
from ganger.cluster.resources import Claim

Claims: TypeAlias = tuple[Claim, ...]


# Claims that were taken (None), or given back by nodes of these affinities.
Step: TypeAlias = tuple[Claims, tuple[int, ...] | None]


class Trial:
    """The one tentative change of a capacity index. The index shows all of it at once."""

    def __init__(self, room: CapacityIndex) -> None:
        self.room = room
        self._done: list[Step] = []

    @property
    def mark(self) -> int:
        """The point that `undo` returns to."""
        return len(self._done)

    def take(self, claims: Claims) -> None:
        self.room.take(claims)
        self._done.append((claims, None))

    def give(self, claims: Iterable[Claim]) -> None:
        """Give claims back; those of nodes that left are ignored."""
        view = self.room.view
        there = tuple([claim for claim in claims if claim.node in view])
        affinities = tuple([view.affinity[view.slots[claim.node]] for claim in there])
        self.room.give(there)
        self._done.append((there, affinities))

    def undo(self, mark: int = 0) -> list[Step]:
        """Restore the index at a mark, or before the trial. Return what was undone, for `redo`."""
        undone = self._done[mark:]
        while len(self._done) > mark:
            claims, affinities = self._done.pop()
            if affinities is None:
                self.room.give(claims)
                continue
            for claim, affinity in zip(claims, affinities, strict=True):
                self.room.take((claim,), affinity)
        return undone

    def redo(self, undone: Iterable[Step]) -> None:
        for claims, affinities in undone:
            (self.take if affinities is None else self.give)(claims)
