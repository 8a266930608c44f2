"""The daemon's side of a launcher: start one, send requests. Blocking; for threads."""

from __future__ import annotations

import array
import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, BinaryIO, Callable, NamedTuple

from ganger.injob.launcher.process_record import LAUNCHER_BLAS_THREADS
from ganger.injob.process_identity import ProcessId, peer_of
from ganger.injob.state_image import is_sealed
from ganger.text import os_failure, os_reason

# Most bytes of an answer: the list of all ranks of a node fits many times over.
_ANSWER_BYTES = 16 << 20
_MESSAGE = 4_000
# Longest restore of a process image: all of its memory is read back.
_RESTORE_S = 3600.0


class LauncherError(Exception):
    """The launcher refused, or cannot be reached (reason UNREACHABLE, TIMEOUT); ``reason`` is stable."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class ForkedTree(NamedTuple):
    """Ranks and their common parent; one rank alone is ``root`` itself. ``port``: of their rendezvous store, or 0."""

    root: ProcessId
    ranks: Sequence[ProcessId]
    port: int = 0


def start_launcher(
    python: str,
    socket_path: str,
    *,
    inject: str,
    env: Mapping[str, str],
    log: str,
    idle_s: float = 300.0,
    preload: bool = True,
    timeout: float = 60.0,
    uid: int | None = None,
    start: Callable[[Sequence[str], Mapping[str, str], BinaryIO], subprocess.Popen[bytes]] | None = None,
) -> None:
    """Start a launcher that outlives this process, unless one serves ``socket_path`` already; return when it answers.

    ``uid``: of its user, if that is another one; then ``start`` starts the command with this environment and output.
    ``env`` is the user's environment (see `launch.startup_variables` for what must agree with that of the ranks).
    Raises LauncherError(NOT_STARTED) with the end of ``log``."""
    if _answers(socket_path, timeout, uid):
        return
    environment = _launcher_environment(env, inject)
    command = [python, "-m", "ganger.injob.launcher", "--socket", socket_path, "--idle-s", str(idle_s)]
    if not preload:
        command.append("--no-preload")

    def spawn() -> subprocess.Popen[bytes]:
        with open(os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600), "ab") as output:
            if start is not None:
                return start(command, environment, output)
            return subprocess.Popen(
                command,
                env=environment,
                # A directory that holds nothing but `ganger`: -m puts it on the path.
                cwd=inject,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    process = spawn()
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if _answers(socket_path, deadline - time.monotonic(), uid):
            # reaped in the background when it ends, without a warning when we end first
            threading.Thread(target=process.wait, name="launcher-reaper", daemon=True).start()
            return
        code = process.poll()
        if code == 0:
            # It left the socket to another one, which may be about to end for want of work.
            process = spawn()
        elif code is not None:
            break
        time.sleep(0.02)
    # it has a session of its own, with its reaper
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    raise LauncherError("NOT_STARTED", f"{python} runs no launcher: {_tail(log)}")


def _launcher_environment(env: Mapping[str, str], inject: str) -> dict[str, str]:
    environment = {key: value for key, value in env.items() if not key.startswith("GANGER_")}
    parts = [part for part in environment.get("PYTHONPATH", "").split(os.pathsep) if part and part != inject]
    environment.update(
        PYTHONPATH=os.pathsep.join([inject, *map(os.path.abspath, parts)]),
        OMP_WAIT_POLICY="passive",
        # Asking whether there is a GPU must not initialise CUDA: no child could use it any more.
        PYTORCH_NVML_BASED_CUDA_CHECK="1",
        OPENBLAS_NUM_THREADS=LAUNCHER_BLAS_THREADS,
    )
    return environment


class Launcher:
    """One connection. Calls are answered in order of arrival; any thread may call. Use as a context or close()."""

    def __init__(self, socket_path: str, timeout: float = 30.0, uid: int | None = None) -> None:
        """Raises LauncherError, also for a launcher of another user than ``uid``, which is this process's own if it is
        not given. ``timeout``: of each request, in seconds, whatever the launcher sends meanwhile."""
        self._path = socket_path
        self._timeout = timeout
        self.uid = os.geteuid() if uid is None else uid
        self._lock = threading.Lock()
        self._received = b""
        self._descriptors: list[int] = []
        self._number = 0
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self._connection.settimeout(timeout)
        try:
            self._connection.connect(socket_path)
            peer = peer_of(self._connection)
        except OSError as error:
            self._connection.close()
            raise LauncherError("UNREACHABLE", f"no launcher at {socket_path}: {os_reason(error)}") from error
        # It is about to be given the environments of jobs.
        if peer.uid != self.uid:
            self._connection.close()
            raise LauncherError("STRANGER", f"what listens at {socket_path} runs as user {peer.uid}, not as the jobs'")
        self.pid = peer.pid

    def __enter__(self) -> Launcher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._connection.close()

    def info(self) -> dict[str, Any]:
        """Return pid, start_ticks, python, version, torch (imported), fork_safe, serves_stores."""
        return self._call("info")

    def fork(self, launch: Mapping[str, Any]) -> ProcessId:
        """Start a rank; returns once it is settled (cgroup, log, page) and about to run the user's program."""
        return _process(self._call("fork", launch=dict(launch)))

    def fork_all(self, launches: Sequence[Mapping[str, Any]]) -> list[ProcessId]:
        """Start several ranks at once. Raises LauncherError for the first refused one, once all are answered."""
        with self._lock:
            numbers = [self._send("fork", launch=dict(launch)) for launch in launches]
            answers: dict[int, dict[str, Any]] = {}
            deadline = time.monotonic() + self._timeout
            while len(answers) < len(numbers):
                answer = self._read(deadline)
                number = answer.get("id")
                if number in numbers and number not in answers:
                    answers[number] = answer
                    deadline = time.monotonic() + self._timeout
        return [_process(_checked(answers[number])) for number in numbers]

    def fork_together(self, launches: Sequence[Mapping[str, Any]], store_host: str = "") -> ForkedTree:
        """Start several ranks below one parent, so that one process image can have all of them. ``store_host``: the
        address of a rendezvous store beside them, whose port they get as MASTER_PORT. Raises LauncherError for the
        first rank that was refused, once all are settled."""
        launched = [dict(launch) for launch in launches]
        return _tree(self._call("fork_together", launches=launched, store_host=store_host))

    def make_unit(self, fields: Mapping[str, Any]) -> ProcessId:
        """Start a unit (see `namespaces.Unit`; besides ``cgroup_procs``) and return its init. Raises LauncherError."""
        return _process(self._call("unit", unit=dict(fields)))

    def restore(
        self,
        ranks: Sequence[tuple[Mapping[str, Any], int]],
        command: Sequence[str],
        files: Mapping[int, str],
        pid_file: str,
    ) -> ForkedTree:
        """Restore a process image into a unit (see `units.RestoreRequest`). ``ranks``: launches, with the pids in the
        unit; 0 for one that is the root. Blocks for as long as that takes. Raises LauncherError(RESTORE)."""
        wanted = [{"launch": dict(launch), "pid": pid} for launch, pid in ranks]
        fields = {"ranks": wanted, "command": list(command), "files": dict(files), "pid_file": pid_file}
        # By a connection of its own: other calls do not wait for it, and the time for their answers is not its own.
        with Launcher(self._path, _RESTORE_S, self.uid) as own:
            return _tree(own._call("restore", **fields))

    def store(self, directory: str, host: str) -> int:
        """Start (or find) the rendezvous store of an epoch, and return its port, which takes connections already;
        rendezvous.json appears in ``directory``."""
        port = self._call("store", directory=directory, host=host).get("port")
        if not isinstance(port, int):
            raise _garbled(f"a store at port {port!r}")
        return port

    def arena(self, name: str, size: int = 0) -> int:
        """Return a descriptor of an arena, the caller's to close; made if there is none and ``size`` is given."""
        with self._lock:
            self._exchange("arena", name=name, bytes=size)
            if not self._descriptors:
                raise _garbled("no arena")
            found = self._descriptors.pop()
        # A file that could be cut short, or never answer, is none.
        if is_sealed(found):
            return found
        os.close(found)
        raise _garbled("a file that is no arena")

    def drop_arena(self, name: str) -> None:
        self._call("drop_arena", name=name)

    def publish(self, temporary: str, final: str, manifest: Mapping[str, Any]) -> None:
        """Make a checkpoint exist (see `publish.publish`); durable when this returns."""
        self._call("publish", temporary=temporary, final=final, manifest=dict(manifest))

    def list(self) -> list[dict[str, Any]]:
        """Return its children: name, kind (rank, store, helper), pid, start_ticks, adopted."""
        children = self._call("list").get("children")
        if not isinstance(children, list) or not all(isinstance(one, dict) for one in children):
            raise _garbled("no list of children")
        for one in children:
            _process(one)
            if not isinstance(one.get("name"), str) or not isinstance(one.get("kind"), str):
                raise _garbled(f"a child without name or kind: {one!r}")
        return children

    def adopt(
        self,
        name: str,
        pid: int,
        start_ticks: int,
        *,
        page: str,
        exit_path: str,
        arena_name: str | None = None,
        freezer: str = "",
        cgroup_procs: Sequence[str] = (),
    ) -> bool:
        """Look after a rank another launcher started; False if it has ended (its exit record is written then)."""
        arena = None if arena_name is None else {"name": arena_name}
        answer = self._call(
            "adopt",
            name=name,
            pid=pid,
            start_ticks=start_ticks,
            page=page,
            exit_path=exit_path,
            arena=arena,
            freezer=freezer,
            cgroup_procs=list(cgroup_procs),
        )
        return bool(answer.get("alive"))

    def stop(self) -> None:
        """End the launcher; LauncherError(BUSY) while it has ranks."""
        self._call("stop")

    def _call(self, operation: str, **fields: Any) -> dict[str, Any]:
        with self._lock:
            return self._exchange(operation, **fields)

    def _exchange(self, operation: str, **fields: Any) -> dict[str, Any]:
        deadline = time.monotonic() + self._timeout
        number = self._send(operation, **fields)
        while True:
            answer = self._read(deadline)
            if answer.get("id") == number:
                return _checked(answer)

    def _send(self, operation: str, **fields: Any) -> int:
        self._number += 1
        while self._descriptors:
            os.close(self._descriptors.pop())  # of an answer that came too late for its caller
        data = json.dumps({"id": self._number, "op": operation, **fields}).encode() + b"\n"
        try:
            self._connection.settimeout(self._timeout)
            self._connection.sendall(data)
        except OSError as error:
            raise LauncherError("UNREACHABLE", f"the launcher is gone: {os_reason(error)}") from error
        return self._number

    def _read(self, deadline: float) -> dict[str, Any]:
        """Return the next answer, to whichever request. ``deadline``: as of ``time.monotonic``."""
        while True:
            # also with lines at hand: a launcher could send them for ever
            self._allow_until(deadline)
            if b"\n" in self._received:
                break
            space = socket.CMSG_SPACE(4)
            try:
                data, rights, _, _ = self._connection.recvmsg(1 << 16, space, socket.MSG_CMSG_CLOEXEC)
            except socket.timeout as error:  # TimeoutError itself from Python 3.10 on
                raise LauncherError("TIMEOUT", "the launcher does not answer in time") from error
            except OSError as error:
                raise LauncherError("UNREACHABLE", f"the launcher is gone: {os_reason(error)}") from error
            if not data:
                raise LauncherError("UNREACHABLE", "the launcher is gone")
            for _, kind, content in rights:
                if kind == socket.SCM_RIGHTS:
                    numbers = array.array("i")
                    numbers.frombytes(content[: len(content) - len(content) % numbers.itemsize])
                    self._descriptors.extend(numbers)
            while len(self._descriptors) > 1:
                os.close(self._descriptors.pop(0))  # an answer brings one
            self._received += data
            if len(self._received) > _ANSWER_BYTES:
                raise _garbled(f"more than {_ANSWER_BYTES} bytes")
        line, _, self._received = self._received.partition(b"\n")
        try:
            message = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise _garbled(f"no JSON: {str(error)[:200]}") from error
        if not isinstance(message, dict):
            raise _garbled("no answer")
        return message

    def _allow_until(self, deadline: float) -> None:
        """Give the next receive the time that is left. Raises LauncherError(TIMEOUT) if none is."""
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise LauncherError("TIMEOUT", "the launcher does not answer in time")
        self._connection.settimeout(left_s)


