"""A job whose script saves itself at a signal is suspended, moved and drained; a job that must move is checked."""

from __future__ import annotations

import pytest
from core.drive import Drive, job_of
from ganger.job_state import JobState
from ganger.protocol.gang_orders import Mechanism
from ganger_master.core import attempts
from ganger_master.core.answers import JobAnswer, Refused
from ganger_master.core.commands import DrainNode, MoveJob, ObservedGang, ResumeJob, SuspendJob
from ganger_master.core.events import JobSuspended
from ganger_master.core.gang_model import Gang, GangIntent, ObservedPhase, Outcome, OutcomeKind, Restore
from ganger_master.core.job_model import Capabilities, Checkpoint, RefusedMechanism, SuspendLevel
from ganger_master.core.moves import due_at
from msgspec.structs import replace

SIGNAL = Capabilities(pause=True, checkpoint=True, known=True, mechanism=Mechanism.SIGNAL)
SAVED = Outcome(OutcomeKind.YIELDED, 3, message="rank 0 exited with code 3 after its stop signal")
PINNED = Capabilities(
    pause=True,
    known=True,
    mechanism=Mechanism.NONE,
    refused_mechanisms=(RefusedMechanism(Mechanism.IMAGE, "no CRIU"), RefusedMechanism(Mechanism.SIGNAL, "none")),
)


class Cluster(Drive):
    """Two nodes whose gangs offer `offered`."""

    offered = SIGNAL

    def report(self, gang: Gang, phase: ObservedPhase, stop_step: int = 0) -> ObservedGang:
        return replace(super().report(gang, phase, stop_step), capabilities=self.offered)

    def leaves(self, number: int, epoch: int, outcome: Outcome = SAVED) -> None:
        gang = self.state.gangs[epoch]
        (node,) = gang.nodes
        self.observe(node, *self.others(node, epoch), replace(self.report(gang, ObservedPhase.ENDED), outcome=outcome))


def running(offered: Capabilities = SIGNAL, **changes: object) -> tuple[Cluster, int, int]:
    """Return a cluster, and the number and epoch of a job on it that has stepped."""
    cluster = Cluster(2)
    cluster.offered = offered
    number = cluster.submit(replace(job_of(2), stop_signal="TERM", stop_grace_s=300.0, **changes))  # type: ignore[arg-type]
    epoch = cluster.start(number)
    cluster.runs(number)
    return cluster, number, epoch


def test_a_suspended_job_rests_on_storage_once_its_script_has_left() -> None:
    cluster, number, epoch = running()
    cluster.step(SuspendJob(number, SuspendLevel.CHECKPOINT))
    assert cluster.state.gangs[epoch].intent is GangIntent.PARK
    cluster.leaves(number, epoch)
    job = cluster.job(number)
    assert (job.state, job.suspended_level, job.epoch) == (JobState.SUSPENDED, SuspendLevel.CHECKPOINT, 0)
    assert (job.failures, job.preemptions) == (0, 0)
    assert any(row.kind == "gang_parked" and row.message == SAVED.message for row in cluster.history)
    cluster.step(ResumeJob(number))
    assert cluster.state.gangs[cluster.start(number)].restore == Restore()


def attempt_of(cluster: Cluster, epoch: int) -> int:
    """Return the number that the ranks of a gang get."""
    (node,) = cluster.state.gangs[epoch].nodes
    (number,) = [gang.attempt for gang in cluster.state.desired.of(node).gangs if gang.epoch == epoch]
    return number


def test_each_start_of_a_script_that_saves_itself_has_the_next_number() -> None:
    cluster, number, epoch = running()
    numbers = [attempt_of(cluster, epoch)]
    cluster.step(SuspendJob(number, SuspendLevel.CHECKPOINT))
    cluster.leaves(number, epoch)
    cluster.step(ResumeJob(number))
    epoch = cluster.start(number)
    cluster.runs(number)
    numbers.append(attempt_of(cluster, epoch))
    cluster.step(MoveJob(number))
    destination = cluster.job(number).next_epoch
    cluster.seen(number, destination, ObservedPhase.PREPARED)
    assert attempt_of(cluster, epoch) == 2, "the script is still saving itself"
    cluster.leaves(number, epoch)
    numbers.append(attempt_of(cluster, destination))
    assert numbers == [1, 2, 3]
    assert cluster.job(number).attempt == 3


def test_processes_from_an_image_have_the_number_of_their_first_start() -> None:
    cluster, number, epoch = running(replace(SIGNAL, mechanism=Mechanism.IMAGE))
    cluster.step(SuspendJob(number, SuspendLevel.CHECKPOINT))
    cluster.state.put_job(replace(cluster.job(number), checkpoint=Checkpoint(9, epoch, "checkpoints/9-1")))
    cluster.leaves(number, epoch)
    cluster.step(ResumeJob(number))
    epoch = cluster.start(number)
    assert cluster.state.gangs[epoch].restore.checkpoint_path == "checkpoints/9-1"
    assert (attempt_of(cluster, epoch), cluster.job(number).attempt) == (1, 1)


