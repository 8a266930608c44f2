"""The planner: plans on news and when its pace says so, proposes, and hears what became of it.

It comes back when the master does. It calls nothing that the public API lacks and keeps nothing that it could not find
out again: killed at any instant it is started anew and goes on from what the master tells it, and from its note of what
it remembered (`planner_process.note`), if it has one.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import inf, isfinite, nan
from pathlib import Path
from typing import Any, Final

import grpc
import grpc.aio
import numpy as np
from ganger.cluster.refusals import Reason, Refusal, RefusalKind
from ganger.scheduling.program import first_end, why_away
from ganger.v1 import job_pb2, scheduling_pb2, scheduling_pb2_grpc
from ganger.wire import resource_messages as convert
from ganger.wire import resource_names as names
from ganger.wire import times
from ganger.wire.channels import open_aio_channel
from ganger.wire.endpoints import Endpoint, EndpointError

from ganger_master.core.change_reason import TrialFinding
from ganger_master.core.commands import LINE_LIMIT, Promise
from ganger_master.core.plan_changes import CoresChange, PlanChange, StartChange
from ganger_master.planner import core_profiles
from ganger_master.planner.colocation_stage import OrderColocation, plan_packing
from ganger_master.planner.growth_stage import GrowthTrials, Sizes, plan_sizes, with_sizes
from ganger_master.planner.in_place_resize import NOTHING_UNDER_WAY
from ganger_master.planner.loop import PlanPace, is_stop
from ganger_master.planner.measurements import Measurements, ProgressReport
from ganger_master.planner.memory import PlannerMemory
from ganger_master.planner.migrate_stage import plan_moves
from ganger_master.planner.migration_context import MigrationMemory, MigrationTerms
from ganger_master.planner.passes import plan_by
from ganger_master.planner.plan import PlanDraft
from ganger_master.planner.refusal_backoff import NONE_EXCLUDED, ExcludedJobs, RefusalBackoff
from ganger_master.planner.shared import NOTHING as NOTHING_SHARED
from ganger_master.planner.shared import plan_shared
from ganger_master.planner_process.cluster_mirror import ClusterMirror
from ganger_master.planner_process.note import Note
from ganger_master.planner_process.plan_parts import parts_of
from ganger_master.policies import Places, Policy, live_policy_named
from ganger_master.policies.elastic_growth import IDLE_S
from ganger_master.policies.slicing import QUANTUM_S
from ganger_master.rpc.plan_messages import change_to_wire, finding_to_wire, promise_to_wire

log = logging.getLogger(__name__)

_BACKOFF_SECONDS: Final = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0)
# A connection that lasted this long ended by its age, not by a fault.
_HEALTHY_SECONDS: Final = 5.0
# Longest line that is reported with every change, and seconds between two reports of a longer one.
_SHORT_LINE: Final = 100
_LINE_SECONDS: Final = 1.0
_TRIAL_PACE: Final = core_profiles.TrialPace()
# Seconds between two reads of progress reports.
_PROGRESS_SECONDS: Final = 1.0
# Approved changes arrive at once; after this time an event was missed, and all state is read again.
_REACH_SECONDS: Final = 10.0
# Margin over the measured minimum quantum, and how long that measurement counts.
_QUANTUM_MARGIN: Final = 1.5
_QUANTUM_BELIEVED_SECONDS: Final = 60.0
# Seconds that a resize by checkpoint and restart takes; not measured.
_RESTART_SECONDS: Final = 30.0
# Seconds between notes of measurements; decisions are noted at once. `_NOTE_REST`: notes take a fiftieth of a core.
_NOTE_SECONDS: Final = 10.0
_NOTE_REST: Final = 50.0


class NoPlannerError(ValueError):
    """The planner does not place jobs under this policy; the message explains why."""


class Planner:
    """Plans for the master that `find` returns, which it calls at every connection. `policy` and `plan_every_s` default
    to the master's. `note`: the file for the state; None: the state ends with the process."""

    def __init__(
        self,
        find: Callable[[], Endpoint],
        *,
        policy: str = "",
        plan_every_s: float | None = None,
        trial_pace: core_profiles.TrialPace = _TRIAL_PACE,
        note: Path | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._find = find
        self._policy_name = policy
        self._plan_every_s = plan_every_s
        self._clock = clock
        self._trial_pace = trial_pace
        # Kept across connections: measuring takes time.
        self._seen = Measurements(trial_pace)
        self._shared = NOTHING_SHARED
        self._packing = OrderColocation()
        self._moving = MigrationMemory()
        self._growing = GrowthTrials()
        self._resizing = NOTHING_UNDER_WAY
        self._noting, self._has_recalled = Note(note), False
        # Set when a decision was made since the last note.
        self._decided = asyncio.Event()
        self._start_over()

    def _start_over(self) -> None:
        self._live = ClusterMirror(self._clock)
        self._refused = RefusalBackoff()
        # The least quantum where switches take long, and until when that counts.
        self._least_quantum_s, self._believed_until_s = 0.0, 0.0
        self._news = asyncio.Event()
        # The line last reported, and when.
        self._line: tuple[int, ...] | None = None
        self._line_told_s = 0.0
        # The reservations last sent to the master.
        self._promised: tuple[Promise, ...] | None = None
        # Jobs that the last preempting plan preempted for others: they wait until the next one may preempt.
        self._displaced: frozenset[int] = frozenset()

    async def run(self) -> None:
        """Plan until cancelled. NoPlannerError if the policy needs no planner."""
        attempt = 0
        loop = asyncio.get_running_loop()
        while True:
            started = loop.time()
            try:
                await self._serve()
            except (grpc.aio.AioRpcError, EndpointError, OSError) as error:
                log.info("master is away", extra={"reason": await why_away(error, self._find)})
            except TimeoutError:
                log.warning("approvals were missed: requesting the whole state anew")
            except NoPlannerError:
                raise
            except Exception:
                self._noting.forget()
                raise
            attempt = 0 if loop.time() - started > _HEALTHY_SECONDS else attempt + 1
            await asyncio.sleep(_BACKOFF_SECONDS[min(attempt, len(_BACKOFF_SECONDS) - 1)])

    async def _serve(self) -> None:
        self._start_over()
        async with open_aio_channel(self._find()) as channel:
            scheduling: Any = scheduling_pb2_grpc.SchedulingServiceStub(channel)
            await first_end(
                [
                    self._watch(scheduling),
                    self._plan_for_ever(scheduling),
                    self._measure_for_ever(scheduling),
                    self._note_for_ever(),
                ]
            )

    async def _watch(self, scheduling: Any) -> None:
        live, seen, is_first = self._live, self._seen, True
        async for delta in scheduling.WatchCluster(scheduling_pb2.WatchClusterRequest()):
            changed = live.apply(delta)
            if live.told and not self._has_recalled:
                self._recall()
            for number in changed:
                self._refused.forget(number)
                found = live.table.get(number)
                if found is None:
                    seen.forget(number, live.now)
                else:
                    seen.put(*found, live.signature(number), live.now)
            if not delta.continues:
                if is_first:
                    seen.keep(lambda number: live.table.get(number) is not None, live.now)
                    is_first = False
                self._news.set()

    async def _measure_for_ever(self, scheduling: Any) -> None:
        await self._news.wait()
        policy = self._policy()
        tunes = policy.tuning is not None and policy.tuning.by_profiles
        if not _remembers(policy):
            await asyncio.Future()
        live, seen = self._live, self._seen
        seen.weighs_sizes = policy.resizes
        # A policy that co-locates beside an order plans that at its own pace.
        waits = not _acts_on_measures(policy)
        interval = times.duration(min(_PROGRESS_SECONDS, self._trial_pace.window_s))
        async for batch in scheduling.WatchProgress(scheduling_pb2.WatchProgressRequest(interval=interval)):
            now = live.now
            for name, progress in batch.progress.items():
                # A job without a step may report for other reasons.
                is_of_a_step = progress.HasField("step_time")
                if is_of_a_step and seen.record(names.parse_job_name(name), _heard(progress), now) and not waits:
                    self._news.set()
            if not tunes:
                continue
            ran = {job.number: job.run_seconds + max(0.0, now - job.running_since) for job, _ in live.table.running}
            if seen.measured.update_trials(live.room.view, ran, now):
                self._news.set()

    async def _note_for_ever(self) -> None:
        await self._news.wait()
        policy = self._policy()
        if not (self._noting.is_kept and _remembers(policy)):
            await asyncio.Future()
        while True:
            self._decided.clear()
            began = time.perf_counter()
            self._noting.write(self._memory, policy.name, self._live.now)
            await asyncio.sleep(_NOTE_REST * (time.perf_counter() - began))
            try:
                async with asyncio.timeout(_NOTE_SECONDS):
                    await self._decided.wait()
            except TimeoutError:
                pass

    @property
    def _memory(self) -> PlannerMemory:
        return PlannerMemory(
            self._shared,
            self._packing,
            self._moving,
            self._growing,
            self._resizing,
            self._seen.remembered,
        )

    def _recall(self) -> None:
        """Continue from the note of an earlier planner, once the jobs are known."""
        self._has_recalled = True
        live = self._live

        def create_time(number: int) -> float | None:
            found = live.table.get(number)
            return None if found is None else found[0].create_time

        memory = self._noting.recall(self._policy().name, live.now, create_time)
        if memory is None:
            return
        self._shared, self._packing, self._moving = memory.shared, memory.packing, memory.moving
        self._growing, self._resizing = memory.growing, memory.resizing
        self._seen.recall(memory.measured)
        log.info("going on from a note", extra={"jobs": len(memory.measured.together.jobs)})

    async def _plan_for_ever(self, scheduling: Any) -> None:
        await self._news.wait()
        policy = self._policy()
        every_s = self._live.plan_every_s if self._plan_every_s is None else self._plan_every_s
        log.info("planning", extra={"policy": policy.name, "plan_every_seconds": every_s})
        # A preemption just before this planner started counts, too.
        pace = PlanPace(every_s, stopped_at_s=self._live.table.last_stop_s)
        while True:
            wait_s = pace.wait_s(self._live.now, self._news.is_set())
            if wait_s <= 0:
                pace = await self._plan(scheduling, policy, pace)
            elif self._news.is_set():
                await asyncio.sleep(wait_s)
            else:
                try:
                    async with asyncio.timeout(min(wait_s, _LONGEST_SLEEP_SECONDS)):
                        await self._news.wait()
                except TimeoutError:
                    pass

    async def _plan(self, scheduling: Any, policy: Policy, pace: PlanPace) -> PlanPace:
        self._news.clear()
        live, now = self._live, self._live.now
        may_stop = pace.may_stop(now)
        began = time.perf_counter()
        before, packed_before = self._shared, self._packing
        sizes, growing = Sizes(), self._growing
        if policy.grows:
            idle_s, busy = min(IDLE_S, pace.every_s), before.packs.on_trial | packed_before.packs.on_trial
            sizes, growing = plan_sizes(
                policy.placement, live.table, now, live.room, self._seen.speeds, growing, idle_s, busy
            )
        findings: tuple[TrialFinding, ...] = ()
        if policy.shares and sizes.is_giving:
            # Shrinking jobs are about to free devices for pending jobs.
            found, moves_at_s = PlanDraft(line=np.array(self._line or (), np.int64)), inf
        elif policy.shares:
            found, findings, moves_at_s = self._found_shared(policy, now, pace)
        else:
            found, findings, moves_at_s = self._found(policy, now, may_stop and not sizes.is_giving)
            if policy.packs and not sizes.changes:
                found, packed = self._packed(policy, found, now, pace.every_s)
                findings = (*findings, *packed)
            self._displaced = found.displaced or self._displaced
        found, findings = with_sizes(found, sizes), (*findings, *sizes.findings)
        if policy.resizes:
            self._resizing = found.resizing or self._resizing
            found = replace(found, next_change_s=max(found.next_change_s, pace.next_stop_s(now)))
        took_s = time.perf_counter() - began
        # Under a strict order no later job would start in their place.
        unplaced = frozenset[int]() if policy.order.is_strict else found.unplaced
        self._refused.note_unplaced(unplaced, may_stop, now)
        started = {change.number for change in found.changes if isinstance(change, StartChange)}
        line = tuple([number for number in found.line.tolist() if number not in started][:LINE_LIMIT])
        revisions: dict[int, int] = {}
        # Refused changes; of these, the ones that no fresh view would allow.
        refused: set[int] = set()
        barred: set[int] = set()
        stopped = False
        for message, changes in self._messages(policy, found.changes, line, findings):
            verdict = await scheduling.ProposePlan(message)
            for change, said in zip(changes, verdict.verdicts, strict=True):
                if said.approved:
                    revisions[change.number] = said.revision
                    stopped = stopped or is_stop(change, policy.resizes)
                else:
                    refused.add(change.number)
                    refusals = convert.refusals_from_wire(said.refusals)
                    if not any(refusal.reason.kind is RefusalKind.RACE for refusal in refusals):
                        barred.add(change.number)
                    self._note(change, refusals)
        self._shared = self._shared.without(before, refused)
        self._packing = self._packing.without(packed_before, refused, barred)
        self._growing = growing.without(refused & {change.number for change in sizes.changes}, now)
        self._resizing = self._resizing.without(refused)
        if revisions or findings:
            self._decided.set()
        if revisions:
            # The next plan needs the effects of this one.
            async with asyncio.timeout(_REACH_SECONDS):
                await live.reach(revisions)
        again_s = live.now if unplaced else self._refused.next_s
        again_s = min(again_s, moves_at_s)
        if line != self._line:
            again_s = min(again_s, self._line_told_s + _LINE_SECONDS)
        return pace.after(live.now, took_s, found, stopped=stopped, refused=bool(refused), again_s=again_s)

    def _found(self, policy: Policy, now: float, may_stop: bool) -> tuple[PlanDraft, tuple[TrialFinding, ...], float]:
        """Return the plan, the findings of earlier migrations, and when to judge the next ones without any event."""
        live = self._live
        capacity = live.capacity_beside(self._resizing)

        def chosen(kept_out: ExcludedJobs, may_stop: bool) -> PlanDraft:
            if not may_stop:
                kept_out = kept_out.resting(self._displaced)
            return plan_by(
                policy,
                policy.aging_order,
                live.table,
                now,
                capacity,
                live.room,
                may_stop,
                kept_out=kept_out,
                known=self._seen.measured.known,
                trials=self._seen.measured.trials,
                believed=self._seen.foreseen.believed(capacity.gpus_per_node),
                resize_s=_RESTART_SECONDS,
                resizing=self._resizing,
            )

        kept_out = self._refused.at(now)
        if not policy.moves:
            return chosen(kept_out, may_stop), (), inf
        terms = MigrationTerms(
            policy.placement,
            live.draining,
            is_strict=policy.order.is_strict,
            per_hour=live.moves_per_hour,
            rated=self._seen.together,
        )
        found, self._moving, findings, again_s = plan_moves(
            chosen, terms, live.table, now, live.room, self._moving, kept_out, may_stop
        )
        return found, findings, again_s

    def _found_shared(
        self, policy: Policy, now: float, pace: PlanPace
    ) -> tuple[PlanDraft, tuple[TrialFinding, ...], float]:
        """Return the same for policies that share GPUs. A plan with other changes has no migrations."""
        live = self._live
        found, self._shared, findings = plan_shared(
            policy.placement,
            live.table,
            now,
            live.room,
            self._shared,
            self._seen.together,
            live.capacity.gpus,
            min(QUANTUM_S, pace.every_s),
            self._refused.at(now),
            matrices=True,
            turn_s=self._turn_s(now),
            received_s=self._seen.attained.received_s,
            draining=live.draining,
            changing=live.changing,
            errands=self._moving.errands,
        )
        if found.changes or findings or not policy.moves:
            return found, findings, inf
        terms = MigrationTerms(
            policy.placement,
            live.draining,
            holes=False,
            per_hour=live.moves_per_hour,
            rated=self._seen.together,
            on_trial=self._shared.packs.on_trial,
        )
        moved, self._moving, findings, again_s = plan_moves(
            lambda kept_out, may_stop: found, terms, live.table, now, live.room, self._moving, NONE_EXCLUDED, False
        )
        return moved, findings, again_s

    def _packed(
        self, policy: Policy, found: PlanDraft, now: float, every_s: float
    ) -> tuple[PlanDraft, tuple[TrialFinding, ...]]:
        """Return the plan with co-locations, where it has no other changes."""
        live, packing = self._live, self._packing
        findings: tuple[TrialFinding, ...] = ()
        if not found.changes and now >= packing.next_look_s(live.table, every_s):
            gpus, seen, kept_out = live.capacity.gpus, self._seen.together, self._refused.at(now)
            changes, packing, findings = plan_packing(
                packing, policy.placement, live.table, live.room, now, seen, gpus, every_s, kept_out
            )
            self._packing, found = packing, replace(found, changes=changes)
        again_s = max(now, packing.next_look_s(live.table, every_s))
        return replace(found, next_change_s=min(found.next_change_s, again_s)), findings

    def _messages(
        self,
        policy: Policy,
        changes: Sequence[PlanChange],
        line: tuple[int, ...],
        findings: Sequence[TrialFinding] = (),
    ) -> Iterator[tuple[scheduling_pb2.Plan, Sequence[PlanChange]]]:
        """Yield the plan's messages in order. The last one has the line of pending jobs, if it changed; a long line
        only after `_LINE_SECONDS`."""
        now = self._live.now
        tells = line != self._line and (len(line) <= _SHORT_LINE or now >= self._line_told_s + _LINE_SECONDS)
        promises = self._moving.promises
        keeps = policy.moves and promises != self._promised
        parts = list(parts_of(changes))
        if not parts and (tells or keeps or findings):
            parts = [()]
        for number, part in enumerate(parts, 1):
            changes_to_wire = [change_to_wire(change, self._figures(change)) for change in part]
            message = scheduling_pb2.Plan(changes=changes_to_wire, reason=f"policy {policy.name}")
            if number == 1:
                message.findings.extend(map(finding_to_wire, findings))
            if keeps and number == 1:
                message.reservations.SetInParent()
                message.reservations.reservations.extend(map(promise_to_wire, promises))
                self._promised = promises
            if tells and number == len(parts):
                message.line.policy = policy.name
                message.line.jobs.extend(map(names.job_name, line))
                self._line, self._line_told_s = line, now
            yield message, part

    def _figures(self, change: PlanChange) -> str:
        """Return the measured effect of cores on the job, for a CORES change without a reason."""
        return change.reason or (self._seen.measured.describe(change.number) if isinstance(change, CoresChange) else "")

    def _turn_s(self, now: float) -> float | None:
        """Return the seconds of a time slice: the cluster's quantum, or more where slice switches need it."""
        wanted = self._live.quantum_s
        if wanted is None or now >= self._believed_until_s:
            return wanted
        return max(wanted, self._least_quantum_s)

    def _note(self, change: PlanChange, refusals: Sequence[Refusal]) -> None:
        if refusals and refusals[0].reason is Reason.QUANTUM:
            least_s = refusals[0].figures.get("least_milliseconds", 0) / 1000
            self._least_quantum_s = _QUANTUM_MARGIN * least_s
            self._believed_until_s = self._live.now + _QUANTUM_BELIEVED_SECONDS
            log.info("quantum is too short", extra={"least_seconds": least_s})
            return
        self._refused.note(change, refusals, self._live.now)
        text = refusals[0].message if refusals else ""
        log.info("change refused", extra={"job": change.number, "change": change.kind, "reason": text})

    def _policy(self) -> Policy:
        name = self._policy_name or self._live.policy
        try:
            policy = live_policy_named(name)
        except (KeyError, ValueError) as error:
            raise NoPlannerError(str(error.args[0])) from error
        if policy.places is Places.JOBS:
            raise NoPlannerError(
                f"under policy {name} each job is placed by its own scheduler: there is nothing to plan"
            )
        if live_policy_named(self._live.policy).places is Places.JOBS:
            raise NoPlannerError(
                f"the master's policy is {self._live.policy}, and two would place jobs: start it with --policy {name}"
            )
        return policy


def _remembers(policy: Policy) -> bool:
    """Return whether the planner measures jobs under this policy."""
    return policy.packs or _acts_on_measures(policy)


def _acts_on_measures(policy: Policy) -> bool:
    """Return whether a measurement may change the next plan at once."""
    tunes = policy.tuning is not None and policy.tuning.by_profiles
    return tunes or policy.shares or policy.grows or policy.moves or policy.resizes


# Longest sleep, because clocks may be set.
_LONGEST_SLEEP_SECONDS: Final = 60.0


def _heard(progress: job_pb2.Progress) -> ProgressReport:
    return ProgressReport(
        progress.step,
        times.unix_seconds(progress.step_time),
        times.unix_seconds(progress.since_time) if progress.HasField("since_time") else nan,
        progress.device_use if progress.HasField("device_use") else None,
        progress.loss,
        progress.training_epoch or _told_passes(progress),
        progress.training_epochs,
    )


def _told_passes(progress: job_pb2.Progress) -> int:
    """Return the passes of a job that reports its epoch as a metric."""
    told = [metric.value for metric in progress.metrics if metric.name == "epoch"]
    return int(max(0.0, told[0])) if told and isfinite(told[0]) else 0
