"""Execution of a program as an account, by a process of root that the daemon starts with its own interpreter and an
empty environment: nothing of the user's (no interpreter, library or variable) is in effect before the identity is the
user's. It reads a `Becoming` as JSON from its standard input."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import BinaryIO

from ganger.injob.launcher.namespaces import separate
from ganger.text import os_reason

from ganger_daemon.node.accounts import Account

_PR_SET_NO_NEW_PRIVS = 38
_CANNOT = 126  # exit code of a shell that may not execute a command
UMASK = 0o077


@dataclass(frozen=True, slots=True)
class Becoming:
    """`command` with `environment`, to be executed as `account`. `cgroup_procs`: files of control groups to enter
    first."""

    account: Account
    command: Sequence[str]
    environment: Mapping[str, str]
    cgroup_procs: Sequence[str] = ()


def start_as(becoming: Becoming, directory: str, output: BinaryIO) -> subprocess.Popen[bytes]:
    """Start the program in a session of its own. `directory`: where it starts; `output`: for what it prints. Raises
    OSError."""
    # What this process imports from, and nothing of the user's.
    places = [place for place in sys.path if os.path.isabs(place)]
    program = f"import sys; sys.path[:] = {places!r}; from ganger_daemon.node.become import main; main()"
    process = subprocess.Popen(
        [sys.executable, "-I", "-c", program],
        env={},
        cwd=directory,
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=output,
        start_new_session=True,
    )
    assert process.stdin is not None, "it is a pipe"
    try:
        with process.stdin as words:
            words.write(json.dumps(asdict(becoming)).encode())
    except BrokenPipeError:
        pass  # it has ended: its output says why
    return process


def become(account: Account) -> None:
    """Take an account's identity for good: no program that is executed gives more rights. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "no_new_privs cannot be set")
    os.setgroups(account.groups)
    os.setresgid(account.gid, account.gid, account.gid)
    os.setresuid(account.uid, account.uid, account.uid)
    if os.getresuid() != (account.uid,) * 3 or os.getresgid() != (account.gid,) * 3:
        raise PermissionError(f"the identity of account {account.name} was not taken")
    os.umask(UMASK)


def main() -> None:
    """Be that process."""
    fields = json.load(sys.stdin.buffer)
    account = Account.recall(fields["account"])
    assert account is not None, "the daemon names one"
    nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    os.dup2(nothing, 0)
    command = [str(word) for word in fields["command"]]
    try:
        for path in fields["cgroup_procs"]:
            with open(path, "w", encoding="ascii") as file:
                file.write(str(os.getpid()))
        try:
            separate()
        except OSError as error:
            # as in a container that may not mount: file modes keep accounts apart still
            print(f"{account.name} shares /dev/shm and /proc with others: {error}", file=sys.stderr)
        become(account)
        os.execve(command[0], command, fields["environment"])
    except (OSError, ValueError) as error:
        print(f"{command[0]} cannot be started as {account.name}: {os_reason(error)}", file=sys.stderr)
    os._exit(_CANNOT)
