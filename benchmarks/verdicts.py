"""`ganger bench verdicts`: how many gangs a second the master approves or rejects, durably, on a large cluster.

A real master in a process of its own holds a view of 16,000 nodes with 8 devices each and a queue of jobs of 1 to 64
devices. One client asks for gangs at concurrency 32, once per call and in batches on a stream, by turns with an empty
method on the same server with the same messages; figures are ratios of rates taken in one run. A part of the requests
claims what is taken, so some are rejected. Every approval is committed to SQLite before it is answered.
"""

from __future__ import annotations

import asyncio
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from ganger.cluster.resources import Claim, GangShape, NodeRow
from ganger.cluster.view import View
from ganger.v1 import scheduling_pb2, scheduling_pb2_grpc
from ganger.wire import resource_messages as convert
from ganger.wire import resource_names as names
from ganger.wire.channels import open_aio_channel
from ganger.wire.endpoints import Endpoint
from ganger_master.core.approval import CandidateApproval, approve

from benchmarks import master_server as server
from benchmarks.report import AtLeast, AtMost, quantile, report

NODES: Final = 16_000
CONCURRENCY: Final = 32
ROUNDS: Final = 5
UNARY_PER_ROUND: Final = 800
BATCH: Final = 32
BATCHES_IN_FLIGHT: Final = 8
BATCHED_PER_ROUND: Final = 2_048
APPROVER_SAMPLES: Final = 4_000
# One request of so many claims devices that are taken.
CONFLICT_EVERY: Final = 5
_LOOKS: Final = 3
_START_S: Final = 300.0


def main(nodes: int = NODES, rounds: int = ROUNDS, quick: bool = False) -> dict[str, Any]:
    """The whole report; `quick` tries it on a small cluster."""
    if quick:
        nodes, rounds = 3_000, 1
    total = rounds * (UNARY_PER_ROUND + BATCHED_PER_ROUND) + UNARY_PER_ROUND
    with (
        tempfile.TemporaryDirectory(prefix="ganger-bench-") as directory,
        serving(Path(directory), nodes, total) as endpoint,
    ):
        figures, samples = asyncio.run(_measure(endpoint, nodes, rounds))
    approver = approver_s(nodes)
    figures["approver_p50_ms"] = 1e3 * statistics.median(approver)
    figures["approver_p99_ms"] = 1e3 * quantile(approver, 0.99)
    samples += [{"path": "approver", "seconds": seconds} for seconds in approver]
    limits: dict[str, AtLeast | AtMost] = {
        "unary_over_empty": AtLeast(0.8),
        "batched_over_empty": AtLeast(4.0),
        "approved_share": AtLeast(0.5),
        "approver_p99_ms": AtMost(0.1),
    }
    return report("verdicts", {"nodes": nodes, **figures}, limits, samples)


@contextmanager
def serving(directory: Path, nodes: int, jobs: int) -> Iterator[Endpoint]:
    """A bench server as a child; it ends when its standard input closes, so also when this process dies."""
    command = [sys.executable, "-m", "benchmarks.master_server", str(directory), str(nodes), str(jobs)]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        words = child.stdout.readline().split()
        if len(words) != 3 or words[0] != "ready":
            raise RuntimeError(f"the benchmark's master did not start: exit code {child.wait(_START_S)}")
        yield Endpoint(words[1], words[2])
    finally:
        child.stdin.close()
        try:
            child.wait(30.0)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        child.stdout.close()


class Placer:
    """Claims for one gang after the other, packed from the first node on; every so often some that are taken."""

    def __init__(self, nodes: int) -> None:
        self._nodes = nodes
        self._node = 0
        self._used = 0
        self._asked = 0

    def claims(self, size: int) -> tuple[Claim, ...]:
        self._asked += 1
        if self._asked % CONFLICT_EVERY == 0 and self._node:
            # The first nodes were filled first.
            whole, rest = divmod(size, server.DEVICES)
            masks = [0xFF] * whole + ([(1 << rest) - 1] if rest else [])
            return tuple(server.claim(f"n{number:05}", mask) for number, mask in enumerate(masks))
        claims = []
        while size:
            if self._used == server.DEVICES or (size > 1 and self._used and size > server.DEVICES - self._used):
                self._node, self._used = self._node + 1, 0
            part = min(size, server.DEVICES - self._used)
            claims.append(server.claim(f"n{self._node % self._nodes:05}", ((1 << part) - 1) << self._used))
            self._used += part
            size -= part
        return tuple(claims)


def approver_s(nodes: int) -> list[float]:
    """Time of single verdicts of the approver alone, in this process, on a view of that size.

    The shortest of a few looks at each request: what else runs on the machine is not the approver's.
    """
    view = View((server.configuration_set(),))
    for number in range(nodes):
        view.put(_empty_row(f"n{number:05}"))
    placer = Placer(nodes)
    taken: list[float] = []
    for number in range(1, APPROVER_SAMPLES + 1):
        size = server.size_of(number)
        shape = GangShape(server.roles_of(size))
        candidates = (placer.claims(size),)
        shortest = math.inf
        for _ in range(_LOOKS):
            began = time.perf_counter()
            verdict = approve(view, shape, candidates, job=f"jobs/{number}")
            shortest = min(shortest, time.perf_counter() - began)
        taken.append(shortest)
        if isinstance(verdict, CandidateApproval):
            for claim in verdict.claims:
                view.take(claim)
    return taken


