"""A master, a daemon with --accounts and their users, with certificates: whose account a job has, and the users without
one. (30 s)"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from ganger_daemon.node.accounts import Account
from kit.accounts import made_accounts, makes_accounts
from kit.machines import here
from kit.waiting import eventually
from system.test_several_machines import CertifiedCluster

pytestmark = [pytest.mark.system, makes_accounts]


class AccountCluster(CertifiedCluster):
    """Its daemon has its run directory where the jobs of accounts see it: their /dev/shm is another one."""

    @property
    def run_directory(self) -> Path:
        return self.directory / "run"


@pytest.fixture
def ann() -> Iterator[Account]:
    with made_accounts(1) as (account,):
        yield account


@pytest.fixture
def cluster(ann: Account) -> Iterator[CertifiedCluster]:
    # not below pytest's own directory, which is closed to other accounts, nor in /tmp, of which each job has its own
    directory = Path(tempfile.mkdtemp(prefix="gs", dir="/var/tmp"))
    directory.chmod(0o711)
    (directory / "run").mkdir(mode=0o711)
    accounts = directory / "accounts"
    accounts.write_text(f"ann {ann.name}\nguest -\n")
    options, machines = ("--no-preload", "--accounts", str(accounts)), here(("master", "n0", "desk"))
    try:
        with AccountCluster(directory, nodes=1, machines=machines, daemon_options=options) as running:
            yield running
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def submitted(cluster: CertifiedCluster, user: str, *command: str) -> str:
    words = ("--gpus", "0", "--tasks", "1", "--directory", "/", "--agent", "none")
    return str(cluster.asked(user, "submit", *words, "--", *command)["name"])


def test_a_job_has_the_account_of_the_name_on_the_certificate_that_submitted_it(
    cluster: CertifiedCluster, ann: Account
) -> None:
    job = submitted(cluster, "ann", "/bin/sh", "-c", "id -un; id -u")
    eventually(lambda: cluster.asked("olga", "show", job)["state"] == "SUCCEEDED", what="it is done", within_seconds=60)
    assert cluster.by("ann", "logs", job).split() == [ann.name, str(ann.uid)]


@pytest.mark.parametrize(
    ("user", "why"),
    [("guest", "the map file of --accounts refuses it"), ("guest-of-none", "there is no account 'guest-of-none'")],
)
def test_a_user_without_an_account_is_told_so(cluster: CertifiedCluster, user: str, why: str) -> None:
    job = submitted(cluster, user, "true")
    told = f"CANNOT_SWITCH_USER: no account of this node runs the jobs of {user!r}: {why}"
    eventually(lambda: told in cluster.by(user, "why", job), what="told", within_seconds=60)
    assert cluster.asked("olga", "show", job)["state"] != "SUCCEEDED"


def test_root_itself_is_refused_before_anything_is_launched(cluster: CertifiedCluster) -> None:
    # by the token, which only the account of the master can read
    job = submitted(cluster, "root", "true")
    eventually(lambda: "CANNOT_SWITCH_USER" in cluster.by("root", "why", job), what="told", within_seconds=60)
    assert not [event for event in cluster.asked("olga", "events", job) if event["kind"] == "attempt_failed"]
