"""Sessions that users open on a node belong to their job there, or are refused."""

from __future__ import annotations

import json
import os
import pwd
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from ganger.injob.process_identity import start_ticks
from ganger_daemon.cgroups.controllers import groups_of, write
from ganger_daemon.session_adoption import gangs_of, main

USER = pwd.getpwnam("daemon")
TREES = [Path("/sys/fs/cgroup", name) for name in ("memory", "pids", "freezer")]
needs_groups = pytest.mark.skipif(
    os.geteuid() != 0 or not all(os.access(tree, os.W_OK) for tree in TREES), reason="no control groups to write to"
)
pytestmark = [pytest.mark.system, pytest.mark.skipif(os.geteuid() != 0, reason="PAM runs it as root")]


@pytest.fixture
def rank() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "60"], user=USER.pw_uid, group=USER.pw_gid)
    yield process
    process.kill()
    process.wait()


def note(state: Path, pid: int, epoch: int = 1, ticks: int | None = None) -> None:
    job = state / "jobs" / f"uid-{epoch}"
    job.mkdir(parents=True)
    (job / "gang.json").write_text(json.dumps({"job": f"jobs/{epoch}", "epoch": str(epoch)}))
    started = start_ticks(pid) if ticks is None else ticks
    (job / "local.json").write_text(json.dumps({"ranks": {"0": [pid, started]}}))


@pytest.fixture
def group(rank: subprocess.Popen[bytes]) -> Iterator[str]:
    """The groups of a gang, with its rank in them."""
    name = f"ganger-adoption-{os.getpid()}/gang"
    for tree in TREES:
        (tree / name).mkdir(parents=True)
        assert write(tree / name / "cgroup.procs", str(rank.pid))
    yield name
    rank.kill()
    rank.wait()
    for tree in TREES:
        (tree / name).rmdir()
        (tree / name).parent.rmdir()


def session(state: Path, user: str = "daemon", *options: str, kind: str = "open_session") -> tuple[int, str]:
    """Open a session as sshd does: a process of root runs the program, and has its groups printed."""
    program = [sys.executable, "-m", "ganger_daemon.session_adoption", "--state-dir", str(state), *options]
    script = 'echo "$("$@")"; "$@" >/dev/null; status=$?; cat /proc/self/cgroup; exit $status'
    done = subprocess.run(
        ["/bin/sh", "-c", script, "sh", *program],
        env={**os.environ, "PAM_USER": user, "PAM_TYPE": kind}, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    return done.returncode, done.stdout


@needs_groups
def test_a_session_of_a_user_with_a_job_here_is_in_the_groups_of_that_job(
    tmp_path: Path, rank: subprocess.Popen[bytes], group: str
) -> None:
    note(tmp_path, rank.pid)
    status, text = session(tmp_path)
    assert status == 0, text
    assert text.startswith("this session belongs to jobs/1")
    assert [line.count(group) for line in text.splitlines()[1:]].count(1) == len(TREES)


@needs_groups
def test_a_session_that_cannot_be_put_into_groups_is_refused(tmp_path: Path, rank: subprocess.Popen[bytes]) -> None:
    note(tmp_path, rank.pid)
    status, text = session(tmp_path)
    assert (status, text.splitlines()[0]) == (1, "the session cannot be put into the control groups of jobs/1")


def test_a_session_of_a_user_without_a_job_here_is_refused(tmp_path: Path) -> None:
    status, text = session(tmp_path)
    assert status == 1
    assert text.startswith("you have no job on this node")


@pytest.mark.parametrize(
    ("user", "options", "kind"),
    [("root", (), "open_session"), ("daemon", ("--allow", "daemon"), "open_session"), ("daemon", (), "close_session")],
    ids=["root", "an operator", "its end"],
)
def test_sessions_that_are_left_alone(tmp_path: Path, user: str, options: tuple[str, ...], kind: str) -> None:
    before = Path("/proc/self/cgroup").read_text()
    status, text = session(tmp_path, user, *options, kind=kind)
    assert (status, text.strip()) == (0, before.strip())


def test_only_processes_of_the_user_that_still_run_count(tmp_path: Path, rank: subprocess.Popen[bytes]) -> None:
    note(tmp_path, rank.pid, epoch=1)
    note(tmp_path, rank.pid, epoch=2, ticks=1)
    note(tmp_path, os.getpid(), epoch=3)
    (tmp_path / "jobs" / "half").mkdir()
    (tmp_path / "jobs" / "half" / "local.json").write_text("{")
    assert [gang.job for gang in gangs_of(tmp_path, USER.pw_uid)] == ["jobs/1"]


def test_the_groups_of_a_process_are_found_in_each_tree() -> None:
    assert all((group / "cgroup.procs").exists() for group in groups_of(os.getpid()))


def test_a_user_that_the_node_does_not_know_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PAM_USER", "no-such-user")
    assert main(["--state-dir", str(tmp_path)]) == 1
    assert "no user 'no-such-user'" in capsys.readouterr().out
