"""Moves of running gangs: what they are for, what they save, how many at once. (3 s)"""

from __future__ import annotations

import math

import pytest
from ganger.cluster.capacity_index import CapacityIndex, Trial
from ganger.cluster.claims import make_claim
from ganger.cluster.fit import fit, gang_level
from ganger.cluster.resources import Claim, GangShape, LocalityLevel, NodeRow
from ganger.cluster.view import LoadMode, View
from ganger_master.core.plan_changes import Goal
from ganger_master.estimators.speed import LocalityModel
from ganger_master.policies.make_room import Displacement, Movable, Movables, in_order, room_for
from ganger_master.policies.migration_choice import (
    FreeDeviceCounts,
    GangDistance,
    MeasuredColocation,
    MigrationProposal,
    MigrationTerms,
    Tried,
    capped,
    closer,
    defragmented,
    drained,
    exchanged,
    fragmented_nodes,
    is_worth_reverting,
    judge_migration,
    movable,
    separated,
    tried,
)
from ganger_master.policies.trials import FailedTrials, TrialRates, TrialVerdict
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.clusters import cluster, gang, server
from msgspec import structs
from msgspec.structs import replace

# VGG16 and ResNet101 on four GPUs, nearly (Chronus): a third of the speed on four servers, and hardly any loss.
SENSITIVE = LocalityModel(across=0.3, per_node=0.6, per_gpu=0.2, inside=0.1, beyond=0.1)
INDIFFERENT = LocalityModel(across=0.02, per_node=0.0, per_gpu=0.0, inside=0.0, beyond=0.0)
PAUSE_S = 2.0


def rows(view: View) -> list[NodeRow]:
    return [structs.replace(row, version=0) for row in view.rows()]


def put(view: View, number: int, *on: tuple[int, int], shape: GangShape | None = None) -> Movable:
    """A gang with so many devices on each of these nodes."""
    gpus = sum(count for _, count in on)
    shape = shape or gang(gpus)
    claims: list[Claim] = []
    for node, count in on:
        claim = make_claim(view, node, gang(count), (count,), LoadMode.PACK)
        assert claim is not None
        view.take(claim, gpus)
        claims.append(claim)
    return movable(view, number, shape, tuple(claims), PAUSE_S)


def spread(one: Movable, model: LocalityModel = SENSITIVE, remaining_s: float = 3600.0) -> GangDistance:
    return GangDistance(one, model, remaining_s)


def test_sensitive_gang_is_brought_together_when_a_node_is_free() -> None:
    view = cluster(3)
    one = put(view, 1, (0, 2), (1, 2))
    before = rows(view)
    (found,) = closer(MigrationTerms(CapacityIndex(view)), [spread(one)])
    assert rows(view) == before
    (move,) = found.moves
    assert (found.goal, move.number) == (Goal.LOCALITY, 1)
    assert {claim.node for claim in move.claims} == {"s2"}
    lost = 1.0 - SENSITIVE.relative_speed(4, 2, LocalityLevel.CLUSTER) / SENSITIVE.relative_speed(
        4, 1, gang_level(view, move.claims)
    )
    assert found.saves == pytest.approx(3600.0 * 4 * lost - PAUSE_S * 4)


def test_gang_that_comes_together_on_one_of_its_nodes_needs_host_memory_there_once() -> None:
    """It leaves the devices of one socket for those of the other one, and has half of the node's memory."""
    view = cluster(2, server("2x4", gib=52))
    put(view, 2, (0, 1))
    put(view, 3, (1, 6))
    claims = []
    for node, count in ((0, 3), (1, 1)):
        claim = make_claim(view, node, gang(count, gib=8), (count,), LoadMode.PACK)
        assert claim is not None
        view.take(claim, 4)
        claims.append(claim)
    one = movable(view, 1, gang(4, gib=8), tuple(claims), PAUSE_S)
    before = rows(view)
    (found,) = closer(MigrationTerms(CapacityIndex(view)), [spread(one)])
    assert rows(view) == before
    assert [claim.node for claim in found.moves[0].claims] == ["s0"]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 4), min_size=6, max_size=6), st.lists(st.integers(1, 3), min_size=2, max_size=4))
