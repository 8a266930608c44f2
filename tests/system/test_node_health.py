"""A node fails its health check while a job trains on it: the job moves without losing a step, and the node returns. A
prolog that fails takes its node out of service, and the job starts on the other. A node
is tested before it returns, and one that is slow is drained."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from kit.cluster import Cluster
from kit.shell import Shell
from kit.waiting import eventually
from system.harness import Run
from system.test_drain import node_of

pytestmark = [pytest.mark.system, pytest.mark.torch]


def program(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def node(shell: Shell, name: str) -> dict[str, Any]:
    (found,) = [one for one in shell.json("nodes")["nodes"] if one["name"] == f"nodes/{name}"]
    return dict(found)


def test_a_node_that_fails_its_check_is_emptied_and_returns_by_itself(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    check = program(tmp_path / "check", f'[ ! -e {broken}-$GANGER_NODE ] || {{ echo "no InfiniBand"; exit 1; }}')
    options = ("--health-check", check, "--health-check-every", "500ms")
    with Cluster(tmp_path / "c", nodes=2, virtual_gpus=1, topology="1", daemon_options=options) as cluster:
        run = Run.submit(cluster, "job", "--memory", "1G", steps=320)
        run.wait_step(3, within_seconds=120)
        here = node_of(run)
        Path(f"{broken}-{here}").touch()

        def has_moved() -> bool:
            return node_of(run) != here

        eventually(has_moved, what="the job moves", within_seconds=90, story=cluster.story)
        reason = "health check exited with code 1: no InfiniBand"
        found = node(run.shell, here)
        assert (found["state"], found["state_reason"]) == ("DRAINING", reason)
        run.wait_step(run.last_step() + 2, within_seconds=120)
        assert "moved" in run.shell("history", run.id), run.story()

        Path(f"{broken}-{here}").unlink()
        eventually(lambda: node(run.shell, here)["state"] == "READY", what="it returns", within_seconds=60)
        events = [
            (one["kind"], one["message"]) for one in run.shell.json("events") if one["subject"] == f"nodes/{here}"
        ]
        assert ("node_unhealthy", reason) in events
        assert events[-1][0] == "node_healthy"
        run.hurry()
        run.wait_state("SUCCEEDED", within_seconds=120)


def test_a_job_whose_prolog_fails_on_a_node_starts_on_another(tmp_path: Path) -> None:
    first = tmp_path / "first"
    prolog = program(tmp_path / "prolog", f"mkdir {first} 2>/dev/null || exit 0\necho no scratch disk\nexit 1")
    with Cluster(tmp_path / "c", nodes=2, virtual_gpus=1, topology="1", daemon_options=("--prolog", prolog)) as cluster:
        run = Run.submit(cluster, "job", "--memory", "1G", steps=20)
        run.wait_state("SUCCEEDED", within_seconds=120)
        (cordoned,) = [one for one in run.shell.json("nodes")["nodes"] if one["state"] == "CORDONED"]
        assert cordoned["state_reason"] == f"prolog exited with code 1: no scratch disk ({run.name})"
        assert "no scratch disk" in run.shell("nodes")


def test_a_node_is_tested_before_it_returns_and_one_that_fails_stays_closed(tmp_path: Path) -> None:
    broken, memory = tmp_path / "broken", tmp_path / "memory"
    check = program(tmp_path / "check", f'[ ! -e {broken} ] || {{ echo "no InfiniBand"; exit 1; }}')
    test = program(tmp_path / "test", f"[ ! -e {memory} ] || exit 42\nexec {sys.executable} -m ganger.node_test $1")
    config = tmp_path / "master.toml"
    config.write_text(f'test_nodes = true\ntest_command = "{test}"\n')
    daemon = ("--health-check", check, "--health-check-every", "500ms")
    master = ("--config", str(config))
    with Cluster(
        tmp_path / "c", nodes=1, virtual_gpus=2, topology="2", daemon_options=daemon, master_options=master
    ) as cluster:
        shell = Shell(cluster.master_directory)

        def breaks() -> None:
            broken.touch()
            eventually(lambda: node(shell, "n0")["state"] == "DRAINING", what="it is emptied", within_seconds=60)
            broken.unlink()

        def has_returned() -> bool:
            return bool(node(shell, "n0")["state"] == "READY")

        breaks()
        eventually(has_returned, what="it passes its test", within_seconds=120, story=cluster.story)
        (job,) = shell.json("queue", "--all")
        assert (job["spec"]["display_name"], job["user"], job["state"]) == ("test-n0", "system:health", "SUCCEEDED")
        assert "sums over 2 are right" in shell("logs", "1")

        memory.touch()
        breaks()
        failed = "its test failed (jobs/2): memory did not keep what was written to it"
        eventually(
            lambda: failed in node(shell, "n0").get("state_reason", ""), what="its test fails", within_seconds=120
        )
        assert node(shell, "n0")["state"] == "CORDONED"
        assert failed in shell("nodes")
        memory.unlink()
        shell("uncordon", "n0", "--test")
        eventually(has_returned, what="it passes the next one", within_seconds=120, story=cluster.story)
        kinds = [one["kind"] for one in shell.json("events") if "node_test" in one["kind"]]
        assert kinds == [
            *("node_test_started", "node_test_passed", "node_test_started", "node_test_failed"),
            *("node_test_ordered", "node_test_started", "node_test_passed"),
        ]


TRAINS = """
import os, time
import ganger, torch

net = torch.nn.Linear(1, 1)
job = ganger.attach(model=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1))
data = torch.utils.data.TensorDataset(torch.zeros(64, 1))
for _ in job.epochs(100_000):
    for (x,) in job.dataloader(data, global_batch=8):
        time.sleep(0.2 if os.environ["GANGER_NODES"] == "n1" else 0.05)
        job.step(net(x).sum())
"""


def test_a_node_on_which_all_jobs_step_more_slowly_than_on_the_other_is_drained(tmp_path: Path) -> None:
    script, config = tmp_path / "trains.py", tmp_path / "master.toml"
    script.write_text(TRAINS)
    config.write_text('policy = "fifo"\nslow_nodes = "drain"\n')
    with Cluster(
        tmp_path / "c", nodes=2, virtual_gpus=3, topology="3", master_options=("--config", str(config))
    ) as cluster:
        shell = Shell(cluster.master_directory)
        words = ("--gpus", "1", "--cpus-per-gpu", "1", "--memory", "512M", "--gpu-memory", "64M")
        jobs = [shell.submit(*words, "--", sys.executable, str(script)) for _ in range(6)]
        eventually(
            lambda: "slow: steps take" in node(shell, "n1").get("state_reason", ""),
            what="n1 is found slow",
            within_seconds=150,
            story=cluster.story,
        )
        assert node(shell, "n1")["state"] == "DRAINING"
        assert node(shell, "n0")["state"] == "READY"
        slow = [one["subject"] for one in shell.json("events") if one["kind"] == "node_slow"]
        assert slow == ["nodes/n1"]
        for job in jobs:
            shell("cancel", job)
