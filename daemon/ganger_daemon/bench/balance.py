"""`ganger bench balance`: six jobs on four GPUs, which is two pairs and two alone whatever the rows.

A real master, daemon and jobs, on virtual GPUs, each with a CPU quota of its own where the machine has quotas. Every
job notes when each of its steps began and ended, and in which process: one that was moved goes on in another. What is
compared is the time in steps of all six over one window, as in Gandiva's figure 9 (OSDI 2018); beside it, in the same
run, the same six jobs that nobody may move.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from pathlib import Path

from ganger.injob.page import now_ns

from ganger_daemon.bench.cluster import START_SECONDS, BenchCluster
from ganger_daemon.bench.report import Report, quantile
from ganger_daemon.bench.slice import EARLY_STEPS, LEAST_JAIN, Step, _cluster, _jain, _quota, _steps, _submit

JOBS, GPUS = 6, 4
QUANTUM_SECONDS, QUICK_QUANTUM_SECONDS = 5.0, 1.0
# Enough for each to have been alone and one of a pair several times over.
QUANTA, QUICK_QUANTA = 40, 8
STAYING_QUANTA = 12


def main(quick: bool = False) -> dict[str, object]:
    """Run it; `quick`: short quanta and few of them."""
    report = Report("balance")
    quantum = QUICK_QUANTUM_SECONDS if quick else QUANTUM_SECONDS
    bound = _quota()
    report.figure("quantum_seconds", quantum)
    steps = _run(report, "moved", quantum, QUICK_QUANTA if quick else QUANTA, bound)
    moves = sum([len({step.pid for step in own}) - 1 for own in steps])
    if quick:
        report.figure("moved_jain_of_all", _jain_of(steps))
    else:
        report.at_least("moved_jain_of_all", _jain_of(steps), LEAST_JAIN)
    report.figure("moves", float(moves))
    pauses = [gap for own in steps for gap in _pauses(own)]
    if pauses:
        # With the rest that its turns would have had it take anyhow.
        report.figure("last_step_to_first_of_a_move_p50_seconds", quantile(pauses, 0.5))
    steps = _run(report, "staying", quantum, QUICK_QUANTA if quick else STAYING_QUANTA, bound, "--no-move")
    report.figure("staying_jain_of_all", _jain_of(steps))
    return report.result()


def _run(report: Report, name: str, quantum: float, quanta: int, bound: bool, *wants: str) -> list[list[Step]]:
    """The steps of each job in the window."""
    with _cluster(GPUS, bound, "--policy", "gandiva", "--quantum", f"{quantum:g}s") as cluster:
        notes = [_submit(cluster, number, 1 << 30, *wants) for number in range(JOBS)]
        cluster.until(lambda: _all_step(notes), 2 * START_SECONDS, "all six step")
        report.say(f"{name}: {quanta} quanta of {quantum:g} s")
        began = now_ns()
        _wait(cluster, quantum * quanta)
        ended = now_ns()
        steps = [[step for step in _steps(path) if began <= step.begin and step.end <= ended] for path in notes]
    received = [_seconds(own) for own in steps]
    report.samples({"scenario": name, "job": job, "seconds": seconds} for job, seconds in enumerate(received))
    report.figure(f"{name}_seconds", (ended - began) / 1e9)
    report.figure(f"{name}_least_seconds", min(received))
    report.figure(f"{name}_most_seconds", max(received))
    report.figure(f"{name}_used_share_of_devices", sum(received) / (GPUS * (ended - began) / 1e9))
    return steps


def _wait(cluster: BenchCluster, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    cluster.until(lambda: time.monotonic() >= deadline, seconds + START_SECONDS, "the window is over")


def _all_step(notes: Sequence[Path]) -> bool:
    return all(len(_steps(path)) >= EARLY_STEPS for path in notes)


def _seconds(steps: Sequence[Step]) -> float:
    return sum([step.end - step.begin for step in steps]) / 1e9


def _jain_of(steps: Sequence[Sequence[Step]]) -> float:
    return _jain([_seconds(own) for own in steps])


def _pauses(steps: Sequence[Step]) -> list[float]:
    return [(after.begin - before.end) / 1e9 for before, after in itertools.pairwise(steps) if before.pid != after.pid]
