"""Peer service of this daemon."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Collection
from typing import TYPE_CHECKING, Any

import grpc
from ganger.agent.v1 import peer_pb2, peer_pb2_grpc
from ganger.v1 import job_service_pb2
from ganger.wire.errors import (
    CheckpointNotFetched,
    DeadlineExceeded,
    EpochStale,
    GangNotFound,
    NodeNotYours,
    OffsetBeyondEnd,
    RankNotFound,
    RequestInvalid,
)
from ganger.wire.methods import CallerIdentity, CallerRole
from ganger.wire.resource_names import node_name
from ganger.wire.servers import Callers

from ganger_daemon.checkpoints.node_checkpoints import FetchError
from ganger_daemon.checkpoints.storage import Shard
from ganger_daemon.core.gang_judgement import PartPhase
from ganger_daemon.gang.job_output import series_written
from ganger_daemon.node.accounts import AccountRefusedError
from ganger_daemon.node.daemon_files import read_json

if TYPE_CHECKING:
    from ganger_daemon.gang.local_gang import LocalGang
    from ganger_daemon.node.gang_set import GangSet
    from ganger_daemon.node.node_context import NodeContext

_POLL_S = 0.005
_LOG_POLL_S = 0.1
_RENDEZVOUS_S = 100.0
_STREAM_S = 1800.0
# Characters of the reason that a member reports.
_REFUSAL_LIMIT = 1000
_FETCH_S = 3600.0
# Uids as the master makes them, and others that cannot lead out of a directory.
_UID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,127}")


class PeerServicer(peer_pb2_grpc.PeerServiceServicer):
    """Service for the gangs of this node. Callers are the daemons of nodes that have a part in the same gang."""

    def __init__(self, host: NodeContext, gangs: GangSet, callers: Callers) -> None:
        self._host = host
        self._gangs = gangs
        self._callers = callers

    async def RelayBoundary(
        self, request_iterator: AsyncIterator[peer_pb2.RankPoints], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[peer_pb2.RankPoints]:
        first = await anext(aiter(request_iterator), None)
        if first is None:
            return
        gang = self._gang(first.job_uid, first.epoch, context)
        gang.receive_points(first)
        outbox = gang.parts.boundary.join()
        listener = asyncio.create_task(_listen(request_iterator, gang))
        listener.add_done_callback(lambda _: outbox.end())
        try:
            async for message in outbox.messages():
                yield message
        finally:
            gang.parts.boundary.outboxes.discard(outbox)
            listener.cancel()
            await asyncio.gather(listener, return_exceptions=True)

    async def GetRendezvous(
        self, request: peer_pb2.GetRendezvousRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> peer_pb2.Rendezvous:
        deadline = time.monotonic() + _RENDEZVOUS_S
        while True:
            # The member's desired set may come before the leader's.
            gang = self._gangs.find(request.job_uid, request.epoch)
            if gang is not None:
                self._check_part(gang, context)
                if gang.parts.launching.rendezvous.address is not None:
                    host, port = gang.parts.launching.rendezvous.address
                    return peer_pb2.Rendezvous(host=host, port=port)
                fields = read_json(gang.context.paths.rendezvous)
                if fields:
                    return peer_pb2.Rendezvous(host=str(fields["host"]), port=int(fields["port"]))
                if gang.phase is PartPhase.ENDED:
                    raise GangNotFound(f"epoch {request.epoch} has ended on the leader's node")
            elif self._gangs.newest_epoch(request.job_uid) > request.epoch:
                raise EpochStale(f"epoch {request.epoch} is over: the job has a newer one here")
            elif self._gangs.is_finished(request.job_uid, request.epoch):
                # The ranks of a slower node start after the leader's have ended; they need not meet at all.
                if address := self._gangs.met.get((request.job_uid, request.epoch)):
                    return peer_pb2.Rendezvous(host=address[0], port=address[1])
                raise GangNotFound(f"epoch {request.epoch} has ended on the leader's node")
            if time.monotonic() > deadline:
                raise DeadlineExceeded("the rendezvous store does not listen yet")
            await asyncio.sleep(_POLL_S)

    async def ShardWritten(
        self, request: peer_pb2.ShardWrittenRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> peer_pb2.ShardWrittenResponse:
        gang = self._gang(request.job_uid, request.epoch, context)
        storage = gang.context.storage
        if not gang.context.part.leads or storage is None:
            raise GangNotFound("this daemon does not lead the gang, or sees no storage")
        if request.refusal:
            await gang.parts.saving.receive_refusal(request.stop_sequence, request.refusal[:_REFUSAL_LIMIT])
            return peer_pb2.ShardWrittenResponse()
        shards = tuple(
            Shard(shard.rank, shard.size_bytes, shard.digest, shard.device_model, shard.header_digest)
            for shard in request.shards
        )
        await gang.parts.saving.keeper.gather(storage, request.stop_sequence, request.step, shards)
        gang.wake()
        return peer_pb2.ShardWrittenResponse(published=gang.parts.saving.keeper.is_settled(request.stop_sequence))

    async def KeepCheckpoint(
        self, request: peer_pb2.KeepCheckpointRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> peer_pb2.KeepCheckpointResponse:
        host = self._host
        try:
            account = await asyncio.to_thread(host.accounts.of, request.user)
            await host.storage.work.run(
                host.fetcher.checkpoint, [request.stream], request.job_uid, request.path, account, within_s=_FETCH_S
            )
        except (AccountRefusedError, FetchError, OSError) as error:
            raise CheckpointNotFetched(str(error)) from error
        return peer_pb2.KeepCheckpointResponse(node=node_name(host.node))

    async def SwitchRow(
        self, request: peer_pb2.SliceOrder, context: grpc.aio.ServicerContext[Any, Any]
    ) -> peer_pb2.SliceMember:
        if members := self._gangs.rotation.nodes_of(request.node_set):
            check_node(self._callers.of(context), members, f"nodeSets/{request.node_set}")
        return await self._gangs.rotation.receive_order(request)

    async def ReadLog(
        self, request: peer_pb2.ReadPeerLogRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[job_service_pb2.LogChunk]:
        logs = self._host.logs
        _check_uid(request.job_uid)
        if not await asyncio.to_thread(logs.segments, request.job_uid, request.rank):
            raise RankNotFound(f"no log of rank {request.rank} of this job is on this node")
        offset = request.offset
        end = await asyncio.to_thread(logs.end, request.job_uid, request.rank)
        if offset > end:
            raise OffsetBeyondEnd(f"offset {offset} lies beyond the end of the log, {end}", end=end)
        deadline = time.monotonic() + _STREAM_S
        while time.monotonic() < deadline:
            # Read after this check, so that all bytes written before it are sent.
            over = not request.follow or not self._writes(request.job_uid)
            while True:
                chunk = await asyncio.to_thread(next, logs.read(request.job_uid, request.rank, offset), None)
                if chunk is None:
                    break
                yield job_service_pb2.LogChunk(offset=chunk.offset, data=chunk.data, lost_bytes=chunk.lost_bytes)
                offset = max(offset, chunk.offset + len(chunk.data))
                if not chunk.data:
                    break
            if over:
                return
            await asyncio.sleep(_LOG_POLL_S)

    async def ReadSeries(
        self, request: peer_pb2.ReadSeriesRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> peer_pb2.SeriesText:
        _check_uid(request.job_uid)
        written = [
            (gang.desired.epoch, series_written(gang.context.paths.work))
            for gang in self._gangs.all()
            if gang.desired.job_uid == request.job_uid and 0 in gang.context.part.ranks
        ]
        series = await asyncio.to_thread(self._host.logs.series, request.job_uid, written)
        return peer_pb2.SeriesText(text=series.text())

    def _writes(self, job_uid: str) -> bool:
        return any(gang.desired.job_uid == job_uid and gang.phase is not PartPhase.ENDED for gang in self._gangs.all())

    def _gang(self, job_uid: str, epoch: int, context: grpc.aio.ServicerContext[Any, Any]) -> LocalGang:
        gang = self._gangs.find(job_uid, epoch)
        if gang is not None:
            self._check_part(gang, context)
            return gang
        if self._gangs.newest_epoch(job_uid) > epoch:
            raise EpochStale(f"epoch {epoch} is over: the job has a newer one here")
        if self._gangs.is_finished(job_uid, epoch):
            raise GangNotFound(f"epoch {epoch} of {job_uid} has ended on this node", ended=True)
        raise GangNotFound(f"epoch {epoch} of {job_uid} is not on this node")

    def _check_part(self, gang: LocalGang, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        members = [member.node.removeprefix("nodes/") for member in gang.desired.members]
        check_node(self._callers.of(context), members, f"epoch {gang.desired.epoch} of {gang.desired.job}")


def _check_uid(job_uid: str) -> None:
    # It becomes the name of a directory.
    if not _UID.fullmatch(job_uid):
        raise RequestInvalid(f"{job_uid[:80]!r} is no uid of a job")


def check_node(caller: CallerIdentity, members: Collection[str], of: str) -> None:
    """Raise NodeNotYours unless a daemon calls for its own node, which must be one of the members."""
    if caller.role is CallerRole.DAEMON and caller.name not in members:
        raise NodeNotYours(f"nodes/{caller.name} has no part in {of}", name=caller.name)


async def _listen(messages: AsyncIterator[peer_pb2.RankPoints], gang: LocalGang) -> None:
    async for message in messages:
        gang.receive_points(message)
