"""SchedulingService: what job schedulers and the planner call."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator, Sequence
from contextlib import aclosing
from itertools import chain, starmap
from typing import Any, Final, TypeAlias

from ganger.cluster.resources import NodeRow
from ganger.cluster.view import LoadMode
from ganger.v1 import job_pb2, node_pb2, resources_pb2, scheduling_pb2, scheduling_pb2_grpc
from ganger.wire import errors, times
from ganger.wire import resource_messages as convert
from ganger.wire import resource_names as names
from ganger.wire.methods import CallerIdentity
from ganger.wire.servers import Callers
from msgspec.structs import replace

from ganger_master.core import commands
from ganger_master.core.accounting import UserUsage
from ganger_master.core.answers import Answer, Done, JobAnswer, PlanAnswer, Refused
from ganger_master.core.ending import is_backing_off
from ganger_master.core.gang_model import Gang
from ganger_master.core.job_model import JobRecord
from ganger_master.core.job_rules import may_never_start
from ganger_master.core.node_model import Reservation
from ganger_master.core.plan_changes import SliceChange, StartChange, claims_in
from ganger_master.core.queue import GrantedLease
from ganger_master.core.state import State
from ganger_master.rpc import job_messages
from ganger_master.rpc.access import UserLimits, check_jobs
from ganger_master.rpc.answer_messages import (
    PageRoom,
    VisibleState,
    change_verdict_of,
    expect,
    in_messages,
    verdict_of,
)
from ganger_master.rpc.job_service import STREAM_S
from ganger_master.rpc.node_selection_messages import reservation_to_wire
from ganger_master.rpc.planner_messages import (
    limits_to_wire,
    live_job_to_wire,
    plan_from_wire,
    remaining_times_from_wire,
    teams_to_wire,
    use_to_wire,
)
from ganger_master.runtime.publication import ProgressBoard, comes
from ganger_master.runtime.writer import Writer

_CANDIDATES_MOST: Final = 16
# Claims in all candidates of a request together.
_CLAIMS_MOST: Final = 4_096
# The others are left out: the decisive blocker comes first.
_BLOCKERS_MOST: Final = 16
_SCHEDULER_MOST: Final = 200
_REQUESTS_MOST: Final = 1_000
# Requests that are judged before other calls are served, and answered together.
_JUDGED_AT_ONCE: Final = 128
# What a request in a batch counts as, in requests: it costs the master a fraction of a call.
_COST_IN_BATCH: Final = 0.1
# Groups of requests of one stream that may wait for their commit.
_MESSAGES_AHEAD: Final = 16
# Between two deltas of one watcher, so that a busy master does not send one for every commit.
_DELTA_S: Final = 0.01
# Rows turned into messages before other calls run.
_ROWS_AT_ONCE: Final = 500
_SHORTEST_INTERVAL_S: Final = 0.1
_LONGEST_INTERVAL_S: Final = 600.0
# Minimum time between two deltas of all jobs: a planner takes longer to process one.
_CLUSTER_DELTA_S: Final = 0.01
# Jobs in one message, before other calls run.
_JOBS_AT_ONCE: Final = 200

_Judged: TypeAlias = tuple[Sequence[scheduling_pb2.GangRequest], asyncio.Future[Sequence[Answer]]]


class SchedulingService(scheduling_pb2_grpc.SchedulingServiceServicer):
    def __init__(
        self, writer: Writer, shown: VisibleState, progress: ProgressBoard, callers: Callers, limits: UserLimits
    ) -> None:
        self._writer = writer
        self._callers = callers
        self._limits = limits
        self._shown = shown
        self._progress = progress

    async def GetView(self, request: scheduling_pb2.GetViewRequest, context: Any) -> scheduling_pb2.View:
        committed = self._writer.committed
        version = committed.view_version
        rows = sorted(committed.rows.values(), key=lambda row: row.node)
        return scheduling_pb2.View(
            version=version,
            configuration_sets=self._configuration_sets(),
            nodes=await _messages(rows),
            load_mode=self._load_mode(),
        )

    async def WatchView(
        self, request: scheduling_pb2.WatchViewRequest, context: Any
    ) -> AsyncIterator[scheduling_pb2.ViewDelta]:
        committed = self._writer.committed
        loop = asyncio.get_running_loop()
        end = loop.time() + STREAM_S
        sent = request.after_version if request.after_version <= committed.view_version else 0
        shown = set(committed.rows) if sent else set()
        with committed.watching("view") as news:
            is_first = True
            while loop.time() < end:
                news.clear()
                version = committed.view_version
                rows = committed.rows_after(sent) if sent else list(committed.rows.values())
                removed = shown.difference(committed.rows)
                shown = set(committed.rows) if removed else shown.union(row.node for row in rows)
                if rows or removed or is_first:
                    delta = self._view_delta(version, sent, removed)
                    delta.nodes.extend(await _messages(rows))
                    yield delta
                    sent, is_first = version, False
                    await asyncio.sleep(_DELTA_S)
                if not await comes(news, end - loop.time()):
                    return

    async def WatchCluster(
        self, request: scheduling_pb2.WatchClusterRequest, context: Any
    ) -> AsyncIterator[scheduling_pb2.ClusterDelta]:
        loop = asyncio.get_running_loop()
        end = loop.time() + STREAM_S
        committed = self._writer.committed
        sent, shown, use = 0, set[str](), dict[str, UserUsage]()
        reserved: tuple[Reservation, ...] = ()
        with committed.watching_jobs() as news:
            while loop.time() < end:
                news.mark.clear()
                # One consistent state: collected without giving up the event loop; elements are immutable.
                numbers = news.take()
                if numbers is None or not sent:
                    sent, shown, use = 0, set(), {}
                    numbers = list(committed.jobs)
                known = [job for n in numbers if (job := committed.jobs.get(n)) and not (job.held or self._waits(job))]
                there = [(job, committed.gangs.get(job.epoch)) for job in known]
                forgotten = [n for n in numbers if (job := committed.jobs.get(n)) is None or self._waits(job)]
                rows = committed.rows_after(sent) if sent else list(committed.rows.values())
                removed = shown.difference(committed.rows)
                shown = set(committed.rows) if removed else shown.union(row.node for row in rows)
                settings = self._writer.state.settings
                quantum = settings.quantum_s
                used = [one for one in committed.usage.values() if settings.teams and use.get(one.user) is not one]
                use.update({one.user: one for one in used})
                delta = scheduling_pb2.ClusterDelta(
                    view=self._view_delta(committed.view_version, sent, removed),
                    removed_jobs=[names.job_name(number) for number in forgotten],
                    time=times.timestamp(self._writer.now()),
                    policy=settings.policy,
                    plan_interval=times.duration(settings.plan_every_s),
                    draining_nodes=[names.node_name(node) for node in self._writer.state.nodes.draining],
                    changing_node_sets=[
                        names.node_set_name(one.number) for one in committed.sets.values() if one.coming is not None
                    ],
                    quantum=None if quantum is None else times.duration(quantum),
                    migrations_per_hour=settings.moves_per_hour,
                    usage=[use_to_wire(one) for one in used],
                )
                if not sent:
                    _add_limits(self._writer.state, delta)
                changed: tuple[Reservation, ...] = ()
                if not sent or reserved != tuple(committed.reservations.values()):
                    changed = reserved = tuple(committed.reservations.values())
                    delta.reservations.SetInParent()
                sent = committed.view_version
                delta.view.nodes.extend(await _messages(rows))
                async for part in _in_parts(delta, changed, there, self._writer.now()):
                    yield part
                await asyncio.sleep(_CLUSTER_DELTA_S)
                if not await comes(news.mark, end - loop.time()):
                    return

    def _waits(self, job: JobRecord) -> bool:
        """Return whether a planner is not to rank the job: it waits for a time, or may not be in its partition."""
        return is_backing_off(job) or may_never_start(self._writer.state, job) is not None

    async def WatchLeases(
        self, request: scheduling_pb2.WatchLeasesRequest, context: Any
    ) -> AsyncGenerator[scheduling_pb2.PlacementLeases, None]:
        if not 0 < len(request.scheduler) <= _SCHEDULER_MOST:
            raise errors.RequestInvalid(
                f"a scheduler must give its name, unique among live streams, of at most {_SCHEDULER_MOST} characters"
            )
        jobs = tuple(names.parse_job_name(job) for job in request.jobs)
        for number in jobs:
            self._shown.job_named(number)
        scheduler, caller = request.scheduler, self._callers.of(context)
        if caller.has_own_jobs_only:
            if not jobs:
                raise errors.RequestInvalid("name the jobs whose leases to take: a user's scheduler has own ones only")
            check_jobs(caller, self._shown, jobs)
            # The user's name as a prefix keeps users from taking over each other's streams.
            scheduler = f"{caller.name}/{scheduler}"
        streams = self._writer.lease_streams
        with streams.opened(scheduler, jobs) as queue:
            try:
                alone = not jobs and not streams.has_other_host(scheduler)
                expect(await self._writer.submit(commands.ClaimTurns(scheduler, jobs, alone=alone)), Done)
                while streams.is_of(scheduler, queue):
                    batch = await queue.get()
                    if batch is None:
                        return
                    live = [found for lease in batch if (found := self._lease_message(lease)) is not None]
                    for leases in in_messages(live):
                        yield scheduling_pb2.PlacementLeases(leases=leases)
            finally:
                if streams.is_of(scheduler, queue):
                    self._writer.enqueue(commands.ClaimTurns(scheduler, jobs, connected=False))

    async def WatchTurns(
        self, request: scheduling_pb2.WatchLeasesRequest, context: Any
    ) -> AsyncIterator[scheduling_pb2.PlacementLease]:
        async with aclosing(self.WatchLeases(request, context)) as batches:
            async for batch in batches:
                for lease in batch.leases:
                    yield lease

    async def RequestGang(self, request: scheduling_pb2.GangRequest, context: Any) -> scheduling_pb2.Verdict:
        command = _gang_request(request)
        check_jobs(self._callers.of(context), self._shown, (command.number,))
        return verdict_of(request.job, await self._writer.submit(command))

    async def RequestGangs(
        self, request_iterator: AsyncIterator[scheduling_pb2.GangRequests], context: Any
    ) -> AsyncIterator[scheduling_pb2.Verdicts]:
        # Judged as they come, answered in their order: the next message need not wait for the commit of this one.
        judged: asyncio.Queue[_Judged | None] = asyncio.Queue(_MESSAGES_AHEAD)
        reading = asyncio.create_task(self._judge(request_iterator, judged, self._callers.of(context)))
        try:
            while (found := await judged.get()) is not None:
                requests, answers = found
                pairs = zip(requests, await answers, strict=True)
                for verdicts in in_messages(_verdict_alone(request.job, answer) for request, answer in pairs):
                    yield scheduling_pb2.Verdicts(verdicts=verdicts)
            await reading
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    async def _judge(
        self,
        messages: AsyncIterator[scheduling_pb2.GangRequests],
        judged: asyncio.Queue[_Judged | None],
        caller: CallerIdentity,
    ) -> None:
        try:
            async for message in messages:
                if len(message.requests) > _REQUESTS_MOST:
                    many = len(message.requests)
                    raise errors.RequestInvalid(f"{many} requests in a message: at most {_REQUESTS_MOST}")
                for start in range(0, len(message.requests), _JUDGED_AT_ONCE):
                    part = message.requests[start : start + _JUDGED_AT_ONCE]
                    await self._limits.wait_for_rate(caller, len(part) * _COST_IN_BATCH)
                    requests = [_gang_request(request) for request in part]
                    if caller.has_own_jobs_only:
                        check_jobs(caller, self._shown, (request.number for request in requests))
                    await judged.put((part, self._writer.submit_all(requests)))
                    await asyncio.sleep(0)
        except Exception:
            # The error is raised where the answers are awaited, after what was judged before it.
            await judged.put(None)
            raise
        await judged.put(None)

    async def ReleaseGang(self, request: scheduling_pb2.ReleaseGangRequest, context: Any) -> job_pb2.Job:
        command = commands.ReleaseGang(names.parse_job_name(request.job), request.epoch)
        check_jobs(self._callers.of(context), self._shown, (command.number,))
        return self._shown.job(expect(await self._writer.submit(command), JobAnswer).number)

    async def ProposePlan(self, request: scheduling_pb2.Plan, context: Any) -> scheduling_pb2.PlanVerdict:
        command = plan_from_wire(request)
        caller = self._callers.of(context)
        if caller.has_own_jobs_only:
            self._check_plan(caller, command)
            command = replace(command, proposer=f"user:{caller.name}")
        elif request.remaining_times:
            self._progress.remaining = remaining_times_from_wire(request.remaining_times)
            if command.is_empty:
                return scheduling_pb2.PlanVerdict(view_version=self._writer.committed.view_version)
        async with self._limits.change(caller, len(command.changes)):
            answer = expect(await self._writer.submit(command), PlanAnswer)
        return scheduling_pb2.PlanVerdict(
            verdicts=[change_verdict_of(verdict) for verdict in answer.verdicts], view_version=answer.view_version
        )

    def _check_plan(self, caller: CallerIdentity, plan: commands.ProposePlan) -> None:
        """Raise PlanInvalid, JobNotFound or JobNotYours for a user's plan that changes others' jobs, or goes where a
        user's scheduler may not: onto devices of others, and past the policy's planner."""
        if plan.line is not None or plan.kept_places is not None or plan.findings or plan.curves:
            least = "it has no line, no places kept, no findings and no curves"
            raise errors.PlanInvalid(f"a user's plan changes own jobs: {least}")
        check_jobs(caller, self._shown, (change.number for change in plan.changes))
        state = self._writer.state
        if state.policy.is_planned and any(isinstance(change, StartChange | SliceChange) for change in plan.changes):
            raise errors.PlanInvalid(
                f"policy {state.settings.policy}: only the cluster's planner starts and"
                " time-slices jobs, not a user's plan"
            )
        for claim in [claim for change in plan.changes for claim in claims_in(change) if claim.shared_mask]:
            for epoch in state.gangs.places_on.get(claim.node, ()):
                piece = state.gangs[epoch].piece(claim.node)
                if piece is not None and piece.claim.device_mask & claim.shared_mask:
                    check_jobs(caller, self._shown, (state.gangs[epoch].job,))

    async def WatchProgress(
        self, request: scheduling_pb2.WatchProgressRequest, context: Any
    ) -> AsyncIterator[scheduling_pb2.ProgressBatch]:
        jobs = [names.parse_job_name(job) for job in request.jobs] or None
        caller = self._callers.of(context)
        if caller.has_own_jobs_only:
            if jobs is None:
                raise errors.RequestInvalid("name the jobs whose progress to watch: a user sees only own jobs")
            check_jobs(caller, self._shown, jobs)
        interval = times.seconds(request.interval) if request.HasField("interval") else 1.0
        loop = asyncio.get_running_loop()
        end = loop.time() + STREAM_S
        marks: dict[int, float] = {}
        while loop.time() < end:
            fresh = self._progress.newer_than(marks, jobs)
            batch, room = scheduling_pb2.ProgressBatch(), PageRoom(_JOBS_AT_ONCE)
            for job, sample in fresh.items():
                marks[job] = sample.time
                message = job_messages.progress_to_wire(sample)
                if not room.take(message):
                    yield batch
                    batch, room = scheduling_pb2.ProgressBatch(), PageRoom(_JOBS_AT_ONCE)
                    room.take(message)
                    await asyncio.sleep(0)
                batch.progress[names.job_name(job)].CopyFrom(message)
            if fresh:
                yield batch
            await asyncio.sleep(min(max(interval, _SHORTEST_INTERVAL_S), _LONGEST_INTERVAL_S))

    def _view_delta(self, version: int, after: int, removed: Iterable[str]) -> scheduling_pb2.ViewDelta:
        return scheduling_pb2.ViewDelta(
            version=version,
            from_version=after,
            configuration_sets=self._configuration_sets(),
            removed_nodes=[names.node_name(node) for node in sorted(removed)],
            load_mode=self._load_mode(),
        )

    def _configuration_sets(self) -> list[Any]:
        known = self._writer.committed.configuration_sets
        return [convert.configuration_set_to_wire(known[name]) for name in sorted(known)]

    def _load_mode(self) -> resources_pb2.LoadMode.ValueType:
        is_light = self._writer.committed.mode is LoadMode.SPREAD
        return resources_pb2.LOAD_MODE_SPREAD if is_light else resources_pb2.LOAD_MODE_PACK

    def _lease_message(self, lease: GrantedLease) -> scheduling_pb2.PlacementLease | None:
        """Return None if the job is gone or the lease has expired."""
        now = self._writer.now()
        job = self._writer.committed.jobs.get(lease.number)
        if job is None or lease.expires <= now:
            return None
        parked = self._writer.committed.gangs.get(job.epoch)
        return scheduling_pb2.PlacementLease(
            lease=lease.turn,
            job=job.name,
            revision=lease.revision,
            remaining=times.duration(lease.expires - now),
            rank=lease.rank,
            # As many tasks as it requests now; for a parked elastic job, as many as are parked.
            spec=job_messages.spec_to_wire(replace(job.spec_in_force, roles=job.shape.roles), with_environment=False),
            waited=times.duration(max(0.0, now - (job.pending_since or now))),
            parked=[] if parked is None else convert.claims_to_wire(parked.parked_claims),
            kept_nodes=[names.node_name(node) for node in lease.kept_nodes],
            suggested=convert.claims_to_wire(lease.suggested),
            view_version=self._writer.committed.view_version,
            arena_bytes_per_device=job.arena_bytes_per_device,
            device_memory_bytes=job.shape.device_memory_bytes,
            task_memory_bytes=job.shape.task_memory_bytes,
        )


async def _in_parts(
    delta: scheduling_pb2.ClusterDelta,
    reservations: Iterable[Reservation],
    jobs: Iterable[tuple[JobRecord, Gang | None]],
    now: float,
) -> AsyncGenerator[scheduling_pb2.ClusterDelta, None]:
    """Yield a delta with these reservations and jobs, in as many messages as they need."""
    room = PageRoom(_JOBS_AT_ONCE)
    room.take(delta)
    messages: Iterator[node_pb2.Reservation | scheduling_pb2.LiveJob]
    messages = chain((reservation_to_wire(one, now) for one in reservations), starmap(_live_job, jobs))
    for message in messages:
        if not room.take(message):
            delta.has_more = True
            yield delta
            delta, room = scheduling_pb2.ClusterDelta(), PageRoom(_JOBS_AT_ONCE)
            room.take(message)
            await asyncio.sleep(0)
        if isinstance(message, node_pb2.Reservation):
            delta.reservations.reservations.append(message)
        else:
            delta.jobs.append(message)
    yield delta


def _live_job(job: JobRecord, gang: Gang | None) -> scheduling_pb2.LiveJob:
    live_job_to_wire(job, gang, message := scheduling_pb2.LiveJob())
    return message


def _add_limits(state: State, delta: scheduling_pb2.ClusterDelta) -> None:
    """Put the limits, and the teams with what their shares follow from, into a delta with the whole view."""
    settings = state.settings
    delta.limits.extend(limits_to_wire(state.limits))
    delta.teams.extend(teams_to_wire(settings.teams))
    delta.needs_planner = settings.needs_planner
    delta.usage_half_life.CopyFrom(times.duration(settings.usage_half_life_s))


async def _messages(rows: Sequence[NodeRow]) -> list[node_pb2.NodeState]:
    messages: list[node_pb2.NodeState] = []
    for start in range(0, len(rows), _ROWS_AT_ONCE):
        if start:
            await asyncio.sleep(0)
        messages.extend(convert.node_row_to_wire(row) for row in rows[start : start + _ROWS_AT_ONCE])
    return messages


def _gang_request(message: scheduling_pb2.GangRequest) -> commands.RequestGang:
    if len(message.candidates) > _CANDIDATES_MOST:
        raise errors.RequestInvalid(
            f"a request has at most {_CANDIDATES_MOST} candidates, not {len(message.candidates)}"
        )
    claims = sum([len(candidate.claims) for candidate in message.candidates])
    if claims > _CLAIMS_MOST:
        raise errors.RequestInvalid(f"the candidates of a request have at most {_CLAIMS_MOST} claims, not {claims}")
    return commands.RequestGang(
        number=names.parse_job_name(message.job),
        revision=message.revision,
        candidates=tuple([convert.claims_from_wire(candidate.claims) for candidate in message.candidates]),
        turn=message.lease,
        blockers=convert.refusals_from_wire(message.blockers[:_BLOCKERS_MOST]) if message.blockers else (),
        view_version=message.view_version,
    )


def _verdict_alone(job: str, answer: Answer) -> scheduling_pb2.Verdict:
    """Return the verdict on one request of the batched stream. One that cannot be judged is refused alone."""
    if not isinstance(answer, Refused):
        return verdict_of(job, answer)
    verdict = scheduling_pb2.Verdict(job=job)
    verdict.rejected.refusals.add(reason=answer.reason, message=answer.message)
    return verdict
