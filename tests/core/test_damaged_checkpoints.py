"""An unreadable checkpoint is passed over for the complete one before; a job never restarts from zero unreported."""

from __future__ import annotations

from core.drive import Drive, job_of
from ganger.job_state import JobState
from ganger_master.core.commands import DeclareLost, ResumeJob, SuspendJob
from ganger_master.core.gang_model import ObservedPhase, Outcome, OutcomeKind
from ganger_master.core.job_model import Checkpoint, SuspendLevel
from msgspec.structs import replace


def saved(drive: Drive, number: int, step: int) -> None:
    """The present gang runs, and has published a checkpoint."""
    gang = drive.state.gangs[drive.job(number).epoch]
    checkpoint = Checkpoint(step, gang.epoch, f"checkpoints/{step}-{gang.epoch}")
    drive.observe("n1", replace(drive.report(gang, ObservedPhase.RUNNING), checkpoint=checkpoint))


def restarted(drive: Drive, number: int) -> int:
    """It fails by a lost exit, which costs it nothing, and starts again; its epoch."""
    ends(drive, number, Outcome(OutcomeKind.UNKNOWN))
    return drive.start(number)


def ends(drive: Drive, number: int, outcome: Outcome) -> None:
    gang = drive.state.gangs[drive.job(number).epoch]
    drive.observe("n1", replace(drive.report(gang, ObservedPhase.ENDED), outcome=outcome))
    drive.observe("n1")


def test_a_checkpoint_counts_only_if_the_reporting_node_has_a_part_of_the_gang() -> None:
    drive = Drive(nodes=2)
    number = drive.submit(job_of(2))
    drive.start(number)
    gang = drive.state.gangs[drive.job(number).epoch]
    (own,) = gang.nodes
    (other,) = {"n1", "n2"} - {own}
    told = replace(drive.report(gang, ObservedPhase.RUNNING), checkpoint=Checkpoint(10, gang.epoch, "a"))
    drive.observe(other, told)
    assert drive.job(number).checkpoint is None
    drive.observe(own, told)
    assert drive.job(number).checkpoint == told.checkpoint


def test_a_checkpoint_of_a_later_epoch_than_the_reporting_gang_is_ignored() -> None:
    drive, number = begun()
    gang = drive.state.gangs[drive.job(number).epoch]
    later = Checkpoint(10, gang.epoch + 1, "a")
    drive.observe("n1", replace(drive.report(gang, ObservedPhase.RUNNING), checkpoint=later))
    assert drive.job(number).checkpoint is None


def unreadable(name: str) -> Outcome:
    return Outcome(OutcomeKind.STATE_UNREADABLE, message=f"checkpoint /storage/{name} cannot be restored: rank-0.shard")


def begun() -> tuple[Drive, int]:
    drive = Drive()
    number = drive.submit(job_of(2))
    drive.start(number)
    drive.runs(number)
    return drive, number


def test_the_checkpoint_before_is_used_and_reported_and_later_ones_count_as_newer() -> None:
    drive, number = begun()
    saved(drive, number, 10)
    saved(drive, number, 20)
    first = drive.job(number).epoch
    epoch = restarted(drive, number)
    assert drive.state.gangs[epoch].restore.checkpoint_path == f"checkpoints/20-{first}"
    ends(drive, number, unreadable(f"20-{first}"))
    job = drive.job(number)
    assert job.state is JobState.PENDING
    assert (job.failures, job.launch_failures) == (0, 0)
    assert f"/storage/20-{first}" in job.trouble
    (told,) = [entry for entry in drive.history if entry.kind == "checkpoint_unreadable"]
    assert dict(told.figures)["goes_on_from"] == "10"
    epoch = drive.start(number)
    restore = drive.state.gangs[epoch].restore
    assert (restore.checkpoint_path, restore.step) == (f"checkpoints/10-{first}", 10)
    drive.runs(number)
    saved(drive, number, 15)
    job = drive.job(number)
    assert job.checkpoint is not None
    assert (job.checkpoint.step, job.trouble) == (15, "")
    assert job.checkpoint_before is not None
    assert job.checkpoint_before.step == 10


