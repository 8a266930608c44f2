"""Job arrays: accepted whole, so many at once, stopped by rule with what they had reached, durable in their members."""

from __future__ import annotations

import json
from collections.abc import Mapping

import pytest
from core.drive import Drive, job_of
from ganger.job_state import JobState
from ganger_master.core.answers import ArrayAnswer, Done, Refused
from ganger_master.core.array_model import Membership, RuleKind, StopRule
from ganger_master.core.commands import (
    CancelArray,
    CancelJob,
    RecordMetric,
    ResumeJob,
    SubmitArray,
    SubmitJob,
    SuspendJob,
)
from ganger_master.core.explain import explain
from ganger_master.core.gang_model import ObservedPhase, Outcome, OutcomeKind
from ganger_master.core.job_model import JobMetric, JobProgress
from ganger_master.core.job_spec import JobSpec, RoleProgram, Template, resolved
from ganger_master.core.settings import CoreSettings
from ganger_master.core.state_image import restored
from msgspec.structs import replace

RULE = StopRule(RuleKind.HALVING, "accuracy", maximise=True, first=10)
SPEC = replace(job_of(1), command=("train", "--lr={lr}", "{index}", "{other}", '{"a": 1}'))


def command(
    *lrs: str, at_once: int = 0, rule: StopRule | None = None, request_id: str = "", spec: JobSpec = SPEC
) -> SubmitArray:
    members: list[tuple[int, Mapping[str, str]]] = [(index, {"lr": lr}) for index, lr in enumerate(lrs)]
    uids = tuple(f"uid-{index}" for index in range(len(lrs)))
    return SubmitArray(spec, tuple(members), uids, at_once, rule, "ann", request_id)


def test_an_array_may_use_a_request_id_of_another_user() -> None:
    drive = Drive()
    one = command("0.1", request_id="nightly")
    first, of_bob = drive.step(one), drive.step(replace(one, user="bob", uids=("b",)))
    assert isinstance(first, ArrayAnswer)
    assert isinstance(of_bob, ArrayAnswer), of_bob
    assert of_bob.number != first.number
    assert drive.step(one) == first


def submitted(drive: Drive, *lrs: str, at_once: int = 0, rule: StopRule | None = None) -> list[int]:
    """The numbers of its members."""
    answer = drive.step(command(*lrs, at_once=at_once, rule=rule))
    assert isinstance(answer, ArrayAnswer), answer
    return [answer.number + 1 + place for place in range(len(lrs))]


def waiting(drive: Drive, numbers: list[int]) -> list[int]:
    return [number for number in numbers if drive.job(number).is_waiting]


def come(drive: Drive, number: int, accuracy: float | None, at: float) -> None:
    drive.step(RecordMetric(number, drive.job(number).epoch, accuracy, at))


def running(drive: Drive, numbers: list[int]) -> None:
    for number in numbers:
        drive.start(number)
        drive.runs(number)


def leave(drive: Drive, number: int) -> None:
    """What is to be stopped has gone from its node."""
    drive.seen(number, drive.state.gangs.epochs_of[number][-1], ObservedPhase.ENDED)


def told(drive: Drive, subject: str) -> list[str]:
    return [entry.kind for entry in drive.history if entry.subject == subject]


def test_members_are_the_jobs_behind_the_arrays_number_each_with_its_parameters() -> None:
    drive = Drive()
    assert submitted(drive, "0.1", "0.01") == [2, 3]
    first, second = resolved(drive.job(2).spec), resolved(drive.job(3).spec)
    assert first.command == ("train", "--lr=0.1", "0", "{other}", '{"a": 1}')
    assert second.command[1] == "--lr=0.01"
    environment = second.environment
    assert environment["GANGER_ARRAY"] == "1"
    assert environment["GANGER_ARRAY_INDEX"] == "1"
    assert environment["GANGER_ARRAY_SIZE"] == "2"
    assert environment["GANGER_ARRAY_lr"] == "0.01"
    assert json.loads(environment["GANGER_ARRAY_PARAMETERS"]) == {"lr": "0.01"}
    assert drive.submit(job_of(1)) == 4


