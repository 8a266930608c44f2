"""A planner that records: every plan is made again from the file, also across connections, and a change is noticed."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from ganger import program_setup
from ganger.cli.main import run
from ganger.v1 import scheduling_pb2
from ganger_master.core.plan_changes import CoresChange, Goal, TrialFinding
from ganger_master.decision_log.log_file import read_lines
from ganger_master.decision_log.recording import (
    BrokenLine,
    ClusterLine,
    End,
    Header,
    Line,
    LineError,
    LoopLine,
    PlanLine,
    ProgressLine,
    VerdictLine,
    unpack,
)
from ganger_master.decision_log.rerun import Broke, Differs, Ended, Entry, JudgedPlan, Made, PlanRerun
from ganger_master.planner.context import ClusterChange, Plan, PlanVerdict, ProgressReports
from ganger_master.planner.loop import PlannerLoop
from ganger_master.planner_process.planner_files import PlanRecorder
from ganger_master.planner_process.run import Planner
from ganger_master.policies.trials import TrialPace
from ganger_master.rpc import scheduling_service
from msgspec.structs import replace
from planner_process.test_planner import on_a_master, planning, state_of
from planner_process.test_tuning import PACE, Fleet
from rpc.kit import Served, Speaker, spec_of, until


def only_file(directory: Path) -> Path:
    (file,) = directory.iterdir()
    return file


def entries(lines: Sequence[Line]) -> list[Entry]:
    return list(PlanRerun(lines))


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recording of a planner that tries cores for two jobs, over several connections and from a note."""
    directory = tmp_path_factory.mktemp("recorded")

    async def story(served: Served, node: Speaker) -> None:
        fleet = Fleet(served, node, uses={1: 1.0, 2: 3.0, 3: 1.0})
        running = asyncio.create_task(fleet.run())
        note = directory / "planner.note"
        try:
            # The start of a job after a change of cores: the planner has observed the verdict on that change.
            async with planning(served, trial_pace=PACE, note=note, record_to=directory / "before"):
                await served.submit(spec_of(2))
                await until(lambda: state_of(served, 1) == "HOLDING" and fleet.cores(1) == 1.0, 60)
                await served.submit(spec_of(1))
                await until(lambda: state_of(served, 2) == "HOLDING", 60)
            assert note.exists()
            async with planning(served, trial_pace=PACE, note=note, record_to=directory / "after"):
                await until(lambda: fleet.cores(2) == 3.0, 60)
                await served.submit(spec_of(1))
                await until(lambda: state_of(served, 3) == "HOLDING", 60)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduling_service, "STREAM_S", 0.7)
        on_a_master(directory, story, "las+predictor")
    return directory


@pytest.mark.parametrize("part", ["before", "after"])
def test_every_plan_is_made_again_across_connections_and_from_a_note(tuned: Path, part: str) -> None:
    lines = list(read_lines(only_file(tuned / part)))
    found = entries(lines)
    assert [one for one in found if isinstance(one, Differs)] == []
    assert found[-1] == Ended(len(lines), found[-1].time, "the planner was stopped")
    assert len([one for one in found if isinstance(one, Made)]) == sum(isinstance(line, PlanLine) for line in lines)
    loops = [line for line in lines if isinstance(line, LoopLine)]
    assert len(loops) > 1
    assert [bool(loop.memory) for loop in loops] == [part == "after", *[False] * (len(loops) - 1)]
    tried = [one for one in found if isinstance(one, JudgedPlan) for change in one.plan.changes]
    assert any(isinstance(change, CoresChange) for one in tried for change in one.plan.changes)


def altered(lines: Sequence[Line], position: int) -> list[Line]:
    """Return the lines, but in one report a job has done more steps."""
    line = lines[position]
    assert isinstance(line, ProgressLine)
    batch = scheduling_pb2.ProgressBatch.FromString(line.batch)
    for progress in batch.progress.values():
        progress.step += 100_000
    return [*lines[:position], replace(line, batch=batch.SerializeToString()), *lines[position + 1 :]]


