"""`ganger bench slice`: jobs that take turns on GPUs, and what that costs them.

A real master, daemon and jobs, on virtual GPUs, each bound to a CPU quota of its own where the machine has quotas, so
that nobody gains by cores that idle. Every job notes when each of its steps began and ended; the control pages tell
when orders came and states changed. A switch is dead time: from the end of the last step of who leaves a device to the
begin of the first one of who comes; a switch that takes long makes quanta longer, fifty times as long. What steps cost
alone is measured on the same devices, by the first jobs before the others come and after they have left: as many at
once, on the machine as it is then. Beside it, in the same run: the same jobs stopped and continued by signals, as Slurm
does it, which frees nothing; and a queue, first come first served.
"""

from __future__ import annotations

import itertools
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ganger.injob.page import now_ns

from ganger_daemon.bench.cluster import START_SECONDS, BenchCluster, ClusterError
from ganger_daemon.bench.report import Report, quantile
from ganger_daemon.bench.switches import PageWatch, slowest_switch
from ganger_daemon.cgroups.contract import is_done
from ganger_daemon.cgroups.probe import choose_cgroups
from ganger_daemon.core.rotation import SWITCHES_PER_QUANTUM
from ganger_daemon.devices.virtual import anonymous_bytes_of

QUANTUM_SECONDS, QUICK_QUANTUM_SECONDS = 5.0, 1.0
LONG_QUANTUM_SECONDS = 60.0
CYCLES, QUICK_CYCLES = 6, 2
# Jobs and GPUs of each.
SHARED = {"jobs2_on1": (2, 1), "jobs4_on1": (4, 1), "jobs6_on4": (6, 4)}
CASES = ("fifo", *SHARED, "signals")
GPU_CORES = 0.4
STATE_BYTES = 8 << 20
EARLY_STEPS = 10
# What a switch may take of a quantum, and how equal shares are to be.
DEAD_SHARE, LEAST_JAIN = 0.02, 0.99
# Of a virtual device, whose memory is that of its processes: what is freed is seen to be.
SEEN_FREED = 0.95
# Steps per processor-second alone and in turns: the machine is not the same all the time.
RATE_WITHIN = 0.1
WANTS = ("--cpus-per-gpu", "1", "--memory", "1G", "--gpu-memory", "2100M", "--checkpoint-every", "never")

JOB = """
import os, struct, sys, time
import torch
import ganger
torch.set_num_threads(1)
class Heavy(torch.nn.Module):
    def __init__(self, size):
        super().__init__()
        self.layer = torch.nn.Linear(64, 64)
        for part in range(16):
            self.register_buffer(f"part{part}", torch.full((size // 64,), float(part)))
    def forward(self, x):
        return self.layer(x)
model = Heavy(int(sys.argv[1]))
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
x = torch.ones(256, 64)
most = int(sys.argv[3])
notes = open(sys.argv[2], "ab", buffering=0)
clock, BOOTTIME = time.clock_gettime_ns, time.CLOCK_BOOTTIME
job = ganger.attach(model=model, optimizer=optimizer)
step = 0
while step < most:
    begin = clock(BOOTTIME)
    for _ in range(8):
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step() if _ == 7 else None
    notes.write(struct.pack("<QQQQ", os.getpid(), begin, clock(BOOTTIME), time.process_time_ns()))
    step += 1
    if job is not None:
        job.step(loss)
"""
NOTE = struct.Struct("<QQQQ")
# Beside the parts: what is smaller than a page, as the layer's bias, is not worth its way and stays.
WEIGHT_BYTES = 4 * 64 * 64


@dataclass(frozen=True, slots=True)
class Step:
    pid: int
    begin: int
    end: int
    used: int


@dataclass(frozen=True, slots=True)
class Turn:
    """Steps of one job on end, without another's on its device between them. Nanoseconds."""

    job: int
    begin: int
    end: int
    steps: int


