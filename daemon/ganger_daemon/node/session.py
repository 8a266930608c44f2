"""Session with the master. A change on this node cancels the held Reconcile call, and a new one carries the complete
observed set. Jobs and this daemon continue while the master is away: every failed call is retried. The database
position lets a master detect that it runs on an older copy."""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import grpc
from ganger.agent.v1 import agent_pb2, agent_pb2_grpc
from ganger.injob.page import now_ns
from ganger.protocol.stop_rules import lease_until, longest_hold_s, renewed
from ganger.v1 import job_pb2
from ganger.wire.channels import (
    PART_BYTES,
    SUPPORTED_VERSIONS,
    common_version,
    note_failure,
    open_aio_channel,
    stated_versions,
)
from ganger.wire.endpoints import CredentialError, Endpoint, EndpointError
from ganger.wire.errors import WireVersionUnsupported, from_rpc_error, reason_of
from ganger.wire.times import duration, seconds, timestamp
from ganger.wire.tls import trouble_with, version_of
from google.protobuf import json_format

from ganger_daemon.checkpoints.node_checkpoints import KeptCheckpoint, kept, remove, sweep
from ganger_daemon.gang.observation import add_metrics
from ganger_daemon.node.daemon_files import read_json, write_hint
from ganger_daemon.node.gang_set import GangSet
from ganger_daemon.node.node_context import NodeContext

log = logging.getLogger(__name__)

# Longest time between two heartbeats, which are held calls.
HEARTBEAT_MOST_S = 60.0
# A restarted master is back within seconds, and jobs may wait for it: the backoff starts and stays short.
_FIRST_RETRY_S = 0.05
_LAST_RETRY_S = 2.0
_LASTING_RETRY_S = 10.0
_LOOK_S = 0.05
# Deadline of one part of a set, which the master answers at once.
_PART_S = 10.0
# Most bytes that a gang takes in a message beyond its own.
_FIELD_BYTES = 16
# Reasons that a retry does not remove: an operator has to act.
_LASTING = frozenset(
    {
        "NODE_NAME_TAKEN", "STORAGE_MISMATCH", "CONFIGURATION_SET_MISMATCH", "NAME_INVALID", "TOKEN_INVALID",
        "CERTIFICATE_INVALID", "CERTIFICATE_REVOKED", "ROLE_NOT_PERMITTED", "NODE_NOT_YOURS",
        "WIRE_VERSION_UNSUPPORTED",
    }
)  # fmt: skip

INTERVAL_S = 1.0
_RETRY_S = 2.0


async def report_progress(stub: Any, session: str, gangs: GangSet) -> None:
    """Report the progress of all gangs until cancelled. A broken stream is opened again."""
    while True:
        try:
            await stub.ReportProgress(_reports(session, gangs))
        except grpc.aio.AioRpcError as error:
            log.debug("progress stream broke off", extra={"code": error.code().name})
        await asyncio.sleep(_RETRY_S)


async def _reports(session: str, gangs: GangSet) -> AsyncIterator[agent_pb2.ProgressReport]:
    while True:
        await asyncio.sleep(INTERVAL_S)
        report = batch(session, gangs)
        if report.gangs:
            yield report


