"""The reasons that a plan gives for its changes, the places it keeps, and the costs of a move as reported. (1 s)"""

from __future__ import annotations

from core.drive import Drive, job_of
from ganger.cluster.refusals import Reason
from ganger.cluster.resources import Claim
from ganger_master.core.answers import JobAnswer, PlanAnswer, Refused, Rejected
from ganger_master.core.commands import KeepPlace, MoveJob, ProposePlan, Tick
from ganger_master.core.explain import RoomInProgress, kept_for, making_room_for
from ganger_master.core.gang_model import GangPhase, ObservedPhase
from ganger_master.core.job_model import SuspendLevel
from ganger_master.core.plan_changes import (
    Goal,
    MoveChange,
    PlanChange,
    Purpose,
    StartChange,
    SuspendChange,
    TrialFinding,
)
from msgspec.structs import replace

HOLE = Purpose(Goal.HOLE, job=3, saved=80.0, pause_s=0.5)


def place(node: str, mask: int) -> tuple[Claim, ...]:
    """As many tasks as devices; two cores and 4 GiB for each."""
    devices = [mask & 0b0011, mask & 0b1100]
    tasks = mask.bit_count()
    return (Claim(node, mask, tuple(2_000 * part.bit_count() for part in devices), tasks << 32, 0, (tasks,)),)


def fragmented() -> Drive:
    """Two nodes of four devices, on each a gang of two (jobs 1 and 2), and job 3 that waits for four."""
    drive = Drive(2)
    for node in ("n1", "n2"):
        number = drive.submit(job_of(2))
        drive.step(ProposePlan((StartChange(number, drive.job(number).revision, place(node, 0b11)),)))
        drive.runs(number)
    drive.submit(job_of(4))
    return drive


def move(drive: Drive, number: int, claims: tuple[Claim, ...]) -> PlanChange:
    return MoveChange(number, drive.job(number).revision, claims, purpose=HOLE)


def test_the_explanation_names_jobs_that_make_room_and_the_history_their_costs() -> None:
    drive = fragmented()
    drive.step(ProposePlan((move(drive, 1, place("n2", 0b1100)),), kept_places=(KeepPlace(3, place("n1", 0b1111)),)))
    assert making_room_for(drive.state, 3) == (RoomInProgress(1, HOLE, ("n1",), ("n2",), GangPhase.MOVING),)
    assert (making_room_for(drive.state, 2), kept_for(drive.state, 3)) == ((), ("n1",))
    begun = next(one for one in drive.history if one.kind == "move_begun")
    assert begun.figures["goal"] == "HOLE"
    assert begun.figures["for"] == "jobs/3"
    assert begun.figures["saved_gpu_seconds"] == "80.0"

    source, destination = drive.job(1).epoch, drive.job(1).next_epoch
    drive.seen(1, destination, ObservedPhase.PREPARED)
    rests = replace(drive.report(drive.state.gangs[source], ObservedPhase.PARKED, 40), last_step_time=1_000.0)
    drive.observe("n1", *drive.others("n1", source), rests)
    drive.seen(1, destination, ObservedPhase.READY, 40)
    runs = replace(drive.report(drive.state.gangs[destination], ObservedPhase.RUNNING), first_step_time=1_000.25)
    drive.observe("n2", *drive.others("n2", destination), runs)
    done = next(one for one in drive.history if one.kind == "move_done")
    assert (done.figures["pause_ms"], done.figures["goal"]) == ("250.0", "HOLE")
    assert drive.job(1).move_pause_s == 0.25
    assert making_room_for(drive.state, 3) == ()


def test_a_job_being_parked_for_another_counts_as_making_room() -> None:
    drive = fragmented()
    change = SuspendChange(1, drive.job(1).revision, level=SuspendLevel.OFFLOAD, purpose=HOLE)
    drive.step(ProposePlan((change,)))
    assert making_room_for(drive.state, 3) == (RoomInProgress(1, HOLE, ("n1",), (), GangPhase.STOPPING),)


def test_no_other_job_gets_a_kept_place_until_its_job_starts() -> None:
    drive = fragmented()
    drive.step(ProposePlan((), kept_places=(KeepPlace(3, place("n1", 0b1111)),)))
    other = drive.submit(job_of(2))
    answer = drive.request(other, place("n1", 0b1100), turn=0)
    assert isinstance(answer, Rejected)
    assert (answer.refusals[0].reason, answer.refusals[0].job) == (Reason.KEPT, "jobs/3")
    # A moving job does not get it either; the rest is free for every job.
    assert isinstance(drive.step(MoveJob(2, ("n1",))), Refused)
    answer = drive.step(ProposePlan((StartChange(other, drive.job(other).revision, place("n2", 0b1100)),)))
    assert isinstance(answer, PlanAnswer)
    assert answer.verdicts[0].approved
    drive.step(ProposePlan((), kept_places=()))
    assert isinstance(drive.step(MoveJob(2, ("n1",))), JobAnswer)


def test_a_kept_place_that_the_planner_no_longer_reports_is_free_again() -> None:
    drive = fragmented()
    drive.step(ProposePlan((), kept_places=(KeepPlace(3, place("n1", 0b1111)),)))
    drive.now += drive.state.settings.move_deadline_s - 1.0
    drive.step(Tick())
    assert kept_for(drive.state, 3) == ("n1",)
    drive.now += 2.0
    drive.step(Tick())
    assert kept_for(drive.state, 3) == ()


def test_what_was_found_after_a_change_is_in_the_history_of_its_job() -> None:
    drive = fragmented()
    findings = (TrialFinding(1, Goal.LOCALITY, True, 1.25, 0.01), TrialFinding(99, Goal.LOCALITY, False, 0.5))
    drive.step(ProposePlan((), findings=findings))
    (told,) = [one for one in drive.history if one.kind.startswith("change_")]
    assert (told.subject, told.kind, told.figures["gain"]) == ("jobs/1", "change_kept", "1.250")
