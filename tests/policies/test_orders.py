"""Each order against a naive twin of itself, and what must hold for all of them."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from ganger_master.policies.order_registry import ORDERS, summary, tiresias, tiresias_gittins
from ganger_master.policies.orders import Facts, JobOrder, ServiceHistory, next_change_s, ranked, with_aging
from hypothesis import given
from hypothesis import strategies as st
from kit.facts import capacity_of, facts_of, live_jobs, rows
from msgspec.structs import replace

NOW = 1000.0
CAPACITY = capacity_of(16, cores=32.0, memory_bytes=64.0)
HISTORY = ServiceHistory.of([1, 5, 5, 10, 40, 400])
ALL: dict[str, JobOrder] = {
    **ORDERS,
    "tiresias in small queues": tiresias((4.0, 12.0)),
    "tiresias-gittins in small queues": tiresias_gittins(HISTORY, (4.0, 12.0)),
    **{f"{name}, aged": with_aging(order, after_s=8.0, factor=1.0, share=0.5) for name, order in ORDERS.items()},
}


def rho(job: dict[str, Any], left: float, weights: float) -> float:
    alone = (job["attained_s"] + left) * max(1.0, job["gpus"] * (weights / job["weight"]) / CAPACITY.gpus)
    return float((NOW - job["arrival_s"] + left) / alone)


def estimate(job: dict[str, Any]) -> float:
    known = job["expected_remaining_s"]
    return float(max(60.0, job["attained_s"] if math.isnan(known) else known))


def due(job: dict[str, Any]) -> tuple[int, float]:
    deadline = job["deadline_s"]
    return (2 if deadline == math.inf else 1 if deadline <= NOW else 0), deadline


# What goes before arrival and number, from a job and the sum of all weights.
TWINS: dict[str, Callable[[dict[str, Any], float], tuple[float, ...]]] = {
    "fifo": lambda job, weights: (),
    "fifo-backfill": lambda job, weights: (),
    "srtf": lambda job, weights: (job["remaining_s"],),
    "srsf": lambda job, weights: (job["remaining_s"] * job["gpus"],),
    "las": lambda job, weights: (job["attained_s"],),
    "las2d": lambda job, weights: (job["attained_s"] * job["gpus"],),
    "round-robin": lambda job, weights: (-job["waited_s"], job["stretch_s"]),
    "ftf": lambda job, weights: (-rho(job, estimate(job), weights),),
    "ftf-oracle": lambda job, weights: (-rho(job, job["remaining_s"], weights),),
    "edf": lambda job, weights: due(job),
}


@given(facts=live_jobs(now=NOW))
def test_orders_rank_as_sorting_job_by_job_does(facts: Facts) -> None:
    weights = float(facts.weight.sum())
    for name, twin in TWINS.items():
        expected = sorted(
            rows(facts), key=lambda job: (-job["priority"], twin(job, weights), job["arrival_s"], job["number"])
        )
        found = facts.number[ranked(ORDERS[name], facts, NOW, CAPACITY)]
        assert found.tolist() == [job["number"] for job in expected], name


@given(facts=live_jobs(now=NOW), random=st.randoms(use_true_random=False))
def test_orders_are_of_jobs_and_not_of_rows(facts: Facts, random: Any) -> None:
    shuffled = list(range(len(facts)))
    random.shuffle(shuffled)
    moved = facts.take(np.array(shuffled))
    for name, order in ALL.items():
        line = facts.number[ranked(order, facts, NOW, CAPACITY)].tolist()
        assert sorted(line) == sorted(facts.number.tolist()), name
        assert line == moved.number[ranked(order, moved, NOW, CAPACITY)].tolist(), name
        assert next_change_s(order, facts, NOW) == next_change_s(order, moved, NOW) > NOW, name


@given(facts=live_jobs(now=NOW))
def test_only_an_oracle_looks_at_what_is_hidden(facts: Facts) -> None:
    blind = replace(facts, remaining_s=np.full(len(facts), np.nan))
    for name, order in ALL.items():
        is_same = (ranked(order, facts, NOW, CAPACITY) == ranked(order, blind, NOW, CAPACITY)).all()
        assert is_same or order.knows_durations, name


@pytest.mark.parametrize("name", sorted(ALL))
def test_without_live_jobs_the_ranking_is_empty(name: str) -> None:
    facts = facts_of()
    assert ranked(ALL[name], facts, NOW, CAPACITY).tolist() == []
    assert next_change_s(ALL[name], facts, NOW) == math.inf


@pytest.mark.parametrize("name", sorted(ORDERS))
def test_order_is_known_by_its_name_says_what_it_is_and_travels_to_other_processes(name: str) -> None:
    order = tiresias_gittins(HISTORY) if name == "tiresias-gittins" else ORDERS[name]
    assert order.name == name
    assert 20 < len(summary(name)) <= 120
    assert pickle.loads(pickle.dumps(order)).name == name


def test_summaries_tell_orders_apart() -> None:
    assert len({summary(name) for name in ORDERS}) == len(ORDERS)


def test_history_changes_what_the_gittins_order_does() -> None:
    # With a history in which jobs that pass 10 end at 11, the job at 10 goes first.
    facts = facts_of({"attained_s": 5.0}, {"attained_s": 10.0})
    history = ServiceHistory.of([3.0, 100.0, 100.0, 11.0])
    learned = tiresias_gittins(history)
    assert ranked(learned, facts, NOW, CAPACITY).tolist() == [1, 0]
    assert ranked(ORDERS["tiresias-gittins"], facts, NOW, CAPACITY).tolist() == [0, 1]


def test_worst_off_goes_first_not_the_best_off() -> None:
    # Alike but for the wait; Synergy's simulator ranks them the other way round.
    facts = facts_of({"arrival_s": NOW - 100, "attained_s": 90.0}, {"arrival_s": NOW - 5000, "attained_s": 90.0})
    assert ranked(ORDERS["ftf"], facts, NOW, CAPACITY).tolist() == [1, 0]


def test_what_a_model_expects_goes_before_the_guess_from_the_past() -> None:
    long = {"arrival_s": NOW - 1000, "attained_s": 500.0}
    facts = facts_of(long, {**long, "expected_remaining_s": 100.0})
    # rho is (1000 + 500) / 1000 against (1000 + 100) / 600.
    assert ranked(ORDERS["ftf"], facts, NOW, CAPACITY).tolist() == [1, 0]
    assert ranked(ORDERS["ftf"], facts_of(long, long), NOW, CAPACITY).tolist() == [0, 1]


def test_a_passed_deadline_yields_to_those_ahead_when_it_passes() -> None:
    facts = facts_of({"deadline_s": 1005.0}, {"deadline_s": 1100.0}, {})
    assert ranked(ORDERS["edf"], facts, NOW, CAPACITY).tolist() == [0, 1, 2]
    later = next_change_s(ORDERS["edf"], facts, NOW)
    assert later == 1005.0
    assert ranked(ORDERS["edf"], facts, later, CAPACITY).tolist() == [1, 0, 2]
