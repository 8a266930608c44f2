"""Partitions while everything breaks: by plans of all kinds no gang gets outside its partition."""

from __future__ import annotations

import pytest
from faultsim import faults
from faultsim.engine import Engine
from faultsim.fault_cluster import FaultCluster
from faultsim.rows_of_daemons import DaemonTurns
from faultsim.test_sharing_storms import SERVER
from ganger.cluster.resources import Role, TaskShape
from ganger_master.core.gang_model import Gang
from ganger_master.core.job_spec import JobSpec
from ganger_master.core.settings import CoreSettings
from ganger_master.core.tenancy import Partition

_GIB = 1 << 30
PARTITIONS = {
    "left": Partition(nodes=("n1", "n2"), gpus=6),
    "right": Partition(nodes=("n2", "n3"), priority=1, preemptible=False),
    "all": Partition(gpus_per_job=3),
}


@pytest.mark.parametrize("seed", range(8))
def test_in_a_storm_of_plans_no_gang_is_outside_its_partition(seed: int) -> None:
    settings = CoreSettings(lost_after_s=60.0, policy="las", partitions=PARTITIONS)
    cluster = FaultCluster(seed, [], settings, faults.storm(Engine(seed)))
    turns: dict[str, DaemonTurns] = {}
    for name in ("n1", "n2", "n3"):
        capabilities = {"packing": "yes", "rotation": "yes"}
        cluster.add_node(name, SERVER, capabilities, lambda daemon: DaemonTurns(daemon, turns))
    dice = cluster.engine.random
    cluster.run_for(5.0)
    cluster.unleash()
    cluster.unleash_planner(0.5)
    seen: set[tuple[str, str]] = set()
    for _ in range(14):
        gpus = dice.choice([1, 1, 2, 3])
        cluster.submit(
            JobSpec(
                ("train", str(dice.randint(20, 60))),
                (Role("worker", gpus, TaskShape(1, 1_000, 2 * _GIB)),),
                partition=dice.choice(["", *PARTITIONS]),
                gpu_memory_bytes=dice.choice([_GIB // 2, _GIB]),
                gpus_min=1,
                gpus_max=gpus + 1,
            )
        )
        for _ in range(10):
            # The invariants hold after every event; here it is seen that they are about something.
            cluster.run_for(1.0)
            if cluster.master.is_up:
                seen |= {(name, node) for gang in cluster.state.gangs.values() for name, node in _places(cluster, gang)}
    assert len({name for name, _ in seen}) >= 2
    outside = [(name, node) for name, node in seen if PARTITIONS[name].nodes and node not in PARTITIONS[name].nodes]
    assert not outside


def _places(cluster: FaultCluster, gang: Gang) -> list[tuple[str, str]]:
    job = cluster.state.jobs.get(gang.job)
    return [] if job is None else [(job.partition.name, claim.node) for claim in gang.claims]