def test_a_report_that_is_altered_brings_another_plan(tuned: Path) -> None:
    lines = list(read_lines(only_file(tuned / "before")))
    reports = [position for position, line in enumerate(lines) if isinstance(line, ProgressLine)]
    ends = [entries(altered(lines, position))[-1] for position in reports]
    differences = [end for end in ends if isinstance(end, Differs)]
    assert differences
    assert all("change" in one.what or "plan" in one.what for one in differences)
    assert any("CORES" in one.recorded or "CORES" in one.now for one in differences)


def test_the_command_prints_that_plans_are_as_recorded_and_the_changes_of_a_job(
    tuned: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = only_file(tuned / "before")
    assert run(["replay", str(file)]) == 0
    shown = capsys.readouterr().out
    assert "policy las+predictor" in shown
    assert "every plan is as recorded" in shown
    assert "CORES" in shown
    assert run(["replay", str(file), "--job", "1"]) == 0
    shown = capsys.readouterr().out
    assert "START on n1: APPROVED" in shown
    assert run(["replay", str(file), "--job", "7"]) == 3
    assert "no plan changes job 7" in capsys.readouterr().err
    assert run(["replay", str(file), "--policy", "fifo"]) == 2
    assert "a planner's recording has no decisions of a master" in capsys.readouterr().err


def test_a_plan_without_a_verdict_or_a_verdict_without_a_plan_is_damage(tuned: Path) -> None:
    lines = list(read_lines(only_file(tuned / "before")))
    # A connection may have ended between a plan and its verdict.
    first = next(at for at, line in enumerate(lines) if isinstance(line, VerdictLine))
    while not isinstance(lines[first], PlanLine):
        first -= 1
    with pytest.raises(LineError, match="a verdict that is on no plan"):
        entries([*lines[:first], *lines[first + 1 :]])
    with pytest.raises(LineError, match="a plan before the verdict"):
        entries([*lines[: first + 1], *lines[first:]])
    failure = BrokenLine(lines[first].time, "ZeroDivisionError: a bug")
    difference = entries([*lines[: first + 1], failure, lines[-1]])[-1]
    assert difference == Differs(first + 2, failure.time, "an observation", failure.error, "the planner goes on")
    with pytest.raises(LineError, match="before there is a loop"):
        entries([lines[0], *[line for line in lines[1:] if not isinstance(line, LoopLine)]])


def failing_step(fails: Callable[[PlannerLoop, object], bool]) -> Callable[..., object]:
    """Return a `step` that fails at a loop that satisfies `fails`."""
    step = PlannerLoop.step

    def failing(loop: PlannerLoop, now: float) -> object:
        if fails(loop, None):
            raise ZeroDivisionError("a bug")
        return step(loop, now)

    return failing


def failing_observe(fails: Callable[[PlannerLoop, object], bool]) -> Callable[..., None]:
    """Return an `observe` that fails at a loop and an event that satisfy `fails`."""
    observe = PlannerLoop.observe

    def failing(loop: PlannerLoop, event: object, now: float) -> None:
        if fails(loop, event):
            raise ZeroDivisionError("a bug")
        observe(loop, event, now)  # type: ignore[arg-type]  # an event of any kind

    return failing


def recording_of_a_failure(tmp_path: Path, method: str, failing: Callable[..., object]) -> list[Line]:
    """Return the lines of a planner whose method is replaced, and fails; the replay in its place must fail equally."""

    async def story(served: Served, node: Speaker) -> None:
        async with planning(served, record_to=tmp_path / "records") as task:
            await served.submit(spec_of(1))
            await until(lambda: task.done() or state_of(served, 1) == "HOLDING")
            await served.submit(spec_of(1))
            with pytest.raises(ZeroDivisionError):
                await task

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PlannerLoop, method, failing)
        on_a_master(tmp_path, story)
        lines = list(read_lines(only_file(tmp_path / "records")))
        found = entries(lines)
    assert [one for one in found if isinstance(one, Differs)] == []
    assert [one.error for one in found if isinstance(one, Broke)] == ["ZeroDivisionError: a bug"]
    assert found[-1] == Ended(len(lines), found[-1].time, "the planner failed: ZeroDivisionError: a bug")
    return lines


def has_job_2(loop: PlannerLoop, event: object) -> bool:
    return loop.table.get(2) is not None


