"""Ganger's order with a queue that ends soon, and with one that does not."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from ganger_master.planner.context import PlannerSettings
from ganger_master.planner.loop import PlannerLoop
from ganger_master.planner.plan_pace import PlanPace
from ganger_master.policies import policy_named
from ganger_master.policies.order_registry import FIRST_S, GANGER_ALONE, SWITCH_S
from ganger_master.policies.orders import Facts, ranked
from hypothesis import given
from kit.facts import capacity_of, facts_of, live_jobs, rows
from msgspec.structs import replace

NOW = 1000.0
CAPACITY = capacity_of(16)


def line(facts: Facts) -> list[int]:
    positions: list[int] = ranked(GANGER_ALONE, facts, NOW, CAPACITY).tolist()
    return positions


def twin(facts: Facts) -> list[int]:
    """Job by job."""
    jobs = rows(facts)
    waits = [job["waited_s"] for job in jobs if not job["is_running"]]
    crowded = max(SWITCH_S, sum(wait * wait for wait in waits) / max(1.0, sum(waits)))

    def key(job: dict[str, float]) -> tuple[float, ...]:
        gpus = max(1, job["gpus"])
        saved = 1 / crowded + job["index"] * gpus
        if not job["is_running"]:
            saved = saved / (1 + SWITCH_S * saved)
        elif job["index"] * gpus * SWITCH_S >= 1:
            saved = float("inf")
        if job["attained_s"] < FIRST_S:
            own: tuple[float, ...] = (0, job["arrival_s"])
        else:
            own = (1, 0.0)
        steps = float("inf") if saved == float("inf") else math.floor(math.log(saved / gpus) / math.log(1.01))
        ran_s = job["attained_s"] if job["is_running"] else 0.0
        return (-job["priority"], *own, -steps, not job["is_running"], ran_s, job["arrival_s"], job["number"])

    return [job["number"] for job in sorted(jobs, key=key)]


@given(facts=live_jobs(now=NOW))
def test_order_is_that_of_its_twin(facts: Facts) -> None:
    index = np.where(np.isnan(facts.index), 1e-4, facts.index)
    # Some in their first five minutes, some not.
    facts = replace(facts, index=index, attained_s=60.0 * facts.attained_s)
    assert facts.number[line(facts)].tolist() == twin(facts)


def known(*jobs: dict[str, Any]) -> Facts:
    """They have run for ten minutes if nothing is said."""
    return facts_of(*[{"attained_s": 600.0, **job} for job in jobs])


def test_where_waits_are_short_a_long_job_of_one_gpu_goes_before_a_gang() -> None:
    # 1 GPU for 100,000 s against 8 for 1,000 s each, and both have waited for a minute.
    facts = known(
        {"gpus": 8, "index": 1 / 1_000 / 8, "waited_s": 60.0}, {"gpus": 1, "index": 1 / 100_000, "waited_s": 60.0}
    )
    assert line(facts) == [1, 0]


def test_where_waits_are_long_the_job_that_ends_soonest_for_its_gpus_goes_first() -> None:
    day = 86_400.0
    facts = known(
        {"gpus": 1, "index": 1 / 100_000, "waited_s": 9 * day}, {"gpus": 8, "index": 1 / 1_000 / 8, "waited_s": 9 * day}
    )
    assert line(facts) == [1, 0]


def test_a_preempted_job_does_not_go_before_the_jobs_it_made_way_for_at_once() -> None:
    wide = {"gpus": 32, "index": 2.5e-6, "waited_s": 90_000.0}
    ran = [{"gpus": 8, "index": 8e-7, "attained_s": 1e5} for _ in range(6)]
    # Few jobs wait, so long that the one that ends soonest goes first; then the preempted jobs wait, too.
    assert line(known(wide, *({**job, "is_running": True} for job in ran)))[0] == 0
    assert line(known(wide, *({**job, "waited_s": 3.0} for job in ran)))[0] == 0


def test_a_running_job_goes_before_an_equal_pending_one() -> None:
    alike = {"index": 1e-4}
    facts = known({**alike, "waited_s": 60.0}, {**alike, "is_running": True, "arrival_s": 10.0})
    assert line(facts) == [1, 0]


def test_first_five_minutes_come_before_all_that_in_order_of_arrival() -> None:
    soon = {"index": 1 / 10}
    second = {"gpus": 8, "index": 1e-6, "arrival_s": 20.0, "attained_s": FIRST_S - 1.0, "is_running": True}
    third = {"index": 1 / 100, "arrival_s": 30.0, "attained_s": 0.0, "waited_s": 900.0}
    first = {"index": 1e-6, "arrival_s": 10.0, "attained_s": 0.0, "waited_s": 990.0}
    assert line(known(soon, second, third, first)) == [3, 1, 2, 0]


def test_where_plans_preempt_more_often_the_first_minutes_are_fewer() -> None:
    short = {"index": 1 / 100, "arrival_s": 30.0, "attained_s": 0.0, "waited_s": 90.0}
    long = {"index": 1e-6, "arrival_s": 10.0, "attained_s": 100.0, "is_running": True}
    facts = known(short, long)
    assert line(facts) == [1, 0]
    loop = PlannerLoop(policy_named("ganger"), PlannerSettings(PlanPace(60.0)))
    assert ranked(loop.order, facts, NOW, CAPACITY).tolist() == [0, 1]


def test_among_equal_running_jobs_the_one_that_has_run_longest_goes_last() -> None:
    runs = {"is_running": True, "index": 1e-7}
    waits = {"waited_s": 600.0, "index": 1.001e-7}
    facts = known(waits, {**runs, "attained_s": 9_000.0}, {**runs, "attained_s": 400.0, "index": 0.999e-7})
    assert line(facts) == [2, 1, 0]


def test_a_job_that_ends_within_a_switch_keeps_its_place() -> None:
    newcomer = {"gpus": 1, "index": 1 / 20, "waited_s": 600.0}
    facts = known(newcomer, {"gpus": 128, "index": 1 / 10 / 128, "is_running": True})
    assert line(facts) == [1, 0]
    later = known(newcomer, {"gpus": 128, "index": 1 / 20 / 128, "is_running": True})
    assert line(later) == [0, 1]


def test_ganger_follows_the_load_unless_told_where_gangs_go() -> None:
    assert policy_named("ganger-alone").placement.name == "best-fit"
    assert policy_named("ganger").placement.name == "adaptive"
    assert policy_named("ganger+gandiva").placement.name == "gandiva"
    assert policy_named("las").placement.name == "gandiva"
