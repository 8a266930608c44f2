"""`ganger reproduce`: the experiments of the papers, run again, theirs beside ours."""

from __future__ import annotations

import json
import os
import shutil
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
from ganger.console import CommandError, ExitCode
from ganger.program_setup import one_thread_each

_ROWS = Path("build/reproduce")


@click.command()
@click.option("--all", "is_all", is_flag=True, help="Every claim.")
@click.option("--only", multiple=True, metavar="NAME", help="This claim; may be given again.")
@click.option("--list", "is_list", is_flag=True, help="Name the claims and end.")
@click.option("--quick", is_flag=True, help="Fewer seeds: to see that it works, not to conclude.")
@click.option("--workers", type=click.IntRange(min=1), metavar="N", help="Parts at a time; default: one for each core.")
@click.option(
    "--traces", type=click.Path(path_type=Path), default=Path("../shared/traces"), metavar="DIR", show_default=True,
    help="Where published traces and profiles are.",
)  # fmt: skip
@click.option(
    "--papers", type=click.Path(path_type=Path), default=Path("../shared/papers/data"), metavar="DIR",
    show_default=True, help="Where data from the papers' own repositories are.",
)  # fmt: skip
@click.option("--rows", type=click.Path(path_type=Path), default=_ROWS, metavar="DIR", show_default=True,
    help="Where raw rows go, one file for each claim.",
)  # fmt: skip
@click.option("--saved", is_flag=True, help="Measure nothing: conclude from rows saved before.")
@click.option("--anew", is_flag=True, help="Measure also what the same code has measured before.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list.")
@click.option("--document", type=click.Path(path_type=Path), metavar="FILE", help="Write a page of documentation.")
@click.option("--progress/--no-progress", default=None, help="Print how far it is; default: on a terminal.")
def reproduce(
    is_all: bool,
    only: tuple[str, ...],
    is_list: bool,
    quick: bool,
    workers: int | None,
    traces: Path,
    papers: Path,
    rows: Path,
    saved: bool,
    anew: bool,
    as_json: bool,
    document: Path | None,
    progress: bool | None,
) -> None:
    """Run the papers' experiments again and print their figures beside ours.

    Each reports whether the paper's claim holds and whether it is beaten; docs/measurements/reproduce.md has the
    last full run. A run that was stopped goes on where it was: what the same code has measured is not measured again.
    """
    if not is_list and is_all == bool(only):
        raise click.UsageError("say what to run: either --all, or --only NAME")
    if saved and anew:
        raise click.UsageError("--saved measures nothing, --anew everything: say one of them")
    with one_thread_each():
        import numpy  # noqa: F401
    from experiments.paper_claims import claims

    known = claims()
    for name in only:
        if name not in known:
            raise click.UsageError(f"there is no claim {name!r}; there are {', '.join(known)}")
    if document is not None:
        from ganger_master.simulator.report.files import made_ready

        # Found out now, not after hours.
        made_ready(document.parent)
    from ganger.console import print_table
    from ganger_master.simulator.flags import ProgressBar

    from experiments import results
    from experiments.experiment import Setting
    from experiments.registry import EXPERIMENTS, UNRUN
    from experiments.runner import run

    if is_list:
        if as_json:
            _print_json(
                [
                    {
                        "name": each.name,
                        "title": each.title,
                        "core_ran": EXPERIMENTS[each.name].core if each.name in EXPERIMENTS else None,
                        "not_run": UNRUN.get(each.name),
                    }
                    for each in known.values()
                ]
            )
            return
        for claim in known.values():
            reason = f"  (not run: {UNRUN[claim.name]})" if claim.name in UNRUN else ""
            click.echo(f"{claim.name}  {claim.title}{reason}")
        return
    with ProgressBar("reproduce", progress, "parts") as meter:
        found = run(
            list(known.values()) if is_all else [known[name] for name in dict.fromkeys(only)],
            EXPERIMENTS,
            UNRUN,
            Setting(traces, papers, quick),
            rows,
            workers or len(os.sched_getaffinity(0)),
            meter,
            saved,
            anew,
        )
    if as_json:
        _print_json([results.as_json(result) for result in found])
    else:
        width = shutil.get_terminal_size((120, 0)).columns
        for result in found:
            print("\n".join(results.as_lines(result, max(width, 40))), end="\n\n")
        print_table(("name", "core ran", "holds", "beats", "claim"), [results.in_short(result) for result in found])
    if document is not None:
        date = datetime.now(UTC).date().isoformat()
        document.write_text(results.document(found, date), encoding="utf-8")
    failed = [result for result in found if result.failed]
    if failed:
        for result in failed:
            print(result.failed, file=sys.stderr)
        names = ", ".join(result.claim.name for result in failed)
        hint = "; rows may have been saved by another ganger: measure anew, without --saved" if saved else ""
        raise CommandError(f"not everything came to its end: {names}{hint}", ExitCode.BUG)


def _print_json(value: Any) -> None:
    json.dump(value, sys.stdout, indent=2, allow_nan=False)
    sys.stdout.write("\n")
