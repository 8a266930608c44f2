"""Gangs given back to a capacity index and taken from it, all of it undone later: affinities too."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

from ganger.cluster.capacity_index import CapacityIndex
from ganger.cluster.resources import Claim

Claims: TypeAlias = tuple[Claim, ...]


class Trial:
    def __init__(self, room: CapacityIndex) -> None:
        self.room = room
        # What was taken, or given back with the affinity that its node had.
        self._done: list[tuple[Claim, int | None]] = []

    @property
    def mark(self) -> int:
        """For `undo`: how things stand."""
        return len(self._done)

    def take(self, claims: Claims) -> None:
        self.room.take(claims)
        self._done.extend((claim, None) for claim in claims)

    def give(self, claims: Iterable[Claim]) -> None:
        view = self.room.view
        for claim in claims:
            slot = view.slots.get(claim.node)
            if slot is not None:
                self._done.append((claim, view.affinity[slot]))
                self.room.give((claim,))

    def undo(self, mark: int = 0) -> None:
        while len(self._done) > mark:
            claim, affinity = self._done.pop()
            if affinity is None:
                self.room.give((claim,))
            else:
                self.room.take((claim,), affinity)
