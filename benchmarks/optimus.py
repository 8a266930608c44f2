"""`ganger bench optimus`: six elastic jobs under `optimus`, `drf` and `fifo`, on a master and two daemons.

Three jobs train with parameter servers and workers, three by all-reduce; two of the latter end when their loss has
converged, which only they find out. A rank computes by waiting, as on a virtual GPU, and then exchanges real gradients:
so a step takes compute / workers + transfer * workers / servers, or compute / GPUs + a sum that grows with them, on a
machine of any number of cores. `optimus` may give each job any size of its range. Under `drf` and `fifo` a job has the
size for which its user asked.

Figures of each policy: average completion time, makespan, and the share of the training in which jobs stood still for
another size (the paper: 2.54 %). Under `optimus` also the error of speeds that it foretold before a resize, and of
remaining times after a quarter, a half and three quarters of a run, with how often the range held the truth.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

import yaml
from ganger.client import Client
from ganger.job import FINISHED
from ganger.v1.job_pb2 import Job
from ganger.wire import times

from benchmarks.bench_cluster import BenchCluster, BenchClusterError
from benchmarks.report import BenchReport

POLICIES = ("optimus", "drf", "fifo")
NODES, GPUS = 2, 4
PLAN_EVERY = "4s"
EVERY_S = 3.0
LONGEST_S = 400.0
BATCH, STEPS_OF_EPOCH = 12, 12
LARGEST_JCT_RATIO = 1.0
# The restart of six processes on two cores takes a part of a job of a minute that it does not take of one of hours.
LARGEST_OVERHEAD = 0.2

PROGRAM = """
import json, os, sys, time
from pathlib import Path
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh
import ganger
plan = json.loads(Path(sys.argv[1]).read_text())
torch.set_num_threads(1)
torch.manual_seed(1)
distributed.init_process_group("gloo")
rank, world = distributed.get_rank(), distributed.get_world_size()
servers = json.loads(os.environ.get("GANGER_ROLE_SIZES", "{}")).get("ps", 0)
workers = world - servers
# A loss that falls with one over the steps, as Optimus has it, from 3.5 on.
network = nn.ParameterList([nn.Parameter(torch.full((8,), 1.17, dtype=torch.float64)) for _ in range(3)])
scale = torch.randn(plan["steps_of_epoch"] * plan["batch"], generator=torch.Generator().manual_seed(2)) * 0.05 + 1.0
data = torch.utils.data.TensorDataset(scale.double())
flat = nn.utils.parameters_to_vector


def write(job):
    with open(plan["notes"], "a") as notes:
        notes.write(f"{job.step_count + 1} {time.time()} {servers} {workers}\\n")


def gradients(x):
    loss = torch.stack([parameter.pow(8).mean() for parameter in network]).mean() * x.mean() + 0.2
    network.zero_grad()
    loss.backward()
    return loss


def train(mesh=None, exchange=None, is_first=False):
    optimizer = torch.optim.SGD(network.parameters(), lr=plan["rate"]) if exchange is None else None
    more = {} if optimizer is None else {"optimizer": optimizer}
    job = ganger.attach(model=network, **more)
    loader = job.dataloader(data, global_batch=plan["batch"], shuffle=True, **({"mesh": mesh} if mesh else {}))
    before = None
    if exchange is not None:
        exchange(None)
    for epoch in job.epochs(plan["epochs"]):
        losses = []
        for (x,) in loader:
            loss = gradients(x)
            time.sleep(plan["compute_s"] / workers)
            if exchange is not None:
                exchange(network)
            else:
                if world > 1:
                    time.sleep(plan["transfer_s"] * world)
                    own = flat([parameter.grad for parameter in network])
                    distributed.all_reduce(own)
                    nn.utils.vector_to_parameters(own / world, [parameter.grad for parameter in network])
                optimizer.step()
            if is_first:
                write(job)
            losses.append(loss.item())
            job.step(loss)
        mean = torch.tensor(sum(losses) / max(1, len(losses)))
        if exchange is None and world > 1:
            # All ranks end together.
            distributed.broadcast(mean, 0)
        if plan["converges"] and before is not None and before - mean < plan["converges"] * plan["largest"]:
            break
        before = mean


def serve(kept):
    own = kept[rank]
    optimizer = torch.optim.SGD(own, lr=plan["rate"])
    job = ganger.attach(model=network, optimizer=optimizer, shard=own)

    def send():
        for worker in range(servers, world):
            distributed.send(flat(own).detach(), worker)

    send()
    for _ in job.steps(plan["epochs"] * plan["steps_of_epoch"]):
        total = torch.zeros_like(flat(own))
        for worker in range(servers, world):
            one = torch.empty_like(total)
            distributed.recv(one, worker)
            total += one
        time.sleep(plan["transfer_s"] * workers / servers)
        for parameter, part in zip(own, (total / workers).split([one.numel() for one in own])):
            parameter.grad = part.view_as(parameter).clone()
        optimizer.step()
        send()
        job.step()


