"""A job that leaves its GPU idle is reported and suspended, another job gets the GPU, and it goes on when resumed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from kit.cluster import NO_PRELOAD, Cluster
from kit.shell import Shell
from kit.waiting import eventually

pytestmark = pytest.mark.system

# Waits for its user, and then ends with what was written to it.
WAITS = 'read -r line <"$0"; echo "got $line"; [ "$line" = end ]'


def test_a_job_that_waits_for_its_user_gives_its_gpu_to_another_and_loses_nothing(tmp_path: Path) -> None:
    times = {"GANGER_MASTER_IDLE_WARNING": "2s", "GANGER_MASTER_IDLE_PARK": "6s"}
    with Cluster(
        tmp_path / "c", nodes=1, virtual_gpus=1, topology="1", daemon_options=NO_PRELOAD, environment=times
    ) as cluster:
        shell = Shell(cluster.master_directory)
        pipe = tmp_path / "pipe"
        os.mkfifo(pipe)
        idle = shell.submit("--gpus", "1", "--memory", "256M", "--", "sh", "-c", WAITS, str(pipe))

        def reads(command: str, text: str) -> bool:
            return text in shell(command, idle)

        eventually(lambda: reads("why", "has not used its GPUs for"), what="a warning", within_seconds=60)
        eventually(lambda: reads("why", "suspended because it did not use its GPUs"), what="a suspend")
        eventually(lambda: reads("show", "suspended(offload)"), what="it rests", within_seconds=60)
        other = shell.submit("--gpus", "1", "--memory", "256M", "--", "true")
        eventually(lambda: "succeeded" in shell("show", other), what="the other job has the GPU", within_seconds=60)
        assert "suspended because it did not use its GPUs" in shell("queue")

        shell("resume", idle)
        with pipe.open("w") as line:
            line.write("end\n")
        eventually(lambda: reads("show", "succeeded"), what="it goes on", within_seconds=60)
        assert reads("logs", "got end")
        told = shell("history", idle)
        for text in ("has not used its GPU for", "because it did not use its GPUs (for", "ordered to go on"):
            assert text in told, told
        assert "1 failed" not in told


def test_a_restarted_daemon_does_not_forget_that_a_job_is_idle(tmp_path: Path) -> None:
    times = {"GANGER_MASTER_IDLE_WARNING": "2s"}
    with Cluster(
        tmp_path / "c", nodes=1, virtual_gpus=1, topology="1", daemon_options=NO_PRELOAD, environment=times
    ) as cluster:
        shell = Shell(cluster.master_directory)
        pipe = tmp_path / "pipe"
        os.mkfifo(pipe)
        idle = shell.submit("--gpus", "1", "--memory", "256M", "--", "sh", "-c", WAITS, str(pipe))
        eventually(lambda: "has not used" in shell("why", idle), what="a warning", within_seconds=60)
        daemon = next(iter(cluster.daemons.values()))
        daemon.kill()
        daemon.start()
        sessions = ("session_opened", 2)

        def opened() -> int:
            return sum(event["kind"] == sessions[0] for event in shell.json("events"))

        eventually(lambda: opened() == sessions[1], what="the next daemon calls", within_seconds=60)
        eventually(lambda: shell.json("nodes")["nodes"][0]["state"] == "READY", what="it has reported")
        assert "has not used its GPUs for" in shell("why", idle)
        assert "uses its GPU again" not in shell("history", idle)
        shell("cancel", idle)
