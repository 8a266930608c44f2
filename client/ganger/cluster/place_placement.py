"""What a placement is: a way to find a place for one gang in a room, and what it may heed beside the gang's shape."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeAlias

from ganger.cluster.capacity_index import CapacityIndex
from ganger.cluster.counted import FreeDevices
from ganger.cluster.feasibility import Ask
from ganger.cluster.fragmentation import GangMix
from ganger.cluster.placement import asked_for, still_free, widest_now
from ganger.cluster.resources import Claim, GangShape, LocalityLevel
from ganger.cluster.view import View

Claims: TypeAlias = tuple[Claim, ...]
# From a room, a gang and the widest level it takes now to its place, or None where it finds none.
Search: TypeAlias = Callable[[CapacityIndex, Ask, LocalityLevel, GangMix | None], Claims | None]


@dataclass(frozen=True, slots=True)
class Want:
    """What else matters to where a gang goes."""

    # Seconds it has waited: while its patience lasts only what meets its wish is found.
    waited_s: float = 0.0
    # Where its state is parked: it goes there if that is free still, the memory it keeps there being its own.
    parked: Claims = ()
    # Names of nodes to try before all others, and of those not to use.
    prefer: frozenset[str] = frozenset()
    avoid: frozenset[str] = frozenset()
    # Kinds of gangs that will be asked for; only some placements heed it.
    demand: GangMix | None = None


_NOTHING_ELSE: Final = Want()


@dataclass(frozen=True, slots=True)
class PlacementPreference:
    """`summary`: one line for people. `by_counts`: a gang finds a place wherever so many devices are free. `counts`:
    finds the places that `search` would, but without a room, for gangs that are `counted.is_counted`."""

    name: str
    summary: str
    search: Search
    by_counts: bool = False
    counts: Callable[[View], FreeDevices] | None = None

    def place(self, room: CapacityIndex, shape: GangShape, want: Want = _NOTHING_ELSE) -> Claims | None:
        """Claims that fit, or None. Nothing is taken."""
        parked = want.parked
        if parked and not any(claim.node in want.avoid for claim in parked) and still_free(room.view, shape, parked):
            return asked_for(parked)
        widest = widest_now(shape, want.waited_s)
        if want.prefer:
            near = CapacityIndex(room.view, only=want.prefer - want.avoid)
            found = self.search(near, near.ask(shape), widest, want.demand)
            if found is not None:
                return found
        if not want.avoid:
            return self.search(room, room.ask(shape), widest, want.demand)
        with room.without(want.avoid):
            return self.search(room, room.ask(shape), widest, want.demand)