def with_servers(kept):
    def exchange(found):
        for server, own in enumerate(kept):
            if found is not None:
                distributed.send(flat([parameter.grad for parameter in own]), server)
        for server, own in enumerate(kept):
            vector = flat(own).detach()
            distributed.recv(vector, server)
            nn.utils.vector_to_parameters(vector, own)

    return exchange


if servers:
    # All ranks make it.
    mesh = DeviceMesh("cpu", list(range(servers, world)))
    kept = [list(network)[number::servers] for number in range(servers)]
    serve(kept) if rank < servers else train(mesh, with_servers(kept), rank == servers)
else:
    train(is_first=rank == 0)
"""


@dataclass(frozen=True, slots=True)
class OptimusJob:
    """A job. `servers`: none by all-reduce; `asked`: the workers for which its user asks, with twice as few servers;
    seconds of a step on one worker; `converges`: it ends by its loss."""

    name: str
    servers: int
    asked: int
    compute_s: float
    transfer_s: float
    epochs: int
    converges: float = 0.0

    def steps_per_s(self, servers: int, workers: int) -> float:
        """Return what the program is to reach with these tasks."""
        exchange = self.transfer_s * workers / servers if servers else self.transfer_s * workers * (workers > 1)
        return 1.0 / (self.compute_s / workers + exchange)


JOBS = (
    OptimusJob("served-wide", 2, 4, 0.8, 0.05, 17),
    OptimusJob("reduced-poorly", 0, 4, 0.5, 0.05, 15),
    OptimusJob("served", 1, 2, 0.6, 0.04, 10),
    OptimusJob("converges", 0, 2, 0.6, 0.02, 100, 0.016),
    OptimusJob("served-slowly", 1, 2, 0.6, 0.15, 8),
    OptimusJob("converges-later", 0, 2, 0.8, 0.02, 100, 0.011),
)


@dataclass(frozen=True, slots=True)
class OptimusLook:
    """What a job showed at a time, in Unix seconds. Of the remaining time: seconds, `high_s` infinite if unbounded."""

    job: str
    time_s: float
    expected_s: float
    low_s: float
    high_s: float
    is_guess: bool


@dataclass(frozen=True, slots=True)
class PolicyRun:
    """What became of the jobs under a policy; `notes`: step, Unix seconds, servers and workers of each step."""

    policy: str
    submitted_s: Mapping[str, float]
    ended_s: Mapping[str, float]
    notes: Mapping[str, Sequence[tuple[int, float, int, int]]]
    looks: Sequence[OptimusLook]
    reasons: Mapping[str, Sequence[tuple[float, str]]]
    judged: tuple[int, int]

    @property
    def average_jct_s(self) -> float:
        return fmean(self.ended_s[name] - self.submitted_s[name] for name in self.ended_s)

    @property
    def makespan_s(self) -> float:
        return max(self.ended_s.values()) - min(self.submitted_s.values())


def main(quick: bool = False, only: str = "") -> dict[str, object]:
    """Run all policies; `quick`: the first two jobs, shorter; `only`: one policy. Raises ValueError for another."""
    if only and only not in POLICIES:
        raise ValueError(f"there is no case {only!r}: there are {', '.join(POLICIES)}")
    report = BenchReport("optimus")
    jobs = JOBS[:2] if quick else JOBS
    runs = {policy: _live(policy, jobs, report) for policy in ((only,) if only else POLICIES)}
    for policy, run in runs.items():
        report.figure(f"{policy}_average_jct_s", run.average_jct_s)
        report.figure(f"{policy}_makespan_s", run.makespan_s)
        share, changes = overhead(run)
        report.figure(f"{policy}_resizes", changes)
        report.at_most(f"{policy}_overhead_share", share, LARGEST_OVERHEAD)
        report.samples({"policy": policy, **asdict(look)} for look in run.looks)
        report.samples(
            {"policy": policy, "job": name, "step": step, "time_s": at_s, "servers": servers, "workers": workers}
            for name, notes in run.notes.items()
            for step, at_s, servers, workers in notes
        )
    if "optimus" in runs:
        _judge(report, runs["optimus"], jobs)
    if len(runs) == len(POLICIES) and not quick:
        for other in POLICIES[1:]:
            for what in ("average_jct_s", "makespan_s"):
                ratio = getattr(runs["optimus"], what) / getattr(runs[other], what)
                name = f"optimus_over_{other}_{what.removesuffix('_s')}_ratio"
                report.at_most(name, ratio, LARGEST_JCT_RATIO)
    return report.result()


# -- live --------------------------------------------------------------------------------------------------------------


def _live(policy: str, jobs: Sequence[OptimusJob], report: BenchReport) -> PolicyRun:
    daemon = ("--topology", f"1x{GPUS}", "--virtual-gpu-memory", "1G")
    with BenchCluster(
        nodes=NODES, gpus=GPUS, cores=16, memory="24G", master=("--policy", policy, "--plan-every", PLAN_EVERY),
        daemon=daemon,
    ) as cluster:  # fmt: skip
        (cluster.directory / "train.py").write_text(PROGRAM)
        # Launchers load torch once, and not while anything is measured.
        warm = OptimusJob("warm", 0, 4, 0.01, 0.0, 1)
        with Client(str(cluster.master)) as client:
            for _ in range(NODES):
                _submit(cluster, warm, is_elastic=False)
            _follow(client, {}, NODES)
            report.say(f"{policy}: {len(jobs)} jobs")
            names: dict[str, str] = {}
            looks: list[OptimusLook] = []
            for job in jobs:
                names[_submit(cluster, job, is_elastic=policy == "optimus")] = job.name
                time.sleep(EVERY_S)
            looks, judged = _follow(client, names, NODES + len(jobs))
            shown = {job.name: job for job in client.list_jobs()}
        failed = [names[name] for name in names if shown[name].state != Job.STATE_SUCCEEDED]
        if failed:
            raise BenchClusterError(
                f"{policy}: {', '.join(failed)} did not succeed: {cluster.ganger('events')[-3000:]}"
            )
        notes = {job.name: _notes(cluster.directory / f"{job.name}.notes") for job in jobs}
        reasons: dict[str, list[tuple[float, str]]] = {job.name: [] for job in jobs}
        for event in json.loads(cluster.ganger("events", "--json")):
            if event["subject"] in names and " steps/s" in event["message"]:
                at_s = datetime.fromisoformat(event["time"]).timestamp()
                reasons[names[event["subject"]]].append((at_s, event["message"]))
    submitted = {names[name]: times.unix_s(shown[name].create_time) for name in names}
    ended = {names[name]: times.unix_s(shown[name].end_time) for name in names}
    return PolicyRun(policy, submitted, ended, notes, looks, reasons, judged)


def _submit(cluster: BenchCluster, job: OptimusJob, *, is_elastic: bool) -> str:
    """Submit a job, and return its name."""
    plan = {
        **asdict(job), "batch": BATCH, "steps_of_epoch": STEPS_OF_EPOCH, "rate": 0.004, "largest": 3.5,
        "notes": str(cluster.directory / f"{job.name}.notes"),
    }  # fmt: skip
    (cluster.directory / f"{job.name}.json").write_text(json.dumps(plan))
    one = {"cpus": 1, "memory": "400M"}
    described: dict[str, Any] = {"name": job.name, "distributed": True, "gpu_memory": "64M"}
    described["command"] = [sys.executable, str(cluster.directory / "train.py"), f"{job.name}.json"]
    if job.servers:
        described["roles"] = [
            {"name": "ps", "tasks": "1:3" if is_elastic else job.servers, **one},
            {"name": "worker", "tasks": "1:4" if is_elastic else job.asked, "gpus": 1, **one},
        ]
    else:
        described |= {"gpus": "1:4" if is_elastic else job.asked, "cpus_per_gpu": 1, "memory": "400M"}
    path = cluster.directory / f"{job.name}.yaml"
    path.write_text(yaml.safe_dump(described))
    converges = ("--converges", f"{job.converges}") if job.converges else ()
    words = ("submit", "--file", str(path), *converges, "--directory", str(cluster.directory), "--json")
    return str(json.loads(cluster.ganger(*words))["name"])


def _follow(client: Client, names: Mapping[str, str], count: int) -> tuple[list[OptimusLook], tuple[int, int]]:
    """Look at the jobs each second until so many have ended. Return the looks, and the judged and held ranges."""
    looks: list[OptimusLook] = []
    judged = (0, 0)
    deadline = time.monotonic() + LONGEST_S
    while True:
        jobs = list(client.list_jobs())
        for job in jobs:
            if job.name in names and job.HasField("remaining_time"):
                found = job.remaining_time
                high_s = times.seconds(found.high) if found.HasField("high") else float("inf")
                spans = times.seconds(found.expected), times.seconds(found.low), high_s
                looks.append(OptimusLook(names[job.name], times.unix_s(found.time), *spans, found.is_guess))
                judged = max(judged, (found.judged_ranges, found.held_ranges))
        if sum(job.state in FINISHED for job in jobs) >= count:
            return looks, judged
        if time.monotonic() > deadline:
            raise BenchClusterError(f"not all of {count} jobs have ended after {LONGEST_S:g} s")
        time.sleep(1.0)


def _notes(path: Path) -> list[tuple[int, float, int, int]]:
    if not path.exists():
        return []
    lines = (line.split() for line in path.read_text().splitlines())
    return [(int(step), float(at_s), int(servers), int(workers)) for step, at_s, servers, workers in lines]


# -- what is made of it ------------------------------------------------------------------------------------------------


def overhead(run: PolicyRun) -> tuple[float, int]:
    """Return the share of the training in which jobs stood still for another size, and how often they did. The time of
    a step with the new size does not count as such."""
    still = whole = 0.0
    changes = 0
    for notes in run.notes.values():
        whole += notes[-1][1] - notes[0][1]
        for before, after, later in zip(notes, notes[1:], notes[2:], strict=False):
            if before[2:] != after[2:]:
                changes += 1
                still += max(0.0, (after[1] - before[1]) - (later[1] - after[1]))
    return still / max(whole, 1e-9), changes


def rate_at(notes: Sequence[tuple[int, float, int, int]], servers: int, workers: int) -> float:
    """Return the median steps/s with these tasks; NaN without two such steps in a row."""
    spans = [after[1] - before[1] for before, after in pairwise(notes) if before[2:] == after[2:] == (servers, workers)]
    return 1.0 / median(spans) if spans else float("nan")


def foretold_speed(text: str) -> tuple[int, int, float] | None:
    """Return servers, workers and steps/s that a reason foretells: "from ps=1 worker=1 to ps=2 worker=3: 1.2 to 2.1
    steps/s", or "from 1 GPU to 3: 10 steps/s with 1, 27 with 3"."""
    head, _, figures = text.partition(": ")
    size = head.rpartition(" to ")[2]
    if "ps=" in size:
        servers, workers = (int(word.partition("=")[2]) for word in size.split()[:2])
        return servers, workers, float(figures.split(" to ")[1].split()[0])
    if size.isdigit() and " with " in figures:
        return 0, int(size), float(figures.split(", ")[1].split()[0])
    return None


