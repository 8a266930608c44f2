"""Tests of nodes while everything breaks: no job of a user starts on a node that is to be tested, no test runs on
another node than its own, and each node returns."""

from __future__ import annotations

import pytest
from faultsim import faults
from faultsim.engine import Engine
from faultsim.fault_cluster import FaultCluster
from faultsim.test_sharing_storms import SERVER
from ganger.cluster.resources import Role, TaskShape
from ganger.node_test import TEST_USER
from ganger_master.core.commands import UncordonNode
from ganger_master.core.job_spec import JobSpec
from ganger_master.core.settings import CoreSettings

NAMES = ("n1", "n2", "n3")


class Watched:
    """A cluster whose GPUs fail and recover, and operators that order tests."""

    def __init__(self, seed: int) -> None:
        # As many steps as GPUs.
        settings = CoreSettings(lost_after_s=60.0, policy="las", test_nodes=True, test_command="train")
        self.cluster = FaultCluster(seed, [(name, SERVER) for name in NAMES], settings, faults.storm(Engine(seed)))
        self.known: set[int] = set()
        self.tests: set[int] = set()

    def breaks(self) -> None:
        dice, cluster = self.cluster.engine.random, self.cluster
        daemon = cluster.daemons[dice.choice(NAMES)]
        if dice.random() < 0.7:
            daemon.device_faults = {} if daemon.device_faults else {dice.randrange(4): "XID 79"}
        else:
            cluster.send(UncordonNode(daemon.name, "olga", tested=dice.random() < 0.8))

    def look(self) -> None:
        """See that what has started since the last look may be where it is."""
        state = self.cluster.state
        for epoch, gang in state.gangs.items():
            job = state.jobs[gang.job]
            if job.user == TEST_USER:
                self.tests.add(job.number)
                assert job.spec.display_name == f"test-{gang.nodes[0]}"
            elif epoch not in self.known:
                tests = [state.nodes[name].test for name in gang.nodes if name in state.nodes]
                running = [state.jobs[test.job] for test in tests if test is not None and test.job]
                assert not any(test.create_time < gang.create_time for test in running)
            self.known.add(epoch)


@pytest.mark.parametrize("seed", range(6))
def test_in_a_storm_of_faults_no_job_starts_where_a_test_runs_and_all_nodes_return(seed: int) -> None:
    watched = Watched(seed)
    cluster = watched.cluster
    dice = cluster.engine.random
    cluster.run_for(5.0)
    cluster.unleash()
    for _ in range(12):
        gpus = dice.choice([1, 2, 4])
        command = ("train", str(dice.randint(10, 40)))
        cluster.submit(
            JobSpec(command, (Role("worker", gpus, TaskShape(1, 1_000, 1 << 30)),), gpu_memory_bytes=1 << 29)
        )
        for _ in range(10):
            watched.breaks()
            cluster.run_for(1.0)
            if cluster.master.is_up:
                watched.look()
    for daemon in cluster.daemons.values():
        daemon.device_faults = {}
    cluster.heal()

    def have_returned() -> bool:
        if not cluster.master.is_up:
            return False
        for name, node in cluster.state.nodes.items():
            if node.test is not None and node.test.failure:
                cluster.send(UncordonNode(name, "olga"))
        return all(node.takes_gangs for node in cluster.state.nodes.values())

    assert cluster.run_until(have_returned, 2_000.0), {n: (x.state, x.test) for n, x in cluster.state.nodes.items()}
    assert watched.tests
