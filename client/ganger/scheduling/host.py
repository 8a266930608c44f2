"""The process around job schedulers: it receives the view and leases, requests gangs, and reconnects to the master. And
the copy of the view that such a process keeps, also the planner's.

Leases come in batches, and requests go out in batches on one stream, whose verdicts come in their order.
The default host serves every job that no other host claims; a user's own serves the jobs it names. Run as a program
(`python -m ganger.scheduling.host --state-dir DIR`) it is the default host, which the master starts beside itself.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import faulthandler
import logging
import os
import sys
import uuid
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import ge
from typing import Any

import grpc
import grpc.aio

from ganger.cluster.fit import fit
from ganger.cluster.placement import candidates
from ganger.cluster.refusals import Reason, Refusal
from ganger.cluster.resources import Claim, GangShape, NodeRow, Role, TaskShape, exceeds
from ganger.cluster.view import LoadMode, View
from ganger.job import FINISHED
from ganger.program_setup import set_up_log
from ganger.scheduling import MOST_CANDIDATES, DefaultScheduler, JobScheduler, PlacementLease, Proposal
from ganger.scheduling.program import first_end, until_stopped, why_away
from ganger.v1 import job_service_pb2, job_service_pb2_grpc, resources_pb2, scheduling_pb2, scheduling_pb2_grpc
from ganger.wire import resource_messages as convert
from ganger.wire import resource_names as names
from ganger.wire import times
from ganger.wire.channels import note_failure, open_aio_channel
from ganger.wire.endpoints import Endpoint, EndpointError, find_endpoint
from ganger.wire.errors import JobNotFound, from_rpc_error


@dataclass(slots=True, eq=False)
class OpenClaim:
    """A claim under way. `version`: of the view from which on the master's node states include it; None: not known."""

    claim: Claim
    gpus: int
    version: int | None = None


class Mirror:
    """A copy of the view: the master's last node states, less what open requests of this process claim.

    A claim is taken off when it is requested, so that no device is proposed for two jobs. It stays off until the
    request is rejected, or a node state arrives that is as new as its approval. `version`: the master's view version
    that has been applied; -1 before the first message."""

    def __init__(self) -> None:
        self.view = View()
        self.version = -1
        self._newest: dict[str, NodeRow] = {}
        self._open: dict[str, list[OpenClaim]] = {}
        self._news = asyncio.Event()

    def forget(self) -> None:
        """Drop all open claims: another master may answer next, and its whole view is requested."""
        self.version = -1
        self._open.clear()

    def apply(self, delta: scheduling_pb2.ViewDelta) -> None:
        """A delta, or the whole view when it starts from nothing."""
        if delta.from_version == 0:
            self.view = View()
            self._newest.clear()
        for configuration_set in delta.configuration_sets:
            self.view.put_configuration_set(convert.configuration_set_from_wire(configuration_set))
        self.view.mode = LoadMode.PACK if delta.load_mode == resources_pb2.LOAD_MODE_PACK else LoadMode.SPREAD
        self.put_rows(convert.node_row_from_wire(row) for row in delta.nodes)
        for name in delta.removed_nodes:
            node = names.parse_node_name(name)
            self._newest.pop(node, None)
            self.view.remove(node)
        self.version = delta.version
        self._news.set()

    def put_rows(self, rows: Iterable[NodeRow]) -> None:
        """Apply node states of the master; one older than the node's last one is ignored."""
        for row in rows:
            former = self._newest.get(row.node)
            if row.configuration_set in self.view.sets and (former is None or row.version >= former.version):
                self._newest[row.node] = row
                self._show(row.node)

    def take(self, shape: GangShape, claims: Sequence[Claim]) -> list[OpenClaim]:
        """Take a requested gang off the copy, and return its claims; none if it does not fit there (a parked one)."""
        if fit(self.view, shape, claims):
            return []
        taken = [OpenClaim(claim, shape.gpus) for claim in claims]
        for one in taken:
            self._open.setdefault(one.claim.node, []).append(one)
            self.view.take(one.claim, shape.gpus)
        return taken

    def approved(self, taken: Iterable[OpenClaim], version: int) -> None:
        """Record that the view of that version includes these claims."""
        for one in taken:
            one.version = version
            self._show(one.claim.node)

    def restore(self, taken: Iterable[OpenClaim]) -> None:
        """Put the claims of a request back that was not approved."""
        for one in taken:
            node = one.claim.node
            if node in self._open:
                self._open[node] = [other for other in self._open[node] if other is not one]
            self._show(node)

    def _show(self, node: str) -> None:
        """Make the copy's state of a node anew: the master's last one, less the claims that it does not include."""
        row = self._newest.get(node)
        if row is None:
            return
        self.view.put(row)
        if node not in self._open:
            return
        still = [one for one in self._open[node] if one.version is None or one.version > row.version]
        if still:
            self._open[node] = still
        else:
            del self._open[node]
        for one in still:
            if self._is_free(one.claim):
                self.view.take(one.claim, one.gpus)

    def _is_free(self, claim: Claim) -> bool:
        """Return whether the copy has all of the claim; not if the node's state includes it before its verdict."""
        view, slot = self.view, self.view.slots[claim.node]
        return (
            view.free[slot] & claim.device_mask == claim.device_mask
            and view.memory[slot] >= claim.memory_bytes + claim.arena_bytes
            and all(map(ge, view.millicores[slot], claim.millicores))
            and not exceeds(claim.bandwidth, view.bandwidth.get(slot, ()))
        )

    async def reach(self, version: int, timeout_s: float | None) -> bool:
        """Waits until the copy is at least that new; whether it is."""
        try:
            async with asyncio.timeout(timeout_s):
                while self.version < version:
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            return False
        return True


