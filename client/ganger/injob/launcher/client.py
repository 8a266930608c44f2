"""The daemon's side of a launcher: start one, send requests. Blocking; for threads."""

from __future__ import annotations

import array
import json
import os
import socket
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ganger.injob.launcher.process_record import LAUNCHER_BLAS_THREADS
from ganger.injob.process_identity import ProcessId, peer_of

# Longest restore of a process image: all of its memory is read back.
_RESTORE_S = 3600.0


class LauncherError(Exception):
    """The launcher refused, or cannot be reached (reason UNREACHABLE, TIMEOUT); ``reason`` is stable."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class ForkedTree(NamedTuple):
    """Ranks and their common parent; one rank alone is ``root`` itself. ``port``: of the rendezvous store beside them,
    0 without one."""

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
) -> None:
    """Start a launcher that outlives this process, unless one serves ``socket_path`` already; return when it answers.

    ``env`` is the user's environment (see `launch.startup_variables` for what must agree with that of the ranks).
    Raises LauncherError(NOT_STARTED) with the end of ``log``."""
    if _answers(socket_path, timeout):
        return
    environment = _launcher_environment(env, inject)
    command = [python, "-m", "ganger.injob.launcher", "--socket", socket_path, "--idle-s", str(idle_s)]
    if not preload:
        command.append("--no-preload")

    def spawn() -> subprocess.Popen[bytes]:
        with open(log, "ab") as output:
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
        if _answers(socket_path, deadline - time.monotonic()):
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
    process.kill()
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

    def __init__(self, socket_path: str, timeout: float = 30.0) -> None:
        """Raises LauncherError, also for a launcher of another user than this process's own."""
        self._path = socket_path
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
            raise LauncherError("UNREACHABLE", f"no launcher at {socket_path}: {error}") from error
        # It is about to be given the environments of jobs.
        if peer.uid != os.geteuid():
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
        answer = self._call("fork", launch=dict(launch))
        return ProcessId(answer["pid"], answer["start_ticks"])

    def fork_all(self, launches: Sequence[Mapping[str, Any]]) -> list[ProcessId]:
        """Start several ranks at once, in the time of one. Raises LauncherError for the first that was refused, once
        all have been answered."""
        with self._lock:
            numbers = [self._send("fork", launch=dict(launch)) for launch in launches]
            answers: dict[int, dict[str, Any]] = {}
            while len(answers) < len(numbers):
                answer = self._read()
                if answer.get("id") in numbers:
                    answers[answer["id"]] = answer
        found = [_checked(answers[number]) for number in numbers]
        return [ProcessId(answer["pid"], answer["start_ticks"]) for answer in found]

    def fork_together(self, launches: Sequence[Mapping[str, Any]], store_host: str = "") -> ForkedTree:
        """Start several ranks below one parent, so that one process image can have all of them. ``store_host``: the
        address of a rendezvous store beside them, whose port they get as MASTER_PORT. Raises LauncherError for the
        first rank that was refused, once all are settled."""
        launched = [dict(launch) for launch in launches]
        return _tree(self._call("fork_together", launches=launched, store_host=store_host))

    def make_unit(self, fields: Mapping[str, Any]) -> ProcessId:
        """Start a unit (see `namespaces.Unit`; besides ``cgroup_procs``) and return its init. Raises LauncherError."""
        answer = self._call("unit", unit=dict(fields))
        return ProcessId(answer["pid"], answer["start_ticks"])

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
        with Launcher(self._path, _RESTORE_S) as own:
            return _tree(own._call("restore", **fields))

    def store(self, directory: str, host: str) -> int:
        """Start (or find) the rendezvous store of an epoch, and return its port, which takes connections already;
        rendezvous.json appears in ``directory``."""
        return int(self._call("store", directory=directory, host=host)["port"])

    def arena(self, name: str, size: int = 0) -> int:
        """Return a descriptor of an arena, the caller's to close; made if there is none and ``size`` is given."""
        with self._lock:
            self._exchange("arena", name=name, bytes=size)
            return self._descriptors.pop()

    def drop_arena(self, name: str) -> None:
        self._call("drop_arena", name=name)

    def publish(self, temporary: str, final: str, manifest: Mapping[str, Any]) -> None:
        """Make a checkpoint exist (see `publish.publish`); durable when this returns."""
        self._call("publish", temporary=temporary, final=final, manifest=dict(manifest))

    def list(self) -> list[dict[str, Any]]:
        """Return its children: name, kind (rank, store, helper), pid, start_ticks, adopted."""
        children: list[dict[str, Any]] = self._call("list")["children"]
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
        return bool(answer["alive"])

    def stop(self) -> None:
        """End the launcher; LauncherError(BUSY) while it has ranks."""
        self._call("stop")

    def _call(self, operation: str, **fields: Any) -> dict[str, Any]:
        with self._lock:
            return self._exchange(operation, **fields)

    def _exchange(self, operation: str, **fields: Any) -> dict[str, Any]:
        number = self._send(operation, **fields)
        while True:
            answer = self._read()
            if answer.get("id") == number:
                return _checked(answer)

    def _send(self, operation: str, **fields: Any) -> int:
        self._number += 1
        while self._descriptors:
            os.close(self._descriptors.pop())  # of an answer that came too late for its caller
        data = json.dumps({"id": self._number, "op": operation, **fields}).encode() + b"\n"
        try:
            self._connection.sendall(data)
        except OSError as error:
            raise LauncherError("UNREACHABLE", f"the launcher is gone: {error}") from error
        return self._number

    def _read(self) -> dict[str, Any]:
        while b"\n" not in self._received:
            space = socket.CMSG_SPACE(4)
            try:
                data, rights, _, _ = self._connection.recvmsg(1 << 16, space, socket.MSG_CMSG_CLOEXEC)
            except socket.timeout as error:  # TimeoutError itself from Python 3.10 on
                raise LauncherError("TIMEOUT", "the launcher does not answer in time") from error
            except OSError as error:
                raise LauncherError("UNREACHABLE", f"the launcher is gone: {error}") from error
            if not data:
                raise LauncherError("UNREACHABLE", "the launcher is gone")
            for _, kind, content in rights:
                if kind == socket.SCM_RIGHTS:
                    numbers = array.array("i")
                    numbers.frombytes(content[: len(content) - len(content) % numbers.itemsize])
                    self._descriptors.extend(numbers)
            self._received += data
        line, _, self._received = self._received.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message


def _tree(answer: Mapping[str, Any]) -> ForkedTree:
    ranks = [ProcessId(one["pid"], one["start_ticks"]) for one in answer["ranks"]]
    return ForkedTree(ProcessId(answer["pid"], answer["start_ticks"]), ranks, int(answer.get("port", 0)))


def _checked(answer: dict[str, Any]) -> dict[str, Any]:
    if answer.get("error"):
        raise LauncherError(answer["error"]["reason"], answer["error"]["message"])
    return answer


def _answers(socket_path: str, timeout: float) -> bool:
    try:
        with Launcher(socket_path, max(timeout, 0.1)) as launcher:
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
        return str(error)
