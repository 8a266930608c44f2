"""Gangs that share devices, move, grow and shrink by wild plans while everything breaks. `run(SEED)` replays a seed."""

from __future__ import annotations

import pytest
from faultsim import faults
from faultsim.engine import Engine
from faultsim.fault_cluster import FaultCluster, require_progress
from faultsim.rank_processes import OPAQUE
from faultsim.rows_of_daemons import DaemonTurns
from ganger.cluster.resources import Role, TaskShape
from ganger.cluster.topology import parse_topology
from ganger_master.core.job_spec import JobSpec
from ganger_master.core.settings import CoreSettings

_GIB = 1 << 30
SERVER = parse_topology("2x2", name="v4", millicores=16_000, memory_bytes=64 * _GIB, device_memory_bytes=4 * _GIB)


def run(seed: int, jobs: int, seconds: float, rotation: str = "yes", opaque: float = 0.0) -> FaultCluster:
    """A storm drawn from the seed, plans of all kinds, users who meddle; then everything heals and every job must
    end. Without `rotation` no daemon switches rows; `opaque` is the share of jobs that cannot rest."""
    storm = faults.storm(Engine(seed))
    cluster = FaultCluster(seed, [], CoreSettings(lost_after_s=60.0, residue_bytes=_GIB // 2), storm)
    turns: dict[str, DaemonTurns] = {}
    for name in ("n1", "n2", "n3"):
        cluster.add_node(
            name, SERVER, {"packing": "yes", "rotation": rotation}, lambda daemon: DaemonTurns(daemon, turns)
        )
    dice = cluster.engine.random
    cluster.physics.residue_bytes = 300 << 20
    cluster.daemons["n3"].measures = False
    cluster.run_for(5.0)
    cluster.unleash()
    cluster.unleash_users(20.0)
    cluster.unleash_planner(2.0)
    for _ in range(jobs):
        gpus = dice.choice([1, 1, 2, 2, 3, 4, 6])
        elastic = (dice.randint(1, gpus), gpus + dice.randint(0, 4)) if dice.random() < 0.4 else (0, 0)
        cluster.submit(
            JobSpec(
                (OPAQUE if opaque and dice.random() < opaque else "train", str(dice.randint(20, 100))),
                (Role("worker", gpus, TaskShape(1, 1_000, 2 * _GIB)),),
                priority=dice.choice([0, 0, 0, 5]),
                gpu_memory_bytes=dice.choice([0, _GIB // 2, _GIB, 2 * _GIB]),
                gpus_min=elastic[0],
                gpus_max=elastic[1],
                preemptible=dice.random() < 0.9,
                movable=dice.random() < 0.9,
            )
        )
        cluster.run_for(dice.uniform(0.0, 10.0))
    cluster.run_for(seconds)
    cluster.check()
    require_progress(cluster, 4_000.0)
    return cluster


@pytest.mark.parametrize("seed", range(12))
def test_a_short_storm_of_plans_breaks_no_rule_and_every_job_ends(seed: int) -> None:
    run(seed, jobs=8, seconds=100.0, rotation="no" if seed % 3 == 0 else "yes")


@pytest.mark.parametrize("seed", [51, 140, 144])
def test_gangs_over_several_nodes_that_share_by_turns_come_to_their_end(seed: int) -> None:
    """Storms in which such a gang once stood still for ever."""
    run(seed, jobs=10, seconds=200.0)


def test_a_job_that_left_its_node_set_runs_all_the_time_though_a_node_still_has_the_old_matrix() -> None:
    """A storm in which it was counted among them again."""
    run(1041, jobs=14, seconds=500.0)


def test_a_job_co_located_with_another_and_then_time_sliced_with_it_waits_for_it() -> None:
    """A storm in which both were on a device, by what they had been told before."""
    run(1013, jobs=14, seconds=500.0)


def test_a_gang_whose_machine_is_wiped_before_its_first_report_starts_over_from_the_source_of_its_migration() -> None:
    """A storm in which it did its first step twice, and the model did not know of the second start."""
    run(1449, jobs=14, seconds=500.0, rotation="no", opaque=0.2)


@pytest.mark.parametrize("seed", [1008, 1023])
def test_jobs_that_cannot_park_keep_no_other_job_from_its_time_slices(seed: int) -> None:
    """Storms in which some of them were admitted before the master knew."""
    cluster = run(seed, jobs=14, seconds=500.0, opaque=0.25)
    refused = {"turn_refused", "suspend_refused"}
    assert any(row.kind in refused for row in cluster.master.history)


@pytest.mark.chaos
@pytest.mark.parametrize("block", range(50))
def test_long_storms_of_plans_break_no_rule_and_every_job_ends(block: int) -> None:
    """With turns but in every fifth block; every second seed has jobs that cannot rest."""
    for seed in range(1_000 + 10 * block, 1_010 + 10 * block):
        try:
            run(seed, 14, 500.0, rotation="no" if block % 5 == 4 else "yes", opaque=0.2 if seed % 2 else 0.0)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
