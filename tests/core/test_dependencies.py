"""Jobs that start after others have ended, and that end cancelled where they never can."""

from __future__ import annotations

import pytest
from core.drive import Drive, job_of
from core.test_arrays import command, running
from core.test_rollback import Found
from core.test_rollback import restored as restored_from_backup
from core.test_rollback import settings as settings_of_restores
from ganger.job_state import JobState
from ganger_master.core import machine
from ganger_master.core.answers import Answer, ArrayAnswer, Refused
from ganger_master.core.commands import CancelJob, ResumeJob, SubmitJob, SuspendJob, Tick
from ganger_master.core.explain import explain
from ganger_master.core.gang_model import ObservedPhase, Outcome, OutcomeKind
from ganger_master.core.job_spec import Condition, Dependency, JobSpec
from ganger_master.core.settings import CoreSettings
from ganger_master.core.state_image import restored
from msgspec.structs import replace

OK, FAILED, ENDED, EACH = Condition.SUCCEEDED, Condition.FAILED, Condition.ENDED, Condition.EACH


def after(*dependencies: tuple[Condition, int]) -> JobSpec:
    return replace(job_of(1), dependencies=tuple([Dependency(*one) for one in dependencies]))


def submitted(drive: Drive, *lrs: str, at_once: int = 0, dependency: tuple[Condition, int] | None = None) -> int:
    """The number of an array."""
    spec = after(*([dependency] if dependency else []))
    answer = drive.step(command(*lrs, at_once=at_once, spec=replace(spec, command=("train",))))
    assert isinstance(answer, ArrayAnswer), answer
    return answer.number


def ends(drive: Drive, number: int, succeeds: bool = True) -> None:
    """Its ranks run and exit."""
    running(drive, [number])
    kind = OutcomeKind.DONE if succeeds else OutcomeKind.FAILED
    gang = drive.state.gangs[drive.job(number).epoch]
    others = drive.others("n1", gang.epoch)
    ended = replace(drive.report(gang, ObservedPhase.ENDED), outcome=Outcome(kind))
    drive.observe("n1", *others, ended)
    drive.observe("n1", *others)


def refused(drive: Drive, spec: JobSpec) -> list[str]:
    answer: Answer = drive.step(SubmitJob(spec, "uid-x", "ann"))
    assert isinstance(answer, Refused), answer
    return [what for _, what in answer.violations]


@pytest.mark.parametrize(
    ("condition", "succeeds", "state"),
    [
        (OK, True, JobState.PENDING),
        (OK, False, JobState.CANCELLED),
        (FAILED, True, JobState.CANCELLED),
        (FAILED, False, JobState.PENDING),
        (ENDED, True, JobState.PENDING),
        (ENDED, False, JobState.PENDING),
    ],
)
def test_a_job_starts_once_another_has_ended_as_it_names_and_is_cancelled_otherwise(
    condition: Condition, succeeds: bool, state: JobState
) -> None:
    drive = Drive()
    first = drive.submit(job_of(1))
    second = drive.submit(after((condition, first)))
    assert not drive.job(second).is_waiting
    assert drive.job(second).pending_since == 0.0
    ends(drive, first, succeeds)
    job = drive.job(second)
    assert (job.state, job.is_waiting) == (state, state is JobState.PENDING)
    if state is JobState.CANCELLED:
        assert job.reason.startswith("it was to start after jobs/1 has ")
        assert job.reason.endswith("which cannot come any more")
    else:
        assert 0.0 < drive.now - job.pending_since < 0.1
        assert [entry.kind for entry in drive.history if entry.subject == job.name][-1] == "dependencies_met"


def test_all_of_several_jobs_must_have_ended() -> None:
    drive = Drive()
    first, second = drive.submit(job_of(1)), drive.submit(job_of(1))
    third = drive.submit(after((OK, first), (ENDED, second)))
    found = explain(drive.state, third, drive.now)
    assert [blocker.reason.value for blocker in found.blockers] == ["DEPENDENCY"]
    assert found.blockers[0].detail == "it starts after jobs/1 has succeeded and jobs/2 has ended"
    assert found.assumption == "unknown, because it waits for other jobs to end"
    ends(drive, first)
    assert explain(drive.state, third, drive.now).blockers[0].detail == "it starts after jobs/2 has ended"
    drive.step(CancelJob(second))
    assert drive.job(third).is_waiting


