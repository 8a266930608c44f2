"""What jobs next to a job tell of how long it will take: against a naive twin, and for lives in closed form."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
from ganger_master.estimators.run_time import BUCKETS, EDGES_S, ServiceMemory, bucket_of, gittins, median_left
from hypothesis import given, settings
from hypothesis import strategies as st

STARTS_S = [0.0, *EDGES_S[1:-1].tolist()]


def naive_bucket(seconds: float) -> int:
    return max([bucket for bucket in range(BUCKETS) if seconds >= STARTS_S[bucket]])


def naive_gittins(hazards: list[float], bucket: int) -> float:
    """Over every bucket at whose end one could stop."""
    best = 0.0
    for last in range(bucket, BUCKETS):
        lives, ends, taken = 1.0, 0.0, 0.0
        for at in range(bucket, last + 1):
            mean = (EDGES_S[at + 1] - EDGES_S[at]) / np.log(EDGES_S[at + 1] / EDGES_S[at])
            ends += lives * hazards[at]
            taken += lives * hazards[at] * (mean - STARTS_S[bucket])
            lives *= 1 - hazards[at]
        taken += lives * (EDGES_S[last + 1] - STARTS_S[bucket])
        best = max(best, ends / taken)
    return float(best)


@dataclass
class Seen:
    """A job as the naive twin keeps it: for ever."""

    slot: int
    kind: str
    place: int
    bucket: int = 0
    state: str = "lives"

    def weight(self, other: Seen) -> float:
        distance = abs(self.place - other.place)
        return 0.8 ** (distance - 1) if self.kind == other.kind and 0 < distance <= 16 else 0.0


def naive_index(jobs: list[Seen], one: Seen) -> float:
    hazards = []
    for bucket in range(BUCKETS):
        ended = [job for job in jobs if job.state == "ended" and job.bucket == bucket]
        came = [job for job in jobs if job.bucket > bucket] + ended
        of_all = (len(ended) + 2.0 / (BUCKETS - bucket)) / (len(came) + 2.0)
        ends, comes = sum(map(one.weight, ended)), sum(map(one.weight, came))
        hazards.append((ends + 0.5 * of_all) / (comes + 0.5))
    return naive_gittins(hazards, one.bucket)


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("begin"), st.sampled_from("aab"), st.just(0.0)),
        st.tuples(st.sampled_from(["runs", "runs", "end"]), st.integers(0, 30), st.floats(0.1, 1e6)),
    ),
    min_size=5,
    max_size=60,
)


@settings(max_examples=40, deadline=None)
@given(steps=STEPS)
def test_memory_equals_its_naive_twin_after_any_story(steps: list[tuple[str, str | int, float]]) -> None:
    memory = ServiceMemory(stale=0.0)
    jobs: list[Seen] = []
    for what, target, seconds in steps:
        live = [job for job in jobs if job.state == "lives"]
        if what == "begin":
            assert isinstance(target, str)
            slot = min(set(range(len(live) + 1)) - {job.slot for job in live})
            jobs.append(Seen(slot, target, sum(job.kind == target for job in jobs)))
            memory.begin(slot, target)
        elif live:
            assert isinstance(target, int)
            job = live[target % len(live)]
            job.bucket = max(job.bucket, naive_bucket(seconds))
            if what == "end":
                memory.end(job.slot, seconds)
                job.state = "ended"
            else:
                memory.index(np.array([job.slot]), np.array([seconds]))
    live = [job for job in jobs if job.state == "lives"]
    slots = np.array([job.slot for job in live], np.int64)
    found = memory.index(slots, np.array([STARTS_S[job.bucket] for job in live]))
    assert found == pytest.approx([naive_index(jobs, job) for job in live], rel=1e-9)


@settings(max_examples=30)
@given(shares=st.lists(st.floats(0.0, 1.0), min_size=BUCKETS, max_size=BUCKETS), bucket=st.integers(0, BUCKETS - 1))
def test_index_is_the_best_over_all_times_to_stop(shares: list[float], bucket: int) -> None:
    found = gittins(np.array([shares]), np.array([bucket]))
    # Of shares so small one less them is one.
    assert found == pytest.approx([naive_gittins(shares, bucket)], rel=1e-9, abs=1e-18)


@given(st.floats(0.0, 1e12))
def test_buckets_begin_where_their_edges_are(seconds: float) -> None:
    assert bucket_of(seconds) == naive_bucket(seconds)


def hazards_of(lives: np.ndarray) -> np.ndarray:
    """From the share that lives on at each edge."""
    hazards: np.ndarray = np.divide(lives[:-1] - lives[1:], lives[:-1], out=np.ones(BUCKETS), where=lives[:-1] > 0)
    return hazards[None, :]


def every(hazards: np.ndarray, first: int, last: int) -> np.ndarray:
    buckets = np.arange(first, last)
    return gittins(np.repeat(hazards, len(buckets), axis=0), buckets)


def test_lives_without_memory_have_the_same_index_at_any_age() -> None:
    mean_s = 50_000.0
    lives = np.exp(-EDGES_S / mean_s)
    lives[0] = 1.0
    found = every(hazards_of(lives), 1, bucket_of(mean_s))
    # A bucket is half a doubling wide, and its end is taken to lie at the mean of its logarithms.
    assert found == pytest.approx(np.full(len(found), 1 / mean_s), rel=0.15)


@pytest.mark.parametrize("tail", [0.5, 1.0, 2.0])
def test_under_a_pareto_tail_a_job_that_has_run_longer_ends_later(tail: float) -> None:
    found = every(hazards_of((EDGES_S / EDGES_S[0]) ** -tail), 1, BUCKETS - 8)
    assert (np.diff(found) < 0).all()
    # The hazard of the tail at age a is tail / a, and stopping at once is best.
    assert found == pytest.approx(tail / EDGES_S[1 : BUCKETS - 8], rel=0.5)


def test_of_two_lengths_the_index_rises_to_the_short_one_and_falls_behind_it() -> None:
    short, long = bucket_of(1_000.0), bucket_of(1_000_000.0)
    hazards = np.zeros((1, BUCKETS))
    hazards[0, short], hazards[0, long] = 0.9, 1.0
    found = every(hazards, 0, long + 1)
    assert (np.diff(found[: short + 1]) > 0).all()
    assert found[0] == pytest.approx(0.9 / (0.9 * 1_000 + 0.1 * 1_000), rel=0.25)
    assert found[short + 1] == pytest.approx(1 / 1_000_000, rel=0.25)
    assert (np.diff(found[short + 1 :]) > 0).all()


def test_without_ended_jobs_the_job_that_ran_least_goes_first() -> None:
    memory = ServiceMemory()
    ages = np.array([0.0, 60.0, 3_600.0, 86_400.0])
    for slot in range(4):
        memory.begin(slot, slot)
    assert (np.diff(memory.index(np.arange(4), ages)) < 0).all()


def test_jobs_of_a_series_are_judged_by_each_other() -> None:
    memory = ServiceMemory()
    for slot in range(40):
        memory.begin(slot, "ada" if slot < 20 else "bob")
    for slot in range(10):
        memory.end(slot, 30.0)
    for slot in range(20, 30):
        memory.end(slot, 90_000.0)
    ada, bob = memory.index(np.array([12, 32]), np.zeros(2))
    assert ada > 10 * bob


def test_a_neighbour_that_goes_on_is_evidence_too() -> None:
    memory = ServiceMemory()
    for slot in range(8):
        memory.begin(slot, "ada")
    before = memory.index(np.array([7]), np.zeros(1))[0]
    memory.index(np.arange(7), np.full(7, 200_000.0))
    assert memory.index(np.array([7]), np.zeros(1))[0] < before / 2


def test_what_is_beyond_the_buckets_counts_at_their_ends() -> None:
    memory = ServiceMemory()
    for slot in range(3):
        memory.begin(slot, "ada")
    memory.end(0, 0.0)
    memory.end(1, 1e12)
    found = memory.index(np.array([2, 2]), np.array([0.0, 1e12]))
    assert np.isfinite(found).all()
    assert (found > 0).all()


def test_a_slot_is_taken_once_and_left_once() -> None:
    memory = ServiceMemory()
    memory.begin(0, "ada")
    with pytest.raises(AssertionError, match="slot 0 is taken"):
        memory.begin(0, "ada")
    memory.leave(0)
    with pytest.raises(AssertionError, match="slot 0 is free"):
        memory.end(0, 5.0)
    memory.begin(0, "bob")
    assert memory.index(np.array([0]), np.zeros(1))[0] > 0


def test_an_empty_query_has_an_empty_answer() -> None:
    assert len(ServiceMemory().index(np.zeros(0, np.int64), np.zeros(0))) == 0


def naive_median_left(hazards: list[float], ran_s: float) -> float:
    """Bisect for the moment at which half of the jobs left now have ended."""

    at = min(max(math.log2(max(ran_s, 1e-9)), math.log2(EDGES_S[0])), math.log2(EDGES_S[-1]))

    def survival(log2: float) -> float:
        left = 1.0
        for bucket, hazard in enumerate(hazards):
            low, high = math.log2(EDGES_S[bucket]), math.log2(EDGES_S[bucket + 1])
            if high <= at and bucket < BUCKETS - 1:
                continue
            if log2 >= high:
                left *= 1.0 - hazard
            elif log2 > low:
                left *= 1.0 - hazard * (log2 - low) / (high - low)
        return left

    low, high = at, math.log2(EDGES_S[-1])
    for _ in range(40):
        middle = (low + high) / 2
        if survival(middle) > survival(at) / 2:
            low = middle
        else:
            high = middle
    return max(2.0**high - ran_s, 0.0)


@given(
    st.lists(st.tuples(st.integers(0, 9), st.sampled_from([0.0, 3.0, 8.0, 700.0, 1e5, 3e8])), min_size=1, max_size=4),
    st.integers(0, 2**32),
)
def test_the_median_of_what_is_left_is_where_half_of_them_have_ended(jobs: list[tuple[int, float]], seed: int) -> None:
    random = np.random.default_rng(seed)
    hazards = np.array([random.random(BUCKETS) ** power for power, _ in jobs])
    ran = np.array([seconds for _, seconds in jobs])
    found = median_left(hazards, ran)
    for own, seconds, left in zip(hazards.tolist(), ran.tolist(), found.tolist(), strict=True):
        naive = naive_median_left(own, seconds)
        assert left + seconds == pytest.approx(naive + seconds, rel=1e-6), (seconds, left, naive)


def test_remaining_time_is_unknown_until_a_job_has_ended_and_then_that_of_its_series() -> None:
    memory = ServiceMemory()
    slots, ran = np.array([1]), np.array([0.0])
    memory.begin(0, "series")
    memory.begin(1, "series")
    assert np.isnan(memory.remaining_s(slots, ran)).all()
    memory.end(0, 1000.0)
    for slot in range(2, 12):
        memory.begin(slot, "series")
        memory.end(slot, 1000.0)
    # Somewhere in the bucket in which all of them ended.
    assert 724 <= memory.remaining_s(slots, ran)[0] <= 1024
    assert 100 <= memory.remaining_s(slots, np.array([600.0]))[0] <= 424
