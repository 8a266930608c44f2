"""Holes for gangs that find no room: exactly the cheapest in small clusters, quickly in large ones. (9 s)"""

from __future__ import annotations

import heapq
import math
import time
from functools import cache

import numpy as np
import pytest
from ganger.cluster.capacity_index import CapacityIndex
from ganger.cluster.claims import make_claim
from ganger.cluster.fit import fit, gang_level
from ganger.cluster.preferences import BEST_FIT
from ganger.cluster.resources import Claim, GangShape, LocalityLevel, NodeRow
from ganger.cluster.search import PlacementRequest
from ganger.cluster.view import LoadMode, View
from ganger_master.policies.make_room import Displacement, Movable, Movables, RoomPlan, in_order, room_for
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.busy import shapes, views
from kit.clusters import cluster, gang, idle_row, server
from msgspec.structs import replace

Claims = tuple[Claim, ...]


def rows(view: View) -> list[NodeRow]:
    return [replace(row, version=0) for row in view.rows()]


def put(view: View, number: int, gpus: int, node: int, cost: float = 1.0, stop: float = math.inf) -> Movable:
    """A gang on a node, in its first free devices."""
    shape = gang(gpus, widest=LocalityLevel.NODE)
    claim = make_claim(view, node, shape, (gpus,), LoadMode.PACK)
    assert claim is not None
    view.take(claim, gpus)
    return Movable(number, shape, (claim,), cost, stop)


def filled(nodes: list[list[int]], of: str = "2x2") -> tuple[View, list[Movable]]:
    """Gangs of these sizes on nodes of four devices."""
    view = cluster(len(nodes), server(of))
    gangs = [put(view, 10 * at + n, size, at) for at, sizes in enumerate(nodes) for n, size in enumerate(sizes)]
    return view, gangs


def search(view: View, gangs: list[Movable], shape: GangShape, **limits: float) -> RoomPlan | None:
    before = rows(view)
    room = CapacityIndex(view)
    found = room_for(room, Movables(view, gangs), shape, **limits)  # type: ignore[arg-type]
    assert rows(view) == before
    if found is not None:
        assert_carried_out(view.copy(), found, shape)
    return found


def assert_carried_out(view: View, room_plan: RoomPlan, shape: GangShape) -> None:
    """One move after the other, each into what is free then; in the end the gang fits."""
    ordered, parked = in_order(room_plan.moves)
    for move in parked:
        for claim in move.gang.claims:
            view.give(claim)
    for move in ordered:
        if move.claims:
            assert fit(view, move.gang.shape, move.claims) == ()
            for claim in move.claims:
                view.take(claim, move.gang.shape.gpus)
        if move not in parked:
            for claim in move.gang.claims:
                view.give(claim)
    assert fit(view, shape, room_plan.claims) == ()


def least_cost(sizes: list[list[int]], costs: list[float], needed: int, devices: int, most: int) -> float:
    """All sequences of moves into free devices, each gang at most once (Dijkstra)."""
    gangs = [(size, node) for node, some in enumerate(sizes) for size in some]
    start = tuple(node for _, node in gangs)
    waiting: list[tuple[float, int, tuple[int, ...]]] = [(0.0, 0, start)]
    best: dict[tuple[int, ...], float] = {start: 0.0}
    while waiting:
        cost, moves, at = heapq.heappop(waiting)
        free = [devices] * len(sizes)
        for (size, _), node in zip(gangs, at, strict=True):
            free[node] -= size
        if max(free) >= needed:
            return cost
        if cost > best[at] or moves == most:
            continue
        for index, (size, home) in enumerate(gangs):
            if at[index] == home:
                for node, room in enumerate(free):
                    if node != home and room >= size:
                        then = (*at[:index], node, *at[index + 1 :])
                        if cost + costs[index] < best.get(then, math.inf):
                            best[then] = cost + costs[index]
                            heapq.heappush(waiting, (cost + costs[index], moves + 1, then))
    return math.inf


full_nodes = st.lists(
    st.lists(st.sampled_from([1, 1, 2, 3]), max_size=4).filter(lambda sizes: sum(sizes) <= 4), min_size=2, max_size=4
)