def test_a_chain_behind_a_job_that_fails_is_cancelled_whole() -> None:
    drive = Drive()
    chain = [drive.submit(job_of(1))]
    for _ in range(3):
        chain.append(drive.submit(after((OK, chain[-1]))))
    drive.step(CancelJob(chain[0]))
    assert [drive.job(number).state for number in chain] == [JobState.CANCELLED] * 4
    assert drive.state.jobs.dependents == {}


def test_a_dependency_on_a_job_that_has_ended_is_met_at_once_or_refused() -> None:
    drive = Drive()
    first = drive.submit(job_of(1))
    ends(drive, first)
    assert drive.job(drive.submit(after((OK, first)))).is_waiting
    assert refused(drive, after((FAILED, first))) == [
        "jobs/1 has ended otherwise already, so the job would never start"
    ]
    assert refused(drive, after((OK, 99))) == ["no job or array 99 is known: there was none, or it ended long ago"]
    assert refused(drive, after((EACH, first))) == ["1 goes with two arrays: `each` pairs members of the same index"]
    assert refused(drive, after((OK, first), (OK, first))) == ["each only once"]


def test_an_array_has_succeeded_once_all_its_members_have() -> None:
    drive = Drive()
    array = submitted(drive, "a", "b")
    good, bad = drive.submit(after((OK, array))), drive.submit(after((FAILED, array)))
    ends(drive, array + 1)
    assert not drive.job(good).is_waiting
    ends(drive, array + 2)
    assert drive.job(good).is_waiting
    assert drive.job(bad).state is JobState.CANCELLED


def test_members_of_two_arrays_are_paired_by_their_index() -> None:
    drive = Drive()
    first = submitted(drive, "a", "b")
    second = submitted(drive, "c", "d", dependency=(EACH, first))
    ends(drive, first + 2)
    assert [drive.job(second + place).is_waiting for place in (1, 2)] == [False, True]
    drive.step(CancelJob(first + 1))
    assert drive.job(second + 1).state is JobState.CANCELLED
    assert refused_array(drive, first) == "1 has no member with index 2: `each` pairs members of the same index"


def refused_array(drive: Drive, first: int) -> str:
    spec = replace(after((EACH, first)), command=("train",))
    answer = drive.step(command("c", "d", "e", spec=spec))
    assert isinstance(answer, Refused)
    return answer.violations[0][1]


def test_members_of_an_array_with_a_limit_wait_for_both() -> None:
    drive = Drive()
    first = drive.submit(job_of(1))
    array = submitted(drive, "a", "b", "c", at_once=2, dependency=(OK, first))
    members = [array + place for place in (1, 2, 3)]
    assert [drive.job(number).is_waiting for number in members] == [False] * 3
    ends(drive, first)
    assert [drive.job(number).is_waiting for number in members] == [True, True, False]
    drive.step(CancelJob(members[0]))
    assert drive.job(members[2]).is_waiting


def test_a_suspended_job_whose_dependency_is_met_waits_for_its_resume() -> None:
    drive = Drive()
    first = drive.submit(job_of(1))
    second = drive.submit(after((OK, first)))
    drive.step(SuspendJob(second))
    ends(drive, first)
    assert not drive.job(second).is_waiting
    drive.step(ResumeJob(second))
    assert drive.job(second).is_waiting


def test_dependencies_outlive_the_master() -> None:
    drive = Drive()
    first = drive.submit(job_of(1))
    second = drive.submit(after((ENDED, first)))
    drive.state = restored(drive.state.settings, drive.state.take_changes().puts.values(), drive.now)
    assert not drive.job(second).is_waiting
    drive.step(CancelJob(first))
    assert drive.job(second).is_waiting


