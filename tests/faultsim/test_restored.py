"""A restarted master makes of its store what the former one had in mind; whatever is not stored is found."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
from faultsim.checkers import RuleBrokenError
from faultsim.fault_cluster import FaultCluster
from faultsim.restored_state import VOLATILE, attributes
from faultsim.test_stories import SERVER, cluster_of, ends, gang, job, job_of, phase, started
from ganger.cluster.refusals import Reason
from ganger.job_state import JobState
from ganger_master.core.answers import Done, JobAnswer, Refused
from ganger_master.core.commands import (
    AdoptQuarantined,
    CancelJob,
    EndQuarantined,
    GoOn,
    MoveJob,
    OpenStore,
    ResumeJob,
    SuspendJob,
)
from ganger_master.core.explain import explain
from ganger_master.core.gang_model import GangPhase
from ganger_master.core.job_model import SuspendLevel
from ganger_master.core.settings import CoreSettings
from ganger_master.core.state import State
from msgspec.structs import replace


def running() -> tuple[FaultCluster, int]:
    cluster = cluster_of(1)
    return cluster, started(cluster, job_of(2))


def test_a_master_in_the_middle_of_its_work_can_be_restored() -> None:
    cluster, _ = running()
    cluster.master.check_restorable()
    assert attributes(cluster.state).keys() >= VOLATILE


def _other_job(state: State, number: int) -> None:
    state.jobs[number] = replace(state.jobs[number], preemptions=7)


def _other_gang(state: State, number: int) -> None:
    epoch = state.jobs[number].epoch
    state.gangs[epoch] = replace(state.gangs[epoch], threads=77)


def _uncounted(state: State, number: int) -> None:
    state.nodes.free_devices += 1


def _unindexed(state: State, number: int) -> None:
    state.jobs.running_limited[number] = None


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


# -- a database that is restored from a backup -------------------------------------------------------------------------


class Since(NamedTuple):
    """A cluster whose jobs have gone on since its database was copied. `jobs`: their numbers by what they did."""

    cluster: FaultCluster
    copy: dict[tuple[str, str], bytes]
    jobs: dict[str, int]


def gone_on(seed: int = 1) -> Since:
    settings = CoreSettings(restored_wait_s=5.0, lost_after_s=60.0)
    cluster = FaultCluster(seed, [(f"n{number}", SERVER) for number in range(1, 5)], settings)
    cluster.run_for(5.0)
    jobs = {
        "stays": started(cluster, job_of(2, steps=400)),
        "ends": started(cluster, job_of(1, steps=25)),
        "moves": started(cluster, job_of(2, steps=400)),
        "rests": started(cluster, job_of(2, steps=400)),
        "resumes": started(cluster, job_of(2, steps=400)),
        "cancelled": started(cluster, job_of(1, steps=400)),
    }
    suspend(cluster, jobs["resumes"])
    filler = started(cluster, job_of(4, steps=30))
    waiting = cluster.submit(job_of(4, steps=400))
    cluster.submit(job_of(4, steps=400))
    assert cluster.run_until(lambda: waiting.number > 0, 10.0)
    jobs |= {"starts": waiting.number, "fills": filler}
    copy = cluster.backup()
    cluster.ask(ResumeJob(jobs["resumes"]))
    before = gang(cluster, jobs["moves"])
    assert before is not None
    cluster.ask(CancelJob(jobs["cancelled"]))
    suspend(cluster, jobs["rests"])
    assert cluster.run_until(lambda: job(cluster, jobs["ends"]).state.is_finished, 60.0)
    assert cluster.run_until(lambda: job(cluster, filler).state.is_finished, 60.0)
    assert cluster.run_until(lambda: phase(cluster, jobs["starts"]) is GangPhase.RUNNING, 60.0)
    assert cluster.run_until(lambda: phase(cluster, jobs["resumes"]) is GangPhase.RUNNING, 60.0)
    cluster.ask(MoveJob(jobs["moves"]))
    assert cluster.run_until(lambda: job(cluster, jobs["moves"]).moved_from == before.epoch, 60.0)
    assert cluster.run_until(lambda: phase(cluster, jobs["moves"]) is GangPhase.RUNNING, 60.0)
    jobs["unknown"] = started(cluster, job_of(1, steps=200))
    jobs["unknown and over"] = started(cluster, job_of(1, steps=5))
    assert cluster.run_until(lambda: job(cluster, jobs["unknown and over"]).state.is_finished, 60.0)
    cluster.run_for(10.0)
    return Since(cluster, copy, jobs)


def suspend(cluster: FaultCluster, number: int) -> None:
    cluster.ask(SuspendJob(number, SuspendLevel.OFFLOAD))
    assert cluster.run_until(lambda: job(cluster, number).suspended_level is SuspendLevel.OFFLOAD, 30.0)


def by_operator(cluster: FaultCluster) -> OpenStore:
    return OpenStore("", is_restored=True)


def by_file(cluster: FaultCluster) -> OpenStore:
    return OpenStore("", marks=cluster.master.marks)


def by_a_missing_file(cluster: FaultCluster) -> OpenStore:
    return OpenStore("", must_have_marks=True)


def by_daemons(cluster: FaultCluster) -> OpenStore:
    return OpenStore("")


def settled(cluster: FaultCluster) -> None:
    assert cluster.run_until(lambda: cluster.state.counters.restoring is not None, 30.0)
    assert cluster.run_until(lambda: cluster.state.counters.restoring is None, 60.0)
    cluster.run_for(5.0)


@pytest.mark.parametrize("opened", [by_operator, by_file, by_a_missing_file, by_daemons])
@pytest.mark.parametrize("with_journal", [True, False])
def test_a_restored_master_runs_nothing_twice_and_takes_what_runs(
    opened: Callable[[FaultCluster], OpenStore], with_journal: bool
) -> None:
    cluster, copy, jobs = gone_on()
    highest = max(job.number for job in cluster.state.jobs.values())
    epochs = cluster.state.counters.next_epoch
    if not with_journal:
        cluster.master.ended.clear()
    alive = {number: job(cluster, jobs[number]).epoch for number in ("stays", "moves", "rests", "resumes", "starts")}
    cluster.restore(copy, opened(cluster))
    settled(cluster)
    for name, epoch in alive.items():
        assert job(cluster, jobs[name]).epoch == epoch, name
    assert job(cluster, jobs["rests"]).suspended_level is SuspendLevel.OFFLOAD
    assert all(phase(cluster, jobs[name]) is GangPhase.RUNNING for name in ("stays", "moves", "resumes", "starts"))
    assert job(cluster, jobs["ends"]).state is JobState.SUCCEEDED
    assert job(cluster, jobs["fills"]).state is JobState.SUCCEEDED
    cancelled = job(cluster, jobs["cancelled"])
    assert cancelled.state is (JobState.CANCELLED if with_journal else JobState.SUSPENDED)
    assert with_journal or "ganger resume" in cancelled.trouble
    ((_, (stray,)),) = [(name, node.strays) for name, node in cluster.state.nodes.items() if node.strays]
    assert (stray.job, stray.quarantined) == (jobs["unknown"], True)
    fresh = cluster.submit(job_of(1, steps=5))
    assert cluster.run_until(lambda: fresh.number > 0, 30.0)
    known_to_nodes = max(jobs["unknown"], jobs["unknown and over"], highest if opened is by_file else 0)
    assert fresh.number > known_to_nodes
    assert cluster.state.counters.next_epoch > epochs - 1
    adopted = cluster.ask(AdoptQuarantined(stray.uid, stray.epoch))
    assert adopted == JobAnswer(jobs["unknown"])
    cluster.ask(ResumeJob(jobs["rests"]))
    if not with_journal:
        cluster.ask(CancelJob(jobs["cancelled"]))
    for name in ("stays", "moves", "rests", "resumes", "starts", "unknown"):
        ends(cluster, jobs[name])
    assert not any(node.strays for node in cluster.state.nodes.values())


def test_a_quarantined_gang_is_ended_by_command_and_its_devices_are_free() -> None:
    cluster, copy, _ = gone_on()
    cluster.restore(copy, by_operator(cluster))
    settled(cluster)
    ((name, stray),) = [(name, one) for name, node in cluster.state.nodes.items() for one in node.strays]
    taken = cluster.state.rows[name].free_mask
    assert not taken & stray.device_mask
    assert isinstance(cluster.ask(EndQuarantined(stray.uid, stray.epoch)), Done)
    assert cluster.run_until(lambda: not cluster.state.nodes[name].strays, 60.0)
    assert cluster.run_until(lambda: bool(cluster.state.rows[name].free_mask & stray.device_mask), 60.0)
    again = cluster.ask(EndQuarantined(stray.uid, stray.epoch))
    assert isinstance(again, Refused)
    assert again.reason == "GANG_NOT_FOUND"


def test_until_all_nodes_have_reported_a_restored_master_refuses_and_names_those_it_waits_for() -> None:
    cluster, copy, _ = gone_on()
    cluster.daemons["n2"].crash()
    cluster.restore(copy, by_operator(cluster))
    cluster.run_for(20.0)
    refused = cluster.ask(CancelJob(1))
    assert isinstance(refused, Refused)
    assert refused.reason == "RESTORING"
    assert "run: n2:" in refused.message
    assert not cluster.state.leases
    cluster.daemons["n2"].start()
    settled(cluster)


def test_a_gang_on_a_node_that_was_not_waited_for_keeps_its_job_from_starting() -> None:
    cluster, copy, jobs = gone_on()
    moved = gang(cluster, jobs["moves"])
    assert moved is not None
    (away,) = moved.nodes
    cluster.daemons[away].crash()
    cluster.restore(copy, by_operator(cluster))
    cluster.run_for(20.0)
    assert isinstance(cluster.ask(GoOn()), Done)
    cluster.run_for(5.0)
    assert job(cluster, jobs["moves"]).state is JobState.SUSPENDED, "whether it has ended is not known"
    cluster.daemons[away].start()
    assert cluster.run_until(lambda: bool(cluster.state.nodes[away].strays), 30.0)
    cluster.ask(ResumeJob(jobs["moves"]))
    cluster.run_for(20.0)
    assert job(cluster, jobs["moves"]).state is JobState.PENDING
    (blocker, *_) = explain(cluster.state, jobs["moves"], cluster.engine.now).blockers
    assert blocker.reason is Reason.QUARANTINED


def test_a_gang_that_was_left_behind_stays_frozen_while_a_restored_master_waits_for_other_nodes() -> None:
    """Its job runs elsewhere since, which that master does not know yet: its answers renew no lease that has ended."""
    settings = CoreSettings(restored_wait_s=5.0, lost_after_s=60.0)
    cluster = FaultCluster(1, [(f"n{number}", SERVER) for number in range(1, 5)], settings)
    cluster.run_for(5.0)
    number = started(cluster, job_of(2, steps=400))
    (behind,) = cluster.state.gangs[job(cluster, number).epoch].nodes
    copy = cluster.backup()
    cluster.daemons[behind].crash()
    assert cluster.run_until(lambda: cluster.state.nodes[behind].lost, 100.0)
    assert cluster.run_until(lambda: phase(cluster, number) is GangPhase.RUNNING, 30.0)
    epoch = job(cluster, number).epoch
    (successor,) = cluster.state.gangs[epoch].nodes
    (missing, _) = [name for name in cluster.daemons if name not in (behind, successor)]
    cluster.daemons[missing].crash()
    cluster.restore(copy, by_operator(cluster))
    cluster.daemons[behind].start()
    # The oracle finds every step of an attempt that another has followed.
    cluster.run_for(40.0)
    assert cluster.state.counters.restoring is not None
    cluster.daemons[missing].start()
    settled(cluster)
    assert job(cluster, number).epoch == epoch
    ends(cluster, number)