def main(quick: bool = False, only: str = "") -> dict[str, object]:
    """Run it; `quick`: short quanta and few of them; `only`: one of CASES. Raises ValueError for another."""
    if only and only not in CASES:
        raise ValueError(f"there is no case {only!r}: there are {', '.join(CASES)}")
    report = Report("slice")
    quantum, cycles = (QUICK_QUANTUM_SECONDS, QUICK_CYCLES) if quick else (QUANTUM_SECONDS, CYCLES)
    bound = _quota()
    report.figure("device_cores", GPU_CORES if bound else 0.0)
    report.figure("quantum_seconds", quantum)
    wanted = [only] if only else list(CASES)
    if "fifo" in wanted:
        _in_line(report, bound, quick)
    for name, (jobs, gpus) in SHARED.items():
        if name in wanted and not (quick and jobs > 2):
            _share(report, name, jobs, gpus, quantum, cycles, bound, quick)
    if "signals" in wanted:
        _by_signals(report, quantum, cycles, bound)
    return report.result()


# -- the ways to share -------------------------------------------------------------------------------------------------


def _in_line(report: Report, bound: bool, quick: bool) -> None:
    """When a job steps that has to queue behind another one."""
    steps = 200 if quick else 600
    with _cluster(1, bound, "--policy", "fifo") as cluster:
        first, second = _submit(cluster, 0, steps), _submit(cluster, 1, EARLY_STEPS)
        submitted = now_ns()
        cluster.until(lambda: len(_steps(second)) >= EARLY_STEPS, 20 * START_SECONDS, "both have run")
        rate = _rate(_steps(first)[10:])
        waited = (_steps(second)[-1].end - submitted) / 1e9
    report.figure("fifo_steps_per_cpu_second", rate)
    report.figure(f"fifo_step_{EARLY_STEPS}_of_new_job_seconds", waited)