def test_a_gang_that_goes_on_in_place_or_moves_with_its_state_has_not_started_anew() -> None:
    cluster = Drive(2)
    number = cluster.submit(job_of(2))
    epoch = cluster.start(number)
    cluster.runs(number)
    cluster.step(SuspendJob(number, SuspendLevel.PAUSE))
    cluster.seen(number, epoch, ObservedPhase.PARKED, 7)
    cluster.step(ResumeJob(number))
    cluster.runs(number)
    assert isinstance(cluster.step(MoveJob(number)), JobAnswer)
    destination = cluster.job(number).next_epoch
    cluster.seen(number, destination, ObservedPhase.PREPARED)
    cluster.seen(number, epoch, ObservedPhase.PARKED, 9)
    cluster.seen(number, destination, ObservedPhase.READY, 9)
    assert (cluster.job(number).epoch, cluster.job(number).attempt) == (destination, 1)


def test_a_preempted_script_waits_again_and_that_costs_no_failure() -> None:
    cluster, number, epoch = running()
    attempts.suspend(cluster.state, JobSuspended(cluster.now, "planner", number, SuspendLevel.CHECKPOINT, by_plan=True))
    cluster.leaves(number, epoch, replace(SAVED, message="rank 0 did not exit within the grace"))
    job = cluster.job(number)
    assert (job.state, job.failures, job.preemptions) == (JobState.PENDING, 0, 1)


def test_what_the_agent_saved_earlier_is_older_than_the_files_of_the_script() -> None:
    cluster, number, epoch = running()
    cluster.state.put_job(replace(cluster.job(number), checkpoint=Checkpoint(9, epoch, "checkpoints/9-1")))
    cluster.step(SuspendJob(number, SuspendLevel.CHECKPOINT))
    cluster.leaves(number, epoch)
    assert cluster.job(number).checkpoint is None


def test_a_move_starts_the_script_elsewhere_once_it_has_left() -> None:
    cluster, number, source = running()
    assert cluster.step(MoveJob(number)) == JobAnswer(number)
    destination = cluster.job(number).next_epoch
    assert cluster.state.gangs[destination].restore == Restore()
    cluster.seen(number, destination, ObservedPhase.PREPARED)
    assert cluster.state.gangs[source].intent is GangIntent.HAND_OVER
    assert cluster.job(number).epoch == source, "the script is still saving itself"
    cluster.leaves(number, source)
    assert cluster.job(number).epoch == destination
    assert cluster.state.gangs[destination].intent is GangIntent.RUN
    cluster.seen(number, destination, ObservedPhase.RUNNING)
    assert [gang.epoch for gang in cluster.state.gangs.of_job(number)] == [destination]
    assert cluster.job(number).failures == 0


def test_a_script_that_has_left_before_its_destination_failed_waits_again_without_a_failure() -> None:
    cluster, number, source = running()
    cluster.step(MoveJob(number))
    destination = cluster.job(number).next_epoch
    cluster.seen(number, destination, ObservedPhase.PREPARED)
    cluster.leaves(number, destination, Outcome(OutcomeKind.LAUNCH_FAILED, message="no launcher"))
    cluster.leaves(number, source)
    job = cluster.job(number)
    assert (job.state, job.epoch, job.failures) == (JobState.PENDING, 0, 0)


def test_a_move_has_the_grace_of_the_script_beyond_its_deadline() -> None:
    cluster, number, _ = running()
    cluster.step(MoveJob(number))
    since = cluster.state.gangs[cluster.job(number).next_epoch].since
    assert due_at(cluster.state, number) == since + cluster.state.settings.move_deadline_s + 300.0


def test_no_planner_moves_a_script_that_would_start_again() -> None:
    cluster, number, _ = running()
    assert cluster.job(number).capabilities.can_move
    assert not cluster.job(number).capabilities.can_hand_over


def test_a_drain_moves_a_script_that_saves_itself() -> None:
    cluster, number, epoch = running()
    (here,) = cluster.state.gangs[epoch].nodes
    cluster.step(DrainNode(here, "a new fan"))
    assert cluster.job(number).next_epoch


@pytest.mark.parametrize(
    ("offered", "why"),
    [
        (PINNED, "image: no CRIU; signal: none"),
        (replace(PINNED, missing={"MOVE": "it opens a database"}), "it opens a database"),
    ],
)
def test_a_job_that_must_move_and_cannot_fails_at_its_first_step(offered: Capabilities, why: str) -> None:
    cluster, number, epoch = running(offered, is_move_required=True)
    cluster.leaves(number, epoch, Outcome(OutcomeKind.STOPPED))
    job = cluster.job(number)
    assert job.state is JobState.FAILED
    assert job.failure is not None
    assert job.failure.reason == "CANNOT_MOVE"
    assert job.failure.message == f"it cannot be moved, and was submitted with --must-move: {why}"


@pytest.mark.parametrize("offered", [replace(PINNED, presumed=True), SIGNAL])
def test_a_job_that_must_move_goes_on_while_it_can_or_that_is_not_known(offered: Capabilities) -> None:
    cluster, number, _ = running(offered, is_move_required=True)
    assert cluster.job(number).state is JobState.HOLDING
    assert cluster.job(number).ending is None


def test_a_job_that_was_found_movable_is_not_ended_for_a_mechanism_that_it_loses_later() -> None:
    cluster, number, _ = running(SIGNAL, is_move_required=True)
    cluster.offered = PINNED
    cluster.runs(number)
    assert cluster.job(number).ending is None
    refused = cluster.step(MoveJob(number))
    assert isinstance(refused, Refused)
    assert "image: no CRIU" in refused.message
