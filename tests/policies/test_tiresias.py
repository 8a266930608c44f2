"""Queues by GPU-seconds, the Gittins index, and the example of the paper, end to end."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from ganger_master.policies.order_registry import SRSF, Queues, tiresias, tiresias_gittins
from ganger_master.policies.orders import (
    NO_HISTORY,
    SLACK_S,
    Facts,
    Floats,
    JobOrder,
    ServiceHistory,
    next_change_s,
    ranked,
)
from hypothesis import given
from hypothesis import strategies as st
from kit.facts import capacity_of, facts_of, live_jobs, rows
from kit.ideal import IdealJob, ideal
from kit.served import Asked, serve
from msgspec.structs import replace as replaced

NOW = 1000.0
CAPACITY = capacity_of(16)
SMALL = Queues((4.0, 12.0))
HOUR = 3600.0
# Two GPUs, and the jobs of the paper's example: GPUs and hours.
EXAMPLE = [(2, 2), (1, 8), (2, 6)]


def naive_queue(thresholds: Sequence[float], service: float) -> int:
    queue = 0
    while queue < len(thresholds) and service >= thresholds[queue]:
        queue += 1
    return queue


@given(facts=live_jobs(now=NOW))
def test_queues_are_what_counting_job_by_job_gives(facts: Facts) -> None:
    jobs = rows(facts)
    expected = [naive_queue(SMALL.thresholds, job["attained_s"] * job["gpus"]) for job in jobs]
    assert SMALL.queue(facts).tolist() == expected
    line = sorted(
        range(len(jobs)),
        key=lambda at: (
            -jobs[at]["priority"],
            expected[at],
            not jobs[at]["is_running"],
            jobs[at]["started_s"],
            jobs[at]["arrival_s"],
            jobs[at]["number"],
        ),
    )
    assert ranked(tiresias(SMALL.thresholds), facts, NOW, CAPACITY).tolist() == line


def after(facts: Facts, seconds: float) -> Facts:
    """Let time pass without an event: running jobs have run longer, pending ones have waited longer."""
    ran, waited = np.where(facts.is_running, seconds, 0.0), np.where(facts.is_running, 0.0, seconds)
    return replaced(
        facts,
        attained_s=facts.attained_s + ran,
        stretch_s=facts.stretch_s + ran,
        waited_s=facts.waited_s + waited,
    )


@given(facts=live_jobs(now=NOW), share=st.floats(0.0, 0.999))
def test_queues_change_at_the_time_told_and_not_before(facts: Facts, share: float) -> None:
    told = next_change_s(tiresias(SMALL.thresholds), facts, NOW)
    queues = SMALL.queue(facts).tolist()
    if math.isinf(told):
        assert SMALL.queue(after(facts, 1e7)).tolist() == queues
    else:
        assert SMALL.queue(after(facts, told - NOW)).tolist() != queues
        assert SMALL.queue(after(facts, (told - NOW - 2 * SLACK_S) * share)).tolist() == queues


def test_demotion_comes_after_the_threshold_divided_by_the_gang() -> None:
    # 4 GPUs reach 3,250 GPU-seconds after 812.5 s of running: 712.5 more. The simulator's (3250 - 100) / 4 is 787.5.
    facts = facts_of({"gpus": 4, "is_running": True, "attained_s": 100.0, "stretch_s": 100.0})
    assert next_change_s(tiresias(), facts, NOW) == NOW + 712.5


@pytest.mark.parametrize("thresholds", [(0.0,), (2.0, 1.0), (3.0, 3.0), (-1.0, 2.0)])
def test_thresholds_that_do_not_rise_are_refused(thresholds: tuple[float, ...]) -> None:
    with pytest.raises(AssertionError):
        tiresias(thresholds)


def naive_index(services: Sequence[float], attained: float, quantum: float) -> float:
    longer = [service for service in services if service > attained]
    if not longer:
        return 0.0
    ends = sum(service - attained <= quantum for service in longer) / len(longer)
    return ends / (sum(min(service - attained, quantum) for service in longer) / len(longer))


@given(
    services=st.lists(st.integers(1, 30).map(float), max_size=20),
    jobs=st.lists(st.tuples(st.integers(0, 32), st.sampled_from([0.5, 1.0, 4.0, 100.0, math.inf])), min_size=1),
)
def test_index_is_the_chance_to_end_over_the_time_it_takes(
    services: list[float], jobs: list[tuple[int, float]]
) -> None:
    attained, quantum = (np.array(column, float) for column in zip(*jobs, strict=True))
    expected = [naive_index(services, a, q) for a, q in zip(attained, quantum, strict=True)]
    assert ServiceHistory.of(services).index(attained, quantum) == pytest.approx(expected, rel=1e-12)


def test_index_counts_from_what_was_attained() -> None:
    # Of those beyond 4, one ends at 8 and one at 12: within 4 more one of two, each taking 4. Summing S instead of
    # S - a, as the authors' simulator does, gives 0.5 / 6 = 0.083.
    history = ServiceHistory.of([4, 8, 12])
    assert history.index(np.array([4.0]), np.array([4.0])) == pytest.approx([0.5 / 4])


def test_history_leaves_out_what_says_nothing() -> None:
    assert ServiceHistory.of([3.0, 0.0, -1.0, math.nan, math.inf, 1.0]).services.tolist() == [1.0, 3.0]


def indices(facts: Facts, history: ServiceHistory) -> Floats:
    return history.index(facts.service, SMALL.until_demotion(facts))


@given(facts=live_jobs(now=NOW), services=st.lists(st.integers(1, 80), max_size=9))
def test_gittins_order_ranks_a_queue_by_index(facts: Facts, services: list[int]) -> None:
    history = ServiceHistory.of(services)
    order = tiresias_gittins(history, SMALL.thresholds)
    index, queue, jobs = indices(facts, history), SMALL.queue(facts), rows(facts)
    line = sorted(
        range(len(jobs)),
        key=lambda at: (
            -jobs[at]["priority"],
            queue[at],
            -index[at],
            not jobs[at]["is_running"],
            jobs[at]["started_s"],
            jobs[at]["arrival_s"],
            jobs[at]["number"],
        ),
    )
    assert ranked(order, facts, NOW, CAPACITY).tolist() == line
    without = tiresias_gittins(NO_HISTORY, SMALL.thresholds)
    plain = tiresias(SMALL.thresholds)
    assert (ranked(without, facts, NOW, CAPACITY) == ranked(plain, facts, NOW, CAPACITY)).all()


@pytest.mark.parametrize(
    ("order", "hours"),
    [
        (SRSF, 28 / 3),
        (tiresias((4 * HOUR,)), 30 / 3),
        (tiresias_gittins(ServiceHistory.of([4 * HOUR, 8 * HOUR, 12 * HOUR]), (4 * HOUR,)), 30 / 3),
    ],
    ids=lambda value: value.name if isinstance(value, JobOrder) else "",
)
def test_the_example_of_the_paper_takes_the_hours_it_says(order: JobOrder, hours: float) -> None:
    jobs = [Asked(number, 0.0, gpus, duration * HOUR) for number, (gpus, duration) in enumerate(EXAMPLE)]
    lives = serve(jobs, 2, order)
    assert sum(life.end_s for life in lives.values()) / 3 == pytest.approx(hours * HOUR, abs=1.0)


def test_the_example_under_continuous_las2d_takes_turns_for_longer() -> None:
    jobs = [IdealJob(str(number), 0, gpus, duration) for number, (gpus, duration) in enumerate(EXAMPLE)]
    assert ideal(jobs, 2, "las2d", round_seconds=1).average_jct == pytest.approx(35 / 3)
