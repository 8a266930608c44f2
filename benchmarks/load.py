"""`ganger bench load`: a cluster of many nodes and users for five minutes, and what one user's flood costs another.

The master is a program of its own with certificates, SQLite on disk, the default policy, its scheduler host and its
planner. This process is the rest: 2,000 hollow nodes (`benchmarks.hollow_nodes`), each with a certificate and a
connection of its own, which report the progress of their gangs each second; 200 submitters of 20 users, which together
submit 10,000 jobs evenly spread over the time; and 500 watchers, each of which follows a job of its user to its end,
and then the newest one. A job runs for 20 seconds.

Then a user submits job after job, with the time between two that `ganger submit` takes for itself; by turns alone and
beside eight callers of another user, which submit as fast as they are answered, and pay no attention to refusals. The
cost of the flood is the share of the first user's submissions a second that is lost.
"""

from __future__ import annotations

import asyncio
import resource
import statistics
import time
import uuid
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import grpc.aio
from ganger.v1 import job_pb2, job_service_pb2, job_service_pb2_grpc
from ganger.wire.certificate_authority import issue, make_authority
from ganger.wire.channels import open_aio_channel
from ganger.wire.endpoints import Endpoint
from ganger.wire.errors import from_rpc_error
from ganger.wire.methods import CallerIdentity, CallerRole

from benchmarks.bench_cluster import READY, START_S, BenchCluster, BenchClusterError
from benchmarks.burst import SIZES, spec_of
from benchmarks.hollow_nodes import HollowNodes
from benchmarks.report import AtLeast, AtMost, quantile, report

_ENDED: Final = frozenset({job_pb2.Job.STATE_SUCCEEDED, job_pb2.Job.STATE_FAILED, job_pb2.Job.STATE_CANCELLED})
# Seconds that a node's call is held, as a daemon has it.
_HELD_S: Final = 15.0
# A submission, or an end that no watcher is told of, is an error after this time.
_LONGEST_S: Final = 60.0
_FLOODERS: Final = 8
# Seconds that the command takes beside its call.
_COMMAND_S: Final = 0.15
# Fewer than the jobs of a run: what is kept of ended jobs is at its most before memory is compared.
_KEPT_JOBS: Final = 1_000


@dataclass(frozen=True, slots=True)
class LoadSize:
    nodes: int = 2_000
    jobs: int = 10_000
    users: int = 20
    submitters: int = 200
    watchers: int = 500
    seconds: float = 300.0
    # Of one job.
    runs_s: float = 20.0
    flood_rounds: int = 4
    flood_round_s: float = 10.0


QUICK: Final = LoadSize(nodes=50, jobs=200, users=4, submitters=10, watchers=20, seconds=30.0, flood_rounds=2)


def main(size: LoadSize = LoadSize(), quick: bool = False) -> dict[str, Any]:
    """Return the report. `quick`: a small cluster for half a minute."""
    if quick:
        size = QUICK
    # Each node has a connection, at both ends.
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with _CertifiedCluster() as cluster:
        figures, samples = asyncio.run(_Load(cluster, size).run())
    limits: dict[str, AtLeast | AtMost] = {
        "errors": AtMost(0.0),
        "jobs_done": AtLeast(size.jobs),
        "master_memory_growth": AtMost(0.1),
        "flood_cost": AtMost(0.2),
    }
    return report("load", figures, limits, samples)


class _CertifiedCluster(BenchCluster):
    """A master with certificates, and no daemons."""

    def __init__(self) -> None:
        super().__init__(nodes=0, gpus=0)
        self._authority = self.directory / "authority"
        make_authority(self._authority)
        own = self.certificate(CallerRole.MASTER, "master")
        self._master_options = ("--listen", "127.0.0.1:0", "--tls", str(own))
        self._environment["GANGER_TLS"] = str(self.certificate(CallerRole.OPERATOR, "operator"))
        self._environment["GANGER_MASTER_FINISHED_JOBS_LIMIT"] = str(_KEPT_JOBS)

    def address(self) -> str:
        """Return where the master serves callers with certificates."""
        found: list[str] = []

        def is_announced() -> bool:
            lines = self.logs()[0].read_text(errors="replace").splitlines()
            found[:] = [line.removeprefix(READY) for line in lines if line.startswith(READY)]
            return bool(found)

        self.until(is_announced, START_S, "the master serves")
        return found[0]

    def certificate(self, role: CallerRole, name: str) -> Path:
        """Return the directory of a certificate, issued the first time."""
        out = self.directory / f"{role}-{name}"
        hosts = ("127.0.0.1",) if role in (CallerRole.MASTER, CallerRole.DAEMON) else ()
        if not out.exists():
            issue(self._authority, CallerIdentity(role, name), hosts, 1.0, out)
        return out


@dataclass
class _Counts:
    """What happened so far. Times are of the steady clock."""

    submitted_s: dict[str, float] = field(default_factory=dict)
    answers_s: list[float] = field(default_factory=list)
    starts_s: list[float] = field(default_factory=list)
    ended_s: dict[str, float] = field(default_factory=dict)
    notices_s: list[float] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)


