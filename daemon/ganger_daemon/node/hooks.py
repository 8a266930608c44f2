"""Hooks: programs of the operator that the daemon runs as its own user. A hook outlives the daemon. A small shell keeps
the hook's output and exit code in a directory, which it makes first. A second shell finds the directory and runs
nothing, so a hook with a directory of its own runs once at most."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import stat
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec
from ganger.text import os_failure

from ganger_daemon.core.hook_outcomes import CheckRecord, HookEnd, after_check, hook_failure
from ganger_daemon.node.daemon_files import open_plain, path_trouble, read_json, read_plain, remove_tree, write_hint

log = logging.getLogger(__name__)

HOOK_TIMEOUT_S = 300.0
HEALTH_CHECK_EVERY_S = 60.0
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_SHELL = "/bin/sh"
# $1: the directory, then the words of the program. Its output goes into a pipe, whose reader keeps the beginning, at
# once, and the end: no file grows beyond that.
_KEEPER = (
    'cd /; dir=$1; shift; mkdir -- "$dir" && mkfifo -m 600 -- "$dir/pipe" || exit; printf %s "$$" >"$dir/pid"; '
    '{ dd bs=1024 count=1024 >"$dir/output" 2>/dev/null; tail -c 4096 >"$dir/end"; : >"$dir/read"; } <"$dir/pipe" & '
    '"$@" >"$dir/pipe" 2>&1 </dev/null; printf %s "$?" >"$dir/code.new"; mv -- "$dir/code.new" "$dir/code"'
)
_OUTPUT_BYTES = 4096
# Longest wait for the end of the output once the program has ended: what it has left running may hold the pipe.
_READ_S, _READ_LOOK_S = 1.0, 0.005
# Longest wait for a hook that was killed.
_KILLED_S = 5.0


@dataclass(frozen=True, slots=True)
class NodeHooks:
    """The hooks of a node. `timeout_s`: the time that each run of them has; `health_check_every_s`: from the end of one
    check to the next; `run_as_user`: prolog and epilog run as the account of the job, and not as this process's."""

    prolog: Path | None = None
    epilog: Path | None = None
    timeout_s: float = HOOK_TIMEOUT_S
    health_check: Path | None = None
    health_check_every_s: float = HEALTH_CHECK_EVERY_S
    run_as_user: bool = False

    def programs(self) -> dict[str, Path]:
        """Return the programs that are set, by their flags."""
        named = {"prolog": self.prolog, "epilog": self.epilog, "health-check": self.health_check}
        return {name: program for name, program in named.items() if program is not None}


def hook_trouble(program: Path) -> str:
    """Return why the daemon does not run a program as a hook; empty if it does. A user that may write to a hook
    has the rights of the daemon."""
    try:
        status = program.stat()
    except OSError as error:
        return os_failure(error)
    if not program.is_absolute():
        return f"{program} is no absolute path"
    if not stat.S_ISREG(status.st_mode) or not os.access(program, os.X_OK):
        return f"{program} is no program: make it an executable file"
    if status.st_uid not in (0, os.geteuid()):
        return f"{program} belongs to another user"
    if status.st_mode & 0o022:
        return f"others may write to {program} (mode {stat.S_IMODE(status.st_mode):04o})"
    return path_trouble(program.parent) or path_trouble(program, is_file=True)


