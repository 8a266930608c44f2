"""AgentService: what daemons call. Holds their polls, answers only the newest of each node, shows what is durable."""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, Final

from ganger.agent.v1 import agent_pb2, agent_pb2_grpc
from ganger.wire import errors, times
from ganger.wire import resource_names as names
from ganger.wire.channels import MAX_MESSAGE_BYTES, SUPPORTED_VERSIONS, common_version, stated_versions
from ganger.wire.methods import CallerIdentity, CallerRole
from ganger.wire.revocation import Revocations
from ganger.wire.servers import Callers, certificate_of
from msgspec.structs import replace

from ganger_master.core import commands, node_checkpoints
from ganger_master.core.answers import Done, SessionAnswer
from ganger_master.core.array_model import StopRule
from ganger_master.core.arrays import has_climbed, report_of, rule_of
from ganger_master.core.desired_projection import DesiredSet
from ganger_master.core.job_model import JobRecord
from ganger_master.core.node_checkpoints import is_new_copy
from ganger_master.rpc import agent_messages
from ganger_master.rpc.access import RenewalLimit
from ganger_master.rpc.agent_messages import ObservedParts
from ganger_master.rpc.answer_messages import SessionRefusals, expect
from ganger_master.rpc.job_messages import EVALUATED, SAMPLE, metrics_from_wire, plain
from ganger_master.runtime.publication import ProgressBoard, Sample, comes
from ganger_master.runtime.writer import Writer

_LONGEST_CONCERN: Final = 500
# Shortest share of the hold after which an unchanged poll is answered, so that daemons started together drift apart.
_JITTER: Final = 0.8


log = logging.getLogger(__name__)

# Of the fields around a list of revoked certificates in a message.
_FRAME_BYTES: Final = 64
_KEPT_MOST: Final = 1_000
# How long the numbers of jobs are used that were looked up by uid.
_NUMBERS_S: Final = 10.0