def test_closer_than_where_room_is_counted_no_search_finds_a_place(others: list[int], own: list[int]) -> None:
    """Six nodes of four GPUs in three racks of a fabric; others hold so many, and the gang is on the first nodes."""
    view = cluster(6, server("2x2"), per_rack=2)
    beside = [count if node >= len(own) else min(count, 4 - own[node]) for node, count in enumerate(others)]
    for node, count in enumerate(beside):
        if count:
            put(view, 2 + node, (node, count))
    one = put(view, 1, *enumerate(own), shape=gang(sum(own)))
    closest, room = FreeDeviceCounts(view).closest(one.claims), CapacityIndex(view)
    trying = Trial(room)
    for level in range(LocalityLevel.NVLINK, gang_level(view, one.claims)):
        shape = gang(sum(own), widest=LocalityLevel(level))
        trying.give(one.claims)
        found = room_for(room, Movables(view, ()), shape, stay=(1,))
        trying.undo()
        assert found is None or level >= closest
    free = [4 - count for count in beside]
    racks = [free[0] + free[1], free[2] + free[3], free[4] + free[5]]
    counted = (
        LocalityLevel.NVLINK
        if max(free) >= sum(own)
        else LocalityLevel.RACK
        if max(racks) >= sum(own)
        else LocalityLevel.FABRIC
    )
    assert closest is counted


def test_a_node_is_fragmented_if_it_is_in_use_and_most_of_its_devices_are_free() -> None:
    view = cluster(4)
    put(view, 1, (0, 1))
    put(view, 2, (1, 2))
    put(view, 3, (2, 4))
    assert fragmented_nodes(view) == {"s0"}


def test_gang_to_which_it_makes_no_difference_stays_apart() -> None:
    view = cluster(3)
    assert closer(MigrationTerms(CapacityIndex(view)), [spread(put(view, 1, (0, 2), (1, 2)), INDIFFERENT)]) == []


def test_gang_that_ends_soon_stays_apart() -> None:
    view = cluster(3)
    assert closer(MigrationTerms(CapacityIndex(view)), [spread(put(view, 1, (0, 2), (1, 2)), remaining_s=2.0)]) == []


def test_the_gang_that_saves_most_gets_the_only_place() -> None:
    view = cluster(4)
    one, other = put(view, 1, (0, 2), (1, 2)), put(view, 2, (0, 2), (1, 2))
    put(view, 3, (2, 4))
    (found,) = closer(MigrationTerms(CapacityIndex(view)), [spread(one), spread(other, remaining_s=7200.0)])
    assert [move.number for move in found.moves] == [2]


def test_gang_goes_into_its_own_place_and_what_is_free_beside_it() -> None:
    view = cluster(2)
    one = put(view, 1, (0, 2), (1, 2))
    (found,) = closer(MigrationTerms(CapacityIndex(view)), [spread(one)])
    ordered, parked = in_order(found.moves)
    assert len({claim.node for claim in found.moves[-1].claims}) == 1
    # It needs what it holds itself: parked in host memory first.
    assert ordered == parked == found.moves


def test_place_where_it_was_slow_is_not_tried_again_at_once() -> None:
    view = cluster(3)
    one = put(view, 1, (0, 2), (1, 2))
    room = CapacityIndex(view)
    (found,) = closer(MigrationTerms(room), [spread(one)])
    failed = FailedTrials[Tried]().noted(("jobs/1", frozenset({"s2"})), 0.0)
    assert closer(MigrationTerms(room, 10.0, failed), [spread(one)]) == []
    assert closer(MigrationTerms(room, 4000.0, failed), [spread(one)]) == [found]


def exchange(
    view: View, one: Movable, other: Movable, its: LocalityModel, remaining_s: float = 3600.0
) -> tuple[MigrationProposal, ...]:
    room = CapacityIndex(view)
    before = rows(view)
    widest = LocalityLevel.CLUSTER
    gains, gives = GangDistance(one, SENSITIVE, remaining_s, widest), GangDistance(other, its, remaining_s, widest)
    found = exchanged(MigrationTerms(room), [gains], [gains, gives])
    assert rows(view) == before
    for proposal in found:
        for move in proposal.moves:
            for claim in move.gang.claims:
                view.give(claim)
        for move in proposal.moves:
            assert fit(view, structs.replace(move.gang.shape, locality=gang(1).locality), move.claims) == ()
            for claim in move.claims:
                view.take(claim)
    return tuple(found)


def test_two_gangs_that_lie_on_the_same_two_nodes_get_one_each() -> None:
    view = cluster(2)
    one, other = put(view, 1, (0, 2), (1, 2)), put(view, 2, (0, 2), (1, 2))
    (found,) = exchange(view, one, other, SENSITIVE)
    assert (found.goal, [move.number for move in found.moves]) == (Goal.EXCHANGE, [2, 1])
    assert [len(move.claims) for move in found.moves] == [1, 1]


