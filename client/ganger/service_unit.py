"""systemd: units of master and daemon, and what a program that runs as one says to the service manager.

The manager listens on the socket in $NOTIFY_SOCKET (sd_notify(3)): it hears that a program is ready, and then, at
least once in $WATCHDOG_USEC, that its loop turns. Without these variables nothing is said.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import socket
from collections.abc import Sequence
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Final, Literal

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

Program = Literal["master", "daemon"]

DAEMON_UNIT: Final = "ganger-daemon.service"
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
    own = _DAEMON if program == "daemon" else _MASTER.format(user=user, writable=" ".join(map(_word, writable)))
    return common + own + _INSTALL


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
    """The service manager that started this program. Takes its variables out of the environment: programs that this
    one starts are not the service."""

    def __init__(self) -> None:
        self._path = os.environ.pop("NOTIFY_SOCKET", "")
        period = os.environ.pop("WATCHDOG_USEC", "")
        is_meant = os.environ.pop("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        self._period_s = int(period) / 1e6 if is_meant and period.isdecimal() else 0.0

    @asynccontextmanager
    async def told(self) -> AsyncIterator[None]:
        """Tell the manager, while this context lasts, that this program is ready and that its loop turns."""
        self._tell("READY=1")
        beating = asyncio.ensure_future(self._beat())
        try:
            yield
        finally:
            beating.cancel()
            with suppress(asyncio.CancelledError):
                await beating
            self._tell("STOPPING=1")

    async def _beat(self) -> None:
        while self._period_s:
            self._tell("WATCHDOG=1")
            await asyncio.sleep(self._period_s / 3)

    def _tell(self, state: str) -> None:
        if self._path[:1] not in ("/", "@"):
            return
        address = "\0" + self._path[1:] if self._path.startswith("@") else self._path
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as connection:
            connection.sendto(state.encode(), address)
