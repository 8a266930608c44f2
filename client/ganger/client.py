"""The SDK's door to a cluster: one blocking, typed method per call of the API, each with a deadline.

    with ganger.Client() as client:
        job = client.submit(["python", "train.py"], gpus=2)
        job.wait()

Errors are `ganger.wire.errors.ApiError`. Long streams (watching, following logs) survive a restart of the master.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, cast

from ganger.job import FINISHED, Job, suspend_level
from ganger.tracing import tracer
from ganger.v1 import array_pb2, job_pb2, node_pb2, resources_pb2, usage_pb2
from ganger.v1 import job_service_pb2 as api
from ganger.wire import times
from ganger.wire.endpoints import EndpointError
from ganger.wire.errors import ApiError, JobNotFound, LeaseLost, NotLeader
from ganger.wire.master_connection import PASSING, MasterConnection
from ganger.wire.methods import check_size
from ganger.wire.resource_names import array_name_from_text, job_name_from_text, node_name_from_text, parse_member

# What a master may take to finish the file of a recording.
_PUBLISH_S = 60.0


class Client(MasterConnection):
    """Talks to one master: `master` is an address or a directory holding endpoint.json (default: $GANGER_MASTER, else
    the cluster of `ganger up`). On another machine it asks for a certificate: $GANGER_TLS names the directory, or
    `Endpoint(address, tls=directory)`; or for an access token in that directory or $GANGER_TOKEN. Of several masters,
    "HOST:PORT,HOST:PORT", it talks to the one that leads. `patience_s` is how long streams try to find a master that
    went away.
    Thread-safe. Raises EndpointError if no master can be named."""

    def submit(
        self, command: Sequence[str] | str | None = None, *, request_id: str | None = None, **options: Any
    ) -> Job:
        """Submits a job; when this returns, it is durable. `options` are the keys of a job file (gpus=2, memory="16G",
        time="2h", environment={...}, ...). Raises SpecInvalid, GangImpossible, ..."""
        # Loaded here: most clients only look, and a spec's parser is not small.
        from ganger.spec import make_spec

        description = {**options, "command": command} if command is not None else options
        return self.submit_spec(make_spec(description), request_id=request_id)

    def submit_spec(self, spec: job_pb2.JobSpec, *, request_id: str | None = None) -> Job:
        """Submits a ready-made spec. Give the same `request_id` (a UUID) to repeat a submission safely.

        A scheduler of the user's own (`spec.scheduler`) is started as a process that outlives this one; see
        `Job.scheduler_log`. Raises SpecInvalid if it cannot be loaded, SchedulerFailed if its process ends."""
        request = api.CreateJobRequest(spec=spec, request_id=request_id or _fresh_id())
        _check_size(request)
        began_s = time.time()
        if not spec.scheduler:
            job = Job(self, self._submitted(self._jobs.CreateJob, request))
            tracer().add(job.message.uid, "submit", began_s, time.time())
            return job
        from ganger.scheduling.cli import DetachedScheduler

        with DetachedScheduler(spec.scheduler, self._master) as scheduler:
            message = self._submitted(self._jobs.CreateJob, request)
            return Job(self, message, scheduler_log=scheduler.serve(message.name, message.uid))

    def submit_array(self, request: api.CreateArrayRequest, *, request_id: str | None = None) -> array_pb2.Array:
        """Submit the members of a job array, all or none: see `ganger.array_spec.make_array`."""
        message = api.CreateArrayRequest()
        message.CopyFrom(request)
        message.request_id = request_id or request.request_id or _fresh_id()
        _check_size(message)
        return self._submitted(self._jobs.CreateArray, message)

    def validate(
        self, submission: job_pb2.JobSpec | api.CreateArrayRequest, *, request_id: str | None = None
    ) -> job_pb2.Job:
        """Return the job, or each member of the array, as it would be accepted; nothing is. It has the name of the job
        or array that was submitted with the `request_id` before, else none. Raises as a submission."""
        request = api.ValidateSubmissionRequest()
        if isinstance(submission, job_pb2.JobSpec):
            request.job.spec.CopyFrom(submission)
        else:
            request.array.CopyFrom(submission)
        part = request.job if request.HasField("job") else request.array
        part.request_id = request_id or part.request_id
        _check_size(part)
        if not part.spec.scheduler:
            return self._call(self._jobs.ValidateSubmission, request)
        from ganger.scheduling.cli import DetachedScheduler

        with DetachedScheduler(part.spec.scheduler, self._master):
            return self._call(self._jobs.ValidateSubmission, request)

    def get_array(self, array: str | int) -> array_pb2.Array:
        """Return an array by 7, "7" or "arrays/7". Raises ArrayNotFound."""
        return self._call(self._jobs.GetArray, api.GetArrayRequest(name=array_name_from_text(array)))

    def list_arrays(self, user: str = "", *, live: bool = False) -> list[array_pb2.Array]:
        """Newest first; `live`: only those of which a member has not ended."""
        request = api.ListArraysRequest(page_size=1_000, live=live, user=user)
        return [array for page in self._pages(self._jobs.ListArrays, request) for array in page.arrays]

    def cancel_array(self, array: str | int, reason: str = "") -> array_pb2.Array:
        request = api.CancelArrayRequest(name=array_name_from_text(array), reason=reason)
        return self._call(self._jobs.CancelArray, request)

    def update_array(
        self, array: str | int, update: api.JobUpdate, *, request_id: str | None = None, may_end: bool = False
    ) -> api.UpdateArrayResponse:
        """Update every member that has not ended. The answer lists those that could not be updated, and why. `may_end`:
        as in `update`."""
        request = api.UpdateArrayRequest(
            name=array_name_from_text(array), update=update, request_id=request_id or _fresh_id(), may_end=may_end
        )
        return self._call(self._jobs.UpdateArray, request)

    def job(self, job: str | int) -> Job:
        """A handle on an existing job: 7, "7", "jobs/7", or "7_3" for a member of an array. Raises JobNotFound."""
        return Job(self, self.get_job(job))

    def get_job(self, job: str | int) -> job_pb2.Job:
        return self._call(self._jobs.GetJob, api.GetJobRequest(name=self._name(job)))

    def list_jobs(
        self,
        states: Iterable[job_pb2.Job.State.ValueType] = (),
        user: str = "",
        limit: int | None = None,
        *,
        array: str | int = "",
        fold_arrays: bool = False,
        name: str = "",
        labels: Mapping[str, str] | None = None,
    ) -> Iterator[job_pb2.Job]:
        """Newest first, pages as they are needed. `array`: its members only; `fold_arrays`: no members of any; `name`
        and `labels`: those submitted with that name and all of these labels (not visible on other users' jobs)."""
        request = api.ListJobsRequest(
            page_size=min(limit or 1_000, 1_000),
            states=states,
            user=user,
            array=array_name_from_text(array) if array else "",
            without_members=fold_arrays,
            display_name=name,
            labels=labels or {},
        )
        jobs = (job for page in self._pages(self._jobs.ListJobs, request) for job in page.jobs)
        return islice(jobs, limit or None)

    def watch_job(self, job: str | int) -> Iterator[job_pb2.Job]:
        """The job now and at each change, until it has finished."""
        name, latest = self._name(job), 0

        def open_stream() -> Iterator[job_pb2.Job]:
            request = api.WatchJobRequest(name=name, after_revision=latest)
            return cast(Iterator[job_pb2.Job], self._jobs.WatchJob(request))

        for message in self._lasting(open_stream, lambda: self.get_job(name).state in FINISHED):
            latest = 0 if message is None else message.revision
            if message is None:
                # The stream may have ended just before the last change: query again.
                message = self.get_job(name)
            yield message
            if message.state in FINISHED:
                return

    def cancel_job(self, job: str | int, reason: str = "") -> job_pb2.Job:
        return self._call(self._jobs.CancelJob, api.CancelJobRequest(name=self._name(job), reason=reason))

    def update(
        self, job: str | int, *, request_id: str | None = None, may_end: bool = False, **changes: Any
    ) -> job_pb2.Job:
        """Change the request of a job, all of `changes` or none, durably. Any job that has not ended: priority=5,
        time="4h" ("never": no limit), name="x". A job that has never started: gpu_type, partition, locality, tolerance,
        patience, memory, cpus_per_gpu. `may_end`: allow a time limit that has passed already, which ends the job at
        once. Raises SpecInvalid, UpdateRefused, UpdateEndsJob, GangImpossible, JobFinished, ..."""
        from ganger.spec import make_update

        return self.update_job(job, make_update(changes), request_id=request_id, may_end=may_end)

    def update_job(
        self, job: str | int, update: api.JobUpdate, *, request_id: str | None = None, may_end: bool = False
    ) -> job_pb2.Job:
        """Send a ready-made update. Give the same `request_id` (a UUID) to repeat it safely. `may_end`: as in
        `update`."""
        request = api.UpdateJobRequest(
            name=self._name(job), update=update, request_id=request_id or _fresh_id(), may_end=may_end
        )
        return self._call(self._jobs.UpdateJob, request)

    def suspend_job(self, job: str | int, level: str | None = None) -> job_pb2.Job:
        """Suspend a job. `level`: "pause", "offload", "checkpoint"; None leaves the choice to the master. Returns when
        the order is durable."""
        request = api.SuspendJobRequest(name=self._name(job), level=suspend_level(level))
        return self._call(self._jobs.SuspendJob, request)

    def resume_job(self, job: str | int) -> job_pb2.Job:
        return self._call(self._jobs.ResumeJob, api.ResumeJobRequest(name=self._name(job)))

    def move_job(self, job: str | int, nodes: Iterable[str] = ()) -> job_pb2.Job:
        """Migrate a job to `nodes`, or off its present ones if `nodes` is empty. Returns when the order is durable."""
        request = api.MoveJobRequest(name=self._name(job), nodes=[node_name_from_text(node) for node in nodes])
        return self._call(self._jobs.MoveJob, request)

    def resize_job(self, job: str | int, gpus: int = 0, tasks: Mapping[str, int] | None = None) -> job_pb2.Job:
        """An elastic job continues with so many GPUs, or with so many tasks by role; other roles keep theirs. Answers
        when the change is durable, not when it is done."""
        request = api.ResizeJobRequest(name=self._name(job), gpus=gpus, tasks=tasks)
        return self._call(self._jobs.ResizeJob, request)

    def retune_job(self, job: str | int, cores_per_task: float) -> job_pb2.Job:
        """Changes the cores of each task, live, and for good; 0 leaves them to the scheduler again. Thread counts
        follow, so results may differ in their last bits."""
        request = api.RetuneJobRequest(name=self._name(job), millicores=round(cores_per_task * 1_000))
        return self._call(self._jobs.RetuneJob, request)

    def repin_job(self, job: str | int) -> job_pb2.Job:
        """Moves the job to other cores of the same number, live. Changes no bit of its results."""
        return self._call(self._jobs.RetuneJob, api.RetuneJobRequest(name=self._name(job), is_repin=True))

    def explain_job(self, job: str | int) -> api.Explanation:
        return self._call(self._jobs.ExplainJob, api.ExplainJobRequest(name=self._name(job)))

    def read_log(
        self, job: str | int, rank: int = 0, offset: int = 0, *, follow: bool = False
    ) -> Iterator[api.LogChunk]:
        """One rank's log from a byte offset (negative: from the end), across suspends, moves and restarts. With
        `follow`, until the job has ended."""
        name, position = self._name(job), offset

        def open_stream() -> Iterator[api.LogChunk]:
            request = api.ReadLogRequest(name=name, rank=rank, offset=position, follow=follow)
            return cast(Iterator[api.LogChunk], self._jobs.ReadLog(request))

        # Without `follow` only the search for the master that leads is repeated.
        passing: tuple[type[ApiError], ...] = PASSING if follow else (NotLeader, LeaseLost)
        for chunk in self._lasting(
            open_stream, lambda: not follow or self.get_job(name).state in FINISHED, passing=passing
        ):
            if chunk is None:
                return
            position = chunk.offset + len(chunk.data)
            yield chunk

    def get_series(self, job: str | int) -> api.Series:
        """What a job has logged by name, at most 1,000 points a name, and its epochs."""
        return self._call(self._jobs.GetSeries, api.GetSeriesRequest(name=self._name(job)))

    def list_events(self, subject: str = "", after: int = 0, limit: int | None = None) -> Iterator[job_pb2.Event]:
        """History, oldest first. `subject`: "jobs/7", "nodes/n1" or "" for all."""

        def events() -> Iterator[job_pb2.Event]:
            request = api.ListEventsRequest(subject=subject, after_sequence=after, page_size=min(limit or 1_000, 1_000))
            while True:
                page = self._call(self._jobs.ListEvents, request)
                yield from page.events
                # Events of other users' jobs are left out of a page, so an empty page need not be the last.
                if page.next_sequence <= request.after_sequence:
                    return
                request.after_sequence = page.next_sequence

        return islice(events(), limit or None)

    def follow_events(self, subject: str = "", after: int = 0) -> Iterator[list[job_pb2.Event]]:
        """Again and again, without end, what `list_events` has by then and had not before; maybe nothing."""

        def look() -> Iterator[list[job_pb2.Event]]:
            yield list(self.list_events(subject, after))

        for events in self._lasting(look, lambda: False):
            if events:
                after = events[-1].sequence
            yield events or []

    def get_usage(self, since: float | None = None) -> usage_pb2.Usage:
        """Return the GPU-seconds that users and teams have used, from the day of `since` (Unix seconds) on; None: of
        all days that the master keeps."""
        request = usage_pb2.GetUsageRequest(since_time=None if since is None else times.timestamp(since))
        return self._call(self._jobs.GetUsage, request)

    def _name(self, job: str | int) -> str:
        """Return a name like "jobs/11" for 11, "jobs/11" or "7_3". The last, member 3 of array 7, takes a call to the
        master."""
        member = parse_member(text := str(job))
        if member is None:
            return job_name_from_text(text)
        array, index = member
        for message in self.list_jobs(array=array):
            if message.array.member.index == index:
                return message.name
        raise JobNotFound(f"array {array} has no member {index}: `ganger show {array}` lists them")

    def list_partitions(self) -> list[node_pb2.Partition]:
        """Return the partitions in the order of the master's settings; none of a cluster without."""
        return list(self._call(self._nodes.ListPartitions, node_pb2.ListPartitionsRequest()).partitions)

    def create_token(self, user: str, lifetime_s: float) -> node_pb2.Token:
        """Make an access token of a user, which ends after so many seconds. Its text is in this answer only."""
        request = node_pb2.CreateTokenRequest(user=user, lifetime=times.duration(lifetime_s))
        return self._call(self._nodes.CreateToken, request)

    def list_tokens(self) -> list[node_pb2.Token]:
        """Return the access tokens by their end, those too that have ended lately."""
        pages = self._pages(self._nodes.ListTokens, node_pb2.ListTokensRequest())
        found = [token for page in pages for token in page.tokens]
        return sorted(found, key=lambda token: (token.expire_time.seconds, token.name))

    def revoke_token(self, name: str) -> node_pb2.Token:
        """Refuse a token from now on. Raises TokenNotFound."""
        return self._call(self._nodes.RevokeToken, node_pb2.RevokeTokenRequest(name=name))

    def create_reservation(self, reservation: node_pb2.Reservation) -> node_pb2.Reservation:
        """Keep nodes for users or for maintenance, for a time; return the reservation as the master has it."""
        return self._call(self._nodes.CreateReservation, node_pb2.CreateReservationRequest(reservation=reservation))

    def update_reservation(self, request: node_pb2.UpdateReservationRequest) -> node_pb2.Reservation:
        """Change what is set in the request of a reservation that is not over; return it as the master has it."""
        return self._call(self._nodes.UpdateReservation, request)

    def list_reservations(self) -> list[node_pb2.Reservation]:
        """Return the reservations that are not over, by their start."""
        pages = self._pages(self._nodes.ListReservations, node_pb2.ListReservationsRequest())
        found = [reservation for page in pages for reservation in page.reservations]
        return sorted(found, key=lambda reservation: (reservation.start_time.seconds, reservation.name))

    def delete_reservation(self, name: str) -> None:
        """End a reservation, or forget one that has not begun."""
        self._call(self._nodes.DeleteReservation, node_pb2.DeleteReservationRequest(name=name))

    def list_nodes(self) -> node_pb2.ListNodesResponse:
        """All of them, by name, with their configuration sets and the node sets."""
        request, found = node_pb2.ListNodesRequest(page_size=1_000), node_pb2.ListNodesResponse()
        kinds: dict[str, resources_pb2.ConfigurationSet] = {}
        for page in self._pages(self._nodes.ListNodes, request):
            found.nodes.MergeFrom(page.nodes)
            found.node_sets.MergeFrom(page.node_sets)
            # Each page has those of its nodes.
            kinds.update((kind.name, kind) for kind in page.configuration_sets)
        found.configuration_sets.MergeFrom(kinds.values())
        return found

    def get_node(self, node: str) -> node_pb2.Node:
        return self._call(self._nodes.GetNode, node_pb2.GetNodeRequest(name=node_name_from_text(node)))

    def drain_node(self, node: str, reason: str) -> node_pb2.Node:
        request = node_pb2.DrainNodeRequest(name=node_name_from_text(node), reason=reason)
        return self._call(self._nodes.DrainNode, request)

    def cordon_node(self, node: str, reason: str) -> node_pb2.Node:
        request = node_pb2.CordonNodeRequest(name=node_name_from_text(node), reason=reason)
        return self._call(self._nodes.CordonNode, request)

    def uncordon_node(self, node: str, test: bool = False) -> node_pb2.Node:
        """Return a node to service. `test`: only once it has passed a test."""
        request = node_pb2.UncordonNodeRequest(name=node_name_from_text(node), test=test)
        return self._call(self._nodes.UncordonNode, request)

    def declare_node_lost(self, node: str) -> node_pb2.Node:
        """Vouches that the node is down: its jobs restart elsewhere at once."""
        return self._call(self._nodes.DeclareNodeLost, node_pb2.DeclareNodeLostRequest(name=node_name_from_text(node)))

    def remove_node(self, node: str) -> None:
        """Forgets a node that does not come back. Raises NodeAlive, or NodeBusy while jobs have something on it."""
        self._call(self._nodes.RemoveNode, node_pb2.RemoveNodeRequest(name=node_name_from_text(node)))

    def list_quarantined_gangs(self) -> Sequence[node_pb2.QuarantinedGang]:
        """Return the gangs that run on nodes and that the master did not start."""
        return self._call(self._nodes.ListQuarantinedGangs, node_pb2.ListQuarantinedGangsRequest()).gangs

    def end_quarantined_gang(self, name: str) -> None:
        """Kill the quarantined gang of this name. Raises GangNotFound."""
        self._call(self._nodes.EndQuarantinedGang, node_pb2.EndQuarantinedGangRequest(name=name))

    def adopt_quarantined_gang(self, name: str) -> str:
        """Adopt a quarantined gang as that of its job; return the job's name. Raises GangNotFound, AdoptionRefused."""
        return self._call(self._nodes.AdoptQuarantinedGang, node_pb2.AdoptQuarantinedGangRequest(name=name)).job

    def settle_restore(self) -> Sequence[str]:
        """Let a master whose database was restored continue without the nodes that have not reported; return their
        names.

        Raises NotRestoring."""
        return self._call(self._nodes.SettleRestore, node_pb2.SettleRestoreRequest()).missing_nodes

    def get_cluster(self) -> node_pb2.Cluster:
        return self._call(self._nodes.GetCluster, node_pb2.GetClusterRequest())

    def record_decisions(
        self, seconds: float, *, most_bytes: int = 0, with_environment: bool = False
    ) -> node_pb2.Recording:
        """Lets the master write down what it decides, and waits until that has ended. The file is on its machine."""
        request = node_pb2.RecordDecisionsRequest(
            duration=times.duration(seconds), max_bytes=most_bytes, with_environment=with_environment
        )
        return self._call(lambda message: self._nodes.RecordDecisions(message, timeout=seconds + _PUBLISH_S), request)


def _check_size(request: api.CreateJobRequest | api.CreateArrayRequest) -> None:
    """Raise MessageTooLarge for a submission that the master would not receive."""
    if isinstance(request, api.CreateJobRequest):
        check_size(request, "/ganger.v1.JobService/CreateJob", "put large environment values and arguments into files")
    else:
        check_size(request, "/ganger.v1.JobService/CreateArray", "put large parameters into files")


def _fresh_id() -> str:
    # Loaded here: most clients only look.
    import uuid

    return str(uuid.uuid4())


__all__ = ["Client", "EndpointError"]
