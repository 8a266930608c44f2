"""A cluster on this machine as a set of processes: which there are, how they are started, watched and stopped.

`ganger up` is their supervisor: it starts a program again that died. Killing the supervisor harms nothing: the programs
are sessions of their own, and the next `ganger up` or `ganger down` finds them by STATE_DIR/up.json, by pid and start
time.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ganger.cli.options import number
from ganger.console import CommandError, ExitCode
from ganger.injob.process_identity import start_ticks
from ganger.program_setup import read_line
from ganger.text import os_failure
from ganger.wire.endpoints import remove_endpoint

if TYPE_CHECKING:
    from ganger.v1.node_pb2 import Node

UP_FILE = "up.json"
# The command that made the newest cluster here: it stays when the cluster is stopped.
LAST_FILE = "up.command"
# Reasons for a refusal of a daemon that no wait changes.
_LASTING_REFUSALS = frozenset({"CONFIGURATION_SET_MISMATCH", "STORAGE_MISMATCH"})
_STOP_S = 15.0
_POLL_S = 0.05
# A program that dies more often than this in a minute is not helped by being started again at once.
_MAX_RESTARTS = 5
_RESTART_WINDOW_S = 60.0


# Flags of `ganger up` that are the master's, and the daemons', in the order in which the programs get them.
_MASTER_FLAGS = (
    "config",
    "listen",
    "metrics",
    "storage",
    "policy",
    "lost_after",
    "plan_every",
    "quantum",
    "moves_per_hour",
)
_DAEMON_FLAGS = ("virtual_gpus", "virtual_cores", "virtual_gpu_cores", "virtual_memory", "topology")


@dataclass(frozen=True, slots=True)
class LocalClusterSettings:
    """What `ganger up` is to start. `flags`: values by name, None where the programs' own defaults count; without
    "virtual_gpus" the machine's real devices. `command`: what to type for the same cluster again."""

    state_directory: Path
    nodes: int
    flags: Mapping[str, object] = field(default_factory=dict)
    command: str = "ganger up"


@dataclass(frozen=True, slots=True)
class Program:
    """One process to keep running: a name for people, its arguments, its log."""

    name: str
    arguments: tuple[str, ...]
    log: Path


@dataclass(frozen=True, slots=True)
class Started:
    """Identity of a process: pid and kernel start time, in clock ticks. `arguments`: the command that started it."""

    name: str
    pid: int
    start_ticks: int
    arguments: tuple[str, ...] = ()


class Running:
    """A process that a supervisor watches: its child, or one that an earlier supervisor started.

    Raises ProcessLookupError if there is no such process any more."""

    def __init__(self, started: Started, child: subprocess.Popen[bytes] | None = None) -> None:
        self.started = started
        self._child = child
        self._handle = os.pidfd_open(started.pid)
        if child is None and not is_alive(started):
            os.close(self._handle)
            raise ProcessLookupError(f"{started.name} (pid {started.pid}) has ended")

    def wait(self, timeout_s: float = 0.0) -> bool:
        """Return whether it has ended, after at most so many seconds."""
        return bool(select.select([self._handle], [], [], timeout_s)[0])

    @property
    def code(self) -> int | None:
        """Exit code of a process that has ended, as Popen gives it; None where only its parent receives it."""
        return self._child.wait() if self._child is not None else None

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to this very process; without effect once it has ended."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._handle, number)

    def close(self) -> None:
        """Release what is held of a process that has ended."""
        if self._child is not None:
            self._child.wait()
        os.close(self._handle)


def programs(settings: LocalClusterSettings) -> tuple[Program, ...]:
    """The master, then a daemon for each node, "n1" to "nN"."""
    directory = settings.state_directory
    ganger = (sys.executable, "-m", "ganger.cli.main")
    master = [*ganger, "master", "--state-dir", str(directory), *_given(settings, _MASTER_FLAGS)]
    found = [Program("master", tuple(master), directory / "logs" / "master.log")]
    for index in range(1, settings.nodes + 1):
        node = f"n{index}"
        daemon = [*ganger, "daemon", "--node", node, "--master", str(directory)]
        daemon += ["--state-dir", str(directory / "nodes" / node)]
        if settings.flags.get("virtual_gpus") is not None:
            daemon += _given(settings, _DAEMON_FLAGS)
        found.append(Program(node, tuple(daemon), directory / "logs" / f"{node}.log"))
    return tuple(found)


