"""A master, two daemons and their users, each on a machine of its own, with certificates and nothing else in common
but the storage. (60 s)"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from ganger.console import ExitCode
from kit.certified import Authority
from kit.cluster import GANGER, Cluster
from kit.machines import Machine, apart, here
from kit.waiting import eventually
from system.harness import Run
from system.test_turns import OPTIONS, WANTS

pytestmark = [pytest.mark.system, pytest.mark.torch]


@dataclass
class CertifiedCluster(Cluster):
    """`authority` makes the certificates; nodes, master and users ("desk") are on `machines`."""

    machines: dict[str, Machine] = field(kw_only=True)
    authority: Authority = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.authority = Authority(self.directory)
        master = self.machines["master"]
        self.address = f"{master.address}:{free_port(master)}"
        self.master.argv = [
            *(*master.prefix, *self.master.argv),
            *("--listen", self.address, "--tls", str(self.authority.issue("master", "m", (master.address,)))),
        ]
        for name, daemon in self.daemons.items():
            machine = self.machines[name]
            daemon.argv = [
                *(*machine.prefix, *daemon.argv),
                *("--master", self.address, "--listen", machine.address),
                *("--tls", str(self.authority.issue("daemon", name, (machine.address,)))),
                # Users of most tests have no accounts.
                *(() if "--accounts" in self.daemon_options else ("--accounts", "own")),
            ]

    def try_(self, user: str, *arguments: str, tls: Path | None = None) -> subprocess.CompletedProcess[str]:
        """`ganger ARGUMENTS` at the desk, by a user, or by the operator olga."""
        certificate = tls or self.authority.issue("operator" if user == "olga" else "user", user)
        environment = {**self.master.environment, "GANGER_MASTER": self.address, "GANGER_TLS": str(certificate)}
        return subprocess.run(
            [*self.machines["desk"].prefix, *GANGER, *arguments],
            env=environment, capture_output=True, text=True, timeout=180, check=False,
        )  # fmt: skip

    def by(self, user: str, *arguments: str) -> str:
        done = self.try_(user, *arguments)
        assert done.returncode == 0, f"{user}: ganger {' '.join(arguments)}\n{done.stderr}\n{self.story()}"
        return done.stdout

    def asked(self, user: str, command: str, *arguments: str) -> Any:
        return json.loads(self.by(user, command, "--json", *arguments))

    def wait_ready(self, nodes: int | None = None) -> None:
        eventually(
            lambda: self.try_("olga", "nodes").stdout.count("ready") == self.nodes,
            what="all nodes are ready", within_seconds=60, story=self.story,
        )  # fmt: skip

    # A step takes a tenth of a second until the test is through with what it does meanwhile, by many commands.
    def submit(self, user: str, label: str, *options: str, world: int = 1, steps: int = 800) -> Run:
        words = Run.words(self, label, "--memory", "1G", *options, world=world, steps=steps)
        answer = self.asked(user, "submit", *words)
        return Run(self, str(answer["name"]), Run.record_of(self, label), world, steps)

    def state_of(self, job: Run) -> str:
        return str(self.asked("olga", "show", job.id)["state"])

    def nodes_of(self, job: Run) -> list[str]:
        claims = self.asked("olga", "show", job.id)["gang"]["claims"]
        return [str(claim["node"]).removeprefix("nodes/") for claim in claims]

    def wait_step(self, job: Run, step: int) -> None:
        eventually(lambda: job.last_step() >= step, within_seconds=180, what=f"step {step}", story=self.story)

    def wait_done(self, job: Run) -> None:
        job.hurry()
        eventually(
            lambda: self.state_of(job) == "SUCCEEDED",
            within_seconds=180, every_seconds=0.5, what=f"{job.name} is done", story=self.story,
        )  # fmt: skip


@contextmanager
def two_servers_apart(directory: Path, lost_after: str, *daemon_options: str) -> Iterator[CertifiedCluster]:
    """A cluster of two servers with one GPU each; master, servers and desk are machines that can be cut off."""
    with apart(("master", "n0", "n1", "desk")) as machines:
        if machines is None:
            pytest.skip("no right to make network namespaces")
        with CertifiedCluster(
            directory,
            nodes=2,
            virtual_gpus=1,
            topology="1x1",
            lost_after=lost_after,
            machines=machines,
            daemon_options=daemon_options,
        ) as cluster:
            yield cluster


def free_port(machine: Machine) -> int:
    """In a namespace of one's own any is free."""
    if machine.prefix:
        return 7070
    with socket.create_server((machine.address, 0)) as found:
        return int(found.getsockname()[1])


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CertifiedCluster]:
    directory, names = tmp_path_factory.mktemp("machines"), ("master", "n0", "n1", "desk")
    with (
        apart(names) as machines,
        CertifiedCluster(directory, nodes=2, virtual_gpus=2, topology="2", machines=machines or here(names)) as running,
    ):
        yield running