@settings(max_examples=150, deadline=None)
@given(full_nodes, st.sampled_from([2, 3, 4, 4]), st.data())
def test_hole_costs_what_the_best_of_all_sequences_of_moves_costs_or_less_by_a_swap(
    nodes: list[list[int]], needed: int, data: st.DataObject
) -> None:
    count = sum(map(len, nodes))
    costs = data.draw(
        st.one_of(
            st.just([1.0] * count),
            st.lists(st.sampled_from([1.0, 2.0, 3.5, 7.0]), min_size=count, max_size=count),
        )
    )
    view, gangs = filled(nodes)
    gangs = [Movable(one.number, one.shape, one.claims, cost) for one, cost in zip(gangs, costs, strict=True)]
    found = search(view, gangs, gang(needed, widest=LocalityLevel.NODE), most_moves=5)
    best = least_cost(nodes, costs, needed, 4, 5)
    if found is not None and in_order(found.moves)[1]:
        # Two that want each other's places go through host memory, which no sequence of moves does.
        assert found.cost <= best
    else:
        assert (math.inf if found is None else found.cost) == best


def test_four_nodes_of_which_none_has_four_free_need_two_moves() -> None:
    """Issue of defragmentation: 4 x 4 devices, two or three jobs of one device on each node."""
    view, gangs = filled([[1, 1, 1], [1, 1], [1, 1, 1], [1, 1, 1]])
    found = search(view, gangs, gang(4, widest=LocalityLevel.NODE))
    assert found is not None
    assert [move.number for move in found.moves] == [10, 11]
    assert {claim.node for claim in found.claims} == {"s1"}


def test_gang_that_fits_needs_no_moves() -> None:
    view, gangs = filled([[1], []])
    found = search(view, gangs, gang(4))
    assert found is not None
    assert (found.moves, found.cost) == ((), 0.0)


def test_a_full_cluster_has_no_room_unless_a_job_may_be_preempted() -> None:
    view, gangs = filled([[1, 1, 2], [2, 2]])
    assert search(view, gangs, gang(2)) is None
    stoppable = [
        Movable(one.number, one.shape, one.claims, one.move_cost, 10.0 + one.number * one.shape.gpus) for one in gangs
    ]
    found = search(view, stoppable, gang(2))
    assert found is not None
    assert [(move.number, move.claims) for move in found.moves] == [(2, ())]
    assert found.cost == 14.0


def test_a_preempted_job_makes_place_for_jobs_that_move() -> None:
    """Full, and one job each on two nodes may be stopped: a pair on one node needs both, and a move between them."""
    view, gangs = filled([[1, 1, 1, 1], [2, 2], [2, 1, 1]])
    gangs = [
        Movable(one.number, one.shape, one.claims, 1.0, 5.0 if one.number in (0, 22) else math.inf) for one in gangs
    ]
    found = search(view, gangs, gang(2, widest=LocalityLevel.NODE))
    assert found is not None
    assert found.cost == 11.0
    assert sorted(move.number for move in found.moves if not move.claims) == [0, 22]
    assert len(found.moves) == 3


def test_hole_dearer_than_waiting_is_none() -> None:
    view, gangs = filled([[1, 1, 1], [1, 1], [1, 1, 1], [1, 1, 1]])
    assert search(view, gangs, gang(4, widest=LocalityLevel.NODE), most_cost=2.0) is None
    assert search(view, gangs, gang(4, widest=LocalityLevel.NODE), most_cost=2.1) is not None
    assert search(view, gangs, gang(4, widest=LocalityLevel.NODE), most_moves=1) is None


def test_cheap_moves_are_preferred_to_few() -> None:
    view = cluster(3, server("2x2"))
    gangs = [put(view, 1, 2, 0, cost=9.0), put(view, 2, 1, 1, cost=2.0), put(view, 3, 1, 1, cost=2.0)]
    gangs.append(put(view, 4, 3, 2, cost=math.inf))
    put(view, 5, 1, 0)
    found = search(view, gangs, gang(3, widest=LocalityLevel.NODE))
    assert found is not None
    # One move of the first would do as well, and cost more than twice as much.
    assert ([move.number for move in found.moves], found.cost) == ([2], 2.0)


