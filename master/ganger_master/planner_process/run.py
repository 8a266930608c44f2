"""The planner process: it feeds the planner's loop with what the master sends, and proposes the loop's plans.

Killed at any instant it is started anew, and continues from what the master sends and from its note.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from math import isfinite, nan
from pathlib import Path
from typing import Any, Final

import grpc
import grpc.aio
from ganger.scheduling.host import Mirror
from ganger.scheduling.program import first_end, why_away
from ganger.v1 import job_pb2, scheduling_pb2, scheduling_pb2_grpc
from ganger.wire import resource_messages as convert
from ganger.wire import resource_names as names
from ganger.wire import times
from ganger.wire.channels import note_failure, open_aio_channel
from ganger.wire.endpoints import Endpoint, EndpointError
from ganger.wire.errors import Restoring

from ganger_master.core.answers import ChangeAnswer
from ganger_master.core.gang_model import Gang
from ganger_master.core.job_model import JobRecord
from ganger_master.core.node_model import Reservation
from ganger_master.core.plan_changes import CoresChange, PlanChange, StartChange
from ganger_master.decision_log.recording import failure_of
from ganger_master.planner.context import ClusterChange, Plan, PlanVerdict, ProgressReports, parts_of
from ganger_master.planner.loop import PlannerLoop, live_loop, measures_jobs
from ganger_master.planner.memory import PlannerMemory
from ganger_master.planner.rate_registry import ProgressReport, RateRegistry
from ganger_master.planner.resource_trials import MemorySample
from ganger_master.planner_process.planner_files import Note, PlanRecorder
from ganger_master.policies import Policy, ResizeByOptimus, live_policy_named
from ganger_master.policies.trials import TrialPace
from ganger_master.rpc.node_selection_messages import reservation_from_wire
from ganger_master.rpc.planner_messages import (
    change_to_wire,
    curve_to_wire,
    finding_to_wire,
    kept_place_to_wire,
    limits_from_wire,
    live_job_from_wire,
    remaining_times_to_wire,
    teams_from_wire,
    use_from_wire,
)

log = logging.getLogger(__name__)

_BACKOFF_S: Final = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0)
# A connection that lasted this long ended by its age, not by a fault.
_HEALTHY_S: Final = 5.0
_TRIAL_PACE: Final = TrialPace()
# Seconds between two reads of progress reports, each of which is sent once; daemons report each second.
_PROGRESS_S: Final = 0.5
# Approved changes arrive at once; after this time an event was missed, and all state is read again.
_REACH_S: Final = 10.0
# Job schedulers answer the leases of a plan one after the other; the next plan waits no longer for a slow one.
_OFFERED_S: Final = 0.5
# Passes that fail in a row before the planner ends, and another one begins without its note.
_FAILED_MOST: Final = 3
# Seconds between two reports of remaining times.
_REPORT_S: Final = 3.0
# Longest sleep, because clocks may be set.
_LONGEST_SLEEP_S: Final = 60.0
# Seconds between notes of measurements; decisions are noted at once. `_NOTE_REST`: notes, and reports of remaining
# times, take a fiftieth of a core each.
_NOTE_S: Final = 10.0
_NOTE_REST: Final = 50.0


class NoPlannerError(ValueError):
    """The planner does not place jobs under this policy; the message explains why."""


class Planner:
    """Plans for the master that `find` returns, which it calls at every connection. `policy` and `plan_every_s` default
    to the master's. `note`: the file for the state; None: the state ends with the process. `record_to`: the directory
    for a recording of all that it observes and plans; None: there is none."""

    def __init__(
        self,
        find: Callable[[], Endpoint],
        *,
        policy: str = "",
        plan_every_s: float | None = None,
        trial_pace: TrialPace = _TRIAL_PACE,
        note: Path | None = None,
        record_to: Path | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._find = find
        # The master of the last connection.
        self._endpoint: Endpoint | None = None
        self._policy_name = policy
        self._plan_every_s = plan_every_s
        self._clock = clock
        self._trial_pace = trial_pace
        # Kept across connections: measuring takes time.
        self._rates = RateRegistry(trial_pace)
        self._memory: PlannerMemory | None = None
        self._note, self._has_recalled = Note(note), False
        self._recorder = PlanRecorder(record_to)
        # Set when a decision was made since the last note.
        self._decided = asyncio.Event()
        # Why no plan was answered last, as the log has it; empty: plans are answered.
        self._away = ""
        self._start_over()

    def _start_over(self) -> None:
        self._mirror = ClusterMirror(self._clock)
        # None: the master has not sent the cluster yet.
        self._loop: PlannerLoop | None = None
        self._news = asyncio.Event()

    async def run(self) -> None:
        """Plan until cancelled. NoPlannerError if the policy needs no planner."""
        try:
            await self._plan_across_connections()
        except asyncio.CancelledError:
            self._recorder.end("the planner was stopped")
            raise
        except Exception as error:
            self._recorder.end(f"the planner failed: {failure_of(error)}")
            raise

    async def _plan_across_connections(self) -> None:
        attempt = 0
        loop = asyncio.get_running_loop()
        while True:
            started = loop.time()
            try:
                await self._serve()
            except (grpc.aio.AioRpcError, EndpointError, OSError) as error:
                note_failure(self._endpoint, error)
                self._note_away(await why_away(error, self._find))
            except TimeoutError:
                log.warning("approvals were missed: requesting the whole state anew")
            except NoPlannerError:
                raise
            except Exception:
                self._note.forget()
                raise
            attempt = 0 if loop.time() - started > _HEALTHY_S else attempt + 1
            await asyncio.sleep(_BACKOFF_S[min(attempt, len(_BACKOFF_S) - 1)])

    def _note_away(self, reason: str) -> None:
        """Log once that the master is away or answers no plan, however many attempts follow."""
        if reason != self._away:
            log.info("master is away", extra={"reason": reason})
        self._away = reason

    def _note_planning(self, policy: Policy) -> None:
        log.info("planning", extra={"policy": policy.name, "plan_every_seconds": self._interval_s})
        self._away = ""

    @property
    def _interval_s(self) -> float:
        """The shortest time between two plans that preempt, in seconds."""
        return self._mirror.plan_every_s if self._plan_every_s is None else self._plan_every_s

    async def _serve(self) -> None:
        if self._loop is not None:
            self._memory = self._loop.memory
        self._start_over()
        self._endpoint = self._find()
        async with open_aio_channel(self._endpoint) as channel:
            scheduling: Any = scheduling_pb2_grpc.SchedulingServiceStub(channel)
            await first_end(
                [
                    self._watch(scheduling),
                    self._plan_for_ever(scheduling),
                    self._measure_for_ever(scheduling),
                    self._note_for_ever(),
                    self._report_for_ever(scheduling),
                ]
            )

    # -- what the loop observes ----------------------------------------------------------------------------------------

    async def _watch(self, scheduling: Any) -> None:
        mirror = self._mirror
        deltas: list[scheduling_pb2.ClusterDelta] = []
        async for delta in scheduling.WatchCluster(scheduling_pb2.WatchClusterRequest()):
            deltas.append(delta)
            change = mirror.apply(delta)
            if change is None:
                continue
            if self._loop is None:
                self._loop = self._begun(change)
            now = mirror.now
            self._recorder.cluster(now, deltas)
            deltas.clear()
            with self._recorder.failures(now):
                self._loop.observe(change, now)
            self._news.set()

    def _begun(self, change: ClusterChange) -> PlannerLoop:
        """Return the loop for the policy, continued from the last connection or an earlier planner's note."""
        policy = self._policy()
        if not self._has_recalled:
            self._has_recalled = True
            create_times = {job.number: job.create_time for job, _, _ in change.jobs if not job.state.is_finished}
            self._memory = self._note.recall(policy.name, self._mirror.now, create_times.get)
            if self._memory is not None:
                self._rates.recall(self._memory.rates)
                log.info("going on from a note", extra={"jobs": len(self._memory.rates.jobs)})
        if self._away != Restoring.reason:
            # Of a master that settles a restore only an answered plan shows that it is done.
            self._note_planning(policy)
        now = self._mirror.now
        self._recorder.begin(now, policy.name, self._interval_s, self._trial_pace, self._memory)
        with self._recorder.failures(now):
            return live_loop(policy, self._interval_s, self._rates, self._memory)

    async def _known_loop(self) -> PlannerLoop:
        await self._news.wait()
        assert self._loop is not None, "news follow the first change"
        return self._loop

    async def _measure_for_ever(self, scheduling: Any) -> None:
        loop = await self._known_loop()
        if not measures_jobs(loop.policy):
            await asyncio.Future()
        interval = times.duration(min(_PROGRESS_S, self._trial_pace.window_s))
        async for batch in scheduling.WatchProgress(scheduling_pb2.WatchProgressRequest(interval=interval)):
            reports, now = reports_from_wire(batch), self._mirror.now
            self._recorder.progress(now, batch)
            with self._recorder.failures(now):
                loop.observe(reports, now)
            self._news.set()

    # -- plans ---------------------------------------------------------------------------------------------------------

    async def _plan_for_ever(self, scheduling: Any) -> None:
        loop = await self._known_loop()
        failed = 0
        while True:
            self._news.clear()
            began = time.perf_counter()
            now = self._mirror.now
            try:
                with self._recorder.failures(now):
                    plan, next_s = loop.step(now)
            except Exception as error:
                failed += 1
                if failed >= _FAILED_MOST:
                    raise
                log.exception("plan failed: the next one goes on without it", extra={"reason": failure_of(error)})
                continue
            failed = 0
            if plan is not None:
                self._recorder.plan(now, plan)
                await self._propose(scheduling, loop, plan, time.perf_counter() - began)
                continue
            try:
                async with asyncio.timeout(min(max(0.0, next_s - self._mirror.now), _LONGEST_SLEEP_S)):
                    await self._news.wait()
            except TimeoutError:
                pass

    async def _propose(self, scheduling: Any, loop: PlannerLoop, plan: Plan, planning_s: float) -> None:
        answers: list[ChangeAnswer] = []
        starts = {change.number: change.revision for change in plan.changes if isinstance(change, StartChange)}
        self._mirror.expect_news(starts)
        for part in parts_of(plan):
            verdict = await scheduling.ProposePlan(self._message(loop.policy, part))
            answers += map(_answer_of, part.changes, verdict.verdicts)
        if self._away:
            self._note_planning(loop.policy)
        revisions = {answer.number: answer.revision for answer in answers if answer.approved}
        if revisions or plan.findings:
            self._decided.set()
        if revisions:
            # The next plan needs the effects of this one.
            async with asyncio.timeout(_REACH_S):
                await self._mirror.reach(revisions)
        offered = [number for number, revision in starts.items() if revisions.get(number) == revision]
        await self._mirror.wait_for_news(offered, _OFFERED_S)
        now = self._mirror.now
        self._recorder.verdict(now, answers, planning_s)
        with self._recorder.failures(now):
            loop.observe(PlanVerdict(answers, planning_s), now)

    def _message(self, policy: Policy, part: Plan) -> scheduling_pb2.Plan:
        message = scheduling_pb2.Plan(
            changes=[change_to_wire(change, self._figures(change)) for change in part.changes],
            reason=f"policy {policy.name}",
            findings=map(finding_to_wire, part.findings),
            cores_curves=map(curve_to_wire, part.curves),
        )
        if part.kept_places is not None:
            message.kept_places.SetInParent()
            message.kept_places.kept_places.extend(map(kept_place_to_wire, part.kept_places))
        if part.line is not None:
            message.line.policy = policy.name
            message.line.jobs.extend(map(names.job_name, part.line))
        return message

    def _figures(self, change: PlanChange) -> str:
        """Return the measured effect of cores on the job, for a change of cores without a reason."""
        is_measured = isinstance(change, CoresChange) and not change.reason
        return self._rates.describe_cores(change.number) if is_measured else change.reason

    def _policy(self) -> Policy:
        name = self._policy_name or self._mirror.policy
        try:
            policy = live_policy_named(name)
        except (KeyError, ValueError) as error:
            raise NoPlannerError(str(error.args[0])) from error
        if self._mirror.needs_planner:
            return policy.planned
        if not policy.is_planned:
            raise NoPlannerError(f"under policy {name} no planner ranks jobs: there is nothing to plan")
        if not live_policy_named(self._mirror.policy).is_planned:
            raise NoPlannerError(
                f"under the master's policy {self._mirror.policy} no planner ranks jobs: start it with --policy {name}"
            )
        return policy

    async def _report_for_ever(self, scheduling: Any) -> None:
        """Send the remaining times of running jobs, for people."""
        loop = await self._known_loop()
        if not loop.policy.has(ResizeByOptimus):
            await asyncio.Future()
        took_s = 0.0
        while True:
            await asyncio.sleep(max(_REPORT_S, _NOTE_REST * took_s))
            began, now = time.perf_counter(), self._mirror.now
            found = loop.remaining(now)
            took_s = time.perf_counter() - began
            if found is not None and found[0]:
                remaining_times = remaining_times_to_wire(*found, now)
                await scheduling.ProposePlan(scheduling_pb2.Plan(remaining_times=remaining_times))

    # -- notes ---------------------------------------------------------------------------------------------------------

    async def _note_for_ever(self) -> None:
        loop = await self._known_loop()
        if not (self._note.is_kept and measures_jobs(loop.policy)):
            await asyncio.Future()
        while True:
            self._decided.clear()
            began = time.perf_counter()
            self._note.write(loop.memory, loop.policy.name, self._mirror.now)
            await asyncio.sleep(_NOTE_REST * (time.perf_counter() - began))
            try:
                async with asyncio.timeout(_NOTE_S):
                    await self._decided.wait()
            except TimeoutError:
                pass


