"""A job without boundaries whose daemon is dead, or hangs: it has stopped before it is started elsewhere."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from kit.cluster import NO_PRELOAD, Cluster
from kit.shell import Shell
from kit.ticks import Ticks
from kit.waiting import eventually

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    # A node is given up 30 s after its lease, and twice as late if half of all nodes fall silent at once.
    with Cluster(
        tmp_path_factory.mktemp("leases"),
        nodes=5,
        virtual_gpus=2,
        topology="1x2",
        lost_after="6s",
        daemon_options=NO_PRELOAD,
    ) as running:
        yield running


def node_of(shell: Shell, job: str) -> str:
    return str(shell.json("show", job)["gang"]["claims"][0]["node"]).removeprefix("nodes/")


def test_a_shell_job_never_runs_twice_though_its_daemon_is_dead_or_hangs(cluster: Cluster, tmp_path: Path) -> None:
    shell = Shell(cluster.master_directory)
    jobs: dict[str, Ticks] = {}
    for node in ("n0", "n1"):
        for other in cluster.daemons:
            shell(*(("uncordon", other) if other == node else ("cordon", other, "--reason", "a test")))
        ticks = Ticks(tmp_path / node)
        job = shell.submit("--gpus", "1", "--", *ticks.command())
        eventually(ticks.attempts, within_seconds=120, what=f"{job} runs", story=cluster.story)
        assert node_of(shell, job) == node
        jobs[job] = ticks
    shell("uncordon", "n2")
    shell("cordon", "n1", "--reason", "a test")
    cluster.daemons["n0"].kill()
    cluster.daemons["n1"].signal(signal.SIGSTOP)
    for job, ticks in jobs.items():
        # The former attempt would tick as often, if it ran.
        eventually(lambda ticks=ticks: ticks.is_running(1), within_seconds=120, what=f"{job} runs elsewhere",
                   story=cluster.story)  # fmt: skip
        assert node_of(shell, job) == "n2"
        ticks.check()
