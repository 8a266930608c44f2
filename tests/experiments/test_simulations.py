"""The small simulations that experiments bring: worked out by hand, and held against the oracle of ideal clusters. (2
s)
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from ganger_master.estimators.speed import AllReduceModel
from ganger_master.policies.optimus_sizes import ElasticJobs, allreduce_speeds, growing
from ganger_master.policies.order_registry import ORDERS
from ganger_master.policies.tunings import Gangs, Pieces, Profiles, Tuning, TuningNodes, gangs, pieces, proportionally
from ganger_master.policies.tunings.catalogue import PROPORTIONAL
from ganger_master.policies.tunings.synergy import SYNERGY_TUNE
from ganger_master.simulator.measurement_model import on_fewest_nodes
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.ideal import IdealJob, ideal

from experiments import t4_jobs
from experiments.optimus_end_to_end import (
    VARIANTS,
    Model,
    batches_per_s,
    drawn,
    ended,
    fair_pairs,
    tetris_pairs,
)
from experiments.rounds import RoundJobs, ends, through_rounds
from experiments.t4_workloads import least

# --- rounds

FLAT = Profiles(np.array([1.0]), np.array([1.0]), np.ones((1, 1, 1)))


@settings(max_examples=30)
@given(
    st.lists(st.tuples(st.integers(0, 2000), st.integers(1, 2000)), min_size=1, max_size=12),
    st.sampled_from([("fifo-backfill", "fifo-backfill"), ("srtf", "srtf"), ("las", "las")]),
)
def test_rounds_end_jobs_when_the_oracle_of_ideal_clusters_does(
    jobs: list[tuple[int, int]], orders: tuple[str, str]
) -> None:
    """Jobs that cores do not help, on four GPUs."""
    jobs.sort(key=lambda job: job[0])
    theirs = ideal([IdealJob(str(n), at, 1, long) for n, (at, long) in enumerate(jobs)], 4, orders[1], 300)
    nodes = TuningNodes(np.array([2, 2]), np.array([2.0, 2.0]), np.array([2.0, 2.0]))
    ours = RoundJobs(
        np.array([at for at, _ in jobs], float),
        np.array([long for _, long in jobs], float),
        gangs(np.ones(len(jobs), int), np.zeros(len(jobs), int), FLAT),
    )
    for tuning in (PROPORTIONAL, SYNERGY_TUNE):
        assert ends(ours, nodes, ORDERS[orders[0]], tuning).tolist() == [float(end) for end in theirs.ends]


def test_a_job_that_gets_more_cores_ends_sooner() -> None:
    """One of two uses cores: with all three that the other leaves it is three times as fast as with two of four."""
    known = Profiles(np.array([1.0, 2.0, 3.0]), np.array([1.0]), np.array([[[1.0]] * 3, [[1.0], [2.0], [6.0]]]))
    nodes = TuningNodes(np.array([2]), np.array([4.0]), np.array([2.0]))
    jobs = RoundJobs(np.zeros(2), np.array([3600.0, 3600.0]), gangs([1, 1], [0, 1], known))
    assert ends(jobs, nodes, ORDERS["fifo"], PROPORTIONAL).tolist() == [3600.0, 3600.0]
    assert ends(jobs, nodes, ORDERS["fifo"], SYNERGY_TUNE).tolist() == [3600.0, 1200.0]


def test_a_job_that_moves_loses_what_a_move_takes() -> None:
    """Of two jobs that were apart one joins the other when a third comes: whatever servers are called, one has moved,
    and needs a round more for half a minute."""

    def place(run: Gangs, servers: TuningNodes) -> Pieces:
        where = {1: [0], 2: [0, 1], 3: [1, 1, 0]}[len(run)]
        return proportionally(servers, pieces(np.arange(len(run)), np.array(where), run.gpus))

    nodes = TuningNodes(np.array([2, 2]), np.array([2.0, 2.0]), np.array([2.0, 2.0]))
    jobs = RoundJobs(np.array([0.0, 0.0, 300.0]), np.full(3, 900.0), gangs([1] * 3, [0] * 3, FLAT))
    moving = Tuning("moving", SYNERGY_TUNE.tune, place)
    free, paid = (through_rounds(jobs, nodes, ORDERS["fifo"], moving, move_s=cost).end_s for cost in (0.0, 30.0))
    assert free.tolist() == [900.0, 900.0, 1200.0]
    assert sorted(paid[:2].tolist()) == [900.0, 1200.0]


# --- Optimus's pairs

TOY = Model(compute_s=1.0, size=8.0, across=4.0, within=16.0, batches=10)


@pytest.mark.parametrize(
    ("pairs", "is_apart", "seconds"),
    [
        # One pair in one server: 2 x 8 MB at 16 MB/s.
        ([1], False, 1.0 + 1.0),
        # Apart: the same at 4 MB/s.
        ([1], True, 1.0 + 4.0),
        # Two pairs on two servers: half of the model to one worker elsewhere, 8 MB at 4 MB/s.
        ([1, 1], False, 1.0 + 2.0),
        # Two pairs on one server: half of the model to both workers, 16 MB at 16 MB/s.
        ([2], False, 1.0 + 1.0),
        # A server has one pair of three: two thirds of all exchange crosses its link.
        ([2, 1], False, 1.0 + 2.0 * 8.0 / 3 * 2 / 4.0),
    ],
)
def test_a_step_takes_computing_and_the_busiest_link(pairs: list[int], is_apart: bool, seconds: float) -> None:
    assert batches_per_s(TOY, pairs, False, is_apart) == pytest.approx(sum(pairs) / seconds)
    # Synchronous workers share one batch, so that each computes less.
    shared = seconds - 1.0 + 1.0 / sum(pairs)
    assert batches_per_s(TOY, pairs, True, is_apart) == pytest.approx(1.0 / shared)


def elastic(steps: list[float], most: list[int]) -> ElasticJobs:
    """Jobs of GPUs alone, twice as fast with twice as many."""
    speeds = [AllReduceModel(0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0)] * len(steps)
    return growing(
        steps,
        allreduce_speeds(speeds, np.ones(len(steps)), 8),
        np.ones((len(steps), 1, 1)),
        most=np.array(most)[:, None],
        least=np.ones((len(steps), 1), np.int64),
    )


def test_fair_shares_are_equal_and_what_one_job_cannot_use_is_shared_by_the_others() -> None:
    assert fair_pairs(elastic([1.0, 9.0, 100.0], [16, 16, 16]), np.array([7.0]))[:, 0].tolist() == [3, 2, 2]
    assert fair_pairs(elastic([1.0, 9.0, 100.0], [1, 16, 16]), np.array([7.0]))[:, 0].tolist() == [1, 3, 3]
    assert fair_pairs(elastic([1.0, 1.0, 1.0], [16] * 3), np.array([2.0]))[:, 0].tolist() == [1, 1, 0]


def test_tetris_serves_the_shortest_of_the_poorest_jobs() -> None:
    assert tetris_pairs(elastic([100.0, 1.0], [16, 16]), np.array([5.0]))[:, 0].tolist() == [0, 5]
    # Of four jobs the richest one stands aside.
    assert tetris_pairs(elastic([100.0, 1.0, 50.0, 70.0], [16] * 4), np.array([4.0]))[:, 0].tolist() == [0, 2, 2, 0]


@pytest.mark.parametrize("policy", ["optimus", "drf", "drf_packed", "tetris"])
def test_one_job_alone_has_all_pairs_that_help_it(policy: str) -> None:
    """One job of an asynchronous model: its work by its best speed is a bound, and one pair takes longer."""
    variant = replace(VARIANTS["usual"], jobs=1, synchronous=0.0)
    jobs, speeds = drawn(0, 0.1, variant, policy == "drf")
    found = ended(policy, 0.1, 0, variant)
    rates = [speeds.rate(0, on_fewest_nodes(pairs, 2)) for pairs in range(1, 17)]
    assert jobs.duration_s[0] / max(rates) <= found["jct_s"] < jobs.duration_s[0] / min(rates[1:]) + 60.0


# --- jobs on T4

# 100 steps of the initial batch an epoch; a step takes 1 s and a part of its exchange on several servers.
CURVES = {batch: np.array([[100.0, 1.0, 0.0], [200.0, 1.0, 0.0]]) for batch in (8, 32)}
TOY_APPLICATION = t4_jobs.Application(
    "toy",
    CURVES,
    {batch: np.array([100.0, 200.0]) for batch in CURVES},
    {places: np.array([[4.0, seconds, 0.0], [8.0, seconds, 0.0]]) for places, seconds in (("1", 1.0), ("2", 0.5))},
    np.array([[1.0, 1.0, 4.0, 1.0, 0.0], [1.0, 2.0, 4.0, 0.5, 0.0]]),
)


def t4_job(submit_s: int, gpus: int = 1) -> t4_jobs.T4Job:
    return t4_jobs.T4Job(TOY_APPLICATION, submit_s, gpus, 8)


def way(gpus: list[int]) -> t4_jobs.Way:
    """So many for each live job, as long as there are so many."""
    return t4_jobs.Way(
        lambda jobs, now: gpus[: len(jobs)],
        lambda jobs, counts: range(len(jobs)),
        lambda job: job.application.split(job.batch, job.gpus, one_accumulates=False),
    )


def test_a_job_waits_for_the_next_minute_and_its_start_then_trains_at_the_measured_pace() -> None:
    """Submitted at 10 s, placed at 60, trains from 90: 200 steps of a second, and half of one on two GPUs."""
    for gpus, ends_s in ((1, 290.0), (2, 190.0)):
        job = t4_job(10, gpus)
        t4_jobs.simulated([job], way([gpus]))
        assert (job.end_s, job.restarts) == (ends_s, 0)


def test_a_job_that_is_given_other_places_loses_a_restart_and_one_that_is_not_keeps_them() -> None:
    """The second ends; the first has its two GPUs only then, and loses 30 s once more."""
    first, second = t4_job(0), t4_job(0)
    counts = {2: [1, 1], 1: [2]}
    growing = t4_jobs.Way(
        lambda jobs, now: counts[len(jobs)] if now < 300 else [2] * len(jobs), way([]).line, way([]).batch
    )
    t4_jobs.simulated([first, second], growing)
    assert first.end_s == second.end_s == 30.0 + 60.0 + 200.0
    one = t4_job(0)
    t4_jobs.simulated([one], t4_jobs.Way(lambda jobs, now: [1 if now < 120 else 2], way([]).line, way([]).batch))
    # 30 s of training until the change, 30 s of another restart, the other 170 steps in half the time.
    assert (one.end_s, one.restarts) == (60.0 + 60.0 + 30.0 + 85.0, 1)


def test_batches_between_measured_ones_are_interpolated_and_large_ones_added_up() -> None:
    assert TOY_APPLICATION.iteration(20, 0) == 100.0
    assert TOY_APPLICATION.seconds((1,), 6) == (1.0, 0.0)
    assert TOY_APPLICATION.split(32, 1, one_accumulates=False) == t4_jobs.T4Batch(8, 3)
    assert TOY_APPLICATION.step_s((1,), t4_jobs.T4Batch(8, 3)) == 4.0
    assert TOY_APPLICATION.split(8, 1, one_accumulates=True) == t4_jobs.T4Batch(4, 1)


@settings(max_examples=30)
@given(st.lists(st.lists(st.floats(0.0, 10.0), min_size=5, max_size=5), min_size=1, max_size=4))
def test_what_is_shared_out_costs_the_least_of_all_ways(costs: list[list[float]]) -> None:
    every = [
        sum(row[count] for row, count in zip(costs, counts, strict=True))
        for counts in product(range(5), repeat=len(costs))
        if sum(counts) <= 4
    ]
    counts = least(np.array(costs))
    assert sum(counts) <= 4
    assert sum(row[count] for row, count in zip(costs, counts, strict=True)) == pytest.approx(min(every))
