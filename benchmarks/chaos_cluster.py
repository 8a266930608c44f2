"""The cluster of `ganger bench chaos`: finds its victims, kills and stops them, and restarts what a unit restarts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Final

import sqlalchemy
from ganger.console import ExitCode
from ganger.injob.process_identity import start_ticks, stat_fields

from benchmarks import victims
from benchmarks.bench_cluster import GANGER, names_one_of
from benchmarks.chaos_plan import WEIGHTS, ChaosEvent
from benchmarks.master_pair import MasterPair
from benchmarks.victims import Victim
from benchmarks.witnesses import Death

# As in the units that `ganger unit` prints.
_RESTART_AFTER_S: Final = 1.0
_TICK_S: Final = 0.05
_CGROUPS: Final = Path("/sys/fs/cgroup")
# Rows that exist only while a job holds GPUs or is time-sliced.
_TABLES: Final = ("gangs", "node_sets")


class ChaosCluster(MasterPair):
    """Two masters and daemons, parts of which die. `commands`: the command lines of users that run at present."""

    def __init__(self, nodes: int, gpus: int, policy: Sequence[str]) -> None:
        settings = {
            # Ranks are killed over and over, and their jobs are not to wait for it.
            "GANGER_MASTER_RESTART_DELAY": "0",
            "GANGER_MASTER_FINISHED_JOBS_LIMIT": "100000",
        }
        super().__init__(nodes=nodes, gpus=gpus, cores=4 * gpus, memory="32G", policy=policy, settings=settings)
        self._gpus = gpus
        # Logs of users' job schedulers go there.
        self._environment["XDG_STATE_HOME"] = str(self.directory / "state")
        self.commands: list[subprocess.Popen[bytes]] = []

    # -- victims

    def victims_of(self, part: str) -> list[Victim]:
        """Return the processes of a part of the cluster that run now."""
        if part == "rank":
            return victims.ranks(self._run)
        if part == "launcher":
            return victims.launchers(self._run)
        return [Victim(part, pid, ticks) for pid in self._process_ids(part) if (ticks := start_ticks(pid) or 0)]

    def _process_ids(self, part: str) -> list[int]:
        if part == "daemon":
            return [process.pid for process in self._processes.values() if process.poll() is None]
        if part == "command":
            return [process.pid for process in self.commands if process.poll() is None]
        leading = self.leading()
        masters = {number: process.pid for number, process in enumerate(self.masters) if process is not None}
        if part in ("leader", "stand-by"):
            return [pid for number, pid in masters.items() if (number in leading) == (part == "leader")]
        children = [child for number in leading for child in _children(masters[number])]
        if part == "planner":
            return [pid for pid in children if b"planner_process" in _command(pid)]
        return [*(pid for pid in children if b"scheduling.host" in _command(pid)), *self._own_schedulers()]

    def _own_schedulers(self) -> list[int]:
        marks = (os.fsencode(self.directory),)
        return [
            int(entry.name)
            for entry in Path("/proc").iterdir()
            if entry.name.isdigit()
            and b"\0scheduler\0run\0" in _command(int(entry.name))
            and names_one_of(entry, marks)
        ]

    def begin(self, words: Sequence[str], output: BinaryIO, errors: BinaryIO) -> subprocess.Popen[bytes]:
        """Start `ganger` with these words, as a user in the cluster's directory does."""
        process = subprocess.Popen(
            [*GANGER, *words],
            cwd=self.directory,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
        )
        self.commands = [*(one for one in self.commands if one.poll() is None), process]
        return process

    # -- restarts

    def ended_programs(self) -> list[tuple[str, int]]:
        """Return the names and exit codes of masters and daemons that have ended."""
        found = [(name, process.poll()) for name, process in self._processes.items()]
        found += [(f"m{number}", p.poll()) for number, p in enumerate(self.masters) if p is not None]
        return [(name, code) for name, code in found if code is not None]

    def restart(self, name: str) -> None:
        """Start a master ("m0", "m1") or the daemon of a node again."""
        if name in self._processes:
            self.start_daemon(name)
        else:
            self.start_master(int(name.removeprefix("m")))

    # -- what is left

    def leftovers(self) -> list[str]:
        """Return what is there of jobs although all have ended: files of gangs, processes, cgroups and rows."""
        found = [f"file {path}" for path in self._run.glob("*/*-*-*-*-*/*")]
        found += self._held_gpus()
        found += [f"file {path}" for name in self._nodes for path in (self.directory / name).glob("jobs/*/*")]
        found += [f"process {pid}: {_command(pid)!r}" for pid in self._unknown_processes()]
        found += [f"cgroup {path}" for root in self.cgroups() for path in root.glob("*-*-*-*-*")]
        engine = sqlalchemy.create_engine(self.database.url)
        with engine.connect() as connection:
            for table in _TABLES:
                rows = connection.execute(sqlalchemy.text(f"SELECT key FROM {table}")).fetchall()
                found += [f"row {row[0]} of table {table}" for row in rows]
        engine.dispose()
        return found

    def _held_gpus(self) -> list[str]:
        nodes = json.loads(self.ganger("nodes", "--json"))["nodes"]
        free = {node["name"]: int(node["view_entry"].get("free_mask", 0)).bit_count() for node in nodes}
        return [f"{name} has {count} free GPUs of {self._gpus}" for name, count in free.items() if count < self._gpus]

    def cgroups(self) -> list[Path]:
        """Return the roots of the cgroups of all nodes that there are."""
        names = [json.loads((self.directory / name / "node.json").read_text())["cgroup"] for name in self._nodes]
        return [root for name in names for root in (*_CGROUPS.glob(name), *_CGROUPS.glob(f"*/{name}"))]

    def _unknown_processes(self) -> list[int]:
        """Return the processes of this cluster that are no master, daemon, launcher, command or child of one."""
        known = {os.getpid(), *self._process_ids("daemon"), *self._process_ids("command")}
        known |= {process.pid for process in self.masters if process is not None}
        launchers = {one.pid for one in victims.launchers(self._run)}
        # Each has a reaper as its parent, which has lost its own if the daemon was killed.
        known |= launchers | {parent for pid in launchers if (parent := _parent(pid)) > 1}
        known |= {child for pid in list(known) if pid != os.getpid() for child in _children(pid)}
        known -= victims.of_jobs(self._run)
        return [pid for pid in self._named(self.directory, self._run) if pid not in known]

    @staticmethod
    def _named(*directories: Path) -> list[int]:
        """Return the processes whose environment or command names one of the directories."""
        marks = tuple(os.fsencode(directory) for directory in directories)
        numbered = [entry for entry in Path("/proc").iterdir() if entry.name.isdigit()]
        return [int(entry.name) for entry in numbered if names_one_of(entry, marks)]

    def tail(self, lines: int = 30) -> str:
        """Return the last lines of all logs of masters and daemons."""
        logs = sorted(self.directory.glob("*-*.log"))
        return "\n".join(
            f"-- {log.name}\n" + "\n".join(log.read_text(errors="replace").splitlines()[-lines:]) for log in logs
        )


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _parent(pid: int) -> int:
    fields = stat_fields(pid)
    return int(fields[1]) if fields else 0


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


