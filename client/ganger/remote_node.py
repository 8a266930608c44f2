"""A machine that is reached by ssh and made a node, or removed: what is installed there, and its daemon's unit.

Every step can be repeated: a machine on which one failed is added by the same command again. All commands there are for
the POSIX shell, as root or by `sudo -n`; files travel on their standard input.
"""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Final

from ganger.injob.launcher.namespaces import LINKS
from ganger.local_master import MADE, SHARED_DIRECTORY
from ganger.service_unit import DAEMON_UNIT, DROP_IN, unit_text
from ganger.wire.tls import AUTHORITY, CERTIFICATE, KEY

if TYPE_CHECKING:
    import asyncssh

_CONNECT_S: Final = 20.0
_STEP_S: Final = 60.0
_INSTALL_S: Final = 600.0
_UNIT: Final = f"/etc/systemd/system/{DAEMON_UNIT}"
_LEAST_PYTHON: Final = (3, 11)
_PROBE: Final = f"""
id -u
sudo -n true 2>/dev/null && echo sudo || echo no
test -d /run/systemd/system && echo systemd || echo no
for each in python3 python3.14 python3.13 python3.12 python3.11; do
    if $each -c 'import sys, venv; assert sys.version_info >= {_LEAST_PYTHON}' 2>/dev/null; then
        command -v $each
        break
    fi
done
"""
_MADE_UNIT: Final = "# Made by ganger cluster add."
# Jobs run as accounts that go through what is made, whatever root's own umask is.
_OPEN: Final = "umask 022;"
_FOREIGN_UNIT: Final = shlex.quote(f"{_UNIT} is there, and `cluster add` did not make it: remove it first")
_LONGEST: Final = 400
# Reads from a daemon's notes its run directory, and the name of its control groups.
_FIELDS: Final = (
    """run=$(sed -n 's/.*"run_directory": *"\\([^"]*\\)".*/\\1/p' {node} 2>/dev/null);"""
    """ group=$(sed -n 's/.*"cgroup": *"\\(ganger-[0-9a-f]*\\)".*/\\1/p' {node} 2>/dev/null);"""
)
# What would go with the next boot: control groups, and directories of all daemons once the last one has gone. Only what
# is empty can be removed.
_RUNNING_ONLY: Final = (
    f' for each in ${{group:+"*/$group*"}} "*/system.slice/{DAEMON_UNIT}"; do'
    ' find /sys/fs/cgroup -depth -type d -path "$each" -exec rmdir {} + 2>/dev/null; done;'
    # Another daemon, even an idle one, has its directory in the first, and binds below the second.
    " rmdir /run/ganger 2>/dev/null"
    f" && test -d {LINKS} && {{ umount {LINKS} 2>/dev/null; rmdir {LINKS} 2>/dev/null; }};"
)


class RemoteNodeError(Exception):
    """A step failed; the message names the machine, what was done, and what it said."""


@dataclass(frozen=True, slots=True)
class NodePlaces:
    """Directories on the machine. `python`: the interpreter of an installation that is there and stays."""

    prefix: str = "/opt/ganger"
    certificates: str = "/etc/ganger/tls"
    state: str = "/var/lib/ganger/daemon"
    python: str = ""

    @property
    def interpreter(self) -> str:
        return self.python or f"{self.prefix}/bin/python"

    @property
    def log(self) -> str:
        """Where a daemon writes that no service manager has started."""
        return f"{self.state}/daemon.log"


