"""ReadLog and GetSeries across nodes: a rank's log is segments on every node where it ran, and copies of sealed ones
elsewhere.

A sweep queries every node that may have a part from an offset on and takes the part that begins first,
until none has more. What no node has before the first that has some is reported as lost. Following means: read the node
where the rank runs until it is placed anew or over, then sweep again.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

import grpc
from ganger.agent.v1 import peer_pb2, peer_pb2_grpc
from ganger.protocol import metric_series
from ganger.text import counted
from ganger.v1 import job_service_pb2
from ganger.wire import errors, times
from ganger.wire.channels import DaemonChannels
from ganger.wire.endpoints import Endpoint, EndpointError
from ganger.wire.methods import CallerRole
from ganger.wire.tls import trouble_with

from ganger_master.core.desired_projection import ranks_by_claim
from ganger_master.core.job_model import JobRecord
from ganger_master.rpc.answer_messages import VisibleState
from ganger_master.runtime.publication import comes
from ganger_master.runtime.writer import Writer

_BEYOND_EVERYTHING: Final = (1 << 63) - 1
# A node that does not answer must not hold up the parts others have.
_FIRST_CHUNK_S: Final = 5.0
# How often a follower looks again where nothing reports that there is more.
_LOOK_AGAIN_S: Final = 0.5
_CHANNELS_KEPT: Final = 64
# Nodes that one reader queries at once.
_QUERIED_AT_ONCE: Final = 64
# Logs of which it is remembered where they may lie.
_PLACES_KEPT: Final = 1_000
_T = TypeVar("_T")
_END: Final[Any] = grpc.aio.EOF  # type: ignore[attr-defined]


@dataclass(slots=True)
class _Source:
    """The log part of one node, with its first chunk read ahead."""

    call: Any
    first: job_service_pb2.LogChunk

    @property
    def begin(self) -> int:
        return int(self.first.offset) - int(self.first.lost_bytes)


class _Log(NamedTuple):
    """A rank's log as far as a job has been placed until now."""

    uid: str
    rank: int
    revision: int
    is_somewhere: bool


