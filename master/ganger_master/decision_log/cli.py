"""`ganger replay`: a recording decided once more, the story of a job in it, and what another policy would have said."""

from __future__ import annotations

import json
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import click
from ganger.console.parameter_types import Within


@click.command()
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--job", "-j", "number", type=click.IntRange(1), metavar="N", help="Print the history of this job.")
@click.option("--until", type=Within(0), metavar="SECONDS", help="Stop there; counted from where the recording began.")
@click.option("--policy", "-p", metavar="NAME", help="Print what this policy would have decided at the same instants.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def replay(file: Path, number: int | None, until: float | None, policy: str | None, as_json: bool) -> int:
    """Decide once more what a master decided while it was recorded (`ganger record`), and compare.

    Exits with 1 where a decision differs, and prints the first one that does.
    """
    from ganger.console.exit_codes import CommandError, ExitCode
    from ganger.console.tables import print_table

    from ganger_master.decision_log import render
    from ganger_master.decision_log.counterfactual import Otherwise
    from ganger_master.decision_log.job_history import Story
    from ganger_master.decision_log.lines import LineError, RecordingUnreadable, read_lines
    from ganger_master.decision_log.render import LogSummary
    from ganger_master.decision_log.rerun import Differs, Ended, Rerun

    tally, differences = LogSummary(), list[Differs]()
    story = None if number is None else Story(number)
    reason, line, last = "", 0, 0.0
    try:
        other = None if policy is None else Otherwise(policy)
    except (KeyError, ValueError) as error:
        raise click.UsageError(str(error.args[0])) from error
    try:
        rerun = Rerun(read_lines(file))
        began = last = rerun.header.began
        if rerun.header.ganger != (own := _own_version()):
            print(
                f"recorded by ganger {rerun.header.ganger}, replayed by {own}: it may decide otherwise", file=sys.stderr
            )
        for happening in rerun:
            if until is not None and happening.time > began + until:
                reason = f"as far as {until:g} s"
                if story is not None and rerun.state is not None:
                    story.situation(line, last, reason, rerun.state)
                break
            line, last = happening.number, happening.time
            tally.tell(happening)
            if isinstance(happening, Differs):
                differences.append(happening)
            elif isinstance(happening, Ended):
                reason = happening.reason
            if story is not None:
                story.tell(happening, rerun.state)
            if other is not None:
                other.tell(happening, rerun.state)
    except RecordingUnreadable as error:
        is_forbidden = isinstance(error.__cause__, PermissionError)
        raise CommandError(str(error), ExitCode.NOT_PERMITTED if is_forbidden else ExitCode.USAGE) from error
    except LineError as error:
        raise CommandError(f"{file}: it is damaged behind line {line}: {error}", ExitCode.USAGE) from error
    if story is not None and not story.moments:
        since = "" if until is None else f" in the first {until:g} s"
        raise CommandError(f"nothing is recorded of job {number}{since}", ExitCode.NOT_FOUND)
    if as_json:
        found = render.plain(rerun.header, last - began, reason, tally, differences, story, other)
        json.dump(found, sys.stdout, indent=2)
        sys.stdout.write("\n")
    else:
        print(render.headline(rerun.header, last - began, tally, reason))
        for text in render.agreement(differences, began):
            print(text)
        if story is not None:
            print("\n" + "\n".join(render.story_lines(story, began)))
        if other is not None:
            print("\n" + "\n".join(render.otherwise_lines(other, began, number)))
        if story is None and other is None and tally.jobs:
            print()
            rows = [
                (str(job), str(asking.requests), str(asking.approved), asking.reason)
                for job, asking in sorted(tally.jobs.items())
            ]
            print_table(("JOB", "REQUESTS", "APPROVED", "LAST REFUSAL"), rows)
    return ExitCode.JOB_FAILED if differences else ExitCode.OK


def _own_version() -> str:
    try:
        return version("ganger")
    except PackageNotFoundError:
        return "0"
