"""Faults of every kind against the production core, judged by separate oracles. A failing seed replays: `run(SEED)`."""

from __future__ import annotations

import dataclasses

import pytest
from faultsim import faults
from faultsim.engine import Engine
from faultsim.fault_cluster import FaultCluster, require_progress
from ganger.cluster.resources import Locality, LocalityLevel, Role, TaskShape
from ganger.cluster.topology import parse_topology
from ganger_master.core.events import HistoryRow
from ganger_master.core.job_spec import JobSpec
from ganger_master.core.settings import CoreSettings
from msgspec.structs import replace

_GIB = 1 << 30
SERVER = parse_topology("2x2", name="v4", millicores=16_000, memory_bytes=64 * _GIB, device_memory_bytes=2 * _GIB)


def run(seed: int, jobs: int, seconds: float, **more: float) -> FaultCluster:
    """A storm drawn from the seed, and `more` faults, users who meddle, then everything heals and every job must
    end."""
    storm = dataclasses.replace(faults.storm(Engine(seed)), **more)
    nodes = [(name, SERVER) for name in ("n1", "n2", "n3")]
    cluster = FaultCluster(seed, nodes, CoreSettings(lost_after_s=60.0), storm)
    dice = cluster.engine.random
    # What processes keep of their devices at OFFLOAD; one node cannot tell, and more is presumed there.
    cluster.physics.residue_bytes = 300 << 20
    cluster.physics.memory_used = 0.25
    cluster.daemons["n3"].measures = False
    cluster.run_for(5.0)
    cluster.unleash()
    cluster.unleash_users(15.0)
    for _ in range(jobs):
        shape = TaskShape(1, 2_000, 4 * _GIB)
        cluster.submit(
            JobSpec(
                ("train", str(dice.randint(20, 80))),
                (Role("worker", dice.choice([1, 2, 3, 4, 5, 8]), shape),),
                priority=dice.choice([0, 0, 5]),
                gpu_memory_bytes=dice.choice([0, _GIB, 2 * _GIB]),
            )
        )
        cluster.run_for(dice.uniform(0.0, 20.0))
    cluster.run_for(seconds)
    cluster.check()
    require_progress(cluster, 4_000.0)
    return cluster