def _answer_of(change: PlanChange, verdict: scheduling_pb2.ChangeVerdict) -> ChangeAnswer:
    refusals = tuple(convert.refusals_from_wire(verdict.refusals))
    if not verdict.approved:
        reason = refusals[0].message if refusals else ""
        log.info("change refused", extra={"job": change.number, "change": change.kind, "reason": reason})
    return ChangeAnswer(change.number, verdict.approved, verdict.revision, refusals)


# -- what the master sends, as events of the loop: jobs and nodes as one commit left them ------------------------------


class ClusterMirror:
    """Follows one stream of deltas. `clock`: this machine's time in Unix seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.policy = ""
        self.needs_planner = False
        self.plan_every_s = 0.0
        self._clock = clock
        # Seconds by which the master's clock is ahead of this one.
        self._ahead_s = 0.0
        self._mirror = Mirror()
        self._reservations: tuple[Reservation, ...] = ()
        self._parts: list[scheduling_pb2.ClusterDelta] = []
        self._revisions: dict[int, int] = {}
        # Numbers of jobs without news since `expect_news`.
        self._expected: set[int] = set()
        self._changed = asyncio.Event()

    @property
    def now(self) -> float:
        """The time by the master's clock, which all times of jobs are of."""
        return self._clock() + self._ahead_s

    def apply(self, delta: scheduling_pb2.ClusterDelta) -> ClusterChange | None:
        """Return what has changed; None before a moment's last part. Raises RequestInvalid for what is unknown here."""
        self._parts.append(delta)
        if delta.has_more:
            return None
        parts, self._parts = self._parts, []
        first = parts[0]
        is_whole = first.view.from_version == 0
        if is_whole:
            self._revisions.clear()
            self.needs_planner = first.needs_planner
        self._mirror.apply(first.view)
        if first.HasField("reservations"):
            sent = [one for part in parts for one in part.reservations.reservations]
            self._reservations = tuple(map(reservation_from_wire, sent))
        jobs = [self._put(job) for part in parts for job in part.jobs]
        forgotten = [names.parse_job_name(name) for name in first.removed_jobs]
        for number in forgotten:
            self._revisions.pop(number, None)
        self._expected.difference_update(forgotten)
        self._ahead_s = times.unix_s(first.time) - self._clock()
        self.policy, self.plan_every_s = first.policy, times.seconds(first.plan_interval)
        self._changed.set()
        return ClusterChange(
            self._mirror.view,
            jobs,
            forgotten,
            is_whole=is_whole,
            limits=limits_from_wire(first.limits),
            teams=teams_from_wire(first.teams),
            usage_half_life_s=times.seconds(first.usage_half_life),
            usage=[use_from_wire(one) for one in first.usage],
            draining=tuple([names.parse_node_name(node) for node in first.draining_nodes]),
            changing=frozenset(map(names.parse_node_set_name, first.changing_node_sets)),
            quantum_s=times.seconds(first.quantum) if first.HasField("quantum") else None,
            moves_per_hour=first.migrations_per_hour if first.HasField("migrations_per_hour") else None,
            reservations=self._reservations,
        )

    def expect_news(self, numbers: Iterable[int]) -> None:
        """Await news of these jobs: `wait_for_news` waits for what arrives from now on."""
        self._expected = set(numbers)

    async def wait_for_news(self, numbers: Collection[int], rest_s: float) -> None:
        """Wait until news of all these jobs have arrived since `expect_news`, or none for `rest_s` seconds."""
        self._expected.intersection_update(numbers)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(rest_s) as timeout:
                while left := len(self._expected):
                    self._changed.clear()
                    await self._changed.wait()
                    if len(self._expected) < left:
                        timeout.reschedule(asyncio.get_running_loop().time() + rest_s)

    async def reach(self, revisions: Mapping[int, int]) -> None:
        """Wait until these jobs are known at least at these revisions, or have ended."""
        while any(self._revisions.get(number, revision) < revision for number, revision in revisions.items()):
            self._changed.clear()
            await self._changed.wait()

    def _put(self, message: scheduling_pb2.LiveJob) -> tuple[JobRecord, Gang | None, int]:
        job, gang = live_job_from_wire(message)
        self._expected.discard(job.number)
        if job.state.is_finished:
            self._revisions.pop(job.number, None)
        else:
            self._revisions[job.number] = job.revision
        return job, gang, message.signature


