"""Room for a gang on a full cluster: park gangs of lower rank in host memory, and move others to their places."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import islice
from typing import Final, TypeAlias

import numpy as np
from ganger.cluster.capacity_index import CapacityIndex, Trial
from ganger.cluster.preferences import BEST_FIT
from ganger.cluster.resources import GangShape

from ganger_master.policies.make_room import (
    Displacement,
    Movable,
    Movables,
    RoomPlan,
    cheapest_first,
    room_for,
)
from ganger_master.policies.placements import PlacementPreference

# Victims that are searched for one by one; and nodes for which that is repeated, with victims on the node first.
_MOST_STOPPED: Final = 32
_MOST_NODES: Final = 4
# Other sets of victims that are tried afterwards, because they may be better.
_MOST_SETS: Final = 128

_Search: TypeAlias = Callable[[], RoomPlan | None]


def swap_for(
    room: CapacityIndex,
    gangs: Iterable[Movable],
    shape: GangShape,
    *,
    placement: PlacementPreference = BEST_FIT,
    stay: Collection[int] = (),
) -> RoomPlan | None:
    """Return the cheapest plan that stops gangs: then the one with the fewest victims and moves, then the least spread.

    Gangs that may not be stopped only move, as few as suffice. `claims` of one that may be stopped: what it gives back
    by that. None where even all of them would not be enough. Exact on small clusters; on large ones no victim
    is stopped that is not needed, and a bounded number of cheaper sets is tried. The room is left as it was.
    """
    gangs = [gang for gang in gangs if gang.number not in stay]
    stoppable = sorted((gang for gang in gangs if gang.stop_cost < float("inf")), key=_stop_cost_per_gpu)
    names = {gang.number for gang in stoppable}
    movables = Movables(room.view, [gang for gang in gangs if gang.number not in names])
    trying = Trial(room)

    def search() -> RoomPlan | None:
        return room_for(room, movables, shape, placement=placement, stay=stay)

    found = []
    for order in _orders(stoppable):
        room_plan = _stopping(trying, order[:_MOST_STOPPED], shape.gpus, search)
        if room_plan is not None:
            found.append(room_plan)
    if not found:
        return None
    return _better(trying, stoppable, shape.gpus, min(found, key=cost_key), search)


def cost_key(room_plan: RoomPlan) -> tuple[float, int, int]:
    """Return the sort key, best plan first: cost in GPU-seconds, then gangs that move, then nodes of the new gang."""
    return room_plan.cost, len(room_plan.moves), len(room_plan.claims)


def _better(trying: Trial, stoppable: Sequence[Movable], gpus: int, best: RoomPlan, search: _Search) -> RoomPlan:
    """Return the best of this plan and those of other sets of victims; the cheapest sets are tried first."""
    missing = gpus - int(np.bitwise_count(trying.room.view.columns().free).sum())
    by_price = sorted(stoppable, key=lambda gang: (gang.stop_cost, gang.number))
    kinds: dict[tuple[object, ...], int] = {}
    kind_of = [kinds.setdefault((gang.stop_cost, gang.shape, gang.claims), len(kinds)) for gang in by_price]
    sets = cheapest_first(
        [gang.stop_cost for gang in by_price],
        [sum([claim.device_mask.bit_count() for claim in gang.claims]) for gang in by_price],
        kind_of,
        missing,
        _MOST_STOPPED,
    )
    for chosen in islice(sets, _MOST_SETS):
        stopped = [by_price[at] for at in chosen]
        if (sum([gang.stop_cost for gang in stopped]), len(stopped), 1) >= cost_key(best):
            break
        for gang in stopped:
            trying.give(gang.claims)
        room_plan = search()
        trying.undo()
        if room_plan is not None:
            whole = RoomPlan(room_plan.claims, (*(Displacement(gang, ()) for gang in stopped), *room_plan.moves))
            best = min(best, whole, key=cost_key)
    return best


def _orders(stoppable: Sequence[Movable]) -> Iterable[Sequence[Movable]]:
    """Yield orders of the gangs: by cost for each GPU, then for each of a few nodes, its gangs first among equals."""
    yield stoppable
    on = Counter(claim.node for gang in stoppable for claim in gang.claims)
    for node in sorted(on, key=lambda name: (-on[name], name))[:_MOST_NODES]:
        there = {gang.number for gang in stoppable if any(claim.node == node for claim in gang.claims)}
        yield sorted(stoppable, key=lambda gang: (_stop_cost_per_gpu(gang)[0], gang.number not in there, gang.number))


def _stop_cost_per_gpu(gang: Movable) -> tuple[float, int]:
    return gang.stop_cost / max(1, gang.shape.gpus), gang.number


def _stopping(trying: Trial, order: Sequence[Movable], gpus: int, search: _Search) -> RoomPlan | None:
    """Return a plan that stops as few of these gangs as suffice, tried in their order; None if all are not enough."""
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
    return (
        None if found is None else RoomPlan(found.claims, (*(Displacement(gang, ()) for gang in stopped), *found.moves))
    )
