"""`ganger replay`: what it prints, how it ends, and what another policy would have said."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from decision_log.kit import busy, busy_for, recorded, rerun_of, stormy
from ganger.cli.main import run
from ganger.cluster.resources import Role, TaskShape
from ganger_master.core import machine
from ganger_master.core.accounting import Owner
from ganger_master.core.answers import Approved, Rejected
from ganger_master.core.commands import Command, Line, ProposePlan, RequestGang, SubmitJob
from ganger_master.core.job_spec import JobSpec
from ganger_master.core.settings import CoreSettings
from ganger_master.core.state import State
from ganger_master.core.state_image import image_of
from ganger_master.decision_log.log_file import read_lines
from ganger_master.decision_log.recording import FORMATS, BatchLine, CommandLine, Header, raw, state_lines
from ganger_master.decision_log.replay_findings import Counterfactual, RecordedHistory
from ganger_master.decision_log.rerun import Differs, Rerun


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    cluster = stormy(26, "fifo-backfill", is_calm=True)
    busy(cluster, 4)
    directory = tmp_path_factory.mktemp("replay")
    return recorded(directory, cluster, busy_for(8, 60.0)).path


def replayed(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert run(["replay", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def otherwise(file: Path, policy: str) -> Counterfactual:
    rerun, other = Rerun(read_lines(file)), Counterfactual(policy)
    for entry in rerun:
        other.record(entry, rerun.state)
    return other


def test_every_request_of_a_job_is_told_with_its_verdict_and_what_was_free(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = rerun_of(file)
    number = next(one.command.number for one in found.decided if isinstance(one.answer, Rejected))  # type: ignore[union-attr]
    requests = [one for one in found.decided if isinstance(one.command, RequestGang) and one.command.number == number]
    document = replayed(capsys, str(file), "--job", str(number))
    moments = [moment for moment in document["job"]["moments"] if moment["what"] == "request"]
    assert len(moments) == len(requests) > 0
    for moment, one in zip(moments, requests, strict=True):
        assert isinstance(one.command, RequestGang)
        assert moment["verdict"] == (
            "approved" if isinstance(one.answer, Approved) else "refused" if one.command.candidates else "passed"
        )
        nodes = {claim.node for claims in one.command.candidates for claim in claims}
        assert {free["node"] for free in moment["free"]} == nodes
        if isinstance(one.answer, Approved):
            # What it got was free before.
            free = {each["node"]: set(each["gpus_free"]) for each in moment["free"]}
            taken = moment["candidates"][one.answer.candidate]
            assert all(set(place["gpus"]) <= free[place["node"]] for place in taken)
        else:
            assert moment["why"]
    assert document["differences"] == 0
    assert document["jobs"][str(number)]["requests"] == len(requests)
    assert run(["replay", str(file), "--job", str(number)]) == 0
    text, notes = capsys.readouterr()
    assert "recorded by ganger test, replayed by" in notes
    assert "every decision is as recorded" in text
    assert text.count("request (place") == len(requests)


def test_a_replay_stops_where_it_is_told_and_says_how_the_job_stands(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, part = (replayed(capsys, str(file), "--job", "7", *more) for more in ((), ("--until", "30")))
    assert part["recording"]["end_reason"] == "as far as 30 s"
    assert 0 < part["batches"] < whole["batches"]
    last = part["job"]["moments"][-1]
    assert last["what"] == "end"
    assert "it waits for" in last["text"]
    assert last["why"][0]["reason"] == "QUOTA"
    assert last["time"] <= whole["recording"]["began"] + 30


def test_a_decision_that_differs_is_shown_and_the_replay_ends_with_1(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = gzip.decompress(file.read_bytes()).splitlines(keepends=True)
    at = next(number for number, line in enumerate(lines) if b'"answer_kind":"Approved"' in line)
    lines[at] = lines[at].replace(b'"candidate":0', b'"candidate":3')
    changed = tmp_path / "changed.gz"
    changed.write_bytes(gzip.compress(b"".join(lines)))
    assert run(["replay", str(changed)]) == 1
    text = capsys.readouterr().out
    assert f"line {at + 1}: the answer to RequestGang" in text
    assert '"candidate":3' in text.split("recorded: ")[1].splitlines()[0]
    assert '"candidate":0' in text.split("now: ")[1].splitlines()[0]


def test_the_same_policy_would_have_decided_the_same(file: Path) -> None:
    other = otherwise(file, "fifo-backfill")
    asked = [one for one in rerun_of(file).decided if isinstance(one.command, RequestGang)]
    assert (other.verdicts, other.differences) == (len(asked), [])


def test_a_strict_queue_would_have_refused_the_job_that_overtook(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = otherwise(file, "fifo")
    assert other.differences
    for one in other.differences:
        assert (one.recorded, one.otherwise) == ("approved", "refused")
        assert one.otherwise_why[0].reason == "PROTECTED"
    document = replayed(capsys, str(file), "--policy", "fifo")
    assert len(document["otherwise"]["differences"]) == len(other.differences)
    assert document["differences"] == 0
    assert run(["replay", str(file), "--policy", "fifo"]) == 0
    assert "what would have followed is not in a recording" in capsys.readouterr().out


def test_a_planner_is_asked_for_its_plans_and_leaves_the_replay_as_it_was(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = replayed(capsys, str(file), "--policy", "las")
    planned = document["otherwise"]["planned"]
    assert document["otherwise"]["plans"] >= len(planned) > 0
    assert any(plan["stops"] for plan in planned)
    assert any(plan["starts"] for plan in planned)
    assert document["differences"] == 0


@pytest.mark.parametrize("policy", ["las", "drf"])
def test_a_planner_s_plans_keep_to_the_quotas_of_the_recorded_master(file: Path, policy: str) -> None:
    rerun, other = Rerun(read_lines(file)), Counterfactual(policy)
    most = 0
    for entry in rerun:
        before = len(other.planned)
        other.record(entry, rerun.state)
        for planned in other.planned[before:]:
            assert rerun.state is not None
            started = [rerun.state.jobs[number] for number in planned.starts]
            anns = sum([job.gpus for job in started if job.user == "ann"])
            most = max(most, rerun.state.jobs.charges.held.get(Owner("ann"), 0) + anns)
    # As many as the sizes of her jobs let come together below her six.
    assert most in (5, 6)


def test_a_job_that_a_planner_lets_wait_is_told_its_place_when_that_changes() -> None:
    spec = JobSpec(("true",), (Role("worker", 1, TaskShape(1)),))
    state, history = State(CoreSettings(policy="las"), 1_000.0), RecordedHistory(2)
    lines = [Header(FORMATS["master"], "test", 1_000.0, "las"), *state_lines(image_of(state), 1_000.0, "it began")]
    lines += [line for number in (1, 2, 3) for line in step_lines(state, SubmitJob(spec, f"uid-{number}"))]
    for numbers in ((1, 2, 3), (1, 2, 3), (3, 2, 1), (2, 1), (1, 3)):
        lines += step_lines(state, ProposePlan((), line=Line(numbers, "las")))
    rerun = Rerun(lines)
    for entry in rerun:
        assert not isinstance(entry, Differs)
        history.record(entry, rerun.state)
    assert [(moment.what, moment.rank) for moment in history.moments if moment.what != "job_submitted"] == [
        ("submit", 0),
        ("ranked", 2),
        ("ranked", 1),
    ]


def step_lines(state: State, command: Command) -> list[Any]:
    """A command as a batch of its own, recorded."""
    step = machine.step(state, command, 1_000.0)
    state.take_changes()
    kinds = tuple(type(event).__name__ for event in step.events)
    return [CommandLine(1_000.0, *raw(command), *raw(step.answer), kinds), BatchLine(1_000.0, step.effects)]


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--job", "999"], 3, "nothing is recorded of job 999"),
        (["--policy", "nonsense"], 2, "there is no policy 'nonsense'"),
        (["--policy", "srtf"], 2, "oracle"),
    ],
)
def test_mistakes_are_said(
    file: Path, arguments: list[str], code: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["replay", str(file), *arguments]) == code
    assert says in capsys.readouterr().err


def test_a_difference_is_printed_also_for_a_job_of_which_nothing_is_recorded(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    *lines, end = gzip.decompress(file.read_bytes()).splitlines(keepends=True)
    changed = tmp_path / "changed.gz"
    changed.write_bytes(gzip.compress(b"".join([*lines, json.dumps({**json.loads(end), "digest": "00"}).encode()])))
    assert run(["replay", str(changed), "--job", "999"]) == 1
    shown = capsys.readouterr().out
    assert "the state it ends in" in shown
    assert "nothing is recorded of it" in shown


def test_a_file_that_is_none_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["replay", str(tmp_path / "missing")]) == 2
    assert "no such file" in capsys.readouterr().err
