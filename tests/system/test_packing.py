"""Two jobs train on one device at once; a job that shares with no other waits for both to be off it."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from kit.cluster import Cluster
from kit.waiting import eventually
from system.harness import Run
from system.killing import start_the_dead
from system.packing import (
    WANTS,
    Plans,
    beside,
    check_beginning,
    goes_on,
    has_quotas,
    is_at,
    is_settled,
    packing_cluster,
)
from system.test_planner import planners

DEEDS = 8

pytestmark = [pytest.mark.system, pytest.mark.torch]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with packing_cluster(tmp_path) as running:
        yield running


def test_two_jobs_share_a_device_and_both_end_right_though_their_daemon_is_killed(cluster: Cluster) -> None:
    plans = Plans(cluster)
    host, guest, stranger = (Run.submit(cluster, label, *WANTS) for label in ("host", "guest", "stranger"))
    plans.start(host, "n0", 0, shared=False)
    plans.start(stranger, "n0", 1, shared=False)
    stranger.hurry()
    host.wait_step(2, within_seconds=120)
    plans.start(guest, "n0", 0, shared=True)
    for run in (guest, host):
        goes_on(run)
    assert (beside(host), beside(guest)) == ([guest.name], [host.name])
    node = host.shell.json("nodes")["nodes"][0]
    assert node["capabilities"]["packing"] == "yes"

    # What shares a device is in the notes of the daemon, too.
    cluster.daemons["n0"].kill()
    cluster.daemons["n0"].start()
    for run in (guest, host):
        goes_on(run)

    # Separated and co-located again; a job that comes back to a free device has it alone.
    plans.suspend(guest)
    assert beside(host) == []
    goes_on(host)
    plans.resume(guest)
    goes_on(guest)
    assert beside(host) == [guest.name]

    stranger.wait_state("SUCCEEDED", within_seconds=120)
    newcomer = Run.submit(cluster, "newcomer", *WANTS)
    plans.suspend(guest)
    host.hurry()
    plans.start(newcomer, "n0", 0, shared=False)
    host.wait_state("SUCCEEDED", within_seconds=120)
    newcomer.hurry()
    newcomer.wait_state("SUCCEEDED", within_seconds=120)
    eventually(lambda: beside(guest) == [], what="no other job is on the device")
    plans.resume(guest)
    guest.hurry()
    guest.wait_state("SUCCEEDED", within_seconds=120)
    for run in (host, guest, newcomer):
        run.check(stranger)


@pytest.mark.chaos
@pytest.mark.parametrize("seed", range(6))
def test_a_kill_at_any_instant_of_joining_resting_and_leaving_harms_neither(tmp_path: Path, seed: int) -> None:
    dice = random.Random(seed)
    with packing_cluster(tmp_path, nodes=2) as cluster:
        plans = Plans(cluster)
        reference = Run.submit(cluster, "reference", *WANTS)
        plans.start(reference, "n1", 1, shared=False)
        reference.hurry()
        reference.wait_state("SUCCEEDED", within_seconds=120)
        host, guest = (Run.submit(cluster, label, *WANTS, steps=4096) for label in ("host", "guest"))
        plans.start(host, "n0", 0, shared=False)
        plans.start(guest, "n1", 0, shared=False)
        goes_on(host)
        goes_on(guest)
        is_in = False
        for _ in range(DEEDS):
            deed = dice.choice(["rest", "leave"] if is_in else ["join"])
            if deed == "rest":
                plans.park(guest)
            else:
                node, device = dice.choice([("n0", 1), ("n1", 0), ("n1", 1)]) if is_in else ("n0", 0)
                plans.move(guest, node, device, shared=not is_in)
                is_in = not is_in
            threading.Event().wait(dice.uniform(0.0, 1.5))  # the instant is what is random here
            dice.choice([cluster.master, *cluster.daemons.values()]).kill()
            start_the_dead(cluster)
            cluster.wait_ready()
            if deed == "rest":
                plans.resume(guest)
            eventually(lambda: is_settled(guest), what="the deed is done", within_seconds=90, story=guest.story)
            if not is_at(guest, "n0", 0) if is_in else is_at(guest, "n0", 0):
                # The move was given up for the kill, and the guest is where it was.
                is_in = not is_in
            goes_on(host)
            goes_on(guest)
            assert beside(host) == ([guest.name] if is_in else []), guest.story()
        for run in (host, guest):
            check_beginning(run, reference)


@pytest.mark.chaos
@pytest.mark.parametrize("seed", range(2))
def test_kills_while_the_planner_packs_and_parts_leave_every_job_its_result(tmp_path: Path, seed: int) -> None:
    dice = random.Random(seed)
    if not has_quotas():
        pytest.skip("waiting jobs differ from computing ones by the CPU time of a device, and there is no quota here")
    with Cluster(
        tmp_path,
        nodes=1,
        virtual_gpus=2,
        topology="2",
        master_options=("--policy", "gandiva", "--plan-every", "10s", "--quantum", "never"),
        daemon_options=("--virtual-gpu-cores", "0.3"),
    ) as cluster:
        reference = Run.submit(cluster, "reference", *WANTS)
        reference.hurry()
        reference.wait_state("SUCCEEDED", within_seconds=120)
        # They step ten times a second and do nothing meanwhile: a pair that pays.
        runs = [Run.submit(cluster, f"job-{number}", *WANTS, steps=2048) for number in range(3)]
        eventually(
            lambda: any(beside(run) for run in runs),
            what="two of them are tried together",
            within_seconds=180,
            story=runs[0].story,
            every_seconds=0.5,
        )
        for _ in range(DEEDS):
            victims = [*planners(cluster), cluster.master, *cluster.daemons.values()]
            victim = dice.choice(victims)
            if isinstance(victim, int):
                os.kill(victim, signal.SIGKILL)
            else:
                victim.kill()
            start_the_dead(cluster)
            cluster.wait_ready()
            threading.Event().wait(dice.uniform(1.0, 12.0))
        for run in runs:
            run.hurry()
        for run in runs:
            # A job that was separated from the others comes back once there is room.
            run.wait_state("SUCCEEDED", within_seconds=180)
            check_beginning(run, reference)