def run_elastic(seed: int, jobs: int, seconds: float) -> FaultCluster:
    """The same with jobs that users give other numbers of devices as they run, on devices with room for two worlds of
    some of them and not of others."""
    cluster = FaultCluster(
        seed,
        [(name, SERVER) for name in ("n1", "n2", "n3")],
        CoreSettings(lost_after_s=60.0),
        faults.storm(Engine(seed)),
    )
    dice = cluster.engine.random
    cluster.physics.residue_bytes = 100 << 20
    cluster.physics.memory_used = 0.25
    for daemon in cluster.daemons.values():
        daemon.offers = replace(daemon.offers, resize=True, resize_divides=24)
    cluster.run_for(5.0)
    cluster.unleash()
    cluster.unleash_users(40.0)
    cluster.unleash_resizes(6.0)
    for _ in range(jobs):
        least, most = dice.choice([(1, 4), (2, 8), (1, 12), (3, 6)])
        role = Role("worker", least, TaskShape(1, 2_000, 4 * _GIB))
        memory = dice.choice([0, _GIB // 4, _GIB])
        command = ("train", str(dice.randint(40, 120)))
        cluster.submit(JobSpec(command, (role,), gpu_memory_bytes=memory, gpus_min=least, gpus_max=most))
        cluster.run_for(dice.uniform(0.0, 20.0))
    cluster.run_for(seconds)
    cluster.check()
    require_progress(cluster, 4_000.0)
    return cluster


@pytest.mark.parametrize("seed", range(12))
def test_a_short_storm_over_jobs_that_change_their_size_breaks_no_rule_and_every_job_ends(seed: int) -> None:
    cluster = run_elastic(seed, jobs=5, seconds=150.0)
    assert any(row.kind == "resize_begun" for row in cluster.master.history)


def run_roles(seed: int, jobs: int, seconds: float) -> FaultCluster:
    """Jobs of servers and workers whose users change the numbers of both, under faults of all kinds."""
    nodes = [(name, SERVER) for name in ("n1", "n2", "n3")]
    cluster = FaultCluster(seed, nodes, CoreSettings(lost_after_s=60.0), faults.storm(Engine(seed)))
    dice = cluster.engine.random
    cluster.run_for(5.0)
    cluster.unleash()
    cluster.unleash_users(40.0)
    cluster.unleash_resizes(5.0)
    for _ in range(jobs):
        servers = Role("ps", 1, TaskShape(0, 1_000, _GIB), 1, dice.randint(1, 3))
        workers = Role("worker", 1, TaskShape(1, 2_000, 4 * _GIB), 1, dice.randint(2, 6))
        command = ("train", str(dice.randint(40, 120)))
        cluster.submit(JobSpec(command, (servers, workers), gpu_memory_bytes=dice.choice([0, _GIB // 4])))
        cluster.run_for(dice.uniform(0.0, 20.0))
    cluster.run_for(seconds)
    cluster.check()
    require_progress(cluster, 4_000.0)
    return cluster


@pytest.mark.parametrize("seed", range(8))
def test_a_short_storm_over_jobs_whose_roles_change_breaks_no_rule_and_every_job_ends(seed: int) -> None:
    cluster = run_roles(seed, jobs=5, seconds=150.0)
    stopped = [row for row in cluster.master.history if row.figures.get("goal") == "RESIZE"]
    assert {row.kind for row in stopped} >= {"suspend_ordered"}


@pytest.mark.chaos
@pytest.mark.parametrize("block", range(10))
def test_long_storms_over_jobs_whose_roles_change_break_no_rule_and_every_job_ends(block: int) -> None:
    for seed in range(9_000 + 10 * block, 9_010 + 10 * block):
        try:
            run_roles(seed, jobs=8, seconds=600.0)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error


@pytest.mark.chaos
@pytest.mark.parametrize("block", range(20))
def test_long_storms_over_jobs_that_change_their_size_break_no_rule_and_every_job_ends(block: int) -> None:
    for seed in range(5_000 + 10 * block, 5_010 + 10 * block):
        try:
            run_elastic(seed, jobs=8, seconds=600.0)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error


@pytest.mark.parametrize("seed", range(60))
def test_a_short_storm_breaks_no_rule_and_every_job_ends(seed: int) -> None:
    run(seed, jobs=6, seconds=150.0)


@pytest.mark.parametrize("seed", range(20))
def test_a_storm_in_which_the_store_takes_nothing_now_and_then_breaks_no_rule_and_every_job_ends(seed: int) -> None:
    run(seed, jobs=6, seconds=150.0, failed_commit=0.02)


@pytest.mark.parametrize("seed", range(20))
def test_a_storm_in_which_the_clock_of_the_master_is_set_breaks_no_rule_and_every_job_ends(seed: int) -> None:
    run(seed, jobs=6, seconds=150.0, clock_set_seconds=20.0, clock_jump_seconds=3_600.0)


@pytest.mark.chaos
@pytest.mark.parametrize("block", range(40))
def test_long_storms_break_no_rule_and_every_job_ends(block: int) -> None:
    for seed in range(1_000 + 10 * block, 1_010 + 10 * block):
        try:
            run(seed, jobs=12, seconds=600.0)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error


def test_the_same_seed_gives_the_same_run() -> None:
    one, other = run(7, jobs=4, seconds=60.0), run(7, jobs=4, seconds=60.0)
    assert one.master.history == other.master.history
    assert one.master.durable == other.master.durable
    assert one.oracle.steps == other.oracle.steps


def test_how_long_a_job_will_run_changes_no_decision_before_it_ends() -> None:
    def decisions(steps: int) -> tuple[list[HistoryRow], float]:
        cluster = FaultCluster(3, [("n1", SERVER), ("n2", SERVER)], CoreSettings(policy="backfill"))
        cluster.run_for(5.0)
        dice = cluster.engine.random
        for number in range(12):
            # On one node, so that all its pieces are free at once when it has ended.
            role = Role("worker", dice.choice([1, 2, 3, 4]), TaskShape(1, 2_000, 4 * _GIB))
            command = ("train", str(steps if number == 1 else 30))
            cluster.submit(JobSpec(command, (role,), locality=Locality(widest=LocalityLevel.NODE)))
            cluster.run_for(dice.uniform(0.0, 5.0))
        ended = cluster.run_until(lambda: cluster.oracle.trainings["uid-2"].step == steps, 300.0)
        assert ended
        return cluster.master.history, cluster.master.now()

    (short, ends), (long, ends_later) = decisions(60), decisions(80)
    # Until its last step, which comes after all submissions: the dice of the two runs differ from there on, before the
    # master knows of its end.
    before = [row for row in short if row.time < ends]
    assert ends < ends_later
    assert before == long[: len(before)]
    assert sum(row.kind == "gang_approved" for row in before) >= 3
