"""`ganger bench burst`: how many gangs a second start when 10,000 jobs are submitted to an idle cluster of 2,000 nodes.

The programs are those of a live cluster: the master with SQLite on disk, the default scheduler host and the planner.
This process submits ten arrays of 1,000 jobs, and acts as the daemons (`benchmarks.hollow_nodes`). A job's time to
start is from the call that submits the first array to the first order of its gang at a daemon.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import time
from typing import Any, Final

import grpc.aio
from ganger.v1 import array_pb2, job_pb2, job_service_pb2, job_service_pb2_grpc, resources_pb2
from ganger.wire.channels import open_aio_channel
from ganger.wire.endpoints import read_endpoint

from benchmarks import master_server as server
from benchmarks.bench_cluster import BenchCluster, BenchClusterError, used_s
from benchmarks.hollow_nodes import HollowNodes
from benchmarks.report import AtLeast, AtMost, quantile, report

NODES: Final = 2_000
ARRAYS: Final = 10
MEMBERS: Final = 1_000
# An order without and with a planner, and each policy with a way of its own to place pending jobs.
POLICIES: Final = ("fifo", "las2d", "drf", "ganger", "gandiva", "tetris", "optimus", "synergy")
# GPUs of the jobs of an array, one array after the other.
SIZES: Final = (1, 1, 2, 1, 1, 4, 1, 1, 2, 1)
_CHANNELS: Final = 8
_WAIT_S: Final = 600.0
# Nothing else is to happen while the burst is measured.
_POLL_S: Final = 3_600.0


def main(
    nodes: int = NODES, arrays: int = ARRAYS, members: int = MEMBERS, quick: bool = False, only: str = ""
) -> dict[str, Any]:
    """Return the report. `quick`: a small burst on a small cluster. `only`: one policy. Raises ValueError for a policy
    that is not measured."""
    if only and only not in POLICIES:
        raise ValueError(f"there is no case {only!r}: there are {', '.join(POLICIES)}")
    if quick:
        nodes, arrays, members = 100, 3, 100
    figures: dict[str, float] = {}
    samples: list[dict[str, Any]] = []
    for policy in [only] if only else POLICIES:
        with BenchCluster(nodes=0, gpus=0, cores=0, master=("--policy", policy)) as cluster:
            burst = asyncio.run(_Burst(cluster, nodes, arrays, members).run())
        figures |= {f"{policy}_{name}": value for name, value in burst.figures().items()}
        samples += [{"policy": policy, "job": job, "start_s": start_s} for job, start_s in burst.started_s.items()]
    limits: dict[str, AtLeast | AtMost] = {name: AtLeast(1_000.0) for name in figures if name.endswith("gangs_per_s")}
    return report("burst", {"nodes": nodes, "jobs": arrays * members, **figures}, limits, samples)


class _Burst:
    """One burst on one cluster: seconds from its begin to the start of each job, and processor seconds by program."""

    def __init__(self, cluster: BenchCluster, nodes: int, arrays: int, members: int) -> None:
        self._endpoint = read_endpoint(cluster.master)
        self._programs = {"hollow_nodes": os.getpid(), **cluster.program_ids()}
        self._nodes = nodes
        self._arrays, self._members = arrays, members
        self._began_s = self._submitted_s = 0.0
        self._all_started = asyncio.Event()
        self.started_s: dict[str, float] = {}
        self.used_s: dict[str, float] = {}

    async def run(self) -> _Burst:
        channels = [
            open_aio_channel(self._endpoint, (("grpc.use_local_subchannel_pool", 1),)) for _ in range(_CHANNELS)
        ]
        shared = itertools.islice(itertools.cycle(channels), self._nodes)
        nodes = HollowNodes(shared, wait_s=_POLL_S, started=self._note)
        await nodes.join()
        daemons = [asyncio.ensure_future(one) for one in nodes.serve()]
        before = {name: used_s(pid) for name, pid in self._programs.items()}
        self._began_s = time.perf_counter()
        await self._submit(job_service_pb2_grpc.JobServiceStub(channels[0]))
        self._submitted_s = time.perf_counter() - self._began_s
        waiting = asyncio.create_task(self._all_started.wait())
        await asyncio.wait([waiting, *daemons], timeout=_WAIT_S, return_when=asyncio.FIRST_COMPLETED)
        self.used_s = {name: used_s(pid) - before[name] for name, pid in self._programs.items()}
        for task in (waiting, *daemons):
            task.cancel()
        ends = await asyncio.gather(*daemons, return_exceptions=True)
        for channel in channels:
            await channel.close(None)
        for error in ends:
            if isinstance(error, grpc.aio.AioRpcError):
                raise BenchClusterError(f"a hollow node was refused: {error.details()}")
        if not self._all_started.is_set():
            raise BenchClusterError(f"{len(self.started_s)} of {self._arrays * self._members} jobs have started")
        return self

    def figures(self) -> dict[str, float]:
        times_s, count = list(self.started_s.values()), len(self.started_s)
        return {
            "gangs_per_s": count / max(times_s),
            "start_p50_s": quantile(times_s, 0.50),
            "start_p99_s": quantile(times_s, 0.99),
            "submitted_s": self._submitted_s,
            **{f"{name}_ms_per_gang": 1e3 * seconds / count for name, seconds in self.used_s.items()},
        }

    def _note(self, job: str) -> None:
        self.started_s.setdefault(job, time.perf_counter() - self._began_s)
        if len(self.started_s) == self._arrays * self._members:
            self._all_started.set()

    async def _submit(self, jobs: Any) -> None:
        for number in range(self._arrays):
            await jobs.CreateArray(
                job_service_pb2.CreateArrayRequest(
                    spec=spec_of(SIZES[number % len(SIZES)]),
                    members=[array_pb2.ArrayMember(index=index) for index in range(self._members)],
                )
            )


def spec_of(gpus: int) -> job_pb2.JobSpec:
    shape = resources_pb2.TaskShape(gpus=1, millicores=server.MILLICORES_PER_TASK, memory_bytes=server.MEMORY_PER_TASK)
    return job_pb2.JobSpec(
        command=["python", "train.py"],
        working_directory="/tmp",
        roles=[resources_pb2.Role(name="worker", tasks=gpus, shape=shape)],
    )


if __name__ == "__main__":
    print(json.dumps(main()))
