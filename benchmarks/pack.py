"""`ganger bench pack`: two jobs on one device, where that pays and where it does not.

Real masters, daemons and jobs, on virtual GPUs each bound to a CPU quota of its own, so that no job gains by idle
cores. A light pair waits for its data most of the time, and leaves its device to others meanwhile. A heavy pair looks
the same to a meter of processors, but holds an engine of its device while it waits, which lets one in at a time:
two of them together do what one does alone. Each pair is measured in two ways: by the live planner under `gandiva`,
which tries packs by itself, keeps one and undoes the other; and by plans of this benchmark, which let one of the pair,
the other, and both run in turn on one device, round after round, so that what else the machine does hits all three
alike.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ganger.injob.page import Page
from ganger.injob.page_layout import PageState, Word
from ganger.v1 import job_pb2, job_service_pb2, job_service_pb2_grpc, resources_pb2, scheduling_pb2, scheduling_pb2_grpc
from ganger.wire.channels import open_channel
from ganger.wire.endpoints import read_endpoint
from ganger_daemon.cgroups.contract import is_done
from ganger_daemon.cgroups.group_tree import choose_cgroups

from benchmarks.bench_cluster import START_S, BenchCluster, BenchClusterError
from benchmarks.report import BenchReport

GPU_CORES = 0.2
QUANTUM_S = 20
ROUNDS, QUICK_ROUNDS = 6, 2
PHASE_S, QUICK_PHASE_S = 5.0, 1.0
SETTLE_S = 1.0
ORDER_S = 60.0
VERDICT_S = 600.0
# What the planner asks of a pack, and how many of its standard errors the figure here has to be away from that.
LEAST_GAIN = 1.05
LEAST_DEVIATIONS = 3.0
# The planner's figure is off that by rounds by so much at most: it compares with the minute before, in which the
# machine was another one.
AGREES_WITHIN = 0.15
WAIT_S = 0.04
MEBIBYTE = 1 << 20
GPU_MIB = 200
WANTS = ("--gpus", "1", "--cpus-per-gpu", "2", "--memory", "1G", "--gpu-memory", f"{GPU_MIB}M")

JOB = """
import fcntl, os, sys, time
import torch
import ganger
torch.set_num_threads(1)
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
x = torch.ones(64, 64)
wait = float(sys.argv[1])
engine = open(f"{sys.argv[2]}.{os.environ['GANGER_DEVICES']}", "w") if len(sys.argv) > 2 else None
job = ganger.attach(model=model, optimizer=optimizer)
for step in job.steps():
    if engine:
        fcntl.flock(engine, fcntl.LOCK_EX)
    time.sleep(wait)
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if engine:
        fcntl.flock(engine, fcntl.LOCK_UN)
    job.step(loss)
"""


@dataclass(frozen=True, slots=True)
class ColocationRound:
    """Steps per second: each alone, and both together, one right after the other."""

    alone: tuple[float, float]
    together: tuple[float, float]

    @property
    def gain(self) -> float:
        return sum(packed / alone for packed, alone in zip(self.together, self.alone, strict=True))


@dataclass(frozen=True, slots=True)
class Tried:
    """What the planner did of itself: `kind` is change_kept or change_undone; `trials`: how many packs it had begun by
    the end of two more quanta."""

    kind: str
    gain: float
    deviation: float
    pause_ms: float
    seconds: float
    trials: int


def main(quick: bool = False) -> dict[str, object]:
    """Run it; `quick`: few short rounds, without the planner's trials, which take minutes."""
    quota = choose_cgroups("ganger-bench-probe", quotas=True)
    found = quota.capabilities.get("cpu_quota", "none")
    may = is_done(quota, "cpu_quota")
    quota.tidy()
    if not may:
        return {"name": "pack", "skipped": f"no CPU quota ({found}), so devices cannot be bound"}
    report = BenchReport("pack")
    report.figure("device_cores", GPU_CORES)
    for name, is_heavy in (("light", False), ("heavy", True)):
        rounds = _by_rounds(name, is_heavy, report, quick)
        gain = statistics.mean(one.gain for one in rounds)
        error = statistics.stdev([one.gain for one in rounds]) / math.sqrt(len(rounds))
        report.figure(f"{name}_gain_by_rounds", gain)
        report.figure(f"{name}_gain_by_rounds_standard_error", error)
        distance = (LEAST_GAIN - gain if is_heavy else gain - LEAST_GAIN) / max(error, 1e-9)
        if quick:
            continue
        side = "below" if is_heavy else "above"
        report.at_least(f"{name}_gain_{side}_{LEAST_GAIN}_in_standard_errors", distance, LEAST_DEVIATIONS)
        tried = _by_planner(name, is_heavy, report)
        report.at_least(f"{name}_{'undone' if is_heavy else 'kept'}", float(_is_right(tried, is_heavy)), 1.0)
        report.at_most(f"{name}_trials", float(tried.trials), 1.0)
        report.figure(f"{name}_gain_by_planner", tried.gain)
        report.figure(f"{name}_gain_by_planner_standard_error", tried.deviation)
        apart = abs(tried.gain - gain) / gain
        report.at_most(f"{name}_planner_off_rounds_ratio", apart, AGREES_WITHIN)
        report.figure(f"{name}_move_in_pause_milliseconds", tried.pause_ms)
        report.figure(f"{name}_verdict_after_seconds", tried.seconds)
    return report.result()


