"""With aging no job waits for ever: a wait is bounded by the jobs that were live when it became overdue."""

from __future__ import annotations

import math
from functools import partial
from unittest.mock import patch

import pytest
from ganger_master.policies.order_registry import ORDERS, tiresias
from ganger_master.policies.orders import Aging, Facts, JobOrder, next_change_s, ranked, with_aging
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.facts import capacity_of, facts_of, live_jobs
from kit.served import Asked, Life, serve

GPUS = 4
AFTER_S, FACTOR, SHARE = 30.0, 0.5, 0.25
aged = partial(with_aging, after_s=AFTER_S, factor=FACTOR, share=SHARE)
EVERY = {**ORDERS, "tiresias in small queues": tiresias((20.0, 60.0))}
# Seconds until the next, GPUs, seconds of work, may be stopped, deadline after the arrival.
STREAM = st.lists(
    st.tuples(
        st.integers(0, 15),
        st.sampled_from([1, 1, 1, 2, 3, 4]),
        st.sampled_from([1, 5, 10, 30, 100]),
        st.sampled_from([True, True, False]),
        st.sampled_from([math.inf, 20.0, 200.0]),
    ),
    min_size=1,
    max_size=14,
)


def asked(stream: list[tuple[int, int, int, bool, float]]) -> list[Asked]:
    jobs, now = [], 0.0
    for number, (pause, gpus, seconds, may_stop, due) in enumerate(stream):
        now += pause
        jobs.append(Asked(number, now, gpus, seconds, may_stop, now + due, user=number % 3))
    return jobs


def attained_by(life: Life, moment: float) -> float:
    """Of a job that has ended, at a moment: its stretches lie between its waits."""
    ran = 0.0
    for position, (_, started, before) in enumerate(life.waits):
        if started > moment:
            break
        stop = life.waits[position + 1][0] if position + 1 < len(life.waits) else life.end_s
        ran = before + min(moment, stop) - started
    return ran


@settings(max_examples=25)
@given(stream=STREAM)
def test_a_wait_is_never_longer_than_the_limit_and_what_those_then_live_have_left(
    stream: list[tuple[int, int, int, bool, float]],
) -> None:
    jobs = asked(stream)
    for name, order in EVERY.items():
        lives = serve(jobs, GPUS, aged(order))
        for life in lives.values():
            assert math.isfinite(life.end_s), name
            for began, ended, ran in life.waits:
                overdue = began + max(AFTER_S, FACTOR * ran)
                ahead = [
                    other.asked.duration_s - attained_by(other, overdue)
                    for other in lives.values()
                    if other is not life and other.asked.arrival_s <= overdue < other.end_s
                ]
                assert ended <= overdue + sum(ahead) + 0.01, (name, life.asked.number)


def longest_wait(life: Life, now: float) -> float:
    waits = [ended - began for began, ended, _ in life.waits]
    if not life.is_running and math.isinf(life.end_s):
        began = life.waits[-1][0] if life.waits else life.asked.arrival_s
        waits.append(now - began)
    return max(waits)


# More comes than can be served. Under srtf a long job waits for ever while shorter ones keep coming, under las2d one
# that has run, under fifo-backfill a gang as large as the cluster, which small jobs never leave all free.
STARVED = [
    ("srtf", Asked(0, 0.0, 1, 500.0), 1, 1),
    ("las2d", Asked(0, 0.0, 1, 500.0), 1, 1),
    ("fifo-backfill", Asked(0, 1.0, 2, 50.0), 2, 1),
]


@pytest.mark.parametrize(("name", "victim", "gpus", "size"), STARVED)
def test_an_endless_stream_starves_a_job_only_without_aging(name: str, victim: Asked, gpus: int, size: int) -> None:
    end = 1_500.0
    stream = [Asked(number, 9.5 * number / gpus, size, 10.0) for number in range(1, int(end * gpus / 9.5))]
    if name == "fifo-backfill":
        stream.append(Asked(len(stream) + 1, 0.0, size, 10.0))
    starved = serve([victim, *stream], gpus, ORDERS[name], until_s=end)[0]
    assert longest_wait(starved, end) > 1_000.0
    served = serve([victim, *stream], gpus, aged(ORDERS[name]), until_s=end)[0]
    assert longest_wait(served, end) < longest_wait(starved, end) / 2
    assert served.attained_s > 2 * starved.attained_s


def test_overdue_jobs_go_first_in_first_out_and_turns_come_before_them() -> None:
    facts = facts_of(
        {"arrival_s": 95.0, "waited_s": 5.0},
        {"arrival_s": 60.0, "waited_s": 40.0},
        {"arrival_s": 50.0, "waited_s": 50.0},
        # Its wait was 40 s, so its turn is 10 s.
        {"arrival_s": 0.0, "is_running": True, "attained_s": 9.0, "stretch_s": 9.0, "waited_before_s": 40.0},
        {"arrival_s": 0.0, "is_running": True, "attained_s": 10.0, "stretch_s": 10.0, "waited_before_s": 40.0},
    )
    order = aged(ORDERS["las"])
    assert ranked(order, facts, 100.0, capacity_of(4)).tolist() == [3, 2, 1, 0, 4]
    # Job 3 has had its turn after one second more.
    assert next_change_s(order, facts, 100.0) == 101.0


@settings(max_examples=60)
@given(facts=live_jobs(), after_s=st.sampled_from([1.0, 40.0, 400.0, 4_000.0]))
def test_the_shortcut_for_clusters_without_overdue_jobs_changes_nothing(facts: Facts, after_s: float) -> None:
    order = with_aging(ORDERS["las"], after_s, FACTOR, SHARE)
    assert order.overdue is not None
    quick = order.overdue(facts, 4), ranked(order, facts, 1000.0, capacity_of(4)), next_change_s(order, facts, 1000.0)
    with patch.object(Aging, "_may_be_due", lambda self, facts: True):
        overdue, line = order.overdue(facts, 4), ranked(order, facts, 1000.0, capacity_of(4))
        changes_s = next_change_s(order, facts, 1000.0)
    assert (quick[0].tolist(), quick[1].tolist(), quick[2]) == (overdue.tolist(), line.tolist(), changes_s)


def test_a_job_that_has_run_long_is_overdue_later() -> None:
    facts = facts_of({"attained_s": 100.0, "waited_s": 49.0}, {"attained_s": 100.0, "waited_s": 50.0})
    order = aged(ORDERS["fifo"])
    assert order.overdue is not None
    assert order.overdue(facts, 4).tolist() == [False, True]
    assert next_change_s(order, facts, 1000.0) == 1001.0


def test_aging_looks_again_when_the_order_below_changes() -> None:
    facts = facts_of({"deadline_s": 1010.0})
    assert next_change_s(aged(ORDERS["edf"]), facts, 1000.0) == 1010.0
    assert next_change_s(aged(ORDERS["las"]), facts, 1000.0) == 1030.0


def test_priority_stays_above_aging() -> None:
    facts = facts_of({"waited_s": 90.0}, {"priority": 1})
    assert ranked(aged(ORDERS["las"]), facts, 100.0, capacity_of(1)).tolist() == [1, 0]


@pytest.mark.parametrize("wrong", [{"after_s": 0.0}, {"factor": -1.0}, {"share": 0.0}])
def test_aging_without_a_limit_or_a_turn_is_refused(wrong: dict[str, float]) -> None:
    order: JobOrder = ORDERS["las"]
    with pytest.raises(AssertionError):
        with_aging(order, **wrong)