class _Load:
    def __init__(self, cluster: _CertifiedCluster, size: LoadSize) -> None:
        self._cluster, self._size = cluster, size
        self._address = cluster.address()
        self._programs = cluster.program_ids()
        self._counts = _Counts()
        self._newest: dict[str, deque[str]] = {f"user-{number}": deque(maxlen=64) for number in range(size.users)}
        self._memory: list[tuple[float, dict[str, int]]] = []
        self._channels: list[grpc.aio.Channel] = []
        self._is_last_submitted = False
        self._all_ended = asyncio.Event()

    async def run(self) -> tuple[dict[str, float], list[dict[str, Any]]]:
        size, began_s = self._size, time.monotonic()
        channels = [self._open(CallerRole.DAEMON, f"n{number:05}") for number in range(size.nodes)]
        nodes = HollowNodes(
            channels, wait_s=_HELD_S, runs_s=size.runs_s, started=self._note_start, ended=self._note_end, reports=True
        )
        await nodes.join()
        figures = {"nodes": float(size.nodes), "joined_s": time.monotonic() - began_s}
        served = [asyncio.ensure_future(one) for one in nodes.serve()]
        stubs: dict[str, Any] = {user: self._jobs(CallerRole.USER, user) for user in self._newest}
        try:
            figures |= await self._under_load(stubs, served)
            figures |= await self._flood()
        finally:
            for task in served:
                task.cancel()
            await asyncio.gather(*served, return_exceptions=True)
            for channel in self._channels:
                await channel.close(None)
        samples = [{"at_s": at_s - began_s, **found} for at_s, found in self._memory]
        return figures, [*samples, *[{"error": text, "times": times} for text, times in self._counts.errors.items()]]

    def _open(self, role: CallerRole, name: str) -> grpc.aio.Channel:
        endpoint = Endpoint(self._address, tls=str(self._cluster.certificate(role, name)))
        channel = open_aio_channel(endpoint, (("grpc.use_local_subchannel_pool", 1),))
        self._channels.append(channel)
        return channel

    def _jobs(self, role: CallerRole, name: str) -> Any:
        return job_service_pb2_grpc.JobServiceStub(self._open(role, name))

    def _note_start(self, job: str) -> None:
        submitted_s = self._counts.submitted_s.get(job)
        if submitted_s is not None:
            self._counts.starts_s.append(time.monotonic() - submitted_s)

    def _note_end(self, job: str) -> None:
        self._counts.ended_s[job] = time.monotonic()
        self._look_whether_all_ended()

    def _look_whether_all_ended(self) -> None:
        if self._is_last_submitted and self._counts.ended_s.keys() >= self._counts.submitted_s.keys():
            self._all_ended.set()

    async def _under_load(self, stubs: dict[str, Any], served: Sequence[asyncio.Future[None]]) -> dict[str, float]:
        size, counts, users = self._size, self._counts, list(stubs)
        until_s = time.monotonic() + size.seconds
        watchers = [
            asyncio.ensure_future(self._watch(stubs[users[number % len(users)]], users[number % len(users)], until_s))
            for number in range(size.watchers)
        ]
        measuring = asyncio.ensure_future(self._measure())
        shares = [
            size.jobs // size.submitters + (number < size.jobs % size.submitters) for number in range(size.submitters)
        ]
        submitters = [
            asyncio.ensure_future(
                self._submit_all(stubs[users[number % len(users)]], users[number % len(users)], share, number)
            )
            for number, share in enumerate(shares)
        ]
        await _all_of(submitters, served)
        self._is_last_submitted = True
        self._look_whether_all_ended()
        with suppress(TimeoutError):
            async with asyncio.timeout(size.runs_s + _LONGEST_S):
                await self._all_ended.wait()
        await _all_of(watchers, served)
        measuring.cancel()
        await asyncio.gather(measuring, return_exceptions=True)
        return {
            "submitters": float(size.submitters),
            "watchers": float(size.watchers),
            "jobs": float(len(counts.submitted_s)),
            "jobs_done": float(len(counts.ended_s)),
            "errors": float(sum(counts.errors.values())),
            "submit_p50_ms": 1e3 * quantile(counts.answers_s, 0.5),
            "submit_p99_ms": 1e3 * quantile(counts.answers_s, 0.99),
            "start_p50_s": quantile(counts.starts_s, 0.5),
            "start_p99_s": quantile(counts.starts_s, 0.99),
            "ends_watched": float(len(counts.notices_s)),
            "watch_p50_ms": 1e3 * quantile(counts.notices_s, 0.5),
            "watch_p99_ms": 1e3 * quantile(counts.notices_s, 0.99),
            **self._memory_figures(),
        }

    async def _submit_all(self, stub: Any, user: str, count: int, number: int) -> None:
        """Submit `count` jobs, evenly over the time; submitters begin one after the other."""
        size, counts = self._size, self._counts
        apart_s = size.seconds / count
        due_s = time.monotonic() + apart_s * number / size.submitters
        for place in range(count):
            await asyncio.sleep(max(0.0, due_s + place * apart_s - time.monotonic()))
            asked_s = time.monotonic()
            try:
                job = await stub.CreateJob(_request(SIZES[place % len(SIZES)]), timeout=_LONGEST_S)
            except grpc.aio.AioRpcError as error:
                counts.errors[f"submit: {from_rpc_error(error).message[:200]}"] += 1
                continue
            counts.answers_s.append(time.monotonic() - asked_s)
            counts.submitted_s[job.name] = asked_s
            self._newest[user].append(job.name)

    async def _watch(self, stub: Any, user: str, until_s: float) -> None:
        """Follow jobs to their ends, one after the other."""
        counts, newest = self._counts, self._newest[user]
        while time.monotonic() < until_s:
            if not newest:
                await asyncio.sleep(0.1)
                continue
            name = newest[-1]
            try:
                async for job in stub.WatchJob(job_service_pb2.WatchJobRequest(name=name), timeout=4 * _LONGEST_S):
                    if job.state in _ENDED:
                        break
            except grpc.aio.AioRpcError as error:
                counts.errors[f"watch: {from_rpc_error(error).message[:200]}"] += 1
                await asyncio.sleep(1.0)
                continue
            ended_s = counts.ended_s.get(name)
            if ended_s is not None:
                counts.notices_s.append(time.monotonic() - ended_s)

    async def _measure(self) -> None:
        while True:
            self._memory.append((time.monotonic(), {name: _resident(pid) for name, pid in self._programs.items()}))
            await asyncio.sleep(self._size.seconds / 100)

    def _memory_figures(self) -> dict[str, float]:
        """Return each program's memory in the last tenth of the load, and its growth since the middle."""
        ends_s = self._memory[0][0] + self._size.seconds
        found: dict[str, float] = {}
        for name in self._programs:
            middle, end = (
                statistics.mean(
                    [by[name] for at_s, by in self._memory if 0.0 <= at_s - from_s < self._size.seconds / 10]
                )
                for from_s in (ends_s - self._size.seconds / 2, ends_s - self._size.seconds / 10)
            )
            found[f"{name}_memory_mib"] = end / (1 << 20)
            found[f"{name}_memory_growth"] = end / middle - 1.0
        return found

    async def _flood(self) -> dict[str, float]:
        """Return what a flood costs the submissions of another caller."""
        calm, flooding = self._jobs(CallerRole.USER, "user-0"), self._jobs(CallerRole.USER, "user-1")
        refusals, flooded = Counter[str](), 0
        answers_s: dict[str, list[float]] = {"alone": [], "beside": []}

        async def flood() -> None:
            nonlocal flooded
            while True:
                try:
                    await flooding.CreateJob(_request(1))
                    flooded += 1
                except grpc.aio.AioRpcError as error:
                    refusals[from_rpc_error(error).reason] += 1

        async def submit(how: str) -> None:
            ends_s = time.monotonic() + self._size.flood_round_s
            while time.monotonic() < ends_s:
                asked_s = time.monotonic()
                await calm.CreateJob(_request(1))
                answers_s[how].append(time.monotonic() - asked_s)
                await asyncio.sleep(_COMMAND_S)

        for _ in range(self._size.flood_rounds):
            await submit("alone")
            callers = [asyncio.ensure_future(flood()) for _ in range(_FLOODERS)]
            await submit("beside")
            for caller in callers:
                caller.cancel()
            await asyncio.gather(*callers, return_exceptions=True)
            # Until the jobs of the flood have ended.
            await asyncio.sleep(self._size.runs_s + 1.0)
        alone_s, beside_s = (_COMMAND_S + statistics.mean(answers_s[how]) for how in ("alone", "beside"))
        return {
            "calm_alone_p50_ms": 1e3 * quantile(answers_s["alone"], 0.5),
            "calm_beside_flood_p50_ms": 1e3 * quantile(answers_s["beside"], 0.5),
            "calm_beside_flood_p99_ms": 1e3 * quantile(answers_s["beside"], 0.99),
            "flood_accepted": float(flooded),
            "flood_refused": float(sum(refusals.values())),
            "flood_cost": 1.0 - alone_s / beside_s,
        }


async def _all_of(tasks: Sequence[asyncio.Future[None]], served: Sequence[asyncio.Future[None]]) -> None:
    """Wait for all tasks. Raises BenchClusterError where a node ends before."""
    done = asyncio.ensure_future(_gathered(tasks))
    await asyncio.wait([done, *served], return_when=asyncio.FIRST_COMPLETED)
    if not done.done():
        done.cancel()
        with suppress(asyncio.CancelledError):
            await done
        failed = next(task for task in served if task.done())
        raise BenchClusterError(f"a hollow node has ended: {failed.exception()}")
    await done


async def _gathered(tasks: Sequence[asyncio.Future[None]]) -> None:
    await asyncio.gather(*tasks)


def _request(gpus: int) -> job_service_pb2.CreateJobRequest:
    return job_service_pb2.CreateJobRequest(spec=spec_of(gpus), request_id=str(uuid.uuid4()))


def _resident(pid: int) -> int:
    """Return the resident memory of a process in bytes."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()