def test_a_gang_that_needs_locality_gets_the_place_of_one_that_does_not() -> None:
    view = cluster(3)
    one, other = put(view, 1, (0, 2), (1, 2)), put(view, 2, (2, 4))
    put(view, 3, (0, 2))
    put(view, 4, (1, 2))
    (found,) = exchange(view, one, other, INDIFFERENT)
    assert {move.number: sorted(claim.node for claim in move.claims) for move in found.moves} == {
        1: ["s2"],
        2: ["s0", "s1"],
    }


@pytest.mark.parametrize(
    ("its", "remaining_s", "why"),
    [
        (SENSITIVE, 3600.0, "the other would be slower by as much"),
        (INDIFFERENT, 6.0, "two pauses take more than is left to save"),
    ],
)
def test_places_are_not_exchanged_where_it_does_not_pay_for_both(
    its: LocalityModel, remaining_s: float, why: str
) -> None:
    view = cluster(3)
    one, other = put(view, 1, (0, 2), (1, 2)), put(view, 2, (2, 4))
    put(view, 3, (0, 2))
    put(view, 4, (1, 2))
    assert exchange(view, one, other, its, remaining_s) == (), why


def test_places_that_did_not_help_are_not_exchanged_again_at_once() -> None:
    view = cluster(2)
    one, other = (GangDistance(put(view, number, (0, 2), (1, 2)), SENSITIVE, 3600.0) for number in (1, 2))
    (found,) = exchanged(MigrationTerms(CapacityIndex(view)), [one], [other])
    failed = FailedTrials[Tried]().noted(tried(1, "", found.moves[-1].claims), 0.0)
    assert not [
        again
        for again in exchanged(MigrationTerms(CapacityIndex(view), 10.0, failed), [one], [other])
        if again.moves[-1].claims[0].node == found.moves[-1].claims[0].node
    ]


@pytest.mark.parametrize(
    ("gain", "remaining_s", "pause_s", "pays"),
    [
        (0.5, 100.0, 2.0, True),
        (0.5, 3.0, 2.0, False),
        # Less than a move may cost anyhow: noise.
        (0.97, 1e6, 2.0, False),
        (1.0, 1e6, 0.0, False),
        (1.4, 1e6, 0.0, False),
    ],
)
def test_the_way_back_has_to_pay_for_itself(gain: float, remaining_s: float, pause_s: float, pays: bool) -> None:
    assert is_worth_reverting(gain, remaining_s, pause_s) is pays


def test_what_did_not_help_is_remembered_of_all_jobs_alike() -> None:
    view = cluster(2)
    claims = put(view, 1, (0, 1)).claims
    assert tried(1, "", claims) == ("jobs/1", frozenset({"s0"}))
    assert tried(1, "digits", claims) == tried(2, "digits", claims)


def test_moved_gang_never_lies_further_apart_than_before() -> None:
    view = cluster(4, per_rack=2)
    one = put(view, 1, (0, 2), (1, 2))
    assert one.shape.locality.widest is LocalityLevel.RACK
    alone = put(view, 2, (2, 2))
    assert alone.shape.locality.widest is LocalityLevel.NODE


