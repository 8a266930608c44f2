"""`ganger replay --policy`: every policy can be asked about every recording, whatever policy was recorded."""

from __future__ import annotations

from pathlib import Path

import pytest
from decision_log.kit import GIB, SERVER, recorded
from faultsim import faults
from faultsim.fault_cluster import FaultCluster
from faultsim.rows_of_daemons import DaemonTurns
from ganger.cluster.resources import Role, TaskShape
from ganger_master.core.job_spec import JobSpec
from ganger_master.core.settings import CoreSettings
from ganger_master.decision_log.log_file import read_lines
from ganger_master.decision_log.replay_findings import Counterfactual
from ganger_master.decision_log.rerun import Rerun
from ganger_master.policies import NAMES, ResizeByOptimus, policy_named

COMPOSED = (
    "las+defrag",
    "ganger+defrag",
    "las+elastic",
    "las+packs",
    "ganger+synergy-tune",
    "tiresias+best-fit+synergy-greedy",
    "srtf+defrag",
)
ALIASES = ("backfill", "las2d", "las2d-gittins")
LIVE = [
    name
    for name in (*NAMES, *COMPOSED)
    if name not in ALIASES
    and not (policy := policy_named(name)).order.knows_durations
    and not policy.has(ResizeByOptimus)
]

# Recordings of `make test`, one of each kind of policy; `make chaos` has the others.
RECORDED = ("fifo-backfill", "las+elastic", "las+packs", "drf", "gandiva", "ganger+defrag", "synergy")


def eventful(seed: int, policy: str) -> FaultCluster:
    """Three nodes, where gangs are time-sliced, co-located, moved, suspended and resized by random plans."""
    settings = CoreSettings(lost_after_s=60.0, policy=policy, quota_devices={"ann": 6}, residue_bytes=GIB // 4)
    cluster = FaultCluster(seed, [], settings, faults.NONE)
    turns: dict[str, DaemonTurns] = {}
    for name in ("n1", "n2", "n3"):
        cluster.add_node(name, SERVER, {"packing": "yes", "rotation": "yes"}, lambda daemon: DaemonTurns(daemon, turns))
    cluster.physics.residue_bytes = 100 << 20
    cluster.run_for(5.0)
    cluster.unleash_users(40.0)
    cluster.unleash_planner(2.0, turns=0.8)
    return cluster


def many_jobs(cluster: FaultCluster) -> None:
    dice = cluster.engine.random
    for _ in range(14):
        gpus = dice.choice([1, 1, 2, 2, 3, 4, 6])
        elastic = (1, gpus + 2) if dice.random() < 0.3 else (0, 0)
        cluster.submit(
            JobSpec(
                ("train", str(dice.randint(100, 400))),
                (Role("worker", gpus, TaskShape(1, 1_000, 2 * GIB)),),
                priority=dice.choice([0, 0, 5]),
                gpu_memory_bytes=dice.choice([0, GIB // 2]),
                gpus_min=elastic[0],
                gpus_max=elastic[1],
            ),
            dice.choice(["ann", "bob"]),
        )
        cluster.run_for(dice.uniform(0.0, 5.0))
    cluster.run_for(100.0)


def shared_devices(path: Path) -> int:
    """The most jobs of the recording that were time-sliced at once, or co-located."""
    rerun, most = Rerun(read_lines(path)), 0
    for _ in rerun:
        if rerun.state is not None:
            gangs = rerun.state.gangs.values()
            most = max(most, sum([bool(gang.node_set or gang.claims[0].shared_mask) for gang in gangs]))
    return most


@pytest.mark.parametrize(
    "policy", [name if name in RECORDED else pytest.param(name, marks=pytest.mark.chaos) for name in LIVE]
)
def test_every_policy_answers_on_a_recording_made_under_any_policy(tmp_path: Path, policy: str) -> None:
    first = 100 * LIVE.index(policy)
    made = (recorded(tmp_path, eventful(seed, policy), many_jobs).path for seed in range(first, first + 10))
    path = next(path for path in made if shared_devices(path) >= 3)
    rerun, others = Rerun(read_lines(path)), [Counterfactual(name) for name in LIVE]
    for entry in rerun:
        for other in others:
            other.record(entry, rerun.state)
    assert all(other.verdicts or other.passes for other in others)
