"""Growing onto idle GPUs and giving them back at once: which jobs, and how far. (2 s)"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from ganger.cluster.capacity_index import CapacityIndex
from ganger.cluster.claims import make_claim
from ganger.cluster.fit import fit
from ganger.cluster.resources import Claim, GangShape, LocalityLevel
from ganger.cluster.view import LoadMode, View
from ganger_master.planner.growth_stage import Elastic, grow, judge_growth, shrink
from ganger_master.policies.trials import TrialRates, TrialVerdict
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.clusters import cluster, gang, server

SIZES = (1, 2, 3, 4)
# ElasticFlow, A100, iterations per second with 1, 2 and 4 GPUs at one global batch.
RESNET50 = {1: 1.84, 2: 3.45, 4: 6.19}
BERT = {1: 6.0, 2: 8.6, 4: 10.4}


def put(view: View, number: int, node: int, gpus: int, rates: dict[int, float]) -> tuple[Elastic, Claim]:
    claim = make_claim(view, node, gang(gpus), (gpus,), LoadMode.PACK)
    assert claim is not None
    view.take(claim, gpus)
    sizes = tuple(sorted(rates))
    return Elastic(number, sizes, {claim.node: claim.device_mask}, rates), claim


def test_job_grows_from_one_to_four_gpus_of_its_node_and_back_when_another_comes() -> None:
    """Gandiva, figure 11."""
    view = cluster(1)
    job, _ = put(view, 1, 0, 1, dict(RESNET50))
    assert grow([job], view) == (1, 2)
    grown, claim = put(cluster(1), 1, 0, 4, dict(RESNET50))
    full = cluster(1)
    full.take(claim, 4)
    assert grow([grown], full) is None
    assert shrink([grown], CapacityIndex(full), gang(1), {1: (claim,)}) == {1: 2}
    assert shrink([grown], CapacityIndex(full), gang(3, widest=LocalityLevel.NODE), {1: (claim,)}) == {1: 1}
    assert shrink([grown], CapacityIndex(full), gang(4, widest=LocalityLevel.NODE), {1: (claim,)}) == {}


def test_the_job_that_gains_most_grows() -> None:
    view = cluster(2)
    good, _ = put(view, 2, 0, 1, dict(RESNET50))
    poor, _ = put(view, 1, 1, 1, dict(BERT))
    assert grow([poor, good], view) == (2, 2)


def test_growth_stops_where_it_brings_too_little() -> None:
    """BERT: a second GPU brings 0.72 of what it could, two more 0.6."""
    view = cluster(1)
    one, claim = put(view, 1, 0, 1, dict(BERT))
    assert grow([one], view) == (1, 2)
    view.give(claim)
    two, _ = put(view, 1, 0, 2, dict(BERT))
    assert grow([two], view) is None


def test_unmeasured_sizes_are_foretold_and_undone_ones_not_tried_again() -> None:
    view = cluster(1)
    job, _ = put(view, 1, 0, 1, {1: 5.0})
    job = replace(job, sizes=SIZES)
    assert grow([job], view) is not None
    assert grow([replace(job, ceiling=2)], view) is None


def test_job_grows_only_beside_its_own_devices() -> None:
    view = cluster(2, server("2"))
    job, _ = put(view, 1, 0, 1, {1: 1.0})
    assert grow([replace(job, sizes=(1, 3))], view) is None


def test_growth_is_kept_from_seven_tenths_of_linear_on() -> None:
    random = np.random.default_rng(0)
    before = tuple((10.0 + 0.3 * random.standard_normal(16)).tolist())
    for speed_up, expected in (
        (1.9, TrialVerdict.KEEP),
        (1.55, TrialVerdict.KEEP),
        (1.3, TrialVerdict.UNDO),
        (1.0, TrialVerdict.UNDO),
    ):
        after = tuple((10.0 * speed_up + 0.3 * random.standard_normal(64)).tolist())
        assert judge_growth(1, 2, TrialRates(before, after)).verdict is expected


def test_those_shrink_whose_gpus_are_worth_the_least() -> None:
    view = cluster(2)
    good, good_claim = put(view, 1, 0, 4, dict(RESNET50))
    poor, poor_claim = put(view, 2, 1, 4, dict(BERT))
    claims = {1: (good_claim,), 2: (poor_claim,)}
    assert shrink([good, poor], CapacityIndex(view), gang(1), claims) == {2: 2}
    assert shrink([good, poor], CapacityIndex(view), gang(2), claims) == {2: 2}
    assert shrink([good, poor], CapacityIndex(view), gang(3, widest=LocalityLevel.NODE), claims) == {2: 1}
    assert shrink([good, poor], CapacityIndex(view), gang(6, nodes=2), claims) == {1: 1, 2: 1}


def test_a_job_on_both_nodes_of_a_gang_is_cut_once() -> None:
    view = cluster(2)
    for node in range(2):
        put(view, 7, node, 2, dict(BERT))
    pieces = [put(view, 1, node, 2, {1: 1.0, 4: 2.0}) for node in range(2)]
    job = replace(pieces[0][0], seat={claim.node: claim.device_mask for _, claim in pieces})
    claims = {1: tuple([claim for _, claim in pieces])}
    assert shrink([job], CapacityIndex(view), gang(2, nodes=2), claims) == {1: 1}


def test_no_job_shrinks_for_a_gang_that_fits_already() -> None:
    view = cluster(2)
    job, claim = put(view, 1, 0, 4, dict(RESNET50))
    assert shrink([job], CapacityIndex(view), gang(4), {1: (claim,)}) == {}


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 4), st.lists(st.floats(0.3, 1.0), min_size=3, max_size=3)), min_size=1, max_size=4
    ),
    st.sampled_from([1, 2, 3]),
)
def test_what_is_given_back_makes_room_at_the_least_loss(some: list[tuple[int, list[float]]], needed: int) -> None:
    """Against a look at all sizes of all jobs, one a node."""
    view = cluster(len(some))
    jobs, claims = [], {}
    for node, (gpus, gains) in enumerate(some):
        # Each further GPU brings less than the one before.
        gains = [1.0, *sorted(gains, reverse=True)]
        rates = {count: sum(gains[:count]) for count in range(1, gpus + 1)}
        job, claim = put(view, node, node, gpus, rates)
        jobs.append(job)
        claims[node] = (claim,)
    shape: GangShape = gang(needed, widest=LocalityLevel.NODE)
    free = [mask.bit_count() for mask in view.free]
    found = shrink(jobs, CapacityIndex(view), shape, claims)
    if max(free) >= needed:
        assert found == {}
        return
    losses = [job.rate(job.gpus) - job.rate(4 - needed) for job in jobs if job.gpus > 4 - needed >= 1]
    if not losses:
        assert found == {}
        return
    ((number, size),) = found.items()
    assert jobs[number].rate(jobs[number].gpus) - jobs[number].rate(size) == pytest.approx(min(losses))
    claim = claims[number][0]
    view.give(claim)
    left = make_claim(view, number, gang(size), (size,), LoadMode.PACK)
    assert left is not None
    view.take(left)
    hole = make_claim(view, number, shape, (needed,), LoadMode.PACK)
    assert hole is not None
    assert fit(view, shape, (hole,)) == ()
