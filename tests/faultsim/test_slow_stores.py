"""Storms behind a store that takes seconds for a commit, with alarms that are late: nothing is held twice, nothing is
lost, and a job for which there are devices gets them soon. A failing seed replays: `run(SEED, ...)`."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
from faultsim import faults
from faultsim.engine import Engine
from faultsim.fault_cluster import FaultCluster, require_progress
from faultsim.faults import Faults
from faultsim.rows_of_daemons import DaemonTurns
from ganger.cluster.resources import Role, TaskShape
from ganger.cluster.topology import parse_topology
from ganger_master.core.approval import has_place
from ganger_master.core.ending import is_backing_off
from ganger_master.core.job_spec import JobSpec
from ganger_master.core.settings import CoreSettings

_GIB = 1 << 30
SERVER = parse_topology("2x2", name="v4", millicores=16_000, memory_bytes=64 * _GIB, device_memory_bytes=4 * _GIB)
SLOW = Faults(
    slow_commit=0.5, slow_commit_seconds=4.0, together=True, late_alarm=0.3, late_alarm_seconds=5.0, delay_seconds=0.1
)
# A turn and its answer take two commits, each behind another, and a lease or an alarm may come between.
_LONGEST_S = 20.0


@dataclass
class Watch:
    """Looks every second at the head of the queue: how long it has waited beside a place where it could start."""

    cluster: FaultCluster
    since: dict[int, float] = field(default_factory=dict)
    longest: float = 0.0

    def look(self) -> None:
        state, now = self.cluster.state, self.cluster.engine.now
        head = next(iter(state.queue.waiting), 0)
        if self.cluster.master.is_up and head and not is_backing_off(state.jobs[head]):
            is_free = has_place(state, state.jobs[head], self.cluster.master.now())
            since = self.since.get(head, now)
            self.since = {head: since} if is_free else {}
            waited = now - since if is_free else 0.0
            self.longest = max(self.longest, waited)
            assert waited <= _LONGEST_S, f"jobs/{head} waits for {waited:g} s beside free devices"
        else:
            self.since = {}
        self.cluster.engine.after(1.0, self.look)


def job_of(gpus: int, steps: int) -> JobSpec:
    return JobSpec(("train", str(steps)), (Role("worker", gpus, TaskShape(1, 1_000, 2 * _GIB)),), gpu_memory_bytes=_GIB)


def run_watched(seed: int, policy: str, jobs: int) -> float:
    """Nothing but the store and the alarms is slow: the longest that the head of the queue waited for nothing."""
    cluster = FaultCluster(seed, [("n1", SERVER), ("n2", SERVER)], CoreSettings(policy=policy), SLOW)
    watch = Watch(cluster)
    cluster.run_for(30.0)
    watch.look()
    dice = cluster.engine.random
    for _ in range(jobs):
        cluster.submit(job_of(dice.choice([1, 1, 2, 3, 4, 6, 8]), dice.randint(3, 30)))
        cluster.run_for(dice.uniform(0.0, 12.0))
    cluster.run_for(120.0)
    cluster.check()
    require_progress(cluster, 4_000.0)
    return watch.longest


def run(seed: int, jobs: int, seconds: float) -> None:
    """A storm drawn from the seed behind such a store, with plans of all kinds and users who meddle; then everything
    heals and every job must end."""
    storm = replace(faults.storm(Engine(seed)), slow_commit=0.4, slow_commit_seconds=4.0, together=True, late_alarm=0.3)
    cluster = FaultCluster(seed, [], CoreSettings(lost_after_s=60.0, residue_bytes=_GIB // 2), storm)
    turns: dict[str, DaemonTurns] = {}
    for name in ("n1", "n2", "n3"):
        rotation = "yes" if seed % 2 else "no"
        cluster.add_node(
            name, SERVER, {"packing": "yes", "rotation": rotation}, lambda daemon: DaemonTurns(daemon, turns)
        )
    dice = cluster.engine.random
    cluster.physics.residue_bytes = 300 << 20
    cluster.run_for(5.0)
    cluster.unleash()
    cluster.unleash_users(10.0)
    cluster.unleash_planner(1.0)
    for _ in range(jobs):
        cluster.submit(job_of(dice.choice([1, 2, 3, 4, 6, 8]), dice.randint(5, 60)))
        cluster.run_for(dice.uniform(0.0, 10.0))
    cluster.run_for(seconds)
    cluster.check()
    require_progress(cluster, 4_000.0)


@pytest.mark.parametrize("policy", ["fifo", "backfill"])
@pytest.mark.parametrize("seed", range(3))
def test_the_head_of_the_queue_does_not_wait_beside_free_devices_for_a_slow_store(seed: int, policy: str) -> None:
    run_watched(seed, policy, jobs=15)


@pytest.mark.parametrize("seed", range(6))
def test_a_short_storm_behind_a_slow_store_breaks_no_rule_and_every_job_ends(seed: int) -> None:
    run(seed, jobs=8, seconds=100.0)


@pytest.mark.chaos
@pytest.mark.parametrize("block", range(20))
def test_long_storms_behind_a_slow_store_break_no_rule_and_every_job_ends(block: int) -> None:
    for seed in range(1_000 + 10 * block, 1_010 + 10 * block):
        try:
            run(seed, jobs=14, seconds=300.0)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error


@pytest.mark.chaos
@pytest.mark.parametrize("policy", ["fifo", "backfill"])
@pytest.mark.parametrize("block", range(5))
def test_in_long_queues_the_head_does_not_wait_beside_free_devices_for_a_slow_store(block: int, policy: str) -> None:
    for seed in range(1_000 + 20 * block, 1_020 + 20 * block):
        try:
            run_watched(seed, policy, jobs=40)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
