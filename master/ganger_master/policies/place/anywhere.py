"""Any free devices serve, the first node first, however many nodes that makes: the placement of ideal runs."""

from __future__ import annotations

from ganger.placement.claims import make_claim
from ganger.placement.filling import evenly, greedily
from ganger.resources.values import Claim, Level
from ganger.resources.view import Mode

from ganger_master.policies.alike import Alike
from ganger_master.policies.ask import Ask
from ganger_master.policies.fragmentation import Demand
from ganger_master.policies.place.placement import Claims, Placement
from ganger_master.policies.place.search import chain_of, fitting_spans, in_span, on_first_node
from ganger_master.policies.room import Room


def search(room: Room, ask: Ask, widest: Level, demand: Demand | None) -> Claims | None:
    if widest <= Level.NODE or ask.tasks == 1 or ask.shape.nodes == 1:
        return on_first_node(room, ask, widest)
    has_room: dict[Alike, int | None] = ask.memo(has_some, lambda alike: 0 if has_some(alike, ask) else None)
    for number in fitting_spans(room, ask, widest, tightest_first=False):
        found = _from_the_first(room, ask, widest, number, has_room)
        if found is not None:
            return found
    return None


def has_some(alike: Alike, ask: Ask) -> bool:
    return ask.spread_room(alike) > 0


def _from_the_first(
    room: Room, ask: Ask, level: Level, number: int, has_room: dict[Alike, int | None]
) -> Claims | None:
    view, shape = room.view, ask.shape
    nodes = in_span(room, level, number, has_room, ask.least_free)
    if shape.nodes:
        even = evenly(view, shape, chain_of(nodes), Mode.PACK)
        return even if even is not None else greedily(view, shape, chain_of(nodes), Mode.PACK)
    if len(shape.roles) > 1:
        return greedily(view, shape, chain_of(nodes), Mode.PACK)
    remaining = ask.tasks
    claims: list[Claim] = []
    for slot in chain_of(nodes):
        alike = room.alike(slot)
        assert alike is not None
        count = min(remaining, ask.rooms[0].of[alike])
        claim = make_claim(view, slot, shape, (count,), Mode.PACK)
        assert claim is not None, f"the index has room on {view.nodes[slot]} where there is none"
        claims.append(claim)
        remaining -= count
        if not remaining:
            return tuple(claims)
    return None


ANYWHERE = Placement("anywhere", "any free devices, the first node first, for ideal runs", search)
