"""The placement engine against its naive twin: every candidate in its order, and what blocks a gang. (25 s)"""

from __future__ import annotations

import pytest
from ganger.cluster.capacity_index import CapacityIndex
from ganger.cluster.placement import candidates, place
from ganger.cluster.refusals import Reason
from ganger.cluster.resources import GangShape, LocalityLevel
from ganger.cluster.search import PlacementRequest
from ganger.cluster.view import View
from ganger_master.policies.placements import PLACEMENTS
from hypothesis import given, settings
from hypothesis import strategies as st
from kit import naive_placement as naive
from kit.busy import shapes, views
from kit.clusters import cluster, gang, gangs
from kit.histories import CHANGES, History

ALL = 1_000
BY_ESTIMATES = sorted(PLACEMENTS.keys() - naive.candidates_by.keys())


@pytest.mark.parametrize("name", sorted(naive.candidates_by))
@settings(max_examples=150)
@given(view=views(), shape=shapes)
def test_all_candidates_come_in_the_order_of_the_naive_twin(name: str, view: View, shape: GangShape) -> None:
    found = PLACEMENTS[name].places(CapacityIndex(view), PlacementRequest(shape, limit=ALL))
    assert list(found) == naive.candidates_by[name](view, shape, shape.locality.widest)


@pytest.mark.parametrize("name", BY_ESTIMATES)
@settings(max_examples=100)
@given(view=views(), shape=shapes)
def test_preferences_with_estimates_offer_each_node_that_holds_the_gang_once(
    name: str, view: View, shape: GangShape
) -> None:
    index = CapacityIndex(view)
    found = PLACEMENTS[name].places(index, PlacementRequest(shape, limit=ALL))
    hosts = naive.hosts(view, shape, shape.locality.widest) if shape.nodes <= 1 else []
    if hosts:
        assert sorted(view.slots[claim.node] for (claim,) in found) == hosts
    for limit in (1, 2):
        assert found[:limit] == PLACEMENTS[name].places(index, PlacementRequest(shape, limit=limit))


@settings(max_examples=300)
@given(view=views(), shape=shapes, data=st.data())
def test_blockers_and_their_figures_are_those_of_the_naive_twin(
    view: View, shape: GangShape, data: st.DataObject
) -> None:
    avoid = frozenset(data.draw(st.sets(st.sampled_from(sorted(view.names())), max_size=2)))
    answer = place(CapacityIndex(view), PlacementRequest(shape, avoid=avoid))
    if answer.candidates:
        return
    widest = shape.locality.widest
    assert [refusal.reason for refusal in answer.refusals] == naive.blocking_reasons(view, shape, widest, avoid)
    expected = naive.figures(view, shape, widest, avoid)
    for refusal in answer.refusals:
        if refusal.reason in expected:
            assert dict(refusal.figures) == expected[refusal.reason]


@settings(max_examples=60)
@given(
    some=st.lists(gangs(), min_size=1, max_size=3),
    changes=st.lists(st.tuples(CHANGES, st.integers(0, 2)), max_size=25),
    per_rack=st.sampled_from([0, 2]),
    avoid=st.sampled_from([(), ("s1", "s2", "gone")]),
)
def test_an_index_that_follows_its_view_answers_as_a_new_one(
    some: list[GangShape], changes: list[tuple[tuple[str, int], int]], per_rack: int, avoid: tuple[str, ...]
) -> None:
    history = History(cluster(4, per_rack=per_rack))
    for (what, at), which in changes:
        history.change(what, at, some[which % len(some)])
        for one in some:
            # A copy begins without an index.
            assert candidates(history.view, one, avoid=avoid) == candidates(history.view.copy(), one, avoid=avoid)


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        (gang(3, widest=LocalityLevel.SOCKET), Reason.LOCALITY),
        (gang(17), Reason.GPUS),
        (gang(2, cores=9), Reason.CORES),
        (gang(1, gib=65), Reason.MEMORY),
        (gang(1, device_gib=5), Reason.DEVICE_MEMORY),
        (gang(1, cores=9, device_gib=2), Reason.CORES),
        (gang(1, device_type="h100"), Reason.DEVICE_TYPE),
    ],
)
def test_the_first_blocker_is_the_constraint_that_is_violated(shape: GangShape, reason: Reason) -> None:
    assert candidates(cluster(4), shape).refusals[0].reason is reason
