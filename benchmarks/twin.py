"""A live run equals its simulation: real jobs queue, are suspended and go on, on a real cluster; in a second run, under
another policy, they are moved to make room. The simulator gets the same submissions, with the rates and costs of that
very run, and every job must take as long, within a tenth.

The jobs are gangs of real processes that train, save and restore, and sleep through their mini-batches, so that they go
as fast on a busy machine. The report is `build/bench/twin.json`.
"""

from __future__ import annotations

import csv
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.bench_cluster import GANGER, BenchCluster, BenchClusterError
from benchmarks.report import SAMPLES, BenchReport
from benchmarks.twin_comparison import Costs, JobEvent, Ran, compared, costs_of, step_s, trace_of

_NODES, _GPUS = 2, 4
_PLAN_EVERY = "1s"
_STEP_S = 0.1
_PRINT_EVERY = 10
_ERROR_LIMIT = 0.10
_LONGEST_S = 600.0

# Every rank trains: its state is saved and restored, its boundary agreed on with the others'.
_SCRIPT = """
import sys, time
import ganger, torch
steps, seconds, every = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
torch.set_num_threads(1)
network = torch.nn.Linear(16, 1)
optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
job = ganger.attach(model=network, optimizer=optimizer)
loader = job.dataloader(torch.ones(steps * job.world, 16), global_batch=job.world)
due = None
for epoch in job.epochs(1):
    for batch in loader:
        # From due time to due time: what a batch takes does not depend on how long the machine took to wake it.
        now = time.monotonic()
        due = now + seconds if due is None or now > due + seconds else due + seconds
        loss = network(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(max(0.0, due - time.monotonic()))
        if job.rank == 0 and (job.step_count % every == 0 or job.step_count + 1 == steps):
            print("step", job.step_count + 1, time.time(), flush=True)
        job.step(loss)
"""


class PlannedStart(NamedTuple):
    """A job of the scenario; seconds. One without a deadline makes room for those that have one."""

    name: str
    gpus: int
    at: float
    length: float
    deadline: float | None = None


# Two fill the cluster; a small one with a deadline takes the place of the younger; another runs beside it; one with a
# deadline that needs everything stops all others; one waits for its turn.
SCENARIO = (
    PlannedStart("first", 4, 0, 45),
    PlannedStart("second", 4, 3, 60),
    PlannedStart("urgent", 2, 13, 25, 90),
    PlannedStart("small", 1, 18, 30),
    PlannedStart("whole", 8, 30, 20, 150),
    PlannedStart("last", 4, 50, 20),
)
# A long job and a wider one fill each node; one that needs a node waits. When the wider ones have ended there is room
# for it in two pieces, and one of the long jobs is moved beside the other.
MOVES = (
    PlannedStart("left", 1, 0, 70),
    PlannedStart("leaves", 3, 2, 25),
    PlannedStart("right", 1, 4, 70),
    PlannedStart("goes", 3, 6, 25),
    PlannedStart("node", 4, 12, 30),
)
_QUICK = 0.3


class Case(NamedTuple):
    """`needs`: what has to happen in it. `prefix`: of its files and figures, behind "twin"."""

    prefix: str
    policy: str
    planned: tuple[PlannedStart, ...]
    needs: tuple[str, ...]


CASES = (
    Case("", "edf", SCENARIO, ("suspensions", "resumes")),
    Case("moves_", "fifo-backfill+first-fit+defrag", MOVES, ("moves",)),
)


def main(quick: bool = False, directory: Path = SAMPLES) -> dict[str, object]:
    report = BenchReport("twin", directory)
    directory.mkdir(parents=True, exist_ok=True)
    told = [_case(case, _QUICK if quick else 1.0, directory, report) for case in CASES]
    result = report.result()
    # The rows too: a file of its own, to be looked at.
    (directory / "twin.json").write_text(json.dumps({**result, "cases": told}, indent=2) + "\n")
    return result


def _case(case: Case, scale: float, directory: Path, report: BenchReport) -> dict[str, object]:
    planned = [one._replace(at=one.at * scale, length=one.length * scale) for one in case.planned]
    options = ("--policy", case.policy, "--plan-every", _PLAN_EVERY)
    name = f"twin_{case.prefix}".rstrip("_")
    with BenchCluster(nodes=_NODES, gpus=_GPUS, cores=_GPUS, master=options) as cluster:
        jobs, costs = _live(cluster, planned, case.needs, report)
        # What all of it rests on.
        (directory / f"{name}-events.json").write_text(cluster.ganger("events", "--json"))
    trace = directory / f"{name}.csv"
    trace.write_text(trace_of(jobs, costs))
    rows = compared(jobs, _simulated(trace, costs, directory / name, case.policy))
    worst = max(abs(float(str(row["error"]))) for row in rows)
    report.at_most(f"{case.prefix}worst_jct_error", worst, _ERROR_LIMIT)
    for what, key in (("suspended", "suspensions"), ("moved", "moves")):
        differing = sum(row[f"live_{key}"] != row[f"simulated_{key}"] for row in rows)
        report.figure(f"{case.prefix}jobs_{what}_otherwise", differing)
    for figure, value in asdict(costs).items():
        report.figure(f"{case.prefix}{figure}", value)
    report.figure(f"{case.prefix}jobs", len(rows))
    report.samples(rows)
    return {"policy": case.policy, "plan_every": _PLAN_EVERY, "costs": asdict(costs), "jobs": rows}