@dataclass
class Killer:
    """A thread that carries out a schedule from `start` to `calm`, and until `end` restarts the programs that ended.

    `kills`, `pauses`: how often, by part; `missed`: kinds of victims of which none was there; `deaths`: of ranks, by
    the uid of their job; `findings`: programs that ended without a signal; `story`: what happened, in order."""

    cluster: ChaosCluster
    events: Sequence[ChaosEvent]
    kills: Counter[str] = field(default_factory=Counter)
    pauses: Counter[str] = field(default_factory=Counter)
    missed: Counter[str] = field(default_factory=Counter)
    deaths: list[Death] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)
    story: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._began = time.monotonic()
        self._is_over = threading.Event()
        self._is_ended = threading.Event()
        self._stopped: list[tuple[float, Victim]] = []
        self._ended_at: dict[str, float] = {}
        self._thread = threading.Thread(target=self._work, name="killer")

    @property
    def elapsed_s(self) -> float:
        """Return the seconds since the start."""
        return time.monotonic() - self._began

    def start(self) -> None:
        """Begin the schedule."""
        self._began = time.monotonic()
        self._thread.start()

    def calm(self) -> None:
        """End the kills, and continue what is stopped. Programs are still restarted."""
        self._is_over.set()

    def end(self) -> None:
        """End the thread: programs are not restarted any more."""
        self._is_over.set()
        self._is_ended.set()
        self._thread.join()

    def _work(self) -> None:
        due = list(self.events)
        while not self._is_ended.wait(_TICK_S):
            try:
                self._tick(due)
            except Exception as error:
                self.findings.append(f"the killer itself failed: {error!r}")
                self.note(f"failed: {error!r}")

    def _tick(self, due: list[ChaosEvent]) -> None:
        now = time.monotonic()
        for until, victim in list(self._stopped):
            if now >= until or self._is_over.is_set():
                self._stopped.remove((until, victim))
                victim.signal(signal.SIGCONT)
                self.note(f"continued: {victim.what} {victim.pid}")
        self._restart(now)
        if due and now - self._began >= due[0].at_s and not self._is_over.is_set():
            self._strike(due.pop(0))

    def _restart(self, now: float) -> None:
        for name, code in self.cluster.ended_programs():
            since = self._ended_at.setdefault(name, now)
            if now == since and code not in (-signal.SIGKILL, ExitCode.LEASE_LOST):
                self.findings.append(f"{name} ended by itself with {code}: {self.cluster.tail(15)}")
            if now - since >= _RESTART_AFTER_S:
                del self._ended_at[name]
                self.cluster.restart(name)
                self.note(f"started: {name}")

    def _strike(self, event: ChaosEvent) -> None:
        """Kill or stop the victim, or, where its kind has none at present, one of the next kind that has."""
        parts = list(WEIGHTS)
        at = parts.index(event.part)
        for part in (*parts[at:], *parts[:at]):
            stopped = {one.pid for _, one in self._stopped}
            there = [one for one in self.cluster.victims_of(part) if one.pid not in stopped]
            if there:
                self._hit(event, part, there[min(len(there) - 1, int(event.draw * len(there)))])
                return
            self.missed[part] += 1

    def _hit(self, event: ChaosEvent, part: str, victim: Victim) -> None:
        storage = self.cluster.directory / "storage"
        saved = victims.newest_checkpoint(storage, victim.uid) if victim.uid else 0
        if not victim.signal(signal.SIGSTOP if event.pause_s else signal.SIGKILL):
            self.missed[part] += 1
            return
        if event.pause_s:
            self._stopped.append((time.monotonic() + event.pause_s, victim))
            self.pauses[part] += 1
        else:
            self.kills[part] += 1
            if part == "rank":
                self.deaths.append(Death(victim.uid, time.monotonic_ns(), saved))
        how = f"stopped for {event.pause_s:.1f} s" if event.pause_s else "killed"
        self.note(f"{how}: {part} {victim.pid} {victim.what} {victim.uid}")

    def note(self, what: str) -> None:
        """Add a line to `story`, with the seconds since the start."""
        self.story.append(f"{time.monotonic() - self._began:8.2f}  {what}")