def _tree(answer: Mapping[str, Any]) -> ForkedTree:
    ranks = [_process(one) for one in answer["ranks"]]
    return ForkedTree(_process(answer), ranks, int(answer.get("port", 0)))


def _checked(answer: dict[str, Any]) -> dict[str, Any]:
    error = answer.get("error")
    if error:
        fields = error if isinstance(error, dict) else {}
        raise LauncherError(str(fields.get("reason", "GARBLED"))[:100], str(fields.get("message", error))[:_MESSAGE])
    return answer


def _process(answer: Mapping[str, Any]) -> ProcessId:
    """Return the process of an answer. Raises LauncherError: a launcher of another account may answer anything."""
    pid, ticks = answer.get("pid"), answer.get("start_ticks")
    if isinstance(pid, int) and isinstance(ticks, int) and 0 <= pid < 1 << 31 and 0 <= ticks < 1 << 62:
        return ProcessId(pid, ticks)
    raise _garbled(f"a process {str((pid, ticks))[:200]}")


def _garbled(what: str) -> LauncherError:
    return LauncherError("GARBLED", f"the launcher has answered with {what}")


def _answers(socket_path: str, timeout: float, uid: int | None) -> bool:
    try:
        with Launcher(socket_path, max(timeout, 0.1), uid) as launcher:
            launcher.info()
    except LauncherError:
        return False
    return True


def _tail(path: str) -> str:
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 2000))
            return file.read().decode(errors="replace").strip() or "its log is empty"
    except OSError as error:
        return os_failure(error)
