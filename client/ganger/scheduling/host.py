"""The process around job schedulers: watches view and turns, asks the scheduler, sends its requests.

`python -m ganger.scheduling.host --state-dir DIR` is the default host, started beside the master. A user's own
scheduler runs in the same shell, in the user's process, for the jobs it claims.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import random
import signal
import sys
import uuid
from collections.abc import Sequence

import grpc
import grpc.aio

from ganger.resources.reasons import Refusal
from ganger.scheduling.base import JobScheduler, Proposal, Turn
from ganger.scheduling.default import DefaultScheduler
from ganger.scheduling.view_copy import ViewCopy
from ganger.v1 import scheduling_pb2, scheduling_pb2_grpc
from ganger.wire import convert, names, times
from ganger.wire.channels import open_aio_channel
from ganger.wire.endpoints import EndpointError, find_endpoint

log = logging.getLogger(__name__)

# Requests of one turn: the master keeps a turn for three conflicts.
_REQUESTS_PER_TURN = 4
_CANDIDATES_MOST = 16
_SHORTEST_BACKOFF_SECONDS = 0.05
_LONGEST_BACKOFF_SECONDS = 2.0
# For deltas to bring the view a turn was given on; claims are judged anyway, so not long.
_VIEW_WAIT_SECONDS = 0.1


class Host:
    """Serves one `scheduler` until cancelled. With `jobs` it claims those; without it is a default host."""

    def __init__(
        self, scheduler: JobScheduler, *, master: str | None = None, name: str = "", jobs: Sequence[str] = ()
    ) -> None:
        self._scheduler = scheduler
        self._master = master
        self._jobs = tuple(jobs)
        self.name = name or f"{type(scheduler).__name__.lower()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"

    async def run(self) -> None:
        """Connects, serves, and connects again with backoff; returns when none of its claimed jobs is left."""
        backoff = _SHORTEST_BACKOFF_SECONDS
        while True:
            try:
                async with open_aio_channel(find_endpoint(self._master)) as channel:
                    await _Service(channel, self._scheduler, self.name, self._jobs).run()
                backoff = _SHORTEST_BACKOFF_SECONDS
            except EndpointError as error:
                log.warning("no master yet", extra={"error": str(error)})
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.NOT_FOUND:
                    log.info("claimed jobs are gone")
                    return
                log.info("connection to the master lost", extra={"code": error.code().name, "detail": error.details()})
            await asyncio.sleep(backoff * random.uniform(0.5, 1.0))
            backoff = min(backoff * 2, _LONGEST_BACKOFF_SECONDS)


class _Service:
    """One connection: two streams and the requests."""

    def __init__(self, channel: grpc.aio.Channel, scheduler: JobScheduler, name: str, jobs: tuple[str, ...]) -> None:
        self._stub = scheduling_pb2_grpc.SchedulingServiceStub(channel)
        self._scheduler = scheduler
        self._name = name
        self._jobs = jobs
        self._copy = ViewCopy()

    async def run(self) -> None:
        """Until a stream ends: normally at its age limit, else with its error."""
        watchers = [asyncio.create_task(self._watch_view()), asyncio.create_task(self._watch_turns())]
        try:
            done, _ = await asyncio.wait(watchers, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in watchers:
                task.cancel()
            await asyncio.gather(*watchers, return_exceptions=True)

    async def _watch_view(self) -> None:
        async for delta in self._stub.WatchView(scheduling_pb2.WatchViewRequest()):
            await self._copy.apply(delta)

    async def _watch_turns(self) -> None:
        # A view first: a turn without one could only be passed on.
        await self._copy.reached(0, _LONGEST_BACKOFF_SECONDS)
        request = scheduling_pb2.WatchTurnsRequest(scheduler=self._name, jobs=self._jobs)
        async with asyncio.TaskGroup() as group:
            async for message in self._stub.WatchTurns(request):
                group.create_task(self._serve(message))

    async def _serve(self, message: scheduling_pb2.Turn) -> None:
        turn = _turn_of(message)
        try:
            await self._copy.reached(message.view_version, _VIEW_WAIT_SECONDS)
            proposal = self._ask(turn, None)
            for _ in range(_REQUESTS_PER_TURN):
                verdict = await self._stub.RequestGang(self._request(turn, proposal))
                rejected = verdict.rejected
                if verdict.WhichOneof("verdict") != "rejected" or not rejected.turn_kept or not proposal.candidates:
                    return
                self._copy.refresh(rejected.rows)
                refusals = convert.refusals_from_wire(rejected.refusals)
                proposal = self._ask(turn, refusals)
        except grpc.aio.AioRpcError as error:
            # The turn passes on by itself; a broken connection ends the streams too.
            log.info("request failed", extra={"job": turn.job, "code": error.code().name, "detail": error.details()})

    def _ask(self, turn: Turn, refusals: Sequence[Refusal] | None) -> Proposal:
        try:
            if refusals is None:
                return self._scheduler.propose(turn, self._copy.view)
            return self._scheduler.on_rejected(turn, self._copy.view, refusals) or Proposal()
        except Exception:
            # A user's scheduler that fails on one job must not take the others down; its turn passes on.
            log.exception("the scheduler failed", extra={"job": turn.job})
            return Proposal()

    def _request(self, turn: Turn, proposal: Proposal) -> scheduling_pb2.GangRequest:
        return scheduling_pb2.GangRequest(
            job=turn.job,
            revision=turn.revision,
            turn=turn.turn,
            view_version=max(0, self._copy.version),
            mode=scheduling_pb2.GangRequest.MODE_EXCLUSIVE,
            candidates=[
                scheduling_pb2.Candidate(claims=convert.claims_to_wire(claims))
                for claims in proposal.candidates[:_CANDIDATES_MOST]
            ],
            blockers=convert.refusals_to_wire(proposal.blockers),
        )


def _turn_of(message: scheduling_pb2.Turn) -> Turn:
    return Turn(
        turn=message.turn,
        job=message.job,
        revision=message.revision,
        shape=convert.gang_shape_from_wire(message.spec, message.arena_bytes_per_device),
        rank=message.rank,
        lease_seconds=times.seconds(message.lease),
        waited_seconds=times.seconds(message.waited),
        parked=convert.claims_from_wire(message.parked),
        reserved_nodes=tuple(names.parse_node_name(node) for node in message.reserved_nodes),
    )


async def serve(host: Host, *, until_stdin_closes: bool = False) -> None:
    """Runs `host` until it is done, SIGTERM or SIGINT comes, or (if asked) standard input closes."""
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(host.run())
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, task.cancel)
    if until_stdin_closes:
        loop.add_reader(sys.stdin.fileno(), lambda: task.cancel() if not os.read(sys.stdin.fileno(), 4096) else None)
    try:
        await task
    except asyncio.CancelledError:
        pass


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="ganger scheduler host", description="The default host of job schedulers.")
    parser.add_argument("--state-dir", help="the master's state directory, or its address")
    parser.add_argument("--until-stdin-closes", action="store_true", help="end with the process that started it")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    host = Host(DefaultScheduler(), master=options.state_dir)
    asyncio.run(serve(host, until_stdin_closes=options.until_stdin_closes))
    return 0


if __name__ == "__main__":
    sys.exit(main())