class HookRun:
    """One run of a hook, which a former daemon may have begun. `directory`: of this run alone; the one above exists."""

    def __init__(self, name: str, directory: Path, timeout_s: float) -> None:
        self._name, self._directory, self._timeout_s = name, directory, timeout_s

    @property
    def is_running(self) -> bool:
        return bool(self._running())

    async def failure(self, command: Sequence[str], environment: Mapping[str, str]) -> str:
        """Run the hook, unless it was begun before, and return why it failed; empty if it ended with 0. Cancelled, it
        leaves the hook alone."""
        try:
            return hook_failure(self._name, await self._end(command, environment), self._timeout_s)
        except OSError as error:
            return f"{self._name} cannot be run: {os_failure(error)}"

    async def _end(self, command: Sequence[str], environment: Mapping[str, str]) -> HookEnd:
        keeper = 0
        if not self._directory.exists():
            keeper = await asyncio.to_thread(self._start, command, environment)
            await _ended(keeper, self._timeout_s)
        # The keeper of a former daemon may have been quicker.
        while (pid := self._running()) and (left_s := self._left_s()) > 0.0:
            await _ended(pid, left_s)
        is_late = bool(self._running())
        await self.kill()
        _reap(keeper)
        until = time.monotonic() + (0.0 if is_late else _READ_S)
        while time.monotonic() < until and not (self._directory / "read").exists():  # noqa: ASYNC110  # of no child
            await asyncio.sleep(_READ_LOOK_S)
        return HookEnd(self._code(), self._output(), is_late)

    async def kill(self) -> None:
        """Kill the hook with all that it has started in its session."""
        if pid := self._running():
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            await _ended(pid, _KILLED_S)

    def _start(self, command: Sequence[str], environment: Mapping[str, str]) -> int:
        return os.posix_spawn(
            _SHELL,
            [_SHELL, "-c", _KEEPER, "ganger-hook", str(self._directory), *command],
            {"PATH": _PATH, **environment},
            file_actions=[(os.POSIX_SPAWN_OPEN, number, os.devnull, os.O_RDWR, 0) for number in (0, 1, 2)],
            # Python ignores them, and what is ignored is inherited.
            setsigdef=(signal.SIGPIPE, signal.SIGXFSZ),
            setsid=True,
        )

    def _running(self) -> int:
        """Return the pid of the keeper, which is that of its session, while it runs; else 0."""
        try:
            pid = int(read_plain(self._directory / "pid", _OUTPUT_BYTES))
            # Its words name this directory: a pid that was given again has others, and one that has exited has none.
            return pid if os.fsencode(self._directory) in Path(f"/proc/{pid}/cmdline").read_bytes() else 0
        except (OSError, ValueError):
            return 0

    def _left_s(self) -> float:
        try:
            began = (self._directory / "pid").stat().st_mtime
        except OSError:
            return 0.0
        return min(self._timeout_s, began + self._timeout_s - time.time())

    def _code(self) -> int | None:
        try:
            return int(read_plain(self._directory / "code", _OUTPUT_BYTES))
        except (OSError, ValueError):
            return None

    def _output(self) -> bytes:
        """Return the end of the output, as far as it was read."""
        return b"".join(map(self._tail, ("output", "end")))[-_OUTPUT_BYTES:]

    def _tail(self, name: str) -> bytes:
        try:
            with open_plain(self._directory / name) as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - _OUTPUT_BYTES))
                return file.read(_OUTPUT_BYTES)
        except OSError:
            return b""


def _reap(pid: int) -> None:
    if pid:
        with suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


async def _ended(pid: int, within_s: float) -> bool:
    """Wait for the end of a process, for some seconds at most. Return whether it has ended."""
    try:
        fd = os.pidfd_open(pid)
    except OSError:
        return True
    loop = asyncio.get_running_loop()
    over = asyncio.Event()
    loop.add_reader(fd, over.set)
    try:
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await over.wait()
    finally:
        loop.remove_reader(fd)
        os.close(fd)
    return over.is_set()


# Name of the hook, and of the fault that it shows.
HEALTH_CHECK = "health_check"


class HealthCheck:
    """The health check of a node: a hook that runs again and again. What it has shown outlives the daemon.

    `state`: the daemon's directory; `changed`: called when the node has become healthy or unhealthy. `is_known` is set
    once a check has ended, or if there is none."""

    def __init__(self, hooks: NodeHooks, node: str, state: Path, changed: Callable[[], None]) -> None:
        self._hooks, self._node, self._changed = hooks, node, changed
        self._notes = state / "health.json"
        self._run_directory = state / "health-check"
        self._record = self._recall() if hooks.health_check is not None else CheckRecord()
        self.is_known = asyncio.Event()

    @property
    def faults(self) -> dict[str, str]:
        """Why the node is out of service, by source; empty if it is healthy."""
        return {HEALTH_CHECK: self._record.reason} if self._record.reason else {}

    async def run(self) -> None:
        """Check the node until cancelled."""
        hooks = self._hooks
        if hooks.health_check is None:
            self._notes.unlink(missing_ok=True)
            self.is_known.set()
            return
        environment = {"GANGER_HOOK": HEALTH_CHECK, "GANGER_NODE": self._node}
        check = HookRun("health check", self._run_directory, hooks.timeout_s)
        if not check.is_running:
            # It went with the machine: that shows nothing.
            await asyncio.to_thread(remove_tree, self._run_directory)
        while True:
            failure = await check.failure([str(hooks.health_check)], environment)
            await asyncio.to_thread(remove_tree, self._run_directory)
            self._note(after_check(self._record, failure))
            self.is_known.set()
            await asyncio.sleep(hooks.health_check_every_s)

    def _note(self, record: CheckRecord) -> None:
        before, self._record = self._record, record
        if record == before:
            return
        write_hint(self._notes, asdict(record))
        if record.fault and not before.fault:
            log.warning("node is unhealthy", extra={"reason": record.fault})
        if before.fault and not record.fault:
            log.info("node is healthy again")
        if record.reason != before.reason:
            self._changed()

    def _recall(self) -> CheckRecord:
        try:
            return msgspec.convert(read_json(self._notes), CheckRecord)
        except msgspec.ValidationError as error:
            log.warning("notes cannot be read", extra={"path": str(self._notes), "error": str(error)})
            return CheckRecord()
