"""`ganger bench`: runs benchmarks that programs register in the entry-point group "ganger.benches".

A benchmark is a function without required arguments that returns one object: name, ok, figures, limits; or name and
skipped, with the reason. What machine it ran on is added here. One that takes `quick` can be tried in seconds, to see
that it runs; one that takes `only` runs the case of that name alone, and raises ValueError where it has none.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import click

from ganger.cli.checkout import is_of_a_checkout, needs_checkout
from ganger.cli.failures import ExitCode

_GROUP = "ganger.benches"


@click.command()
@click.argument("name", required=False)
@click.option("--list", "is_list", is_flag=True, help="Name the benchmarks.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--quick", is_flag=True, help="Try it on a small scale; its figures mean little.")
@click.option("--only", metavar="CASE", help="Run one of its cases alone, such as jobs4_on1 of slice.")
def bench(name: str | None, is_list: bool, as_json: bool, quick: bool, only: str | None) -> int:
    """Run benchmark NAME; exit code 0 only if it keeps all its limits. Raw samples go to build/bench."""
    import inspect
    from importlib.metadata import entry_points

    try:
        from benchmarks.machine import machine, processor_ticks
    except ModuleNotFoundError as error:
        if not is_of_a_checkout(error):
            raise
        raise needs_checkout("bench") from None

    found = {point.name: point for point in entry_points(group=_GROUP)}
    if is_list:
        print(json.dumps(sorted(found)) if as_json else "\n".join(sorted(found)))
        return ExitCode.OK
    if name not in found:
        known = ", ".join(sorted(found)) or "none installed"
        raise click.UsageError(f"there is no benchmark {name!r}: there are {known}" if name else f"name one of {known}")
    run = found[name].load()
    takes = inspect.signature(run).parameters
    if only is not None and not only.strip():
        raise click.UsageError("--only: name a case, or leave it out to run all of them")
    if quick and "quick" not in takes:
        raise click.UsageError(f"benchmark {name!r} has no quick form: leave out --quick")
    if only and "only" not in takes:
        raise click.UsageError(f"benchmark {name!r} has no cases: leave out --only")
    chosen: dict[str, Any] = {**({"quick": True} if quick else {}), **({"only": only} if only else {})}
    before = processor_ticks()
    try:
        result: dict[str, Any] = {**run(**chosen), "machine": machine(before)}
    except ValueError as error:
        if not only:
            raise
        raise click.UsageError(str(error)) from error
    if as_json:
        print(json.dumps(result))
    else:
        _print(result)
    sys.stdout.flush()
    return ExitCode.OK if result.get("ok", "skipped" in result) else ExitCode.JOB_FAILED


def _print(result: dict[str, Any]) -> None:
    if "skipped" in result:
        print(f"{result['name']}: skipped, {result['skipped']}")
        return
    from ganger.console.tables import print_table

    limits, missed = result["limits"], result.get("missed", ())
    rows = [
        (name, f"{value:g}", f"{limits[name]:g}" if name in limits else "", "missed" if name in missed else "")
        for name, value in result["figures"].items()
    ]
    print_table(("FIGURE", "VALUE", "LIMIT", ""), rows)
    print(f"{result['name']}: {'all limits hold' if result['ok'] else 'not all limits hold'}")