def _given(settings: LocalClusterSettings, names: Iterable[str]) -> list[str]:
    """An empty value is one, too: the program it is for says what is wrong with it."""
    given = [(name, settings.flags.get(name)) for name in names]
    return [text for name, value in given if value is not None for text in (f"--{name.replace('_', '-')}", str(value))]


class Supervisor:
    """Starts the programs, or adopts those that an earlier supervisor left; starts dead ones again; stops them all."""

    def __init__(self, settings: LocalClusterSettings, say: Callable[[str], None]) -> None:
        self._settings = settings
        self._say = say
        self._programs = programs(settings)
        self._running: dict[str, Running] = {}
        self._starts: dict[str, list[float]] = {}
        self._resting: set[str] = set()
        # Where in its log a program's present run begins.
        self._log_starts: dict[str, int] = {}
        self._is_ready = False
        self._is_noted = False

    def adopt(self) -> None:
        """Take over the programs that an earlier supervisor left. Raises CommandError if one runs with other arguments:
        with other nodes or devices its jobs would not be taken up."""
        directory = self._settings.state_directory
        _, found = read_up_file(directory)
        wanted = {program.name: program for program in self._programs}
        for started in found:
            program = wanted.get(started.name)
            if program is None or program.arguments[1:] != started.arguments[1:]:
                raise CommandError(
                    f"{started.name} (pid {started.pid}) of an earlier cluster still runs, with other flags: take it"
                    f" over with `{command_of(directory)}`, or stop it with `ganger down --state-dir {directory}`"
                )
        for started in found:
            with contextlib.suppress(ProcessLookupError):
                self._running[started.name] = Running(started)
                self._starts[started.name] = []
        if self._running:
            self._say(f"taken over from an earlier `ganger up`: {', '.join(self._running)}")

    def start(self) -> None:
        directory = self._settings.state_directory
        (directory / "logs").mkdir(mode=0o700, parents=True, exist_ok=True)
        self._note()
        if "master" not in self._running:
            # What a killed master left would look like a new master that does not answer.
            remove_endpoint(directory)
        for program in self._programs:
            if program.name not in self._running:
                self._start(program)
                # At once: whatever ends this process now, the next one is to find what runs.
                self._note()

    def announce_ready(self) -> None:
        with contextlib.suppress(OSError):
            (self._settings.state_directory / LAST_FILE).write_text(f"{self._settings.command}\n")
        self._is_ready = True
        self._note()

    def restart_dead(self) -> None:
        """Start dead programs again. One that dies again and again is left for a minute, without effect on the others.
        A start for which the system has no space or processes now is tried again at the next call."""
        for program in self._programs:
            running = self._running[program.name]
            if not running.wait() or self._is_fenced(program, running):
                continue
            now = time.monotonic()
            recent = [each for each in self._starts[program.name] if now - each < _RESTART_WINDOW_S]
            if len(recent) > _MAX_RESTARTS:
                if program.name not in self._resting:
                    self._resting.add(program.name)
                    self._say(
                        f"{program.name} ended {len(recent)} times in a minute ({describe(running.code)}),"
                        f" and is left for a while:\n{self._log_end(program)}"
                    )
                continue
            self._say(f"{program.name} ended ({describe(running.code)}); starting it again")
            self._resting.discard(program.name)
            self._starts[program.name] = recent
            try:
                self._start(program)
            except OSError as error:
                self._say(f"{program.name} cannot be started, and is tried again: {os_failure(error)}")
        if not self._is_noted:
            with contextlib.suppress(OSError):
                self._note()

    def _is_fenced(self, program: Program, running: Running) -> bool:
        """Return whether the program ended because another master has taken its database over. To start it again would
        take the database back, and the two would continue so."""
        if running.code != ExitCode.FENCED:
            return False
        if program.name not in self._resting:
            self._resting.add(program.name)
            self._say(
                f"{program.name} ended and is not started again: another master has taken its database over. Stop the"
                f" other one, then `ganger down` and `ganger up` here.\n{self._log_end(program)}"
            )
        return True

    def check_alive(self) -> None:
        """Check that all programs run. Raises CommandError if one has died, with the end of its log."""
        for program in self._programs:
            running = self._running[program.name]
            if running.wait():
                text = f"{program.name} ended at once ({describe(running.code)}):\n{self._log_end(program)}"
                raise CommandError(text, exit_of(running.code))

    def stop(self) -> None:
        """Daemons first, so that the master still learns what they report."""
        *daemons, master = reversed(self._programs)
        for group in (daemons, [master]):
            processes = [self._running[program.name] for program in group if program.name in self._running]
            for process in processes:
                process.send_signal(signal.SIGTERM)
            deadline = time.monotonic() + _STOP_S
            for process in processes:
                if not process.wait(max(0.0, deadline - time.monotonic())):
                    process.send_signal(signal.SIGKILL)
                    process.wait(_STOP_S)
                process.close()
        self._running.clear()
        (self._settings.state_directory / UP_FILE).unlink(missing_ok=True)

    def _start(self, program: Program) -> None:
        self._starts.setdefault(program.name, []).append(time.monotonic())
        with program.log.open("ab") as log:
            self._log_starts[program.name] = log.tell()
            # A session of its own: ctrl-C is for the supervisor, which stops the others in order.
            child = subprocess.Popen(
                program.arguments,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._is_noted = False
        started = Started(program.name, child.pid, start_ticks(child.pid) or 0, program.arguments)
        former = self._running.get(program.name)
        self._running[program.name] = Running(started, child)
        if former is not None:
            former.close()

    def _log_end(self, program: Program) -> str:
        return tail(program.log, after=self._log_starts.get(program.name, 0))

    def _note(self) -> None:
        """Write the processes that run to up.json. Raises OSError."""
        self._is_noted = False
        own = Started("up", os.getpid(), start_ticks(os.getpid()) or 0)
        processes = [asdict(each) for each in (own, *(running.started for running in self._running.values()))]
        content = {"ready": self._is_ready, "processes": processes, "command": self._settings.command}
        path = self._settings.state_directory / UP_FILE
        temporary = path.with_name(f".{UP_FILE}.tmp")
        temporary.write_text(json.dumps(content, indent=1) + "\n")
        temporary.replace(path)
        self._is_noted = True


def read_up_file(state_directory: Path) -> tuple[bool, tuple[Started, ...]]:
    """Return whether the cluster has become ready, and those of its processes that live, supervisor first."""
    try:
        content = json.loads((state_directory / UP_FILE).read_text())
        processes = [
            Started(each["name"], each["pid"], each["start_ticks"], tuple(each.get("arguments", ())))
            for each in content["processes"]
        ]
        is_ready = bool(content["ready"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False, ()
    return is_ready, tuple(each for each in processes if is_alive(each))


def command_of(state_directory: Path) -> str:
    """Return the command line that started the cluster that runs there."""
    try:
        return str(json.loads((state_directory / UP_FILE).read_text())["command"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return "ganger up"


def last_command_of(state_directory: Path) -> str:
    """Return the command that started the newest cluster there that became ready; empty if that is not known."""
    try:
        return (state_directory / LAST_FILE).read_text().strip()
    except (OSError, ValueError):
        return ""


def stop_started(started: Sequence[Started]) -> None:
    """Stops processes that are not our children: the supervisor alone if it lives, as it stops the others."""
    chosen = [each for each in started if each.name == "up"] or sorted(started, key=lambda each: each.name == "master")
    for each in chosen:
        if is_alive(each):
            with contextlib.suppress(ProcessLookupError):
                os.kill(each.pid, signal.SIGTERM)
    timeout_s = 3 * _STOP_S
    deadline = time.monotonic() + timeout_s
    while left := [each for each in started if is_alive(each)]:
        if time.monotonic() > deadline:
            names = ", ".join(f"{each.name} (pid {each.pid})" for each in left)
            raise CommandError(f"{names} did not stop within {timeout_s:g} s: see their logs")
        time.sleep(_POLL_S)


def is_alive(process: Started) -> bool:
    """Return whether this very process runs, not another one that got its pid."""
    return start_ticks(process.pid) == process.start_ticks


def wait_until_ready(settings: LocalClusterSettings, check_alive: Callable[[], None], timeout_s: float) -> str:
    """Waits for the master's health and for all nodes. Returns the master's address. Raises CommandError."""
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    from ganger.client import Client
    from ganger.v1.node_pb2 import Node
    from ganger.wire.channels import open_channel
    from ganger.wire.endpoints import EndpointError, read_endpoint
    from ganger.wire.errors import ApiError

    deadline = time.monotonic() + timeout_s
    waits_for = "the master"
    while time.monotonic() < deadline:
        check_alive()
        try:
            endpoint = read_endpoint(settings.state_directory)
            waits_for = "the master to be healthy"
            with open_channel(endpoint) as channel:
                health = health_pb2_grpc.HealthStub(channel)
                status = health.Check(health_pb2.HealthCheckRequest()).status
            if status == health_pb2.HealthCheckResponse.SERVING:
                with Client(endpoint) as client:
                    nodes = client.list_nodes().nodes
                expected = {f"nodes/n{index}" for index in range(1, settings.nodes + 1)}
                missing = expected - {node.name for node in nodes if node.state != Node.STATE_UNKNOWN}
                if not missing:
                    return endpoint.address
                _check_accepted(settings.state_directory, [node for node in nodes if node.name in missing])
                waits_for = ", ".join(sorted(map(number, missing)))
        except EndpointError as error:
            if error.found:
                raise
        except (ApiError, grpc.RpcError):
            # Not there yet.
            pass
        time.sleep(_POLL_S)
    logs = settings.state_directory / "logs"
    why = [f"\n  {name}: {line}" for name in waits_for.split(", ") if (line := last_error(logs / f"{name}.log"))]
    raise CommandError(
        f"waited {timeout_s:g} s in vain for {waits_for}; the logs are in {logs}{''.join(why)}", ExitCode.UNREACHABLE
    )


def _check_accepted(state_directory: Path, nodes: Iterable[Node]) -> None:
    """Raises CommandError if the master does not accept one of these nodes, and no wait changes that."""
    refused = [node for node in nodes if node.refusal in _LASTING_REFUSALS]
    if not refused:
        return
    reasons = [f"\n  {number(node.name)}: {node.state_reason}" for node in refused]
    hint = ""
    if last := last_command_of(state_directory):
        hint = (
            f"\nthe cluster of {state_directory} was started with `{last}` before: start it so again; to change it,"
            f" end its jobs first: `ganger down --state-dir {shlex.quote(str(state_directory))} --cancel-jobs`"
        )
    raise CommandError(f"the cluster is not the one that was here before:{''.join(reasons)}{hint}")


def tail(path: Path, lines: int = 15, after: int = 0) -> str:
    """The last lines of a log, from the byte `after` on, indented."""
    try:
        with path.open("rb") as file:
            file.seek(max(after, path.stat().st_size - 8_192))
            text = file.read().decode(errors="replace")
    except OSError:
        return f"  (no log at {path})"
    return "\n".join(f"  {line}" for line in text.splitlines()[-lines:])


def last_error(path: Path) -> str:
    """Return the last error in the log of a program; empty if there is none."""
    for line in reversed(tail(path, lines=100).splitlines()):
        # The log may have lines of Python, and of programs that it runs, too.
        fields = read_line(line.strip())
        if fields.get("level") == "error":
            return str(fields.get("error") or fields["event"])
    return ""


def exit_of(code: int | None) -> ExitCode:
    """Return the exit code for the end of a needed program: its own code where it reported the fault."""
    kept = (ExitCode.USAGE, ExitCode.UNREACHABLE, ExitCode.NOT_PERMITTED, ExitCode.FENCED)
    return ExitCode(code) if code in kept else ExitCode.REFUSED


def describe(code: int | None) -> str:
    if code is None:
        return "exit code unknown"
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