def test_an_unreadable_checkpoint_is_not_used_when_an_old_part_reports_it_again() -> None:
    drive = Drive(nodes=2)
    number = drive.submit(job_of(8))
    first = drive.start(number)
    drive.runs(number)
    gang = drive.state.gangs[first]
    running = drive.report(gang, ObservedPhase.RUNNING)
    told = [replace(running, checkpoint=Checkpoint(step, first, f"{step}-{first}")) for step in (10, 20, 30)]
    drive.observe("n1", told[0])
    drive.now += drive.state.settings.session_alive_s
    drive.step(DeclareLost("n1"))
    drive.observe("n2", replace(running, phase=ObservedPhase.ENDED, outcome=Outcome(OutcomeKind.UNKNOWN)))
    # It comes back while the job waits, with what it wrote meanwhile.
    drive.join("n1")
    drive.observe("n1", told[1])
    assert checkpoints(drive, number) == [f"20-{first}", f"10-{first}"]
    epoch = drive.state.counters.next_epoch
    drive.state.put_job(replace(drive.job(number), unreadable=(f"30-{first}",)))
    drive.observe("n1", told[2])
    assert checkpoints(drive, number) == [f"20-{first}", f"10-{first}"]
    assert epoch == drive.state.counters.next_epoch


def checkpoints(drive: Drive, number: int) -> list[str]:
    job = drive.job(number)
    return [one.path for one in (job.checkpoint, job.checkpoint_before) if one is not None]


def test_when_no_good_one_is_left_the_job_fails_and_names_the_files() -> None:
    drive, number = begun()
    saved(drive, number, 10)
    saved(drive, number, 20)
    restarted(drive, number)
    ends(drive, number, unreadable("20"))
    drive.start(number)
    ends(drive, number, unreadable("10"))
    job = drive.job(number)
    assert job.state is JobState.FAILED
    assert job.failure is not None
    assert job.failure.reason == "NO_CHECKPOINT"
    assert "/storage/20 " in job.failure.message
    assert "/storage/10 " in job.failure.message


def test_a_suspended_job_that_is_resumed_goes_back_too() -> None:
    drive, number = begun()
    saved(drive, number, 10)
    saved(drive, number, 20)
    drive.step(SuspendJob(number, SuspendLevel.CHECKPOINT))
    drive.seen(number, drive.job(number).epoch, ObservedPhase.PARKED, 20)
    drive.observe("n1")
    drive.step(ResumeJob(number))
    drive.start(number)
    ends(drive, number, unreadable("20"))
    drive.start(number)
    assert drive.state.gangs[drive.job(number).epoch].restore.step == 10


def test_a_job_whose_known_checkpoints_are_gone_goes_on_from_the_newest_on_storage() -> None:
    drive, number = begun()
    saved(drive, number, 10)
    saved(drive, number, 20)
    first = drive.job(number).epoch
    restarted(drive, number)
    found = tuple([Checkpoint(step, first, f"checkpoints/{step}-{first}") for step in (30, 40)])
    ends(drive, number, replace(unreadable(f"20-{first}"), checkpoints=found))
    job = drive.job(number)
    assert (job.state, job.failures, job.launch_failures) == (JobState.PENDING, 0, 0)
    assert checkpoints(drive, number) == [f"checkpoints/40-{first}", f"checkpoints/30-{first}"]
    restore = drive.state.gangs[drive.start(number)].restore
    assert (restore.checkpoint_path, restore.step) == (f"checkpoints/40-{first}", 40)


def test_a_checkpoint_found_on_storage_that_is_unreadable_or_of_a_later_epoch_is_not_taken() -> None:
    drive, number = begun()
    saved(drive, number, 10)
    first = drive.job(number).epoch
    epoch = restarted(drive, number)
    found = (Checkpoint(10, first, f"checkpoints/10-{first}"), Checkpoint(30, epoch, f"checkpoints/30-{epoch}"))
    ends(drive, number, replace(unreadable(f"10-{first}"), checkpoints=found))
    assert drive.job(number).state is JobState.FAILED


def outdated(*steps: int, epoch: int) -> Outcome:
    found = tuple([Checkpoint(step, epoch, f"checkpoints/{step}-{epoch}") for step in steps])
    return Outcome(OutcomeKind.STATE_OUTDATED, message="storage has a newer checkpoint", checkpoints=found)


