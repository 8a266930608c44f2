"""A restarted master makes of its store what the former one had in mind; whatever is not stored is found."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from ganger_master.core.state import State
from ganger_master.sim.checkers import RuleBrokenError
from ganger_master.sim.cluster import Cluster
from ganger_master.sim.restored import VOLATILE
from msgspec.structs import replace
from sim.test_stories import cluster_of, job_of, started


def running() -> tuple[Cluster, int]:
    cluster = cluster_of(1)
    return cluster, started(cluster, job_of(2))


def test_a_master_in_the_middle_of_its_work_can_be_restored() -> None:
    cluster, _ = running()
    cluster.master.check_restorable()
    assert vars(cluster.state).keys() >= VOLATILE


def _other_job(state: State, number: int) -> None:
    state.jobs[number] = replace(state.jobs[number], preemptions=7)


def _other_gang(state: State, number: int) -> None:
    epoch = state.jobs[number].epoch
    state.gangs[epoch] = replace(state.gangs[epoch], threads=77)


def _uncounted(state: State, number: int) -> None:
    state.free_devices += 1


def _unindexed(state: State, number: int) -> None:
    state.running_limited[number] = None


def _told_otherwise(state: State, number: int) -> None:
    state.desired["n1"] = replace(state.desired["n1"], acknowledged_epochs=(99,))


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (_other_job, "jobs: 1: preemptions: 7 is restored as 0"),
        (_other_gang, "gangs: 1: threads: 77 is restored as"),
        (_uncounted, "free_devices: 3 is restored as 2"),
        (_unindexed, "running_limited"),
        (_told_otherwise, r"desired: n1: \[1\] \(99,\) is restored as"),
    ],
)
def test_what_is_not_stored_is_found(harm: Callable[[State, int], None], said: str) -> None:
    cluster, number = running()
    harm(cluster.state, number)
    with pytest.raises(RuleBrokenError, match=said):
        cluster.master.check_restorable()
