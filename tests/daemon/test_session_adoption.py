"""Sessions that users open on a node belong to their job there, or are refused."""

from __future__ import annotations

import asyncio
import json
import os
import pwd
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import asyncssh
import pytest
from ganger.injob.process_identity import start_ticks
from ganger_daemon.cgroups.controllers import groups_of, write
from ganger_daemon.node.accounts import Account
from ganger_daemon.session_adoption import gangs_of, main
from kit.accounts import made_accounts
from kit.waiting import eventually

USER = pwd.getpwnam("daemon")
SSHD = "/usr/sbin/sshd"
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
    eventually(
        lambda: not any((tree / name / "cgroup.procs").read_text() for tree in TREES), what="no session in the groups"
    )
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


@pytest.fixture
def person() -> Iterator[Account]:
    with made_accounts(1) as (made,):
        yield made


@contextmanager
def sshd(directory: Path, person: Account, state: Path) -> Iterator[int]:
    """The machine's ssh server, on a port of 127.0.0.1, in a mount namespace whose PAM configuration has our line."""
    for name in ("host", "key"):
        generated = asyncssh.generate_private_key("ssh-ed25519")
        generated.write_private_key(directory / name)
        (directory / name).chmod(0o600)
        generated.write_public_key(directory / f"{name}.pub")
    keys = Path(person.home, "keys")
    keys.write_bytes((directory / "key.pub").read_bytes())
    program = f"{sys.executable} -m ganger_daemon.session_adoption --state-dir {state}"
    pam = directory / "pam"
    pam.write_text(
        "auth required pam_deny.so\naccount required pam_permit.so\nsession required pam_permit.so\n"
        f"session required pam_exec.so quiet stdout {program}\n"
    )
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    settings = (
        f"ListenAddress=127.0.0.1:{port}", f"HostKey={directory / 'host'}", f"AuthorizedKeysFile={keys}",
        "UsePAM=yes", "StrictModes=no", "PidFile=none", "PasswordAuthentication=no",
    )  # fmt: skip
    Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    script = 'mount --bind "$1" /etc/pam.d/sshd && shift && exec "$@"'
    options = [part for setting in settings for part in ("-o", setting)]
    server = subprocess.Popen(
        ["unshare", "--mount", "sh", "-c", script, "sh", str(pam), SSHD, "-D", "-e", "-f", "/dev/null", *options],
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert server.stderr is not None
        for line in server.stderr:
            if "Server listening" in line:
                break
        yield port
    finally:
        server.terminate()
        server.communicate()


def log_in(port: int, person: Account, directory: Path, command: str) -> asyncssh.SSHCompletedProcess:
    """Run a command in a session of ssh as the person."""

    async def run() -> asyncssh.SSHCompletedProcess:
        async with asyncssh.connect(
            "127.0.0.1", port, username=person.name, client_keys=[directory / "key"], known_hosts=None, config=None
        ) as connection:
            return await connection.run(command, timeout=60)

    return asyncio.run(run())


@needs_groups
@pytest.mark.skipif(not os.path.exists(SSHD), reason="no ssh server here: apt-get install openssh-server")
def test_a_session_of_the_machines_ssh_server_belongs_to_the_users_job_and_is_refused_without_one(
    tmp_path: Path, person: Account, group: str
) -> None:
    state = tmp_path / "state"
    state.mkdir()
    rank = subprocess.Popen(["sleep", "60"], user=person.uid, group=person.gid)
    try:
        with sshd(tmp_path, person, state) as port:
            refused = log_in(port, person, tmp_path, "echo in")
            for tree in TREES:
                assert write(tree / group / "cgroup.procs", str(rank.pid))
            note(state, rank.pid)
            inside = log_in(port, person, tmp_path, "id -un; cat /proc/self/cgroup")
    finally:
        rank.kill()
        rank.wait()
    # The status of sshd for a session that PAM did not open.
    assert (refused.exit_status, "you have no job on this node" in str(refused.stdout)) == (254, True)
    assert str(inside.stdout).splitlines()[0] == person.name
    assert [line.count(group) for line in str(inside.stdout).splitlines()[1:]].count(1) == len(TREES)