def _share(
    report: Report, name: str, jobs: int, gpus: int, quantum: float, cycles: int, bound: bool, quick: bool
) -> None:
    with _cluster(gpus, bound, "--policy", "gandiva", "--quantum", f"{quantum:g}s") as cluster:
        notes: list[Path] = []
        early, beyond, alone = 0.0, 0.0, []
        for number in range(jobs):
            if number == gpus:
                alone.append(_undisturbed(notes, _ALONE_QUANTA * quantum))
            submitted = now_ns()
            notes.append(_submit(cluster, number, 1 << 30))
            cluster.until(lambda: len(_steps(notes[-1])) >= EARLY_STEPS, START_SECONDS, f"{name}: job {number} steps")
            if number >= gpus:
                waited = (_steps(notes[-1])[EARLY_STEPS - 1].end - submitted) / 1e9
                # quanta grow where switches take long
                in_force = max(quantum, SWITCHES_PER_QUANTUM * slowest_switch(cluster))
                early, beyond = max(early, waited), max(beyond, waited - in_force)
        report.say(f"{name}: {cycles} cycles of {jobs} jobs, a quantum of {quantum:g} s")
        with PageWatch(cluster) as watch:
            began = now_ns()
            turns_wanted = cycles * -(-jobs // gpus)

            def is_enough() -> bool:
                seen = [[step for step in _steps(path) if began <= step.begin] for path in notes]
                # Who has a device alone makes one long turn.
                shared = [group for group in _on_devices(seen, gpus) if len(group) > 1]
                return all(seen) and min([len(_turns(group, seen)) for group in shared], default=0) > turns_wanted

            deadline = time.monotonic() + _LONGEST * quantum * turns_wanted
            while time.monotonic() < deadline and not is_enough():
                time.sleep(quantum / 4)
            ended = now_ns()
        steps = [[step for step in _steps(path) if began <= step.begin and step.end <= ended] for path in notes]
        freed, expected = watch.freed_bytes, STATE_BYTES + WEIGHT_BYTES
        cluster.ganger("cancel", *[str(number + 1) for number in range(gpus, jobs)])
        cluster.until(lambda: _all_step_now(notes[:gpus]), START_SECONDS, f"{name}: the first ones go on alone")
        alone.append(_undisturbed(notes[:gpus], _ALONE_QUANTA * quantum))
    groups = _on_devices(steps, gpus)
    turns = [turn for group in groups for turn in _turns(group, steps)]
    dead = [gap for group in groups for gap in _gaps(_turns(group, steps))]
    report.samples({"scenario": name, "dead_seconds": gap} for gap in dead)
    if not dead:
        raise ClusterError(f"{name}: no switch within {cycles} cycles")
    span = (ended - began) / 1e9
    shared = [group for group in groups if len(group) > 1]
    share = sum(dead) / (span * len(shared))
    report.figure(f"{name}_dead_p50_milliseconds", 1000 * quantile(dead, 0.5))
    report.figure(f"{name}_dead_p90_milliseconds", 1000 * quantile(dead, 0.9))
    report.figure(f"{name}_switches", float(len(dead)))
    if quick:
        report.figure(f"{name}_dead_share", share)
    else:
        report.at_most(f"{name}_dead_share", share, DEAD_SHARE)
    long_share = quantile(dead, 0.9) / LONG_QUANTUM_SECONDS
    report.at_most(f"{name}_dead_share_at_60s_derived", long_share, DEAD_SHARE)
    device_of = {job + 1: device for device, group in enumerate(groups) if len(group) > 1 for job in group}
    for part, seconds in watch.parts(device_of).items():
        report.figure(f"{name}_{part}_p50_milliseconds", 1000 * seconds)
    received = [sum(turn.end - turn.begin for turn in turns if turn.job == job) / 1e9 for job in range(jobs)]
    whole = [[received[job] for job in group] for group in groups]
    report.figure(f"{name}_jain_of_all", _jain(received))
    if not quick:
        report.at_least(f"{name}_jain_on_a_device", min(_jain(one) for one in whole), LEAST_JAIN)
    rate = sum(len(own) - 1 for own in steps if own) / max(1e-9, sum(_used(own) for own in steps))
    report.figure(f"{name}_steps_per_cpu_second", rate)
    report.figure(f"{name}_steps_per_cpu_second_alone_before", alone[0])
    report.figure(f"{name}_steps_per_cpu_second_alone_after", alone[-1])
    report.figure(f"{name}_cpu_share_of_rests_and_switches", _share_outside(steps))
    if not quick:
        ratio = rate * len(alone) / sum(alone)
        report.at_least(f"{name}_steps_per_cpu_second_over_alone_ratio", ratio, 1.0 - RATE_WITHIN)
    # Who comes to full devices has the next turn, and then its program starts: the one that waited longest.
    report.figure(f"{name}_step_{EARLY_STEPS}_of_new_job_seconds", early)
    report.at_most(f"{name}_step_{EARLY_STEPS}_of_new_job_over_quantum_seconds", beyond, _START_AND_STEPS)
    report.at_least(f"{name}_offloaded_bytes", float(freed), float(expected))
    report.at_most(f"{name}_offloaded_bytes_over_storages", freed / expected, 1.0)
    report.at_least(f"{name}_memory_seen_freed_share", watch.seen_freed / expected, SEEN_FREED)


def _undisturbed(notes: Sequence[Path], seconds: float) -> float:
    """Steps per processor-second of jobs that have their devices alone."""
    began = now_ns()
    time.sleep(seconds)
    steps = [[step for step in _steps(path) if step.begin >= began] for path in notes]
    return sum(len(own) - 1 for own in steps) / max(1e-9, sum(_used(own) for own in steps))


def _all_step_now(notes: Sequence[Path]) -> bool:
    recently = now_ns() - 500_000_000
    return all(any(step.begin > recently for step in _steps(path)[-1:]) for path in notes)


# For how many quanta the first jobs are looked at while they are alone, before and after.
_ALONE_QUANTA = 2
# How many times as long as planned a scenario may take: quanta grow where switches take long.
_LONGEST = 8.0
# A program that is forked warm, reaches its tenth step, and a switch before that.
_START_AND_STEPS = 3.0


def _by_signals(report: Report, quantum: float, cycles: int, bound: bool) -> None:
    """The same jobs, outside: one is stopped in the middle of what it does, the other continued."""
    with _cluster(1, bound, "--policy", "fifo") as cluster:
        notes = [cluster.directory / f"signals-{number}" for number in range(2)]
        processes = [
            subprocess.Popen(
                [sys.executable, str(cluster.directory / "job.py"), str(STATE_BYTES), str(path), str(1 << 30)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            for path in notes
        ]
        try:
            cluster.until(lambda: all(len(_steps(path)) > 10 for path in notes), START_SECONDS, "both step")
            processes[1].send_signal(signal.SIGSTOP)
            began = now_ns()
            for leaving, coming in itertools.islice(itertools.cycle(((0, 1), (1, 0))), 2 * cycles):
                time.sleep(quantum)
                processes[leaving].send_signal(signal.SIGSTOP)
                processes[coming].send_signal(signal.SIGCONT)
            kept = anonymous_bytes_of(processes[1].pid) or 0
            steps = [[step for step in _steps(path) if step.begin >= began] for path in notes]
        finally:
            for process in processes:
                process.send_signal(signal.SIGCONT)
                process.kill()
                process.wait()
    torn = sum(step.end - step.begin > 0.5e9 * quantum for own in steps for step in own)
    report.figure("signals_steps_torn_by_a_switch", float(torn))
    # Nothing is freed: what rests keeps its state where it is.
    report.at_least("signals_memory_kept_bytes", float(kept), float(STATE_BYTES))


# -- the cluster and its jobs ------------------------------------------------------------------------------------------


@contextmanager
def _cluster(gpus: int, bound: bool, *master: str) -> Iterator[BenchCluster]:
    daemon = ("--virtual-gpu-cores", str(GPU_CORES)) if bound else ()
    with BenchCluster(nodes=1, gpus=gpus, cores=2 * gpus, memory="64G", master=master, daemon=daemon) as cluster:
        (cluster.directory / "job.py").write_text(JOB)
        yield cluster


def _submit(cluster: BenchCluster, number: int, steps: int, *wants: str) -> Path:
    notes = cluster.directory / f"notes-{number}"
    cluster.ganger(
        *("submit", "--gpus", "1", *WANTS, *wants, "--directory", str(cluster.directory), "--json", "--"),
        *(sys.executable, str(cluster.directory / "job.py"), str(STATE_BYTES), str(notes), str(steps)),
    )
    return notes


def _quota() -> bool:
    probe = choose_cgroups("ganger-bench-probe", quotas=True)
    found = is_done(probe, "cpu_quota")
    probe.tidy()
    return found


# -- what was noted ----------------------------------------------------------------------------------------------------


def _steps(path: Path) -> list[Step]:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return []
    whole = len(data) // NOTE.size * NOTE.size
    return [Step(*fields) for fields in NOTE.iter_unpack(data[:whole])]


def _used(steps: Sequence[Step]) -> float:
    """Processor-seconds from the first step's end to the last one's."""
    return (steps[-1].used - steps[0].used) / 1e9 if len(steps) > 1 else 0.0


def _share_outside(steps: Sequence[Sequence[Step]]) -> float:
    """Of the processor time of those who take turns, what they used between two turns (to rest, to give up their state
    and to bring it back) and not for steps: what goes from one step to the next beyond what that is otherwise."""
    outside = total = 0.0
    for own in steps:
        used = [after.used - before.used for before, after in itertools.pairwise(own)]
        if not used:
            continue
        usual = quantile(used, 0.5)
        gaps = [after.begin - before.end for before, after in itertools.pairwise(own)]
        outside += sum(max(0.0, one - usual) for one, gap in zip(used, gaps, strict=True) if gap > _REST_NS)
        total += sum(used)
    return outside / max(1.0, total)


# Between two steps of one turn nothing takes so long.
_REST_NS = 500_000_000


def _rate(steps: Sequence[Step]) -> float:
    return (len(steps) - 1) / _used(steps)


def _on_devices(steps: Sequence[Sequence[Step]], gpus: int) -> list[list[int]]:
    """Who takes turns with whom: steps of jobs on one device never lie beside each other, those of others do."""
    if gpus == 1:
        return [list(range(len(steps)))]
    groups: list[list[int]] = []
    for job, own in enumerate(steps):
        group = next((one for one in groups if all(not _overlap(own, steps[other]) for other in one)), None)
        if group is None:
            groups.append([job])
        else:
            group.append(job)
    return groups


def _overlap(one: Sequence[Step], other: Sequence[Step]) -> bool:
    merged = sorted([*one, *other], key=lambda step: step.begin)
    return any(after.begin < before.end for before, after in itertools.pairwise(merged))


def _turns(group: Sequence[int], steps: Sequence[Sequence[Step]]) -> list[Turn]:
    merged = sorted([(step.begin, step.end, job) for job in group for step in steps[job]])
    found: list[Turn] = []
    for job, own in itertools.groupby(merged, key=lambda one: one[2]):
        inside = list(own)
        found.append(Turn(job, inside[0][0], inside[-1][1], len(inside)))
    return found


def _gaps(turns: Sequence[Turn]) -> list[float]:
    """Seconds between the turns of two jobs on a device."""
    return [(after.begin - before.end) / 1e9 for before, after in itertools.pairwise(turns)]


def _jain(values: Sequence[float]) -> float:
    return sum(values) ** 2 / (len(values) * sum(value * value for value in values))
