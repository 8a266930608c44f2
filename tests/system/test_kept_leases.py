"""A job without boundaries whose daemon is dead, or hangs: it has stopped before it is started elsewhere."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from kit.cluster import Cluster
from kit.shell import Shell
from kit.waiting import eventually

pytestmark = pytest.mark.system

_TICKS = 'while :; do echo "$GANGER_ATTEMPT $(date +%s%N)" >> "$0"; sleep 0.05; done'


@dataclass(frozen=True)
class Ticks:
    """What a job has written: the number of its attempt, and the time in ns, some 20 times a second."""

    path: Path

    def of_attempts(self) -> list[list[int]]:
        """Times of each attempt that ran, in the order of the attempts."""
        lines = self.path.read_text().split("\n")[:-1] if self.path.exists() else []
        found: dict[int, list[int]] = {}
        for attempt, time in (line.split() for line in lines):
            found.setdefault(int(attempt), []).append(int(time))
        return [found[attempt] for attempt in sorted(found)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    # A node is given up 30 s after its lease.
    with Cluster(
        tmp_path_factory.mktemp("leases"),
        nodes=3,
        virtual_gpus=2,
        topology="1x2",
        lost_after="6s",
        daemon_options=("--no-preload",),
    ) as running:
        yield running


def node_of(shell: Shell, job: str) -> str:
    return str(shell.json("show", job)["gang"]["claims"][0]["node"]).removeprefix("nodes/")


def test_a_shell_job_never_runs_twice_though_its_daemon_is_dead_or_hangs(cluster: Cluster, tmp_path: Path) -> None:
    shell = Shell(cluster.master_directory)
    jobs: dict[str, Ticks] = {}
    for node in ("n0", "n1"):
        for other in ("n0", "n1", "n2"):
            shell(*(("uncordon", other) if other == node else ("cordon", other, "--reason", "a test")))
        ticks = Ticks(tmp_path / f"{node}.ticks")
        job = shell.submit("--gpus", "1", "--", "sh", "-c", _TICKS, str(ticks.path))
        eventually(ticks.of_attempts, within_seconds=120, what=f"{job} runs", story=cluster.story)
        assert node_of(shell, job) == node
        jobs[job] = ticks
    shell("uncordon", "n2")
    shell("cordon", "n1", "--reason", "a test")
    cluster.daemons["n0"].kill()
    cluster.daemons["n1"].signal(signal.SIGSTOP)
    for job, ticks in jobs.items():
        eventually(lambda ticks=ticks: len(ticks.of_attempts()) == 2, within_seconds=120, what=f"{job} runs elsewhere",
                   story=cluster.story)  # fmt: skip
        assert node_of(shell, job) == "n2"
        # The former attempt would write as many, if it ran.
        eventually(lambda ticks=ticks: len(ticks.of_attempts()[1]) > 20, what=f"{job} goes on")
        former, latter = ticks.of_attempts()
        assert max(former) < min(latter), f"{job} ran twice for {(max(former) - min(latter)) / 1e9:.1f} s"
