"""A server in a thread that answers like a master, from what a test puts in: for what clients print and send."""

# Methods carry the names of the services.
# ruff: noqa: N802

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from ganger.v1 import (
    array_pb2,
    job_pb2,
    job_service_pb2,
    job_service_pb2_grpc,
    node_pb2,
    node_pb2_grpc,
    resources_pb2,
    usage_pb2,
)
from ganger.wire import endpoints, times
from ganger.wire.errors import JobNotFound, OffsetBeyondEnd
from ganger.wire.servers import bind, make_server

Call = Callable[..., int]


class CannedMaster(job_service_pb2_grpc.JobServiceServicer, node_pb2_grpc.NodeServiceServicer):
    """`jobs` by name, `logs` by rank, `nodes`, ...; keeps `requests`; the next call raises `failing`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.jobs: dict[str, job_pb2.Job] = {}
        self.arrays: dict[str, array_pb2.Array] = {}
        self.logs: dict[int, bytes] = {}
        self.series = job_service_pb2.Series()
        self.nodes = node_pb2.ListNodesResponse()
        self.events: list[job_pb2.Event] = []
        self.cluster = node_pb2.Cluster(version="9.9", policy="fifo")
        self.quarantined: list[node_pb2.QuarantinedGang] = []
        self.refused_adoption: Exception | None = None
        self.explanation = job_service_pb2.Explanation()
        self.usage = usage_pb2.Usage()
        self.partitions = node_pb2.ListPartitionsResponse()
        self.reservations = node_pb2.ListReservationsResponse()
        self.tokens = node_pb2.ListTokensResponse()
        self.requests: list[Any] = []
        self.failing: Exception | None = None
        # What a retune does to the jobs, and a cancel beside ending one.
        self.changing: Callable[[], None] = lambda: None
        # Called whenever a job is looked at.
        self.looked_at: Callable[[], None] = lambda: None
        # The refusal of an update that is not confirmed.
        self.ending: Exception | None = None
        self.refused_updates: list[job_service_pb2.RefusedUpdate] = []
        self.chunk_bytes = 10
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)

    def __enter__(self) -> CannedMaster:
        self._thread.start()
        self._run(self._start())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._run(self._server.stop(None))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(20)

    async def _start(self) -> None:
        token, path = endpoints.ensure_token(self.directory)
        self._server = make_server(token)
        job_service_pb2_grpc.add_JobServiceServicer_to_server(self, self._server)
        node_pb2_grpc.add_NodeServiceServicer_to_server(self, self._server)
        address = bind(self._server, f"unix:{self.directory}/s")
        await self._server.start()
        endpoints.write_endpoint(self.directory, address, path)

    def _taken(self, request: Any) -> None:
        self.requests.append(request)
        failing, self.failing = self.failing, None
        if failing is not None:
            raise failing

    def _job(self, name: str) -> job_pb2.Job:
        if name not in self.jobs:
            array = name.replace("jobs/", "arrays/")
            if array in self.arrays:
                raise JobNotFound(f"there is no {name}", array=array)
            raise JobNotFound(f"there is no {name}")
        return self.jobs[name]

    async def CreateJob(self, request: Any, context: Any) -> job_pb2.Job:
        self._taken(request)
        name = f"jobs/{len(self.jobs) + 1}"
        self.jobs[name] = job_pb2.Job(name=name, state=job_pb2.Job.STATE_PENDING, spec=request.spec, revision=1)
        return self.jobs[name]

    async def ValidateSubmission(self, request: Any, context: Any) -> job_pb2.Job:
        self._taken(request)
        spec = job_pb2.JobSpec()
        spec.CopyFrom(request.job.spec if request.HasField("job") else request.array.spec)
        spec.partition = spec.partition or next((one.name for one in self.partitions.partitions if one.is_default), "")
        if not spec.HasField("time_limit"):
            for one in self.partitions.partitions:
                if one.name == spec.partition and one.HasField("time_limit"):
                    spec.time_limit.CopyFrom(one.time_limit)
        made = [one for one in self.requests if isinstance(one, job_service_pb2.CreateJobRequest)]
        is_known = bool(request.job.request_id) and request.job.request_id in [one.request_id for one in made]
        return job_pb2.Job(spec=spec, name="jobs/1" if is_known else "")

    async def CreateArray(self, request: Any, context: Any) -> array_pb2.Array:
        self._taken(request)
        return array_pb2.Array(name="arrays/1", size=len(request.members))

    async def CreateToken(self, request: Any, context: Any) -> node_pb2.Token:
        self._taken(request)
        return node_pb2.Token(name="0a", user=request.user, text=f"{request.user}.0a.secret")

    async def ListTokens(self, request: Any, context: Any) -> node_pb2.ListTokensResponse:
        self._taken(request)
        return self.tokens

    async def RevokeToken(self, request: Any, context: Any) -> node_pb2.Token:
        self._taken(request)
        return node_pb2.Token(name=request.name, user="ann")

    async def CreateReservation(self, request: Any, context: Any) -> node_pb2.Reservation:
        self._taken(request)
        return request.reservation  # type: ignore[no-any-return]

    async def UpdateReservation(self, request: Any, context: Any) -> node_pb2.Reservation:
        self._taken(request)
        return node_pb2.Reservation(name=request.name, nodes="n1", users=request.users)

    async def ListReservations(self, request: Any, context: Any) -> node_pb2.ListReservationsResponse:
        self._taken(request)
        return self.reservations

    async def DeleteReservation(self, request: Any, context: Any) -> node_pb2.DeleteReservationResponse:
        self._taken(request)
        return node_pb2.DeleteReservationResponse()

    async def ListPartitions(self, request: Any, context: Any) -> node_pb2.ListPartitionsResponse:
        self._taken(request)
        return self.partitions

    async def GetUsage(self, request: Any, context: Any) -> usage_pb2.Usage:
        self._taken(request)
        return self.usage

    async def GetArray(self, request: Any, context: Any) -> array_pb2.Array:
        self._taken(request)
        return self.arrays[request.name]

    async def ListArrays(self, request: Any, context: Any) -> job_service_pb2.ListArraysResponse:
        self._taken(request)
        return job_service_pb2.ListArraysResponse(arrays=self.arrays.values())

    async def CancelArray(self, request: Any, context: Any) -> array_pb2.Array:
        self._taken(request)
        return self.arrays[request.name]

    async def GetJob(self, request: Any, context: Any) -> job_pb2.Job:
        self._taken(request)
        self.looked_at()
        return self._job(request.name)

    async def ListJobs(self, request: Any, context: Any) -> job_service_pb2.ListJobsResponse:
        self._taken(request)
        chosen = [job for job in self.jobs.values() if not request.states or job.state in request.states]
        if request.array:
            chosen = [job for job in chosen if job.array.array == request.array]
        if request.user:
            chosen = [job for job in chosen if job.user == request.user]
        if request.display_name:
            chosen = [job for job in chosen if job.spec.display_name == request.display_name]
        if request.without_members:
            chosen = [job for job in chosen if not job.HasField("array")]
        first = int(request.page_token or 0)
        # Pages of two, whatever was asked for: a server may give less.
        more = str(first + 2) if first + 2 < len(chosen) else ""
        return job_service_pb2.ListJobsResponse(jobs=chosen[first : first + 2], next_page_token=more)

    async def WatchJob(self, request: Any, context: Any) -> AsyncIterator[job_pb2.Job]:
        self._taken(request)
        yield self._job(request.name)

    async def CancelJob(self, request: Any, context: Any) -> job_pb2.Job:
        def change(job: job_pb2.Job) -> None:
            job.state = job_pb2.Job.STATE_CANCELLED
            self.changing()

        return await self._changed(request, change)

    async def UpdateJob(self, request: Any, context: Any) -> job_pb2.Job:
        if self.ending is not None and not request.may_end:
            raise self.ending

        def change(job: job_pb2.Job) -> None:
            job.spec.priority = request.update.priority

        return await self._changed(request, change)

    async def UpdateArray(self, request: Any, context: Any) -> job_service_pb2.UpdateArrayResponse:
        self._taken(request)
        return job_service_pb2.UpdateArrayResponse(
            array=self.arrays[request.name], updated=2, refused=self.refused_updates
        )

    async def SuspendJob(self, request: Any, context: Any) -> job_pb2.Job:
        def change(job: job_pb2.Job) -> None:
            job.state, job.suspended_level = job_pb2.Job.STATE_SUSPENDED, request.level

        return await self._changed(request, change)

    async def MoveJob(self, request: Any, context: Any) -> job_pb2.Job:
        return await self._changed(request, lambda job: None)

    async def RetuneJob(self, request: Any, context: Any) -> job_pb2.Job:
        return await self._changed(request, lambda job: self.changing())

    async def _changed(self, request: Any, change: Callable[[job_pb2.Job], None]) -> job_pb2.Job:
        self._taken(request)
        job = self._job(request.name)
        change(job)
        return job

    async def ReadLog(self, request: Any, context: Any) -> AsyncIterator[job_service_pb2.LogChunk]:
        self._taken(request)
        text = self.logs[request.rank]
        offset = request.offset if request.offset >= 0 else max(0, len(text) + request.offset)
        if offset > len(text):
            raise OffsetBeyondEnd(f"the log has {len(text)} bytes")
        for start in range(offset, len(text), self.chunk_bytes):
            yield job_service_pb2.LogChunk(offset=start, data=text[start : start + self.chunk_bytes])
            if self.failing is not None:
                self._taken("broken off")

    async def GetSeries(self, request: Any, context: Any) -> job_service_pb2.Series:
        self._taken(request)
        return self.series

    async def ExplainJob(self, request: Any, context: Any) -> job_service_pb2.Explanation:
        self._taken(request)
        return self.explanation

    async def ListEvents(self, request: Any, context: Any) -> job_service_pb2.ListEventsResponse:
        self._taken(request)
        known = [event for event in self.events if request.subject in ("", event.subject)]
        after = [event for event in known if event.sequence > request.after_sequence][:2]
        last = after[-1].sequence if after else request.after_sequence
        return job_service_pb2.ListEventsResponse(events=after, next_sequence=last)

    async def ListNodes(self, request: Any, context: Any) -> node_pb2.ListNodesResponse:
        self._taken(request)
        # One node a page, so that clients have to follow the page tokens.
        first = int(request.page_token or 0)
        more = str(first + 1) if first + 1 < len(self.nodes.nodes) else ""
        return node_pb2.ListNodesResponse(
            nodes=self.nodes.nodes[first : first + 1],
            configuration_sets=self.nodes.configuration_sets,
            node_sets=() if more else self.nodes.node_sets,
            next_page_token=more,
        )

    async def DrainNode(self, request: Any, context: Any) -> node_pb2.Node:
        self._taken(request)
        return node_pb2.Node(name=request.name, state=node_pb2.Node.STATE_DRAINING, state_reason=request.reason)

    async def CordonNode(self, request: Any, context: Any) -> node_pb2.Node:
        self._taken(request)
        return node_pb2.Node(name=request.name, state=node_pb2.Node.STATE_CORDONED, state_reason=request.reason)

    async def UncordonNode(self, request: Any, context: Any) -> node_pb2.Node:
        self._taken(request)
        return node_pb2.Node(name=request.name, state=node_pb2.Node.STATE_READY)

    async def DeclareNodeLost(self, request: Any, context: Any) -> node_pb2.Node:
        self._taken(request)
        return node_pb2.Node(name=request.name, state=node_pb2.Node.STATE_LOST)

    async def RemoveNode(self, request: Any, context: Any) -> node_pb2.RemoveNodeResponse:
        self._taken(request)
        return node_pb2.RemoveNodeResponse()

    async def GetNode(self, request: Any, context: Any) -> node_pb2.Node:
        self._taken(request)
        return node_pb2.Node(name=request.name, state=node_pb2.Node.STATE_READY)

    async def ResumeJob(self, request: Any, context: Any) -> job_pb2.Job:
        return await self._changed(request, lambda job: setattr(job, "state", job_pb2.Job.STATE_PENDING))

    async def ResizeJob(self, request: Any, context: Any) -> job_pb2.Job:
        return await self._changed(request, lambda job: None)

    async def ListQuarantinedGangs(self, request: Any, context: Any) -> node_pb2.ListQuarantinedGangsResponse:
        self._taken(request)
        return node_pb2.ListQuarantinedGangsResponse(gangs=self.quarantined)

    async def EndQuarantinedGang(self, request: Any, context: Any) -> node_pb2.EndQuarantinedGangResponse:
        self._taken(request)
        return node_pb2.EndQuarantinedGangResponse()

    async def AdoptQuarantinedGang(self, request: Any, context: Any) -> node_pb2.AdoptQuarantinedGangResponse:
        self._taken(request)
        if self.refused_adoption is not None:
            raise self.refused_adoption
        (job,) = [gang.job for gang in self.quarantined if gang.name == request.name]
        return node_pb2.AdoptQuarantinedGangResponse(job=job)

    async def SettleRestore(self, request: Any, context: Any) -> node_pb2.SettleRestoreResponse:
        self._taken(request)
        return node_pb2.SettleRestoreResponse(missing_nodes=self.cluster.restore.awaited_nodes)

    async def GetCluster(self, request: Any, context: Any) -> node_pb2.Cluster:
        self._taken(request)
        return self.cluster


def running_job(master: CannedMaster) -> job_pb2.Job:
    job = job_pb2.Job(
        name="jobs/1",
        user="ann",
        state=job_pb2.Job.STATE_HOLDING,
        revision=3,
        spec=job_pb2.JobSpec(
            display_name="digits [bold]",
            command=["python", "train.py"],
            roles=[resources_pb2.Role(name="worker", tasks=2, shape=resources_pb2.TaskShape(gpus=1))],
            environment={"SECRET": "hidden"},
        ),
        gang=job_pb2.Gang(
            epoch=2,
            phase=job_pb2.Gang.PHASE_RUNNING,
            claims=[resources_pb2.Claim(node="nodes/n1", device_mask=0b1011, millicores=[2_000, 500])],
        ),
        progress=job_pb2.Progress(step=120, steps_per_s=7.25, loss=0.5),
        create_time=times.timestamp(1_000),
    )
    master.jobs["jobs/1"] = job
    return job


def add_members(master: CannedMaster) -> None:
    """Array 1 of two members, of which one was stopped."""
    array = array_pb2.Array(name="arrays/1", display_name="search", user="ann", size=2, gpus=2, max_concurrent=1)
    array.states.update(holding=1, stopped=1)
    array.rule.CopyFrom(
        array_pb2.StopRule(
            kind=array_pb2.StopRule.KIND_ASHA,
            metric="accuracy",
            higher_is_better=True,
            resource="epoch",
            first_rung=3,
            factor=2,
        )
    )
    array.best.CopyFrom(array_pb2.ArrayMember(index=0, parameters={"lr": "0.1"}))
    array.best_value = 0.875
    master.arrays["arrays/1"] = array
    running = running_job(master)
    del master.jobs["jobs/1"]
    for number, lr in ((2, "0.1"), (3, "9")):
        job = job_pb2.Job()
        job.CopyFrom(running)
        job.name = f"jobs/{number}"
        job.array.CopyFrom(array_pb2.ArrayMembership(array="arrays/1", size=2, rungs=[0.5]))
        job.array.member.CopyFrom(array_pb2.ArrayMember(index=number - 2, parameters={"lr": lr}))
        job.progress.metrics.add(name="accuracy", value=0.875, step=100)
        master.jobs[job.name] = job
    loser = master.jobs["jobs/3"]
    loser.ClearField("gang")
    loser.state, loser.end_reason = job_pb2.Job.STATE_STOPPED, "halving: accuracy 0.5 at epoch 3: 1 did better"