def batch(session: str, gangs: GangSet) -> agent_pb2.ProgressReport:
    report = agent_pb2.ProgressReport(session=session)
    now = time.time()
    for gang in gangs.all():
        found, concern, metrics = gang.report.progress(), gang.report.stall_reason(), gang.report.metrics()
        memory = gang.report.working_set()
        if found is None and not concern and not metrics:
            continue
        progress = job_pb2.Progress(loss=math.nan, stall_reason=concern)
        progress.time.CopyFrom(timestamp(now))
        if found is not None:
            look, progress.steps_per_s, progress.data_wait_share = found
            utilization = gang.report.utilization(progress.data_wait_share)
            if utilization is not None:
                progress.device_utilization = utilization
            progress.working_set_bytes = memory.bytes_now
            progress.used_memory_bytes, progress.least_memory_bytes = memory.used_bytes, memory.least_bytes
            progress.trial_memory_bytes = gang.parts.memory_trial.bytes_now
            if memory.refault_bytes_per_s is not None:
                progress.refault_bytes_per_s = memory.refault_bytes_per_s
            progress.step, progress.samples, progress.loss = look.step, look.samples, look.loss
            progress.training_epoch, progress.training_epochs = look.training_epoch, look.training_epochs
            read = time.time()
            if look.step:
                progress.step_time.CopyFrom(timestamp(read - look.step_age_s))
            if look.evaluated_age_s is not None:
                progress.evaluation.batches = look.evaluated
                progress.evaluation.batches_in_row = look.evaluated_in_row
                progress.evaluation.time.CopyFrom(timestamp(read - look.evaluated_age_s))
            if look.since_age_s is not None:
                progress.first_step_time.CopyFrom(timestamp(read - look.since_age_s))
        add_metrics(progress, metrics)
        report.gangs.add(job=gang.desired.job, epoch=gang.desired.epoch, progress=progress)
    return report