class AgentService(agent_pb2_grpc.AgentServiceServicer):
    def __init__(
        self,
        writer: Writer,
        progress: ProgressBoard,
        callers: Callers,
        refusals: SessionRefusals,
        revocations: Revocations | None = None,
        authority: Path | None = None,
        checkpoints_kept_s: float | None = None,
    ) -> None:
        """`authority`: directory of the authority that renews certificates, if this master has it.
        `checkpoints_kept_s`: how long the checkpoints of an ended job are kept; None: for ever."""
        self._checkpoints_kept_s = checkpoints_kept_s
        self._numbers: dict[str, int] = {}
        self._numbers_made_at = 0.0
        self._writer = writer
        self._authority = authority
        self._renewals = RenewalLimit()
        self._revocations = revocations
        self._refusals = refusals
        self._callers = callers
        self._progress = progress
        self._node_of: dict[str, str] = {}
        self._session_of: dict[str, str] = {}
        # When each session was answered last, by the loop's time.
        self._answered_at: dict[str, float] = {}
        # Epochs of gangs whose orders each session was last requested to send.
        self._asked: dict[str, tuple[int, ...]] = {}
        # The call that may be answered, by node.
        self._newest: dict[str, object] = {}
        self._parts = ObservedParts()

    def is_held(self, node: str) -> bool:
        """Return whether the node's daemon waits for an answer: it is alive, even if its last answer is old."""
        return node in self._newest

    @property
    def held(self) -> int:
        """Number of daemons that wait for an answer."""
        return len(self._newest)

    async def CreateSession(self, request: agent_pb2.CreateSessionRequest, context: Any) -> agent_pb2.Session:
        node, caller = names.parse_node_name(request.node), self._callers.of(context)
        # A daemon with a certificate causes no entry but that of its own node.
        subject = caller.name if caller.role is CallerRole.DAEMON else node
        try:
            version = common_version(stated_versions(request), names=("daemon", "master"))
            _check_node(caller, node)
            command = agent_messages.open_session_from_wire(request)
            session = await self._open(command)
        except errors.ApiError as error:
            # A daemon that waits for an answer is accepted, whatever another one requests in its name.
            if not self.is_held(subject):
                self._refusals.note(subject, error)
            raise
        self._refusals.forget(node)
        former = self._session_of.get(command.node)
        if former is not None:
            self._node_of.pop(former, None)
            self._answered_at.pop(former, None)
            self._asked.pop(former, None)
        self._node_of[session] = command.node
        self._session_of[command.node] = session
        settings = self._writer.state.settings
        lost_after, logs_kept = settings.lost_after_s, settings.logs_kept_s
        return agent_pb2.Session(
            session=session,
            lost_after=None if lost_after is None else times.duration(lost_after),
            storage=settings.storage,
            storage_token=settings.storage_token,
            checkpoint_interval=times.duration(settings.checkpoint_interval_s),
            log_retention=None if logs_kept is None else times.duration(logs_kept),
            store=self._writer.committed.counters.store,
            is_restored=self._writer.committed.counters.restoring is not None,
            wire_version=version,
            wire_versions=agent_pb2.WireVersions(**SUPPORTED_VERSIONS._asdict()),
        )

    async def _open(self, command: commands.OpenSession) -> str:
        """Return the new session's name. Raises ApiError for a daemon that is not accepted."""
        known = self._writer.committed.nodes.get(command.node)
        if known is not None and known.machine_uuid != command.machine_uuid and self.is_held(command.node):
            raise errors.NodeNameTaken(
                f"nodes/{command.node} belongs to another machine ({known.machine_uuid}) whose daemon is connected;"
                " give this daemon another --node name"
            )
        return expect(await self._writer.submit(command), SessionAnswer).session

    async def Reconcile(self, request: agent_pb2.ReconcileRequest, context: Any) -> agent_pb2.ReconcileResponse:
        node = self._node_in(request.session)
        _check_node(self._callers.of(context), node)
        self._refusals.forget(node)
        received_at = self._writer.ownership.now()
        call = object()
        self._newest[node] = call
        self._writer.committed.wake(f"nodes/{node}")
        try:
            if not self._parts.complete(node, request):
                return agent_pb2.ReconcileResponse(observation=request.observation)
            if request.changed:
                expect(await self._writer.submit(agent_messages.observe_from_wire(node, request)), Done)
            kept = [(job.number, kept.path) for job, kept in self._kept(request) if is_new_copy(job, kept.path, node)]
            if kept:
                expect(await self._writer.submit(commands.NoteCopies(node, request.session, tuple(kept))), Done)
            await self._hold(node, request, call)
            if self._newest.get(node) is not call:
                raise errors.NotReady("a newer call of this node has come")
            # The lease counts from the sending of the call; a newer master waits from when it took the store over.
            await self._writer.ownership.confirm(received_at)
            response = await self._answer(node, request)
            self._add_revocations(request, response)
        finally:
            if self._newest.get(node) is call:
                del self._newest[node]
        self._answered_at[request.session] = asyncio.get_running_loop().time()
        self._asked[request.session] = tuple(response.describe_epochs)
        return response

    def _add_revocations(self, request: agent_pb2.ReconcileRequest, response: agent_pb2.ReconcileResponse) -> None:
        if self._revocations is not None:
            known = self._revocations.current()
            has_room = response.ByteSize() + len(known.pem) < MAX_MESSAGE_BYTES - _FRAME_BYTES
            if known.pem and known.digest != request.revocation_digest and has_room:
                response.revocation_list = known.pem

    async def _answer(self, node: str, request: agent_pb2.ReconcileRequest) -> agent_pb2.ReconcileResponse:
        """Return the answer. Raises MessageTooLarge for a set that no message holds; then the node counts as silent."""
        desired, response = self._response(node, request)
        size = response.ByteSize()
        answer = commands.Answer(node, request.session, request.desired_version)
        if size > MAX_MESSAGE_BYTES:
            problem = (
                f"its desired state takes {_megabytes(size)}, a message holds {_megabytes(MAX_MESSAGE_BYTES)}:"
                " cancel jobs that are placed there"
            )
            expect(await self._writer.submit(replace(answer, problem=problem)), Done)
            raise errors.MessageTooLarge(f"nodes/{node}: {problem}")
        expect(await self._writer.submit(answer), Done)
        if self._writer.committed.desired.get(node) is not desired:
            # It changed while the answer was noted: the daemon gets the newest, which is judged by its size next time.
            response = self._response(node, request)[1]
        return response

    def _response(
        self, node: str, request: agent_pb2.ReconcileRequest
    ) -> tuple[DesiredSet | None, agent_pb2.ReconcileResponse]:
        desired = self._writer.committed.desired.get(node)
        message = agent_messages.response_to_wire(
            desired or DesiredSet(), request.observation, request.desired_version, request.missing_specs
        )
        self._add_addresses(message, desired or DesiredSet())
        self._add_removable(message, request)
        return desired, message

    def _add_addresses(self, message: agent_pb2.ReconcileResponse, desired: DesiredSet) -> None:
        """Add addresses of nodes that have checkpoints on their disks, or are to have them."""
        nodes = self._writer.committed.nodes
        gangs = {gang.epoch: gang for gang in desired.gangs}
        for sent in message.gangs:
            if names_of := gangs[sent.epoch].restore.checkpoint_nodes:
                sent.restore.checkpoint_streams.extend(node_checkpoints.streams_of(nodes, names_of))
        for gang in gangs.values():
            if gang.checkpoint_copies > 1:
                members = [member.node for member in gang.members]
                others = node_checkpoints.copy_candidates(nodes, members, gang.checkpoint_copies)
                message.copy_peers.add(epoch=gang.epoch, addresses=[node.peer_address for node in others])

    def _add_removable(self, message: agent_pb2.ReconcileResponse, request: agent_pb2.ReconcileRequest) -> None:
        """Add the checkpoints on the node's disk that may go. Those of jobs without a record stay."""
        now = time.time()
        for job, kept in self._kept(request):
            if node_checkpoints.may_go(job, kept.path, now, self._checkpoints_kept_s):
                message.removable_checkpoints.append(kept)

    def _kept(self, request: agent_pb2.ReconcileRequest) -> Iterator[tuple[JobRecord, agent_pb2.KeptCheckpoint]]:
        """Yield the checkpoints on the node's disk with their jobs, without those of jobs that have no record."""
        committed, now = self._writer.committed, time.time()
        if request.kept_checkpoints and now > self._numbers_made_at + _NUMBERS_S:
            self._numbers, self._numbers_made_at = {job.uid: number for number, job in committed.jobs.items()}, now
        for kept in request.kept_checkpoints[:_KEPT_MOST]:
            job = committed.jobs.get(self._numbers.get(kept.job_uid, 0))
            if job is not None and job.uid == kept.job_uid:
                yield job, kept

    async def RenewCertificate(
        self, request: agent_pb2.RenewCertificateRequest, context: Any
    ) -> agent_pb2.RenewCertificateResponse:
        from ganger.wire.certificate_authority import CertificateError, answer_renewal

        certificate = certificate_of(context)
        if self._authority is None or not certificate:
            raise errors.NotSupported("this master renews no certificates: it was started without --authority")
        node = self._callers.of(context).name
        try:
            with self._renewals.counted(node):
                answer = await asyncio.to_thread(answer_renewal, self._authority, certificate, request.signing_request)
        except CertificateError as error:
            raise errors.RequestInvalid(str(error)) from error
        log.info("certificate renewed", extra={"node": node})
        return agent_pb2.RenewCertificateResponse(certificate=answer)

    async def ReportProgress(
        self, request_iterator: AsyncIterator[agent_pb2.ProgressReport], context: Any
    ) -> agent_pb2.ReportProgressResponse:
        caller = self._callers.of(context)
        async for report in request_iterator:
            node = self._node_in(report.session)
            _check_node(caller, node)
            for gang in report.gangs:
                self._note(node, gang)
        return agent_pb2.ReportProgressResponse()

    def _node_in(self, session: str) -> str:
        node = self._node_of.get(session)
        if node is None:
            raise errors.SessionSuperseded("this session is void: open a new one, keep what runs")
        return node

    async def _hold(self, node: str, request: agent_pb2.ReconcileRequest, call: object) -> None:
        """Wait until there is news for the node, a newer call came, or the last answer is as old as the call may wait.

        A daemon with news of its own drops the held call and makes another; on a time-sliced node, in every time slice.
        If the time counted from each call, such a daemon would never be answered, and its node would be lost.
        """
        last = self._answered_at.get(request.session)
        if last is None:
            # The first answer confirms to the daemon that the master has its session.
            return
        longest = self._writer.state.settings.poll_s
        wanted = times.seconds(request.max_wait) if request.HasField("max_wait") else longest
        hold = min(wanted, longest) * random.uniform(_JITTER, 1.0)
        loop = asyncio.get_running_loop()
        end = last + hold
        committed = self._writer.committed
        with committed.watching(f"nodes/{node}") as news:
            while self._newest.get(node) is call:
                news.clear()
                known = committed.nodes.get(node)
                if known is None or known.session != request.session:
                    return
                desired = committed.desired.get(node, DesiredSet())
                if desired.version != request.desired_version:
                    return
                if desired.describe != self._asked.get(request.session, ()):
                    return
                remaining = end - loop.time()
                if remaining <= 0:
                    return
                if not await comes(news, remaining):
                    return

    def _note(self, node: str, gang: agent_pb2.GangProgress) -> None:
        job = self._writer.committed.jobs.get(names.parse_job_name(gang.job))
        if job is None or gang.epoch != job.epoch:
            return
        held = self._writer.committed.gangs.get(job.epoch)
        # A daemon speaks for the gangs on its own node only.
        if held is None or node not in held.nodes:
            return
        progress = gang.progress
        has_use = progress.HasField("device_utilization")
        sample = Sample(
            epoch=gang.epoch,
            **plain(progress, SAMPLE),
            data_wait_share=_share(progress.data_wait_share),
            time=agent_messages.sample_time(progress, self._writer.now()),
            concern=progress.stall_reason[:_LONGEST_CONCERN],
            step_time=times.unix_s(progress.step_time),
            since_time=times.unix_s(progress.first_step_time),
            refault_bytes_per_s=progress.refault_bytes_per_s if progress.HasField("refault_bytes_per_s") else None,
            device_use=_share(progress.device_utilization) if has_use else None,
            metrics=metrics_from_wire(progress),
            **plain(progress.evaluation, EVALUATED),
            evaluated_time=times.unix_s(progress.evaluation.time),
        )
        self._progress.report(job.number, sample, node)
        if (rule := rule_of(job)) is not None:
            self._judge(job, rule, sample)

    def _judge(self, job: JobRecord, rule: StopRule, sample: Sample) -> None:
        """Send the core the metric of an array member that has reached a rung, unless it was sent before."""
        loss = sample.loss if math.isfinite(sample.loss) else None
        report = report_of(rule, sample.step, loss, sample.metrics)
        if report is not None and has_climbed(rule, job, report[1]):
            self._writer.enqueue(commands.RecordMetric(job.number, sample.epoch, *report))


def _share(value: float) -> float:
    return min(1.0, max(0.0, value))


def _check_node(caller: CallerIdentity, node: str) -> None:
    """Raise NodeNotYours unless the caller may report for the node: a daemon certificate is valid for its node only."""
    if caller.role is CallerRole.DAEMON and caller.name != node:
        raise errors.NodeNotYours(
            f"nodes/{node} is not this daemon's: its certificate is of nodes/{caller.name}; give the daemon that name"
            " (--node), or a certificate of the other",
            node=node,
            name=caller.name,
        )


def _megabytes(size: int) -> str:
    return f"{size / (1 << 20):.1f} MiB"