def test_the_parameters_of_a_member_are_put_into_the_commands_of_its_roles() -> None:
    spec = replace(SPEC, role_programs=(RoleProgram(SPEC.roles[0].name, ("serve", "{lr}"), {"A": "{lr}"}),))
    (program,) = resolved(replace(spec, array=Membership(1, 0, 0, 1, {"lr": "0.1"}))).role_programs
    assert (program.command, program.environment) == (("serve", "0.1"), {"A": "{lr}"})


def test_an_array_is_accepted_once_and_another_one_under_its_id_never() -> None:
    drive = Drive()
    one = command("0.1", "0.2", request_id="id-1")
    assert drive.step(one) == drive.step(one) == ArrayAnswer(1)
    other = drive.step(command("0.1", "0.3", request_id="id-1"))
    alone = drive.step(SubmitJob(SPEC, "uid", "ann", "id-1"))
    assert [answer.reason for answer in (other, alone) if isinstance(answer, Refused)] == ["REQUEST_REUSED"] * 2
    assert sorted(drive.state.jobs) == [2, 3]


def test_an_invalid_array_is_rejected_with_all_its_violations() -> None:
    drive = Drive()
    bad = replace(
        command("0.1", rule=StopRule(RuleKind.ASHA, "no metric", factor=1.0)),
        at_once=-1,
        members=((1, {"0": "x"}), (1, {"lr": "x" * 5_000})),
    )
    answer = drive.step(bad)
    assert isinstance(answer, Refused)
    paths = ["members", "members[0].parameters", "members[1].parameters.lr"]
    paths += ["rule.metric", "rule.first", "rule.factor", "at_once"]
    assert [path for path, _ in answer.violations] == paths
    empty = drive.step(command())
    assert isinstance(empty, Refused)
    assert drive.state.jobs == {}


def test_members_beyond_the_limit_are_held_until_another_ends() -> None:
    drive = Drive()
    numbers = submitted(drive, "a", "b", "c", "d", at_once=2)
    assert waiting(drive, numbers) == numbers[:2]
    running(drive, numbers[:2])
    drive.step(CancelJob(numbers[1]))
    assert waiting(drive, numbers) == []
    leave(drive, numbers[1])
    assert waiting(drive, numbers) == [numbers[2]]
    # One that is held can be ended too, and is passed over.
    drive.step(CancelJob(numbers[3]))
    assert drive.job(numbers[3]).state is JobState.CANCELLED


def test_why_names_what_a_held_member_waits_for() -> None:
    drive = Drive()
    numbers = submitted(drive, "a", "b", at_once=1)
    found = explain(drive.state, numbers[1], drive.now)
    assert [blocker.reason.value for blocker in found.blockers] == ["ARRAY_LIMIT"]
    assert found.assumption == "unknown, because it waits for another member to end"
    assert drive.state.queue_rank(numbers[1]) == 0


def test_a_held_member_that_was_suspended_is_let_go_only_when_it_is_resumed() -> None:
    drive = Drive()
    numbers = submitted(drive, "a", "b", "c", at_once=1)
    drive.step(SuspendJob(numbers[1]))
    drive.step(CancelJob(numbers[0]))
    assert waiting(drive, numbers) == [numbers[2]]
    drive.step(CancelJob(numbers[2]))
    drive.step(ResumeJob(numbers[1]))
    assert waiting(drive, numbers) == [numbers[1]]


def test_members_that_do_worse_are_stopped_and_end_as_such_with_what_they_had_reached() -> None:
    drive = Drive()
    numbers = submitted(drive, "a", "b", "c", "d", rule=RULE)
    running(drive, numbers)
    for number, accuracy in zip(numbers, (0.9, 0.1, 0.5, 0.2), strict=True):
        come(drive, number, accuracy, at=10.0)
    for number in (numbers[1], numbers[3]):
        leave(drive, number)
    states = [drive.job(number).state for number in numbers]
    assert states == [JobState.HOLDING, JobState.STOPPED, JobState.HOLDING, JobState.STOPPED]
    loser = drive.job(numbers[1])
    assert loser.rungs == (0.1,)
    assert loser.failure is None
    assert loser.reason == "halving: accuracy 0.1 at step 10: 2 others did better, and 2 go on"
    assert told(drive, loser.name)[-2:] == ["stop_ordered", "job_stopped"]
    stop = next(entry for entry in drive.history if entry.kind == "stop_ordered")
    assert stop.cause == "arrays/1"
    assert stop.figures == {"metric": "accuracy", "value": "0.1", "rung": "0", "at": "10"}