class LogProxy:
    def __init__(self, writer: Writer, shown: VisibleState, token: str, tls: str = "") -> None:
        """Create the proxy. `tls`: the directory of the certificate for daemons; without it, they accept the token."""
        self._writer = writer
        self._shown = shown
        self._tls = tls
        self._channels = DaemonChannels("" if tls else token, tls, _CHANNELS_KEPT)
        self._former: dict[_Log, tuple[str, ...]] = {}

    async def read(
        self, number: int, rank: int, offset: int, *, follow: bool
    ) -> AsyncIterator[job_service_pb2.LogChunk]:
        """Yield chunks in the order of their offsets; a negative offset counts from the end as it is now. Raises
        JobNotFound, RankNotFound, OffsetBeyondEnd, and where nothing was found NodeSilent if there may be something,
        LogNotKept if there may have been."""
        job = self._shown.job_named(number)
        # An elastic job may have had the rank, and have fewer now.
        if rank >= job.spec.most_tasks:
            raise errors.RankNotFound(f"jobs/{number} has ranks 0 to {job.spec.most_tasks - 1}, not {rank}")
        position = offset
        if offset < 0:
            position = max(0, await self._end_of(job, rank) + offset)
        elif offset and not follow and 0 < (end := await self._end_of(job, rank)) < offset:
            raise errors.OffsetBeyondEnd(f"rank {rank} of jobs/{number} has written {end} bytes, fewer than {offset}")
        begin = position
        async for chunk in self._sweep(job, rank, position):
            position = chunk.offset + len(chunk.data)
            yield chunk
        if not follow and position == begin:
            await self._check_answers(job, rank)
            self._check_kept(job)
        if follow:
            async for chunk in self._follow(number, rank, position):
                yield chunk

    async def series(self, number: int) -> job_service_pb2.Series:
        """Return what a job has logged by name. Raises JobNotFound, NodeSilent and LogNotKept as `read` does."""
        job = self._shown.job_named(number)
        nodes = await self._places(job, 0)
        texts = await _side_by_side([partial(self._series_on, node, job) for node in nodes])
        found = metric_series.merged(map(metric_series.parsed, filter(None, texts)))
        if not found.points:
            await self._check_answers(job, 0)
            self._check_kept(job)
        return series_to_wire(found)

    async def _series_on(self, node: str, job: JobRecord) -> str:
        stub = self._stub(node)
        if stub is None:
            return ""
        request = peer_pb2.ReadSeriesRequest(job_uid=job.uid)
        try:
            return str((await stub.ReadSeries(request, timeout=_FIRST_CHUNK_S)).text)
        except grpc.RpcError:
            return ""

    async def close(self) -> None:
        await self._channels.close()

    async def _follow(self, number: int, rank: int, position: int) -> AsyncIterator[job_service_pb2.LogChunk]:
        with self._writer.committed.watching(f"jobs/{number}") as news:
            while True:
                job = self._writer.committed.jobs.get(number)
                if job is None:
                    return
                is_over = job.state.is_finished
                news.clear()
                async for chunk in self._sweep(job, rank, position):
                    position = chunk.offset + len(chunk.data)
                    yield chunk
                if is_over:
                    return
                node = self._home_of(job, rank)
                if node is not None and not news.is_set():
                    async for chunk in self._until_news(node, job, rank, position, news):
                        position = chunk.offset + len(chunk.data)
                        yield chunk
                await comes(news, _LOOK_AGAIN_S)

    async def _until_news(
        self, node: str, job: JobRecord, rank: int, position: int, news: asyncio.Event
    ) -> AsyncIterator[job_service_pb2.LogChunk]:
        """Yield what the rank writes on the node where it runs, until its gang's place may have changed."""
        call = self._call(node, job, rank, position, follow=True)
        if call is None:
            return
        epoch = job.epoch
        changed = asyncio.ensure_future(news.wait())
        reading: asyncio.Future[Any] | None = None
        try:
            while True:
                reading = asyncio.ensure_future(call.read())
                while not reading.done():
                    await asyncio.wait({reading, changed}, return_when=asyncio.FIRST_COMPLETED)
                    if changed.done() and not reading.done():
                        now = self._writer.committed.jobs.get(job.number)
                        if now is None or now.state.is_finished or now.epoch != epoch:
                            return
                        news.clear()
                        changed = asyncio.ensure_future(news.wait())
                try:
                    chunk = reading.result()
                except grpc.RpcError:
                    return
                if chunk is _END:
                    return
                if chunk := _from(chunk, position):
                    position = chunk.offset + len(chunk.data)
                    yield chunk
        finally:
            changed.cancel()
            if reading is not None:
                reading.cancel()
            call.cancel()

    async def _sweep(self, job: JobRecord, rank: int, position: int) -> AsyncIterator[job_service_pb2.LogChunk]:
        while True:
            sources = await self._sources(job, rank, position)
            if not sources:
                return
            chosen = min(sources, key=lambda source: source.begin)
            for source in sources:
                if source is not chosen:
                    source.call.cancel()
            before = position
            chunk: Any = chosen.first
            try:
                while chunk is not _END:
                    lost = max(0, int(chunk.offset) - position)
                    if part := _from(chunk, position):
                        part.lost_bytes = lost
                        position = part.offset + len(part.data)
                        yield part
                    chunk = await chosen.call.read()
            except grpc.RpcError:
                # The node went away in the middle: another may have the rest.
                pass
            finally:
                chosen.call.cancel()
            if position == before:
                return

    async def _end_of(self, job: JobRecord, rank: int) -> int:
        return max([end or 0 for end in (await self._ends(job, rank)).values()], default=0)

    async def _check_answers(self, job: JobRecord, rank: int) -> None:
        """Raise NodeSilent if a node where the job was does not answer: it may have a part of the log."""
        silent = sorted(node for node, end in (await self._ends(job, rank)).items() if end is None)
        if silent:
            where = ", ".join(f"nodes/{node}" for node in silent)
            why = await self._trouble_with(silent[0]) or "no answer from there"
            raise errors.NodeSilent(f"what rank {rank} of {job.name} has written may be on {where}: {why}")

    def _check_kept(self, job: JobRecord) -> None:
        kept = self._writer.state.settings.logs_kept_s
        if kept is not None and job.state.is_finished and (ago := self._writer.now() - job.end_time) > kept:
            raise errors.LogNotKept(
                f"nothing is left of what {job.name} has written: it ended {counted(ago / 86400.0, 'day', '.0f')} ago, "
                f"and logs are kept for {kept / 86400.0:g} (logs_kept of the master)"
            )

    async def _trouble_with(self, node: str) -> str:
        """Return what is wrong with certificates, if a node does not answer for that reason; else an empty text."""
        known = self._writer.committed.nodes.get(node)
        if not self._tls or known is None or not known.peer_address:
            return ""
        return await asyncio.to_thread(trouble_with, Endpoint(known.peer_address, tls=self._tls), CallerRole.DAEMON)

    async def _ends(self, job: JobRecord, rank: int) -> dict[str, int | None]:
        """Return the end of the log on each node where the job may have been; None where a node does not answer."""
        return await self._ends_on(await self._places(job, rank), job, rank)

    async def _ends_on(self, nodes: Sequence[str], job: JobRecord, rank: int) -> dict[str, int | None]:
        ends = await _side_by_side([partial(self._end_on, node, job, rank) for node in nodes])
        return dict(zip(nodes, ends, strict=True))

    async def _end_on(self, node: str, job: JobRecord, rank: int) -> int | None:
        """Return the end of the log on a node, in bytes; None if it does not answer."""
        # The refusal of an offset beyond everything contains the end of the daemon's log.
        call = self._call(node, job, rank, _BEYOND_EVERYTHING, follow=False)
        if call is None:
            return None
        try:
            async with asyncio.timeout(_FIRST_CHUNK_S):
                await call.read()
        except grpc.RpcError as error:
            found = errors.from_rpc_error(error)
            if isinstance(found, errors.Unreachable | errors.DeadlineExceeded):
                return None
            return int(found.metadata.get("end", 0)) if isinstance(found, errors.OffsetBeyondEnd) else 0
        except TimeoutError:
            return None
        finally:
            call.cancel()
        return 0

    async def _sources(self, job: JobRecord, rank: int, position: int) -> list[_Source]:
        nodes = await self._places(job, rank)
        found = await _side_by_side([partial(self._source, node, job, rank, position) for node in nodes])
        return [source for source in found if source is not None]

    async def _source(self, node: str, job: JobRecord, rank: int, position: int) -> _Source | None:
        call = self._call(node, job, rank, position, follow=False)
        if call is None:
            return None
        try:
            async with asyncio.timeout(_FIRST_CHUNK_S):
                first = await call.read()
        except (grpc.RpcError, TimeoutError):
            call.cancel()
            return None
        return None if first is _END else _Source(call, first)

    def _call(self, node: str, job: JobRecord, rank: int, position: int, *, follow: bool) -> Any:
        stub = self._stub(node)
        if stub is None:
            return None
        request = peer_pb2.ReadPeerLogRequest(job_uid=job.uid, rank=rank, offset=position, follow=follow)
        return stub.ReadLog(request)

    def _stub(self, node: str) -> Any:
        """Return the peer service of a node; None if it cannot be called."""
        known = self._writer.committed.nodes.get(node)
        if known is None or not known.peer_address or known.lost:
            return None
        try:
            channel = self._channels.get(known.peer_address)
        except EndpointError:
            return None
        return peer_pb2_grpc.PeerServiceStub(channel)

    def _home_of(self, job: JobRecord, rank: int) -> str | None:
        """Return the node where the rank is placed now; None without a gang."""
        gang = self._writer.committed.gangs.get(job.epoch)
        if gang is None:
            return None
        for node, ranks in zip(gang.nodes, ranks_by_claim(job.spec.roles, gang.claims), strict=True):
            if rank in ranks:
                return node
        return None

    async def _places(self, job: JobRecord, rank: int) -> list[str]:
        """Return the nodes that may have a part of the log: where the job is, and where it was by its history."""
        nodes: dict[str, None] = {}
        if (home := self._home_of(job, rank)) is not None:
            nodes[home] = None
        for gang in self._writer.committed.gangs.values():
            if gang.job == job.number:
                nodes.update(dict.fromkeys(gang.nodes))
        # Nodes are added only by an approval, and followers call this often.
        log = _Log(job.uid, rank, job.revision, is_somewhere=bool(nodes))
        if log not in self._former:
            found = await self._former_places(job, log)
            if len(self._former) >= _PLACES_KEPT:
                del self._former[next(iter(self._former))]
            self._former[log] = found
        return list(nodes | dict.fromkeys(self._former[log]))

    async def _former_places(self, job: JobRecord, log: _Log) -> tuple[str, ...]:
        history = await self._writer.history(job.name, 0, 10_000)
        nodes = dict.fromkeys(
            node for entry in history if '"nodes"' in entry.figures for node in _nodes_in(entry.figures)
        )
        is_whole = bool(history) and history[0].kind == "job_submitted"
        if nodes or is_whole or log.is_somewhere:
            return tuple(nodes)
        # The history no longer has its nodes: take the nodes that have a part or do not answer.
        ends = await self._ends_on(sorted(self._writer.committed.nodes), job, log.rank)
        return tuple(node for node, end in ends.items() if end != 0)


