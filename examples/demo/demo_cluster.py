"""A real cluster on this machine for as long as the demo lasts: one master, some daemons with virtual devices, all as
programs of their own, as `ganger up` and an operator start them."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ganger.client import Client
from ganger.v1 import node_pb2

START_S = 60.0
STOP_SECONDS = 10.0
GANGER = (sys.executable, "-m", "ganger.cli.main")


class DemoClusterError(Exception):
    """The cluster did not start, or lost a program; the text has the end of its log."""


class DemoCluster:
    """`nodes` daemons of `gpus` virtual devices each. `keep`: its directory, with all logs, stays."""

    def __init__(
        self, nodes: int = 2, gpus: int = 4, topology: str = "2x2", cores: int = 8, *, keep: bool = False
    ) -> None:
        self.keep = keep
        self.directory = Path(tempfile.mkdtemp(prefix="ganger-demo-"))
        shared = Path("/dev/shm")
        # Pages belong on a tmpfs, and a socket's path has to be short.
        self._run = Path(tempfile.mkdtemp(prefix="ganger-demo-", dir=shared if os.access(shared, os.W_OK) else None))
        self.master_directory = self.directory / "master"
        self._names = [f"n{number + 1}" for number in range(nodes)]
        self._options = [
            *("--virtual-gpus", str(gpus)),
            *("--topology", topology),
            *("--virtual-cores", str(cores)),
            *("--virtual-memory", "16G"),
        ]
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> DemoCluster:
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *reason: object) -> None:
        self.stop()

    def client(self) -> Client:
        return Client(str(self.master_directory))

    def trouble(self) -> str:
        """Which program has ended, with the end of its log; empty while all run."""
        for name, process in self._processes.items():
            if process.poll() is not None:
                return f"{name} ended with code {process.returncode}:\n{self.log(name)}"
        return ""

    def log(self, name: str, characters: int = 3000) -> str:
        try:
            return (self.directory / f"{name}.log").read_text(errors="replace")[-characters:]
        except OSError:
            return ""

    def stop(self) -> None:
        """Ends the programs and every process they left (launchers and ranks outlive their daemons by design), and
        removes their groups. An interrupt has to wait for it."""
        with _uninterrupted():
            self._stop()

    def _stop(self) -> None:
        for process in self._processes.values():
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in self._processes.values():
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for pid in self._survivors():
            try:
                os.kill(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue
        self._processes.clear()
        _remove_groups(self._groups())
        shutil.rmtree(self._run, ignore_errors=True)

    def remove(self) -> None:
        """The last thing to do, when nothing writes into its directory any more."""
        with _uninterrupted():
            shutil.rmtree(self._run, ignore_errors=True)
            if not self.keep:
                shutil.rmtree(self.directory, ignore_errors=True)

    def _start(self) -> None:
        storage = self.directory / "storage"
        storage.mkdir()
        self._spawn("master", ["master", "--state-dir", str(self.master_directory), "--storage", str(storage)])
        self._until(lambda: (self.master_directory / "endpoint.json").exists(), "the master serves")
        for name in self._names:
            self._spawn(
                name,
                [
                    "daemon",
                    *("--node", name),
                    *("--master", str(self.master_directory)),
                    *("--state-dir", str(self.directory / name)),
                    *("--run-dir", str(self._run / name)),
                    *self._options,
                ],
            )
        with self.client() as client:
            self._until(lambda: _ready(client) == len(self._names), "all nodes are ready")

    def _spawn(self, name: str, arguments: list[str]) -> None:
        with (self.directory / f"{name}.log").open("wb") as log:
            self._processes[name] = subprocess.Popen(
                [*GANGER, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # A terminal's interrupt goes to the demo, which then stops them in order.
                start_new_session=True,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
            )

    def _until(self, holds: object, what: str) -> None:
        assert callable(holds)
        deadline = time.monotonic() + START_S
        while not holds():
            if trouble := self.trouble():
                raise DemoClusterError(trouble)
            if time.monotonic() > deadline:
                logs = "\n".join(f"-- {name}\n{self.log(name, 1000)}" for name in self._processes)
                raise DemoClusterError(f"not within {START_S:g} s: {what}\n{logs}")
            time.sleep(0.05)

    def _groups(self) -> list[str]:
        """Names of the daemons' cgroups."""
        found = []
        for name in self._names:
            with suppress(OSError, ValueError, KeyError):
                found.append(str(json.loads((self.directory / name / "node.json").read_text())["cgroup"]))
        return found

    def _survivors(self) -> list[int]:
        """Processes whose command line or environment names the demo's directories."""
        marks = (os.fsencode(self.directory), os.fsencode(self._run))
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == os.getpid():
                continue
            try:
                text = (entry / "environ").read_bytes() + (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if any(mark in text for mark in marks):
                found.append(int(entry.name))
        return found


@contextmanager
def _uninterrupted() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _remove_groups(names: list[str]) -> None:
    """The cgroups of daemons that could not tidy up: empty now, for all their processes have ended."""
    roots = [found for hierarchy in _hierarchies() for name in names for found in hierarchy.glob(f"**/{name}")]
    deadline = time.monotonic() + STOP_SECONDS
    for root in roots:
        groups = sorted((path for path in root.glob("**/") if path.is_dir()), reverse=True)
        for group in groups:
            while True:
                try:
                    group.rmdir()
                except OSError as problem:
                    # A killed process leaves its group some time after it can no longer be seen.
                    if problem.errno == errno.EBUSY and time.monotonic() < deadline:
                        time.sleep(0.01)
                        continue
                break


def _hierarchies() -> list[Path]:
    """Where the kernel's groups are mounted."""
    try:
        lines = Path("/proc/self/mounts").read_text().splitlines()
    except OSError:
        return []
    return [Path(words[1]) for words in map(str.split, lines) if words[2] in ("cgroup", "cgroup2")]


def _ready(client: Client) -> int:
    return sum(node.state == node_pb2.Node.STATE_READY for node in client.list_nodes().nodes)