def test_users_have_their_jobs_trained_moved_and_suspended_on_machines_apart(cluster: CertifiedCluster) -> None:
    moved = cluster.submit("ann", "moved")
    stays = cluster.submit("bob", "stays")
    for job in (moved, stays):
        cluster.wait_step(job, 3)

    # Each user's own, and an operator's.
    for refused in (("cancel", moved.id), ("logs", moved.id), ("move", moved.id), ("why", moved.id)):
        done = cluster.try_("bob", *refused)
        assert done.returncode == ExitCode.NOT_PERMITTED, done
        why = "only that user and operators may do this; the caller is user 'bob'"
        assert f"{moved.name} is ann's: {why}" in done.stderr
    done = cluster.try_("bob", "drain", "n0", "-m", "mine")
    assert done.returncode == ExitCode.NOT_PERMITTED
    assert "DrainNode is for operators" in done.stderr
    listed = {job["name"]: job for job in cluster.asked("bob", "queue")}
    assert (listed[moved.name]["user"], listed[moved.name]["spec"]["command"]) == ("ann", [])
    assert listed[stays.name]["spec"]["command"]

    # From memory to memory of another machine, without lost or repeated steps.
    (before,) = cluster.nodes_of(moved)
    cluster.by("ann", "move", moved.id)
    eventually(lambda: cluster.nodes_of(moved) != [before], what="it is there", within_seconds=60, story=cluster.story)
    (arrived,) = [event for event in cluster.asked("ann", "events", moved.name) if event["kind"] == "move_done"]
    assert float(arrived["figures"]["pause_ms"]) > 0
    cluster.wait_step(moved, moved.last_step() + 2)
    for job in (moved, stays):
        cluster.wait_done(job)
    moved.check(stays)
    assert cluster.by("ann", "logs", moved.id) == cluster.by("olga", "logs", moved.id)

    # A gang over both machines, stopped at one boundary by what their daemons tell each other.
    interface = {cluster.machines[name].interface for name in cluster.daemons}.pop()
    pair = cluster.submit("ann", "pair", "--nodes", "2", "--env", f"GLOO_SOCKET_IFNAME={interface}", world=2)
    cluster.wait_step(pair, 3)
    assert sorted(cluster.nodes_of(pair)) == ["n0", "n1"]
    cluster.by("ann", "suspend", pair.id)
    assert len({pair.lines(rank)[-1].step for rank in range(2)}) == 1
    cluster.by("olga", "resume", pair.id)
    cluster.wait_step(pair, pair.last_step() + 2)
    cluster.wait_done(pair)
    pair.check(pair)


@pytest.mark.chaos
def test_gangs_over_two_machines_take_turns_as_their_daemons_say_also_while_the_master_is_away(tmp_path: Path) -> None:
    names = ("master", "n0", "n1", "desk")
    with (
        apart(names) as machines,
        CertifiedCluster(
            tmp_path, nodes=2, virtual_gpus=1, topology="1", virtual_cores=2, virtual_memory="32G",
            master_options=OPTIONS, machines=machines or here(names),
        ) as cluster,
    ):  # fmt: skip
        wants = (*WANTS, "--env", f"GLOO_SOCKET_IFNAME={cluster.machines['n0'].interface}")
        first = cluster.submit("ann", "first", *wants, world=2)
        cluster.wait_step(first, 3)
        second = cluster.submit("bob", "second", *wants, world=2)
        cluster.wait_step(second, 1)
        assert "time-sliced with" in cluster.by("bob", "history", second.id)
        cluster.master.kill()
        for job in (first, second):
            cluster.wait_step(job, job.last_step() + 3)
        cluster.start_master()
        for job in (first, second):
            job.hurry()
        for job in (first, second):
            cluster.wait_done(job)
        first.check(second)
        second.check(first)


def test_a_caller_without_the_right_certificate_gets_the_reason(cluster: CertifiedCluster, tmp_path: Path) -> None:
    ended = cluster.authority.issue("user", "ann", days=-60.0 / 86_400.0, to="ended")
    other = Authority(tmp_path, "other").issue("user", "ann")
    world = cluster.authority.issue("user", "ann", to="open")
    (world / "key.pem").chmod(0o644)
    cases = (
        (ended, ExitCode.NOT_PERMITTED, r"cert\.pem expired on"),
        (other, ExitCode.NOT_PERMITTED, r"its certificate was not made by the authority in .*other-user-ann/ca\.pem"),
        (world, ExitCode.NOT_PERMITTED, r"key\.pem can be read by others \(mode 0644\): chmod 600 it"),
        (tmp_path / "nowhere", ExitCode.NOT_PERMITTED, r"there is no .*nowhere/cert\.pem"),
    )
    for tls, code, said in cases:
        done = cluster.try_("ann", "queue", tls=tls)
        assert (done.returncode, bool(re.search(said, done.stderr))) == (code, True), done
        assert done.stderr.count("\n") == 1, done.stderr
    # The daemon of another node's certificate does not start, nor a master with a daemon's.
    mine = str(cluster.authority.issue("daemon", "n0", (cluster.machines["n0"].address,)))
    for argv, code, said in (
        (
            [
                *("daemon", "--node", "n7", "--master", cluster.address, "--tls", mine),
                "--state-dir",
                str(tmp_path / "d"),
            ],
            ExitCode.NOT_PERMITTED,
            r"of nodes/n0, this daemon is nodes/n7: give it --node n0",
        ),
        (
            ["master", "--tls", mine, "--listen", "127.0.0.1:0", "--state-dir", str(tmp_path / "m")],
            ExitCode.NOT_PERMITTED,
            r"is the certificate of daemon 'n0', here one of role master is needed",
        ),
        (
            ["master", "--listen", "198.18.0.1:0", "--state-dir", str(tmp_path / "m")],
            ExitCode.USAGE,
            "without certificates",
        ),
    ):
        done = subprocess.run([*GANGER, *argv], env=dict(os.environ), capture_output=True, text=True, timeout=60)
        assert done.returncode == code, done
        assert re.search(said, done.stderr), done
