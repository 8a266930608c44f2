"""`ganger bench failover`: the wait for the next accepted submission when the leading master dies or hangs.

Two masters on one PostgreSQL server of the benchmark's own, two daemons and 20 real jobs that hold all GPUs and train.
Callers submit 100 jobs a second. In every round the leader is killed (SIGKILL) or stopped (SIGSTOP), the other master
leads, and the former one is started again; a stopped one is let go on first, and must end without a commit.

A caller's wait is from the signal to its next accepted submission; that of a round is the shortest of its callers'.
After each round the queue must have every accepted submission once, and no submission twice. In the end the record of
each job must have every step once.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from ganger.client import Client
from ganger.console import ExitCode
from ganger.wire.errors import ApiError

from benchmarks.bench_cluster import START_S, BenchClusterError
from benchmarks.master_pair import MasterPair
from benchmarks.postgresql_server import why_no_postgresql
from benchmarks.report import AtLeast, AtMost, quantile, report

ROUNDS: Final = 25
QUICK_ROUNDS: Final = 2
CALLERS: Final = 10
PER_S: Final = 100.0
JOBS: Final = 20
NODES: Final = 2
LONGEST_WAIT_S: Final = 3.0
# Submissions before the signal, and after the next one that is accepted.
_LEAD_S: Final = 1.0
# Answers that are on their way at the signal arrive within this time, and no other master leads yet.
_IN_FLIGHT_S: Final = 0.3
_ROUND_S: Final = 30.0
_SIGNALS: Final = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}

JOB: Final = """
import os, sys, time
import ganger, torch
torch.set_num_threads(1)
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
x = torch.ones(8, 8)
job = ganger.attach(model=model, optimizer=optimizer)
for step in job.steps():
    time.sleep(0.5)
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with open(sys.argv[1], "a") as out:
        out.write(f"{job.step_count + 1} {time.time()}\\n")
    job.step(loss)
"""


def main(quick: bool = False, only: str = "") -> dict[str, Any]:
    """Return the report. `only`: "kill" or "stop". Raises ValueError for another case."""
    if only and only not in _SIGNALS:
        raise ValueError(f"there is no case {only!r}: there are {', '.join(_SIGNALS)}")
    if why := why_no_postgresql():
        return {"name": "failover", "skipped": why}
    kinds = [only] if only else list(_SIGNALS)
    rounds = [kind for _ in range(QUICK_ROUNDS if quick else ROUNDS) for kind in kinds]
    # Finished jobs of former rounds are no part of what a new leader reads.
    finished = {"GANGER_MASTER_FINISHED_JOBS_LIMIT": "100"}
    with MasterPair(nodes=NODES, gpus=JOBS // NODES, cores=2 * JOBS, memory="32G", settings=finished) as cluster:
        records = _start_jobs(cluster)
        found: list[FailOver] = []
        for number, kind in enumerate(rounds, 1):
            found.append(_fail_over(cluster, kind, number))
            print(f"failover: {number} of {len(rounds)}, {found[-1].text}", file=sys.stderr, flush=True)
        steps = [_steps_of(record) for record in records]
    figures: dict[str, float] = {"jobs": len(steps), "submissions_per_s": PER_S}
    for kind in kinds:
        figures |= _figures(kind, [one for one in found if one.kind == kind])
    figures["lost"] = sum(one.lost for one in found)
    figures["twice"] = sum(one.twice for one in found)
    figures["steps"] = sum(len(numbers) for numbers, _ in steps)
    figures["steps_lost_or_twice"] = sum(numbers != list(range(1, len(numbers) + 1)) for numbers, _ in steps)
    figures["longest_step_s"] = max(b - a for _, times in steps for a, b in pairwise(times))
    limits: dict[str, AtLeast | AtMost] = {name: AtMost(LONGEST_WAIT_S) for name in figures if name.endswith("p99_s")}
    limits |= {name: AtMost(0.0) for name in ("lost", "twice", "steps_lost_or_twice")}
    return report("failover", figures, limits, [one.sample() for one in found])


@dataclass(frozen=True, slots=True)
class FailOver:
    """One round. `waits_s`: of each caller; `lost`, `twice`: submissions."""

    kind: str
    waits_s: Sequence[float]
    submissions: int
    lost: int
    twice: int
    refusals: Counter[str]

    @property
    def text(self) -> str:
        waits = f"{min(self.waits_s):.2f} s to {max(self.waits_s):.2f} s"
        return f"{self.kind}: {waits}, {self.submissions} submissions, {self.lost} lost, {self.twice} twice"

    def sample(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "waits_s": list(self.waits_s),
            "submissions": self.submissions,
            "lost": self.lost,
            "twice": self.twice,
            "refusals": dict(self.refusals),
        }


def _figures(kind: str, found: Sequence[FailOver]) -> dict[str, float]:
    shortest = [min(one.waits_s) for one in found]
    of_callers = [wait for one in found for wait in one.waits_s]
    return {
        f"{kind}_rounds": len(found),
        f"{kind}_next_p50_s": quantile(shortest, 0.5),
        f"{kind}_next_p99_s": quantile(shortest, 0.99),
        f"{kind}_caller_p50_s": quantile(of_callers, 0.5),
        f"{kind}_caller_p99_s": quantile(of_callers, 0.99),
    }


def _start_jobs(cluster: MasterPair) -> list[Path]:
    """Start all jobs, and return the records of their steps once each has made three."""
    script = cluster.directory / "job.py"
    script.write_text(JOB)
    records = [cluster.directory / f"steps-{number}" for number in range(JOBS)]
    for record in records:
        options = ("--gpus", "1", "--memory", "512M", "--cpus-per-gpu", "1", "--checkpoint-every", "never")
        cluster.ganger("submit", *options, "--", sys.executable, str(script), str(record))
    cluster.until(lambda: all(len(_steps_of(one)[0]) >= 3 for one in records), 4 * START_S, "every job trains")
    return records


def _steps_of(record: Path) -> tuple[list[int], list[float]]:
    """Return the numbers and times of a job's steps. Its last line may be half written."""
    if not record.exists():
        return [], []
    lines = [line.split() for line in record.read_text().split("\n")[:-1]]
    return [int(line[0]) for line in lines], [float(line[1]) for line in lines]