def _is_right(tried: Tried, is_heavy: bool) -> bool:
    return tried.kind == ("change_undone" if is_heavy else "change_kept")


# -- by plans of its own -----------------------------------------------------------------------------------------------


def _by_rounds(name: str, is_heavy: bool, report: BenchReport, quick: bool) -> list[ColocationRound]:
    count, seconds = (QUICK_ROUNDS, QUICK_PHASE_S) if quick else (ROUNDS, PHASE_S)
    with _cluster(1, "--no-planner") as cluster:
        pair = [_submit(cluster, is_heavy) for _ in range(2)]
        plans = ForcedPlans(cluster)
        for number, job in enumerate(pair):
            plans.until_approved(job, start=scheduling_pb2.StartChange(claims=[shared_claim(is_shared=number > 0)]))
            cluster.until(lambda job=job: _steps(cluster, job) > 5, START_S, f"{job} trains")  # type: ignore[misc]
        found = []
        for number in range(count):
            report.say(f"{name} pair: round {number + 1} of {count}, alone, alone, together")
            together = step_rates(cluster, pair, seconds)
            alone = []
            for left, other in ((0, 1), (1, 0)):
                plans.park(pair[other])
                (rate,) = step_rates(cluster, [pair[left]], seconds)
                alone.append(rate)
                plans.until_approved(pair[other], resume=scheduling_pb2.ResumeChange())
            found.append(ColocationRound((alone[0], alone[1]), (together[0], together[1])))
        report.samples(
            {"pair": name, "alone": one.alone, "together": one.together, "gain": one.gain, "unit": "steps_per_second"}
            for one in found
        )
        return found


class ForcedPlans:
    """Proposes to the master until it agrees."""

    def __init__(self, cluster: BenchCluster) -> None:
        self._cluster = cluster

    def park(self, job: str) -> None:
        level = job_pb2.SUSPEND_LEVEL_OFFLOAD
        self.until_approved(job, suspend=scheduling_pb2.SuspendChange(level=level))
        self._cluster.until(lambda: _show(self._cluster, job)["gang"]["phase"] == "PARKED", ORDER_S, f"{job} rests")

    def until_approved(self, job: str, **change: Any) -> None:
        """Propose a change until the master approves it: its view of the job lags behind the daemon's reports."""
        self.until_agreed({job: change})

    def until_agreed(self, changes: Mapping[str, Mapping[str, Any]]) -> None:
        """Propose changes of several jobs as one plan."""
        self._cluster.until(lambda: self._are_approved(changes), ORDER_S, f"{dict(changes)} is approved")

    def _are_approved(self, changes: Mapping[str, Mapping[str, Any]]) -> bool:
        proposed = [
            scheduling_pb2.Change(job=job, revision=int(_show(self._cluster, job)["revision"]), **change)
            for job, change in changes.items()
        ]
        with open_channel(read_endpoint(self._cluster.master)) as channel:
            stub: Any = scheduling_pb2_grpc.SchedulingServiceStub(channel)
            verdicts = stub.ProposePlan(scheduling_pb2.Plan(changes=proposed)).verdicts
        return all(verdict.approved for verdict in verdicts)


def shared_claim(is_shared: bool) -> resources_pb2.Claim:
    return resources_pb2.Claim(
        node="nodes/n1",
        device_mask=1,
        millicores=[2000],
        memory_bytes=1024 * MEBIBYTE,
        arena_bytes=GPU_MIB * MEBIBYTE * 11 // 10,
        tasks=[1],
        shared_mask=1 if is_shared else 0,
    )


def step_rates(cluster: BenchCluster, jobs: Sequence[str], seconds: float) -> list[float]:
    """Steps per second by the jobs' pages, from one step to another."""
    for job in jobs:
        cluster.until(lambda job=job: _is_running(cluster, job), ORDER_S, f"{job} runs")  # type: ignore[misc]
    time.sleep(SETTLE_S)
    begun = [_step(cluster, job) for job in jobs]
    time.sleep(seconds)
    ended = [_step(cluster, job) for job in jobs]
    return [
        (last - first) / ((at - since) / 1e9) if at > since else 0.0
        for (first, since), (last, at) in zip(begun, ended, strict=True)
    ]


