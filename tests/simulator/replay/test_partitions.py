"""Partitions in a replay: whatever the policy, no gang is outside its partition, every job ends, and no partition keeps
another one's nodes idle."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest
from ganger_master.core.tenancy import Partition
from ganger_master.policies import NAMES
from ganger_master.simulator.inputs import FREE, ReplayOptions
from ganger_master.simulator.report.outcomes import Outcomes
from ganger_master.simulator.run import simulate
from ganger_master.simulator.traces.servers import servers_from_flags
from ganger_master.simulator.traces.workload import Labels, Workload, workload
from hypothesis import given, settings
from hypothesis import strategies as some
from simulator.replay.test_promises import ROWS, Watched
from simulator.replay.test_quotas import EVERY, SERVERS, WAYS, jobs_of, possible

# The third node is in two of them.
PARTITIONS = {
    "batch": Partition(nodes=("node-1", "node-2"), gpus=6),
    "urgent": Partition(nodes=("node-2",), priority=1, gpus_per_user=3),
    "own": Partition(nodes=("node-0",), preemptible=False, gpus_per_job=2),
}


def test_the_names_of_the_servers_are_those_of_the_partitions() -> None:
    names = {row.node for group in SERVERS.groups for row in group.rows()}
    assert names == {node for one in PARTITIONS.values() for node in one.nodes}


@settings(max_examples=60, deadline=None)
@given(
    policy=some.sampled_from(EVERY),
    way=some.sampled_from(sorted(name for name, options in WAYS.items() if not options.ideal)),
    rows=ROWS,
    inside=some.lists(some.sampled_from(["", "batch", "urgent", "own"]), min_size=11, max_size=11),
    elastic=some.sampled_from([1, 3]),
)
def test_no_gang_is_outside_its_partition_and_every_job_ends(
    policy: str, way: str, rows: list[tuple[int, int, int, str, int]], inside: list[str], elastic: int
) -> None:
    # `Watched` looks at all gangs after every batch.
    jobs = jobs_of([*rows, (5, 2, 40, "ann", 0)], 2, elastic)
    jobs = jobs.with_columns(partition=Labels.of(inside[: len(jobs)]))
    replay = Watched(jobs, SERVERS, possible(policy, way), replace(WAYS[way], partitions=PARTITIONS))
    replay.run()
    assert replay.ledger.outcomes().finished.all()
    assert not replay.state.jobs.charges.held


@pytest.mark.parametrize("policy", ["fifo", "fifo-backfill", "las", "srtf", "ganger", "gandiva", "drf", "las+packs"])
def test_one_partition_of_all_nodes_changes_no_outcome(policy: str) -> None:
    jobs = workload(
        [str(job) for job in range(20)],
        np.arange(20.0) * 30,
        [1, 2, 4, 1] * 5,
        [200.0, 700.0, 400.0, 90.0] * 5,
        labels={"user": ["ann"] * 20},
    )
    options = ReplayOptions(plan_every_s=20.0)
    # A cluster with partitions has a planner under every policy, as one with teams has.
    named = policy if policy not in ("fifo", "fifo-backfill") else f"{policy}+gandiva"
    without = simulate(jobs, SERVERS, named, options)
    within = simulate(jobs, SERVERS, policy, replace(options, partitions={"all": Partition()}))
    if policy == named:
        for column in fields(Outcomes):
            np.testing.assert_array_equal(getattr(without.outcomes, column.name), getattr(within.outcomes, column.name))
    else:
        assert within.outcomes.end_s.max() <= without.outcomes.end_s.max() + 60.0


def backlog() -> Workload:
    """A hundred jobs of one partition came first; four of the other one come later."""
    return workload(
        [str(job) for job in range(104)],
        [0.0] * 100 + [10.0] * 4,
        [1] * 104,
        [600.0] * 104,
        labels={"user": ["ann"] * 104, "partition": ["batch"] * 100 + ["own"] * 4},
    )


@pytest.mark.parametrize("policy", sorted({*NAMES, "las+packs"}))
def test_a_backlog_in_one_partition_keeps_no_node_of_another_idle(policy: str) -> None:
    partitions = {"batch": Partition(nodes=("node-1", "node-2")), "own": Partition(nodes=("node-0",))}
    run = simulate(backlog(), SERVERS, policy, ReplayOptions(costs=FREE, partitions=partitions))
    assert run.outcomes.first_start_s[100:].max() <= 10.0 + 30.0


@pytest.mark.parametrize("policy", ["las", "srtf", "ganger", "fifo-backfill", "drf"])
def test_the_partition_of_a_higher_priority_goes_first_where_both_have_nodes(policy: str) -> None:
    jobs = workload(
        [str(job) for job in range(8)],
        [0.0] * 8,
        [4] * 8,
        [100.0] * 8,
        labels={"user": ["ann"] * 8, "partition": ["low", "high"] * 4},
    )
    partitions = {"low": Partition(), "high": Partition(priority=1)}
    servers = servers_from_flags(nodes=1, gpus_per_node=4)
    run = simulate(jobs, servers, policy, ReplayOptions(costs=FREE, partitions=partitions))
    first = np.argsort(run.outcomes.first_start_s, kind="stable")[:4]
    assert sorted(first.tolist()) == [1, 3, 5, 7]


def test_an_ideal_cluster_has_no_partitions() -> None:
    with pytest.raises(ValueError, match="no partitions"):
        ReplayOptions(ideal=True, partitions={"all": Partition()})
