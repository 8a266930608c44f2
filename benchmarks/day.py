"""`ganger bench day`: the same 48 real jobs under four policies, each on a cluster of its own, and what the simulator
predicts for them.

Two daemons of four virtual GPUs, each bound to a CPU quota where cgroups allow. The jobs, their arrivals and what a
virtual GPU is: `benchmarks.day_jobs`. A run goes as follows.

1. Every job runs alone, outside of any cluster and without its waits: the bits that its result must have.
2. Under each policy a new cluster receives the same submissions at the same times. Times of the schedulers are scaled
   down with the jobs, so that they are as small a part of them as usual: a plan that preempts every 5 s at most, time
   slices of 6 s, and under `fifo-backfill` room for a gang that has waited for 2 s.
3. `ganger simulate` receives the submissions of each run, the costs that its events show, and the time that each job
   takes without pauses: its number of steps by the median of their times, and what it took to end.
"""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from statistics import fmean, median
from typing import Any

from ganger.client import Client
from ganger.job import FINISHED
from ganger_daemon.cgroups.contract import is_done
from ganger_daemon.cgroups.group_tree import choose_cgroups
from ganger_master.simulator.true_rates import published_speed

from benchmarks.bench_cluster import BenchCluster, BenchClusterError
from benchmarks.day_jobs import (
    ELASTIC_BATCH,
    ELASTIC_MODEL,
    GPUS,
    MEMORY_MIB,
    PROGRAM,
    UTILISATION,
    DayJob,
    DayRun,
    TraceRow,
    day_of,
    plan_of,
    simulator_trace,
)
from benchmarks.report import BenchReport, quantile
from benchmarks.switch_timing import switches_of
from benchmarks.twin import events_of, simulated
from benchmarks.twin_comparison import Costs, JobEvent, costs_of, step_s

# The first one shows what a start takes, which time slices hide.
POLICIES = ("fifo", "fifo-backfill", "gandiva", "ganger")
DEFAULT, PLAIN = "ganger", "fifo-backfill"
EVERY = 10
SPAN_S, LOAD = 120.0, 1.1
QUICK_JOBS, QUICK_SPAN_S = 6, 4.0
PLAN_EVERY_S, QUANTUM_S, KEEP_PLACE_AFTER_S = 5.0, 6.0, 2.0
_NODES, _GPUS, _CORES, _MEMORY, _GPU_MEMORY = 2, 4, 8, "32G", "1G"
_GPU_CORES = 0.5
_MEMORY_OF_JOB = "350M"
LONGEST_S = 600.0
LARGEST_RATIO, LARGEST_ERROR = 0.75, 0.15


@dataclass(frozen=True, slots=True)
class Day:
    """A run of the day under one policy. `slice_s`, `quantum_s`: the median time of a slice switch, and the mean length
    of a slice as it was planned, which grows where switches take long; zero without time slices."""

    policy: str
    runs: Mapping[str, DayRun]
    costs: Costs
    slice_s: float
    quantum_s: float

    @property
    def average_jct_s(self) -> float:
        return fmean(run.jct_s for run in self.runs.values())


def main(quick: bool = False, only: str = "") -> dict[str, object]:
    """Run it; `quick`: a few jobs under the default alone; `only`: under one of POLICIES. Raises ValueError for
    another."""
    if only and only not in POLICIES:
        raise ValueError(f"there is no case {only!r}: there are {', '.join(POLICIES)}")
    report = BenchReport("day")
    jobs = day_of(_rows()[:QUICK_JOBS], QUICK_SPAN_S, LOAD) if quick else day_of(_rows(), SPAN_S, LOAD)
    report.say(f"{len(jobs)} jobs alone")
    alone = _alone(jobs)
    days: dict[str, Day] = {}
    for policy in (only,) if only else (DEFAULT,) if quick else POLICIES:
        days[policy] = _live(policy, jobs, report)
        _judge_results(report, days[policy], jobs, alone)
    measured = next(iter(days.values()))
    # A start under time slices includes the wait for the first of them: the start of the first run counts there.
    errors = [_predicted(report, day, jobs, measured.costs.start_s) for day in days.values()]
    if DEFAULT in days and PLAIN in days:
        ratio = days[DEFAULT].average_jct_s / days[PLAIN].average_jct_s
        report.at_most(f"{DEFAULT}_over_{PLAIN}_average_jct_ratio", ratio, LARGEST_RATIO)
    if not quick and not only:
        report.at_most("worst_prediction_error", max(errors), LARGEST_ERROR)
    return report.result()


