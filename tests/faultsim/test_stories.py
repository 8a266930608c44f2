"""Stories of single jobs, told by the simulated cluster: suspend, move, loss, drain, cancel, and why a job waits."""

from __future__ import annotations

import pytest
from faultsim.fault_cluster import FaultCluster
from faultsim.faults import Faults, Network
from faultsim.rank_processes import OPAQUE
from ganger.cluster.refusals import Reason
from ganger.cluster.resources import Locality, LocalityLevel, Role, TaskShape
from ganger.cluster.topology import parse_topology
from ganger.job_state import JobState
from ganger_master.core.answers import JobAnswer, NodeAnswer, Refused
from ganger_master.core.commands import (
    CancelJob,
    CordonNode,
    DeclareLost,
    DrainNode,
    MoveJob,
    ResumeJob,
    SuspendJob,
    UncordonNode,
)
from ganger_master.core.explain import explain
from ganger_master.core.gang_model import Gang, GangPhase
from ganger_master.core.job_model import JobRecord, SuspendLevel
from ganger_master.core.job_spec import JobSpec
from ganger_master.core.settings import CoreSettings
from msgspec.structs import replace

_GIB = 1 << 30
SERVER = parse_topology("2x2", name="v4", millicores=16_000, memory_bytes=64 * _GIB, device_memory_bytes=_GIB)


def job_of(gpus: int, steps: int = 60, *, millicores: int = 2_000, memory: int = 4 * _GIB) -> JobSpec:
    return JobSpec(
        ("train", str(steps)), (Role("worker", gpus, TaskShape(1, millicores, memory)),), gpu_memory_bytes=_GIB
    )


def cluster_of(nodes: int = 2, settings: CoreSettings | None = None) -> FaultCluster:
    cluster = FaultCluster(1, [(f"n{number}", SERVER) for number in range(1, nodes + 1)], settings)
    cluster.run_for(5.0)
    return cluster


def started(cluster: FaultCluster, spec: JobSpec, user: str = "") -> int:
    submission = cluster.submit(spec, user)
    number = submission.number
    assert cluster.run_until(lambda: submission.number > 0, 10.0)
    number = submission.number
    assert cluster.run_until(lambda: phase(cluster, number) is GangPhase.RUNNING, 30.0)
    return number


def cut_off(cluster: FaultCluster, *nodes: str) -> None:
    """Lose every message between the master and these nodes."""
    for name in nodes:
        cluster.daemons[name].network = Network(cluster.engine, Faults(lose=1.0))


def goes_on_elsewhere(cluster: FaultCluster, number: int) -> None:
    """Cut the node of a job off until it is lost: the job goes on elsewhere, and nothing of it stays on that node."""
    held = gang(cluster, number)
    assert held is not None
    (here,) = held.nodes
    cut_off(cluster, here)
    assert cluster.run_until(lambda: cluster.state.nodes[here].lost, 80.0)
    assert cluster.run_until(lambda: phase(cluster, number) is GangPhase.RUNNING, 30.0)
    cluster.daemons[here].network = cluster.network
    ends(cluster, number)
    assert not cluster.state.gangs.places_on[here]


def job(cluster: FaultCluster, number: int) -> JobRecord:
    return cluster.state.jobs[number]


def gang(cluster: FaultCluster, number: int) -> Gang | None:
    return cluster.state.gangs.get(job(cluster, number).epoch)


def phase(cluster: FaultCluster, number: int) -> GangPhase | None:
    held = gang(cluster, number) if number in cluster.state.jobs else None
    return held.phase if held is not None else None


def ends(cluster: FaultCluster, number: int, state: JobState = JobState.SUCCEEDED) -> None:
    assert cluster.run_until(lambda: job(cluster, number).state.is_finished, 500.0), job(cluster, number)
    assert job(cluster, number).state is state
    cluster.check()


@pytest.mark.parametrize("level", [SuspendLevel.PAUSE, SuspendLevel.OFFLOAD, SuspendLevel.CHECKPOINT])
def test_a_suspended_job_rests_at_its_level_and_resumes_without_losing_a_step(level: SuspendLevel) -> None:
    cluster = cluster_of(1)
    number = started(cluster, job_of(2))
    epoch = job(cluster, number).epoch
    assert isinstance(cluster.ask(SuspendJob(number, level)), JobAnswer)
    assert cluster.run_until(lambda: job(cluster, number).suspended_level is level, 30.0)
    held = 2 if level is SuspendLevel.PAUSE else 0
    assert cluster.state.rows["n1"].free_mask.bit_count() == 4 - held
    cluster.ask(ResumeJob(number))
    assert cluster.run_until(lambda: phase(cluster, number) is GangPhase.RUNNING, 30.0)
    assert (job(cluster, number).epoch == epoch) is (level is not SuspendLevel.CHECKPOINT)
    ends(cluster, number)