def _live(
    cluster: BenchCluster, planned: Sequence[PlannedStart], needs: Sequence[str], report: BenchReport
) -> tuple[list[Ran], Costs]:
    script = cluster.directory / "train.py"
    script.write_text(_SCRIPT)
    # The launchers of both nodes import torch once, and not while anything is measured.
    warm = _submit(cluster, script, PlannedStart("warm", _NODES * _GPUS, 0, 1.0), 5)
    cluster.ganger("wait", warm, "--timeout", "50s")
    began = time.monotonic()
    ids: dict[str, str] = {}
    for one in planned:
        time.sleep(max(0.0, began + one.at - time.monotonic()))
        report.say(f"{one.name}: {one.gpus} GPUs for {one.length:g} s")
        ids[one.name] = _submit(cluster, script, one, _steps(one))
    _wait(cluster, list(ids.values()), began)
    events = events_of(cluster)
    times = {one.name: _printed(cluster.ganger("logs", ids[one.name])) for one in planned}
    last = {f"jobs/{ids[name]}": found[-1][1] for name, found in times.items()}
    known = [event for event in events if event.job in last]
    first = min(event.time for event in known)
    jobs = [_ran(one, f"jobs/{ids[one.name]}", known, times[one.name], first) for one in planned]
    return jobs, costs_of(known, last, needs)


def _submit(cluster: BenchCluster, script: Path, one: PlannedStart, steps: int) -> str:
    # As the simulator has it: a task for each GPU, all on one node where they fit.
    close = ("--locality", "node") if one.gpus <= _GPUS else ()
    deadline = () if one.deadline is None else ("--deadline", f"{one.deadline:g}s")
    size = ("--name", one.name, "--gpus", str(one.gpus), "--cpus-per-gpu", "0.5", "--memory", "256M")
    command = (sys.executable, str(script), str(steps), str(_STEP_S), str(_PRINT_EVERY))
    answer = cluster.ganger("submit", *size, *close, *deadline, "--", *command)
    return answer.split()[-1]


def _steps(one: PlannedStart) -> int:
    return max(2 * _PRINT_EVERY, round(one.length / _STEP_S))


def _wait(cluster: BenchCluster, ids: Sequence[str], began: float) -> None:
    while True:
        live = [job for job in json.loads(cluster.ganger("queue", "--json")) if job["name"].partition("/")[2] in ids]
        if not live:
            return
        if time.monotonic() > began + _LONGEST_S:
            raise BenchClusterError(f"{len(live)} jobs have not ended after {_LONGEST_S:g} s")
        time.sleep(1.0)


def events_of(cluster: BenchCluster) -> list[JobEvent]:
    """Return the events of its jobs, oldest first."""
    return [
        JobEvent(
            datetime.fromisoformat(event["time"]).timestamp(),
            event["subject"],
            event["kind"],
            event["message"],
            event["figures"].get("level", ""),
            float(event["figures"].get("pause_ms", 0.0)),
        )
        for event in json.loads(cluster.ganger("events", "--json"))
        if event["subject"].startswith("jobs/")
    ]


def _printed(log: str) -> list[tuple[int, float]]:
    """(step, time) as a job printed them; a step that was repeated counts where it was made first."""
    found: dict[int, float] = {}
    for line in log.splitlines():
        words = line.split()
        if len(words) == 3 and words[0] == "step":
            found.setdefault(int(words[1]), float(words[2]))
    return sorted(found.items())


def _ran(one: PlannedStart, job: str, events: Sequence[JobEvent], times: list[tuple[int, float]], first: float) -> Ran:
    own = {event.kind: event.time for event in events if event.job == job}
    if "job_succeeded" not in own:
        raise BenchClusterError(f"{one.name} did not succeed: {sorted(own)}")
    submitted = own["job_submitted"]
    return Ran(
        one.name,
        one.gpus,
        _steps(one),
        step_s(times),
        submitted - first,
        one.deadline,
        own["job_succeeded"] - submitted,
        sum(event.kind == "job_pending" for event in events if event.job == job),
        sum(event.kind == "move_done" for event in events if event.job == job),
    )


def _simulated(
    trace: Path, costs: Costs, out: Path, policy: str, nodes: int = _NODES
) -> dict[str, tuple[float, int, int]]:
    size = ("--nodes", str(nodes), "--gpus-per-node", str(_GPUS), "--cores-per-node", str(_GPUS))
    return simulated(trace, costs, out, (*size, "--policy", policy, "--plan-every", _PLAN_EVERY))


def simulated(
    trace: Path, costs: Costs, out: Path, options: Sequence[str], restore_s: float = 0.0
) -> dict[str, tuple[float, int, int]]:
    """Return what `ganger simulate` makes of a trace at these costs: JCT in seconds, preemptions and moves, by job.
    `restore_s`: what a time slice begins with; zero: the default, where no job is time-sliced."""
    given = {"start": costs.start_s, "suspend": costs.suspend_s, "resume": costs.resume_s}
    if costs.moves:
        given |= {"move": costs.move_s, "offload": costs.offload_s}
    if restore_s:
        given |= {"offload": restore_s, "restore": restore_s}
    words = [word for name, seconds in given.items() for word in ("--cost", f"{name}={seconds:.3f}s")]
    command = [*GANGER, "simulate", str(trace), *options, "--csv", str(out), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BenchClusterError(f"ganger simulate: {done.stderr.strip()}")
    with (out / "jobs.csv").open() as file:
        rows: list[dict[str, Any]] = list(csv.DictReader(file))
    return {row["job_id"]: (float(row["jct_s"]), int(row["preemptions"]), int(row["migrations"])) for row in rows}
