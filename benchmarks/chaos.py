"""`ganger bench chaos`: every part of a cluster is killed, over and over, and no job and no step is lost or done twice.

Two masters on a PostgreSQL server of the benchmark's own, and daemons with virtual GPUs. Jobs of all mechanisms come in
an endless stream. A seeded schedule kills (SIGKILL) or stops for some seconds (SIGSTOP) the leading master, the
stand-by, the planner, daemons, launchers, ranks, command lines of users and job schedulers. Masters and daemons are
restarted, as a unit of systemd would. Meanwhile users order moves, suspensions and new sizes. The run has a part for
each of three policies, each on a cluster of its own.

After each part kills end, and every job must end well: with the steps and the result of an undisturbed run, a complete
log, and nothing left over of it. Only the death of a rank may undo steps, and none that is in a complete checkpoint.
"""

from __future__ import annotations

import random
import shutil
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from ganger.client import Client
from ganger.v1 import job_pb2
from ganger.wire.endpoints import EndpointError
from ganger.wire.errors import ApiError

from benchmarks.bench_cluster import BenchClusterError
from benchmarks.chaos_cluster import ChaosCluster, Killer
from benchmarks.chaos_plan import (
    REFERENCES,
    JobKind,
    event_counts,
    log_findings,
    not_once,
    schedule,
    script_findings,
    step_findings,
)
from benchmarks.chaos_stream import LIVE, MOST_STEPS, ChaosJob, JobStream
from benchmarks.chaos_users import ChaosUsers
from benchmarks.postgresql_server import why_no_postgresql
from benchmarks.report import SAMPLES, BenchReport
from benchmarks.witnesses import Death, Step, what_counts

# Options of the masters by policy: plans and kept places as soon as jobs of some seconds need them.
_PACES: Final = ("--plan-every", "4s", "--quantum", "3s")
MASTER_OPTIONS: Final = {"ganger": _PACES, "gandiva": _PACES, "fifo-backfill": ("--keep-place-after", "5s")}
POLICIES: Final = tuple(MASTER_OPTIONS)
NODES, GPUS = 2, 4
SEED: Final = 1
PART_S, QUICK_PART_S = 405.0, 30.0
EVERY_S: Final = 1.9
LEAST_KILLS, LEAST_S = 500, 1200.0
# By then all jobs have ended after the last kill, also on a busy machine.
DRAIN_S, QUICK_DRAIN_S = 300.0, 90.0
LEFT_S: Final = 30.0
# Calls of one round of the stream together, each with the search for the master that leads.
LONGEST_ROUND_S: Final = 60.0
_TICK_S: Final = 0.3


def main(quick: bool = False, only: str = "") -> dict[str, Any]:
    """Return the report. `quick`: one short part; `only`: the part of one policy. Raises ValueError for another one."""
    if only and only not in POLICIES:
        raise ValueError(f"there is no case {only!r}: there are {', '.join(POLICIES)}")
    if why := why_no_postgresql():
        return {"name": "chaos", "skipped": why}
    report = BenchReport("chaos")
    policies = [only] if only else POLICIES[:1] if quick else POLICIES
    references: dict[int, list[Step]] = {}
    parts = []
    for number, policy in enumerate(policies):
        seconds = QUICK_PART_S if quick else PART_S
        part = ChaosPart(policy, SEED + number, seconds, references)
        parts.append(part.run(report))
    _summarise(report, parts, is_whole=not quick and not only)
    return report.result()


# Kinds of findings: what must hold and does not.
FINDINGS: Final = ("lost", "twice", "not_done", "steps_wrong", "logs_incomplete", "left_over", "other")


@dataclass
class PartResult:
    """The result of one part of the run. `findings`: in words, by kind."""

    policy: str
    seconds: float
    # The longest time for which the stream had no answer.
    longest_round_s: float = 0.0
    jobs: int = 0
    steps: int = 0
    undone: int = 0
    kills: Counter[str] = field(default_factory=Counter)
    pauses: Counter[str] = field(default_factory=Counter)
    missed: Counter[str] = field(default_factory=Counter)
    events: Counter[str] = field(default_factory=Counter)
    orders: Counter[str] = field(default_factory=Counter)
    findings: dict[str, list[str]] = field(default_factory=lambda: {name: [] for name in FINDINGS})


# Events that show a mechanism at work, by the name of the figure.
_MECHANISMS: Final = {
    "preemptions": "job_pending",
    "suspensions": "gang_parked",
    "moves": "move_done",
    "resizes": "resize_done",
    "slice_plans": "rows_changed",
}