def test_pack_that_loses_the_most_is_taken_apart_first() -> None:
    view = cluster(2, server("2"))
    first, second, third = (put(view, number, (number // 2, 1)) for number in (0, 1, 2))
    assert view.free == [0, 2]
    packs = [MeasuredColocation(1.9, 2, (first,)), MeasuredColocation(1.2, 2, (second, third))]
    (found,) = separated(MigrationTerms(CapacityIndex(view)), packs, 600.0)
    assert (found.goal, [move.number for move in found.moves]) == (Goal.UNPACK, [1])
    assert found.saves == pytest.approx(0.4 * 600.0 - PAUSE_S)
    assert separated(MigrationTerms(CapacityIndex(view)), packs, 1.0) == []


def test_a_drained_node_is_emptied_and_no_job_is_stopped() -> None:
    view = cluster(3)
    gangs = [put(view, 1, (0, 2)), put(view, 2, (0, 1)), put(view, 3, (1, 3)), put(view, 4, (2, 2))]
    room = CapacityIndex(view)
    before = rows(view)
    found, stuck = drained(MigrationTerms(room), "s0", gangs, Movables(view, gangs))
    assert rows(view) == before
    assert stuck == []
    assert [[move.number for move in one.moves] for one in found] == [[1], [2]]
    assert all("s0" not in {claim.node for move in one.moves for claim in move.claims} for one in found)


def test_draining_moves_other_jobs_aside_and_reports_the_jobs_without_a_place() -> None:
    view = cluster(3)
    gangs = [put(view, 1, (0, 4), shape=gang(4, widest=LocalityLevel.NODE)), put(view, 2, (1, 1)), put(view, 3, (2, 2))]
    found, _ = drained(MigrationTerms(CapacityIndex(view)), "s0", gangs, Movables(view, gangs))
    assert [[move.number for move in one.moves] for one in found] == [[2, 1]]
    fixed = replace(gangs[1], move_cost=math.inf)
    others = [gangs[0], fixed, replace(gangs[2], move_cost=math.inf)]
    assert drained(MigrationTerms(CapacityIndex(view)), "s0", others, Movables(view, others)) == ([], [1])
    unmovable = [replace(gangs[0], move_cost=math.inf), *gangs[1:]]
    assert drained(MigrationTerms(CapacityIndex(view)), "s0", unmovable, Movables(view, unmovable)) == ([], [1])


def test_nodes_with_three_of_four_free_are_emptied() -> None:
    """Gandiva's threshold."""
    view = cluster(4)
    gangs = [put(view, 1, (0, 1)), put(view, 2, (1, 1)), put(view, 3, (2, 3)), put(view, 4, (3, 2))]
    room = CapacityIndex(view)
    before = rows(view)
    found = defragmented(MigrationTerms(room), gangs)
    assert rows(view) == before
    assert [(move.number, [c.node for c in move.claims]) for one in found for move in one.moves] == [
        (1, ["s2"]),
        (2, ["s3"]),
    ]
    assert all(one.goal is Goal.DEFRAGMENT for one in found)
    failed = FailedTrials[Tried]().noted(("jobs/1", frozenset({"s2"})), 0.0)
    assert [one.moves[0].number for one in defragmented(MigrationTerms(room, failed=failed), gangs)] == [2]


@settings(max_examples=80, deadline=None)
@given(st.lists(st.lists(st.sampled_from([1, 1, 2, 3]), max_size=3).filter(lambda s: sum(s) <= 4), max_size=7))
def test_after_defragmenting_no_node_is_fragmented_whose_gangs_had_a_better_place(nodes: list[list[int]]) -> None:
    view = cluster(max(1, len(nodes)))
    gangs = [put(view, 10 * at + n, (at, size)) for at, some in enumerate(nodes) for n, size in enumerate(some)]
    idle = sum(mask == 0b1111 for mask in view.free)
    found = defragmented(MigrationTerms(CapacityIndex(view)), gangs)
    at = {one.number: one.claims for one in gangs}
    for proposal in found:
        (move,) = proposal.moves
        assert fit(view, move.gang.shape, move.claims) == ()
        view.take(move.claims[0])
        view.give(at[move.number][0])
        at[move.number] = move.claims
    assert sum(mask == 0b1111 for mask in view.free) >= idle
    free = [mask.bit_count() for mask in view.free]
    fragmented = [room for room in free if 3 <= room < 4]
    # A node that is left with one gang of one device, as no other that is not idle has room for it.
    assert len(fragmented) <= 1
    assert not fragmented or not any(1 <= room < 3 for room in free)


def test_concurrent_moves_are_capped_and_no_job_is_moved_twice_in_a_row() -> None:
    view = cluster(6)
    gangs = [put(view, number, (number, 1)) for number in range(3)]
    claims = [make_claim(view, node, gang(1), (1,), LoadMode.PACK) for node in (3, 3, 4)]
    proposals = [
        MigrationProposal(Goal.DEFRAGMENT, (Displacement(one, (claim,)),))
        for one, claim in zip(gangs, claims, strict=True)
        if claim is not None
    ]

    def moved(**limits: object) -> list[int]:
        given = {"moved_at": {}, "most": 9, **limits}
        return [one.moves[0].number for one in capped(proposals, 1000.0, **given)]  # type: ignore[arg-type]

    # Two go to the same node.
    assert moved() == [0, 2]
    assert moved(most=1) == [0]
    assert moved(moved_at={0: 900.0}) == [1, 2]
    assert moved(moved_at={0: 400.0}) == [0, 2]


def test_moved_job_stays_where_it_is_not_slower() -> None:
    steady, same, slower, faster = (2.0,) * 8, (1.96, 2.0) * 4, (1.7, 1.72) * 4, (2.4, 2.5) * 4
    assert judge_migration(Goal.DEFRAGMENT, TrialRates(steady, same)).verdict is TrialVerdict.KEEP
    assert judge_migration(Goal.DEFRAGMENT, TrialRates(steady, slower)).verdict is TrialVerdict.UNDO
    assert judge_migration(Goal.LOCALITY, TrialRates(steady, same)).verdict is not TrialVerdict.KEEP
    assert judge_migration(Goal.LOCALITY, TrialRates(steady, faster)).verdict is TrialVerdict.KEEP
