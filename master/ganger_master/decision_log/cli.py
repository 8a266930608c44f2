"""`ganger replay`: repeat the decisions or plans of a recording, print a job's history, compare with another policy."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import click
from ganger import __version__
from ganger.console import Within

if TYPE_CHECKING:
    from ganger_master.decision_log.counterfactual import Counterfactual
    from ganger_master.decision_log.job_history import RecordedHistory
    from ganger_master.decision_log.recording import Header, Line
    from ganger_master.decision_log.render import LogSummary
    from ganger_master.decision_log.rerun import Differs, Rerun


@click.command()
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--job", "-j", "number", type=click.IntRange(1), metavar="N", help="Print the history of this job.")
@click.option("--until", type=Within(0), metavar="SECONDS", help="Stop there; counted from where the recording began.")
@click.option("--policy", "-p", metavar="NAME", help="Print what this policy would have decided at the same instants.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def replay(file: Path, number: int | None, until: float | None, policy: str | None, as_json: bool) -> int:
    """Repeat the decisions of a recorded master, and compare them.

    `ganger record` records a master. The plans of a planner (`ganger planner run --record`) are repeated, too. Exits
    with 1 where a decision or plan differs, and prints the first one that does.
    """
    from ganger.console import CommandError, ExitCode

    from ganger_master.decision_log import render
    from ganger_master.decision_log.counterfactual import Counterfactual
    from ganger_master.decision_log.job_history import RecordedHistory
    from ganger_master.decision_log.rerun import Rerun

    header, recorded = _opened(file)
    if header.program == "planner":
        if policy is not None:
            raise click.UsageError("--policy: a planner's recording has no decisions of a master")
        return _replay_plans(file, recorded, number, until, as_json)
    history = None if number is None else RecordedHistory(number)
    try:
        other = None if policy is None else Counterfactual(policy)
    except (KeyError, ValueError) as error:
        raise click.UsageError(str(error.args[0])) from error
    rerun = Rerun(recorded)
    replayed = _Replayed(rerun, render.LogSummary(), history, other, rerun.header.began)
    with _errors_of(file, lambda: replayed.last_line):
        _replay(replayed, until)
    if history is not None and not history.moments and not replayed.differences:
        since = "" if until is None else f" in the first {until:g} s"
        raise CommandError(f"nothing is recorded of job {number}{since}", ExitCode.NOT_FOUND)
    if as_json:
        _print_json(replayed)
    else:
        _print_text(replayed)
    return ExitCode.JOB_FAILED if replayed.differences else ExitCode.OK


@dataclass
class _Replayed:
    """A recording and what its replay found so far. `last_s`: Unix time of the last entry."""

    rerun: Rerun
    summary: LogSummary
    history: RecordedHistory | None
    other: Counterfactual | None
    last_s: float
    last_line: int = 0
    end_reason: str = ""
    differences: list[Differs] = field(default_factory=list)


@contextmanager
def _errors_of(file: Path, line: Callable[[], int] = lambda: 0) -> Iterator[None]:
    """Turn errors of a recording into errors of the command. `line`: the last line that was good."""
    from ganger.console import CommandError, ExitCode

    from ganger_master.decision_log.log_file import RecordingUnreadable
    from ganger_master.decision_log.recording import LineError

    try:
        yield
    except RecordingUnreadable as error:
        is_forbidden = isinstance(error.__cause__, PermissionError)
        raise CommandError(str(error), ExitCode.NOT_PERMITTED if is_forbidden else ExitCode.USAGE) from error
    except LineError as error:
        raise CommandError(f"{file}: it is damaged behind line {line()}: {error}", ExitCode.USAGE) from error


def _opened(file: Path) -> tuple[Header, Iterator[Line]]:
    """Return the header and all lines of a recording, and warn if another version of Ganger wrote it."""
    from ganger_master.decision_log.log_file import read_lines
    from ganger_master.decision_log.recording import take_header

    with _errors_of(file):
        lines = read_lines(file)
        header = take_header(lines)
    if header.ganger != __version__:
        warning = f"recorded by ganger {header.ganger}, replayed by {__version__}: it may decide otherwise"
        print(warning, file=sys.stderr)
    return header, chain([header], lines)


def _replay_plans(
    file: Path, recorded: Iterator[Line], number: int | None, until_s: float | None, as_json: bool
) -> int:
    """Make the plans of a planner's recording again, up to `until_s` seconds after it began, and print the result."""
    from ganger.console import CommandError, ExitCode, print_table

    from ganger_master.decision_log.render import PlanReport
    from ganger_master.decision_log.rerun import PlanRerun

    rerun = PlanRerun(recorded, until_s)
    report = PlanReport(rerun.header, number)
    with _errors_of(file, lambda: report.last_line):
        for entry in rerun:
            report.record(entry)
    if number is not None and not (report.changes or report.difference or report.failure):
        raise CommandError(f"no plan changes job {number}", ExitCode.NOT_FOUND)
    if as_json:
        json.dump(report.plain(rerun.observations), sys.stdout, indent=2)
        sys.stdout.write("\n")
    else:
        for text in report.text(rerun.observations):
            print(text)
        if number is None and report.rows():
            print()
            print_table(("CHANGE", "PROPOSED", "APPROVED"), report.rows())
    return ExitCode.OK if report.difference is None else ExitCode.JOB_FAILED


def _replay(replayed: _Replayed, until_s: float | None) -> None:
    """Repeat the decisions up to `until_s` seconds after the recording began, or up to its end."""
    from ganger_master.decision_log.rerun import Differs, Ended

    rerun, history, other = replayed.rerun, replayed.history, replayed.other
    for entry in rerun:
        if until_s is not None and entry.time > rerun.header.began + until_s:
            replayed.end_reason = f"as far as {until_s:g} s"
            if history is not None and rerun.state is not None:
                history.situation(replayed.last_line, replayed.last_s, replayed.end_reason, rerun.state)
            return
        replayed.last_line, replayed.last_s = entry.number, entry.time
        replayed.summary.record(entry)
        if isinstance(entry, Differs):
            replayed.differences.append(entry)
        elif isinstance(entry, Ended):
            replayed.end_reason = entry.reason
        if history is not None:
            history.record(entry, rerun.state)
        if other is not None:
            other.record(entry, rerun.state)


def _print_json(replayed: _Replayed) -> None:
    from ganger_master.decision_log import render

    header = replayed.rerun.header
    found = render.plain(
        header,
        replayed.last_s - header.began,
        replayed.end_reason,
        replayed.summary,
        replayed.differences,
        replayed.history,
        replayed.other,
    )
    json.dump(found, sys.stdout, indent=2)
    sys.stdout.write("\n")


def _print_text(replayed: _Replayed) -> None:
    from ganger.console import print_table

    from ganger_master.decision_log import render

    header, history, other, summary = replayed.rerun.header, replayed.history, replayed.other, replayed.summary
    print(render.headline(header, replayed.last_s - header.began, summary, replayed.end_reason))
    for text in render.agreement(replayed.differences, header.began):
        print(text)
    if history is not None:
        print("\n" + "\n".join(render.history_lines(history, header.began)))
    if other is not None:
        only = None if history is None else history.number
        print("\n" + "\n".join(render.counterfactual_lines(other, header.began, only)))
    if history is None and other is None and summary.jobs:
        print()
        rows = [
            (str(job), str(asking.requests), str(asking.approved), asking.reason)
            for job, asking in sorted(summary.jobs.items())
        ]
        print_table(("JOB", "REQUESTS", "APPROVED", "LAST REFUSAL"), rows)