def _empty_row(node: str) -> NodeRow:
    configuration_set = server.configuration_set()
    return NodeRow(
        node,
        configuration_set.name,
        (1 << configuration_set.devices) - 1,
        tuple(socket.millicores for socket in configuration_set.sockets),
        configuration_set.free_memory_bytes,
    )


def _requests(placer: Placer, first: int, count: int) -> list[scheduling_pb2.GangRequest]:
    return [
        scheduling_pb2.GangRequest(
            job=names.job_name(number),
            revision=1,
            candidates=[scheduling_pb2.Candidate(claims=convert.claims_to_wire(placer.claims(server.size_of(number))))],
        )
        for number in range(first, first + count)
    ]


async def _measure(endpoint: Endpoint, nodes: int, rounds: int) -> tuple[dict[str, float], list[dict[str, Any]]]:
    samples: list[dict[str, Any]] = []
    rates: dict[str, list[float]] = {"empty": [], "unary": [], "batched": []}
    latencies: list[float] = []
    approved = asked = 0
    placer = Placer(nodes)
    following = 1
    async with open_aio_channel(endpoint) as channel:
        stub = scheduling_pb2_grpc.SchedulingServiceStub(channel)
        empty = channel.unary_unary(
            f"/{server.EMPTY}/Gang",
            request_serializer=scheduling_pb2.GangRequest.SerializeToString,
            response_deserializer=scheduling_pb2.Verdict.FromString,
        )

        async def ask_empty(request: scheduling_pb2.GangRequest) -> Any:
            return await empty(request)

        async def ask_unary(request: scheduling_pb2.GangRequest) -> Any:
            return await stub.RequestGang(request)

        warm = _requests(placer, following, UNARY_PER_ROUND)
        following += UNARY_PER_ROUND
        await concurrently(ask_empty, warm, CONCURRENCY)
        await concurrently(ask_unary, warm, CONCURRENCY)
        for number in range(rounds):
            requests = _requests(placer, following, UNARY_PER_ROUND)
            following += UNARY_PER_ROUND
            # By turns, and in turns, so that a drift of the machine hits both alike.
            order: list[tuple[str, Callable[[Any], Awaitable[Any]]]] = [("empty", ask_empty), ("unary", ask_unary)]
            for path, ask in order if number % 2 == 0 else order[::-1]:
                seconds, each, answers = await concurrently(ask, requests, CONCURRENCY)
                rates[path].append(len(requests) / seconds)
                samples.append({"path": path, "round": number, "count": len(requests), "seconds": seconds})
                if path == "unary":
                    latencies += each
                    asked += len(answers)
                    approved += sum(answer.WhichOneof("verdict") == "approved" for answer in answers)
            requests = _requests(placer, following, BATCHED_PER_ROUND)
            following += BATCHED_PER_ROUND
            seconds, granted = await _batched(stub, requests)
            asked += len(requests)
            approved += granted
            rates["batched"].append(len(requests) / seconds)
            samples.append({"path": "batched", "round": number, "count": len(requests), "seconds": seconds})
    unary = [rate / echo for rate, echo in zip(rates["unary"], rates["empty"], strict=True)]
    batched = [rate / echo for rate, echo in zip(rates["batched"], rates["empty"], strict=True)]
    figures = {
        "unary_over_empty": statistics.median(unary),
        "batched_over_empty": statistics.median(batched),
        "approved_share": approved / asked,
        "empty_per_second": statistics.median(rates["empty"]),
        "unary_per_second": statistics.median(rates["unary"]),
        "batched_per_second": statistics.median(rates["batched"]),
        "unary_p50_ms": 1e3 * statistics.median(latencies),
        "unary_p99_ms": 1e3 * quantile(latencies, 0.99),
    }
    return figures, samples


async def concurrently(
    ask: Callable[[Any], Awaitable[Any]], requests: Sequence[Any], concurrency: int
) -> tuple[float, list[float], list[Any]]:
    """Seconds in all, seconds of each call, answers; `concurrency` callers share the requests."""
    clock = time.perf_counter
    each: list[float] = []
    answers: list[Any] = []
    waiting = iter(requests)

    async def caller() -> None:
        for request in waiting:
            began = clock()
            answers.append(await ask(request))
            each.append(clock() - began)

    began = clock()
    await asyncio.gather(*(caller() for _ in range(concurrency)))
    return clock() - began, each, answers


async def _batched(
    stub: scheduling_pb2_grpc.SchedulingServiceStub, requests: Sequence[scheduling_pb2.GangRequest]
) -> tuple[float, int]:
    """Seconds, and how many were approved; a few messages of many requests are on their way at once."""
    messages = [
        scheduling_pb2.GangRequests(requests=requests[start : start + BATCH])
        for start in range(0, len(requests), BATCH)
    ]
    room = asyncio.Semaphore(BATCHES_IN_FLIGHT)

    async def sending() -> AsyncIterator[scheduling_pb2.GangRequests]:
        for message in messages:
            await room.acquire()
            yield message

    approved = 0
    began = time.perf_counter()
    stream: Any = stub.RequestGangs(sending())  # type: ignore[arg-type]
    async for verdicts in stream:
        room.release()
        approved += sum(verdict.WhichOneof("verdict") == "approved" for verdict in verdicts.verdicts)
    return time.perf_counter() - began, approved