class DatabasePosition:
    """The position, read from disk at the start and written before each desired set is acted on."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.message = agent_pb2.DatabasePosition()
        try:
            json_format.ParseDict(read_json(path), self.message, ignore_unknown_fields=True)
        except json_format.ParseError:
            self.message = agent_pb2.DatabasePosition()

    def note(self, store: str, desired_version: int, gangs: Iterable[agent_pb2.DesiredGang]) -> None:
        """Record a desired set of the database `store`. Versions are compared within one database only, ids always."""
        fresh = agent_pb2.DatabasePosition(store=store, desired_version=desired_version)
        fresh.next_epoch, fresh.next_job = self.message.next_epoch, self.message.next_job
        if store == self.message.store:
            fresh.desired_version = max(desired_version, self.message.desired_version)
        for gang in gangs:
            fresh.next_epoch = max(fresh.next_epoch, gang.epoch + 1)
            fresh.next_job = max(fresh.next_job, _number(gang.job) + 1)
        if fresh != self.message:
            self.message = fresh
            write_hint(self._path, json_format.MessageToDict(fresh))


def _number(job: str) -> int:
    text = job.removeprefix("jobs/")
    return int(text) if text.isdecimal() else 0


class SupersededError(Exception):
    """The session is void: open a new one, keep what runs."""


# Interval of reports of the checkpoints on this node's disk.
_KEPT_EVERY_S = 30.0


class NodeReport(NamedTuple):
    """Observed state of a node, as one message of a session has it. `node_faults`: why the node itself is out of
    service, by source; `storage_proved`: the node sees the storage; `device_warnings`: devices in service that are
    slower than they should be."""

    gangs: list[agent_pb2.ObservedGang]
    rows: list[agent_pb2.ObservedSlices]
    device_faults: dict[int, str]
    node_faults: dict[str, str]
    storage_proved: bool
    device_warnings: dict[int, str]


@dataclass(slots=True)
class Conversation:
    """Messages that one session has sent and received."""

    session: str
    lost_after_s: float | None
    observation: int = 0
    desired_version: int = 0
    # The report that was sent last; None if the master may not have received it.
    reported: NodeReport | None = None
    # The newest desired set of this session; None before the first answer.
    desired: list[agent_pb2.DesiredGang] | None = None
    # Epochs of its gangs whose spec is still to come.
    missing: frozenset[int] = frozenset()
    rows: list[agent_pb2.DesiredSlices] = field(default_factory=list)
    # Name of the master's database, and whether the master requests ended gangs because that was restored.
    store: str = ""
    reports_finished: bool = False
    # Epochs of gangs that the master wants described.
    describe: frozenset[int] = frozenset()


class Session:
    """The daemon's session. `find_master` is called at each attempt: a restarted master may listen elsewhere."""

    def __init__(
        self,
        host: NodeContext,
        gangs: GangSet,
        find_master: Callable[[], Endpoint],
        describe: Callable[[], agent_pb2.CreateSessionRequest],
        node_faults: Callable[[], dict[str, str]],
    ) -> None:
        """`node_faults`: why the node is out of service, by source."""
        self._host = host
        self._kept_due = 0.0
        self._gangs = gangs
        self._find_master = find_master
        self._describe = describe
        self._node_faults = node_faults
        self._seen = DatabasePosition(host.paths.state / "master.json")
        self._news = asyncio.Event()
        self._wait = _FIRST_RETRY_S
        # Masters tried since one has answered.
        self._tried: set[Endpoint] = set()
        self.connected = asyncio.Event()

    def news(self) -> None:
        """Send a changed observed set."""
        self._news.set()

    async def run(self) -> None:
        """Run until cancelled. The session outlives a broken connection as long as the master keeps it."""
        conversation: Conversation | None = None
        self._wait = _FIRST_RETRY_S
        while True:
            endpoint: Endpoint | None = None
            shown: tuple[int, ...] = ()
            try:
                endpoint = self._find_master()
                shown = version_of(Path(endpoint.tls))
                async with open_aio_channel(endpoint) as channel:
                    stub: Any = agent_pb2_grpc.AgentServiceStub(channel)
                    if conversation is None:
                        conversation = await self._open(stub)
                    await self._converse(stub, conversation)
            except SupersededError:
                log.info("session superseded")
                conversation = None
                # A master answered: the backoff starts anew.
                self._wait = _FIRST_RETRY_S
            except EndpointError as error:
                log.info("no master", extra={"error": str(error)})
            except WireVersionUnsupported as error:
                log.error("master not reached", extra={"reason": error.reason, "error": error.message})
                self._wait = _LASTING_RETRY_S
            except grpc.aio.AioRpcError as error:
                note_failure(endpoint, error)
                reason = reason_of(from_rpc_error(error))
                # A connection shows the certificate that it was made with: dial with a renewed one at once.
                is_renewed = endpoint is not None and bool(endpoint.tls) and version_of(Path(endpoint.tls)) != shown
                is_lasting = reason in _LASTING and not is_renewed
                level = logging.ERROR if is_lasting else logging.INFO
                trouble = ""
                if reason == "UNREACHABLE" and endpoint is not None and endpoint.tls:
                    # gRPC does not report what is wrong with the certificates of either end
                    trouble = await asyncio.to_thread(trouble_with, endpoint)
                level = logging.ERROR if trouble else level
                log.log(level, "master not reached", extra={"reason": reason, "error": trouble or error.details()})
                if is_lasting:
                    self._wait = _LASTING_RETRY_S
            self.connected.clear()
            await self._pause(endpoint)
            self._wait = min(_LAST_RETRY_S, self._wait * 2)

    async def _pause(self, tried: Endpoint | None) -> None:
        """Wait before the next attempt; a master at an address that was not tried since the last answer ends the
        wait."""
        if tried is not None:
            self._tried.add(tried)
        until = time.monotonic() + self._wait * (0.5 + random.random())
        while (left := until - time.monotonic()) > 0:
            await asyncio.sleep(min(_LOOK_S, left))
            try:
                if self._find_master() not in self._tried:
                    return
            except EndpointError:
                continue

    async def _open(self, stub: Any) -> Conversation:
        request = self._describe()
        storage = self._host.storage
        request.storage_token = storage.found
        request.database_position.CopyFrom(self._seen.message)
        request.wire_versions.CopyFrom(agent_pb2.WireVersions(**SUPPORTED_VERSIONS._asdict()))
        answer: agent_pb2.Session = await stub.CreateSession(request, timeout=10.0)
        version = common_version(SUPPORTED_VERSIONS, stated_versions(answer), names=("daemon", "master"))
        storage.configure(answer.storage, answer.storage_token)
        await storage.settle()
        self._host.storage_configured()
        self._host.logs.storage = storage.shared
        self._host.checkpoint_interval_s = seconds(answer.checkpoint_interval)
        self._host.logs.kept_s = seconds(answer.log_retention) if answer.HasField("log_retention") else None
        self._gangs.new_session()
        log.info(
            "session opened",
            extra={
                "session": answer.session,
                "storage": answer.storage,
                "proved": storage.proved,
                "wire_version": version,
            },
        )
        lost_after = seconds(answer.lost_after) if answer.HasField("lost_after") else None
        return Conversation(answer.session, lost_after, store=answer.store, reports_finished=answer.is_restored)

    async def _converse(self, stub: Any, conversation: Conversation) -> None:
        progress = asyncio.create_task(report_progress(stub, conversation.session, self._gangs))
        conversation.reported = None  # Whether the last report was received is not known
        try:
            while True:
                # Listed first: what is published after that is in the report, and the master may not name it removable.
                kept_here = await self._kept_checkpoints()
                request = self._request(conversation)
                if kept_here:
                    request.kept_checkpoints.extend(kept_here)
                    # Answered at once: a held call is cancelled by the next change on this node.
                    request.max_wait.CopyFrom(duration(0.0))
                try:
                    for part in _first_parts(request):
                        await stub.Reconcile(part, timeout=_PART_S)
                    sent_at = now_ns()
                    answer = await self._call(stub, request, conversation)
                except grpc.aio.AioRpcError as error:
                    if reason_of(from_rpc_error(error)) == "SESSION_SUPERSEDED":
                        raise SupersededError from error
                    raise
                if answer is None:
                    self._kept_due = 0.0 if kept_here else self._kept_due
                    continue  # News came first
                self._wait = _FIRST_RETRY_S
                self._tried.clear()
                await self._take(answer, conversation, sent_at)
                self.connected.set()
        finally:
            progress.cancel()
            await asyncio.gather(progress, return_exceptions=True)

    def _request(self, conversation: Conversation) -> agent_pb2.ReconcileRequest:
        self._news.clear()
        report = NodeReport(
            self._gangs.observed(conversation.describe),
            self._gangs.rotation.observed(),
            dict(self._host.devices.faults()),
            self._node_faults(),
            self._host.storage.proved,
            self._host.devices.warnings(),
        )
        changed = report != conversation.reported
        if changed:
            conversation.observation += 1
            conversation.reported = report
        return agent_pb2.ReconcileRequest(
            session=conversation.session,
            observation=conversation.observation,
            desired_version=conversation.desired_version,
            changed=changed,
            gangs=report.gangs if changed else [],
            device_faults=report.device_faults if changed else {},
            node_faults=report.node_faults if changed else {},
            device_warnings=report.device_warnings if changed else {},
            max_wait=duration(self._max_wait(conversation)),
            storage_proved=report.storage_proved,
            slices=report.rows if changed else [],
            missing_specs=sorted(conversation.missing),
            finished=self._gangs.finished if changed and conversation.reports_finished else [],
            revocation_digest=self._host.revocations.stated_digest() if self._host.revocations is not None else b"",
        )

    async def _kept_checkpoints(self) -> list[agent_pb2.KeptCheckpoint]:
        """Return the checkpoints on this node's disk, from time to time: the master names those that may go."""
        if time.monotonic() < self._kept_due and not self._host.has_fetched:
            return []
        self._host.has_fetched = False
        self._kept_due = time.monotonic() + _KEPT_EVERY_S
        await asyncio.to_thread(sweep, self._host.paths.checkpoints, self._gangs.job_uids)
        found = await asyncio.to_thread(kept, self._host.paths.checkpoints)
        return [agent_pb2.KeptCheckpoint(job_uid=one.job_uid, path=one.path) for one in found]

    def _max_wait(self, conversation: Conversation) -> float:
        limit = longest_hold_s(HEARTBEAT_MOST_S, conversation.lost_after_s)
        return max(0.05, limit * (0.8 + 0.2 * random.random()))

    async def _call(
        self, stub: Any, request: agent_pb2.ReconcileRequest, conversation: Conversation
    ) -> agent_pb2.ReconcileResponse | None:
        """Return the answer; None if a change on this node cancelled the held call: the caller calls again."""
        call = stub.Reconcile(request, timeout=seconds(request.max_wait) + 15.0)
        answered: asyncio.Future[Any] = asyncio.ensure_future(call)
        news = asyncio.ensure_future(self._news.wait())
        try:
            await asyncio.wait([answered, news], return_when=asyncio.FIRST_COMPLETED)
            if answered.done():
                answer: agent_pb2.ReconcileResponse = answered.result()
                return answer
            # A set whose call was cancelled is sent again with the next call.
            conversation.reported = None
            return None
        finally:
            news.cancel()
            if not answered.done():
                call.cancel()
            await asyncio.gather(news, answered, return_exceptions=True)

    async def _take(self, answer: agent_pb2.ReconcileResponse, conversation: Conversation, sent_at_ns: int) -> None:
        acknowledged = frozenset(answer.acknowledged_epochs)
        if answer.revocation_list and self._host.revocations is not None:
            try:
                self._host.revocations.accept(answer.revocation_list)
            except CredentialError as error:
                log.warning("revoked certificates not taken", extra={"error": str(error)})
        if answer.removable_checkpoints:
            removable = [KeptCheckpoint(one.job_uid, one.path) for one in answer.removable_checkpoints]
            await asyncio.to_thread(remove, self._host.paths.checkpoints, removable, self._gangs.job_uids)
        conversation.describe = frozenset(answer.describe_epochs)
        if answer.changed:
            self._seen.note(conversation.store, answer.desired_version, answer.gangs)
            conversation.missing = _specs_kept(answer, conversation.desired or ())
            conversation.desired, conversation.rows = list(answer.gangs), list(answer.slices)
        if conversation.desired is not None and (answer.changed or acknowledged):
            conversation.missing = await self._gangs.apply(
                conversation.desired, acknowledged, conversation.rows, conversation.missing
            )
        self._gangs.set_copy_peers({one.epoch: tuple(one.addresses) for one in answer.copy_peers})
        # A version counts as applied once all its specs are here: until then the master answers at once.
        if answer.changed and not conversation.missing:
            conversation.desired_version = answer.desired_version
        # After its orders: they may stop a gang that is frozen because its lease has ended.
        until = lease_until(sent_at_ns, conversation.lost_after_s)
        # Without gangs there is no lease that could have ended.
        has_orders = answer.desired_version > 0 or not (conversation.reported and conversation.reported.gangs)
        self._host.lease_until_ns = renewed(self._host.lease_until_ns, until, has_orders, now_ns())
        self._host.logs.storage = self._host.storage.shared
        self._gangs.wake_all()