def test_an_offloaded_job_whose_devices_were_taken_goes_on_elsewhere() -> None:
    cluster = cluster_of(2)
    number = started(cluster, job_of(4))
    held = gang(cluster, number)
    assert held is not None
    home = held.nodes[0]
    cluster.ask(SuspendJob(number, SuspendLevel.OFFLOAD))
    assert cluster.run_until(lambda: job(cluster, number).suspended_level is SuspendLevel.OFFLOAD, 30.0)
    other = "n1" if home == "n2" else "n2"
    cluster.ask(CordonNode(other, "so that the next job goes home"))
    second = started(cluster, job_of(4, steps=100))
    cluster.ask(UncordonNode(other))
    cluster.ask(ResumeJob(number))
    assert cluster.run_until(lambda: phase(cluster, number) is GangPhase.RUNNING, 60.0)
    held = gang(cluster, number)
    assert held is not None
    assert held.nodes == (other,)
    ends(cluster, number)
    ends(cluster, second)


def test_a_move_changes_the_node_and_loses_no_step() -> None:
    cluster = cluster_of(2)
    number = started(cluster, job_of(2))
    before = gang(cluster, number)
    assert before is not None
    assert isinstance(cluster.ask(MoveJob(number)), JobAnswer)
    assert cluster.run_until(lambda: job(cluster, number).moved_from == before.epoch, 60.0)
    after = gang(cluster, number)
    assert after is not None
    assert set(after.nodes).isdisjoint(before.nodes)
    ends(cluster, number)
    assert job(cluster, number).preemptions == 0


def test_a_move_whose_destination_dies_before_the_commit_leaves_the_source_running() -> None:
    cluster = cluster_of(2)
    number = started(cluster, job_of(2, steps=200))
    epoch = job(cluster, number).epoch
    cluster.ask(MoveJob(number))
    coming = job(cluster, number).next_epoch
    destination = cluster.state.gangs[coming].nodes[0]
    assert cluster.run_until(lambda: (coming, destination) in cluster.physics.ranks, 10.0)
    cluster.daemons[destination].reboot()
    cluster.engine.after(5.0, cluster.daemons[destination].start)
    assert cluster.run_until(lambda: job(cluster, number).next_epoch == 0, 60.0)
    assert job(cluster, number).epoch == epoch
    ends(cluster, number)


@pytest.mark.parametrize("stepped", [False, True])
def test_a_move_whose_destination_dies_after_the_commit_goes_back_as_a_newer_epoch(stepped: bool) -> None:
    cluster = cluster_of(2)
    number = started(cluster, job_of(2, steps=200))
    epoch = job(cluster, number).epoch
    cluster.ask(MoveJob(number))
    assert cluster.run_until(lambda: job(cluster, number).moved_from == epoch, 60.0)
    held = gang(cluster, number)
    assert held is not None
    # A step that was never reported is done again.
    assert cluster.run_until(lambda: not stepped or cluster.oracle.trainings["uid-1"].epoch == held.epoch, 10.0)
    cluster.daemons[held.nodes[0]].reboot()
    cluster.engine.after(5.0, cluster.daemons[held.nodes[0]].start)
    assert cluster.run_until(lambda: job(cluster, number).epoch > held.epoch, 120.0)
    ends(cluster, number)


def test_the_jobs_of_a_lost_node_go_on_elsewhere_from_the_last_checkpoint() -> None:
    cluster = cluster_of(2, CoreSettings(lost_after_s=60.0, lost_margin_s=5.0))
    for daemon in cluster.daemons.values():
        daemon.storage_proved = True
    number = started(cluster, job_of(4))
    held = gang(cluster, number)
    assert held is not None
    cluster.run_for(25.0)
    cluster.daemons[held.nodes[0]].reboot()
    answer = cluster.ask(DeclareLost(held.nodes[0]))
    assert isinstance(answer, Refused)
    assert answer.reason == "NODE_ALIVE"
    assert cluster.run_until(lambda: cluster.state.nodes[held.nodes[0]].lost, 70.0)
    ends(cluster, number)
    assert job(cluster, number).preemptions == 1