def test_a_newer_checkpoint_on_storage_is_what_the_job_starts_from_at_no_cost_to_it() -> None:
    drive, number = begun()
    first = drive.job(number).epoch
    restarted(drive, number)
    ends(drive, number, outdated(30, 40, epoch=first))
    job = drive.job(number)
    assert (job.state, job.failures, job.launch_failures) == (JobState.PENDING, 0, 0)
    assert checkpoints(drive, number) == [f"checkpoints/40-{first}", f"checkpoints/30-{first}"]
    assert drive.state.gangs[drive.start(number)].restore.step == 40


def test_a_daemon_that_goes_on_reporting_newer_checkpoints_without_any_does_not_start_the_job_for_ever() -> None:
    drive, number = begun()
    restarted(drive, number)
    for _ in range(drive.state.settings.launch_failures_allowed):
        ends(drive, number, outdated(epoch=1))
        assert drive.job(number).state is JobState.PENDING
        drive.start(number)
    ends(drive, number, outdated(epoch=1))
    assert drive.job(number).state is JobState.FAILED


def test_the_leader_receives_the_checkpoints_to_keep_as_soon_as_they_are_durable() -> None:
    drive = Drive(nodes=2)
    number = drive.submit(job_of(8))
    first = drive.start(number)
    drive.runs(number)
    gang = drive.state.gangs[first]
    kept = {}
    for step in (10, 20, 30):
        told = replace(drive.report(gang, ObservedPhase.RUNNING), checkpoint=Checkpoint(step, first, f"{step}-{first}"))
        drive.observe("n1", told)
        kept = {node: drive.state.desired.of(node).gangs[0].kept_checkpoints for node in ("n1", "n2")}
    leader = drive.state.desired.of("n1").gangs[0].members[0].node
    (other,) = {"n1", "n2"} - {leader}
    assert kept == {leader: (f"30-{first}", f"20-{first}"), other: ()}


def test_a_job_that_cannot_be_brought_back_to_its_checkpoint_rests_on_it_and_can_be_resumed() -> None:
    drive, number = begun()
    saved(drive, number, 10)
    restarted(drive, number)
    ends(drive, number, Outcome(OutcomeKind.FAILED, 77, message="rank 0 could not restore its state"))
    job = drive.job(number)
    assert (job.state, job.suspended_level, job.failures) == (JobState.SUSPENDED, SuspendLevel.CHECKPOINT, 0)
    assert "its checkpoint of step 10 is kept" in job.reason
    drive.step(ResumeJob(number))
    epoch = drive.start(number)
    assert drive.state.gangs[epoch].restore.step == 10


def test_a_job_that_resumes_and_cannot_be_brought_back_is_suspended_again() -> None:
    drive, number = begun()
    saved(drive, number, 10)
    drive.step(SuspendJob(number, SuspendLevel.CHECKPOINT))
    ends(drive, number, Outcome(OutcomeKind.YIELDED))
    drive.step(ResumeJob(number))
    drive.start(number)
    ends(drive, number, Outcome(OutcomeKind.FAILED, 77, message="rank 0 could not restore its state"))
    assert (drive.job(number).state, drive.job(number).suspended_level) == (
        JobState.SUSPENDED,
        SuspendLevel.CHECKPOINT,
    )


def test_what_is_on_the_own_disk_does_not_replace_a_newer_one_on_another_node_s() -> None:
    drive, number = begun()
    first = drive.job(number).epoch
    epoch = restarted(drive, number)
    newest, before, older = [
        Checkpoint(step, first, f"checkpoints/{step}-{first}", nodes=(node,))
        for step, node in ((30, "n9"), (20, "n9"), (10, "n1"))
    ]
    drive.state.put_job(replace(drive.job(number), checkpoint=newest, checkpoint_before=before))
    gang = drive.state.gangs[epoch]
    drive.state.put_gang(replace(gang, restore=replace(gang.restore, checkpoint_path=newest.path)))
    ends(drive, number, replace(unreadable(f"30-{first}"), checkpoints=(older,)))
    assert (drive.job(number).checkpoint, drive.job(number).checkpoint_before) == (before, older)
