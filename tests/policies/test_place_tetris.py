"""Tetris's scores and its pass machine by machine, against loops over single jobs, machines and resources."""

from __future__ import annotations

import math

import numpy as np
import pytest
from ganger.cluster.capacity_index import CapacityIndex
from ganger.cluster.fit import fit
from ganger.cluster.resources import GangShape
from ganger.cluster.search import PlacementRequest
from ganger.cluster.view import View
from ganger_master.policies.tetris import (
    TETRIS,
    Alignment,
    Knobs,
    alignment_of,
    placement_by,
    tetris_gangs,
    within_fairness,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.busy import shapes, views
from kit.clusters import cluster, gang, server
from msgspec.structs import replace

# Eighths: their sums and products are exact, so that ties are ties.
eighths = st.integers(0, 8).map(lambda count: count / 8)


@given(st.lists(st.tuples(eighths, st.booleans()), min_size=1, max_size=8), st.sampled_from([0.0, 0.25, 0.5, 0.9]))
def test_fairness_serves_those_furthest_below_their_share(jobs: list[tuple[float, bool]], fairness: float) -> None:
    shares, waiting = (np.array(column) for column in zip(*jobs, strict=True))
    order = sorted((share, index) for index, (share, waits) in enumerate(jobs) if waits)
    served = {index for _, index in order[: math.ceil(round((1 - fairness) * len(order), 9))]}
    assert set(np.flatnonzero(within_fairness(shares, waiting, fairness))) == served


@settings(max_examples=60)
@given(views(), st.lists(shapes, min_size=1, max_size=5), st.data())
def test_of_all_gangs_the_one_whose_place_scores_best_goes_first(
    view: View, gangs: list[GangShape], data: st.DataObject
) -> None:
    """Of gangs on single nodes, whose alignments can only fall."""
    gangs = [replace(shape, nodes=1) for shape in gangs]
    numbers = st.lists(st.integers(0, 5), min_size=len(gangs), max_size=len(gangs))
    work, shares = (np.array(data.draw(numbers), np.float64) for _ in range(2))
    room, twin = CapacityIndex(view.copy()), CapacityIndex(view.copy())
    found = tetris_gangs(room, gangs, work, shares, Knobs(fairness=0.5))

    waiting = np.flatnonzero(within_fairness(shares, np.ones(len(gangs), np.bool_), 0.5)).tolist()
    epsilon, expected = None, []
    while True:
        places = {
            job: claims for job in waiting if (claims := TETRIS.place(twin, PlacementRequest(gangs[job]))) is not None
        }
        if not places:
            break
        alignments = {job: alignment_of(twin, claims, Alignment.DOT) for job, claims in places.items()}
        if epsilon is None:
            total = sum(float(work[job]) for job in places)
            epsilon = sum(alignments.values()) / total if total else 0.0
        scored = {job: round(alignments[job] - epsilon * float(work[job]), 9) for job in places}
        best = max(scored, key=lambda job: (scored[job], -job))
        expected.append((best, places[best]))
        twin.take(places[best])
        waiting.remove(best)
    assert found == expected


@pytest.mark.parametrize("kind", Alignment)
def test_gangs_that_are_chosen_fit_and_are_taken(kind: Alignment) -> None:
    room = CapacityIndex(cluster(4, server("2x2", cores=16)))
    gangs = [gang(4, cores=1), gang(8), gang(2, cores=6), gang(1), gang(16), gang(2, gib=30)]
    before = room.view.copy()
    chosen = tetris_gangs(room, gangs, np.ones(6), np.zeros(6), Knobs(fairness=0.0, alignment=kind))
    for job, claims in chosen:
        assert fit(before, gangs[job], claims) == ()
        for claim in claims:
            before.take(claim)
    assert sum(mask.bit_count() for mask in room.view.free) == sum(mask.bit_count() for mask in before.free)
    assert len({job for job, _ in chosen}) == len(chosen) >= 3


def _naming(disk: int, net: int) -> GangShape:
    shape = gang(1, cores=1, gib=4)
    (role,) = shape.roles
    return replace(shape, roles=(replace(role, shape=replace(role.shape, bandwidth=(disk, net))),))


@pytest.mark.parametrize("kind", Alignment)
def test_a_gang_goes_where_the_bandwidth_that_it_names_is_free(kind: Alignment) -> None:
    declares = replace(server(), name="io", dimensions={"disk_mb_per_s": 1_000.0, "net_mb_per_s": 1_000.0})
    view = cluster(2, declares)
    for name, free in (("s0", (900, 200)), ("s1", (200, 900))):
        view.put(replace(view.row(name), free_bandwidth=free, version=0))
    room, placement = CapacityIndex(view), placement_by(Knobs(alignment=kind))
    for shape, node in ((_naming(150, 10), "s0"), (_naming(10, 150), "s1")):
        claims = placement.place(room, PlacementRequest(shape))
        assert claims is not None
        assert claims[0].node == node


def test_jobs_of_different_bandwidth_start_together_where_two_alike_would_not_fit() -> None:
    declares = replace(server("2"), name="io", dimensions={"disk_mb_per_s": 1_000.0, "net_mb_per_s": 1_000.0})
    reads, sends = _naming(700, 100), _naming(100, 700)
    room = CapacityIndex(cluster(1, declares))
    chosen = tetris_gangs(room, [reads, reads, sends], np.ones(3), np.zeros(3), Knobs(fairness=0.0))
    assert sorted(job for job, _ in chosen) == [0, 2]
