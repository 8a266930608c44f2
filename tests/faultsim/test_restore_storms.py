"""Storms in which the master's database is restored from an earlier copy at random instants. `run(SEED)` replays a
seed."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
from faultsim import faults
from faultsim.engine import Engine
from faultsim.fault_cluster import FaultCluster, require_progress
from faultsim.rows_of_daemons import DaemonTurns
from ganger.cluster.resources import Role, TaskShape
from ganger.cluster.topology import parse_topology
from ganger_master.core import quarantine
from ganger_master.core.commands import AdoptQuarantined, EndQuarantined, GoOn, OpenStore
from ganger_master.core.gang_model import OutcomeKind
from ganger_master.core.job_spec import Condition, Dependency, JobSpec
from ganger_master.core.settings import CoreSettings

_GIB = 1 << 30
SERVER = parse_topology("2x2", name="v4", millicores=16_000, memory_bytes=256 * _GIB, device_memory_bytes=8 * _GIB)
# Policies whose places the master gives, and the wild planner, which moves, shrinks and slices gangs.
POLICIES = ("fifo", "fifo-backfill", "planner")


@dataclass
class Restores:
    """An operator that copies the database now and then, and puts a copy in its place at random instants."""

    cluster: FaultCluster
    copies: list[dict[tuple[str, str], bytes]] = field(default_factory=list)
    count: int = 0
    keeps_ends: bool = True

    def begin(self, mean_s: float) -> None:
        self.cluster.run_for(0.0)
        self._copy()
        self._decide()
        self._look()
        self.cluster._again(mean_s, self._restore, lambda: self.cluster.meddling)

    def _copy(self) -> None:
        self.copies = [*self.copies[-5:], self.cluster.backup()]
        self.cluster.engine.after(self.cluster.engine.between(1.0, 25.0), self._copy)

    def _restore(self) -> None:
        cluster, dice = self.cluster, self.cluster.engine.random
        if cluster.state.counters.restoring is not None:
            return
        opened = dice.choice(
            [
                OpenStore("", is_restored=True),
                OpenStore("", marks=cluster.master.marks),
                OpenStore("", must_have_marks=True),
                OpenStore("", is_restored=True, marks=cluster.master.marks),
            ]
        )
        keeps_ends = dice.random() < 0.6
        if not keeps_ends:
            # Then only nodes have a record, of jobs that ran to their end.
            done = {
                uid
                for daemon in cluster.daemons.values()
                for uid, gang in daemon.finished.items()
                if gang.outcome.kind is OutcomeKind.DONE
            }
            cluster.oracle.decided |= cluster.master.ended.keys() - done
            cluster.master.ended.clear()
        self.keeps_ends = keeps_ends
        cluster.restore(dice.choice(self.copies), opened)
        self.count += 1
        if keeps_ends and dice.random() < 0.2:
            cluster.engine.after(cluster.engine.between(1.0, 60.0), lambda: cluster.send(GoOn()))

    def _decide(self) -> None:
        """The operator ends or adopts what is quarantined."""
        cluster, dice = self.cluster, self.cluster.engine.random
        if cluster.master.is_up and cluster.state.counters.restoring is None:
            for uid in sorted(cluster.state.nodes.strays_of):
                for epoch in sorted(quarantine.live_epochs(cluster.state, uid)):
                    adopts = dice.random() < 0.5
                    cluster.send(AdoptQuarantined(uid, epoch) if adopts else EndQuarantined(uid, epoch))
        cluster.engine.after(cluster.engine.between(5.0, 30.0), self._decide)

    def _look(self) -> None:
        self.cluster.check_devices()
        if not self.keeps_ends and self.cluster.settled_without:
            # The nodes with the records did not report either.
            oracle = self.cluster.oracle
            for uid in oracle.ended - oracle.decided:
                oracle.decided_anew(uid)
        self.cluster.engine.after(0.2, self._look)


def _cut_off(cluster: FaultCluster) -> None:
    """Stop a daemon, often for longer than lost_after, while its ranks live on."""
    daemon = cluster._pick(cluster.daemons)
    if daemon.is_up:
        daemon.crash()
        cluster.engine.after(cluster.engine.between(30.0, 150.0), lambda: cluster._start(daemon))


def storm_of(seed: int) -> faults.Faults:
    # Disks outlive the nodes: no master can find out what was lost with a disk.
    return replace(faults.storm(Engine(seed)), wiped=0.0, removal_seconds=0.0, clock_jump_seconds=0.0)


def run(seed: int, jobs: int, seconds: float, restores_s: float = 60.0, *, are_chained: bool = False) -> Restores:
    """A storm drawn from the seed, with restores; then everything heals and every job must end. are_chained: most jobs
    depend on one before."""
    policy = POLICIES[seed % len(POLICIES)]
    is_planned = policy == "planner"
    settings = CoreSettings(
        policy="fifo" if is_planned else policy, lost_after_s=60.0, restored_wait_s=5.0,
        residue_bytes=_GIB // 4,
    )  # fmt: skip
    cluster = FaultCluster(seed, [], settings, storm_of(seed), 0.5)
    turns: dict[str, DaemonTurns] = {}
    for name in ("n1", "n2", "n3"):
        capabilities = {"packing": "yes", "rotation": "yes"} if is_planned else {}
        cluster.add_node(name, SERVER, capabilities, lambda daemon: DaemonTurns(daemon, turns))
    dice = cluster.engine.random
    cluster.physics.residue_bytes = 100 << 20
    cluster.run_for(5.0)
    cluster.unleash()
    cluster.unleash_users(20.0)
    if is_planned:
        cluster.unleash_planner(2.0, turns=0.6)
    cluster._again(150.0, lambda: _cut_off(cluster), lambda: cluster.meddling)
    restores = Restores(cluster)
    restores.begin(restores_s)
    for _ in range(jobs):
        role = Role("worker", dice.choice([1, 2, 2, 3, 4, 4, 6]), TaskShape(1, 1_000, 2 * _GIB))
        known = [one.number for one in cluster.submissions if one.number] if are_chained else []
        after: tuple[Dependency, ...] = ()
        if known and dice.random() < 0.8:
            condition = dice.choice([Condition.ENDED, Condition.SUCCEEDED, Condition.FAILED])
            after = (Dependency(condition, dice.choice(known)),)
        command = ("train", str(dice.randint(30, 250)))
        cluster.submit(JobSpec(command, (role,), gpu_memory_bytes=_GIB, dependencies=after))
        cluster.run_for(dice.uniform(0.0, 10.0))
    cluster.run_for(seconds)
    cluster.check()
    require_progress(cluster, 6_000.0)
    return restores


@pytest.mark.parametrize("policy", range(len(POLICIES)), ids=POLICIES)
def test_a_master_whose_database_goes_back_in_a_storm_breaks_no_rule_and_every_job_ends(policy: int) -> None:
    storms = [run(seed, jobs=5, seconds=80.0, restores_s=30.0) for seed in range(policy, 9, len(POLICIES))]
    assert sum(storm.count for storm in storms) >= 3


@pytest.mark.parametrize("policy", range(len(POLICIES)), ids=POLICIES)
def test_jobs_that_depend_on_each_other_end_although_the_database_goes_back(policy: int) -> None:
    for seed in range(policy, 9, len(POLICIES)):
        run(seed, jobs=6, seconds=80.0, restores_s=30.0, are_chained=True)


def test_a_restore_that_is_under_way_begins_anew_when_the_master_starts_again() -> None:
    """A storm in which a copy that was made meanwhile was settled at once, without any node's report."""
    run(155, jobs=6, seconds=120.0)


@pytest.mark.parametrize("seed", [28, 53, 86, 89])
def test_storms_that_once_broke_a_rule_break_none(seed: int) -> None:
    """A gang that was to stop kept devices that another has; marks of shared devices were lost; gangs of a node were
    not in order."""
    run(seed, jobs=6, seconds=120.0)


@pytest.mark.chaos
@pytest.mark.parametrize("block", range(30))
def test_long_storms_of_restores_break_no_rule_and_every_job_ends(block: int) -> None:
    for seed in range(1_000 + 10 * block, 1_010 + 10 * block):
        try:
            run(seed, jobs=10, seconds=300.0)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
