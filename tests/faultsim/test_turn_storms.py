"""Storms in which most gangs take turns most of the time, on devices that are wanted by three at once."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from faultsim import faults
from faultsim.engine import Engine
from faultsim.fault_cluster import FaultCluster, require_progress
from faultsim.node_daemon import SimDaemon
from faultsim.rank_processes import OPAQUE
from faultsim.rows_of_daemons import DaemonTurns
from ganger.cluster.resources import Role, TaskShape
from ganger.cluster.topology import parse_topology
from ganger.protocol.group_rotation import GroupRotation
from ganger_master.core.job_spec import JobSpec
from ganger_master.core.settings import CoreSettings

_GIB = 1 << 30
SERVER = parse_topology("2x2", name="v4", millicores=16_000, memory_bytes=256 * _GIB, device_memory_bytes=8 * _GIB)


@dataclass
class Storm:
    cluster: FaultCluster
    switches: int = 0


class Counted(DaemonTurns):
    """Counts what leaders order."""

    storm: Storm

    def _settle(self, rotation: GroupRotation) -> None:
        self.storm.switches += rotation.newest.leader == self.daemon.name
        super()._settle(rotation)


def run(seed: int, jobs: int, seconds: float, **more: float) -> Storm:
    """A storm drawn from the seed, and `more` faults; then everything heals and every job must end. Of every second
    seed some jobs cannot rest."""
    opaque = 0.1 if seed % 2 else 0.0
    storm_of_seed = replace(faults.storm(Engine(seed)), **more)
    cluster = FaultCluster(seed, [], CoreSettings(lost_after_s=60.0, residue_bytes=_GIB // 4), storm_of_seed, 0.5)
    storm = Storm(cluster)
    by_node: dict[str, DaemonTurns] = {}

    def turns(daemon: SimDaemon) -> DaemonTurns:
        made = Counted(daemon, by_node)
        made.storm = storm
        return made

    for name in ("n1", "n2", "n3"):
        cluster.add_node(name, SERVER, {"packing": "yes", "rotation": "yes"}, turns)
    dice = cluster.engine.random
    cluster.physics.residue_bytes = 100 << 20
    cluster.run_for(5.0)
    cluster.unleash()
    cluster.unleash_users(60.0)
    cluster.unleash_planner(2.0, turns=0.9)
    for _ in range(jobs):
        gpus = dice.choice([1, 2, 2, 3, 4, 4, 6])
        cluster.submit(
            JobSpec(
                (OPAQUE if opaque and dice.random() < opaque else "train", str(dice.randint(100, 400))),
                (Role("worker", gpus, TaskShape(1, 1_000, 2 * _GIB)),),
                gpu_memory_bytes=_GIB,
            )
        )
        cluster.run_for(dice.uniform(0.0, 3.0))
    cluster.run_for(seconds)
    cluster.check()
    require_progress(cluster, 6_000.0)
    return storm


def test_rows_are_switched_in_storms_and_no_rule_is_broken() -> None:
    storms = [run(seed, jobs=8, seconds=100.0) for seed in range(3)]
    # Without that many a storm would show nothing.
    assert sum(storm.switches for storm in storms) >= 40


@pytest.mark.parametrize("seed", range(6))
def test_rows_are_switched_whatever_the_store_does_not_take(seed: int) -> None:
    run(seed, jobs=8, seconds=100.0, failed_commit=0.05)


def test_a_job_whose_stop_is_cancelled_continues_on_all_its_nodes_or_on_none() -> None:
    """A storm in which a switch came between them, and the set stood still for ever."""
    run(624, jobs=10, seconds=150.0)


@pytest.mark.parametrize("seed", [127, 208])
def test_no_job_keeps_others_from_their_time_slices_for_ever(seed: int) -> None:
    """Storms in which one that could not be saved stayed on its devices, and one was woken on a part of its nodes."""
    run(seed, jobs=14, seconds=300.0)


def test_no_switch_comes_between_two_nodes_that_hear_of_a_stop_one_after_the_other() -> None:
    """A storm in which two gangs each kept a device of one node and waited there for their other parts, for ever."""
    run(168, jobs=14, seconds=300.0)


def test_a_gang_whose_stop_was_taken_back_as_its_turn_ended_does_not_stand_on_a_part_of_its_nodes_for_ever() -> None:
    """A storm in which one part had begun its turn, and the other rested by the switch before."""
    run(260, jobs=14, seconds=300.0)


@pytest.mark.parametrize("seed", [725, 736])
def test_nodes_that_are_lost_or_removed_break_no_rule_of_turns(seed: int) -> None:
    """Storms in which a matrix forgot the lost gangs of jobs that began anew, and a removed node stopped the master."""
    run(seed, jobs=14, seconds=300.0)


def test_turns_do_not_begin_for_a_gang_of_which_only_some_parts_are_launched() -> None:
    """A storm behind a slow store in which such a part waited for the others, and these for their turn, for ever."""
    run(66, jobs=10, seconds=150.0, slow_commit=0.4, slow_commit_seconds=4.0, together=True, late_alarm=0.3)


def test_no_turn_begins_before_all_nodes_have_the_gangs_that_are_to_have_it() -> None:
    """A storm in which the first turn of one was over before one of its nodes knew of it, and the other part, which was
    launched, could not rest."""
    run(203, jobs=10, seconds=150.0, slow_commit=0.4, slow_commit_seconds=4.0, together=True, late_alarm=0.3)


@pytest.mark.chaos
@pytest.mark.parametrize("block", range(30))
def test_long_storms_of_turns_break_no_rule_and_every_job_ends(block: int) -> None:
    for seed in range(10 * block, 10 * block + 10):
        try:
            run(seed, jobs=14, seconds=300.0)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