# -- the jobs ----------------------------------------------------------------------------------------------------------


def _rows() -> list[TraceRow]:
    """Return every tenth job of the trace that comes with Ganger."""
    with (resources.files("ganger_master.simulator.traces") / "example.csv").open() as file:
        rows = list(csv.DictReader(file))
    return [TraceRow(float(row["submit_time_s"]), int(row["gpus"]), float(row["duration_s"])) for row in rows[::EVERY]]


def _speeds(job: DayJob) -> dict[int, float]:
    if not job.is_elastic:
        return {job.gpus: 1.0}
    own = published_speed((ELASTIC_MODEL, ELASTIC_BATCH), job.gpus)
    return {
        gpus: published_speed((ELASTIC_MODEL, ELASTIC_BATCH), gpus) / own for gpus in range(job.gpus, job.most_gpus + 1)
    }


def _write_plans(jobs: Sequence[DayJob], directory: Path) -> dict[str, Path]:
    """Write the programs, one for each model so that models are told apart, and what each job is to do."""
    for model in UTILISATION:
        (directory / f"{model}.py").write_text(PROGRAM)
    paths = {}
    for job in jobs:
        paths[job.name] = directory / f"{job.name}.json"
        paths[job.name].write_text(json.dumps(plan_of(job, _speeds(job), str(directory))))
    return paths


# Forks the ranks of each job from a process that has loaded torch; a few jobs at once.
_ALONE = """
import os, runpy, socket, sys, traceback
import torch, torch.distributed, torch.utils.data
import ganger.training.attached_job
# The first step of an optimizer loads most of torch.
parameter = torch.nn.Parameter(torch.zeros(1))
parameter.grad = torch.zeros(1)
torch.optim.SGD([parameter], lr=1.0).step()
at_once, ranks = int(sys.argv[1]), {}
def wait():
    pid, code = os.wait()
    if code:
        sys.exit(f"{ranks[pid]} failed")
    del ranks[pid]
for name, program, gpus in [line.split() for line in sys.stdin]:
    while len(ranks) >= at_once:
        wait()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for rank in range(int(gpus)):
        pid = os.fork()
        if not pid:
            try:
                os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=gpus)
                os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
                sys.argv = [program, name]
                runpy.run_path(program, run_name="__main__")
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        ranks[pid] = name
while ranks:
    wait()
"""


def _alone(jobs: Sequence[DayJob]) -> dict[str, str]:
    """Return the digest of each job's weights from a run outside of any cluster, without waits."""
    import tempfile

    with tempfile.TemporaryDirectory(prefix="ganger-bench-day-") as made:
        directory = Path(made)
        paths = _write_plans(jobs, directory)
        lines = "".join(f"{paths[job.name]} {directory / job.model}.py {job.gpus}\n" for job in jobs)
        environment = {name: value for name, value in os.environ.items() if not name.startswith("GANGER_")}
        command = [sys.executable, "-c", _ALONE, str(GPUS)]
        done = subprocess.run(
            command, input=lines, env=environment, capture_output=True, text=True, timeout=LONGEST_S, check=False
        )
        if done.returncode:
            raise BenchClusterError(f"a job alone failed:\n{done.stderr[-3000:]}")
        return {job.name: _weights(directory, job) for job in jobs}


def _weights(directory: Path, job: DayJob) -> str:
    """Return the digest of a job's weights; empty if it has written none, or has not made all of its steps."""
    try:
        found = json.loads((directory / f"{job.name}.result").read_text())
    except FileNotFoundError:
        return ""
    return str(found["weights"]) if found["steps"] == job.steps else ""


# -- live --------------------------------------------------------------------------------------------------------------


