"""The re-pin of `ganger bench boundary`: how long new cores take, and whether the very next step runs there."""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import struct
import time
from pathlib import Path

from ganger_daemon.cgroups.contract import Cgroups
from ganger_daemon.cgroups.group_tree import choose_cgroups

from benchmarks.report import BenchReport, quantile

REPIN_LIMIT_MS = 1.0
STEP_S = 0.001
WAIT_S = 20.0
NOTE = struct.Struct("<QQ")
"""Of the newest step: its number, and the CPU its end ran on."""


def measure_repin(report: BenchReport, rounds: int) -> None:
    """Moves a process that computes step after step between two CPUs; skipped, and said, where it cannot."""
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2:
        report.say("re-pin is skipped: one CPU only")
        return
    cgroups = choose_cgroups(root=f"ganger-bench-{os.getpid()}")
    group = "repin"
    cgroups.create(group)
    try:
        if not cgroups.set_cpus(group, cpus[:1]):
            report.say(f"re-pin is skipped: no cpuset here ({dict(cgroups.capabilities)})")
            return
        _measure(report, cgroups, group, cpus[:2], rounds)
    finally:
        cgroups.kill(group)
        cgroups.destroy(group)
        tidy = getattr(cgroups, "tidy", None)
        if tidy is not None:
            tidy()


def _measure(report: BenchReport, cgroups: Cgroups, group: str, cpus: list[int], rounds: int) -> None:
    report.say(f"re-pin, {rounds} times between CPUs {cpus[0]} and {cpus[1]}")
    notes = mmap.mmap(-1, mmap.PAGESIZE)
    pid = os.fork()
    if pid == 0:
        try:
            _train(notes, cgroups.join_files(group))
        finally:
            os._exit(1)
    try:
        cgroups.track(group, pid)
        _step_after(notes, 0)
        took, elsewhere = [], 0
        for number in range(rounds):
            cpu = cpus[(number + 1) % 2]
            began = time.perf_counter_ns()
            cgroups.set_cpus(group, (cpu,))
            took.append((time.perf_counter_ns() - began) / 1e6)
            # The step under way may end where it began; the one after it may not.
            elsewhere += _step_after(notes, NOTE.unpack_from(notes)[0] + 1) != cpu
        report.samples({"repin_milliseconds": value} for value in took)
        report.at_most("repin_p50_milliseconds", quantile(took, 0.5), REPIN_LIMIT_MS)
        report.figure("repin_p99_milliseconds", quantile(took, 0.99))
        report.at_most("repin_boundaries_on_old_cores", elsewhere, 0)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        notes.close()


def _train(notes: mmap.mmap, join_files: tuple[str, ...]) -> None:
    for file in join_files:
        Path(file).write_bytes(b"0")
    where = ctypes.CDLL(None).sched_getcpu
    step = 0
    while True:
        ends = time.process_time() + STEP_S
        while time.process_time() < ends:
            pass
        step += 1
        NOTE.pack_into(notes, 0, step, where())


def _step_after(notes: mmap.mmap, step: int) -> int:
    """The CPU of the first step past `step` that is seen. Raises TimeoutError."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        number, cpu = NOTE.unpack_from(notes)
        if number > step:
            return int(cpu)
        time.sleep(0.0002)
    raise TimeoutError(f"no step after {step} within {WAIT_S:g} s")