def _is_running(cluster: BenchCluster, job: str) -> bool:
    with_page = _page(cluster, job)
    return with_page is not None and with_page[0] == PageState.RUNNING


def _steps(cluster: BenchCluster, job: str) -> int:
    found = _page(cluster, job)
    return 0 if found is None else found[1]


def _step(cluster: BenchCluster, job: str) -> tuple[int, int]:
    """The last one, and its time in nanoseconds."""
    found = _page(cluster, job)
    if found is None:
        raise BenchClusterError(f"{job} has no page")
    return found[1], found[2]


def _page(cluster: BenchCluster, job: str) -> tuple[int, int, int] | None:
    """State, step and time of the last step; None before there is a page."""
    uid = str(_show(cluster, job)["uid"])
    path = next((path for name, path in cluster.pages().items() if name.startswith(f"{uid}/")), None)
    if path is None:
        return None
    page = Page.open(str(path), writable=False)
    try:
        while True:
            step = page.get(Word.STEP)
            at = page.get(Word.STEP_TIME)
            if page.get(Word.STEP) == step:
                return page.get(Word.STATE), step, at
    finally:
        page.close()


# -- by the planner ----------------------------------------------------------------------------------------------------


def _by_planner(name: str, is_heavy: bool, report: BenchReport) -> Tried:
    """Three jobs on two devices: two of them are tried together."""
    began = time.monotonic()
    # The one that waits makes the planner try packs: it is not to take turns instead.
    with _cluster(2, "--plan-every", f"{QUANTUM_S}s", "--quantum", "never") as cluster:
        jobs = [_submit(cluster, is_heavy) for _ in range(3)]
        report.say(f"{name} pair: the planner measures, tries and judges (minutes)")
        cluster.until(lambda: bool(_verdicts(cluster, jobs)), VERDICT_S, "the planner has judged a pack")
        kind, figures = _verdicts(cluster, jobs)[0]
        seconds = time.monotonic() - began
        time.sleep(2 * QUANTUM_S)
        begun = _events(cluster, jobs, "move_begun")
        done = _events(cluster, jobs, "move_done")
        pauses = [float(one["pause_ms"]) for one in done if one.get("goal") == "PACK" and "pause_ms" in one]
        found = Tried(
            kind,
            float(figures["gain"]),
            float(figures["gain_deviation"]),
            pauses[0] if pauses else math.nan,
            seconds,
            sum(one.get("goal") == "PACK" for one in begun),
        )
        report.samples([{"pair": name, "planner": kind, **figures}])
        return found


def _verdicts(cluster: BenchCluster, jobs: Sequence[str]) -> list[tuple[str, dict[str, str]]]:
    kinds = ("change_kept", "change_undone")
    return [(kind, one) for kind in kinds for one in _events(cluster, jobs, kind) if one.get("goal") == "PACK"]


def _events(cluster: BenchCluster, jobs: Sequence[str], kind: str) -> list[dict[str, str]]:
    """Figures of what happened, job after job."""
    with open_channel(read_endpoint(cluster.master)) as channel:
        stub: Any = job_service_pb2_grpc.JobServiceStub(channel)
        told = [stub.ListEvents(job_service_pb2.ListEventsRequest(subject=job)).events for job in jobs]
    return [dict(event.figures) for events in told for event in events if event.kind == kind]


# -- both --------------------------------------------------------------------------------------------------------------


def _cluster(gpus: int, *master: str) -> BenchCluster:
    return BenchCluster(
        nodes=1,
        gpus=gpus,
        cores=8,
        master=("--policy", "gandiva", "--quantum", "never", *master),
        daemon=("--virtual-gpu-cores", str(GPU_CORES)),
    )


def _submit(cluster: BenchCluster, is_heavy: bool) -> str:
    script = cluster.directory / "job.py"
    script.write_text(JOB)
    engine = (str(cluster.directory / "engine"),) if is_heavy else ()
    words = ("--checkpoint-every", "never", "--directory", str(cluster.directory), "--json", "--")
    command = (sys.executable, str(script), str(WAIT_S), *engine)
    return str(json.loads(cluster.ganger("submit", *WANTS, *words, *command))["name"])


def _show(cluster: BenchCluster, job: str) -> dict[str, Any]:
    shown: dict[str, Any] = json.loads(cluster.ganger("show", job, "--json"))
    return shown
