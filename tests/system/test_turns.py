"""Time-sliced jobs on a GPU: the planner places them, daemons switch them, and no job loses a step under outages."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
from kit.cluster import Cluster
from kit.waiting import eventually
from system.harness import Run

pytestmark = pytest.mark.torch

OPTIONS = ("--policy", "gandiva", "--quantum", "1s")
# Two of them do not fit on a device together: a parked one is offloaded.
WANTS = ("--cpus-per-gpu", "2", "--memory", "512M", "--gpu-memory", "2100M")


def goes_on(*runs: Run, steps: int = 3) -> None:
    """All of them, so that each has had a turn at least."""
    goals = [run.last_step() + steps for run in runs]
    for run, goal in zip(runs, goals, strict=True):
        run.wait_step(goal, within_seconds=120)


def takes_turns(run: Run) -> bool:
    return "time-sliced with" in run.shell.try_("history", run.id).out


def one_gpu(directory: Path, *options: str) -> Cluster:
    options = (*OPTIONS, *options)
    return Cluster(
        directory, nodes=1, virtual_gpus=1, topology="1", virtual_cores=2, virtual_memory="32G", master_options=options
    )


def in_turns(cluster: Cluster, steps: int) -> tuple[Run, Run]:
    first = Run.submit(cluster, "first", *WANTS, steps=steps)
    first.wait_step(3)
    second = Run.submit(cluster, "second", *WANTS, steps=steps)
    second.wait_step(1, within_seconds=120)
    for run in (first, second):
        assert takes_turns(run), run.story()
    return first, second


def finish(first: Run, second: Run) -> None:
    """Every step once, whatever happened meanwhile."""
    for run in (first, second):
        run.hurry()
    for run in (first, second):
        run.wait_state("SUCCEEDED", within_seconds=180)
    second.check(first)
    first.check(second)


def test_jobs_take_turns_on_one_gpu_also_while_the_master_is_away(tmp_path: Path) -> None:
    with one_gpu(tmp_path) as cluster:
        first, second = in_turns(cluster, steps=160)
        cluster.master.kill()
        goes_on(first, second)
        cluster.start_master()
        finish(first, second)


def test_a_job_that_its_user_suspends_and_resumes_has_its_turns_again_beside_jobs_that_came_later(
    tmp_path: Path,
) -> None:
    with one_gpu(tmp_path) as cluster:
        first = Run.submit(cluster, "first", *WANTS, steps=400)
        first.wait_step(3)
        first.shell.json("suspend", first.id, "--level", "pause")
        first.wait_state("SUSPENDED")
        second = Run.submit(cluster, "second", *WANTS, steps=400)
        # A job at that level keeps its GPU.
        assert second.state == "PENDING"
        first.shell.json("resume", first.id)
        goes_on(first, second)
        for level in ("offload", "checkpoint"):
            first.shell.json("suspend", first.id, "--level", level)
            first.wait_state("SUSPENDED")
            goes_on(second)
            if level == "checkpoint":
                third = Run.submit(cluster, "third", *WANTS, steps=400)
                third.wait_step(1, within_seconds=120)
            first.shell.json("resume", first.id)
        goes_on(first, second, third)
        finish(first, second)
        third.hurry()
        third.wait_state("SUCCEEDED", within_seconds=180)


@pytest.mark.chaos
def test_gangs_over_two_nodes_take_turns_led_by_one_of_them_also_while_the_master_is_away(tmp_path: Path) -> None:
    cluster = Cluster(
        tmp_path, nodes=2, virtual_gpus=1, topology="1", virtual_cores=2, virtual_memory="32G", master_options=OPTIONS
    )
    with cluster:
        first = Run.submit(cluster, "first", *WANTS, world=2, steps=240)
        first.wait_step(3, within_seconds=120)
        second = Run.submit(cluster, "second", *WANTS, world=2, steps=240)
        second.wait_step(1, within_seconds=120)
        assert takes_turns(second), second.story()
        goes_on(first, second)
        cluster.master.kill()
        goes_on(first, second)
        # without its leader a set stays in its row, and goes on once it is back
        cluster.daemons["n0"].kill()
        cluster.daemons["n0"].start()
        goes_on(first, second)
        cluster.start_master()
        finish(first, second)


@pytest.mark.chaos
def test_jobs_take_turns_though_their_daemon_dies_and_others_come_and_go(tmp_path: Path) -> None:
    with one_gpu(tmp_path) as cluster:
        first, second = in_turns(cluster, steps=800)
        cluster.master.kill()
        goes_on(first, second)
        cluster.daemons["n0"].kill()
        cluster.daemons["n0"].start()
        goes_on(first, second)
        cluster.start_master()
        third = Run.submit(cluster, "third", *WANTS, steps=800)
        third.wait_step(1, within_seconds=120)
        goes_on(first, second, third)
        first.shell.json("cancel", third.id)
        eventually(lambda: third.state == "CANCELLED", what="the third is gone", within_seconds=60, story=third.story)
        first.shell.json("suspend", first.id, "--level", "offload")
        first.wait_state("SUSPENDED")
        goes_on(second)
        first.shell.json("resume", first.id)
        finish(first, second)


@pytest.mark.chaos
def test_time_sliced_jobs_end_with_the_right_weights_under_kills(tmp_path: Path) -> None:
    dice = random.Random(6)
    with one_gpu(tmp_path) as cluster:
        first, second = in_turns(cluster, steps=1600)
        for _ in range(20):
            victim = dice.choice((cluster.master, cluster.daemons["n0"]))
            time.sleep(dice.uniform(0.0, 2.5))  # somewhere in a turn, or between two
            victim.kill()
            if dice.random() < 0.5:
                goes_on(*((first, second) if victim is cluster.master else ()), steps=1)
            if victim is cluster.master:
                cluster.start_master()
            else:
                victim.start()
        cluster.wait_ready()
        goes_on(first, second)
        finish(first, second)


def test_under_an_order_a_newcomer_has_its_first_slices_beside_a_running_job_and_then_waits_in_the_queue(
    tmp_path: Path,
) -> None:
    # Both are in the first queue of the order, so neither preempts the other.
    with one_gpu(tmp_path, "--policy", "tiresias+slices") as cluster:
        first = Run.submit(cluster, "first", *WANTS, steps=200)
        first.wait_step(3)
        second = Run.submit(cluster, "second", *WANTS, steps=200)
        second.wait_step(1, within_seconds=120)
        assert takes_turns(second), second.story()
        second.wait_state("PENDING")
        assert "its first time slices are over" in second.shell.try_("history", second.id).out
        reached = second.last_step()
        goes_on(first)
        assert (second.state, second.last_step()) == ("PENDING", reached)
        finish(first, second)