async def _side_by_side(calls: Sequence[Callable[[], Awaitable[_T]]]) -> list[_T]:
    limit = asyncio.Semaphore(_QUERIED_AT_ONCE)

    async def one(call: Callable[[], Awaitable[_T]]) -> _T:
        async with limit:
            return await call()

    return await asyncio.gather(*(one(call) for call in calls))


def series_to_wire(series: metric_series.MetricSeries) -> job_service_pb2.Series:
    message = job_service_pb2.Series()
    for name in series.names():
        points = series.of(name)
        message.metrics.add(
            name=name,
            stride=series.strides.get(name, 1),
            steps=[point.step for point in points],
            times=[point.time_s for point in points],
            values=[point.values[0] for point in points],
        )
    for epoch in series.epochs():
        message.epochs.add(
            number=epoch.number,
            begin_time=times.timestamp(epoch.begin_s),
            end_time=times.timestamp(epoch.end_s),
            first_step=epoch.first_step,
            steps=epoch.steps,
            active_duration=times.duration(epoch.active_s),
            mean_loss=None if math.isnan(epoch.mean_loss) else epoch.mean_loss,
        )
    return message


def _nodes_in(figures: str) -> list[str]:
    return [node.removeprefix("nodes/") for node in str(json.loads(figures).get("nodes", "")).replace(",", " ").split()]


def _from(chunk: job_service_pb2.LogChunk, position: int) -> job_service_pb2.LogChunk | None:
    """Return the part of a chunk at and beyond a position; None if there is none."""
    end = chunk.offset + len(chunk.data)
    if end <= position:
        return None
    if chunk.offset >= position:
        return chunk
    return job_service_pb2.LogChunk(offset=position, data=chunk.data[position - chunk.offset :])
