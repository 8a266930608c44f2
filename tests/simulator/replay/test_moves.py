"""Running jobs are moved for gangs that find no room, and no job loses a step; in virtual time. (10 s)"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
from ganger_master.planner import migrate_stage
from ganger_master.simulator.inputs import ReplayOptions, SwitchCosts
from ganger_master.simulator.report.outcomes import Outcomes
from ganger_master.simulator.run import simulate
from ganger_master.simulator.traces.servers import servers_from_flags
from ganger_master.simulator.traces.workload import Workload, workload
from hypothesis import given, settings
from hypothesis import strategies as st
from simulator.replay.test_promises import ROWS, Watched

FOUR_BY_FOUR = servers_from_flags(nodes=4, gpus_per_node=4, gpu_memory="16G")
COSTS = SwitchCosts(start_s=2.0, suspend_s=3.0, resume_s=4.0, offload_s=0.5, restore_s=0.5, move_s=1.5)
OPTIONS = ReplayOptions(costs=COSTS, plan_every_s=300.0)
LONG_S = 10_000.0


def filled(durations: Sequence[float], large_s: float = 1_000.0, priorities: Sequence[int] = ()) -> Workload:
    """Jobs of one device that fill nodes of four one after the other, and at 500 s a gang of four."""
    names = [f"small-{number}" for number in range(len(durations))]
    return workload(
        [*names, "large"],
        [*map(float, range(len(durations))), 500.0],
        [1] * len(durations) + [4],
        [*durations, large_s],
        # Not all that there is: parked jobs keep some.
        numbers={
            "priority": [*priorities] or [0] * (len(durations) + 1),
            "memory_bytes": [4 << 30] * len(durations) + [16 << 30],
        },
    )


def run(jobs: Workload, policy: str, options: ReplayOptions = OPTIONS) -> Outcomes:
    outcomes = simulate(jobs, FOUR_BY_FOUR, policy, options).outcomes
    assert outcomes.finished.all()
    assert outcomes.job_ids == jobs.job_ids
    return outcomes


def test_a_gang_of_four_starts_after_as_many_migrations_as_it_takes_and_no_job_is_preempted() -> None:
    """One device is free on each of four nodes from 100 s on."""
    jobs = filled([100.0 if number % 4 == 3 else LONG_S for number in range(16)])
    still = run(jobs, "fifo-backfill+first-fit")
    moved = run(jobs, "fifo-backfill+first-fit+defrag")
    assert still.start_delay_s[-1] > LONG_S - 600.0
    # Three pauses of one device, thus less than one of four.
    assert moved.start_delay_s[-1] <= 2.0 + COSTS.start_s + 2 * (COSTS.offload_s + COSTS.move_s)
    assert (int(moved.migrations.sum()), int(moved.preemptions.sum())) == (3, 0)
    pauses = (moved.jct_s - still.jct_s)[moved.migrations > 0]
    assert np.allclose(pauses, COSTS.move_s)


def test_no_job_migrates_for_a_gang_for_which_there_is_not_enough() -> None:
    # Those of the first node end at once.
    jobs = filled([LONG_S - n if n < 4 else 100.0 if n % 4 == 3 else 2 * LONG_S for n in range(16)])
    assert not run(jobs, "fifo-backfill+first-fit+defrag").migrations.any()


@pytest.mark.parametrize("policy", ["las", "ganger-alone+packs"])
def test_a_job_that_would_be_preempted_for_a_large_gang_is_migrated_instead(policy: str) -> None:
    jobs = filled([100.0 if number % 4 == 3 else LONG_S for number in range(16)])
    stopped = run(jobs, f"{policy}+first-fit")
    moved = run(jobs, f"{policy}+first-fit+defrag")
    assert moved.preemptions.sum() < stopped.preemptions.sum()
    assert moved.jct_s.mean() <= stopped.jct_s.mean()


def test_on_a_full_cluster_a_gang_that_outranks_others_swaps_with_them_through_host_memory() -> None:
    """Sixteen jobs, one of no priority on each node; the gang outranks those four, and no job outranks it."""
    priorities = [0 if number % 4 == 3 else 1 for number in range(16)]
    jobs = filled([LONG_S if number else 3_000.0 for number in range(16)], 600.0, [*priorities, 1])
    outcomes = run(jobs, "fifo-backfill+first-fit+defrag")
    assert outcomes.start_delay_s[-1] < 10.0
    low = np.array(priorities) == 0
    # Three of the others went to where those rest; they go on when the gang ends, or a place elsewhere is free.
    assert int(outcomes.migrations[:16][~low].sum()) == 3
    assert np.allclose(outcomes.jct_s[:16][low], LONG_S, atol=700.0)
    assert (outcomes.jct_s[:16][low] > LONG_S + 600.0).all()
    assert not outcomes.migrations[-1]


POLICIES = (
    "fifo+defrag",
    "fifo-backfill+defrag",
    "las+defrag",
    "ganger+fgd+defrag",
    "srtf+synergy-tune+defrag",
    "gandiva",
)


@settings(max_examples=30, deadline=None)
@given(policy=st.sampled_from(POLICIES), rows=ROWS, nodes=st.integers(3, 5))
def test_every_job_ends_and_nothing_is_promised_twice_and_what_is_passed_over_would_bring_nothing(
    policy: str, rows: list[tuple[int, int, int, str, int]], nodes: int
) -> None:
    """`Watched` looks at all invariants of the core after every batch."""
    arrivals, gpus, durations, users, priorities = zip(*rows, strict=True)
    jobs = workload(
        [str(number) for number in range(len(rows))],
        arrivals,
        gpus,
        durations,
        numbers={"priority": priorities},
        labels={"user": users},
    )
    ends = []
    # The second also runs the migration stage where no job could be migrated.
    for moves_no_job in (migrate_stage.moves_no_job, lambda *arguments: False):
        replay = Watched(
            jobs, servers_from_flags(nodes=nodes, gpus_per_node=4), policy, replace(OPTIONS, plan_every_s=20.0)
        )
        with patch.object(migrate_stage, "moves_no_job", moves_no_job):
            replay.run()
        outcomes = replay.ledger.outcomes()
        assert outcomes.finished.all()
        ends.append(outcomes.end_s)
        plans = replay.planning.loop.memory.moving.plans
        assert all(not one.steps or one.waiting not in replay.state.jobs.live for one in plans)
    assert np.array_equal(ends[0], ends[1])
