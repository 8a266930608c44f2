"""Room for a gang on a full cluster: who that it outranks rests in host memory, and who moves to where those were."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Final

import numpy as np
from ganger.resources.values import GangShape

from ganger_master.policies.introspect.hole import MOST_MOVES, Hole, Movable, Movables, Move, hole_for
from ganger_master.policies.introspect.whatif import WhatIf
from ganger_master.policies.place import Placement
from ganger_master.policies.place.best_fit import BEST_FIT
from ganger_master.policies.room import Room

# Who is stopped is found one by one, with a search for each.
_MOST_STOPPED: Final = 32


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
    the others move at most. None where even all of them would not do. `claims` of who may be stopped are what it would
    give back by that. The room is left as it was."""
    gangs = [gang for gang in gangs if gang.number not in stay]
    stoppable = sorted(
        (gang for gang in gangs if gang.stop_cost < float("inf")),
        key=lambda gang: (gang.stop_cost / max(1, gang.shape.gpus), gang.number),
    )[:_MOST_STOPPED]
    names = {gang.number for gang in stoppable}
    movables = Movables(room.view, [gang for gang in gangs if gang.number not in names])
    trying = WhatIf(room)
    free = int(np.bitwise_count(room.view.columns().free).sum())

    def search() -> Hole | None:
        return hole_for(room, movables, shape, placement=placement, most_moves=most_moves, stay=stay)

    try:
        stopped: list[Movable] = []
        found = None
        for gang in stoppable:
            trying.give(gang.claims)
            stopped.append(gang)
            free += gang.shape.gpus
            found = search() if free >= shape.gpus else None
            if found is not None:
                break
        if found is None:
            return None
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
        return Hole(found.claims, (*(Move(gang, ()) for gang in stopped), *found.moves))
    finally:
        trying.undo()
