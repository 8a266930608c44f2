"""A small cluster of its own for a benchmark: real programs, files in directories that go with it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

START_S = 90.0
# What a master prints once it serves, before its address.
READY = "ganger master ready at "
GANGER = (sys.executable, "-m", "ganger.cli.main")
_PAGE = "rank-0.page"


class BenchClusterError(Exception):
    """What was to be measured did not happen; the text says where it stood."""


class BenchCluster:
    """A master and daemons on this machine, as programs; nothing of them is left afterwards. `gpus`: virtual ones of
    each node, of `cores` and `memory`; None for the machine's own devices, of which every node then has all. `master`,
    `daemon`: further options of theirs. `is_run_in_memory`: no images of processes are taken of jobs whose run
    directory is in shared memory."""

    def __init__(
        self,
        *,
        nodes: int,
        gpus: int | None,
        cores: int = 0,
        memory: str = "8G",
        master: Sequence[str] = (),
        daemon: Sequence[str] = (),
        is_run_in_memory: bool = True,
    ) -> None:
        self._nodes = [f"n{number}" for number in range(1, nodes + 1)]
        self._devices: tuple[str, ...] = ()
        if gpus is not None:
            self._devices = ("--virtual-gpus", str(gpus), "--virtual-cores", str(cores), "--virtual-memory", memory)
        self._master_options, self._daemon_options = tuple(master), tuple(daemon)
        self.directory = Path(tempfile.mkdtemp(prefix="ganger-bench-"))
        shared = "/dev/shm" if is_run_in_memory and os.access("/dev/shm", os.W_OK) else None
        self._run = Path(tempfile.mkdtemp(prefix="ganger-bench-", dir=shared))
        self.master = self.directory / "master"
        # The master and the daemons, by name.
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._environment = {**os.environ, "GANGER_MASTER": str(self.master), "PYTHONUNBUFFERED": "1"}

    def __enter__(self) -> Self:
        # SIGTERM to the benchmark also ends what it started
        self._before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        try:
            (self.directory / "storage").mkdir()
            self._start_master()
            for name in self._nodes:
                self.start_daemon(name)
            self.until(self._are_ready, START_S, "every node is ready")
        except BaseException:
            self.stop()
            raise
        return self

    def start_daemon(self, name: str) -> None:
        """Start the daemon of a node, also in place of one that has ended."""
        self._spawn(
            name,
            *("daemon", "--node", name, "--master", str(self.master)),
            *("--state-dir", str(self.directory / name), "--run-dir", str(self._run / name)),
            *self._devices,
            *self._daemon_options,
        )

    def _start_master(self) -> None:
        self._spawn(
            "master",
            "master",
            *("--state-dir", str(self.master), "--storage", str(self.directory / "storage")),
            *self._master_options,
        )
        self.until((self.master / "endpoint.json").exists, START_S, "the master serves")

    def __exit__(self, *reason: object) -> None:
        self.stop()

    def ganger(self, *arguments: str) -> str:
        """What the command prints. Raises ClusterError with what it complained of."""
        done = subprocess.run(
            [*GANGER, *arguments], env=self._environment, capture_output=True, text=True, timeout=60, check=False
        )
        if done.returncode:
            raise BenchClusterError(f"ganger {arguments[0]}: {done.stderr.strip() or done.stdout.strip()}")
        return done.stdout

    def program_ids(self) -> dict[str, int]:
        """Return the process ids of the master and of the processes that it has started, by name."""
        master = self._processes["master"].pid
        found = {"master": master}
        for child in Path(f"/proc/{master}/task/{master}/children").read_text().split():
            command = Path(f"/proc/{child}/cmdline").read_bytes()
            name = "planner" if b"planner_process" in command else "scheduler_host"
            found[name] = int(child)
        return found

    def pages(self) -> dict[str, Path]:
        """The control pages there are, by "JOB/EPOCH"."""
        # A directory may go while it is looked through, which a walk takes for empty.
        found = sorted(Path(where) / _PAGE for where, _, names in os.walk(self._run) if _PAGE in names)
        return {"/".join(path.relative_to(self._run).parts[1:-1]): path for path in found}

    def until(self, holds: Callable[[], bool], seconds: float, what: str) -> None:
        deadline = time.monotonic() + seconds
        while not holds():
            for process in self._processes.values():
                if process.poll() is not None:
                    raise BenchClusterError(f"a program of the cluster ended:\n{self._logs()}")
            if time.monotonic() > deadline:
                raise BenchClusterError(f"not within {seconds:g} s: {what}\n{self._logs()}")
            time.sleep(0.01)

    def stop(self) -> None:
        signal.signal(signal.SIGTERM, self._before)
        for process in self._processes.values():
            process.send_signal(signal.SIGTERM)
        for process in self._processes.values():
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        marks = (os.fsencode(self.directory), os.fsencode(self._run))
        for entry in Path("/proc").iterdir():
            # Launchers and ranks outlive their daemons by design.
            if entry.name.isdigit() and int(entry.name) != os.getpid() and names_one_of(entry, marks):
                try:
                    os.kill(int(entry.name), signal.SIGKILL)
                except ProcessLookupError:
                    continue
        shutil.rmtree(self._run, ignore_errors=True)
        shutil.rmtree(self.directory, ignore_errors=True)

    def _spawn(self, name: str, *arguments: str) -> None:
        with (self.directory / f"program-{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                [*GANGER, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=self._environment,
            )

    def _are_ready(self) -> bool:
        nodes = json.loads(self.ganger("nodes", "--json"))["nodes"]
        return sum(str(node["state"]).removeprefix("STATE_") == "READY" for node in nodes) == len(self._nodes)

    def logs(self) -> list[Path]:
        """Of its master and daemons."""
        return sorted(self.directory.glob("program-*.log"))

    def _logs(self) -> str:
        return "\n".join(f"-- {log.name}\n{log.read_text(errors='replace')[-1500:]}" for log in self.logs())


def names_one_of(process: Path, marks: tuple[bytes, ...]) -> bool:
    try:
        text = (process / "environ").read_bytes() + (process / "cmdline").read_bytes()
    except OSError:
        return False
    return any(mark in text for mark in marks)


def used_s(pid: int) -> float:
    """Return the processor seconds of a process so far, in user and kernel mode."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
