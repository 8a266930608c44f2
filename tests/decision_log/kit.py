"""Recordings of simulated clusters under faults, and what a rerun finds in a file."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from faultsim import faults
from faultsim.engine import Engine
from faultsim.fault_cluster import FaultCluster
from ganger.cluster.resources import Role, TaskShape
from ganger.cluster.topology import parse_topology
from ganger_master.core.job_spec import JobSpec
from ganger_master.core.settings import CoreSettings
from ganger_master.decision_log.log_file import read_lines
from ganger_master.decision_log.recorder import DecisionRecording, Recorded
from ganger_master.decision_log.rerun import Decided, DecisionEntry, Differs, Rerun

GIB = 1 << 30
SERVER = parse_topology("2x2", name="v4", millicores=16_000, memory_bytes=64 * GIB, device_memory_bytes=2 * GIB)
SECRET = "hunter2-and-more"


@dataclass
class Found:
    """Of one rerun."""

    rerun: Rerun
    happened: list[DecisionEntry] = field(default_factory=list)

    @property
    def differences(self) -> list[Differs]:
        return [one for one in self.happened if isinstance(one, Differs)]

    @property
    def decided(self) -> list[Decided]:
        return [one for one in self.happened if isinstance(one, Decided)]


def rerun_of(path: Path) -> Found:
    rerun = Rerun(read_lines(path))
    return Found(rerun, list(rerun))


def stormy(seed: int, policy: str = "fifo", is_calm: bool = False) -> FaultCluster:
    """Three nodes, and faults of every kind unless it is calm."""
    storm = faults.NONE if is_calm else faults.storm(Engine(seed))
    nodes = [(name, SERVER) for name in ("n1", "n2", "n3")]
    settings = CoreSettings(lost_after_s=60.0, policy=policy, quota_devices={"ann": 6}, storage_token=SECRET)
    cluster = FaultCluster(seed, nodes, settings, storm)
    cluster.physics.residue_bytes = 300 << 20
    cluster.daemons["n3"].measures = False
    cluster.run_for(5.0)
    if not is_calm:
        cluster.unleash()
        cluster.unleash_users(15.0)
    return cluster


def busy(cluster: FaultCluster, jobs: int, seconds: float = 10.0) -> None:
    dice = cluster.engine.random
    for _ in range(jobs):
        cluster.submit(
            JobSpec(
                ("train", SECRET, str(dice.randint(10, 40))),
                (Role("worker", dice.choice([1, 2, 3, 4, 5, 8]), TaskShape(1, 2_000, 4 * GIB)),),
                environment={"TOKEN": SECRET},
                priority=dice.choice([0, 0, 5]),
                time_limit_s=dice.choice([None, None, 30.0]),
                gpu_memory_bytes=dice.choice([0, GIB, 2 * GIB]),
            ),
            dice.choice(["ann", "bob"]),
        )
        cluster.run_for(dice.uniform(0.0, seconds))


def busy_for(jobs: int, seconds: float) -> Callable[[FaultCluster], None]:
    """The story of that many jobs, and of some time behind them."""

    def tell(cluster: FaultCluster) -> None:
        busy(cluster, jobs)
        cluster.run_for(seconds)

    return tell


def recorded(
    directory: Path, cluster: FaultCluster, story: Callable[[FaultCluster], None], **options: bool
) -> Recorded:
    """What the cluster's master decides while the story is told, by the production recorder."""

    async def tell() -> Recorded:
        master = cluster.master
        recording = DecisionRecording(directory, "test", **options)
        recording.begin(master.state, master.now())
        master.recorder = recording
        story(cluster)
        master.recorder = None
        recording.end(master.state if master.is_up else None, master.now(), "the story is over")
        return await recording.done

    return asyncio.run(tell())
