"""The command of `make programs`: tries the programs and writes docs/measurements/programs.md and programs.json."""

from __future__ import annotations

import datetime
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import click

from benchmarks.bench_cluster import BenchCluster
from benchmarks.machine import machine, processor_ticks
from benchmarks.programs.catalogue import CATALOGUE
from benchmarks.programs.page import page_of
from benchmarks.programs.program import Program
from benchmarks.programs.trial import Outcome, Rooms, try_program

PAGE = "programs"


@click.command()
@click.option(
    "--python",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    required=True,
    help="Interpreter of an environment with requirements.txt.",
)
@click.option(
    "--sources",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Directory with checkouts of the repositories, by their names.",
)
@click.option("--only", default="", metavar="NAME,...", help="Try these alone; the other rows of the page stay.")
@click.option("--list", "is_list", is_flag=True, help="Name the programs and their sources.")
@click.option(
    "--work", type=click.Path(path_type=Path, file_okay=False), help="Where they run; kept. Default: removed."
)
@click.option("--directory", type=click.Path(path_type=Path, file_okay=False), default=Path("docs/measurements"))
def report(python: Path, sources: Path | None, only: str, is_list: bool, work: Path | None, directory: Path) -> None:
    """Run programs alone and under Ganger, and compare their results bit by bit.

    Exits with 0 if each one was suspended twice, moved, and ended as alone.
    """
    if is_list:
        for program in CATALOGUE:
            print(f"{program.name:20} {program.source or 'written anew':24} {program.kind}")
        return
    names = [name for name in only.split(",") if name]
    if unknown := {*names} - {program.name for program in CATALOGUE}:
        raise click.UsageError(f"--only: no program {', '.join(sorted(unknown))}; --list has their names")
    chosen = [program for program in CATALOGUE if not names or program.name in names]
    directory.mkdir(parents=True, exist_ok=True)
    commit, day = own_commit(), datetime.datetime.now(datetime.UTC).date().isoformat()
    with tempfile.TemporaryDirectory(prefix="ganger-programs-") as removed:
        # Not resolved: a link to an interpreter is what makes it the one of its environment.
        rooms = Rooms(python.absolute(), sources and sources.resolve(), (work or Path(removed)).resolve())
        outcomes = try_all(chosen, rooms, lambda outcome: keep(replace(outcome, commit=commit, day=day), directory))
    sys.exit(0 if all(outcome.is_complete for outcome in outcomes) else 1)


def own_commit() -> str:
    """Return the commit of this checkout of Ganger, with a + if files of it are changed; "" if git does not know it."""
    here = Path(__file__).parent
    words = ("git", "-C", str(here), "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=+")
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip()


def keep(outcome: Outcome, directory: Path) -> None:
    """Write the program's row to the page and to the JSON, in the place of its former one."""
    path = directory / f"{PAGE}.json"
    kept = [Outcome.from_json(row) for row in json.loads(path.read_text())["programs"]] if path.is_file() else []
    rows = {**{one.program: one for one in kept}, outcome.program: outcome}
    ordered = [rows[program.name] for program in CATALOGUE if program.name in rows]
    own = machine(processor_ticks())
    result = {"machine": own, "programs": [one.to_json() for one in ordered]}
    path.write_text(json.dumps(result, indent=1) + "\n")
    (directory / f"{PAGE}.md").write_text(page_of(ordered, own))
    print(summary_of(outcome), flush=True)


def try_all(
    chosen: Sequence[Program], rooms: Rooms, note: Callable[[Outcome], None] = lambda outcome: None
) -> list[Outcome]:
    """Try them one after the other on a cluster of two nodes with virtual GPUs. `note` gets each outcome at once."""
    outcomes = []
    with BenchCluster(nodes=2, gpus=2, cores=8, is_run_in_memory=False) as cluster:
        for program in chosen:
            outcomes.append(try_program(program, rooms, cluster))
            note(outcomes[-1])
    return outcomes


def summary_of(outcome: Outcome) -> str:
    word = (
        "wrong"
        if outcome.is_wrong
        else "right"
        if outcome.is_complete
        else "short"
        if outcome.is_identical
        else "failed"
    )
    refusals = [f"{order.kind}: {' '.join(order.refusal.split())[:160]}" for order in outcome.orders if order.refusal]
    why = "; ".join(part for part in (outcome.failure, outcome.files, outcome.log, *refusals) if part)
    times = f"{outcome.alone_s:.0f} s alone, {outcome.under_ganger_s:.0f} s under Ganger"
    done = " ".join(order.kind for order in outcome.orders if not order.refusal)
    return f"{word:7} {outcome.program:20} {outcome.mechanism:8} {done:26} {times} {why}"


if __name__ == "__main__":
    report()