def test_a_report_counts_at_every_rung_it_has_passed_and_once() -> None:
    drive = Drive()
    numbers = submitted(drive, "a", "b", rule=RULE)
    running(drive, numbers[:1])
    come(drive, numbers[0], 0.5, at=9.0)
    assert drive.job(numbers[0]).rungs == ()
    come(drive, numbers[0], 0.5, at=39.0)
    come(drive, numbers[0], 0.7, at=39.5)
    assert drive.job(numbers[0]).rungs == (0.5, 0.5)
    # A report of an attempt that is over changes nothing.
    assert drive.step(RecordMetric(numbers[0], 99, 0.9, 80.0)) == Done()
    assert drive.job(numbers[0]).rungs == (0.5, 0.5)


def test_the_last_report_of_an_ended_member_counts() -> None:
    drive = Drive()
    numbers = submitted(drive, "a", "b", rule=RULE)
    running(drive, numbers)
    come(drive, numbers[0], 0.1, at=10.0)
    gang = drive.state.gangs[drive.job(numbers[1]).epoch]
    metrics = (JobMetric("accuracy", 0.9, 25),)
    done = replace(
        drive.report(gang, ObservedPhase.ENDED),
        outcome=Outcome(OutcomeKind.DONE),
        progress=JobProgress(gang.epoch, 25, metrics=metrics),
    )
    drive.observe("n1", done, *drive.others("n1", gang.epoch))
    assert drive.job(numbers[1]).state is JobState.SUCCEEDED
    assert drive.job(numbers[1]).rungs == (0.9, 0.9)
    assert drive.job(numbers[0]).ending is JobState.STOPPED


@pytest.mark.parametrize(
    ("rule", "loss", "metrics", "kinds"),
    [
        (StopRule(RuleKind.MEDIAN, "loss", first=10), None, (), ["rule_unused"]),
        (StopRule(RuleKind.MEDIAN, "loss", first=10), 0.5, (), []),
        (StopRule(RuleKind.MEDIAN, "loss", first=50), 0.5, (), []),
        (RULE, 0.5, (), ["rule_unused"]),
        (RULE, None, (JobMetric("accuracy", 0.9, 25),), []),
        (None, None, (), []),
    ],
)
def test_a_member_that_never_reported_what_its_rule_judges_by_says_so_at_its_end(
    rule: StopRule | None, loss: float | None, metrics: tuple[JobMetric, ...], kinds: list[str]
) -> None:
    drive = Drive()
    (number,) = submitted(drive, "a", rule=rule)
    running(drive, [number])
    gang = drive.state.gangs[drive.job(number).epoch]
    done = replace(
        drive.report(gang, ObservedPhase.ENDED),
        outcome=Outcome(OutcomeKind.DONE),
        progress=JobProgress(gang.epoch, 25, loss=loss, metrics=metrics),
    )
    drive.observe("n1", done)
    assert drive.job(number).state is JobState.SUCCEEDED
    assert told(drive, f"jobs/{number}")[-1 - len(kinds) :] == [*kinds, "job_succeeded"]
    ended = next(row.figures for row in drive.history if row.kind == "member_ended")
    assert ended.get("loss") == (None if loss is None else f"{loss:g}")


def test_an_array_is_cancelled_as_a_whole_and_its_end_is_recorded() -> None:
    drive = Drive()
    numbers = submitted(drive, "a", "b", "c", at_once=1)
    running(drive, numbers[:1])
    assert drive.step(CancelArray(1, "enough", "ann")) == ArrayAnswer(1)
    leave(drive, numbers[0])
    assert all(drive.job(number).state is JobState.CANCELLED for number in numbers)
    assert told(drive, "arrays/1") == ["array_submitted", "cancel_ordered", *["member_ended"] * 3, "array_ended"]
    assert drive.history[-1].figures == {"cancelled": "3"}
    ended = {row.figures["member"]: row.figures for row in drive.history if row.kind == "member_ended"}
    assert [name for name, figures in ended.items() if "run_s" in figures] == ["1_0"], "of those that stepped"
    assert drive.step(CancelArray(1)) == ArrayAnswer(1)
    missing = drive.step(CancelArray(77))
    assert isinstance(missing, Refused)
    assert missing.reason == "ARRAY_NOT_FOUND"


