"""Any free devices serve, the first node first, however many nodes that makes: the placement of ideal runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from ganger.cluster.capacity_index import CapacityIndex
from ganger.cluster.claims import make_claim
from ganger.cluster.counted import FreeDevices
from ganger.cluster.feasibility import Ask
from ganger.cluster.fragmentation import GangMix
from ganger.cluster.node_classes import Alike
from ganger.cluster.placement_search import evenly, greedily
from ganger.cluster.resources import Claim, LocalityLevel
from ganger.cluster.search import Claims, PlacementPreference, fitting_spans, in_span, on_first_node, walk
from ganger.cluster.view import LoadMode


def _anywhere(room: CapacityIndex, ask: Ask, widest: LocalityLevel, demand: GangMix | None) -> Claims | None:
    if ask.gpus > room.free_devices:
        return None
    if widest <= LocalityLevel.NODE or ask.tasks == 1 or ask.shape.nodes == 1:
        return on_first_node(room, ask, widest)
    for number in fitting_spans(room, ask, widest, tightest_first=False):
        found = _from_the_first(room, ask, widest, number)
        if found is not None:
            return found
    return None


def has_room(alike: Alike, ask: Ask) -> int | None:
    return 0 if ask.spread_room(alike) else None


def _from_the_first(room: CapacityIndex, ask: Ask, level: LocalityLevel, number: int) -> Claims | None:
    view, shape = room.view, ask.shape
    if shape.nodes or len(shape.roles) > 1:
        key_of: dict[Alike, Any] = ask.memo(has_room, lambda alike: has_room(alike, ask))
        nodes = list(in_span(room, ask, level, number, key_of))
        even = evenly(view, shape, walk(nodes), LoadMode.PACK) if shape.nodes else None
        return even if even is not None else greedily(view, shape, walk(nodes), LoadMode.PACK)
    remaining = ask.tasks
    claims: list[Claim] = []
    rooms = ask.rooms[0].by_number(room.entries)[room.entries_in(level, number)]
    slots = room.slots_in(level, number)
    for position in np.flatnonzero(rooms).tolist():
        count = min(remaining, int(rooms[position]))
        claim = make_claim(view, slots.item(position), shape, (count,), LoadMode.PACK)
        assert claim is not None, f"the index has room on {view.nodes[slots[position]]} where there is none"
        claims.append(claim)
        remaining -= count
        if not remaining:
            return tuple(claims)
    return None


ANYWHERE = PlacementPreference("anywhere", "any free devices, the first node first, for ideal runs", _anywhere)
# Of servers that have nothing but devices.
BY_COUNTS = replace(ANYWHERE, by_counts=True, counts=FreeDevices)
