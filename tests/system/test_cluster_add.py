"""Machines become nodes by one command, are repaired by it while their jobs go on, and are removed without a trace."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from ganger.injob.process_identity import start_ticks
from ganger.wire.revocation import Revocations
from ganger_daemon.node.accounts import Account
from kit.accounts import made_accounts, makes_accounts
from kit.certified import Authority
from kit.leftovers import remove_leftovers
from kit.ssh import SshServer
from kit.waiting import eventually

pytestmark = [pytest.mark.system, makes_accounts]

GANGER = (sys.executable, "-m", "ganger.cli.main")
HOST = "127.0.0.1"
FLAGS = ("--flag=--virtual-gpus=2", "--flag=--no-preload", "--flag=--criu=none")


@dataclass
class Operator:
    """Commands of an operator with a certificate, whose jobs run as `account`. `node`: where the directories of the
    node are."""

    directory: Path
    ssh: SshServer
    account: Account
    address: str = ""
    authority: Authority = field(init=False)

    def __post_init__(self) -> None:
        self.authority = Authority(self.directory, "ca")
        self.node, self.ca = self.directory / "node", str(self.directory / "ca")
        where = ("--python", sys.executable, "--state-dir", str(self.node / "state"), "--tls", str(self.node / "tls"))
        self.where = (HOST, *self.ssh.options, *where)

    def try_(self, *words: str) -> subprocess.CompletedProcess[str]:
        certificate = str(self.authority.issue("operator", self.account.name))
        own = {"HOME": str(self.ssh.home), "GANGER_MASTER": self.address, "GANGER_TLS": certificate}
        environment = {**os.environ, **own}
        return subprocess.run(
            (*GANGER, *words), env=environment, capture_output=True, text=True, timeout=120, check=False
        )

    def __call__(self, *words: str) -> str:
        done = self.try_(*words)
        assert done.returncode == 0, (words, done)
        return done.stdout

    def add(self, *more: str) -> subprocess.CompletedProcess[str]:
        return self.try_("cluster", "add", "--authority", self.ca, *self.where, *FLAGS, *more)

    def remove(self, *more: str) -> subprocess.CompletedProcess[str]:
        return self.try_("cluster", "remove", "--yes", *self.where, *more)

    def daemon(self) -> int:
        """Return the pid of the node's daemon."""
        return int((self.node / "state" / "daemon.lock").read_text())

    def phase(self, job: str) -> str:
        """Return the phase of the job's gang; empty while it has none."""
        gang = json.loads(self("show", "--json", job))["gang"]
        return str(gang["phase"]) if gang else ""


@pytest.fixture
def directory() -> Iterator[Path]:
    # Not below pytest's own, which is closed to the accounts of jobs.
    made = Path(tempfile.mkdtemp(prefix="ga", dir="/tmp"))
    made.chmod(0o711)
    yield made
    shutil.rmtree(made, ignore_errors=True)


@pytest.fixture
def operator(directory: Path) -> Iterator[Operator]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GANGER_")}
    with made_accounts(1) as (account,), SshServer(directory / "ssh", environment) as ssh:
        made = Operator(directory, ssh, account)
        certificate = made.authority.issue("master", "m")
        words = ("--state-dir", str(directory / "master"), "--listen", f"{HOST}:0", "--tls", str(certificate))
        with subprocess.Popen((*GANGER, "master", *words), stdout=subprocess.PIPE, text=True) as master:
            assert master.stdout is not None
            try:
                made.address = master.stdout.readline().split()[-1]
                yield made
            finally:
                made.try_("cancel", "--all")
                made.ssh.know()
                removed = made.remove()
                master.terminate()
                remove_leftovers([made.node / "state"])
                assert removed.returncode == 0, removed


def test_a_machine_becomes_a_node_is_repaired_beside_its_jobs_and_is_removed(operator: Operator) -> None:
    added = operator.add()
    assert (added.returncode, added.stderr) == (0, ""), added
    assert f"{HOST}: nodes/{HOST} is ready after " in added.stdout
    words = ("--gpus", "1", "--directory", "/", "--", "/bin/sh", "-c", "id -un; sleep 300")
    job = json.loads(operator("submit", "--json", *words))["name"].removeprefix("jobs/")
    eventually(lambda: operator.phase(job) == "RUNNING", what="the job runs", within_seconds=60.0)
    eventually(lambda: operator("logs", job) == f"{operator.account.name}\n", what="it runs as its user's account")

    refused = operator.remove()
    assert (refused.returncode, f"`ganger drain {HOST}` moves them off" in refused.stderr) == (4, True), refused

    # The daemon that runs there does not pass for one that does not start.
    failed = operator.add("--flag=--virtual-gpus=900", "--timeout", "3s")
    assert (failed.returncode, "is not ready after 3 s" in failed.stderr) == (4, True), failed
    assert operator.add().returncode == 0

    former = operator.daemon()
    again = operator.add()
    assert again.returncode == 0, again
    assert operator.daemon() != former
    assert operator.phase(job) == "RUNNING"
    assert json.loads(operator("show", "--json", job))["failures"] == 0

    operator("cancel", job)
    operator.try_("wait", job)
    notes = json.loads((operator.node / "state" / "node.json").read_text())
    run = notes["run_directory"]
    daemon, removed = (
        operator.daemon(),
        operator.remove("--authority", operator.ca, "--to", str(operator.authority.issue("master", "m"))),
    )
    assert (removed.returncode, removed.stderr) == (0, ""), removed
    assert start_ticks(daemon) is None
    assert not any(path.exists() for path in (Path(run), operator.node / "state", operator.node / "tls"))
    assert not [path for path in Path("/sys/fs/cgroup").rglob(notes["cgroup"]) if path.is_dir()]
    assert json.loads(operator("nodes", "--json"))["nodes"] == []
    listed = json.loads(operator("certs", "list", operator.ca, "--json"))
    assert [one["state"] for one in listed if one["role"] == "daemon"] == ["revoked"] * 4
    assert len(Revocations.beside(operator.authority.issue("master", "m")).current().serials) == 4


def test_what_keeps_a_machine_from_becoming_a_node_is_said(operator: Operator) -> None:
    for more, said in (
        (("--python", "/nowhere/python"), "/nowhere/python has no Ganger"),
        (("--flag=--virtual-gpus=900", "--timeout", "3s"), "after 3 s: the master has not heard of it; its log ends: "),
        (("--port", "1"), "cannot connect by ssh"),
        (("--authority", "/nowhere"), "there is no authority in /nowhere"),
    ):
        done = operator.add(*more)
        assert (done.returncode, said in done.stderr, "Traceback" in done.stderr) == (4, True, False), (more, done)
    operator.ssh.known_hosts.write_text("")
    done = operator.add()
    assert (done.returncode, f"{HOST}: its host key is not known" in done.stderr) == (4, True), done


def test_nodes_are_not_told_to_dial_a_master_that_only_this_machine_reaches(operator: Operator) -> None:
    words = ("cluster", "add", "n1.lab", "--authority", operator.ca)
    done = operator.try_(*words)
    assert (done.returncode, "name the master's address with --master-address" in done.stderr) == (4, True), done
    operator.address = str(operator.directory / "master")
    done = operator.try_(*words)
    assert (done.returncode, "need a master with a certificate" in done.stderr) == (4, True), done