def test_gangs_go_where_a_daemon_answers_and_to_a_silent_node_as_soon_as_it_calls() -> None:
    cluster = cluster_of(2, CoreSettings(lost_after_s=None))
    daemon = cluster.daemons["n1"]
    daemon.network = Network(cluster.engine, Faults(lose=1.0))
    assert cluster.run_until(lambda: cluster.state.nodes["n1"].silent, 100.0)
    first, second = started(cluster, job_of(4, steps=200)), cluster.submit(job_of(4))
    cluster.run_for(10.0)
    assert job(cluster, second.number).state is JobState.PENDING
    (held,) = (held for held in cluster.state.gangs.values() if held.job == first)
    assert held.nodes == ("n2",)
    daemon.network = cluster.network
    assert cluster.run_until(lambda: phase(cluster, second.number) is GangPhase.RUNNING, 30.0)
    ends(cluster, second.number)


def test_a_job_whose_end_was_not_reported_resumes_from_the_last_checkpoint_once_its_node_is_lost() -> None:
    cluster = cluster_of(2, CoreSettings(lost_after_s=60.0, lost_margin_s=5.0))
    number = started(cluster, job_of(2, steps=25))
    held = gang(cluster, number)
    assert held is not None
    assert cluster.run_until(lambda: cluster.oracle.trainings["uid-1"].step == 25, 60.0)
    # Every rank has ended well, and the machine goes down before its daemon says so.
    cluster.daemons[held.nodes[0]].reboot()
    ends(cluster, number)
    assert job(cluster, number).epoch == 0
    assert cluster.oracle.steps == 25 + 5


def test_a_job_that_was_cut_off_goes_on_elsewhere_and_never_runs_twice() -> None:
    cluster = cluster_of(2, CoreSettings(lost_after_s=60.0, lost_margin_s=5.0))
    number = started(cluster, job_of(4, steps=200))
    goes_on_elsewhere(cluster, number)


def test_a_job_that_uses_its_grace_to_step_on_gets_none_where_it_goes_on_elsewhere() -> None:
    cluster = cluster_of(2, CoreSettings(lost_after_s=60.0, lost_margin_s=5.0, grace_s=30.0))
    number = started(cluster, replace(job_of(4, steps=200), command=(OPAQUE, "200")))
    cluster.physics.trapping.add(job(cluster, number).uid)
    goes_on_elsewhere(cluster, number)


@pytest.mark.parametrize("command", ["train", OPAQUE])
def test_a_job_whose_daemon_is_dead_goes_on_elsewhere_and_never_runs_twice(command: str) -> None:
    cluster = cluster_of(2, CoreSettings(lost_after_s=60.0, lost_margin_s=5.0))
    number = started(cluster, replace(job_of(4, steps=200), command=(command, "200")))
    held = gang(cluster, number)
    assert held is not None
    daemon = cluster.daemons[held.nodes[0]]
    daemon.crash()
    assert cluster.run_until(lambda: cluster.state.nodes[daemon.name].lost, 80.0)
    assert cluster.run_until(lambda: phase(cluster, number) is GangPhase.RUNNING, 30.0)
    cluster.run_for(60.0)
    daemon.start()
    ends(cluster, number)
    assert not cluster.state.gangs.places_on[daemon.name]


@pytest.mark.parametrize(
    ("nodes", "cut_off_s", "reason"), [(2, 400.0, "all nodes"), (4, 110.0, "half of the nodes or more")]
)
def test_jobs_go_on_with_the_same_attempt_after_the_master_was_cut_off_from_their_nodes(
    nodes: int, cut_off_s: float, reason: str
) -> None:
    cluster = cluster_of(nodes, CoreSettings(lost_after_s=60.0, lost_margin_s=5.0))
    numbers = [started(cluster, job_of(4, steps=300)) for _ in range(2)]
    epochs = [job(cluster, number).epoch for number in numbers]
    away = [cluster.state.gangs[epoch].nodes[0] for epoch in epochs]
    cut_off(cluster, *away)
    cluster.run_for(cut_off_s)
    assert {cluster.state.nodes[name].state.value for name in away} == {"SILENT"}
    (why,) = explain(cluster.state, numbers[0], cluster.engine.now).blockers
    assert f"{reason} fell silent at once: the master may be cut off" in why.detail
    # They return one after another.
    for name in away:
        cluster.daemons[name].network = cluster.network
        cluster.run_for(20.0)
    assert [job(cluster, number).epoch for number in numbers] == epochs
    for number in numbers:
        ends(cluster, number)
        assert job(cluster, number).preemptions == 0


