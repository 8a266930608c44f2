"""Two masters on one database: when the leader dies or hangs, the other one leads, and no job and no submission notices
more than a wait."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
from ganger.console import ExitCode
from kit.cluster import NO_PRELOAD, Service
from kit.waiting import eventually
from system.harness import Run
from system.several_masters import MasterGroup, Submitters

from benchmarks.postgresql_server import why_no_postgresql

pytestmark = [
    pytest.mark.system,
    pytest.mark.torch,
    pytest.mark.skipif(bool(why_no_postgresql()), reason=why_no_postgresql()),
]

STEPS = 400
PER_S = 40.0
# Lease, start and the search of the clients take under three seconds on a machine that is not busy.
MOST_S = 15.0


def group(directory: Path) -> MasterGroup:
    return MasterGroup(directory, nodes=1, virtual_gpus=2, topology="1x2", daemon_options=NO_PRELOAD)


def training(cluster: MasterGroup) -> Run:
    """A job that trains on all GPUs, some steps a second."""
    run = Run.submit(cluster, "train", world=2, steps=STEPS, job=("--waits", "0.05"))
    run.wait_step(3)
    return run


def wait_accepted(submitters: Submitters, moment: float, count: int = 1) -> None:
    eventually(
        lambda: submitters.count_after(moment) >= count,
        what=f"{count} submissions are accepted after the leader's end",
        within_seconds=MOST_S,
        story=lambda: str(submitters.failures),
    )


def finish(run: Run, reference: Run) -> None:
    run.hurry()
    run.wait_state("SUCCEEDED", within_seconds=120)
    run.check(reference)


def alone(cluster: MasterGroup) -> Run:
    """The same job, undisturbed."""
    run = Run.submit(cluster, "alone", world=2, steps=STEPS)
    run.hurry()
    run.wait_state("SUCCEEDED", within_seconds=120)
    return run


def test_the_leader_is_killed_again_and_again_and_nothing_is_lost_or_done_twice(tmp_path: Path) -> None:
    with group(tmp_path) as cluster:
        reference = alone(cluster)
        run = training(cluster)
        with Submitters(cluster, PER_S) as submitters:
            for _ in range(2):
                wait_accepted(submitters, time.monotonic(), 20)
                leader, step = cluster.leader, run.last_step()
                leader.kill()
                moment = time.monotonic()
                wait_accepted(submitters, moment, 20)
                assert cluster.leader is not leader
                run.wait_step(step + 5)
                cluster.start_again(leader)
        submitters.check(cluster)
        cluster.wait_ready()
        cluster.run("cancel", *[job.removeprefix("jobs/") for _, job in submitters.accepted.values()])
        finish(run, reference)


def ended_with(master: Service) -> int | None:
    assert master.process is not None
    return master.process.poll()


def test_a_leader_that_stood_still_commits_nothing_ends_and_stands_by_when_started_again(tmp_path: Path) -> None:
    with group(tmp_path) as cluster:
        reference = alone(cluster)
        run = training(cluster)
        with Submitters(cluster, PER_S) as submitters:
            wait_accepted(submitters, time.monotonic(), 20)
            former, step = cluster.leader, run.last_step()
            former.signal(signal.SIGSTOP)
            moment = time.monotonic()
            wait_accepted(submitters, moment, 20)
            run.wait_step(step + 5)
            accepted = dict(submitters.accepted)
            former.signal(signal.SIGCONT)
            eventually(lambda: ended_with(former) is not None, what="the former leader ends", story=cluster.story)
            assert ended_with(former) == ExitCode.LEASE_LOST, cluster.story()
            assert "started again, it stands by" in former.log.read_text()
            wait_accepted(submitters, time.monotonic(), 20)
            assert accepted.items() <= submitters.accepted.items()
        submitters.check(cluster)
        present = cluster.leader
        assert present is not former
        cluster.start_again(former)
        present.stop()
        moment = time.monotonic()
        assert cluster.leader is former
        # A leader that stops gives its lease back.
        assert time.monotonic() - moment < MOST_S
        cluster.run("cancel", *[job.removeprefix("jobs/") for _, job in submitters.accepted.values()])
        finish(run, reference)