log = logging.getLogger(__name__)

_BACKOFF_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0)
# A watch that lived this long has ended by its age, not by a fault.
_HEALTHY_S = 5.0
# Schedulers keep what they learnt of a job between its leases; the one not used for longest is forgotten first.
_SCHEDULERS_KEPT = 4096
# A claim that does not add up never will; twice is no accident, and each time costs the job seconds.
_MISTAKES_ALLOWED = 2
# A decision takes milliseconds and a lease half a second.
_HUNG_S = 10.0
# Leases that are answered before the first of these requests is sent.
_PROPOSED_AT_ONCE = 64
# Requests in a message, and their bytes: half of what the master accepts.
_REQUESTS_MOST = 128
_REQUEST_BYTES = 1 << 19
_WARM_UP = GangShape((Role("worker", 2, TaskShape(1)),))


@dataclass(slots=True)
class _GangRequest:
    """A request of a lease, until its verdict. `taken`: what it claims first, off the mirror."""

    lease: PlacementLease
    scheduler: JobScheduler
    proposal: Proposal
    message: scheduling_pb2.GangRequest
    taken: list[OpenClaim] = field(default_factory=list)


class SchedulerHost:
    """Runs schedulers made by `make_scheduler` until `run` is cancelled or, with `jobs`, until all of those have ended.

    `find` is called for every connection, so that a master that restarts at another address is found.
    """

    def __init__(
        self,
        find: Callable[[], Endpoint],
        make_scheduler: Callable[[], JobScheduler] = DefaultScheduler,
        *,
        jobs: Sequence[str] = (),
        name: str = "",
    ) -> None:
        self._find = find
        # The master of the last connection.
        self._endpoint: Endpoint | None = None
        self._make_scheduler = make_scheduler
        self._jobs = tuple(jobs)
        self._name = name or f"{'run' if jobs else 'default'}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._schedulers: OrderedDict[str, JobScheduler] = OrderedDict()
        self._open_jobs = set(jobs)
        self._mistakes = 0
        self._given_up = asyncio.Event()
        # Leases whose scheduler waits for a newer view.
        self._waiting: set[asyncio.Task[None]] = set()
        self._unsent: deque[_GangRequest] = deque()
        self._has_unsent = asyncio.Event()
        # In the order of their verdicts.
        self._sent: deque[_GangRequest] = deque()
        self.mirror = Mirror()

    async def run(self) -> None:
        """Connects, serves, and starts over with growing pauses when the master is away."""
        attempt = 0
        loop = asyncio.get_running_loop()
        while self._is_needed():
            started = loop.time()
            try:
                await self._serve()
            except (grpc.aio.AioRpcError, EndpointError, OSError) as error:
                note_failure(self._endpoint, error)
                if isinstance(error, grpc.aio.AioRpcError) and isinstance(from_rpc_error(error), JobNotFound):
                    raise from_rpc_error(error) from error
                log.info("master is away: %s", await why_away(error, self._find))
            attempt = 0 if loop.time() - started > _HEALTHY_S else attempt + 1
            if self._is_needed():
                await asyncio.sleep(_BACKOFF_S[min(attempt, len(_BACKOFF_S) - 1)])

    def _is_needed(self) -> bool:
        return not self._jobs or (bool(self._open_jobs) and not self._given_up.is_set())

    async def _serve(self) -> None:
        """One connection, until a stream breaks or all jobs have ended."""
        self.mirror.forget()
        self._unsent.clear()
        self._sent.clear()
        self._endpoint = self._find()
        async with open_aio_channel(self._endpoint) as channel:
            scheduling = scheduling_pb2_grpc.SchedulingServiceStub(channel)
            stop = asyncio.Event()
            parts: list[Coroutine[Any, Any, object]]
            parts = [self._watch_view(scheduling), self._watch_leases(scheduling), self._request_gangs(scheduling)]
            parts += [self._watch_job(channel, job, stop) for job in self._open_jobs]
            if self._jobs:
                parts += [stop.wait(), self._given_up.wait()]
            await first_end(parts)
            for task in list(self._waiting):
                task.cancel()
            await asyncio.gather(*self._waiting, return_exceptions=True)

    async def _watch_view(self, scheduling: Any) -> None:
        while True:
            request = scheduling_pb2.WatchViewRequest(after_version=max(0, self.mirror.version))
            async for delta in scheduling.WatchView(request):
                self.mirror.apply(delta)
                if delta.from_version == 0 and delta.nodes:
                    # The tables of each configuration set are made at first use: not in the first job's time.
                    candidates(self.mirror.view, _WARM_UP)

    async def _watch_leases(self, scheduling: Any) -> None:
        # A lease without a view would be lost.
        await self.mirror.reach(0, None)
        request = scheduling_pb2.WatchLeasesRequest(scheduler=self._name, jobs=self._jobs)
        async for batch in scheduling.WatchLeases(request):
            for at, message in enumerate(batch.leases, 1):
                self._use(message)
                if at % _PROPOSED_AT_ONCE == 0:
                    await asyncio.sleep(0)

    async def _request_gangs(self, scheduling: Any) -> None:
        async for verdicts in scheduling.RequestGangs(self._messages()):
            for verdict in verdicts.verdicts:
                request = self._sent.popleft()
                with _at_the_cost_of_its_lease(request.lease.job):
                    self._take_verdict(request, verdict)

    async def _messages(self) -> AsyncIterator[scheduling_pb2.GangRequests]:
        while True:
            await self._has_unsent.wait()
            batch, size = scheduling_pb2.GangRequests(), 0
            while self._unsent and len(batch.requests) < _REQUESTS_MOST:
                size += self._unsent[0].message.ByteSize()
                if batch.requests and size > _REQUEST_BYTES:
                    break
                request = self._unsent.popleft()
                self._sent.append(request)
                batch.requests.append(request.message)
            if not self._unsent:
                self._has_unsent.clear()
            if batch.requests:
                yield batch

    async def _watch_job(self, channel: grpc.aio.Channel, job: str, stop: asyncio.Event) -> None:
        stub: Any = job_service_pb2_grpc.JobServiceStub(channel)
        while True:
            async for message in stub.WatchJob(job_service_pb2.WatchJobRequest(name=job)):
                if message.state in FINISHED:
                    self._open_jobs.discard(job)
                    if not self._open_jobs:
                        stop.set()
                    # Another job's end must not end this connection.
                    await asyncio.Event().wait()

    def _use(self, message: scheduling_pb2.PlacementLease) -> None:
        """Answer a new lease."""
        with _at_the_cost_of_its_lease(message.job):
            lease = _lease_of(message)
            scheduler = self._scheduler_of(lease.job)
            self._request(lease, scheduler, self._propose(scheduler, lease))

    def _request(self, lease: PlacementLease, scheduler: JobScheduler, proposal: Proposal) -> None:
        """Request what was proposed. A pass waits until the view is as new as the lease: what was freed for it may not
        have arrived yet, and a job that passes waits for seconds."""
        if proposal.candidates or self.mirror.version >= lease.view_version:
            self._send(lease, scheduler, proposal)
            return
        task = asyncio.create_task(self._propose_again(lease, scheduler, proposal))
        self._waiting.add(task)
        task.add_done_callback(self._waiting.discard)

    async def _propose_again(self, lease: PlacementLease, scheduler: JobScheduler, proposal: Proposal) -> None:
        with _at_the_cost_of_its_lease(lease.job):
            if await self.mirror.reach(lease.view_version, lease.lease_s / 2):
                proposal = self._propose(scheduler, lease)
            self._send(lease, scheduler, proposal)

    def _send(self, lease: PlacementLease, scheduler: JobScheduler, proposal: Proposal) -> None:
        offered = map(convert.claims_to_wire, proposal.candidates[:MOST_CANDIDATES])
        message = scheduling_pb2.GangRequest(
            job=lease.job,
            revision=lease.revision,
            lease=lease.turn,
            view_version=max(0, self.mirror.version),
            candidates=[scheduling_pb2.Candidate(claims=claims) for claims in offered],
            blockers=convert.refusals_to_wire(proposal.blockers),
        )
        request = _GangRequest(lease, scheduler, proposal, message)
        if proposal.candidates:
            request.taken = self.mirror.take(lease.shape, proposal.candidates[0])
        self._unsent.append(request)
        self._has_unsent.set()

    def _take_verdict(self, request: _GangRequest, verdict: scheduling_pb2.Verdict) -> None:
        """Release a job that was approved; let the scheduler of a rejected one propose again while its lease lasts."""
        lease, scheduler, proposal = request.lease, request.scheduler, request.proposal
        if verdict.WhichOneof("verdict") == "approved":
            if verdict.approved.candidate:
                self.mirror.restore(request.taken)
                request.taken = self.mirror.take(lease.shape, proposal.candidates[verdict.approved.candidate])
            self.mirror.approved(request.taken, verdict.approved.view_version)
            self._schedulers.pop(lease.job, None)
            return
        self.mirror.restore(request.taken)
        if not proposal.candidates:
            return
        rejected = verdict.rejected
        self.mirror.put_rows(convert.node_row_from_wire(row) for row in rejected.rows)
        refusals = convert.refusals_from_wire(rejected.refusals)
        self._note_mistake(lease.job, refusals)
        with self._bounded():
            again = scheduler.on_rejected(lease, self.mirror.view, refusals)
        if rejected.lease_kept:
            if again is None or not again.candidates:
                again = Proposal((), again.blockers if again and again.blockers else refusals)
            self._request(lease, scheduler, again)

    def _propose(self, scheduler: JobScheduler, lease: PlacementLease) -> Proposal:
        with self._bounded():
            proposal: object = scheduler.propose(lease, self.mirror.view)
        # A forgotten `return` would leave the job waiting for ever. A scheduler passes by an empty Proposal.
        if not isinstance(proposal, Proposal):
            raise TypeError(f"propose() of {type(scheduler).__name__} gave a {type(proposal).__name__}, not a Proposal")
        return proposal

    @contextlib.contextmanager
    def _bounded(self) -> Iterator[None]:
        """End this process, with a traceback, if a user's scheduler hangs. Its job continues without it."""
        if not self._jobs:
            yield
            return
        faulthandler.dump_traceback_later(_HUNG_S, exit=True)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()

    def _note_mistake(self, job: str, refusals: Sequence[Refusal]) -> None:
        """A user's scheduler that keeps requesting what does not add up; the default one continues."""
        if not (self._jobs and refusals and refusals[0].reason is Reason.CLAIM_MISMATCH):
            return
        self._mistakes += 1
        if self._mistakes >= _MISTAKES_ALLOWED:
            log.error("job scheduler given up", extra={"job": job, "reason": refusals[0].message})
            self._given_up.set()

    def _scheduler_of(self, job: str) -> JobScheduler:
        scheduler = self._schedulers.get(job)
        if scheduler is None:
            scheduler = self._schedulers[job] = self._make_scheduler()
            if len(self._schedulers) > _SCHEDULERS_KEPT:
                self._schedulers.popitem(last=False)
        self._schedulers.move_to_end(job)
        return scheduler