def test_half_of_the_nodes_that_are_dead_are_lost_after_twice_the_time_and_their_jobs_go_on_elsewhere() -> None:
    cluster = cluster_of(4, CoreSettings(lost_after_s=60.0, lost_margin_s=5.0))
    numbers = [started(cluster, job_of(4, steps=100)) for _ in range(2)]
    away = [cluster.state.gangs[job(cluster, number).epoch].nodes[0] for number in numbers]
    for name in away:
        cluster.daemons[name].reboot()
    cluster.run_for(125.0)
    assert not any(cluster.state.nodes[name].lost for name in away)
    assert cluster.run_until(lambda: all(cluster.state.nodes[name].lost for name in away), 10.0)
    for number in numbers:
        ends(cluster, number)


def test_a_node_that_stays_away_after_the_master_was_cut_off_is_lost_once_its_clock_has_run_anew() -> None:
    cluster = cluster_of(2, CoreSettings(lost_after_s=60.0, lost_margin_s=5.0))
    number = started(cluster, job_of(4, steps=200))
    (away,) = cluster.state.gangs[job(cluster, number).epoch].nodes
    (back,) = {"n1", "n2"} - {away}
    cut_off(cluster, away, back)
    cluster.run_for(300.0)
    cluster.daemons[back].network = cluster.network
    assert cluster.run_until(lambda: cluster.state.nodes[back].takes_gangs, 30.0)
    cluster.run_for(60.0)
    assert not cluster.state.nodes[away].lost
    assert cluster.run_until(lambda: cluster.state.nodes[away].lost, 10.0)
    ends(cluster, number)


def test_a_job_whose_daemon_stays_with_a_fenced_master_goes_on_elsewhere_and_never_runs_twice() -> None:
    cluster = cluster_of(1, CoreSettings(lost_after_s=60.0))
    # It reports no checkpoints, and no other node falls silent, so that the former master has nothing to write: it has
    # to look whose the store is.
    number = started(cluster, replace(job_of(4), command=(OPAQUE, "300")))
    cluster.run_for(10.0)
    former = cluster.start_another_master(stay=["n1"])
    cluster.add_node("n2", SERVER)
    assert cluster.run_until(lambda: not former.is_up, 5.0)
    assert cluster.run_until(lambda: cluster.state.nodes["n1"].lost, 120.0)
    assert cluster.run_until(lambda: phase(cluster, number) is GangPhase.RUNNING, 30.0)
    cluster.daemons["n1"].master = cluster.master
    ends(cluster, number)
    assert not cluster.state.gangs.places_on["n1"]


@pytest.mark.parametrize("is_running", [False, True])
def test_a_checkpoint_written_while_cut_off_is_what_the_next_attempt_starts_from(is_running: bool) -> None:
    cluster = cluster_of(2, CoreSettings(lost_after_s=60.0, lost_margin_s=5.0))
    number = started(cluster, job_of(4, steps=200))
    training = cluster.oracle.trainings["uid-1"]
    assert cluster.run_until(lambda: training.known == 20, 60.0)
    held = gang(cluster, number)
    assert held is not None
    (here,), (there,) = held.nodes, sorted({"n1", "n2"} - set(held.nodes))
    daemon = cluster.daemons[here]
    daemon.network = Network(cluster.engine, Faults(lose=1.0))
    if not is_running:
        cluster.ask(CordonNode(there, "another's"))
    assert cluster.run_until(lambda: cluster.state.nodes[here].lost, 80.0)
    newest = training.checkpoints[-1]
    assert training.known == 20 < newest
    if is_running:
        # Storage has it, before anything is heard of the node that wrote it.
        assert cluster.run_until(lambda: training.began == newest, 30.0)
    daemon.network = cluster.network
    assert cluster.run_until(lambda: training.known == newest, 30.0)
    assert cluster.run_until(lambda: not cluster.state.gangs.places_on[here], 30.0)
    if not is_running:
        cluster.ask(UncordonNode(there))
    assert cluster.run_until(lambda: training.began == newest, 60.0)
    ends(cluster, number)