def _first_parts(request: agent_pb2.ReconcileRequest) -> list[agent_pb2.ReconcileRequest]:
    """Move gangs for which one message has no room out of a request; return the requests to send before it."""
    parts: list[agent_pb2.ReconcileRequest] = []
    while request.ByteSize() > PART_BYTES and len(request.gangs) > 1:
        part = agent_pb2.ReconcileRequest(
            session=request.session, observation=request.observation, changed=True, has_more=True
        )
        room = PART_BYTES
        count = 0
        for count, gang in enumerate(request.gangs):
            room -= gang.ByteSize() + _FIELD_BYTES
            if room < 0 and count:
                break
        part.gangs.extend(request.gangs[:count])
        del request.gangs[:count]
        parts.append(part)
    return parts


def _specs_kept(answer: agent_pb2.ReconcileResponse, known: Iterable[agent_pb2.DesiredGang]) -> frozenset[int]:
    """Fill in specs that an answer leaves out for want of room and that came earlier; return epochs without one."""
    if not answer.later_specs:
        return frozenset()
    specs = {gang.epoch: gang.spec for gang in known if gang.HasField("spec")}
    missing = set(answer.later_specs)
    for gang in answer.gangs:
        if gang.epoch in missing and gang.epoch in specs:
            gang.spec.CopyFrom(specs[gang.epoch])
            missing.discard(gang.epoch)
    return frozenset(missing)
