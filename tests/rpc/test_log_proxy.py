"""A rank's log as one stream, whatever nodes hold its parts."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from ganger.agent.v1 import peer_pb2, peer_pb2_grpc
from ganger.v1 import job_service_pb2, resources_pb2, scheduling_pb2
from ganger.wire.errors import LogNotKept, NodeSilent, OffsetBeyondEnd, from_rpc_error
from ganger.wire.servers import bind, make_server
from rpc.kit import Served, Speaker, serving, spec_of, until


class Segments(peer_pb2_grpc.PeerServiceServicer):
    """A daemon that holds some bytes of a log, each part with its logical offset."""

    def __init__(self, *parts: tuple[int, bytes]) -> None:
        self._parts = parts
        self.asked: list[int] = []
        # How long each answer takes, and how many were asked for at once.
        self.slowly = 0.0
        self.most_at_once = self._at_once = 0

    async def ReadLog(  # noqa: N802 - as in the proto
        self, request: peer_pb2.ReadPeerLogRequest, context: Any
    ) -> AsyncIterator[job_service_pb2.LogChunk]:
        self.asked.append(request.offset)
        self._at_once += 1
        self.most_at_once = max(self.most_at_once, self._at_once)
        await asyncio.sleep(self.slowly)
        self._at_once -= 1
        end = max(offset + len(data) for offset, data in self._parts)
        if request.offset > end:
            raise OffsetBeyondEnd("nothing there", end=end)
        for offset, data in self._parts:
            if offset + len(data) > request.offset:
                cut = max(0, request.offset - offset)
                yield job_service_pb2.LogChunk(offset=offset + cut, data=data[cut:])


@asynccontextmanager
async def cluster(tmp_path: Path, *, is_placed: bool = True, **nodes: Segments) -> AsyncIterator[Served]:
    """Daemons of these names, and a job with a rank on each; else the job waits."""
    async with AsyncExitStack() as stack:
        served = await stack.enter_async_context(serving(tmp_path))
        for name, segments in nodes.items():
            server = make_server(served.master.token)
            peer_pb2_grpc.add_PeerServiceServicer_to_server(segments, server)
            address = bind(server, "127.0.0.1:0")
            await server.start()
            stack.push_async_callback(server.stop, None)
            await Speaker(served, name, peer_address=address).join()
        await served.submit(spec_of(len(nodes)))
        if is_placed:
            await placed(served, *nodes)
        yield served


async def read(served: Served, **request: Any) -> list[job_service_pb2.LogChunk]:
    stream = served.jobs.ReadLog(job_service_pb2.ReadLogRequest(name="jobs/1", **request))
    return [chunk async for chunk in stream]


def test_parts_of_several_nodes_come_as_one_stream_without_a_byte_twice(tmp_path: Path) -> None:
    async def story() -> None:
        async with cluster(tmp_path, a=Segments((0, b"one ")), b=Segments((2, b"e two "), (8, b"three"))) as served:
            chunks = await read(served)
            assert b"".join(chunk.data for chunk in chunks) == b"one two three"
            assert [chunk.lost_bytes for chunk in chunks] == [0] * len(chunks)

    asyncio.run(story())


def test_bytes_that_no_node_has_are_reported_lost(tmp_path: Path) -> None:
    async def story() -> None:
        async with cluster(tmp_path, a=Segments((0, b"one ")), b=Segments((10, b"three"))) as served:
            chunks = await read(served)
            assert [(chunk.offset, chunk.data, chunk.lost_bytes) for chunk in chunks] == [
                (0, b"one ", 0),
                (10, b"three", 6),
            ]

    asyncio.run(story())


def test_negative_offset_reads_the_end(tmp_path: Path) -> None:
    async def story() -> None:
        segments = Segments((0, b"one two "))
        async with cluster(tmp_path, a=segments, b=Segments((8, b"three"))) as served:
            chunks = await read(served, offset=-7)
            assert (chunks[0].offset, b"".join(chunk.data for chunk in chunks)) == (6, b"o three")
            assert min(segments.asked) == 6, "a long log is not read for its last bytes"
            assert b"".join(chunk.data for chunk in await read(served, offset=-99)) == b"one two three"

    asyncio.run(story())


def test_nothing_found_is_not_said_to_be_nothing_written_while_a_node_is_silent(tmp_path: Path) -> None:
    async def story() -> None:
        async with cluster(tmp_path, a=Segments((0, b""))) as served:
            assert await read(served) == []
            # No server listens there any more.
            node = served.master.writer.committed.nodes["a"]
            await Speaker(served, "a").join()
            assert served.master.writer.committed.nodes["a"].peer_address != node.peer_address
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await read(served)
            error = from_rpc_error(refused.value)
            assert isinstance(error, NodeSilent)
            assert "may be on nodes/a:" in error.message

    asyncio.run(story())


async def placed(served: Served, *nodes: str) -> None:
    """The job gets a gang with a rank on each."""
    host = served.scheduling.WatchLeases(scheduling_pb2.WatchLeasesRequest(scheduler="host"))
    (turn,) = (await host.read()).leases
    role = turn.spec.roles[0].shape
    claims = [
        resources_pb2.Claim(
            node=f"nodes/{node}", device_mask=1, millicores=[role.millicores], memory_bytes=role.memory_bytes, tasks=[1]
        )
        for node in nodes
    ]
    verdict = await served.scheduling.RequestGang(
        scheduling_pb2.GangRequest(
            job=turn.job,
            revision=turn.revision,
            lease=turn.lease,
            candidates=[scheduling_pb2.Candidate(claims=claims)],
        )
    )
    assert verdict.WhichOneof("verdict") == "approved", verdict


async def followed(served: Served, seconds: float) -> bytes:
    """What a follower has got after a time."""
    got = bytearray()

    async def follow() -> None:
        async for chunk in served.jobs.ReadLog(job_service_pb2.ReadLogRequest(name="jobs/1", follow=True)):
            got.extend(chunk.data)

    with suppress(TimeoutError):
        await asyncio.wait_for(follow(), seconds)
    return bytes(got)


def test_no_node_is_asked_for_the_log_of_a_job_that_waits_for_its_first_gang(tmp_path: Path) -> None:
    async def story() -> None:
        segments = Segments((0, b"all"))
        async with cluster(tmp_path, is_placed=False, a=segments) as served:
            assert await followed(served, 1.5) == b""
            assert await read(served) == []
            assert segments.asked == []
            await placed(served, "a")
            assert await followed(served, 1.5) == b"all"

    asyncio.run(story())


def test_every_node_is_asked_once_where_the_history_of_a_job_is_no_longer_kept(tmp_path: Path) -> None:
    async def story() -> None:
        nodes = {"a": Segments((0, b"all")), "b": Segments((0, b""))}
        async with cluster(tmp_path, is_placed=False, **nodes) as served:
            while await served.master.writer.compact(math.inf, 100):
                pass
            assert await followed(served, 1.5) == b"all"
            assert len(nodes["b"].asked) == 1
            assert len(nodes["a"].asked) > 1
            assert b"".join(chunk.data for chunk in await read(served)) == b"all"
            assert len(nodes["b"].asked) == 1

    asyncio.run(story())


def test_a_reader_asks_a_bounded_number_of_nodes_at_once(tmp_path: Path) -> None:
    async def story() -> None:
        segments = Segments((0, b""))
        async with cluster(tmp_path, is_placed=False, n0=segments) as served:
            address = served.master.writer.committed.nodes["n0"].peer_address
            for number in range(1, 200):
                await Speaker(served, f"n{number}", peer_address=address).join()
            while await served.master.writer.compact(math.inf, 1_000):
                pass
            segments.slowly = 0.02
            assert await read(served) == []
            assert len(segments.asked) >= 200
            assert 1 < segments.most_at_once <= 64

    asyncio.run(story())


def test_of_a_job_that_ended_too_long_ago_is_said_that_its_log_is_kept_no_more(tmp_path: Path) -> None:
    async def story() -> None:
        async with serving(tmp_path, logs_kept_s=0.0) as served:
            await served.submit()
            assert await read(served) == [], "it has written nothing yet"
            await served.jobs.CancelJob(job_service_pb2.CancelJobRequest(name="jobs/1"))
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await read(served)
            assert isinstance(from_rpc_error(refused.value), LogNotKept)

    asyncio.run(story())


def test_offset_beyond_the_end_is_named(tmp_path: Path) -> None:
    async def story() -> None:
        async with cluster(tmp_path, a=Segments((0, b"all"))) as served:
            assert await read(served, offset=3) == []
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await read(served, offset=4)
            assert isinstance(from_rpc_error(refused.value), OffsetBeyondEnd)

    asyncio.run(story())


def test_follower_of_a_job_that_is_over_gets_all_and_the_end(tmp_path: Path) -> None:
    async def story() -> None:
        async with cluster(tmp_path, a=Segments((0, b"all"))) as served:
            await served.jobs.CancelJob(job_service_pb2.CancelJobRequest(name="jobs/1"))
            daemon = Speaker(served, "a", peer_address=served.master.writer.committed.nodes["a"].peer_address)
            await daemon.join()
            # It has seen that the gang is to stop, and has nothing of it.
            await daemon.reconcile([])
            await until(lambda: served.master.writer.committed.jobs[1].state.is_finished)
            chunks = await asyncio.wait_for(read(served, follow=True), 10.0)
            assert b"".join(chunk.data for chunk in chunks) == b"all"

    asyncio.run(story())