@pytest.mark.parametrize("is_told", [True, False])
def test_a_job_whose_checkpoints_were_written_while_its_master_was_dead_goes_on_from_the_newest(is_told: bool) -> None:
    """The node dies before the master is back; `is_told`: the master knew of a checkpoint before it died."""
    cluster = cluster_of(2)
    number = started(cluster, job_of(4, steps=200))
    training = cluster.oracle.trainings["uid-1"]
    assert cluster.run_until(lambda: training.known == 20 or (not is_told and training.step == 15), 60.0)
    held = gang(cluster, number)
    assert held is not None
    (here,) = held.nodes
    cluster.master.crash(120.0)
    assert cluster.run_until(lambda: len(training.checkpoints) == 4, 100.0)
    if is_told:
        # Two newer ones are there, and still those that the master would start from.
        assert [one.step for one in cluster.physics.on_storage("uid-1")] == [20, 60, 80]
    cluster.daemons[here].reboot(wiped=True)
    assert cluster.run_until(lambda: cluster.master.is_up, 130.0)
    cluster.run_for(5.0)
    cluster.engine.after(100.0, cluster.daemons[here].start)
    assert cluster.run_until(lambda: isinstance(cluster.ask(DeclareLost(here)), NodeAnswer), 60.0)
    assert cluster.run_until(lambda: training.step > 80, 60.0)
    assert training.began == 80
    ends(cluster, number)
    assert job(cluster, number).launch_failures == 0


def test_a_job_whose_known_checkpoints_are_gone_from_storage_goes_on_from_the_newest_that_is_left() -> None:
    cluster = cluster_of(2)
    number = started(cluster, job_of(4, steps=200))
    training = cluster.oracle.trainings["uid-1"]
    assert cluster.run_until(lambda: training.known == 40, 60.0)
    cluster.master.crash(60.0)
    assert cluster.run_until(lambda: len(training.checkpoints) == 4, 60.0)
    held = gang(cluster, number)
    assert held is not None
    (here,) = held.nodes
    for path in cluster.physics.kept.pop(held.epoch):
        del cluster.physics.checkpoints[path]
    cluster.daemons[here].reboot(wiped=True)
    assert cluster.run_until(lambda: cluster.master.is_up, 70.0)
    cluster.run_for(5.0)
    assert cluster.run_until(lambda: isinstance(cluster.ask(DeclareLost(here)), NodeAnswer), 60.0)
    assert cluster.run_until(lambda: training.step > 80, 60.0)
    assert training.began == 80
    ends(cluster, number)


def test_a_draining_node_empties_by_moves() -> None:
    cluster = cluster_of(2)
    numbers = [started(cluster, job_of(1, steps=200)), started(cluster, job_of(1, steps=200))]
    held = gang(cluster, numbers[0])
    assert held is not None
    assert isinstance(cluster.ask(DrainNode(held.nodes[0], "new fan")), NodeAnswer)
    assert cluster.run_until(lambda: not cluster.state.gangs.places_on[held.nodes[0]], 60.0)
    for number in numbers:
        ends(cluster, number)


@pytest.mark.parametrize("seconds", [0.0, 0.05, 0.5, 1.5, 10.0])
def test_cancel_ends_a_job_in_every_phase(seconds: float) -> None:
    cluster = cluster_of(1)
    submission = cluster.submit(job_of(2))
    assert cluster.run_until(lambda: submission.number > 0, 10.0)
    cluster.run_for(seconds)
    cluster.ask(CancelJob(submission.number))
    ends(cluster, submission.number, JobState.CANCELLED)
    cluster.run_for(10.0)
    assert cluster.state.rows["n1"].free_mask == 0b1111


def first_blocker(cluster: FaultCluster, number: int) -> Reason:
    return explain(cluster.state, number, cluster.master.now()).blockers[0].reason


def waits_for(cluster: FaultCluster, spec: JobSpec, reason: Reason, user: str = "") -> int:
    submission = cluster.submit(spec, user)
    assert cluster.run_until(lambda: submission.number > 0, 10.0)
    cluster.run_for(10.0)
    assert job(cluster, submission.number).state is JobState.PENDING
    assert first_blocker(cluster, submission.number) is reason
    return submission.number


