"""What switching costs a replayed job: its devices are held all the while, and no step is done."""

from __future__ import annotations

import numpy as np
import pytest
from ganger_master.simulator.inputs import ReplayOptions, SwitchCosts
from ganger_master.simulator.run import simulate
from ganger_master.simulator.traces.servers import servers_from_flags
from ganger_master.simulator.traces.workload import workload

ONE_GPU = servers_from_flags(nodes=1, gpus_per_node=1)


def test_a_suspended_job_trains_no_more_while_its_state_is_saved() -> None:
    costs = SwitchCosts(start_s=2.0, suspend_s=30.0, resume_s=4.0)
    jobs = workload(["long", "short"], [0.0, 500.0], [1, 1], [1000.0, 100.0])
    found = simulate(jobs, ONE_GPU, "srtf", ReplayOptions(costs=costs, plan_every_s=1.0)).outcomes
    # The short one starts once the state of the long one is saved; that goes on from the step it had at 500 s.
    assert found.end_s == pytest.approx([1000.0 + 2.0 + 30.0 + (2.0 + 100.0) + (2.0 + 4.0), 500.0 + 30.0 + 2.0 + 100.0])
    assert found.overhead_s == pytest.approx([2.0 + 30.0 + 2.0 + 4.0, 2.0])
    assert found.service_s - found.overhead_s == pytest.approx([1000.0, 100.0])


@pytest.mark.parametrize(("comes_s", "stops_s"), [(500.0, 502.0), (502.0, 502.0), (503.0, 602.0), (950.0, 1002.0)])
def test_a_job_scheduled_at_epochs_trains_to_the_end_of_its_epoch_before_it_is_suspended(
    comes_s: float, stops_s: float
) -> None:
    """It trains from 2 s on in epochs of 100 s; its tenth is its last, at the end of which it ends instead."""
    costs = SwitchCosts(start_s=2.0, suspend_s=30.0, resume_s=4.0)
    numbers = {"epoch_s": [100.0, np.nan]}
    jobs = workload(["long", "short"], [0.0, comes_s], [1, 1], [1000.0, 10.0], numbers=numbers)
    found = simulate(jobs, ONE_GPU, "srtf", ReplayOptions(costs=costs, plan_every_s=1.0)).outcomes
    is_suspended = stops_s < 1002.0
    assert found.preemptions.tolist() == [int(is_suspended), 0]
    short_ends_s = stops_s + (30.0 if is_suspended else 0.0) + 2.0 + 10.0
    assert found.end_s == pytest.approx(
        [short_ends_s + 6.0 + 1002.0 - stops_s if is_suspended else 1002.0, short_ends_s]
    )


def test_with_time_slices_no_job_trains_on_the_way_to_host_memory_and_back() -> None:
    costs = SwitchCosts(start_s=0.0, offload_s=3.0, restore_s=2.0)
    jobs = workload(["a", "b"], [0.0, 0.0], [1, 1], [2000.0, 2000.0], numbers={"memory_bytes": [4 << 30] * 2})
    one_gpu = servers_from_flags(nodes=1, gpus_per_node=1, gpu_memory="16G")
    found = simulate(jobs, one_gpu, "gandiva", ReplayOptions(costs=costs)).outcomes
    assert found.service_s - found.overhead_s == pytest.approx([2000.0, 2000.0])
    # One device: all of its time is a step or a switch of one job.
    assert found.end_s.max() == pytest.approx(4000.0 + found.overhead_s.sum(), abs=0.1)
    # Each time that one gives way to the other.
    assert found.overhead_s.sum() == pytest.approx(found.preemptions.sum() * 5.0)
    assert found.preemptions.sum() > 4


def test_the_time_between_plans_that_preempt_runs_from_the_last_one_that_did() -> None:
    two_gpus = servers_from_flags(nodes=1, gpus_per_node=2)
    jobs = workload(["old", "fits", "first", "second"], [0.0, 1_000.0, 1_010.0, 1_020.0], [1] * 4, [9_000.0] * 4)
    found = simulate(jobs, two_gpus, "las", ReplayOptions(costs=SwitchCosts(suspend_s=3.0))).outcomes
    # The plan for the second job preempted no job, so the third need not wait; the plan for it preempts.
    assert found.start_delay_s == pytest.approx([0.0, 0.0, 3.0, 1_310.0 + 3.0 - 1_020.0])


def test_pending_jobs_are_planned_again_after_that_time_without_a_change() -> None:
    jobs = workload(["old", "young"], [0.0, 0.0], [1, 1], [9_000.0, 9_000.0])
    found = simulate(jobs, ONE_GPU, "las", ReplayOptions()).outcomes
    assert found.start_delay_s.max() < 700.0
    assert found.preemptions.sum() > 20


def test_a_plan_that_is_due_is_made_though_one_before_it_was_awaited_earlier() -> None:
    jobs = workload(["a", "b", "c"], [0.0, 0.0, 10.0], [1, 1, 1], [9_000.0] * 3)
    found = simulate(jobs, ONE_GPU, "las", ReplayOptions(costs=SwitchCosts(suspend_s=3.0))).outcomes
    # Since the first plan the next was due at 300 s; for the third job a job was preempted after ten.
    assert found.start_delay_s == pytest.approx([0.0, 13.0, 310.0 + 3.0 - 10.0])