def _live(policy: str, jobs: Sequence[DayJob], report: BenchReport) -> Day:
    master = ("--policy", policy, *_paces(policy, QUANTUM_S))
    bound = ("--virtual-gpu-cores", f"{_GPU_CORES:g}") if _has_quota() else ()
    report.figure("device_cores", _GPU_CORES if bound else 0.0)
    daemon = ("--verbose", "--virtual-gpu-memory", _GPU_MEMORY, "--topology", f"1x{_GPUS}", *bound)
    with BenchCluster(nodes=_NODES, gpus=_GPUS, cores=_CORES, memory=_MEMORY, master=master, daemon=daemon) as cluster:
        _write_plans(jobs, cluster.directory)
        # The launchers of both nodes load torch once, and not while anything is measured.
        warm = DayJob("job99", 0.0, GPUS // 2, GPUS // 2, 0.5, ELASTIC_MODEL)
        _write_plans([warm], cluster.directory)
        for _ in range(_NODES):
            _submit(cluster, warm)
        with Client(str(cluster.master)) as client:
            _wait(client, _NODES)
            report.say(f"{policy}: {len(jobs)} jobs")
            began, load = time.monotonic(), []
            ids = {}
            for job in jobs:
                time.sleep(max(0.0, began + job.at_s - time.monotonic()))
                ids[job.name] = _submit(cluster, job)
                load.append(os.getloadavg()[0])
            _wait(client, _NODES + len(jobs))
        events = events_of(cluster)
        written = Path(f"build/bench/day-{policy}-events.json")
        written.parent.mkdir(parents=True, exist_ok=True)
        written.write_text(cluster.ganger("events", "--json"))
        report.figure(f"{policy}_load_average", fmean(load))
        day = _day(policy, jobs, ids, events, cluster, quantum_of(json.loads(written.read_text())))
    report.samples({"policy": policy, **run.to_json()} for run in day.runs.values())
    return day


def quantum_of(events: Iterable[Mapping[str, Any]]) -> float:
    """Return the mean length in seconds of the slices that were planned; zero without any."""
    planned = [float(event["figures"]["quantum_seconds"]) for event in events if event["kind"] == "rows_changed"]
    return fmean(planned) if planned else 0.0


def _paces(policy: str, quantum_s: float) -> tuple[str, ...]:
    """Return the options that a master and the simulator share. `quantum_s`: zero for none, as the simulator refuses
    one where no job is time-sliced."""
    words = ["--plan-every", f"{PLAN_EVERY_S:g}s"]
    words += ["--keep-place-after", f"{KEEP_PLACE_AFTER_S:g}s"] if policy == PLAIN else []
    return (*words, "--quantum", f"{quantum_s:.3f}s") if quantum_s else tuple(words)


def _has_quota() -> bool:
    probe = choose_cgroups("ganger-bench-probe", quotas=True)
    found = is_done(probe, "cpu_quota")
    probe.tidy()
    return found and len(os.sched_getaffinity(0)) >= _GPUS * _GPU_CORES


def _submit(cluster: BenchCluster, job: DayJob) -> str:
    gpus = f"{job.gpus}:{job.most_gpus}" if job.is_elastic else str(job.gpus)
    cores = () if job.is_data_bound else ("--cpus-per-gpu", "1")
    wants = ("--name", job.name, "--gpus", gpus, *cores, "--memory", f"{MEMORY_MIB}M", "--gpu-memory", _MEMORY_OF_JOB)
    # As the simulator has it: all on one node.
    how = ("--locality", "node", "--distributed", "--directory", str(cluster.directory), "--json", "--")
    command = (sys.executable, str(cluster.directory / f"{job.model}.py"), f"{job.name}.json")
    return str(json.loads(cluster.ganger("submit", *wants, *how, *command))["name"])


def _wait(client: Client, count: int) -> None:
    """Return when so many jobs have ended."""
    deadline = time.monotonic() + LONGEST_S
    while sum(job.state in FINISHED for job in client.list_jobs()) < count:
        if time.monotonic() > deadline:
            raise BenchClusterError(f"not all of {count} jobs have ended after {LONGEST_S:g} s")
        time.sleep(0.5)


def _day(
    policy: str,
    jobs: Sequence[DayJob],
    ids: Mapping[str, str],
    events: Sequence[JobEvent],
    cluster: BenchCluster,
    quantum_s: float,
) -> Day:
    known = {ids[job.name] for job in jobs}
    events = [event for event in events if event.job in known]
    first_s = min(event.time for event in events)
    notes = {job.name: _notes(cluster.directory, job) for job in jobs}
    ended = {ids[job.name]: notes[job.name][-1][1] for job in jobs if notes[job.name]}
    runs = {}
    for job in jobs:
        own = [event for event in events if event.job == ids[job.name]]
        times = {event.kind: event.time for event in own}
        counts = {
            kind: sum(event.kind == kind for event in own) for kind in ("job_pending", "move_done", "resize_done")
        }
        runs[job.name] = DayRun(
            job.name,
            times["job_submitted"] - first_s,
            times.get("job_succeeded", float("inf")) - times["job_submitted"],
            _step_s(notes[job.name], job),
            times.get("job_succeeded", 0.0) - ended.get(ids[job.name], 0.0),
            job.steps,
            counts["job_pending"],
            counts["move_done"],
            counts["resize_done"],
            _weights(cluster.directory, job),
        )
    succeeded = [event for event in events if event.kind != "job_succeeded" or event.job in ended]
    seconds = [switch.seconds for switch in switches_of(cluster) if switch.seconds > 0.0]
    return Day(policy, runs, costs_of(succeeded, ended, ()), median(seconds) if seconds else 0.0, quantum_s)


def _notes(directory: Path, job: DayJob) -> list[tuple[int, float, int]]:
    """Return step, Unix seconds and number of GPUs as the job noted them."""
    try:
        lines = (directory / f"{job.name}.notes").read_text().splitlines()
    except FileNotFoundError:
        return []
    return [(int(step), float(at), int(world)) for step, at, world in map(str.split, lines)]


def _step_s(notes: Sequence[tuple[int, float, int]], job: DayJob) -> float:
    return step_s([(step, at) for step, at, world in notes if world == job.gpus] or [(0, 0.0), (1, 0.1)])


# -- what is made of it ------------------------------------------------------------------------------------------------


def _judge_results(report: BenchReport, day: Day, jobs: Sequence[DayJob], alone: Mapping[str, str]) -> None:
    runs = day.runs
    lost = [job.name for job in jobs if runs[job.name].jct_s == float("inf")]
    report.at_most(f"{day.policy}_jobs_lost", len(lost), 0)
    different = [name for name, run in runs.items() if run.weights != alone[name]]
    report.at_most(f"{day.policy}_results_unlike_alone", len(different), 0)
    if lost:
        raise BenchClusterError(f"{day.policy}: {', '.join(lost)} did not succeed")
    report.figure(f"{day.policy}_jobs", len(runs))
    report.figure(f"{day.policy}_average_jct_s", day.average_jct_s)
    report.figure(f"{day.policy}_p95_jct_s", quantile([run.jct_s for run in runs.values()], 0.95))
    report.figure(f"{day.policy}_makespan_s", max(run.submit_s + run.jct_s for run in runs.values()))
    for what in ("preemptions", "moves", "resizes"):
        report.figure(f"{day.policy}_{what}", sum(getattr(run, what) for run in runs.values()))
    for what in ("start_s", "suspend_s", "resume_s", "end_s", "move_s", "offload_s"):
        report.figure(f"{day.policy}_{what}", getattr(day.costs, what))
    report.figure(f"{day.policy}_slice_switch_s", day.slice_s)
    report.figure(f"{day.policy}_quantum_s", day.quantum_s)


def _predicted(report: BenchReport, day: Day, jobs: Sequence[DayJob], start_s: float) -> float:
    """Simulate the day, and return by how much its average JCT differs, as a share of the measured one. `start_s`: what
    a start takes where jobs are time-sliced."""
    directory = Path("build/bench")
    trace = directory / f"day-{day.policy}.csv"
    runs = day.runs.items()
    trace.write_text(
        simulator_trace(jobs, {name: run.submit_s for name, run in runs}, {name: run.alone_s for name, run in runs})
    )
    size = ("--nodes", str(_NODES), "--gpus-per-node", str(_GPUS), "--cores-per-node", str(_CORES))
    memory = ("--memory-per-node", _MEMORY, "--gpu-memory", _GPU_MEMORY)
    options = (*size, *memory, "--policy", day.policy, *_paces(day.policy, day.quantum_s))
    costs = replace(day.costs, start_s=start_s) if day.quantum_s else day.costs
    found = simulated(trace, costs, directory / f"day-{day.policy}", options, day.slice_s / 2)
    report.samples(
        {"policy": day.policy, "name": name, "jct_s": day.runs[name].jct_s, "predicted_s": jct_s, "preemptions": stops}
        for name, (jct_s, stops, _) in found.items()
    )
    predicted_s = fmean(jct_s for jct_s, _, _ in found.values())
    error = predicted_s / day.average_jct_s - 1
    report.figure(f"{day.policy}_predicted_jct_s", predicted_s)
    report.figure(f"{day.policy}_predicted_preemptions", sum(stops for _, stops, _ in found.values()))
    report.figure(f"{day.policy}_prediction_error", error)
    return abs(error)