@dataclass
class Callers:
    """Threads that submit until they are ended, each repeating a submission with its request id until it is accepted.

    `accepted`: of each caller, when, by the monotonic clock; `jobs`: the name of the job, by the submission's label."""

    master: str
    label: str
    accepted: list[list[float]] = field(default_factory=lambda: [[] for _ in range(CALLERS)])
    jobs: dict[str, str] = field(default_factory=dict)
    refusals: Counter[str] = field(default_factory=Counter)
    _ended: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    def __enter__(self) -> Callers:
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(CALLERS)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def _run(self, number: int) -> None:
        pause_s = CALLERS / PER_S
        # Spread, as callers on many machines are.
        due = time.monotonic() + number / PER_S
        with Client(self.master) as client:
            for count in range(1 << 30):
                self._ended.wait(max(0.0, due - time.monotonic()))
                due = max(due + pause_s, time.monotonic())
                if self._ended.is_set():
                    return
                self._submit(client, number, f"{self.label}-{number}-{count}", str(uuid.uuid4()))

    def _submit(self, client: Client, number: int, name: str, request_id: str) -> None:
        until = time.monotonic() + _ROUND_S
        while time.monotonic() < until:
            try:
                job = client.submit(["true"], gpus=1, name=name, request_id=request_id)
            except ApiError as error:
                self.refusals[error.reason] += 1
                continue
            self.accepted[number].append(time.monotonic())
            self.jobs[name] = job.name
            return

    def waits_s(self, since: float) -> list[float]:
        """Return the wait of each caller from a signal on. Raises BenchClusterError if one waits for ever."""
        waits = [
            next((when - since for when in list(times) if when - since > _IN_FLIGHT_S), None) for times in self.accepted
        ]
        found = [wait for wait in waits if wait is not None]
        if len(found) < len(waits):
            raise BenchClusterError(f"{len(waits) - len(found)} callers wait: {dict(self.refusals)}")
        return found


def _fail_over(cluster: MasterPair, kind: str, number: int) -> FailOver:
    """Kill or stop the leader under load, and put it back as a stand-by. Raises BenchClusterError."""
    label, leader = f"round-{number}", cluster.leader()
    with Callers(str(cluster.master), label) as callers:
        time.sleep(_LEAD_S)
        cluster.signal(leader, _SIGNALS[kind])
        since = time.monotonic()
        cluster.until(
            lambda: all(any(t - since > _IN_FLIGHT_S for t in times) for times in callers.accepted),
            _ROUND_S,
            "every caller's next submission is accepted",
        )
        if kind == "stop":
            cluster.signal(leader, signal.SIGCONT)
        time.sleep(_LEAD_S)
    code = cluster.end_of(leader)
    if kind == "stop" and code != ExitCode.LEASE_LOST:
        raise BenchClusterError(f"a former leader ended with {code}")
    lost, twice = _settle(cluster, callers)
    cluster.start(leader)
    return FailOver(kind, callers.waits_s(since), len(callers.jobs), lost, twice, callers.refusals)


def _settle(cluster: MasterPair, callers: Callers) -> tuple[int, int]:
    """Compare the queue with what was accepted, and cancel it. Return how many submissions are lost, and twice."""
    with Client(str(cluster.master)) as client:
        pending = [job for job in client.list_jobs() if job.spec.display_name.startswith(f"{callers.label}-")]
        found = Counter(job.spec.display_name for job in pending)
        names = {job.name for job in pending}
        with ThreadPoolExecutor(CALLERS) as threads:
            list(threads.map(client.cancel_job, names))
    lost = sum(1 for label, job in callers.jobs.items() if not found[label] or job not in names)
    return lost, sum(times - 1 for times in found.values())