@dataclass(slots=True)
class RemoteNode:
    """A connected machine. All methods raise RemoteNodeError."""

    host: str
    places: NodePlaces
    connection: asyncssh.SSHClientConnection
    has_systemd: bool = False
    _sudo: str = ""
    _python: str = field(default="", repr=False)

    async def probe(self) -> None:
        """Find out what is there. Without root's rights, or a Python that is new enough, it cannot be a node."""
        found = await self._run("look at the machine", _PROBE)
        user, sudo, systemd, python = [*found.split("\n"), "", "", "", ""][:4]
        if user != "0" and sudo != "sudo":
            raise RemoteNodeError(
                f"{self.host}: the daemon runs as root: connect as root@{self.host}, or let this account use sudo"
                " without a password"
            )
        self._sudo = "" if user == "0" else "sudo -n "
        self.has_systemd, self._python = systemd == "systemd", python
        if not self.places.python and not python:
            wanted = ".".join(map(str, _LEAST_PYTHON))
            raise RemoteNodeError(
                f"{self.host}: there is no Python {wanted} or newer with venv (Debian: apt-get install python3-venv):"
                " install one, or name one with --python"
            )

    async def install(self, version: str, wheel: Path | None) -> str:
        """Install Ganger of this version, from a wheel or from the machine's package index; return what was done."""
        places = self.places
        there = await self._version()
        if places.python:
            if not there:
                raise RemoteNodeError(
                    f"{self.host}: {places.python} has no Ganger: pip install 'ganger[server]=={version}' there"
                )
            return f"Ganger {there} is there"
        if there == version and wheel is None:
            return f"Ganger {there} is there"
        prefix = shlex.quote(places.prefix)
        taken = shlex.quote(
            f"{places.prefix} is there, and `cluster add` did not make it: name another --prefix, or use its Python"
            " with --python"
        )
        await self._run(
            "make an environment",
            f"{_OPEN} if ! test -e {prefix}/{MADE}; then"
            f' if test -n "$(ls -A {prefix} 2>/dev/null)"; then echo {taken} >&2; exit 1; fi;'
            f" mkdir -p {prefix} && touch {prefix}/{MADE} || exit 1; fi; {shlex.quote(self._python)} -m venv {prefix}",
        )
        wanted = f"ganger[server]=={version}"
        if wheel is not None:
            uploaded = f"{places.prefix}/{wheel.name}"
            await self.write(uploaded, await asyncio.to_thread(wheel.read_bytes), 0o644)
            wanted = f"{uploaded}[server]"
        await self._run(
            "install Ganger",
            f"{_OPEN} {prefix}/bin/python -m pip install --quiet --disable-pip-version-check --upgrade"
            f" {shlex.quote(wanted)}",
            timeout_s=_INSTALL_S,
        )
        # The same version may be another build of a checkout.
        if wheel is not None:
            again = f"--force-reinstall --no-deps {shlex.quote(wanted)}"
            again = f"{_OPEN} {prefix}/bin/python -m pip install --quiet {again}"
            await self._run("install Ganger", again, timeout_s=_INSTALL_S)
        return f"installed Ganger {await self._version()}"

    async def write_certificate(self, directory: Path) -> None:
        """Copy a directory with a certificate to where the daemon looks for it."""
        for name, mode in ((AUTHORITY, 0o644), (KEY, 0o600), (CERTIFICATE, 0o644)):
            await self.write(f"{self.places.certificates}/{name}", (directory / name).read_bytes(), mode)

    async def stop(self) -> None:
        """Stop the daemon, if one runs there. Its jobs go on."""
        if self.has_systemd:
            await self._run("stop the daemon", f"test ! -e {_UNIT} || systemctl stop {DAEMON_UNIT}")
        await self._stop_process()

    async def start(self, flags: Sequence[str]) -> str:
        """Start the daemon with these options, where none runs; return how.

        Under systemd it is started at boot, too; elsewhere it is a process of its own, until the machine goes down.
        """
        places = self.places
        command = (places.interpreter, "-m", "ganger.cli.main", "daemon", *flags)
        state = shlex.quote(places.state)
        await self._run(
            "make directories", f"{_OPEN} test -d {state} || {{ mkdir -p -m 0711 {state} && touch {state}/{MADE}; }}"
        )
        if self.has_systemd:
            await self._run(
                "write the unit",
                f"test ! -e {_UNIT} || grep -q '^{_MADE_UNIT}$' {_UNIT} || {{ echo {_FOREIGN_UNIT} >&2; exit 1; }}",
            )
            await self.write(_UNIT, f"{_MADE_UNIT}\n{unit_text('daemon', command)}".encode(), 0o644)
            await self._run(
                "start the daemon",
                f"systemctl daemon-reload && systemctl enable --quiet {DAEMON_UNIT} && systemctl restart --no-block"
                f" {DAEMON_UNIT}",
            )
            return f"started {DAEMON_UNIT}"
        log = shlex.quote(places.log)
        await self._run(
            "start the daemon", f"cd / && {{ setsid nohup {shlex.join(command)} >>{log} 2>&1 </dev/null & }}; sleep 0.1"
        )
        return "started the daemon; there is no systemd, so start it after a reboot by the same command"

    async def log_end(self) -> str:
        """Return the end of the daemon's log."""
        log = f"journalctl --no-pager -o cat -n 3 -u {DAEMON_UNIT}"
        if not self.has_systemd:
            log = f"tail -n 3 {shlex.quote(self.places.log)}"
        return await self._run("read the daemon's log", f"{log} 2>/dev/null || true")

    async def remove(self) -> None:
        """Stop the daemon and remove what was made: unit, certificate, and new state and installation directories."""
        places = self.places
        await self.stop()
        if self.has_systemd:
            await self._run(
                "remove the unit",
                f"grep -q '^{_MADE_UNIT}$' {_UNIT} 2>/dev/null || exit 0;"
                f" systemctl disable --quiet {DAEMON_UNIT} 2>/dev/null; rm -f {_UNIT}.d/{DROP_IN};"
                f" rmdir {_UNIT}.d 2>/dev/null; rm -f {_UNIT} && systemctl daemon-reload",
            )
        prefix, state, tls = map(shlex.quote, (places.prefix, places.state, places.certificates))
        above = shlex.join(str(PurePosixPath(path).parent) for path in (places.certificates, places.state))
        own = shlex.join(f"{places.certificates}/{name}" for name in (AUTHORITY, KEY, CERTIFICATE))
        await self._run(
            "remove what was made",
            f"failed=0; rm -f {own} || failed=1; rmdir {tls} 2>/dev/null;"
            f" if test -e {state}/{MADE}; then {_FIELDS.format(node=f'{state}/node.json')}"
            # One that an option of the daemon named may hold more.
            ' case "$run" in */../*) ;; /run/ganger/*|/dev/shm/ganger*) rm -rf "$run" ;; esac;'
            f" rm -rf {state} || failed=1; {_RUNNING_ONLY} fi;"
            f" test ! -e {prefix}/{MADE} || rm -rf {prefix} || failed=1;"
            f' for above in {above}; do case "$above" in */{SHARED_DIRECTORY}) rmdir "$above" 2>/dev/null;; esac; done;'
            " exit $failed",
        )

    async def write(self, path: str, content: bytes, mode: int) -> None:
        """Put a file in its place, whole, with the directories that it needs: its own one is closed (0700)."""
        target = shlex.quote(path)
        directory = shlex.quote(str(PurePosixPath(path).parent))
        script = (
            f"{_OPEN} mkdir -p -m 0700 {directory} && umask 077 && cat >{target}.new && chmod {mode:04o} {target}.new"
            f" && mv {target}.new {target}"
        )
        await self._run(f"write {path}", script, content)

    async def _version(self) -> str:
        code = "import importlib.metadata as m; print(m.version('ganger'))"
        command = f"{shlex.quote(self.places.interpreter)} -c {shlex.quote(code)} 2>/dev/null || true"
        return await self._run("look for Ganger", command)

    async def _stop_process(self) -> None:
        """End a daemon that runs without a service manager: the holder of its lock. Its jobs go on."""
        lock = shlex.quote(f"{self.places.state}/daemon.lock")
        await self._run(
            "stop the daemon",
            f'test -e {lock} || exit 0; pid=$(cat {lock}); test -n "$pid" || exit 0;'
            ' grep -q ganger "/proc/$pid/cmdline" 2>/dev/null || exit 0; kill "$pid";'
            ' for n in $(seq 100); do test -d "/proc/$pid" || exit 0; sleep 0.1; done; exit 1',
        )

    async def _run(self, step: str, script: str, stdin: bytes = b"", timeout_s: float = _STEP_S) -> str:
        import asyncssh

        command = f"{self._sudo}sh -c {shlex.quote(script)}"
        try:
            done = await self.connection.run(command, input=stdin, encoding=None, timeout=timeout_s)
        except (OSError, asyncssh.Error, TimeoutError) as error:
            why = "no answer in time" if isinstance(error, TimeoutError) else str(error)
            raise RemoteNodeError(f"{self.host}: cannot {step}: {why}") from error
        if done.exit_status != 0:
            ended = "the connection broke off" if done.exit_status is None else f"exit code {done.exit_status}"
            why = _text(done.stderr) or _text(done.stdout) or ended
            raise RemoteNodeError(f"{self.host}: cannot {step}: {why}")
        return _text(done.stdout)


