"""The one fit function: typed reasons with numbers, and agreement with a naive twin."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from ganger.placement.candidates import candidates
from ganger.resources.fit import _fit_node, _is_free, demand, fit, gang_level
from ganger.resources.reasons import Reason, Refusal
from ganger.resources.values import Claim, GangShape, Level, Role, TaskShape
from ganger.resources.view import View
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.clusters import GIB, cluster, gang, idle_row, server
from msgspec.structs import replace

PAIR = Claim("s0", 0b0011, (4000, 0), demand(server(), gang(2), (2,)).memory_bytes, 0, (2,))


def test_pair_with_its_share_of_the_node_fits() -> None:
    assert fit(cluster(1), gang(2), [PAIR]) == ()


@pytest.mark.parametrize(
    ("change", "reason", "figure"),
    [
        (lambda view: view.put(replace(view.row("s0"), free_mask=0b1110, version=99)), Reason.GPUS, "conflicting"),
        (
            lambda view: view.put(replace(view.row("s0"), free_millicores=(3000, 4000), version=99)),
            Reason.CORES,
            "needed_millicores",
        ),
        (
            lambda view: view.put(replace(view.row("s0"), free_memory_bytes=GIB, version=99)),
            Reason.MEMORY,
            "free_bytes",
        ),
        (lambda view: view.set_available("s0", False), Reason.NODE_UNAVAILABLE, ""),
        (lambda view: view.remove("s0"), Reason.NODE_GONE, ""),
    ],
)
def test_what_is_missing_is_named_with_numbers(change: Callable[[View], object], reason: Reason, figure: str) -> None:
    view = cluster(1)
    change(view)
    (refusal,) = fit(view, gang(2), [PAIR])
    assert (refusal.reason, refusal.node) == (reason, "s0")
    assert not figure or figure in refusal.figures


def test_other_device_type_is_refused() -> None:
    (refusal,) = fit(cluster(1), gang(2, device_type="h100"), [PAIR])
    assert refusal.reason is Reason.DEVICE_TYPE


def test_devices_further_apart_than_accepted_are_refused_with_both_levels() -> None:
    apart = replace(PAIR, device_mask=0b0101, millicores=(2000, 2000))
    (refusal,) = fit(cluster(1), gang(2, widest=Level.SOCKET), [apart])
    assert refusal.reason is Reason.LOCALITY
    assert refusal.figures == {"level": Level.NODE, "widest": Level.SOCKET}


@pytest.mark.parametrize(
    "claims",
    [
        [],
        [PAIR, PAIR],
        [replace(PAIR, tasks=(1,))],
        [replace(PAIR, tasks=(2, 0))],
        [replace(PAIR, device_mask=0b0111)],
        [replace(PAIR, millicores=(8000, 0))],
        [replace(PAIR, millicores=(4000,))],
        [replace(PAIR, millicores=(5000, -1000))],
        [replace(PAIR, memory_bytes=1)],
        [replace(PAIR, arena_bytes=1)],
        [replace(PAIR, tasks=(3,)), replace(PAIR, node="s1", tasks=(-1,))],
    ],
)
def test_claims_that_do_not_add_up_to_the_job_are_a_mistake(claims: list[Claim]) -> None:
    refusals = fit(cluster(2), gang(2), claims)
    assert refusals
    assert {refusal.reason for refusal in refusals} == {Reason.CLAIM_MISMATCH}


def test_own_pieces_count_as_free_for_other_cores() -> None:
    view = cluster(1)
    view.take(PAIR, 2)
    more = replace(PAIR, millicores=(4000, 3000))
    assert fit(view, gang(2), [more])
    assert fit(view, gang(2), [more], holding=[PAIR], retune=True) == ()


def test_levels_between_nodes_are_those_of_their_rack_and_fabric() -> None:
    of = server()
    view = View([of])
    for name, rack, fabric in [
        ("a", "r1", "f1"),
        ("b", "r1", "f1"),
        ("c", "r2", "f1"),
        ("d", "r3", "f2"),
        ("e", "", ""),
    ]:
        view.put(idle_row(name, of, rack, fabric))

    def level(*nodes: str) -> Level:
        return gang_level(view, [Claim(node, 1, (0, 0), 0, 0, (1,)) for node in nodes])

    assert (level("a", "b"), level("a", "b", "c"), level("a", "d")) == (Level.RACK, Level.FABRIC, Level.CLUSTER)
    assert level("a", "e") == level("e") + 6 == Level.CLUSTER


def test_unset_cores_and_memory_become_the_proportional_share() -> None:
    of = server("4", cores=10, gib=100)
    roles = (Role("worker", 2, TaskShape(1)), Role("reader", 1, TaskShape(0)))
    needed = demand(of, GangShape(roles), (2, 1))
    assert needed.gpus == 2
    assert needed.millicores == 2 * 2000 + 1000
    assert 0 < needed.memory_bytes < 100 * GIB


def naive_fits(view: View, shape: GangShape, claims: tuple[Claim, ...]) -> bool:
    """Rows and counters only, one rule after the other."""
    for index, role in enumerate(shape.roles):
        if sum(claim.tasks[index] for claim in claims) != role.tasks:
            return False
    for claim in claims:
        row = view.row(claim.node)
        if not row.available or claim.device_mask & ~row.free_mask:
            return False
        if any(wanted > have for wanted, have in zip(claim.millicores, row.free_millicores, strict=True)):
            return False
        if claim.memory_bytes + claim.arena_bytes > row.free_memory_bytes:
            return False
    return gang_level(view, claims) <= shape.locality.widest


@settings(max_examples=100)
@given(
    gpus=st.integers(1, 10),
    widest=st.sampled_from([Level.SOCKET, Level.NODE, Level.CLUSTER]),
    others=st.lists(st.integers(1, 4), max_size=6),
)
def test_fit_agrees_with_the_naive_twin_on_stale_proposals(gpus: int, widest: Level, others: list[int]) -> None:
    view = cluster(3)
    shape = gang(gpus, widest=widest)
    stale = candidates(view, shape, limit=3).candidates
    for other in others:
        for claims in candidates(view, gang(other), limit=1).candidates:
            for claim in claims:
                view.take(claim, other)
    for claims in stale:
        assert (not fit(view, shape, claims)) == naive_fits(view, shape, claims)


@settings(max_examples=200)
@given(
    st.builds(
        Claim,
        st.just("s0"),
        st.integers(0, 0b11111),
        st.lists(st.integers(-1, 9).map(lambda cores: 1000 * cores), min_size=1, max_size=3).map(tuple),
        st.sampled_from([PAIR.memory_bytes, 0, 1 << 50]),
        st.sampled_from([0, 7]),
        st.tuples(st.integers(0, 4)),
    )
    | st.just(PAIR),
    st.booleans(),
)
def test_what_is_free_at_a_glance_is_what_nothing_can_be_said_against(claim: Claim, available: bool) -> None:
    view = cluster(1)
    view.set_available("s0", available)
    said: list[Refusal] = []
    _fit_node(view, 0, gang(2), claim, None, False, said)
    assert _is_free(view, 0, gang(2), claim) is not bool(said)
