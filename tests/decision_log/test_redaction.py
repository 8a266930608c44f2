"""What is left out of a recording, and that no decision is different for it."""

from __future__ import annotations

from core.drive import Drive, job_of
from ganger.cluster.resources import ConfigurationSet, Role, TaskShape
from ganger_master.core.commands import OpenSession, SubmitArray, SubmitJob
from ganger_master.core.job_spec import JobSpec, RoleProgram
from ganger_master.core.state_image import image_of
from ganger_master.core.submission import violations_of
from ganger_master.decision_log.recording import Redaction
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.structs import replace

ROLES = (Role("worker", 1, TaskShape(1)),)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
COMMANDS = st.lists(TEXT, min_size=1, max_size=4).map(tuple)
ENVIRONMENTS = st.dictionaries(TEXT, TEXT, max_size=4)


@given(COMMANDS, ENVIRONMENTS)
@example(("run", "x" * 70_000), {})
@example(("run", "é…🔒" * 8_000), {"A": "\0", "B=": "x"})
@example(("run",), {"A": "x" * 262_143})
@example(("run",), {"A": "x" * 262_144})
def test_hidden_descriptions_are_accepted_and_refused_as_the_true_ones(
    command: tuple[str, ...], environment: dict[str, str]
) -> None:
    spec = JobSpec(command, ROLES, environment=environment)
    assert violations_of(Redaction(b"key").spec(spec)) == violations_of(spec)


@given(COMMANDS, ENVIRONMENTS)
def test_hidden_descriptions_are_the_same_if_the_true_ones_are(
    command: tuple[str, ...], environment: dict[str, str]
) -> None:
    redaction = Redaction(b"key")
    spec = JobSpec(command, ROLES, environment=environment)
    assert redaction.spec(spec) == redaction.spec(
        JobSpec(command, ROLES, environment=dict(reversed(environment.items())))
    )
    # One sign more makes them differ for certain.
    changed = JobSpec((*command, "y"), ROLES, environment=environment)
    assert redaction.spec(changed) != redaction.spec(spec)


def test_two_values_that_differ_in_one_sign_look_different() -> None:
    redaction = Redaction(b"key")
    specs = [JobSpec(("run", "--word", f"{sign}-and-more"), ROLES, environment={"A": "same"}) for sign in "abcdefgh"]
    assert len({repr(redaction.spec(spec)) for spec in specs}) == len(specs)


def test_program_and_names_stay_and_words_go() -> None:
    spec = JobSpec(("python", "--token=hunter2"), ROLES, environment={"TOKEN": "hunter2"})
    hidden = Redaction(b"key").spec(spec)
    assert hidden.command[0] == "python"
    assert list(hidden.environment) == ["TOKEN"]
    assert "hunter2" not in repr(hidden)
    assert [len(word) for word in hidden.command] == [len(word) for word in spec.command]
    assert Redaction(b"other").spec(spec) != hidden


def test_words_and_values_of_a_role_s_program_go() -> None:
    program = RoleProgram("worker", ("python", "--token=hunter2"), {"TOKEN": "hunter2"})
    hidden = Redaction(b"key").spec(JobSpec(("run",), ROLES, role_programs=(program,)))
    assert "hunter2" not in repr(hidden)
    assert violations_of(hidden) == violations_of(JobSpec(("run",), ROLES, role_programs=(program,)))


def test_tokens_are_hidden_even_in_recordings_with_environments() -> None:
    redaction = Redaction(b"key", with_environment=True)
    opened = redaction.command(OpenSession("n1", "m", ConfigurationSet("c"), storage_token="secret-of-the-storage"))
    assert isinstance(opened, OpenSession)
    assert len(opened.storage_token) == len("secret-of-the-storage")
    assert opened.storage_token != "secret-of-the-storage"
    submitted = SubmitJob(JobSpec(("run", "x"), ROLES, environment={"A": "b"}), "uid")
    assert redaction.command(submitted) == submitted
    empty = OpenSession("n1", "m", ConfigurationSet("c"))
    assert redaction.command(empty) == empty


def test_an_array_made_of_what_was_recorded_is_the_one_that_was_hidden() -> None:
    spec = replace(job_of(1), command=("train", "--key=s3cret", "{lr}"), environment={"TOKEN": "s3cret"})
    members = ((0, {"lr": "s3cret"}), (1, {"lr": "0.5"}))
    submitted = SubmitArray(spec, members, ("uid-0", "uid-1"), 1, None, "ann", "id-1")
    redaction, true, again = Redaction(b"key"), Drive(), Drive()
    true.step(submitted)
    again.step(redaction.command(submitted))
    hidden = redaction.image(image_of(true.state)).jobs
    assert hidden == image_of(again.state).jobs
    assert "s3cret" not in repr(hidden)
    assert Redaction(b"key", with_environment=True).command(submitted) == submitted