def is_change_with_job_2(loop: PlannerLoop, event: object) -> bool:
    return isinstance(event, ClusterChange) and any(job.number == 2 for job, _, _ in event.jobs)


def is_verdict_on_a_start(loop: PlannerLoop, event: object) -> bool:
    return isinstance(event, PlanVerdict) and bool(event.answers)


def test_a_planner_that_fails_to_plan_fails_again_and_a_mended_one_differs(tmp_path: Path) -> None:
    lines = recording_of_a_failure(tmp_path, "step", failing_step(has_job_2))
    mended = entries(lines)[-1]
    assert isinstance(mended, Differs)
    assert mended.recorded == "ZeroDivisionError: a bug"


@pytest.mark.parametrize(
    ("fails", "observation"), [(is_change_with_job_2, ClusterLine), (is_verdict_on_a_start, VerdictLine)]
)
def test_a_planner_that_fails_at_an_observation_fails_again_and_a_mended_one_differs(
    tmp_path: Path, fails: Callable[[PlannerLoop, object], bool], observation: type[Line]
) -> None:
    lines = recording_of_a_failure(tmp_path, "observe", failing_observe(fails))
    assert [type(line) for line in lines[-3:]] == [observation, BrokenLine, End]
    mended = entries(lines)[-1]
    assert isinstance(mended, Differs)
    assert mended.recorded == "ZeroDivisionError: a bug"


