"""`ganger bench slice`: jobs that take turns on GPUs, and what that costs them.

A real master, daemon and jobs, on virtual GPUs, each bound to a CPU quota of its own where the machine has quotas, so
that no job gains by idle cores. Every job notes when each of its steps began and ended; the control pages tell when
orders came and states changed. A switch is dead time: from the end of the last step of one job on a device to the begin
of the first step of the next job. Quanta are at least fifty times as long as a switch. What steps cost alone is
measured on the same devices, by the first jobs before the others come and after they have left: as many at once, on the
machine as it is then. Beside it, in the same run: the same jobs stopped and continued by signals, as Slurm does it,
which frees nothing; and a queue, first come first served. Six jobs on four GPUs (figure 9 of Gandiva's paper, OSDI
2018) are two pairs and two alone whatever the rows: they have equal shares only because they are moved.
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ganger.injob.page import now_ns
from ganger.protocol.slice_rotation import SWITCHES_PER_QUANTUM
from ganger_daemon.cgroups.contract import is_done
from ganger_daemon.cgroups.group_tree import choose_cgroups
from ganger_daemon.node.process_identity import anonymous_bytes

from benchmarks.bench_cluster import START_S, BenchCluster, BenchClusterError
from benchmarks.report import BenchReport, quantile
from benchmarks.step_notes import (
    HEAVY,
    NOTING,
    jain,
    rate,
    share_outside,
    shares_of_cycles,
    stepping,
    steps_of,
    switches,
    turns_of,
)
from benchmarks.switch_timing import PageWatch, slowest_switch, switched

QUANTUM_S, QUICK_QUANTUM_S = 5.0, 1.0
LONG_QUANTUM_S = 60.0
CYCLES, QUICK_CYCLES = 6, 2
# Jobs and GPUs of each.
SHARED = {"jobs2_on1": (2, 1), "jobs4_on1": (4, 1), "jobs6_on4": (6, 4)}
CASES = ("fifo", *SHARED, "signals")
# Of a virtual GPU, where that leaves half of the machine to everything else.
GPU_CORES, CORES_SHARE = 0.4, 0.5
# Switches in which all of several devices have equal shares, by moves.
SWITCHES = 40
STATE_BYTES = 8 << 20
EARLY_STEPS = 10
# What a switch may take of a quantum, and how equal shares are to be.
DEAD_SHARE, LEAST_JAIN = 0.02, 0.99
# Of a virtual device, whose memory is that of its processes: what is freed is seen to be.
SEEN_FREED = 0.95
# Steps per processor-second alone and in turns: the machine is not the same all the time.
RATE_WITHIN = 0.1
WANTS = ("--cpus-per-gpu", "1", "--memory", "1G", "--gpu-memory", "2100M", "--checkpoint-every", "never")

JOB = f"""
import sys
import ganger
{NOTING}{HEAVY}
torch.set_num_threads(1)
model = Heavy(int(sys.argv[1]))
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
x = torch.ones(256, 64)
most = int(sys.argv[3])
note = note_to(sys.argv[2])
job = ganger.attach(model=model, optimizer=optimizer)
for step in job.steps(most):
    begin = now()
    for part in range(8):
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step() if part == 7 else None
    optimizer.zero_grad()
    note(step + 1, begin)
    job.step(loss)