def test_a_command_on_the_number_of_an_array_is_refused_with_a_member_to_name() -> None:
    drive = Drive()
    submitted(drive, "a", "b")
    answer = drive.step(CancelJob(1))
    assert isinstance(answer, Refused)
    assert answer.message == "1 is an array of jobs: name a member, for example 1_0; `ganger show 1` lists them"
    assert answer.metadata == {"array": "arrays/1"}


def test_members_that_ended_are_kept_while_others_run_to_be_compared_with() -> None:
    drive = Drive(settings=CoreSettings(finished_jobs_limit=1))
    numbers = submitted(drive, "a", "b", "c")
    for number in numbers[:2]:
        drive.step(CancelJob(number))
    assert sorted(drive.state.jobs) == numbers
    drive.step(CancelJob(numbers[2]))
    assert sorted(drive.state.jobs) == numbers[2:]


def test_a_restarted_master_has_members_limits_and_rungs() -> None:
    drive = Drive()
    numbers = submitted(drive, "a", "b", "c", at_once=2, rule=RULE)
    running(drive, numbers[:2])
    come(drive, numbers[0], 0.5, at=10.0)
    elements = drive.state.take_changes().puts.values()
    drive.state = restored(drive.state.settings, elements, drive.now)
    drive.sessions.clear()
    drive.join("n1")
    assert drive.job(numbers[0]).rungs == (0.5,)
    assert waiting(drive, numbers) == []
    drive.step(CancelArray(1))
    assert drive.job(numbers[2]).state is JobState.CANCELLED


def refused(drive: Drive, members: list[dict[str, str]], *words: str, environment: Mapping[str, str] = {}) -> str:
    """Return the field of the first violation of an array that is refused."""
    spec = replace(SPEC, command=words, environment=dict(environment))
    uids = tuple(f"uid-{number}" for number in range(len(members)))
    answer = drive.step(SubmitArray(spec, tuple(enumerate(members)), uids, 0, None, "ann", ""))
    assert isinstance(answer, Refused), answer
    assert drive.state.jobs == {}
    return answer.violations[0][0]


def test_commands_with_their_parameters_are_bounded_in_bytes() -> None:
    drive = Drive()
    assert refused(drive, [{"A": "\N{GRINNING FACE}" * 1_000}], "train", *["{A}"] * 17) == "spec.command"
    assert refused(drive, [{"A": "x"}], "train", "{A}" * 1_001) == "spec.command"
    assert refused(drive, [{"A": "x"}, {"A": ""}], "{A}{A}") == "spec.command"
    assert refused(drive, [{"A": "\N{GRINNING FACE}" * 1_025}], "train") == "members[0].parameters.A"
    assert refused(drive, [{f"A{n}": "x" * 4_096 for n in range(5)}], "train") == "members[0].parameters"


def test_members_share_a_limit_on_the_bytes_that_are_stored_of_them() -> None:
    many = [{"A": str(number)} for number in range(1_000)]
    assert refused(Drive(), many, "train", environment={"PATH": "x" * 17_000}) == "members"
    drive = Drive()
    assert submitted(drive, *[str(number) for number in range(1_000)])


def test_the_length_of_a_members_command_is_known_without_putting_it_together() -> None:
    words = ("a{A}b", "{A}{B}{index}", "{other} {", "{A", '{"A": 1}', "\N{GRINNING FACE}{B}")
    template = Template(words)
    for index, given in ((7, {}), (0, {"A": ""}), (12, {"A": "\N{GRINNING FACE}", "B": "yes"}), (3, {"B": "{A}"})):
        member = Membership(1, 0, index, 1, given)
        made = resolved(replace(SPEC, command=words, array=member)).command
        assert template.length(index, given) == sum(len(word.encode()) for word in made)


def test_a_rung_beyond_all_numbers_is_never_reached() -> None:
    rule = StopRule(RuleKind.ASHA, first=1, factor=1_000, resource="tokens")
    drive = Drive()
    (number,) = submitted(drive, "0.1", rule=rule)
    drive.start(number)
    drive.runs(number)
    assert drive.step(RecordMetric(number, drive.job(number).epoch, 0.5, 1e308)) == Done()
    assert len(drive.job(number).rungs) == 103