def reports_from_wire(batch: scheduling_pb2.ProgressBatch) -> ProgressReports:
    """Return the reports of jobs that have done a step, in the order of their numbers."""
    # A job without a step may report for other reasons.
    known = {names.parse_job_name(name): one for name, one in batch.progress.items() if one.HasField("step_time")}
    # The order of a map on the wire is that of no program.
    return ProgressReports({number: progress_from_wire(known[number]) for number in sorted(known)})


def progress_from_wire(progress: job_pb2.Progress) -> ProgressReport:
    """Return a job's report; its `step_time` is set."""
    return ProgressReport(
        progress.step,
        times.unix_s(progress.step_time),
        times.unix_s(progress.first_step_time) if progress.HasField("first_step_time") else nan,
        progress.device_utilization if progress.HasField("device_utilization") else None,
        progress.loss,
        progress.training_epoch or _reported_passes(progress),
        progress.training_epochs,
        progress.evaluation.batches,
        progress.evaluation.batches_in_row,
        times.unix_s(progress.evaluation.time) if progress.HasField("evaluation") else nan,
        MemorySample(progress.used_memory_bytes, progress.least_memory_bytes, progress.trial_memory_bytes),
    )


def _reported_passes(progress: job_pb2.Progress) -> int:
    reported = [metric.value for metric in progress.metrics if metric.name == "epoch"]
    return int(max(0.0, reported[0])) if reported and isfinite(reported[0]) else 0
