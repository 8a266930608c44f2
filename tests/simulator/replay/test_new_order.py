"""An order that a contributor adds ranks jobs by its keys, whether it preempts or not."""

from __future__ import annotations

from typing import Any

import pytest
from ganger_master import policies
from ganger_master.policies import StartByRank, policy_named
from ganger_master.policies.order_registry import ORDERS
from ganger_master.policies.orders import Capacity, Facts, JobOrder
from ganger_master.simulator.inputs import ReplayOptions
from ganger_master.simulator.run import simulate
from ganger_master.simulator.traces.servers import servers_from_flags
from ganger_master.simulator.traces.workload import workload

# The first job has all GPUs until 600 s, and all others arrive meanwhile.
JOBS = workload(
    ["first", "narrow", "middle", "wide"], [0.0, 10.0, 20.0, 30.0], [4, 1, 2, 4], [600.0, 100.0, 100.0, 100.0]
)


def widest_keys(facts: Facts, now: float, capacity: Capacity) -> tuple[Any, ...]:
    """Widest gang first."""
    return (-facts.gpus,)


@pytest.mark.parametrize("preempts", [False, True])
def test_an_order_that_is_not_by_arrival_starts_jobs_by_its_keys(
    monkeypatch: pytest.MonkeyPatch, preempts: bool
) -> None:
    order = JobOrder("widest", widest_keys, preempts=preempts)
    monkeypatch.setitem(policies._BASES, "widest", policies._base_of_order(order))
    monkeypatch.setattr(policies, "NAMES", (*policies.NAMES, "widest"))
    assert policy_named("widest").stages == (StartByRank(),)
    found = simulate(JOBS, servers_from_flags(nodes=1, gpus_per_node=4), "widest", ReplayOptions()).outcomes
    starts = dict(zip(JOBS.job_ids, found.start_delay_s + JOBS.submit_s, strict=True))
    assert starts["first"] < starts["wide"] < starts["middle"] <= starts["narrow"]
    # While a wide job waits no narrow one takes a part of its GPUs.
    assert starts["wide"] >= 600.0


def test_only_orders_by_arrival_that_preempt_no_job_need_no_planner() -> None:
    assert {name for name, order in ORDERS.items() if not order.needs_planner} == {"fifo", "fifo-backfill"}