def test_a_job_that_may_not_be_moved_stays() -> None:
    view, gangs = filled([[2], [2]])
    fixed = [Movable(one.number, one.shape, one.claims) for one in gangs]
    assert search(view, fixed, gang(4, widest=LocalityLevel.NODE)) is None
    assert search(view, [fixed[0], gangs[1]], gang(4, widest=LocalityLevel.NODE)) is not None


def of_two_types(sizes: dict[str, list[int]]) -> tuple[View, list[Movable]]:
    """Gangs of these sizes on nodes of four devices, two nodes of each type."""
    servers = {kind: server("2x2", device_type=kind) for kind in sizes}
    view = View(list(servers.values()))
    for kind, of in servers.items():
        view.put(idle_row(f"{kind}1", of))
        view.put(idle_row(f"{kind}2", of))
    nodes = [(f"{kind}{at}", size) for kind, some in sizes.items() for at, size in enumerate(some, 1)]
    return view, [put(view, at, size, view.slots[name]) for at, (name, size) in enumerate(nodes) if size]


def test_hole_of_a_gang_that_accepts_several_types_is_on_one_of_them() -> None:
    view, gangs = of_two_types({"other": [0, 0], "new": [4, 4], "old": [2, 2]})
    assert search(view, gangs, gang(4, device_type="new,old"), most_cost=3.0) is not None
    view, gangs = of_two_types({"other": [0, 0], "new": [0, 4], "old": [0, 4]})
    found = search(view, gangs, gang(8, device_type="new,old"))
    assert found is not None
    assert sorted(claim.node for claim in found.claims) == ["new1", "new2"]


def test_hole_is_where_the_devices_lie_close_enough() -> None:
    """Two free devices on different sockets: a pair within a socket needs a move."""
    view = cluster(2, server("2x2"))
    gangs = [put(view, number, 1, 0) for number in range(4)]
    apart = [gangs[0], gangs[3]]
    for one in (gangs[1], gangs[2]):
        view.give(one.claims[0])
    blocked = put(view, 9, 3, 1)
    found = search(view, [*apart, blocked], gang(2, widest=LocalityLevel.SOCKET))
    assert found is not None
    assert gang_level(view, found.claims) <= LocalityLevel.SOCKET
    assert len(found.moves) == 1


def test_cores_and_memory_are_made_room_for_too() -> None:
    view = cluster(2, server("2x2", cores=8))
    hungry = gang(1, cores=7)
    claim = make_claim(view, 0, hungry, (1,), LoadMode.PACK)
    assert claim is not None
    view.take(claim, 1)
    other = make_claim(view, 1, gang(3, cores=1), (3,), LoadMode.PACK)
    assert other is not None
    view.take(other, 3)
    movable = [Movable(1, hungry, (claim,), 1.0), Movable(2, gang(3, cores=1), (other,), math.inf)]
    assert search(view, movable, gang(2, cores=2, widest=LocalityLevel.NODE)) is None
    light = [Movable(1, gang(1, cores=4), (claim,), 1.0), movable[1]]
    found = search(view, light, gang(2, cores=2, widest=LocalityLevel.NODE))
    assert found is not None
    assert {claim.node for claim in found.claims} == {"s0"}


def test_gang_over_nodes_gets_the_cheapest_nodes_of_what_it_accepts() -> None:
    view = cluster(6, server("2x2"), per_rack=3)
    gangs = [put(view, node, 1, node, cost=float(1 + node % 3)) for node in range(6)]
    gangs = [*gangs, *(put(view, 10 + node, 3, node, cost=math.inf) for node in (0, 3))]
    found = search(view, gangs, gang(8, widest=LocalityLevel.RACK, nodes=2))
    assert found is not None
    assert ({claim.node for claim in found.claims}, found.cost) == ({"s1", "s2"}, 5.0)
    found = search(view, gangs, gang(8, widest=LocalityLevel.CLUSTER, nodes=2))
    assert found is not None
    assert {claim.node for claim in found.claims} == {"s1", "s4"}
    assert [move.number for move in found.moves] == [1, 4]


