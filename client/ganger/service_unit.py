"""systemd: units of master and daemon, and notifications from a program that runs as one.

A program sends to the socket in $NOTIFY_SOCKET that it is ready, and then, at least once in $WATCHDOG_USEC, that its
loop turns (sd_notify(3)). Without these variables it sends nothing.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import socket
from collections.abc import Sequence
from contextlib import asynccontextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

# Lines that `ganger doctor --fix` adds to a unit, in the directory UNIT.d.
DROP_IN: Final = "50-ganger-doctor.conf"
UNITS: Final = Path("/etc/systemd/system")
# Options of master and daemon that name a directory into which they write; the master writes what it issues into the
# authority's.
WRITTEN: Final = ("--state-dir", "--storage", "--authority")
_DIRECTORIES: Final = (*WRITTEN, "--tls")

Program = Literal["master", "daemon"]

DAEMON_UNIT: Final = "ganger-daemon.service"
MASTER_UNIT: Final = "ganger-master.service"
# What a start cannot mend: wrong usage, a state that refuses it, missing rights, another master on the database.
_LASTING_EXIT_CODES: Final = "2 4 6 8"

_COMMON = """\
[Unit]
Description=Ganger {program}
Wants=network-online.target
After=network-online.target nss-user-lookup.target remote-fs.target
StartLimitIntervalSec=0

[Service]
Type=notify
ExecStart={command}
Restart=always
RestartSec=1
RestartPreventExitStatus={lasting}
WatchdogSec=60
TimeoutStartSec=infinity
LimitNOFILE=1048576
"""
# Jobs are in control groups below the daemon's and outlive it: nothing that limits the daemon may limit them.
_DAEMON = """\
Delegate=yes
KillMode=process
TasksMax=infinity
LimitMEMLOCK=infinity
OOMScoreAdjust=-900
"""
# The master needs its directories, the network, and nothing else of the machine. Its children end with it.
_MASTER = """\
User={user}
ExecStartPre=+{prepare}
UMask=0077
NoNewPrivileges=yes
CapabilityBoundingSet=
ProtectSystem=strict
ReadWritePaths={writable}
ProtectHome=read-only
ProtectKernelTunables=yes
ProtectKernelModules=yes
ProtectControlGroups=yes
ProtectClock=yes
PrivateDevices=yes
PrivateTmp=yes
RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6
RestrictNamespaces=yes
RestrictSUIDSGID=yes
LockPersonality=yes
SystemCallFilter=@system-service
OOMScoreAdjust=-500
"""
# Only what is there can be made writable. What is missing is made for the master alone.
_PREPARE: Final = 'user=$1; shift; for each; do test -d "$each" || install -d -o "$user" -m 0700 "$each"; done'
_INSTALL = """
[Install]
WantedBy=multi-user.target
"""


def unit_text(program: Program, command: Sequence[str], *, user: str = "", writable: Sequence[str] = ()) -> str:
    """Return the unit file of a program.

    command: its words, the first one an absolute path. Of the master, `user`: the account it runs as, and `writable`:
    the directories it writes into.
    """
    common = _COMMON.format(program=program, command=_command_line(command), lasting=_LASTING_EXIT_CODES)
    if program == "daemon":
        return common + _DAEMON + _INSTALL
    prepare = _command_line(("/bin/sh", "-c", _PREPARE, "sh", user, *writable))
    # With "-" a directory may be missing, as it is when systemd (252) runs what makes it.
    paths = " ".join([_word(f"-{path}") for path in writable])
    return common + _MASTER.format(user=user, prepare=prepare, writable=paths) + _INSTALL


def directories_of(flags: Sequence[str]) -> list[tuple[str, str]]:
    """Return the options among these that name a directory, with their values."""
    return [(name, value) for name in _DIRECTORIES if (value := value_of(flags, name))]


def value_of(flags: Sequence[str], name: str) -> str:
    """Return the last value of an option among these, in both forms: apart, and by "="; '' without it."""
    found = ""
    for flag, value in pairwise([*flags, ""]):
        if flag == name or flag.startswith(f"{name}="):
            found = value if flag == name else flag.partition("=")[2]
    return found


def command_of(unit: str) -> list[str]:
    """Return the words of the command in the text of a unit; none where there is no such line."""
    line = next((line for line in unit.splitlines() if line.startswith("ExecStart=")), "")
    try:
        return [word.replace("%%", "%").replace("$$", "$") for word in shlex.split(line.partition("=")[2])]
    except ValueError:
        return []


def _command_line(command: Sequence[str]) -> str:
    # "$" names a variable in commands, and only there.
    return " ".join(_word(word).replace("$", "$$") for word in command)


def _word(text: str) -> str:
    # "%" has a meaning of its own in units, double quotes are read as in C, and a line ends where it ends.
    escaped = text.replace("%", "%%")
    if shlex.quote(text) == text:
        return escaped
    return '"' + escaped.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'


class ServiceManager:
    """The service manager that started this program. Takes its variables out of the environment of children."""

    def __init__(self) -> None:
        self._path = os.environ.pop("NOTIFY_SOCKET", "")
        period = os.environ.pop("WATCHDOG_USEC", "")
        is_meant = os.environ.pop("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        self._period_s = int(period) / 1e6 if is_meant and period.isdecimal() else 0.0

    @asynccontextmanager
    async def notified(self) -> AsyncIterator[None]:
        """Notify the manager, while this context lasts, that this program is ready and that its loop turns."""
        self._notify("READY=1")
        beating = asyncio.ensure_future(self._beat())
        try:
            yield
        finally:
            beating.cancel()
            with suppress(asyncio.CancelledError):
                await beating
            self._notify("STOPPING=1")

    async def _beat(self) -> None:
        while self._period_s:
            self._notify("WATCHDOG=1")
            await asyncio.sleep(self._period_s / 3)

    def _notify(self, state: str) -> None:
        if self._path[:1] not in ("/", "@"):
            return
        address = "\0" + self._path[1:] if self._path.startswith("@") else self._path
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as connection:
            connection.sendto(state.encode(), address)