@pytest.mark.parametrize(
    ("holder", "waiting", "reason"),
    [
        (job_of(3), job_of(2), Reason.GPUS),
        (job_of(2, millicores=7_000), job_of(1, millicores=3_000), Reason.CORES),
        (job_of(2, memory=28 * _GIB), job_of(1, memory=20 * _GIB), Reason.MEMORY),
        (job_of(1), replace(job_of(4), priority=0), Reason.GPUS),
    ],
)
def test_why_names_the_missing_pieces_and_the_job_starts_once_they_are_free(
    holder: JobSpec, waiting: JobSpec, reason: Reason
) -> None:
    cluster = cluster_of(1)
    first = started(cluster, holder)
    number = waits_for(cluster, waiting, reason)
    cluster.ask(CancelJob(first))
    ends(cluster, number)


def test_why_names_locality() -> None:
    cluster = cluster_of(1)
    # Two small jobs land on different sockets, so that no socket has two devices left.
    holders = [started(cluster, job_of(1, steps=500)), started(cluster, job_of(1, steps=500))]
    near = replace(job_of(2), locality=Locality(widest=LocalityLevel.SOCKET))
    submission = cluster.submit(near)
    cluster.run_for(10.0)
    number = submission.number
    # A further device beside a free one would help as well.
    reasons = {one.reason for one in explain(cluster.state, number, cluster.master.now()).blockers}
    assert reasons == {Reason.LOCALITY, Reason.GPUS}
    cluster.ask(CancelJob(holders[0]))
    ends(cluster, number)


def test_why_names_an_unavailable_node() -> None:
    cluster = cluster_of(1)
    cluster.ask(CordonNode("n1", "being cleaned"))
    number = waits_for(cluster, job_of(1), Reason.NODE_UNAVAILABLE)
    cluster.ask(UncordonNode("n1"))
    ends(cluster, number)


def test_why_names_the_jobs_that_go_first() -> None:
    cluster = cluster_of(1)
    first = started(cluster, job_of(3, steps=500))
    blocked = waits_for(cluster, job_of(4), Reason.GPUS)
    number = waits_for(cluster, job_of(1), Reason.PROTECTED)
    cluster.ask(CancelJob(blocked))
    assert cluster.run_until(lambda: phase(cluster, number) is GangPhase.RUNNING, 30.0)
    cluster.ask(CancelJob(first))
    ends(cluster, number)


def test_why_names_a_used_up_quota() -> None:
    cluster = cluster_of(1, CoreSettings(quota_devices={"ann": 2}))
    first = started(cluster, job_of(2, steps=500), "ann")
    number = waits_for(cluster, job_of(1), Reason.QUOTA, "ann")
    cluster.ask(CancelJob(first))
    ends(cluster, number)


def test_why_names_a_daemon_that_cannot_become_the_user() -> None:
    cluster = FaultCluster(1, [])
    cluster.add_node("n1", SERVER, {"switch_user": "no", "user": "root"})
    cluster.run_for(5.0)
    number = waits_for(cluster, job_of(1), Reason.CANNOT_SWITCH_USER, "ann")
    cluster.add_node("n2", SERVER, {"switch_user": "yes"})
    ends(cluster, number)


def test_why_names_storage_that_the_node_does_not_see() -> None:
    cluster = cluster_of(1)
    number = started(cluster, job_of(2, steps=100))
    cluster.ask(SuspendJob(number, SuspendLevel.CHECKPOINT))
    assert cluster.run_until(lambda: job(cluster, number).suspended_level is SuspendLevel.CHECKPOINT, 30.0)
    cluster.daemons["n1"].storage_proved = False
    cluster.run_for(10.0)
    cluster.ask(ResumeJob(number))
    cluster.run_for(10.0)
    assert job(cluster, number).state is JobState.PENDING
    assert first_blocker(cluster, number) is Reason.STORAGE_NOT_SHARED
    cluster.daemons["n1"].storage_proved = True
    ends(cluster, number)


def test_why_names_a_kept_place() -> None:
    cluster = cluster_of(1, CoreSettings(policy="backfill"))
    first = started(cluster, job_of(3, steps=2_000))
    large = waits_for(cluster, job_of(4), Reason.GPUS)
    cluster.run_for(150.0)
    number = waits_for(cluster, job_of(1), Reason.KEPT)
    cluster.ask(CancelJob(large))
    assert cluster.run_until(lambda: phase(cluster, number) is GangPhase.RUNNING, 30.0)
    cluster.ask(CancelJob(first))
    ends(cluster, number)
