"""Advice on deadlines is what serving by earliest deadline then does."""

from __future__ import annotations

import math

import numpy as np
import pytest
from ganger_master.planner.job_forecasts import Advice, DeadlineVerdict, Newcomer, advice, spans
from ganger_master.policies.order_registry import EDF
from ganger_master.policies.orders import Facts
from hypothesis import given
from hypothesis import strategies as st
from kit.facts import capacity_of, facts_of
from kit.served import Asked, serve

NOW = 1000.0
CAPACITY = capacity_of(4)
# GPUs, seconds that are left, deadline after now.
JOBS = st.lists(
    st.tuples(st.integers(1, 5), st.integers(1, 40), st.sampled_from([5, 20, 40, 80, 160, math.inf])), max_size=8
)


def told(*jobs: tuple[int, float, float]) -> tuple[Facts, np.ndarray]:
    facts = facts_of(*[{"gpus": gpus, "deadline_s": NOW + due} for gpus, _, due in jobs])
    return facts, np.array([left for _, left, _ in jobs], float)


def ask(newcomer: Newcomer, *jobs: tuple[int, float, float]) -> Advice:
    return advice(newcomer, *told(*jobs), NOW, CAPACITY)


@given(jobs=JOBS)
def test_starts_and_ends_are_those_of_running_whenever_earlier_ones_leave_room(
    jobs: list[tuple[int, int, float]],
) -> None:
    """Against moving second by second."""
    left = [seconds for _, seconds, _ in jobs]
    begun, expected = [math.inf] * len(jobs), [math.inf] * len(jobs)
    for second in range(sum(left)):
        free = 4
        for at, (gpus, _, _) in enumerate(jobs):
            if left[at] and gpus <= free:
                free -= gpus
                left[at] -= 1
                begun[at] = min(begun[at], NOW + second)
                if not left[at]:
                    expected[at] = NOW + second + 1
    sizes = np.array([gpus for gpus, _, _ in jobs], np.int64)
    starts, ends = spans(sizes, np.array([seconds for _, seconds, _ in jobs], float), 4, NOW)
    assert (starts.tolist(), ends.tolist()) == (begun, expected)


@given(jobs=JOBS, gpus=st.integers(1, 4), seconds=st.integers(1, 40), due=st.sampled_from([5, 20, 40, 80, 160]))
def test_what_is_advised_comes_true(jobs: list[tuple[int, int, float]], gpus: int, seconds: int, due: int) -> None:
    """If every deadline can be met: from the first that is missed on the order lets others go first."""
    jobs = [job for job in jobs if job[0] <= 4]
    found = ask(Newcomer(gpus, seconds, NOW + due), *jobs)
    asked = [Asked(number, NOW, size, left, deadline_s=NOW + at) for number, (size, left, at) in enumerate(jobs)]
    new = len(jobs)
    before = serve(asked, 4, EDF)
    lives = serve([*asked, Asked(new, NOW, gpus, seconds, deadline_s=NOW + due)], 4, EDF)
    late = {number for number, life in lives.items() if life.end_s > life.asked.deadline_s + 1e-3}
    late_before = {number for number, life in before.items() if life.end_s > life.asked.deadline_s + 1e-3}
    if found.verdict is DeadlineVerdict.MET and not late_before:
        assert not late
        assert lives[new].end_s == pytest.approx(found.end_s)
    if not late:
        assert found.verdict is DeadlineVerdict.MET
    assert (found.verdict is DeadlineVerdict.DELAYS_OTHERS) == bool(found.delayed)


def test_a_deadline_that_fits_behind_earlier_ones_is_met() -> None:
    # 3 GPUs for 20 s first, then 4 for 10 s: at 30.
    found = ask(Newcomer(4, 10.0, NOW + 30.0), (3, 20.0, 25.0))
    assert found == Advice(DeadlineVerdict.MET, NOW + 30.0)
    assert ask(Newcomer(4, 10.0, NOW + 29.0), (3, 20.0, 25.0)) == Advice(DeadlineVerdict.TOO_LATE, NOW + 30.0)


def test_advice_lists_the_jobs_that_a_newcomer_would_make_late() -> None:
    found = ask(Newcomer(4, 10.0, NOW + 12.0), (4, 20.0, 25.0), (1, 5.0, 200.0), (4, 90.0, 50.0))
    # The last one is late anyhow.
    assert found == Advice(DeadlineVerdict.DELAYS_OTHERS, NOW + 10.0, delayed=(0,))


def test_jobs_without_a_deadline_count_only_if_they_may_not_be_stopped() -> None:
    newcomer = Newcomer(4, 10.0, NOW + 10.0)
    held = {"gpus": 2, "is_running": True}
    left = np.array([7.0])
    assert advice(newcomer, facts_of(held), left, NOW, CAPACITY).verdict is DeadlineVerdict.MET
    found = advice(newcomer, facts_of({**held, "is_preemptible": False}), left, NOW, CAPACITY)
    assert found == Advice(DeadlineVerdict.TOO_LATE, NOW + 17.0)


def test_higher_priority_goes_first_whatever_its_deadline() -> None:
    facts = facts_of({"gpus": 4, "priority": 1})
    found = advice(Newcomer(1, 1.0, NOW + 5.0), facts, np.array([60.0]), NOW, CAPACITY)
    assert found == Advice(DeadlineVerdict.TOO_LATE, NOW + 61.0)
    assert advice(Newcomer(1, 1.0, NOW + 5.0, priority=1), facts, np.array([60.0]), NOW, CAPACITY).end_s == NOW + 1.0


def test_the_verdict_is_unknown_while_the_remaining_time_of_a_job_ahead_is_unknown() -> None:
    found = ask(Newcomer(1, 1.0, NOW + 5.0), (1, math.nan, 50.0), (1, math.nan, math.inf))
    # The second yields to every deadline; the first does not count before the newcomer, but might be made late.
    assert found.verdict is DeadlineVerdict.UNKNOWN
    assert math.isnan(found.end_s)
    assert found.unknown == (0,)


def test_a_gang_larger_than_the_cluster_never_ends() -> None:
    assert ask(Newcomer(5, 1.0, NOW + 1e9)) == Advice(DeadlineVerdict.TOO_LATE, math.inf)


def test_a_deadline_in_the_past_cannot_be_met() -> None:
    assert ask(Newcomer(1, 1.0, NOW - 1.0), (4, 10.0, 20.0)) == Advice(DeadlineVerdict.TOO_LATE, NOW + 11.0)