def _text(output: object) -> str:
    """The end of what a machine printed: nothing of it may steer a terminal, or fill it."""
    text = output[-4 * _LONGEST :].decode(errors="replace") if isinstance(output, bytes) else str(output or "")
    shown = "".join(letter if letter.isprintable() or letter == "\n" else "?" for letter in text)
    return shown.strip()[-_LONGEST:]


@asynccontextmanager
async def connected(
    destination: str, places: NodePlaces, port: int | None, key: Path | None
) -> AsyncIterator[RemoteNode]:
    """Connect to [USER@]HOST as ssh would, with its configuration, keys and known hosts. Raises RemoteNodeError."""
    import asyncssh

    user, _, host = destination.rpartition("@")
    more: dict[str, object] = {"username": user} if user else {}
    if port is not None:
        more["port"] = port
    if key is not None:
        more["client_keys"] = [str(key)]
    try:
        connection = await asyncssh.connect(host, connect_timeout=_CONNECT_S, **more)
    except asyncssh.HostKeyNotVerifiable as error:
        raise RemoteNodeError(
            f"{host}: its host key is not known: run `ssh {destination}` once and accept it"
        ) from error
    except (OSError, asyncssh.Error, TimeoutError) as error:
        raise RemoteNodeError(f"{host}: cannot connect by ssh: {error or 'no answer in time'}") from error
    async with connection:
        yield RemoteNode(host, places, connection)
