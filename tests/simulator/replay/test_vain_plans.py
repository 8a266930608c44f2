"""A plan that could start no job is skipped, and later decisions are as if it had been made."""

from __future__ import annotations

from collections import Counter
from unittest.mock import patch

import numpy as np
import pytest
from ganger.cluster.preferences import ANYWHERE
from ganger_master.core.commands import CHANGES_LIMIT, Command, ProposePlan, RequestGang
from ganger_master.planner import order_stage
from ganger_master.planner.order_stage import OrderStage
from ganger_master.simulator import run
from ganger_master.simulator.inputs import ReplayOptions
from ganger_master.simulator.run import _Replay
from ganger_master.simulator.traces.servers import servers_from_flags
from ganger_master.simulator.traces.workload import Workload, workload
from msgspec.structs import replace

JOBS = 60
OPTIONS = ReplayOptions()


class _Counted(_Replay):
    """Keeps what the core was told and when, and how many passes were made."""

    def __init__(self, jobs: Workload, policy: str, options: ReplayOptions = OPTIONS, nodes: int = 3) -> None:
        self.commands: list[tuple[float, Command]] = []
        self.passes = 0
        super().__init__(jobs, servers_from_flags(nodes=nodes, gpus_per_node=4), policy, options, None)

    def send(self, command: Command) -> object:
        # A pass that starts no job may still publish the order of pending jobs, which is a version of the view.
        told = replace(command, view_version=0) if isinstance(command, RequestGang) else command
        self.commands.append((self.clock.now, told))
        return super().send(command)

    def run(self) -> None:
        with patch.object(order_stage, "plan_by", side_effect=order_stage.plan_by) as passes:
            super().run()
        self.passes = passes.call_count


def crowd() -> Workload:
    """More work than the cluster can do while it comes."""
    draw = np.random.default_rng(11)
    submit_s = np.sort(draw.uniform(0.0, 20_000.0, JOBS))
    gpus = draw.choice([1, 1, 2, 4, 8], JOBS)
    return workload(
        [str(job) for job in range(JOBS)],
        submit_s,
        gpus,
        np.exp(draw.normal(7.0, 1.3, JOBS)),
        labels={"user": [f"user{job % 3}" for job in range(JOBS)]},
    )


# Three learn from what they see, one changes in jumps, one all the time. One looks at packs between two plans that may
# preempt.
@pytest.mark.parametrize(
    ("policy", "share"),
    [("ganger-alone+packs", 0.8), ("ganger-alone", 0.75), ("tiresias-gittins", 0.7), ("las2d", 0.75), ("drf", 0.95)],
)
def test_plans_passed_over_would_have_changed_nothing(policy: str, share: float) -> None:
    jobs = crowd()
    some = _Counted(jobs, policy)
    some.run()
    with patch.object(OrderStage, "_is_futile", lambda self, context: False):
        every = _Counted(jobs, policy)
        every.run()
    assert some.commands == every.commands
    assert some.passes < share * every.passes, "some were passed over"


@pytest.mark.parametrize("round_s", [None, 300.0])
@pytest.mark.parametrize("policy", ["fifo", "fifo-backfill"])
def test_jobs_known_to_be_first_start_as_if_all_had_been_ranked(policy: str, round_s: float | None) -> None:
    jobs, options = crowd(), ReplayOptions(ideal=True, round_s=round_s)
    some = _Counted(jobs, policy, options)
    some.run()
    with (
        patch.object(OrderStage, "_first_of_queue", lambda self, context: None),
        patch.object(run, "BY_COUNTS", ANYWHERE),
    ):
        every = _Counted(jobs, policy, options)
        every.run()
    assert some.commands == every.commands
    # Without preemption a round begins as the last one ended.
    assert some.passes < every.passes or round_s is not None


@pytest.mark.parametrize("policy", ["fifo", "fifo-backfill"])
def test_an_order_without_preemption_makes_no_plan_while_the_next_job_is_too_large_for_the_free_gpus(
    policy: str,
) -> None:
    jobs, options = crowd(), ReplayOptions(ideal=True)
    some = _Counted(jobs, policy, options)
    some.run()
    with patch.object(OrderStage, "starts_no_job", lambda self, table, free: False):
        every = _Counted(jobs, policy, options)
        every.run()
    assert some.commands == every.commands
    assert some.passes < 0.7 * every.passes, "most plans of an oversubscribed cluster start no job"
    never_ended = pytest.raises(AssertionError, match="never ended")
    with never_ended, patch.object(OrderStage, "starts_no_job", lambda self, table, free: True):
        _Counted(jobs, policy, options).run()


def test_ganger_does_not_take_back_what_it_did_for_jobs_that_had_waited() -> None:
    """Each round is settled by few plans: one that stops, one that starts, and what those lead to."""
    replay = _Counted(crowd(), "ganger", ReplayOptions(ideal=True, round_s=300.0))
    replay.run()
    plans = Counter(at for at, command in replay.commands if isinstance(command, ProposePlan))
    assert max(plans.values()) <= 5


def test_a_burst_is_started_at_its_instant_however_many_changes_a_plan_may_have() -> None:
    """A plan has at most 250 changes, so that no other call waits long for the master's judgement."""
    many = 300
    jobs = workload(
        [str(job) for job in range(many)], np.zeros(many), np.ones(many, np.int64), np.full(many, 500.0), labels={}
    )
    replay = _Counted(jobs, "las", nodes=many // 4)
    replay.run()
    plans = [command.changes for at, command in replay.commands if isinstance(command, ProposePlan)]
    assert sum(map(len, plans)) == many
    assert max(map(len, plans)) <= CHANGES_LIMIT
    assert len({at for at, command in replay.commands if isinstance(command, ProposePlan)}) == 1
