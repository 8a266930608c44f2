"""Another account of this machine, for what is refused to its processes. Only root can act as another."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from ganger.injob.process_identity import user_of
from ganger_daemon.node.accounts import Account, Accounts
from kit.waiting import eventually

STRANGER = 12345
needs_a_stranger = pytest.mark.skipif(os.geteuid() != 0, reason="needs a second account")


@contextmanager
def as_stranger() -> Iterator[None]:
    """Act as the other account: the kernel records it with each call to listen or to connect."""
    os.seteuid(STRANGER)
    try:
        yield
    finally:
        os.seteuid(0)


@contextmanager
def made_accounts(count: int) -> Iterator[list[Account]]:
    """Make accounts of this machine, with shells and homes, and remove them with all that they own there."""
    home = Path(tempfile.mkdtemp(prefix="gh", dir="/var/tmp"))
    home.chmod(0o711)
    names = [f"gt{os.getpid()}x{number}" for number in range(count)]
    made: list[str] = []
    try:
        for name in names:
            command = ["useradd", "--no-log-init", "-M", "-d", str(home / name), "-s", "/bin/sh", name]
            subprocess.run(command, check=True, capture_output=True)
            made.append(name)
        accounts = [found for name in names if (found := Accounts({}).of(name)) is not None]
        for account in accounts:
            Path(account.home).mkdir(mode=0o700)
            os.chown(account.home, account.uid, account.gid)
        yield accounts
    finally:
        for name in made:
            end_all(pwd.getpwnam(name).pw_uid)
            subprocess.run(["userdel", name], check=True, capture_output=True)
        shutil.rmtree(home, ignore_errors=True)


def end_all(uid: int) -> None:
    """Kill all processes of an account that was made here, and wait until they are gone."""

    def left() -> list[int]:
        return [int(name) for name in os.listdir("/proc") if name.isdigit() and user_of(int(name)) == uid]

    def are_gone() -> bool:
        for pid in left():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return not left()

    eventually(are_gone, what=f"no process of user {uid}")


makes_accounts = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("useradd") is None, reason="only root makes accounts, by useradd"
)
