"""Sessions that users open on a node, by ssh or at its console: a program for PAM that puts one into the control groups
of its user's job there, so that it has that job's cores, memory and GPUs and ends with it, or refuses it.

    session required pam_exec.so quiet stdout PYTHON -I -m ganger_daemon.session_adoption --state-dir DIRECTORY

It is run by root, as a child of the process of the session. What it does needs no daemon that runs."""

from __future__ import annotations

import argparse
import os
import pwd
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from ganger.injob.process_identity import start_ticks, user_of

from ganger_daemon.cgroups.controllers import groups_of, write
from ganger_daemon.node.daemon_files import read_json

_ADOPTED, _REFUSED = 0, 1
# What PAM runs the program for; at the end of a session nothing is to be done.
_OPENING: Final = ("", "open_session")


class UsersGang(NamedTuple):
    """A gang with a process of a user on this node. `pid`: one of its ranks."""

    job: str
    epoch: int
    pid: int


def gangs_of(state: Path, uid: int) -> list[UsersGang]:
    """Return the gangs of this node whose ranks run as a user, the one that started last first. Blocks."""
    found = []
    for notes in (state / "jobs").glob("*/local.json"):
        desired = read_json(notes.with_name("gang.json"))
        for pid, ticks in dict(read_json(notes).get("ranks", {})).values():
            if start_ticks(int(pid)) == int(ticks) and user_of(int(pid)) == uid:
                found.append(UsersGang(str(desired.get("job", "")), int(desired.get("epoch", 0)), int(pid)))
                break
    return sorted(found, key=lambda gang: gang.epoch, reverse=True)


def adopt(state: Path, name: str, session: int) -> tuple[int, str]:
    """Put the process `session` of the user `name` into the groups of the user's job, or refuse it. Return the exit
    status for PAM, and a line for the user. Blocks."""
    try:
        uid = pwd.getpwnam(name).pw_uid
    except KeyError:
        return _REFUSED, f"there is no user {name!r} on this node"
    if uid == 0:
        return _ADOPTED, ""
    gangs = gangs_of(state, uid)
    if not gangs:
        return _REFUSED, "you have no job on this node: sessions here are for users whose jobs run here"
    groups = [group for group in groups_of(gangs[0].pid) if "ganger-" in str(group)]
    joined = [group for group in groups if write(group / "cgroup.procs", str(session))]
    if not groups or len(joined) < len(groups):
        return _REFUSED, f"the session cannot be put into the control groups of {gangs[0].job}"
    return _ADOPTED, f"this session belongs to {gangs[0].job}: it has its cores, memory and GPUs, and ends with it"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run for PAM: PAM_USER and PAM_TYPE are in the environment."""
    parser = argparse.ArgumentParser(prog="ganger_daemon.session_adoption", description=__doc__)
    parser.add_argument("--state-dir", required=True, type=Path, help="that of this node's daemon")
    parser.add_argument("--allow", action="append", default=[], metavar="USER", help="a user whose sessions stay free")
    options = parser.parse_args(arguments)
    name = os.environ.get("PAM_USER", "")
    if os.environ.get("PAM_TYPE", "") not in _OPENING or name in options.allow:
        return _ADOPTED
    status, line = adopt(options.state_dir, name, os.getppid())
    if line:
        print(line)
    return status


if __name__ == "__main__":
    sys.exit(main())