"""
# Beside the parts: what is smaller than a page, as the layer's bias, is not worth its way and stays.
WEIGHT_BYTES = 4 * 64 * 64


def main(quick: bool = False, only: str = "") -> dict[str, object]:
    """Run it; `quick`: short quanta and few of them; `only`: one of CASES. Raises ValueError for another."""
    if only and only not in CASES:
        raise ValueError(f"there is no case {only!r}: there are {', '.join(CASES)}")
    report = BenchReport("slice")
    quantum, cycles = (QUICK_QUANTUM_S, QUICK_CYCLES) if quick else (QUANTUM_S, CYCLES)
    bound = _quota()
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


def _in_line(report: BenchReport, bound: bool, quick: bool) -> None:
    """When a job steps that has to queue behind another one."""
    steps = 200 if quick else 600
    with _cluster(1, bound, "--policy", "fifo") as cluster:
        first, second = _submit(cluster, 0, steps), _submit(cluster, 1, EARLY_STEPS)
        submitted = now_ns()
        cluster.until(lambda: len(steps_of(second)) >= EARLY_STEPS, 20 * START_S, "both have run")
        speed = rate([steps_of(first)[10:]])
        waited = (steps_of(second)[-1].end - submitted) / 1e9
    report.figure("fifo_steps_per_cpu_second", speed)
    report.figure(f"fifo_step_{EARLY_STEPS}_of_new_job_seconds", waited)


def _share(
    report: BenchReport, name: str, jobs: int, gpus: int, quantum: float, cycles: int, bound: bool, quick: bool
) -> None:
    with _cluster(gpus, bound, "--policy", "gandiva", "--quantum", f"{quantum:g}s") as cluster:
        notes: list[Path] = []
        early, beyond, alone = 0.0, 0.0, []
        for number in range(jobs):
            if number == gpus:
                alone.append(_undisturbed(notes, _ALONE_QUANTA * quantum))
            submitted = now_ns()
            notes.append(_submit(cluster, number, 1 << 30))
            cluster.until(lambda: len(steps_of(notes[-1])) >= EARLY_STEPS, START_S, f"{name}: job {number} steps")
            if number >= gpus:
                waited = (steps_of(notes[-1])[EARLY_STEPS - 1].end - submitted) / 1e9
                # Quanta grow where switches take long.
                in_force = max(quantum, SWITCHES_PER_QUANTUM * slowest_switch(cluster))
                early, beyond = max(early, waited), max(beyond, waited - in_force)
        # Of one device, of which the first and the last turn are cut; of several, as many as equal shares take.
        wanted = cycles * jobs + 2 if gpus == 1 else SWITCHES
        report.say(f"{name}: {wanted} switches of {jobs} jobs, a quantum of {quantum:g} s")
        with PageWatch(cluster) as watch:
            began = now_ns()
            deadline = time.monotonic() + _LONGEST * quantum * wanted
            while time.monotonic() < deadline and sum(one > began for one in switched(cluster)) < wanted:
                time.sleep(quantum / 4)
            ended = now_ns()
        steps = [[step for step in steps_of(path) if began <= step.begin and step.end <= ended] for path in notes]
        freed, expected = watch.freed_bytes, STATE_BYTES + WEIGHT_BYTES
        cluster.ganger("cancel", *[str(number + 1) for number in range(gpus, jobs)])
        cluster.until(lambda: _all_step_now(notes[:gpus]), START_S, f"{name}: the first ones go on alone")
        alone.append(_undisturbed(notes[:gpus], _ALONE_QUANTA * quantum))
    dead, starting = switches(steps, began, ended)
    if not dead:
        raise BenchClusterError(f"{name}: no switch in {(ended - began) / 1e9:.0f} s")
    report.samples({"scenario": name, "dead_seconds": gap} for gap in dead)
    report.samples({"scenario": name, "starting_seconds": gap} for gap in starting)
    report.figure(f"{name}_dead_p50_milliseconds", 1000 * quantile(dead, 0.5))
    report.figure(f"{name}_dead_p90_milliseconds", 1000 * quantile(dead, 0.9))
    report.figure(f"{name}_switches", float(len(dead)))
    # Of the devices on which turns are taken.
    span, taking_turns = (ended - began) / 1e9, min(gpus, jobs - gpus)
    share = sum(dead) / span / taking_turns
    if quick:
        report.figure(f"{name}_dead_share", share)
    else:
        report.at_most(f"{name}_dead_share", share, DEAD_SHARE)
    if starting:
        # A device waits for a job that was moved there: its program starts in its first slice.
        report.figure(f"{name}_start_after_move_p50_seconds", quantile(starting, 0.5))
        report.figure(f"{name}_share_of_starts", sum(starting) / span / taking_turns)
    # Including the gaps between two steps within a slice, as a job alone has them, too.
    idle = gpus - sum(map(stepping, steps)) / span
    report.figure(f"{name}_share_outside_steps", idle / taking_turns)
    long_share = quantile(dead, 0.9) / LONG_QUANTUM_S
    report.at_most(f"{name}_dead_share_at_60s_derived", long_share, DEAD_SHARE)
    if gpus == 1:
        turns = turns_of(steps)
        report.samples({"scenario": name, "job": one.job, "begin": one.begin, "end": one.end} for one in turns)
        for part, each in watch.parts(dict.fromkeys(range(1, jobs + 1), 0)).items():
            report.samples({"scenario": name, "part": part, "seconds": seconds} for seconds in each)
            report.figure(f"{name}_{part}_p50_milliseconds", 1000 * quantile(each, 0.5))
        shares = shares_of_cycles(turns, jobs)
    else:
        shares = [stepping(own) / span for own in steps]
        report.figure(f"{name}_moves", float(sum(len({step.pid for step in own}) - 1 for own in steps if own)))
    if quick:
        report.figure(f"{name}_jain", jain(shares))
    else:
        report.at_least(f"{name}_jain", jain(shares), LEAST_JAIN)
    report.figure(f"{name}_steps_per_cpu_second", rate(steps))
    report.figure(f"{name}_steps_per_cpu_second_alone_before", alone[0])
    report.figure(f"{name}_steps_per_cpu_second_alone_after", alone[-1])
    report.figure(f"{name}_cpu_share_of_rests_and_switches", share_outside(steps))
    if not quick:
        ratio = rate(steps) * len(alone) / sum(alone)
        report.at_least(f"{name}_steps_per_cpu_second_over_alone_ratio", ratio, 1.0 - RATE_WITHIN)
    # A job that comes to full devices has the next slice, and then its program starts: it has waited longest.
    report.figure(f"{name}_step_{EARLY_STEPS}_of_new_job_seconds", early)
    report.at_most(f"{name}_step_{EARLY_STEPS}_of_new_job_over_quantum_seconds", beyond, _START_AND_STEPS)
    report.at_least(f"{name}_offloaded_bytes", float(freed), float(expected))
    report.at_most(f"{name}_offloaded_bytes_over_storages", freed / expected, 1.0)
    report.at_least(f"{name}_memory_seen_freed_share", watch.seen_freed / expected, SEEN_FREED)


def _undisturbed(notes: Sequence[Path], seconds: float) -> float:
    """Steps per processor-second of jobs that have their devices alone."""
    began = now_ns()
    time.sleep(seconds)
    return rate([[step for step in steps_of(path) if step.begin >= began] for path in notes])


def _all_step_now(notes: Sequence[Path]) -> bool:
    recently = now_ns() - 500_000_000
    return all(any(step.begin > recently for step in steps_of(path)[-1:]) for path in notes)


# For how many quanta the first jobs are looked at while they are alone, before and after.
_ALONE_QUANTA = 2
# How many times as long as planned a scenario may take: quanta grow where switches take long.
_LONGEST = 8.0
# A program that is forked warm, reaches its tenth step, and a switch before that.
_START_AND_STEPS = 3.0


def _by_signals(report: BenchReport, quantum: float, cycles: int, bound: bool) -> None:
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
            cluster.until(lambda: all(len(steps_of(path)) > 10 for path in notes), START_S, "both step")
            processes[1].send_signal(signal.SIGSTOP)
            began = now_ns()
            for leaving, coming in itertools.islice(itertools.cycle(((0, 1), (1, 0))), 2 * cycles):
                time.sleep(quantum)
                processes[leaving].send_signal(signal.SIGSTOP)
                processes[coming].send_signal(signal.SIGCONT)
            kept = anonymous_bytes(processes[1].pid) or 0
            steps = [[step for step in steps_of(path) if step.begin >= began] for path in notes]
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
    cores = min(GPU_CORES, CORES_SHARE * len(os.sched_getaffinity(0)) / gpus)
    # Its log tells when rows are switched.
    daemon = ("--verbose", *(("--virtual-gpu-cores", str(cores)) if bound else ()))
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