def test_a_planner_that_fails_at_reports_of_progress_fails_again(
    tuned: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only the replay fails here, at the first report of a recording that goes on, or that names the failure."""
    lines = list(read_lines(only_file(tuned / "before")))
    first = next(at for at, line in enumerate(lines) if isinstance(line, ProgressLine))
    report, last = lines[first], lines[-1]
    assert isinstance(report, ProgressLine)
    assert isinstance(last, End)
    monkeypatch.setattr(PlannerLoop, "observe", failing_observe(lambda _, event: isinstance(event, ProgressReports)))
    goes_on = entries(lines)[-1]
    assert goes_on == Differs(
        first + 1, report.time, "an observation", "the planner goes on", "ZeroDivisionError: a bug"
    )
    broke = BrokenLine(report.time, "ZeroDivisionError: a bug")
    assert isinstance(entries([*lines[: first + 1], broke, last])[-2], Broke)
    other = entries([*lines[: first + 1], replace(broke, error="KeyError: 7"), last])[-1]
    assert isinstance(other, Differs)
    assert (other.recorded, other.now) == ("KeyError: 7", "ZeroDivisionError: a bug")
    # A difference is printed also where no plan changes the job.
    assert run(["replay", str(only_file(tuned / "before")), "--job", "7"]) == 1
    shown = capsys.readouterr().out
    assert "an observation" in shown
    assert "no plan changes it" in shown


def test_the_replay_executes_no_line_after_until(
    tuned: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = list(read_lines(only_file(tuned / "before")))
    header = lines[0]
    assert isinstance(header, Header)
    times = [line.time for line in lines if isinstance(line, ClusterLine | ProgressLine)]
    until_s = times[len(times) // 2] - header.began
    rerun = PlanRerun(lines, until_s)
    found = list(rerun)
    in_time = [at for at in times if at <= header.began + until_s]
    assert 0 < len(in_time) < len(times)
    assert rerun.observations == len(in_time)
    assert isinstance(found[-1], Ended)
    assert found[-1].reason == f"as far as {until_s:g} s"
    assert all(one.time <= header.began + until_s for one in found)
    # A failure that comes later does not count.
    monkeypatch.setattr(PlannerLoop, "observe", failing_observe(lambda _, event: isinstance(event, ProgressReports)))
    assert run(["replay", str(only_file(tuned / "before")), "--until", "0"]) == 0
    assert "as far as 0 s" in capsys.readouterr().out


def test_a_recording_that_is_large_enough_ends_and_is_whole(tmp_path: Path) -> None:
    recorder = PlanRecorder(tmp_path, most_bytes=1)
    recorder.begin(1.0, "las", 1.0, TrialPace(), None)
    recorder.end("the planner was stopped")
    header, loop, *_ = read_lines(only_file(tmp_path))
    assert isinstance(header, Header)
    assert (header.program, header.policy) == ("planner", "las")
    assert isinstance(loop, LoopLine)
    end = entries(list(read_lines(only_file(tmp_path))))[-1]
    assert isinstance(end, Ended)
    assert end.reason == "it has 1 bytes"


def test_a_directory_that_cannot_be_written_costs_a_line_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    recorder = PlanRecorder(tmp_path / "missing" / "records")
    recorder.begin(1.0, "las", 1.0, TrialPace(), None)
    recorder.begin(2.0, "las", 1.0, TrialPace(), None)
    recorder.end("the planner was stopped")
    assert [record.message for record in caplog.records] == ["recording failed"]


def test_nothing_is_recorded_after_the_failure_of_the_planner(tmp_path: Path) -> None:
    recorder = PlanRecorder(tmp_path)
    recorder.begin(1.0, "las", 1.0, TrialPace(), None)
    with pytest.raises(ZeroDivisionError), recorder.failures(2.0):
        raise ZeroDivisionError("a bug")
    recorder.verdict(3.0, (), 0.1)
    recorder.end("the planner was stopped")
    *_, broken, end = read_lines(only_file(tmp_path))
    assert broken == BrokenLine(2.0, "ZeroDivisionError: a bug")
    assert end == End(2.0, "the planner failed: ZeroDivisionError: a bug", 0, 0)


@dataclass(frozen=True)
class Odd:
    """A value that JSON and msgpack have no form for."""

    changes: tuple[complex, ...] = (1j,)


def test_a_value_that_cannot_be_encoded_ends_the_recording_and_not_the_planner(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    recorder = PlanRecorder(tmp_path)
    recorder.begin(1.0, "las", 1.0, TrialPace(), None)
    recorder.plan(2.0, Odd())  # type: ignore[arg-type]  # a fault of the planner
    recorder.plan(3.0, Plan())
    recorder.end("the planner was stopped")
    assert [record.message for record in caplog.records] == ["recording failed"]
    assert list(tmp_path.iterdir()) == []


def test_floats_that_are_not_finite_are_read_as_they_were_recorded(tmp_path: Path) -> None:
    plan = Plan(findings=(TrialFinding(1, Goal.NONE, kept=True, gain=math.inf, deviation=math.nan),))
    recorder = PlanRecorder(tmp_path)
    recorder.begin(1.0, "las", 1.0, TrialPace(most_s=math.inf), None)
    recorder.plan(2.0, plan)
    recorder.end("the planner was stopped")
    _, loop, planned, _ = read_lines(only_file(tmp_path))
    assert isinstance(loop, LoopLine)
    assert isinstance(planned, PlanLine)
    assert unpack(loop.pace, TrialPace) == TrialPace(most_s=math.inf)
    found = unpack(planned.plan, Plan)
    assert found.findings[0].gain == math.inf
    assert math.isnan(found.findings[0].deviation)


def test_two_recorders_in_one_directory_keep_both_recordings(tmp_path: Path) -> None:
    recorders = [PlanRecorder(tmp_path), PlanRecorder(tmp_path)]
    for recorder in recorders:
        recorder.begin(1.0, "las", 1.0, TrialPace(), None)
    for recorder in recorders:
        recorder.end("the planner was stopped")
    files = list(tmp_path.iterdir())
    assert len(files) == 2
    assert all(isinstance(list(read_lines(file))[-1], End) for file in files)


def test_the_command_makes_the_directory_of_recordings_or_reports_why_it_cannot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def end_at_once(_: Planner) -> None:
        return

    monkeypatch.setattr(Planner, "run", end_at_once)
    monkeypatch.setattr(program_setup, "set_up_log", lambda program: None)
    (tmp_path / "file").touch()
    wanted = tmp_path / "file" / "records"
    assert run(["planner", "run", "--record", str(wanted)]) == 2
    assert f"--record: cannot write to {wanted}: not a directory" in capsys.readouterr().err
    wanted = tmp_path / "missing" / "records"
    assert run(["planner", "run", "--master", "127.0.0.1:1", "--record", str(wanted)]) == 0
    assert list(wanted.iterdir()) == []
