"""A real master in this process on a Unix socket, and daemons that only speak."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc.aio
from ganger.agent.v1 import agent_pb2, agent_pb2_grpc
from ganger.cluster.resources import ConfigurationSet, Socket
from ganger.v1 import job_pb2, job_service_pb2, job_service_pb2_grpc, node_pb2_grpc, resources_pb2, scheduling_pb2_grpc
from ganger.wire import resource_messages as convert
from ganger.wire import times
from ganger.wire.channels import open_aio_channel
from ganger.wire.endpoints import Endpoint
from ganger_master.app import Master
from ganger_master.config import Config
from ganger_master.store.tables import Store

WAIT_S = 10.0


@dataclass
class Served:
    """A running master and stubs towards it."""

    master: Master
    channel: grpc.aio.Channel
    jobs: job_service_pb2_grpc.JobServiceAsyncStub = field(init=False)
    nodes: node_pb2_grpc.NodeServiceAsyncStub = field(init=False)
    scheduling: scheduling_pb2_grpc.SchedulingServiceAsyncStub = field(init=False)
    agents: agent_pb2_grpc.AgentServiceAsyncStub = field(init=False)

    def __post_init__(self) -> None:
        self.jobs = job_service_pb2_grpc.JobServiceStub(self.channel)  # type: ignore[assignment]
        self.nodes = node_pb2_grpc.NodeServiceStub(self.channel)  # type: ignore[assignment]
        self.scheduling = scheduling_pb2_grpc.SchedulingServiceStub(self.channel)  # type: ignore[assignment]
        self.agents = agent_pb2_grpc.AgentServiceStub(self.channel)  # type: ignore[assignment]

    def is_held(self, node: str) -> bool:
        """Whether the node's poll has arrived and waits."""
        assert self.master._server is not None
        return self.master._server.agents.is_held(node)

    async def submit(self, spec: job_pb2.JobSpec | None = None, request_id: str = "") -> job_pb2.Job:
        request = job_service_pb2.CreateJobRequest(spec=spec or spec_of(), request_id=request_id or str(uuid.uuid4()))
        return await self.jobs.CreateJob(request)


@asynccontextmanager
async def serving(directory: Path, store: Store | None = None, **more: object) -> AsyncIterator[Served]:
    """A master on DIRECTORY/s; `store` instead of SQLite; `more` are fields of Config."""
    config = Config(
        state_dir=directory / "state",
        listen=f"unix:{directory}/s",
        **{"scheduler_host": False, "policy": "fifo-backfill", **more},  # type: ignore[arg-type]
    )
    master = Master(config, store=store)
    await master.start()
    channel = open_aio_channel(Endpoint(master.address, master.token), (("grpc.enable_retries", 0),))
    try:
        yield Served(master, channel)
    finally:
        await channel.close(None)
        await master.stop()


def spec_of(gpus: int = 1, name: str = "test", **more: object) -> job_pb2.JobSpec:
    role = resources_pb2.Role(
        name="worker", tasks=gpus, shape=resources_pb2.TaskShape(gpus=1, millicores=2000, memory_bytes=1 << 30)
    )
    return job_pb2.JobSpec(
        display_name=name,
        command=["python", "train.py"],
        working_directory="/tmp",
        roles=[role],
        **more,  # type: ignore[arg-type]
    )


def configuration_set(name: str = "four", devices: int = 4) -> ConfigurationSet:
    return ConfigurationSet(
        name,
        "virtual",
        devices,
        device_memory_bytes=1 << 30,
        sockets=(Socket(8000, (1 << devices) - 1),),
        memory_bytes=64 << 30,
    )


@dataclass
class Speaker:
    """The wire side of a daemon: a session and its polls; it runs nothing."""

    served: Served
    node: str
    session: str = ""
    observation: int = 0
    desired_version: int = 0
    peer_address: str = "127.0.0.1:1"
    machine: str = ""
    # Whether it keeps checkpoints on its disk, and does not see the storage.
    keeps_checkpoints: bool = False

    async def open(self, storage_token: str = "") -> agent_pb2.Session:
        session = await self.served.agents.CreateSession(
            agent_pb2.CreateSessionRequest(
                node=f"nodes/{self.node}",
                machine_uuid=self.machine or f"machine-of-{self.node}",
                boot_id="boot",
                configuration_set=convert.configuration_set_to_wire(configuration_set()),
                peer_address=self.peer_address,
                stream_address="127.0.0.1:2",
                capabilities={
                    "virtual_devices": "true",
                    **({"disk_checkpoints": "yes"} if self.keeps_checkpoints else {}),
                },
                version="test",
                storage_token=storage_token,
            )
        )
        self.session = session.session
        return session

    async def reconcile(
        self,
        gangs: list[agent_pb2.ObservedGang] | None = None,
        max_wait_seconds: float = 0.0,
        timeout: float = WAIT_S,
        kept: list[agent_pb2.KeptCheckpoint] | None = None,
    ) -> agent_pb2.ReconcileResponse:
        """One call; with `gangs` the complete observed set, without it an unchanged one."""
        if gangs is not None:
            self.observation += 1
        response = await self.served.agents.Reconcile(
            agent_pb2.ReconcileRequest(
                session=self.session,
                observation=self.observation,
                desired_version=self.desired_version,
                changed=gangs is not None,
                gangs=gangs or [],
                max_wait=times.duration(max_wait_seconds),
                storage_proved=not self.keeps_checkpoints,
                kept_checkpoints=kept or [],
            ),
            timeout=timeout,
        )
        self.desired_version = response.desired_version
        return response

    async def join(self) -> agent_pb2.Session:
        session = await self.open()
        await self.open(session.storage_token)
        await self.reconcile([])
        return session


async def until(holds: Callable[[], bool], seconds: float = WAIT_S) -> None:
    """Waits for a condition; fails after a deadline."""
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    while not holds():
        assert loop.time() < end, "the condition did not come true in time"
        await asyncio.sleep(0.005)