def test_gang_over_nodes_stops_others_where_that_is_allowed() -> None:
    view, gangs = filled([[4], [4], [2, 2], [1, 1, 1, 1]], of="2x2")
    stoppable = [Movable(one.number, one.shape, one.claims, stop_cost=float(one.shape.gpus)) for one in gangs]
    found = search(view, stoppable, gang(12))
    assert found is not None
    assert len(found.claims) == 3
    assert found.cost == 12.0


@settings(max_examples=60, deadline=None)
@given(views(), st.lists(shapes, min_size=1, max_size=5), shapes, st.data())
def test_whatever_hole_is_found_can_be_made_and_leaves_no_trace(
    view: View, gangs: list[GangShape], wanted: GangShape, data: st.DataObject
) -> None:
    room = CapacityIndex(view)
    movable = []
    for number, shape in enumerate(gangs):
        claims = BEST_FIT.place(room, PlacementRequest(shape))
        if claims is not None:
            room.take(claims)
            costs = st.sampled_from([1.0, 3.0, math.inf])
            movable.append(Movable(number, shape, claims, data.draw(costs), data.draw(costs)))
    before = rows(view)
    found = room_for(room, Movables(view, movable), wanted)
    assert rows(view) == before
    if found is not None:
        assert all(move.cost < math.inf for move in found.moves)
        _, parked = in_order(found.moves)
        if not parked:
            assert_carried_out(view.copy(), found, wanted)


def test_order_of_the_movable_gangs_does_not_matter() -> None:
    view, gangs = filled([[1, 2], [1, 1, 1], [3], [1, 2]])
    shape = gang(4, widest=LocalityLevel.NODE)
    assert search(view, gangs, shape) == search(view, gangs[::-1], shape)


def test_moves_into_each_others_places_park_the_cheapest() -> None:
    _, gangs = filled([[2], [2]])
    one, other = gangs
    moves = [
        Displacement(Movable(1, one.shape, one.claims, 5.0), other.claims),
        Displacement(Movable(2, other.shape, other.claims, 3.0), one.claims),
    ]
    ordered, parked = in_order(moves)
    assert [move.number for move in parked] == [2]
    assert [move.number for move in ordered] == [1, 2]


def test_moves_wait_for_those_whose_places_they_take() -> None:
    view, gangs = filled([[2], [2], []])
    free = make_claim(view, 2, gang(2), (2,), LoadMode.PACK)
    assert free is not None
    first, second = Displacement(gangs[0], gangs[1].claims), Displacement(gangs[1], (free,))
    assert in_order([first, second]) == ((second, first), ())


@cache
def large(nodes: int) -> tuple[CapacityIndex, Movables]:
    """Nodes of eight devices, each with two or three of them free, so that no gang of eight fits anywhere."""
    random = np.random.default_rng(0)
    view = cluster(nodes, server("2x2x2", cores=32, gib=512), per_rack=32)
    gangs: list[Movable] = []
    for node in range(nodes):
        sizes = [[2, 2, 1, 1], [4, 2], [1, 1, 1, 1, 1], [4, 1]][int(random.integers(4))]
        for size in sizes:
            gangs.append(put(view, len(gangs), size, node, cost=float(size * random.uniform(1, 20))))
    return CapacityIndex(view), Movables(view, gangs)


@pytest.mark.parametrize(
    "shape",
    [gang(8, widest=LocalityLevel.NODE), gang(32, nodes=4, widest=LocalityLevel.RACK), gang(64, nodes=8)],
    ids=["8", "32 in a rack", "64"],
)
def test_sixteen_thousand_nodes_take_a_blink(shape: GangShape) -> None:
    """Measured 6, 10 and 34 ms on a quiet machine."""
    room, movables = large(16_000)
    best = math.inf
    for _ in range(4):
        began = time.process_time()
        found = room_for(room, movables, shape, most_moves=64)
        best = min(best, time.process_time() - began)
    assert found is not None
    assert found.moves
    assert best < 0.25, best
