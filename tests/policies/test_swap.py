"""Swaps on full clusters: no job is parked without need, and as few move as in the best sequence. (4 s)"""

from __future__ import annotations

import heapq
import math
from itertools import combinations

from ganger.cluster.capacity_index import CapacityIndex, Trial
from ganger.cluster.preferences import BEST_FIT
from ganger.cluster.resources import GangShape, LocalityLevel
from ganger.cluster.search import PlacementRequest
from ganger.cluster.view import View
from ganger_master.policies.make_room import Movable, Movables, RoomPlan, room_for
from ganger_master.policies.park_and_move import swap_for
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.clusters import cluster, gang, server
from policies.test_make_room import filled, rows

# Far dearer than a move, as resting is.
STOP = 100.0


def search(nodes: list[list[bool]], needed: int) -> RoomPlan | None:
    """Jobs of one device by node; True: may be preempted."""
    view, gangs = filled([[1] * len(some) for some in nodes])
    may_stop = [one for some in nodes for one in some]
    gangs = [
        Movable(one.number, one.shape, one.claims, 1.0, STOP if stops else math.inf)
        for one, stops in zip(gangs, may_stop, strict=True)
    ]
    before = rows(view)
    found = swap_for(CapacityIndex(view), gangs, gang(needed, widest=LocalityLevel.NODE))
    assert rows(view) == before
    return found


def fewest(nodes: list[list[bool]], needed: int, devices: int = 4) -> tuple[int, int] | None:
    """Stops, then moves, by trying all sequences."""
    start = tuple((some.count(False), some.count(True)) for some in nodes)
    line: list[tuple[int, int, tuple[tuple[int, int], ...]]] = [(0, 0, start)]
    seen = set()
    while line:
        stops, moves, state = heapq.heappop(line)
        if state in seen:
            continue
        seen.add(state)
        free = [devices - fixed - loose for fixed, loose in state]
        if max(free) >= needed:
            return stops, moves
        for at, (fixed, loose) in enumerate(state):
            if loose:
                heapq.heappush(line, (stops + 1, moves, (*state[:at], (fixed, loose - 1), *state[at + 1 :])))
            for to, room in enumerate(free):
                if fixed and room and to != at:
                    then = list(state)
                    then[at], then[to] = (fixed - 1, loose), (then[to][0] + 1, then[to][1])
                    heapq.heappush(line, (stops, moves + 1, tuple(then)))
    return None


@settings(max_examples=120, deadline=None)
@given(st.lists(st.lists(st.booleans(), min_size=2, max_size=4), min_size=2, max_size=4), st.sampled_from([2, 3, 4]))
def test_no_more_are_stopped_and_moved_than_in_the_best_of_all_sequences(nodes: list[list[bool]], needed: int) -> None:
    found, best = search(nodes, needed), fewest(nodes, needed)
    if best is None or best[0] == 0:
        # Room that needs no parked job is found by another search.
        return
    assert found is not None
    stopped = [move for move in found.moves if not move.claims]
    assert (len(stopped), len(found.moves) - len(stopped)) == best


def test_sixteen_on_four_nodes_with_one_that_may_rest_on_each() -> None:
    found = search([[True, False, False, False]] * 4, 4)
    assert found is not None
    assert [move.number for move in found.moves if not move.claims] == [0, 10, 20, 30]
    assert len(found.moves) == 7


def test_no_job_is_parked_where_that_helps_no_job() -> None:
    assert search([[False] * 4, [True, False, False, False]], 2) is None


@st.composite
def full_clusters(draw: st.DrawFn) -> tuple[View, list[Movable], GangShape]:
    """Two or three nodes with up to six gangs that may be stopped, some over several nodes; and a gang without room."""
    view = cluster(draw(st.integers(2, 3)), server(draw(st.sampled_from(["2", "4"]))))
    room, gangs = CapacityIndex(view), []
    for number in range(6):
        shape = gang(draw(st.integers(1, 3)), widest=draw(st.sampled_from([LocalityLevel.NODE, LocalityLevel.CLUSTER])))
        avoid = draw(st.frozensets(st.sampled_from(view.nodes), max_size=1))
        claims = BEST_FIT.place(room, PlacementRequest(shape, avoid=avoid))
        if claims is not None:
            room.take(claims)
            cost = (STOP + draw(st.integers(0, 1))) * shape.gpus
            gangs.append(Movable(number, shape, claims, math.inf, cost))
    wanted = gang(draw(st.integers(1, 5)), widest=draw(st.sampled_from([LocalityLevel.NODE, LocalityLevel.CLUSTER])))
    return view, gangs, wanted


def best_of_all_sets(room: CapacityIndex, gangs: list[Movable], wanted: GangShape) -> tuple[float, int, int] | None:
    """Cost, victims and nodes of the gang, by stopping every set of gangs."""
    found, trying = [], Trial(room)
    for count in range(len(gangs) + 1):
        for chosen in combinations(gangs, count):
            for one in chosen:
                trying.give(one.claims)
            claims = BEST_FIT.place(room, PlacementRequest(wanted, math.inf))
            trying.undo()
            if claims is not None:
                found.append((sum([one.stop_cost for one in chosen]), count, len(claims)))
    return min(found, default=None)


@settings(max_examples=300, deadline=None)
@given(full_clusters())
def test_the_victims_cost_least_then_are_fewest_and_the_gang_is_spread_least(
    case: tuple[View, list[Movable], GangShape],
) -> None:
    view, gangs, wanted = case
    best = best_of_all_sets(CapacityIndex(view.copy()), gangs, wanted)
    before = rows(view)
    found = swap_for(CapacityIndex(view), gangs, wanted)
    assert rows(view) == before
    if best is None or best[1] == 0:
        return
    assert found is not None
    assert (found.cost, len(found.moves), len(found.claims)) == best


@settings(max_examples=200, deadline=None)
@given(full_clusters())
def test_a_hole_stops_no_gang_without_which_it_would_be_there(case: tuple[View, list[Movable], GangShape]) -> None:
    view, gangs, wanted = case
    room = CapacityIndex(view)
    found = room_for(room, Movables(view, gangs), wanted, most_moves=len(gangs))
    assert (found is None) == (best_of_all_sets(room, gangs, wanted) is None)
    if found is None:
        return
    victims = [move.gang for move in found.moves]
    for needed in victims:
        trying = Trial(room)
        for one in victims:
            if one is not needed:
                trying.give(one.claims)
        assert BEST_FIT.place(room, PlacementRequest(wanted, math.inf)) is None
        trying.undo()
