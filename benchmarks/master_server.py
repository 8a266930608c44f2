"""A real master for benchmarks: own process, SQLite on disk, filled with nodes and jobs, plus methods that do nothing.

`python -m benchmarks.master_server DIRECTORY NODES JOBS` prints `ready ADDRESS TOKEN` and serves until its standard
input closes. The empty methods take and give the same messages as the real ones, through the same server.
"""

from __future__ import annotations

import asyncio
import sys
import uuid
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import grpc
from ganger import program_setup
from ganger.cluster.resources import Claim, ConfigurationSet, DeviceGroup, LocalityLevel, Role, Socket, TaskShape
from ganger.v1 import job_pb2, job_service_pb2, scheduling_pb2
from ganger_master.app import Master
from ganger_master.config import Config
from ganger_master.core import commands
from ganger_master.core.answers import Refused, SessionAnswer
from ganger_master.core.job_spec import JobSpec

EMPTY: Final = "ganger.bench.Empty"
DEVICES: Final = 8
MILLICORES_PER_TASK: Final = 1_000
MEMORY_PER_TASK: Final = 1 << 30
# Sizes of gangs in devices, as often as in the large traces: most are small.
SIZES: Final = (1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 4, 4, 4, 8, 8, 8, 16, 32, 64)
_AT_ONCE: Final = 500


def configuration_set() -> ConfigurationSet:
    """Two sockets with four devices each."""
    return ConfigurationSet(
        "bench",
        "h100",
        DEVICES,
        device_memory_bytes=80 << 30,
        groups=(
            DeviceGroup(LocalityLevel.NVLINK, 0xFF),
            DeviceGroup(LocalityLevel.SOCKET, 0x0F),
            DeviceGroup(LocalityLevel.SOCKET, 0xF0),
        ),
        sockets=(Socket(32_000, 0x0F), Socket(32_000, 0xF0)),
        memory_bytes=1 << 40,
    )


def size_of(number: int) -> int:
    """Devices of the job with that number: known to both sides without asking."""
    return SIZES[(number * 7919) % len(SIZES)]


def roles_of(size: int) -> tuple[Role, ...]:
    return (Role("worker", size, TaskShape(1, MILLICORES_PER_TASK, MEMORY_PER_TASK)),)


def claim(node: str, mask: int) -> Claim:
    low, high = (mask & 0x0F).bit_count(), (mask & 0xF0).bit_count()
    return Claim(
        node,
        mask,
        (low * MILLICORES_PER_TASK, high * MILLICORES_PER_TASK),
        (low + high) * MEMORY_PER_TASK,
        0,
        (low + high,),
    )


async def _fill(master: Master, nodes: int, jobs: int) -> None:
    for start in range(1, jobs + 1, _AT_ONCE):
        _expect_none_refused(
            await master.writer.submit_all(
                [
                    commands.SubmitJob(JobSpec(("true",), roles_of(size_of(number))), str(uuid.uuid4()), "bench")
                    for number in range(start, min(start + _AT_ONCE, jobs + 1))
                ]
            )
        )
    names = [f"n{number:05}" for number in range(nodes)]
    for start in range(0, nodes, _AT_ONCE):
        part = names[start : start + _AT_ONCE]
        opened = await master.writer.submit_all(
            [
                commands.OpenSession(name, f"machine-{name}", configuration_set(), rack=f"r{int(name[1:]) // 32}")
                for name in part
            ]
        )
        sessions = [answer for answer in opened if isinstance(answer, SessionAnswer)]
        _expect_none_refused(opened)
        _expect_none_refused(
            await master.writer.submit_all(
                [commands.Observe(answer.node, answer.session, 1, 0, storage_proved=True) for answer in sessions]
            )
        )


def _expect_none_refused(answers: Sequence[object]) -> None:
    refused = next((answer for answer in answers if isinstance(answer, Refused)), None)
    assert refused is None, f"the benchmark's own cluster was refused: {refused}"


def _empty_handlers() -> grpc.GenericRpcHandler[Any, Any]:
    verdict = scheduling_pb2.Verdict(
        job="jobs/1000", approved=scheduling_pb2.Approval(epoch=1000, revision=2, view_version=100_000)
    )

    async def gang(request: scheduling_pb2.GangRequest, context: Any) -> scheduling_pb2.Verdict:
        return verdict

    async def job(request: job_service_pb2.CreateJobRequest, context: Any) -> job_pb2.Job:
        return job_pb2.Job(name="jobs/1000", uid="0" * 36, spec=request.spec, user="bench")

    return grpc.method_handlers_generic_handler(
        EMPTY,
        {
            "Gang": grpc.unary_unary_rpc_method_handler(
                gang, scheduling_pb2.GangRequest.FromString, scheduling_pb2.Verdict.SerializeToString
            ),
            "Job": grpc.unary_unary_rpc_method_handler(
                job, job_service_pb2.CreateJobRequest.FromString, job_pb2.Job.SerializeToString
            ),
        },
    )


async def _serve(directory: Path, nodes: int, jobs: int) -> None:
    config = Config(
        state_dir=directory / "state",
        listen=f"unix:{directory}/s",
        scheduler_host=False,
        # What is not kept for jobs ahead may be used out of turn, so that verdicts are not limited by turns.
        policy="backfill",
        lost_after_s=None,
    )
    master = Master(config, more_handlers=(_empty_handlers(),))
    await master.start()
    # No daemon calls for these nodes.
    state = master.writer.state
    state.settings = replace(state.settings, silent_margin_s=None)
    await _fill(master, nodes, jobs)
    # As a master does that has loaded its state.
    program_setup.settle()
    print(f"ready {master.address} {master.token}", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await master.stop()


if __name__ == "__main__":
    asyncio.run(_serve(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
