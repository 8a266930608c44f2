"""JobService: what users call."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from typing import Any, Final

import msgspec
from ganger.v1 import array_pb2, job_pb2, job_service_pb2, job_service_pb2_grpc, usage_pb2
from ganger.wire import errors, times
from ganger.wire import resource_messages as convert
from ganger.wire import resource_names as names
from ganger.wire.methods import CallerIdentity
from ganger.wire.servers import Callers

from ganger_master.core import commands
from ganger_master.core.accounting import DAY_S, DAYS_KEPT
from ganger_master.core.answers import ArrayAnswer, JobAnswer, UpdateAnswer
from ganger_master.core.events import cut
from ganger_master.core.explain import Explanation, explain, kept_for, making_room_for
from ganger_master.core.job_model import JobRecord, members_of
from ganger_master.core.usage import report
from ganger_master.planner.cores_curves import explain_cores, explain_memory
from ganger_master.planner.job_forecasts import Pairs, deadline_advice, inside_partition, start_forecast
from ganger_master.policies import ShareByTimeSlices
from ganger_master.policies.order_registry import EDF
from ganger_master.rpc import answer_messages, job_messages
from ganger_master.rpc.access import UserLimits, array_outline, check_jobs, check_owner, outline
from ganger_master.rpc.answer_messages import (
    ENTRIES_AT_ONCE,
    PAGE_DEFAULT,
    PAGE_MOST,
    PageRoom,
    VisibleState,
    expect,
    page_token,
    place_of,
    usage_to_wire,
)
from ganger_master.rpc.log_proxy import LogProxy
from ganger_master.rpc.planner_messages import REASON_MOST, curve_to_wire, on_the_way_to_wire
from ganger_master.runtime.publication import comes
from ganger_master.runtime.writer import Writer
from ganger_master.store.tables import HistoryEntry

STREAM_S: Final = 30 * 60.0
REQUEST_ID_MOST: Final = 200
# The last sequence number that a store can hold.
_SEQUENCE_MOST: Final = (1 << 63) - 2
# Jobs that are made into messages before other calls are served.
_SHOWN_AT_ONCE: Final = 20


class JobService(job_service_pb2_grpc.JobServiceServicer):
    def __init__(
        self, writer: Writer, shown: VisibleState, logs: LogProxy, callers: Callers, limits: UserLimits
    ) -> None:
        self._writer = writer
        self._shown = shown
        self._logs = logs
        self._callers = callers
        self._limits = limits

    async def CreateJob(self, request: job_service_pb2.CreateJobRequest, context: Any) -> job_pb2.Job:
        return await self._change(_submission(request, self._callers.of(context)), context)

    async def ValidateSubmission(self, request: job_service_pb2.ValidateSubmissionRequest, context: Any) -> job_pb2.Job:
        caller = self._callers.of(context)
        if not request.HasField("submission"):
            raise errors.RequestInvalid("submission: a job or an array")
        command: commands.SubmitJob | commands.SubmitArray
        if request.HasField("array"):
            command = answer_messages.submission_from_wire(request.array, caller)
        else:
            command = _submission(request.job, caller)
        async with self._limits.change(caller, max(1, len(request.array.members))):
            kind: type[ArrayAnswer | JobAnswer] = ArrayAnswer if request.HasField("array") else JobAnswer
            number = expect(self._writer.judge(command), kind).number
        # A number that was given before is that of a submission with the same request id.
        is_known = number < self._writer.state.counters.next_job
        terms = self._writer.state.partitions.terms_of(command.spec.partition)
        job = JobRecord(0, "", caller.name, command.spec, self._writer.now(), partition=terms)
        message = job_messages.job_to_wire(job, None, None)
        named = names.array_name if request.HasField("array") else names.job_name
        message.name = named(number) if is_known else ""
        return message

    async def CreateArray(self, request: job_service_pb2.CreateArrayRequest, context: Any) -> array_pb2.Array:
        _check_request_id(request.request_id)
        command = answer_messages.submission_from_wire(request, self._callers.of(context))
        async with self._limits.change(self._callers.of(context), len(request.members)):
            # Reading a thousand members takes as long as deciding about them: other calls may come in between.
            await asyncio.sleep(0)
            return self._shown.array(expect(await self._writer.submit(command), ArrayAnswer).number)

    async def UpdateArray(
        self, request: job_service_pb2.UpdateArrayRequest, context: Any
    ) -> job_service_pb2.UpdateArrayResponse:
        number, caller = names.parse_array_name(request.name), self._callers.of(context)
        count = self._members_of(caller, number)
        _check_request_id(request.request_id)
        update = job_messages.update_from_wire(request.update)
        command = commands.UpdateArray(number, update, request.request_id, caller.name, request.may_end)
        async with self._limits.change(caller, count):
            answer = expect(await self._writer.submit(command), UpdateAnswer)
        return job_service_pb2.UpdateArrayResponse(
            array=self._shown.array(number),
            updated=answer.updated,
            refused=[
                job_service_pb2.RefusedUpdate(job=names.job_name(job), reason=why.reason, message=why.message)
                for job, why in answer.refused
            ],
        )

    async def GetArray(self, request: job_service_pb2.GetArrayRequest, context: Any) -> array_pb2.Array:
        return self._array(names.parse_array_name(request.name), self._callers.of(context))

    async def ListArrays(
        self, request: job_service_pb2.ListArraysRequest, context: Any
    ) -> job_service_pb2.ListArraysResponse:
        caller = self._callers.of(context)
        before = place_of(request.page_token, names.parse_array_name, 0)
        room = PageRoom(min(request.page_size or PAGE_DEFAULT, PAGE_MOST))
        response, last, seen = job_service_pb2.ListArraysResponse(), 0, 0
        async for job in self._newest_jobs(0):
            membership = job.spec.array
            # Members of higher numbers come first.
            if membership is None or membership.array == seen or (before and membership.array >= before):
                continue
            if (request.live and job.state.is_finished) or (request.user and job.user != request.user):
                continue
            seen = membership.array
            message = self._array(seen, caller)
            if not room.take(message):
                response.next_page_token = page_token(names.array_name(last))
                break
            response.arrays.append(message)
            last = seen
            await asyncio.sleep(0)
        return response

    async def _newest_jobs(self, before: int) -> AsyncIterator[JobRecord]:
        """Yield jobs of lower numbers than `before`, or all if it is zero, newest first. Other calls are served
        meanwhile, so each job is as it is when it is yielded."""
        jobs = self._writer.committed.jobs
        numbers = sorted((number for number in jobs if number < before) if before else jobs, reverse=True)
        for place, number in enumerate(numbers):
            if place % ENTRIES_AT_ONCE == ENTRIES_AT_ONCE - 1:
                await asyncio.sleep(0)
            job = jobs.get(number)
            if job is not None:
                yield job

    async def CancelArray(self, request: job_service_pb2.CancelArrayRequest, context: Any) -> array_pb2.Array:
        number = names.parse_array_name(request.name)
        caller = self._callers.of(context)
        command = commands.CancelArray(number, request.reason[:REASON_MOST], caller.name)
        async with self._limits.change(caller, self._members_of(caller, number)):
            return self._shown.array(expect(await self._writer.submit(command), ArrayAnswer).number)

    async def GetJob(self, request: job_service_pb2.GetJobRequest, context: Any) -> job_pb2.Job:
        return self._job(names.parse_job_name(request.name), self._callers.of(context), with_environment=True)

    async def ListJobs(
        self, request: job_service_pb2.ListJobsRequest, context: Any
    ) -> job_service_pb2.ListJobsResponse:
        size = min(request.page_size or PAGE_DEFAULT, PAGE_MOST)
        before = place_of(request.page_token, names.parse_job_name, 0)
        states = {job_messages.STATES_FROM_WIRE.get(state) for state in request.states}
        caller = self._callers.of(context)
        labels = request.labels.items()
        response, room, last = job_service_pb2.ListJobsResponse(), PageRoom(size), 0
        array = names.parse_array_name(request.array) if request.array else 0
        if array:
            self._shown.members(array)
        async for job in self._newest_jobs(before):
            if not _is_in(job, array, request.without_members):
                continue
            if (states and job.state not in states) or (request.user and job.user != request.user):
                continue
            if request.display_name and job.spec.display_name != request.display_name:
                continue
            if labels and not (caller.may_read(job.user) and labels <= job.spec.labels.items()):
                continue
            message = self._job(job.number, caller)
            if not room.take(message):
                response.next_page_token = page_token(names.job_name(last))
                break
            response.jobs.append(message)
            last = job.number
            if len(response.jobs) % _SHOWN_AT_ONCE == 0:
                await asyncio.sleep(0)
        return response

    async def WatchJob(self, request: job_service_pb2.WatchJobRequest, context: Any) -> AsyncIterator[job_pb2.Job]:
        number = names.parse_job_name(request.name)
        self._shown.job_named(number)
        caller = self._callers.of(context)
        loop = asyncio.get_running_loop()
        end = loop.time() + STREAM_S
        sent = b""
        with self._writer.committed.watching(f"jobs/{number}") as news:
            while loop.time() < end:
                news.clear()
                job = self._shown.job_named(number)
                if job.revision > request.after_revision or (sent and job.revision == request.after_revision):
                    message = self._shown.job(number)
                    message.ClearField("progress")
                    if (shape := message.SerializeToString(deterministic=True)) != sent:
                        sent = shape
                        yield self._job(number, caller)
                if job.state.is_finished:
                    return
                if not await comes(news, end - loop.time()):
                    return

    async def CancelJob(self, request: job_service_pb2.CancelJobRequest, context: Any) -> job_pb2.Job:
        number, user = self._reached(request.name, context)
        return await self._change(commands.CancelJob(number, request.reason[:REASON_MOST], user), context)

    async def UpdateJob(self, request: job_service_pb2.UpdateJobRequest, context: Any) -> job_pb2.Job:
        number, user = self._reached(request.name, context)
        _check_request_id(request.request_id)
        update = job_messages.update_from_wire(request.update)
        command = commands.UpdateJob(number, update, request.request_id, user, request.may_end)
        return await self._change(command, context)

    async def SuspendJob(self, request: job_service_pb2.SuspendJobRequest, context: Any) -> job_pb2.Job:
        number, user = self._reached(request.name, context)
        level = job_messages.level_from_wire(request.level)
        return await self._change(commands.SuspendJob(number, level, user), context)

    async def ResumeJob(self, request: job_service_pb2.ResumeJobRequest, context: Any) -> job_pb2.Job:
        return await self._change(commands.ResumeJob(*self._reached(request.name, context)), context)

    async def MoveJob(self, request: job_service_pb2.MoveJobRequest, context: Any) -> job_pb2.Job:
        number, user = self._reached(request.name, context)
        nodes = tuple(names.parse_node_name(node) for node in request.nodes)
        return await self._change(commands.MoveJob(number, nodes, user), context)

    async def RetuneJob(self, request: job_service_pb2.RetuneJobRequest, context: Any) -> job_pb2.Job:
        number, user = self._reached(request.name, context)
        return await self._change(commands.RetuneJob(number, request.millicores, request.is_repin, user), context)

    async def ResizeJob(self, request: job_service_pb2.ResizeJobRequest, context: Any) -> job_pb2.Job:
        number, user = self._reached(request.name, context)
        tasks = tuple(sorted(request.tasks.items()))
        return await self._change(commands.ResizeJob(number, request.gpus, user, tasks), context)

    async def ReadLog(
        self, request: job_service_pb2.ReadLogRequest, context: Any
    ) -> AsyncIterator[job_service_pb2.LogChunk]:
        number, _ = self._reached(request.name, context)
        async for chunk in self._logs.read(number, request.rank, request.offset, follow=request.follow):
            yield chunk

    async def GetSeries(self, request: job_service_pb2.GetSeriesRequest, context: Any) -> job_service_pb2.Series:
        number, _ = self._reached(request.name, context)
        return await self._logs.series(number)

    async def ExplainJob(self, request: job_service_pb2.ExplainJobRequest, context: Any) -> job_service_pb2.Explanation:
        number, _ = self._reached(request.name, context)
        job = self._job(number, self._callers.of(context))
        if number not in self._writer.state.jobs:
            # Forgotten in the batch that is being committed.
            raise self._shown.not_found(number)
        found = explain(self._writer.state, number, self._writer.now(), has_planner=self._writer.committed.has_planner)
        if found.is_ranked or found.share is not None:
            found = await self._with_forecast(found, number)
        is_estimated = found.start_before_s > 0
        curve = self._writer.state.cores_curves.get(number)
        return job_service_pb2.Explanation(
            job=job,
            blockers=convert.refusals_to_wire(found.blockers),
            start_after=times.duration(found.start_after_s) if is_estimated else None,
            start_before=times.duration(found.start_before_s) if is_estimated else None,
            assumption=found.assumption,
            deadline_advice=await self._deadline_advice(number),
            migration_steps=[on_the_way_to_wire(one) for one in making_room_for(self._writer.state, number)],
            kept_nodes=[names.node_name(node) for node in kept_for(self._writer.state, number)],
            cores_reason=explain_cores(self._writer.state, number),
            cores_curve=None if curve is None else curve_to_wire(curve),
            memory_reason=explain_memory(self._writer.state, number),
        )

    async def _with_forecast(self, found: Explanation, number: int) -> Explanation:
        state, committed = self._writer.state, self._writer.committed
        if number not in committed.jobs:
            return found
        owner, limit = found.share or (None, None)
        # As for a deadline. Of jobs that have ended all show how long jobs take.
        pairs: Pairs = [
            (one, committed.gangs.get(one.epoch))
            for one in committed.jobs.values()
            if limit is None or one.state.is_finished or owner in state.owners(one)
        ]
        ranks = dict(state.queue.ranks)
        # To preempt jobs of others makes no room in a share.
        preempts = limit is None and (state.policy.order.preempts or state.policy.has(ShareByTimeSlices))
        view, now, partition = state.view.copy(), self._writer.now(), committed.jobs[number].partition.name
        rivals = frozenset[int]()
        if partition and limit is None:
            there = inside_partition(pairs, view, partition)
            pairs, view, rivals = there.pairs, there.view, there.rivals
        forecast = await asyncio.to_thread(
            start_forecast, pairs, number, ranks, view, now, preempts=preempts, limit=limit, rivals=rivals
        )
        return msgspec.structs.replace(
            found,
            start_after_s=forecast.after,
            start_before_s=forecast.before,
            assumption=forecast.assumption or found.assumption,
        )

    async def _deadline_advice(self, number: int) -> str:
        state, committed = self._writer.state, self._writer.committed
        job = committed.jobs.get(number)
        if job is None or not job.spec.deadline or job.state.is_finished:
            return ""
        if state.policy.order.name != EDF.name:
            return f"nothing is done for it: policy {state.policy.name} does not go by deadlines, edf does"
        # Elements do not change, the view is a copy: to weigh all jobs may take as long as many calls do.
        pairs: Pairs = [(one, committed.gangs.get(one.epoch)) for one in committed.jobs.values()]
        view, partition, rivals = state.view.copy(), job.partition.name, frozenset[int]()
        if partition:
            there = inside_partition(pairs, view, partition)
            pairs, view, rivals = there.pairs, there.view, there.rivals
        return await asyncio.to_thread(deadline_advice, pairs, number, view, self._writer.now(), rivals)

    async def GetUsage(self, request: usage_pb2.GetUsageRequest, context: Any) -> usage_pb2.Usage:
        state, now = self._writer.state, self._writer.now()
        first = (int(now // DAY_S) - DAYS_KEPT + 1) * DAY_S
        asked = times.unix_s(request.since_time) if request.HasField("since_time") else 0.0
        since = max(first, min(asked, now) // DAY_S * DAY_S)
        found = report(state, self._writer.committed.usage.values(), since, now)
        return usage_to_wire(found, since, state.settings.usage_half_life_s)

    async def ListEvents(
        self, request: job_service_pb2.ListEventsRequest, context: Any
    ) -> job_service_pb2.ListEventsResponse:
        size = min(request.page_size or PAGE_DEFAULT, PAGE_MOST)
        after = min(request.after_sequence, _SEQUENCE_MOST)
        if after and after + 1 < await self._writer.oldest_sequence():
            raise errors.EventsCompacted("these events are no longer kept: list again from zero")
        caller = self._callers.of(context)
        if not self._may_read_history(caller, request.subject) and (user := self._owner_of(request.subject)):
            check_owner(caller, request.subject, user)
        entries = await self._writer.history(request.subject, after, size)
        response, room = job_service_pb2.ListEventsResponse(next_sequence=after), PageRoom()
        for entry in entries:
            if self._may_read_history(caller, entry.subject):
                message = _event_to_wire(entry)
                if not room.take(message):
                    break
                response.events.append(message)
            response.next_sequence = entry.sequence
        return response

    def _reached(self, name: str, context: Any) -> tuple[int, str]:
        """Return job number and caller's name. Raises NameInvalid, and for a user JobNotFound, JobNotYours."""
        number, caller = names.parse_job_name(name), self._callers.of(context)
        check_jobs(caller, self._shown, (number,))
        return number, caller.name

    def _job(self, number: int, caller: CallerIdentity, *, with_environment: bool = False) -> job_pb2.Job:
        message = self._shown.job(number, with_environment=with_environment)
        return message if caller.may_read(message.user) else outline(message)

    def _array(self, number: int, caller: CallerIdentity) -> array_pb2.Array:
        message = self._shown.array(number)
        return message if caller.may_read(message.user) else array_outline(message)

    def _may_read_history(self, caller: CallerIdentity, subject: str) -> bool:
        """Return whether the caller may read the history: of own jobs and arrays, nodes and the cluster."""
        if not caller.has_own_jobs_only or not subject.startswith(("jobs/", "arrays/")):
            return True
        return self._owner_of(subject) == caller.name

    def _owner_of(self, subject: str) -> str:
        """Empty where it is not kept any more, or never was."""
        jobs = self._writer.committed.jobs
        try:
            if subject.startswith("jobs/"):
                job = jobs.get(names.parse_job_name(subject))
                return "" if job is None else job.user
            return next((job.user for job in members_of(jobs, names.parse_array_name(subject))), "")
        except errors.NameInvalid:
            return ""

    def _members_of(self, caller: CallerIdentity, number: int) -> int:
        """Return how many members an array has that the caller may change. Raises JobNotYours."""
        members = self._shown.members(number)
        if caller.has_own_jobs_only:
            check_owner(caller, names.array_name(number), members[0].user)
        return len(members)

    async def _change(self, command: commands.Command, context: Any) -> job_pb2.Job:
        async with self._limits.change(self._callers.of(context)):
            answer = expect(await self._writer.submit(command), JobAnswer)
            return self._shown.job(answer.number)


def _event_to_wire(entry: HistoryEntry) -> job_pb2.Event:
    return job_pb2.Event(
        sequence=entry.sequence,
        time=times.timestamp(entry.time),
        subject=entry.subject,
        kind=entry.kind,
        cause=entry.cause,
        message=cut(entry.message),
        figures={name: cut(text) for name, text in msgspec.json.decode(entry.figures, type=dict[str, str]).items()},
    )


def _submission(request: job_service_pb2.CreateJobRequest, caller: CallerIdentity) -> commands.SubmitJob:
    """Return the submission of a job, which is not yet judged."""
    _check_request_id(request.request_id)
    spec = job_messages.spec_from_wire(request.spec)
    return commands.SubmitJob(
        spec, str(uuid.uuid4()), caller.name, request.request_id, limited=caller.has_own_jobs_only
    )


def _check_request_id(request_id: str) -> None:
    if len(request_id) > REQUEST_ID_MOST:
        raise errors.SpecInvalid(f"request_id: at most {REQUEST_ID_MOST} characters, better a UUID")


def _is_in(job: JobRecord, array: int, is_folded: bool) -> bool:
    membership = job.spec.array
    if membership is None:
        return not array
    return membership.array == array if array else not is_folded