def _summarise(report: BenchReport, parts: Sequence[PartResult], *, is_whole: bool) -> None:
    kills: Counter[str] = sum((part.kills for part in parts), Counter())
    pauses: Counter[str] = sum((part.pauses for part in parts), Counter())
    for part in parts:
        name = part.policy.replace("-", "_")
        report.figure(f"{name}_jobs", part.jobs)
        for figure, kind in _MECHANISMS.items():
            report.figure(f"{name}_{figure}", part.events[kind])
        report.figure(f"{name}_co_locations_ordered", part.orders["co-locate"])
        report.samples(
            {"policy": part.policy, "events": part.events, "orders": part.orders, "missed": part.missed} for _ in (1,)
        )
    for part_name in sorted({*kills, *pauses}):
        report.figure(f"kills_of_{part_name.replace(' ', '_').replace('-', '_')}", kills[part_name])
        report.figure(f"pauses_of_{part_name.replace(' ', '_').replace('-', '_')}", pauses[part_name])
    report.figure("pauses", pauses.total())
    report.at_most("longest_wait_for_answers_s", max(part.longest_round_s for part in parts), LONGEST_ROUND_S)
    report.figure("jobs", sum(part.jobs for part in parts))
    report.figure("steps", sum(part.steps for part in parts))
    report.figure("steps_done_again_after_a_rank_died", sum(part.undone for part in parts))
    if is_whole:
        report.at_least("kills", kills.total(), LEAST_KILLS)
        report.at_least("length_s", sum(part.seconds for part in parts), LEAST_S)
    else:
        report.figure("kills", kills.total())
        report.figure("length_s", sum(part.seconds for part in parts))
    for kind in FINDINGS:
        report.at_most(kind, sum(len(part.findings[kind]) for part in parts), 0)


