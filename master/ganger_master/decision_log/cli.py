"""`ganger replay`: repeat the decisions or plans of a recording, print a job's history, compare with another policy."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import click
from ganger import __version__
from ganger.console import Within

if TYPE_CHECKING:
    from ganger_master.decision_log.recording import Header, Line


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
    from ganger.console import CommandError, ExitCode, print_table

    from ganger_master.decision_log.render import DecisionReport, PlanReport

    header, recorded = _opened(file)
    report: DecisionReport | PlanReport
    if header.program == "planner":
        if policy is not None:
            raise click.UsageError("--policy: a planner's recording has no decisions of a master")
        report = PlanReport(recorded, number, until)
    else:
        try:
            report = DecisionReport(recorded, number, policy, until)
        except (KeyError, ValueError) as error:
            raise click.UsageError(str(error.args[0])) from error
    with _errors_of(file, lambda: report.last_line):
        report.run()
    if number is not None and (missing := report.missing()):
        raise CommandError(missing, ExitCode.NOT_FOUND)
    if as_json:
        json.dump(report.plain(), sys.stdout, indent=2)
        sys.stdout.write("\n")
    else:
        for text in report.text():
            print(text)
        if number is None and (rows := report.rows()):
            print()
            print_table(report.headings, rows)
    return ExitCode.JOB_FAILED if report.differences else ExitCode.OK


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
