"""Each placement's own rule, against a look at every node one by one, and on published cases."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from ganger.cluster.capacity_index import CapacityIndex
from ganger.cluster.claims import make_claim
from ganger.cluster.feasibility import demand_of_shapes, fragmented_gpus
from ganger.cluster.fit import demand
from ganger.cluster.resources import Claim, GangShape, Locality, LocalityLevel, Role, TaskShape
from ganger.cluster.search import PlacementRequest
from ganger.cluster.view import LoadMode, View
from ganger_master.policies.placements import PLACEMENTS, placement_named, traffic_per_card, traffic_per_server_task
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.busy import shapes, views
from kit.clusters import GIB, cluster, gang, server
from msgspec.structs import replace

Claims = tuple[Claim, ...]


def place(view: View, shape: GangShape, name: str) -> Claims | None:
    return PLACEMENTS[name].place(CapacityIndex(view.copy()), PlacementRequest(shape))


def everything(shape: GangShape) -> tuple[int, ...]:
    return tuple(role.tasks for role in shape.roles)


def hosts(view: View, shape: GangShape) -> Iterator[tuple[int, Claim]]:
    """Every node that could take the whole gang, and what it would take there."""
    for slot, available in enumerate(view.available):
        if available and shape.nodes <= 1:
            claim = make_claim(view, slot, shape, everything(shape), LoadMode.PACK, shape.locality.widest)
            if claim is not None:
                yield slot, claim


def takable(view: View, slot: int, shape: GangShape) -> int:
    return view.free[slot] & view.roomy(slot, shape.device_memory_bytes)


def left_over(view: View, slot: int, shape: GangShape, claim: Claim) -> tuple[int, ...]:
    cores, memory = sum(view.millicores[slot]), view.memory[slot]
    of = view.topologies[slot].configuration_set
    if not shape.gpus:
        return (view.free[slot].bit_count(), of.devices, cores, memory)
    left = takable(view, slot, shape) & ~claim.device_mask
    groups = {group.device_mask for group in of.groups} | {socket.device_mask for socket in of.sockets}
    beside = sum((left & group).bit_count() for group in groups if group & claim.device_mask)
    return (left.bit_count(), beside, cores, memory)


def shares(view: View, slot: int, gpus: int, millicores: int, memory: int) -> list[float]:
    of = view.topologies[slot].configuration_set
    cores = sum(socket.millicores for socket in of.sockets)
    return [gpus / (of.devices or 1), millicores / (cores or 1), memory / (of.memory_bytes or 1)]


def alignment(view: View, slot: int, shape: GangShape, is_cosine: bool) -> float:
    needed = demand(view.topologies[slot].configuration_set, shape, everything(shape))
    wanted = shares(view, slot, needed.gpus, needed.millicores, needed.memory_bytes)
    free = shares(view, slot, view.free[slot].bit_count(), sum(view.millicores[slot]), view.memory[slot])
    dot = float(np.dot(wanted, free))
    lengths = float(np.linalg.norm(wanted) * np.linalg.norm(free))
    return -(dot / lengths if lengths else 0.0) if is_cosine else -dot


def growth(view: View, slot: int, shape: GangShape, claim: Claim) -> float:
    if not shape.gpus:
        return 0.0
    seen = demand_of_shapes((shape,), view.sets.values())
    of = view.topologies[slot].configuration_set
    free, cores, memory = view.free[slot].bit_count(), sum(view.millicores[slot]), view.memory[slot]
    gpus = claim.device_mask.bit_count()
    if of.device_type not in seen.device_types:
        return float(-gpus)
    before = (free, cores, memory)
    after = (free - gpus, cores - sum(claim.millicores), memory - claim.memory_bytes)
    free_gpus, millicores, bytes_left = np.array([before, after], np.int64).T
    devices, kinds = np.full(2, of.devices), np.full(2, seen.device_types.index(of.device_type))
    counted = fragmented_gpus(seen, free_gpus, millicores, bytes_left, devices, kinds)
    return float(counted[1] - counted[0])


def level(view: View, slot: int, claim: Claim) -> int:
    return int(view.topologies[slot].level(claim.device_mask))


RULES: dict[str, Callable[[View, int, GangShape, Claim], tuple[float, ...]]] = {
    "first-fit": lambda view, slot, shape, claim: (),
    "best-fit": lambda view, slot, shape, claim: left_over(view, slot, shape, claim),
    "locality": lambda view, slot, shape, claim: (
        level(view, slot, claim),
        *left_over(view, slot, shape, claim),
    ),
    "tetris": lambda view, slot, shape, claim: (alignment(view, slot, shape, False),),
    "tetris-cos": lambda view, slot, shape, claim: (alignment(view, slot, shape, True),),
    "fgd": lambda view, slot, shape, claim: (
        growth(view, slot, shape, claim),
        *left_over(view, slot, shape, claim),
    ),
}


def is_smaller(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    """By the first figures that differ by more than a rounding error."""
    for mine, theirs in zip(one, other, strict=True):
        if abs(mine - theirs) > 1e-6:
            return mine < theirs
    return False


@pytest.mark.parametrize("name", sorted(RULES))
@settings(max_examples=50)
@given(views(), shapes)
def test_single_node_is_the_first_of_the_best_when_all_are_looked_at(name: str, view: View, shape: GangShape) -> None:
    best: tuple[tuple[float, ...], Claim] | None = None
    for slot, claim in hosts(view, shape):
        key = RULES[name](view, slot, shape, claim)
        if best is None or is_smaller(key, best[0]):
            best = (key, claim)
    found = place(view, shape, name)
    if best is not None:
        assert found == (best[1],)
    else:
        assert found is None or len(found) > 1


@pytest.mark.parametrize("name", sorted({*RULES} - {"first-fit"}))
def test_of_equally_good_nodes_the_first_is_taken_whenever_it_became_so(name: str) -> None:
    """They differ in what the rule does not weigh, so they are entries of their own, the first node's the youngest."""
    view = cluster(3)
    room = CapacityIndex(view)
    view.put(replace(view.row("s0"), affinity=2, version=view.version + 1))
    view.put(replace(view.row("s1"), affinity=4, version=view.version + 2))
    room.follow()
    (claim,) = PLACEMENTS[name].place(room, PlacementRequest(gang(1))) or ()
    assert claim.node == "s0"