class ChaosPart:
    """The run under one policy, on a cluster of its own."""

    def __init__(self, policy: str, seed: int, seconds: float, references: dict[int, list[Step]]) -> None:
        dice = random.Random(seed)
        self._references = references
        self._length_s = seconds
        self._drain_s = QUICK_DRAIN_S if seconds == QUICK_PART_S else DRAIN_S
        self._cluster = ChaosCluster(NODES, GPUS, ("--policy", policy, *MASTER_OPTIONS[policy]))
        self._killer = Killer(self._cluster, schedule(seed, seconds, EVERY_S))
        self._stream = JobStream(self._cluster, self._killer, dice)
        self._users = ChaosUsers(self._cluster, self._killer, self._stream, dice)
        self._result = PartResult(policy, seconds)

    def run(self, report: BenchReport) -> PartResult:
        """Return the result, also of a part that was cut short: then that is a finding."""
        with self._cluster:
            try:
                with Client(str(self._cluster.master), patience_s=20.0) as client:
                    self._run(client, report)
            except (ApiError, EndpointError, BenchClusterError, OSError) as error:
                self._found("other", [f"the part was cut short by {error!r}\n{self._cluster.tail()}"])
            finally:
                self._killer.end()
                self._keep(report)
            roots = self._cluster.cgroups()
        self._found("left_over", [f"cgroup {root} of a daemon that ended" for root in roots if root.exists()])
        return self._result

    def _found(self, kind: str, texts: Sequence[str]) -> None:
        self._result.findings[kind] += texts

    def _run(self, client: Client, report: BenchReport) -> None:
        self._refer(client)
        report.say(f"{self._result.policy}: kills begin")
        self._killer.start()
        until = time.monotonic() + self._length_s
        while time.monotonic() < until:
            self._go_on(client)
            time.sleep(_TICK_S)
        self._killer.calm()
        kills, submissions = self._killer.kills.total(), len(self._stream.jobs)
        report.say(f"{self._result.policy}: {kills} kills, {submissions} submissions; the jobs end now")
        self._drain(client)
        self._judge(client)
        self._wait(lambda: not self._cluster.leftovers(), LEFT_S)
        self._found("left_over", self._cluster.leftovers())

    def _refer(self, client: Client) -> None:
        """Run each kind of gang undisturbed; later parts use the same results."""
        found = []
        for gpus in [gpus for gpus in REFERENCES if gpus not in self._references]:
            job = self._stream.new(JobKind(f"reference{gpus}", gpus, 1), MOST_STEPS)
            message = client.submit(**self._stream.described(job, 0.0), request_id=job.request_id).message
            job.name, job.uid = message.name, message.uid
            self._stream.jobs.append(job)
            found.append(job)
        names = {job.name for job in found}
        if not self._wait(lambda: not names & {one.name for one in client.list_jobs(LIVE)}, DRAIN_S):
            raise BenchClusterError(f"the undisturbed jobs did not end:\n{self._cluster.tail()}")
        self._references.update({job.kind.gpus: job.record.read() for job in found})

    def _go_on(self, client: Client) -> None:
        began = time.monotonic()
        self._stream.collect()
        self._users.resume(client)
        try:
            self._stream.feed(client)
            self._users.order(client)
            self._users.watch(client)
        except (ApiError, EndpointError) as error:
            self._stream.failed("call", error)
        self._result.longest_round_s = max(self._result.longest_round_s, time.monotonic() - began)

    # -- the end

    def _drain(self, client: Client) -> None:
        """Wait until every submission is accepted and every job has ended."""
        self._stream.hurry.touch()

        def is_over() -> bool:
            self._stream.collect()
            self._users.resume(client)
            try:
                self._stream.submit(client)
                for suspended in client.list_jobs([job_pb2.Job.STATE_SUSPENDED]):
                    # The answer to its order to resume was an error.
                    client.resume_job(suspended.name)
                return not self._stream.pending and not self._users.due and not list(client.list_jobs(LIVE))
            except (ApiError, EndpointError) as error:
                self._stream.failed("call", error)
                return False

        if not self._wait(is_over, self._drain_s):
            left = f"{len(self._stream.pending)} submissions and {len(self._users.due)} orders are left"
            self._found("other", [f"jobs are left {self._drain_s:g} s after the last kill; {left}"])
        self._found("not_done", [f"{job.label} was never accepted" for job in self._stream.pending])
        self._wait(lambda: all(process.poll() is not None for _, process, _ in self._users.watchers), LEFT_S)
        for one in self._users.watchers:
            if one[1].poll() is None:
                self._found("other", [f"`ganger {one[0]}` has not ended: {one[2].read_text()[-300:]}"])
            else:
                self._users.judge_watcher(one)

    def _judge(self, client: Client) -> None:
        findings, jobs = self._result.findings, list(client.list_jobs())
        arrays = client.list_arrays()
        single = [(one.name, one.spec.display_name) for one in jobs if not one.HasField("array")]
        listed = [*single, *((one.name, one.display_name) for one in arrays)]
        lost, twice = not_once({job.label: job.name for job in self._stream.jobs}, listed)
        findings["lost"] += lost
        findings["twice"] += twice
        self._result.jobs = len(jobs)
        self._result.events = event_counts(client.list_events())
        by_name = {job.name: job for job in self._stream.jobs}
        labels = {job.label: job for job in self._stream.jobs if job.kind.members}
        for message in jobs:
            job = by_name.get(message.name) or labels.get(message.spec.display_name)
            if job is None:
                findings["other"].append(f"{message.name} ({message.spec.display_name}) was never submitted")
            elif message.state != job_pb2.Job.STATE_SUCCEEDED:
                history = self._cluster.ganger("history", message.name.removeprefix("jobs/"))[-3000:]
                state = job_pb2.Job.State.Name(message.state)
                findings["not_done"].append(f"{message.name} ({job.label}) is {state}:\n{history}")
            else:
                try:
                    self._judge_job(client, job, message)
                except ApiError as error:
                    findings["logs_incomplete"].append(
                        f"{message.name} ({job.label}): its log cannot be read: {error!r}"
                    )

    def _judge_job(self, client: Client, job: ChaosJob, message: job_pb2.Job) -> None:
        deaths = [death for death in self._killer.deaths if death.job == message.uid]
        where = f"{message.name} ({job.label}): "
        if not job.kind.has_steps:
            log = self._log(client, message.name, 0)
            most = len(deaths) + self._killer.kills["launcher"]
            self._found("logs_incomplete", [where + one for one in script_findings(log, job.label, most)])
            return
        steps = job.record.read()
        self._result.steps += len(steps)
        self._result.undone += len(steps) - len(what_counts(steps))
        own = [Death(job.label, death.at, death.saved) for death in deaths]
        reference = self._references[job.kind.gpus]
        wrong = step_findings(steps, own, job.steps, job.kind.gpus, reference)
        self._found("steps_wrong", [where + one for one in wrong])
        for rank in sorted({one.rank for one in steps}):
            log = self._log(client, message.name, rank)
            self._found("logs_incomplete", [where + one for one in log_findings(log, rank, steps, len(deaths))])

    @staticmethod
    def _log(client: Client, name: str, rank: int) -> str:
        return b"".join(chunk.data for chunk in client.read_log(name, rank)).decode(errors="replace")

    def _keep(self, report: BenchReport) -> None:
        """Keep what happened, and, if there are findings, the logs of all programs."""
        result, killer = self._result, self._killer
        result.kills, result.pauses, result.missed = killer.kills, killer.pauses, killer.missed
        result.orders = self._stream.calls
        result.findings["other"] += [*killer.findings, *self._stream.findings]
        found = [f"{kind}: {text}" for kind, texts in result.findings.items() for text in texts]
        for text in found[:20]:
            report.say(f"{result.policy}: {text}")
        report.samples({"policy": result.policy, "finding": text} for text in found)
        kept = SAMPLES / f"chaos-{result.policy}"
        shutil.rmtree(kept, ignore_errors=True)
        kept.mkdir(parents=True)
        (kept / "story.log").write_text("\n".join(killer.story))
        if found:
            for path in (*self._cluster.directory.glob("*.log"), *self._cluster.directory.glob("*.record.*")):
                shutil.copy(path, kept)

    @staticmethod
    def _wait(holds: Callable[[], bool], seconds: float) -> bool:
        """Return whether it holds within that time."""
        until = time.monotonic() + seconds
        while not holds():
            if time.monotonic() > until:
                return False
            time.sleep(_TICK_S)
        return True