def speed_errors(run: PolicyRun) -> list[tuple[float, float]]:
    """Return when a resize was decided, as a share of the job's run, and how far the foretold rate was off."""
    found = []
    for name, reasons in run.reasons.items():
        begins_s, ends_s = run.notes[name][0][1], run.ended_s[name]
        for at_s, text in reasons:
            foretold = foretold_speed(text[text.index("from ") :]) if "from " in text else None
            if foretold is not None and (rate := rate_at(run.notes[name], *foretold[:2])) > 0.0:
                found.append(((at_s - begins_s) / (ends_s - begins_s), abs(foretold[2] / rate - 1.0)))
    return found


def remaining_errors(run: PolicyRun, names: Sequence[str], share: float) -> list[tuple[float, bool]]:
    """Return how far remaining times were off after this share of each run, as a share of the run, and whether the
    range held the truth. Resizes and waits that came later count as errors, too."""
    found = []
    for name in names:
        begins_s, ends_s = run.notes[name][0][1], run.ended_s[name]
        at_s = begins_s + share * (ends_s - begins_s)
        looks = [look for look in run.looks if look.job == name and look.time_s <= at_s + 3.0]
        if looks:
            look = looks[-1]
            left_s = ends_s - look.time_s
            is_held = not look.is_guess and look.low_s <= left_s <= look.high_s
            found.append((abs(look.expected_s - left_s) / (ends_s - begins_s), is_held))
    return found


def _judge(report: BenchReport, run: PolicyRun, jobs: Sequence[OptimusJob]) -> None:
    errors = speed_errors(run)
    report.figure("foretold_speeds", len(errors))
    for part, begin in (("first", 0.0), ("second", 0.5)):
        chosen = [error for at, error in errors if begin <= at < begin + 0.5]
        if chosen:
            report.figure(f"speed_error_in_{part}_half", fmean(chosen))
    kinds = {
        "known_epochs": [job.name for job in jobs if not job.converges],
        "convergence": [job.name for job in jobs if job.converges],
    }
    for kind, names in kinds.items():
        for share in (0.25, 0.5, 0.75):
            found = remaining_errors(run, names, share)
            if found:
                name = f"{kind}_error_at_{100 * share:.0f}_percent"
                report.figure(name, fmean(error for error, _ in found))
                report.figure(f"{kind}_held_at_{100 * share:.0f}_percent", fmean(held for _, held in found))
    report.figure("judged_ranges", run.judged[0])
    report.figure("held_ranges", run.judged[1])