@contextlib.contextmanager
def _at_the_cost_of_its_lease(job: str) -> Iterator[None]:
    """Let a scheduler that raises lose this lease only: after three of them the default scheduler takes over."""
    try:
        yield
    except Exception:
        log.exception("job scheduler failed", extra={"job": job})


def _lease_of(message: scheduling_pb2.PlacementLease) -> PlacementLease:
    return PlacementLease(
        turn=message.lease,
        job=message.job,
        revision=message.revision,
        shape=convert.gang_shape_from_wire(
            message.spec, message.arena_bytes_per_device, message.device_memory_bytes, message.task_memory_bytes
        ),
        lease_s=times.seconds(message.remaining),
        rank=message.rank,
        waited_s=times.seconds(message.waited),
        parked=convert.parked_claims_from_wire(message.parked),
        kept_nodes=tuple(names.parse_node_name(node) for node in message.kept_nodes),
        suggested=convert.claims_from_wire(message.suggested),
        view_version=message.view_version,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the default host. Return 0 once it is stopped; exit with 2 for wrong usage."""
    parser = argparse.ArgumentParser(prog="ganger.scheduling.host", description="The default job-scheduler host.")
    parser.add_argument("--state-dir", help="state directory of the master, or its address")
    parser.add_argument("--until-stdin-closes", action="store_true", help="end when standard input closes")
    options = parser.parse_args(arguments)
    set_up_log("scheduler")
    host = SchedulerHost(lambda: find_endpoint(options.state_dir))
    asyncio.run(until_stopped(host.run(), options.until_stdin_closes))
    return 0


if __name__ == "__main__":
    sys.exit(main())
