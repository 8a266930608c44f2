"""`ganger bench submit`: how many submissions a second are accepted and durable, and how soon a submitted job runs.

Throughput: a real master in a process of its own with SQLite on disk, called at concurrency 1 and 32, by turns with an
empty method on the same server with the same messages; then the master is killed in the middle of a storm and
started again, and every acknowledged job must be there. Latency: a cluster of one daemon is brought up, and the time
from the call (or from starting the command) to the first instruction of the job's own program is taken.
"""

from __future__ import annotations

import asyncio
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import grpc
from ganger.v1 import job_pb2, job_service_pb2, job_service_pb2_grpc, node_pb2, node_pb2_grpc, resources_pb2
from ganger.wire.channels import open_aio_channel, open_channel
from ganger.wire.endpoints import Endpoint, EndpointError, read_endpoint

from benchmarks import master_server as server
from benchmarks.report import AtLeast, AtMost, quantile, report
from benchmarks.verdicts import concurrently, serving

ROUNDS: Final = 5
PER_ROUND_ALONE: Final = 200
PER_ROUND_TOGETHER: Final = 800
STARTS: Final = 30
_STORM_S: Final = 1.0
_WAIT_S: Final = 60.0


def main(rounds: int = ROUNDS, starts: int = STARTS, quick: bool = False) -> dict[str, Any]:
    """The whole report; `quick` takes one round and few starts."""
    if quick:
        rounds, starts = 1, 3
    with (
        tempfile.TemporaryDirectory(prefix="ganger-bench-") as directory,
        serving(Path(directory), 2, 0) as endpoint,
    ):
        figures, samples = asyncio.run(_throughput(endpoint, rounds))
    with tempfile.TemporaryDirectory(prefix="ganger-bench-") as directory:
        figures |= _kill(Path(directory))
    limits: dict[str, AtLeast | AtMost] = {
        "together_over_empty": AtLeast(0.7),
        "alone_over_empty": AtLeast(0.4),
        "together_per_second": AtLeast(1_000.0),
        "lost_at_kill": AtMost(0.0),
        "sdk_start_p50_ms": AtMost(40.0),
        "sdk_start_p99_ms": AtMost(100.0),
        # The planner suggests the place.
        "planned_sdk_start_p50_ms": AtMost(40.0),
        "planned_sdk_start_p99_ms": AtMost(100.0),
        # The call, and the command's import time.
        "cli_start_p50_ms": AtMost(40.0 + 150.0),
        "cli_start_p99_ms": AtMost(100.0 + 150.0),
    }
    with tempfile.TemporaryDirectory(prefix="ganger-bench-") as directory:
        started, more = _starts(Path(directory), {"sdk": starts, "cli": max(3, starts // 3)})
    samples += more
    figures |= started
    with tempfile.TemporaryDirectory(prefix="ganger-bench-") as directory:
        planned, more = _starts(Path(directory), {"sdk": starts}, "ganger")
    samples += more
    figures |= {f"planned_{name}": figure for name, figure in planned.items()}
    return report("submit", figures, limits, samples)


async def _throughput(endpoint: Endpoint, rounds: int) -> tuple[dict[str, float], list[dict[str, Any]]]:
    samples: list[dict[str, Any]] = []
    ratios: dict[int, list[float]] = {1: [], 32: []}
    rates: dict[int, list[float]] = {1: [], 32: []}
    latencies: dict[int, list[float]] = {1: [], 32: []}
    async with open_aio_channel(endpoint) as channel:
        stub = job_service_pb2_grpc.JobServiceStub(channel)
        empty = channel.unary_unary(
            f"/{server.EMPTY}/Job",
            request_serializer=job_service_pb2.CreateJobRequest.SerializeToString,
            response_deserializer=job_pb2.Job.FromString,
        )

        async def ask_empty(request: job_service_pb2.CreateJobRequest) -> Any:
            return await empty(request)

        async def ask(request: job_service_pb2.CreateJobRequest) -> Any:
            return await stub.CreateJob(request)

        await concurrently(ask_empty, _requests(100), 32)
        await concurrently(ask, _requests(100), 32)
        for number in range(rounds):
            for concurrency, count in ((1, PER_ROUND_ALONE), (32, PER_ROUND_TOGETHER)):
                taken: dict[str, float] = {}
                paths = [("empty", ask_empty), ("submit", ask)]
                for path, call in paths if number % 2 == 0 else paths[::-1]:
                    seconds, each, _ = await concurrently(call, _requests(count), concurrency)
                    taken[path] = seconds
                    samples.append(
                        {"path": path, "concurrency": concurrency, "round": number, "count": count, "seconds": seconds}
                    )
                    if path == "submit":
                        latencies[concurrency] += each
                ratios[concurrency].append(taken["empty"] / taken["submit"])
                rates[concurrency].append(count / taken["submit"])
    figures = {
        "together_over_empty": statistics.median(ratios[32]),
        "alone_over_empty": statistics.median(ratios[1]),
        "together_per_second": statistics.median(rates[32]),
        "alone_per_second": statistics.median(rates[1]),
        "together_p99_ms": 1e3 * quantile(latencies[32], 0.99),
        "alone_p50_ms": 1e3 * statistics.median(latencies[1]),
        "alone_p99_ms": 1e3 * quantile(latencies[1], 0.99),
    }
    return figures, samples


def _requests(count: int) -> list[job_service_pb2.CreateJobRequest]:
    spec = _spec(("python", "train.py"))
    return [job_service_pb2.CreateJobRequest(spec=spec, request_id=str(uuid.uuid4())) for _ in range(count)]


def _spec(command: Sequence[str], gpus: int = 1) -> job_pb2.JobSpec:
    shape = resources_pb2.TaskShape(gpus=1, millicores=1_000, memory_bytes=64 << 20)
    return job_pb2.JobSpec(
        display_name="bench",
        command=command,
        working_directory="/tmp",
        environment={"PATH": os.environ.get("PATH", "/usr/bin:/bin")},
        roles=[resources_pb2.Role(name="worker", tasks=gpus, shape=shape)],
    )


def _kill(directory: Path) -> dict[str, float]:
    """Kills a master in a storm of submissions and counts acknowledged jobs that are gone afterwards."""
    acknowledged: list[str] = []
    command = ["master", "--state-dir", str(directory / "state"), "--no-scheduler-host", "--log-level", "error"]
    with _program(*command) as master:
        endpoint = _endpoint_in(directory / "state")
        ended = threading.Event()

        def storm() -> None:
            with open_channel(endpoint, (("grpc.enable_retries", 0),)) as channel:
                stub = job_service_pb2_grpc.JobServiceStub(channel)
                while not ended.is_set():
                    try:
                        acknowledged.append(stub.CreateJob(_requests(1)[0], timeout=5.0).name)
                    except grpc.RpcError:
                        return

        threads = [threading.Thread(target=storm) for _ in range(8)]
        for thread in threads:
            thread.start()
        time.sleep(_STORM_S)
        master.send_signal(signal.SIGKILL)
        master.wait()
        ended.set()
        for thread in threads:
            thread.join()
    # What the killed master left behind would be taken for the new one's.
    (directory / "state" / "endpoint.json").unlink()
    with _program(*command), open_channel(_endpoint_in(directory / "state")) as channel:
        stub = job_service_pb2_grpc.JobServiceStub(channel)
        kept: set[str] = set()
        token = ""
        while True:
            page = stub.ListJobs(job_service_pb2.ListJobsRequest(page_size=1_000, page_token=token))
            kept |= {job.name for job in page.jobs}
            token = page.next_page_token
            if not token:
                break
    return {"acknowledged_before_kill": len(acknowledged), "lost_at_kill": len(set(acknowledged) - kept)}


def _starts(
    directory: Path, starts: Mapping[str, int], policy: str = "fifo"
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Seconds from the call to the first instruction of the program, the first time and warm, so often by SDK and
    command line, under a policy.

    The job's program is a shell that writes the time into a file, so that no interpreter's start is measured that is
    not ours."""
    state = directory / "cluster"
    samples: list[dict[str, Any]] = []
    began = time.perf_counter()
    one_node = ("--nodes", "1", "--virtual-gpus", "4", "--policy", policy)
    with _program("up", "--state-dir", str(state), *one_node, "--cancel-jobs"):
        endpoint = _endpoint_in(state)
        with open_channel(endpoint) as channel:
            _wait_for_a_node(channel)
            up_s = time.perf_counter() - began
            stub = job_service_pb2_grpc.JobServiceStub(channel)

            def by_sdk(mark: Path) -> None:
                spec = _spec(_marking(mark))
                stub.CreateJob(job_service_pb2.CreateJobRequest(spec=spec, request_id=str(uuid.uuid4())))

            def by_command_line(mark: Path) -> None:
                submit = ["submit", "--gpus", "1", "--cpus-per-gpu", "1", "--memory", "64M", "--", *_marking(mark)]
                environment = {**os.environ, "GANGER_MASTER": str(endpoint.address), "GANGER_TOKEN": endpoint.token}
                subprocess.run(
                    [sys.executable, "-m", "ganger.cli.main", *submit],
                    env=environment,
                    check=True,
                    stdout=subprocess.DEVNULL,
                )

            for path, count in starts.items():
                submit = by_sdk if path == "sdk" else by_command_line
                for number in range(count + 1):
                    mark = directory / f"{path}-{number}"
                    submitted = time.clock_gettime(time.CLOCK_REALTIME)
                    submit(mark)
                    samples.append(
                        {
                            "path": path,
                            "policy": policy,
                            "start": "cold" if number == 0 and path == "sdk" else "warm",
                            "seconds": _first_instruction(mark) - submitted,
                        }
                    )
    warm = {path: [s["seconds"] for s in samples if s["path"] == path and s["start"] == "warm"] for path in starts}
    figures = {
        "cluster_up_s": up_s,
        "sdk_cold_start_ms": 1e3 * next(s["seconds"] for s in samples if s["start"] == "cold"),
    }
    for path, seconds in warm.items():
        figures[f"{path}_start_p50_ms"] = 1e3 * statistics.median(seconds)
        figures[f"{path}_start_p99_ms"] = 1e3 * quantile(seconds, 0.99)
    return figures, samples


def _marking(mark: Path) -> list[str]:
    return ["/bin/sh", "-c", f"date +%s.%N > {mark}.tmp; mv {mark}.tmp {mark}"]


def _first_instruction(mark: Path) -> float:
    end = time.monotonic() + _WAIT_S
    while not mark.exists():
        if time.monotonic() > end:
            raise RuntimeError(f"a job of the benchmark did not start within {_WAIT_S:.0f} s")
        time.sleep(0.001)
    return float(mark.read_text())


@contextmanager
def _program(*arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """A `ganger` program as a child, ended when the block is left."""
    child = subprocess.Popen([sys.executable, "-m", "ganger.cli.main", *arguments], stdout=subprocess.DEVNULL)
    try:
        yield child
    finally:
        if child.poll() is None:
            child.terminate()
            try:
                child.wait(20.0)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


def _endpoint_in(directory: Path) -> Endpoint:
    """What the master of a directory has written, once it serves."""
    end = time.monotonic() + _WAIT_S
    while True:
        try:
            return read_endpoint(directory)
        except EndpointError as error:
            if time.monotonic() > end:
                raise RuntimeError(f"the benchmark's master did not start: {error}") from error
            time.sleep(0.02)


def _wait_for_a_node(channel: grpc.Channel) -> None:
    stub = node_pb2_grpc.NodeServiceStub(channel)
    end = time.monotonic() + _WAIT_S
    while not any(
        node.state == node_pb2.Node.STATE_READY for node in stub.ListNodes(node_pb2.ListNodesRequest()).nodes
    ):
        if time.monotonic() > end:
            raise RuntimeError("the benchmark's daemon did not join its master")
        time.sleep(0.02)
