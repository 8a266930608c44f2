"""Ganger's order: whom it serves in a crowd that ends soon, and in one that does not."""

from __future__ import annotations

import numpy as np
from ganger_master.policies import policy_named
from ganger_master.policies.facts import Facts
from ganger_master.policies.order import ranked
from ganger_master.policies.order.ganger import GANGER_ALONE, SWITCH_S
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
    crowded = max([SWITCH_S, sum(waits) / len(waits)]) if waits else SWITCH_S

    def key(job: dict[str, float]) -> tuple[float, ...]:
        gpus = max(1, job["gpus"])
        saved = 1 / crowded + job["index"] * gpus
        if not job["is_running"]:
            saved = saved / (1 + SWITCH_S * saved)
        elif job["index"] * gpus * SWITCH_S >= 1:
            saved = float("inf")
        return (-job["priority"], -saved / gpus, not job["is_running"], job["arrival_s"], job["number"])

    return [job["number"] for job in sorted(jobs, key=key)]


@given(facts=live_jobs(now=NOW))
def test_order_is_that_of_its_twin(facts: Facts) -> None:
    facts = replace(facts, index=np.where(np.isnan(facts.index), 1e-4, facts.index))
    assert facts.number[line(facts)].tolist() == twin(facts)


def test_where_waits_are_short_a_long_job_of_one_gpu_goes_before_a_gang() -> None:
    # 1 GPU for 100,000 s against 8 for 1,000 s each, and both have waited for a minute.
    facts = facts_of(
        {"gpus": 8, "index": 1 / 1_000 / 8, "waited_s": 60.0}, {"gpus": 1, "index": 1 / 100_000, "waited_s": 60.0}
    )
    assert line(facts) == [1, 0]


def test_where_waits_are_long_who_ends_soonest_for_its_gpus_goes_first() -> None:
    day = 86_400.0
    facts = facts_of(
        {"gpus": 1, "index": 1 / 100_000, "waited_s": 9 * day}, {"gpus": 8, "index": 1 / 1_000 / 8, "waited_s": 9 * day}
    )
    assert line(facts) == [1, 0]


def test_who_runs_keeps_its_place_before_one_like_it() -> None:
    alike = {"index": 1e-4}
    facts = facts_of({**alike, "waited_s": 60.0}, {**alike, "is_running": True, "arrival_s": 10.0})
    assert line(facts) == [1, 0]


def test_who_ends_before_its_place_could_change_hands_keeps_it() -> None:
    newcomer = {"gpus": 1, "index": 1 / 20, "waited_s": 600.0}
    facts = facts_of(newcomer, {"gpus": 128, "index": 1 / 10 / 128, "is_running": True})
    assert line(facts) == [1, 0]
    later = facts_of(newcomer, {"gpus": 128, "index": 1 / 20 / 128, "is_running": True})
    assert line(later) == [0, 1]


def test_ganger_keeps_nodes_whole_unless_told_where_gangs_go() -> None:
    assert policy_named("ganger").placement.name == "best-fit"
    assert policy_named("ganger+gandiva").placement.name == "gandiva"
    assert policy_named("las").placement.name == "gandiva"