def test_a_member_whose_partner_has_already_failed_ends_cancelled_at_once() -> None:
    drive = Drive()
    first = submitted(drive, "a", "b", "c")
    ends(drive, first + 1, succeeds=False)
    ends(drive, first + 2)
    second = submitted(drive, "d", "e", "f", dependency=(EACH, first))
    states = [drive.job(second + place).state for place in (1, 2, 3)]
    assert states == [JobState.CANCELLED, JobState.PENDING, JobState.PENDING]
    assert [drive.job(second + place).is_waiting for place in (1, 2, 3)] == [False, True, False]
    assert drive.job(second + 1).reason.startswith(f"it was to start after jobs/{first + 1} has succeeded")


@pytest.mark.parametrize(("condition", "starts"), [(OK, False), (FAILED, True), (ENDED, True)])
def test_what_ended_is_known_for_the_jobs_that_wait_for_it_however_few_ended_jobs_are_kept(
    condition: Condition, starts: bool
) -> None:
    drive = Drive(settings=CoreSettings(finished_jobs_limit=0))
    first = drive.submit(job_of(1))
    array = submitted(drive, "a", "b")
    of_job, of_array = drive.submit(after((condition, first))), drive.submit(after((condition, array)))
    drive.step(CancelJob(first))
    drive.step(CancelJob(array + 1))
    ends(drive, array + 2)
    for number in (of_job, of_array):
        # A job that was cancelled is forgotten.
        assert (number in drive.state.jobs and drive.job(number).is_waiting) is starts
    drive.step(Tick())
    assert not drive.state.jobs.finished


def test_an_array_of_which_members_are_forgotten_is_not_taken_for_one_that_succeeded() -> None:
    drive = Drive(settings=CoreSettings(finished_jobs_limit=1))
    array = submitted(drive, "a", "b")
    ends(drive, array + 1, succeeds=False)
    ends(drive, array + 2)
    assert array + 1 not in drive.state.jobs
    lost = f"members of arrays/{array} ended long ago, and how is no longer known"
    assert refused(drive, after((OK, array))) == [lost]
    assert refused(drive, after((FAILED, array))) == [lost]
    assert drive.job(drive.submit(after((ENDED, array)))).is_waiting


def test_a_chain_of_any_length_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_ROUNDS_LIMIT", 10)
    drive = Drive()
    chain = [drive.submit(job_of(1))]
    for _ in range(30):
        chain.append(drive.submit(after((OK, chain[-1]))))
    drive.step(CancelJob(chain[0]))
    assert {drive.job(number).state for number in chain} == {JobState.CANCELLED}


def test_a_suspended_job_waits_since_its_resume_alone() -> None:
    drive = Drive()
    first = drive.submit(job_of(1))
    second = drive.submit(after((OK, first)))
    drive.step(SuspendJob(second))
    ends(drive, first)
    assert (drive.job(second).state, drive.job(second).pending_since) == (JobState.SUSPENDED, 0.0)


def test_a_job_that_was_found_running_after_a_restore_waits_for_no_other_job() -> None:
    """The copy of the database is of before the job that it waited for had ended."""
    drive = Drive(nodes=3, settings=settings_of_restores())
    first = drive.submit(job_of(1))
    second = drive.submit(after((OK, first)))
    restored_from_backup(drive, [Found(second, drive.job(second).uid, 7, {"n1": 0b1})])
    job = drive.job(second)
    assert (job.state, job.epoch, job.held, job.awaits) == (JobState.HOLDING, 7, False, ())
    drive.step(CancelJob(first))
    assert drive.job(second).ending is None


def test_many_dependencies_are_named_by_the_first_few() -> None:
    drive = Drive()
    numbers = [drive.submit(job_of(1)) for _ in range(5)]
    last = drive.submit(after(*[(OK, number) for number in numbers]))
    assert explain(drive.state, last, drive.now).blockers[0].detail == (
        "it starts after jobs/1 has succeeded and jobs/2 has succeeded and jobs/3 has succeeded and 2 more"
    )