@settings(max_examples=100)
@given(views(), shapes)
def test_anywhere_takes_the_first_free_devices(view: View, shape: GangShape) -> None:
    shape = replace(shape, roles=shape.roles[:1], nodes=0, locality=Locality())
    remaining = shape.tasks
    claims = []
    for slot, available in enumerate(view.available):
        sizes = range(remaining, 0, -1) if available else ()
        claim = next((c for n in sizes if (c := make_claim(view, slot, shape, (n,), LoadMode.PACK))), None)
        if claim is not None:
            claims.append(claim)
            remaining -= claim.tasks[0]
    assert place(view, shape, "anywhere") == (None if remaining else tuple(claims))


@settings(max_examples=100)
@given(views(), shapes, st.sampled_from(["optimus", "optimus-cards"]))
def test_optimus_takes_the_emptiest_servers_with_equal_parts(view: View, shape: GangShape, name: str) -> None:
    shape = replace(shape, locality=Locality(), nodes=0)
    asked = everything(shape)

    def emptiness(slot: int) -> tuple[Any, ...]:
        free = takable(view, slot, shape).bit_count()
        of = view.topologies[slot].configuration_set.name
        return (-free, -sum(view.millicores[slot]), -view.memory[slot], of, slot)

    def takes_a_task(slot: int) -> bool:
        one = [tuple(int(at == role) for at in range(len(asked))) for role in range(len(asked))]
        return any(make_claim(view, slot, shape, tasks, LoadMode.SPREAD) for tasks in one)

    def parts(servers: int) -> Claims | None:
        claims = []
        for server_number, slot in zip(range(servers), order, strict=False):
            tasks = tuple(count // servers + (server_number < count % servers) for count in asked)
            claim = make_claim(view, slot, shape, tasks, LoadMode.SPREAD)
            if claim is None:
                return None
            claims.append(claim)
        return tuple(claims) if len(claims) == servers else None

    order = sorted(slot for slot, available in enumerate(view.available) if available)
    order = sorted([slot for slot in order if takes_a_task(slot)], key=emptiness)
    alone = [slot for slot in order if make_claim(view, slot, shape, asked, LoadMode.SPREAD)]
    cost = traffic_per_card if name == "optimus-cards" and len(asked) > 1 else (lambda workers, servers: servers)
    workers = max(shape.roles, key=lambda role: role.shape.gpus).tasks
    numbers = sorted(range(2, max(asked) + 1), key=lambda servers: (cost(workers, servers), servers))
    if alone:
        first = make_claim(view, alone[0], shape, asked, LoadMode.SPREAD)
        assert first is not None
        expected: Claims | None = (first,)
    else:
        expected = next((claims for servers in numbers if (claims := parts(servers))), None)
    assert place(view, shape, name) == expected


def test_optimus_puts_as_many_servers_and_workers_on_each_of_the_fewest_nodes() -> None:
    roles = (Role("ps", 4, TaskShape(0, 1000, GIB)), Role("worker", 8, TaskShape(1, 500, GIB)))
    found = place(cluster(5), GangShape(roles), "optimus")
    assert found is not None
    assert [claim.tasks for claim in found] == [(2, 4), (2, 4)]
    cards = place(cluster(5), GangShape(roles), "optimus-cards")
    assert cards is not None
    # 8 x 4/25 model sizes over a card with five nodes, 8 x 1/4 with two
    assert [claim.tasks for claim in cards] == [(1, 2), (1, 2), (1, 2), (1, 1), (0, 1)]


def test_traffic_shrinks_with_servers_only_where_their_tasks_share_a_card() -> None:
    assert [traffic_per_card(36, servers) for servers in (1, 2, 3, 4)] == [0, 9, 8, 6.75]
    by_task = [traffic_per_server_task(36, servers) for servers in (1, 2, 3, 4)]
    assert by_task == sorted(by_task)
    assert by_task[0] == 0


def test_algorithm_1_places_the_published_sequence() -> None:
    room = CapacityIndex(cluster(4, server("4", cores=16)))
    placed = []
    for gpus in (1, 1, 2, 4, 2, 1, 4, 1):
        found = PLACEMENTS["gandiva"].place(room, PlacementRequest(gang(gpus)))
        assert found is not None
        room.take(found)
        placed.append(found[0].node)
    assert placed == ["s0", "s0", "s1", "s2", "s1", "s0", "s3", "s0"]
    assert PLACEMENTS["gandiva"].place(room, PlacementRequest(gang(1))) is None


@pytest.mark.parametrize("name", ["first-fit", "best-fit", "locality", "gandiva", "tetris", "fgd", "optimus"])
def test_gang_larger_than_a_node_spans_as_few_nodes_as_possible(name: str) -> None:
    view = cluster(6)
    for index, mask in enumerate((0b1, 0b11, 0b1111, 0b111, 0b1111, 0b1)):
        view.put(replace(view.row(f"s{index}"), free_mask=mask, version=50 + index))
    found = place(view, gang(8), name)
    assert found is not None
    assert {claim.node for claim in found} == {"s2", "s4"}


def test_first_fit_takes_the_first_rack_and_best_fit_the_tightest() -> None:
    view = cluster(8, per_rack=4)
    view.put(replace(view.row("s4"), free_mask=0, version=99))
    near = gang(8, widest=LocalityLevel.RACK)
    nodes = {name: [claim.node for claim in place(view, near, name) or ()] for name in ("first-fit", "best-fit")}
    assert nodes == {"first-fit": ["s0", "s1"], "best-fit": ["s5", "s6"]}


def test_best_fit_keeps_whole_sockets_whole() -> None:
    view = cluster(2, server("2x2"))
    view.put(replace(view.row("s0"), free_mask=0b0101, version=98))
    view.put(replace(view.row("s1"), free_mask=0b0011, version=99))
    (one,) = place(view, gang(1), "best-fit") or ()
    assert (one.node, one.device_mask) == ("s0", 0b0001)


def test_adaptive_keeps_jobs_apart_under_light_load_and_nodes_whole_under_heavy_load() -> None:
    placed: dict[LoadMode, list[tuple[str, int]]] = {LoadMode.SPREAD: [], LoadMode.PACK: []}
    for mode, places in placed.items():
        view = cluster(2, server("2x2"))
        view.mode = mode
        room = CapacityIndex(view)
        for version in range(4):
            (one,) = PLACEMENTS["adaptive"].place(room, PlacementRequest(gang(1))) or ()
            places.append((one.node, one.device_mask))
            row = view.row(one.node)
            jobs = tuple([count + bool(own) for count, own in zip(row.socket_jobs, one.millicores, strict=True)])
            free = row.free_mask & ~one.device_mask
            view.put(replace(row, free_mask=free, socket_jobs=jobs, version=view.version + 1 + version))
            room.follow()
    assert placed[LoadMode.SPREAD] == [("s0", 0b0001), ("s1", 0b0001), ("s0", 0b0100), ("s1", 0b0100)]
    assert placed[LoadMode.PACK] == [("s0", 0b0001), ("s0", 0b0010), ("s0", 0b0100), ("s0", 0b1000)]


def test_fgd_breaks_less_than_best_fit_on_a_cluster_that_fills_up() -> None:
    mixed = [gang(gpus) for gpus in (4, 1, 2, 1, 2, 8, 1, 4, 2, 1) * 6]
    seen = demand_of_shapes(mixed, cluster(1).sets.values())
    broken = {}
    for name in ("fgd", "first-fit"):
        room = CapacityIndex(cluster(16, server("2x2x2", cores=16)))
        held = []
        for number, shape in enumerate(mixed):
            found = PLACEMENTS[name].place(room, PlacementRequest(shape))
            if found is not None:
                room.take(found)
                held.append(found)
            if number % 3 == 2:
                room.give(held.pop(0))
        free = np.array([mask.bit_count() for mask in room.view.free])
        cores = np.array([sum(millicores) for millicores in room.view.millicores])
        ones = np.ones(16, np.int64)
        counted = fragmented_gpus(seen, free, cores, np.array(room.view.memory), 8 * ones, 0 * ones)
        broken[name] = float(counted.sum())
    assert broken["fgd"] <= broken["first-fit"]


def test_unknown_placement_is_named_beside_the_known_ones() -> None:
    with pytest.raises(KeyError, match=r"no placement 'magic'; there are first-fit, best-fit"):
        placement_named("magic")
