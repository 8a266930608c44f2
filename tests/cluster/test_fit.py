"""The one fit function: typed reasons with numbers, and agreement with a naive twin."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from ganger.cluster.fit import _fits_at_a_glance, _why_not, demand, fit, gang_level, share_of_memory
from ganger.cluster.placement import candidates
from ganger.cluster.refusals import Reason
from ganger.cluster.resources import Claim, GangShape, LocalityLevel, Role, TaskShape
from ganger.cluster.view import View
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.clusters import GIB, cluster, gang, idle_row, parked, server
from msgspec.structs import replace

PAIR = Claim("s0", 0b0011, (4000, 0), demand(server(), gang(2), (2,)).memory_bytes, 0, (2,))

HALF = Claim("s0", 0b0001, (2000, 0), demand(server(), gang(1), (1,)).memory_bytes, 0, (1,))


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
    (refusal,) = fit(cluster(1), gang(2, widest=LocalityLevel.SOCKET), [apart])
    assert refusal.reason is Reason.LOCALITY
    assert refusal.figures == {"level": LocalityLevel.NODE, "widest": LocalityLevel.SOCKET}


@pytest.mark.parametrize(
    "claims",
    [
        [],
        [PAIR, PAIR],
        [replace(PAIR, tasks=(1,))],
        [replace(PAIR, tasks=(2, 0))],
        [replace(PAIR, device_mask=0b0111)],
        [replace(PAIR, device_mask=0b0001)],
        [replace(PAIR, device_mask=-3)],
        [replace(PAIR, millicores=(3000, 0))],
        [replace(PAIR, millicores=(0, 0))],
        [replace(PAIR, millicores=(8000, 0))],
        [replace(PAIR, millicores=(4000,))],
        [replace(PAIR, millicores=(5000, -1000))],
        [replace(PAIR, memory_bytes=1)],
        [replace(PAIR, arena_bytes=1)],
        [replace(PAIR, tasks=(3,)), replace(PAIR, node="s1", tasks=(-1,))],
        [PAIR, Claim("s1", 0, (0, 0), 0, 0, (0,))],
        # The same device twice, in two claims that add up to the job.
        [HALF, HALF],
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


def test_cores_below_zero_are_a_mistake_however_many_the_sum_is() -> None:
    (refusal,) = fit(cluster(1), gang(1), [replace(HALF, millicores=(3000, -1000))])
    assert refusal.reason is Reason.CLAIM_MISMATCH


def test_cores_may_be_retuned_but_not_to_none() -> None:
    view = cluster(1)
    view.take(PAIR, 2)
    none = replace(PAIR, millicores=(0, 0))
    assert fit(view, gang(2), [none], holding=[PAIR], retune=True)[0].reason is Reason.CLAIM_MISMATCH
    assert fit(view, gang(2), [replace(PAIR, millicores=(1000, 0))], holding=[PAIR])


def test_another_number_of_nodes_than_asked_for_is_a_mistake() -> None:
    view = cluster(2)
    apart = [HALF, replace(HALF, node="s1")]
    assert fit(view, gang(2, nodes=2), apart) == ()
    for nodes, claims in [(2, [PAIR]), (1, apart)]:
        assert fit(view, gang(2, nodes=nodes), claims)[0].reason is Reason.CLAIM_MISMATCH
    # The same of several roles.
    roles = GangShape((Role("worker", 2, TaskShape(1)), Role("reader", 1, TaskShape(0))), nodes=2)
    both = replace(PAIR, tasks=(2, 1), millicores=(4000, 1000))
    assert fit(view, roles, [both])[0].reason is Reason.CLAIM_MISMATCH


@pytest.mark.parametrize("change", [lambda view: None, lambda view: view.set_available("s0", False)])
def test_a_gang_may_take_up_its_own_pieces_again_also_where_no_new_one_may_come(
    change: Callable[[View], object],
) -> None:
    of = server()
    # All memory of the node, arena included, is its own.
    whole = replace(PAIR, memory_bytes=of.memory_bytes - 2 * GIB, arena_bytes=2 * GIB)
    shape = gang(2, gib=(of.memory_bytes - 2 * GIB) // GIB // 2, arena_gib=1)
    view = cluster(1)
    assert fit(view, shape, [whole]) == ()
    view.take(whole, 2)
    change(view)
    assert fit(view, shape, [whole])
    assert fit(view, shape, [whole], holding=[whole]) == ()


def test_an_arena_counts_as_memory() -> None:
    of = server()
    shape = gang(2, gib=of.memory_bytes // GIB // 2, arena_gib=1)
    claim = replace(PAIR, memory_bytes=of.memory_bytes)
    assert fit(cluster(1), shape, [claim]) == ()
    (refusal,) = fit(cluster(1), shape, [replace(claim, arena_bytes=2 * GIB)])
    assert refusal.figures == {"needed_bytes": of.memory_bytes + 2 * GIB, "free_bytes": of.memory_bytes}


def test_a_large_gang_that_conflicts_everywhere_is_explained_by_few_nodes() -> None:
    view = cluster(40)
    for name in list(view.names()):
        view.set_available(name, False)
    claims = [replace(HALF, node=f"s{number}") for number in range(40)]
    assert len(fit(view, gang(40), claims)) == 16


def test_gang_over_racks_is_refused_to_a_job_that_accepts_one() -> None:
    view = cluster(2, per_rack=1)
    (refusal,) = fit(view, gang(2, widest=LocalityLevel.RACK), [HALF, replace(HALF, node="s1")])
    assert (refusal.reason, refusal.figures["level"]) == (Reason.LOCALITY, LocalityLevel.FABRIC)


def test_levels_between_nodes_are_those_of_their_rack_and_fabric() -> None:
    of = server()
    view = View([of])
    for name, rack, fabric in [
        ("a", "r1", "f1"),
        ("b", "r1", "f1"),
        ("c", "r2", "f1"),
        ("d", "r3", "f2"),
        ("e", "", ""),
        ("f", "r1", "f2"),
    ]:
        view.put(idle_row(name, of, rack, fabric))

    def level(*nodes: str) -> LocalityLevel:
        return gang_level(view, [Claim(node, 1, (0, 0), 0, 0, (1,)) for node in nodes])

    assert (level("a", "b"), level("a", "b", "c"), level("a", "d")) == (
        LocalityLevel.RACK,
        LocalityLevel.FABRIC,
        LocalityLevel.CLUSTER,
    )
    assert level("a", "e") == level("e") + 6 == LocalityLevel.CLUSTER
    # Racks of two fabrics may have one name.
    assert level("a", "f") == LocalityLevel.CLUSTER
    # Where a task without devices lies takes no device further away.
    reader = Claim("d", 0, (1000, 0), 0, 0, (1,))
    assert gang_level(view, [Claim("a", 1, (0, 0), 0, 0, (1,)), reader]) == LocalityLevel.NVLINK


def test_unset_cores_and_memory_become_the_proportional_share() -> None:
    of = server("4", cores=10, gib=100)
    roles = (Role("worker", 2, TaskShape(1)), Role("reader", 1, TaskShape(0)))
    needed = demand(of, GangShape(roles), (2, 1))
    assert needed.gpus == 2
    assert needed.millicores == 2 * 2000 + 1000
    assert 0 < needed.memory_bytes < 100 * GIB


def test_memory_that_is_not_named_is_left_for_other_gangs_on_its_devices() -> None:
    for gib in (8, 1024):
        of = server("4", cores=10, gib=gib)
        whole, half = [
            demand(of, GangShape((Role("worker", 1, TaskShape(1)),), residents=many), (1,)) for many in (1, 2)
        ]
        assert half.memory_bytes == whole.memory_bytes // 2, "of each node's own share"
        named = GangShape((Role("worker", 1, TaskShape(1, memory_bytes=GIB)),), residents=2)
        assert demand(of, named, (1,)).memory_bytes == GIB


@pytest.mark.parametrize(
    ("measured", "named", "residents", "expected"),
    [
        (0, 0, 1, "share"),
        (0, 0, 2, "half"),
        (3 * GIB, 0, 1, 3 * GIB),
        # What it uses, though another gang is to find room beside it, and never more than its share.
        (3 * GIB, 0, 2, 3 * GIB),
        (10**15, 0, 1, "share"),
        (10**15, 0, 2, "share"),
        (3 * GIB, 5 * GIB, 1, 5 * GIB),
        (9 * GIB, 5 * GIB, 1, 5 * GIB),
    ],
)
def test_memory_is_what_is_named_or_measured_or_the_share(
    measured: int, named: int, residents: int, expected: int | str
) -> None:
    of = server("4", cores=10, gib=400)
    share = share_of_memory(of, 1)
    wanted = {"share": share, "half": share // 2}.get(str(expected), expected)
    shape = GangShape(
        (Role("worker", 2, TaskShape(1, memory_bytes=named)),), task_memory_bytes=measured, residents=residents
    )
    assert demand(of, shape, (2,)).memory_bytes == 2 * int(wanted)


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
        whole = view.topology(claim.node).configuration_set.device_memory_bytes
        for device, kept in enumerate(row.parked_bytes):
            if claim.device_mask >> device & 1 and kept + shape.device_memory_bytes > whole:
                return False
    return gang_level(view, claims) <= shape.locality.widest


@settings(max_examples=100)
@given(
    gpus=st.integers(1, 10),
    widest=st.sampled_from([LocalityLevel.SOCKET, LocalityLevel.NODE, LocalityLevel.CLUSTER]),
    others=st.lists(st.integers(1, 4), max_size=6),
    device_gib=st.integers(0, 4),
    kept=st.lists(st.tuples(st.sampled_from(["s0", "s1", "s2"]), st.integers(0, 3)), max_size=4),
)
def test_fit_agrees_with_the_naive_twin_on_stale_proposals(
    gpus: int, widest: LocalityLevel, others: list[int], device_gib: int, kept: list[tuple[str, int]]
) -> None:
    view = cluster(3)
    shape = gang(gpus, widest=widest, device_gib=device_gib)
    stale = candidates(view, shape, limit=3).candidates
    for other in others:
        for claims in candidates(view, gang(other), limit=1).candidates:
            for claim in claims:
                view.take(claim, other)
    for node, device in kept:
        view.take(parked(node, *(float(at == device) for at in range(4))))
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
    | st.just(PAIR)
    | st.just(replace(PAIR, parked_bytes=(0, 0, 1, 1))),
    st.lists(st.sampled_from([HALF, replace(HALF, node="s1"), replace(HALF, node="gone")]), max_size=2),
    st.sampled_from([True, True, True, False]),
    st.integers(0, 5),
    st.integers(0, 2),
    st.sampled_from(["", "", "virtual", "other"]),
    st.sampled_from([TaskShape(), TaskShape(1, 2000, HALF.memory_bytes)]),
    st.sampled_from([LocalityLevel.SOCKET, LocalityLevel.CLUSTER]),
)
def test_what_fits_at_a_glance_is_what_nothing_can_be_said_against(
    claim: Claim,
    more: list[Claim],
    available: bool,
    device_gib: int,
    nodes: int,
    device_type: str,
    task: TaskShape,
    widest: LocalityLevel,
) -> None:
    view = cluster(2)
    view.set_available("s0", available)
    view.take(parked("s0", 0, 1, 2, 0))
    shape = gang(2, device_gib=device_gib, widest=widest)
    shape = replace(shape, nodes=nodes, device_type=device_type, roles=(Role("worker", 2, task),))
    for claims in ([claim, *more], more):
        assert _fits_at_a_glance(view, shape, claims) is not bool(_why_not(view, shape, claims, (), False))
