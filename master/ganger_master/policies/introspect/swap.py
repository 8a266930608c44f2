"""Room for a gang on a full cluster: who that it outranks rests in host memory, and who moves to where those were."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Final, TypeAlias

import numpy as np
from ganger.resources.values import GangShape

from ganger_master.policies.introspect.hole import MOST_MOVES, Hole, Movable, Movables, Move, hole_for
from ganger_master.policies.introspect.whatif import WhatIf
from ganger_master.policies.place import Placement
from ganger_master.policies.place.best_fit import BEST_FIT
from ganger_master.policies.room import Room

# Who is stopped is found one by one, with a search for each; and once more for so many nodes, with those there first.
_MOST_STOPPED: Final = 32
_MOST_NODES: Final = 4

_Search: TypeAlias = Callable[[], Hole | None]


def swap_for(
    room: Room,
    gangs: Iterable[Movable],
    shape: GangShape,
    *,
    placement: Placement = BEST_FIT,
    most_moves: int = MOST_MOVES,
    stay: Collection[int] = (),
) -> Hole | None:
    """A hole by stopping who may be stopped, those first who cost the least for each device, and no more than it takes;
    the others move at most, as few as will do. None where even all of them would not be enough. `claims` of who may be
    stopped are what it would give back by that. The room is left as it was."""
    gangs = [gang for gang in gangs if gang.number not in stay]
    stoppable = sorted((gang for gang in gangs if gang.stop_cost < float("inf")), key=_dearness)
    names = {gang.number for gang in stoppable}
    movables = Movables(room.view, [gang for gang in gangs if gang.number not in names])
    trying = WhatIf(room)

    def search() -> Hole | None:
        return hole_for(room, movables, shape, placement=placement, most_moves=most_moves, stay=stay)

    found = []
    for order in _orders(stoppable):
        hole = _stopping(trying, order[:_MOST_STOPPED], shape.gpus, search)
        if hole is not None:
            found.append(hole)
    return min(found, key=lambda hole: (hole.cost, len(hole.moves)), default=None)


def _orders(stoppable: Sequence[Movable]) -> Iterable[Sequence[Movable]]:
    """By what they cost, and those of one node first where they cost the same."""
    yield stoppable
    on = Counter(claim.node for gang in stoppable for claim in gang.claims)
    for node in sorted(on, key=lambda name: (-on[name], name))[:_MOST_NODES]:
        there = {gang.number for gang in stoppable if any(claim.node == node for claim in gang.claims)}
        yield sorted(stoppable, key=lambda gang: (_dearness(gang)[0], gang.number not in there, gang.number))


def _dearness(gang: Movable) -> tuple[float, int]:
    return gang.stop_cost / max(1, gang.shape.gpus), gang.number


def _stopping(trying: WhatIf, order: Sequence[Movable], gpus: int, search: _Search) -> Hole | None:
    """Of these, in their order, as few as make a hole."""
    free = int(np.bitwise_count(trying.room.view.columns().free).sum())
    stopped: list[Movable] = []
    found = None
    for gang in order:
        trying.give(gang.claims)
        stopped.append(gang)
        free += gang.shape.gpus
        found = search() if free >= gpus else None
        if found is not None:
            break
    if found is not None:
        # The last one is needed, for without it there was none.
        for gang in stopped[-2::-1]:
            trying.undo()
            for other in stopped:
                if other is not gang:
                    trying.give(other.claims)
            without = search()
            if without is not None:
                stopped.remove(gang)
                found = without
    trying.undo()
    return None if found is None else Hole(found.claims, (*(Move(gang, ()) for gang in stopped), *found.moves))
