"""Commands that need more than a plain installation, and those whose code is in the repository alone: `ganger bench`
and `ganger demo`.

A benchmark of the entry-point group "ganger.benches" is a function without required arguments that returns one object:
name, ok, figures, limits; or name and skipped, with the reason. What machine it ran on is added here. One that takes
`quick` can be tried in seconds, to see that it runs; one that takes `only` runs the case of that name alone, and raises
ValueError where it has none.
"""

from __future__ import annotations

import json
import secrets
import signal
import sys
import threading
import time
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from ganger.console import ExitCode, print_table

# Packages that an editable install of a checkout puts on the path.
_PACKAGES = ("benchmarks", "examples", "experiments")
_GROUP = "ganger.benches"
# Modules of the extra `ganger[server]`, which a login node does without.
_SERVER = frozenset(
    ("alembic", "grpc_health", "grpc_reflection", "prometheus_client", "psutil", "pynvml", "scipy", "sqlalchemy")
)


def lacking(command: str, error: ModuleNotFoundError) -> click.ClickException:
    """Return what a command lacks, as installed. Raises the error itself for a module that is not to be expected."""
    package = (error.name or "").partition(".")[0]
    if package in _PACKAGES:
        return click.ClickException(
            f"`ganger {command}` needs a checkout of Ganger's repository: run `make setup` there, or"
            " `pip install --editable '.[server]'`"
        )
    if package == "asyncssh":
        return click.ClickException(f"`ganger {command}` needs asyncssh: `pip install 'ganger[ssh]'`")
    if package in _SERVER:
        return click.ClickException(
            f"`ganger {command}` needs what master and daemon need, and {package} is not installed:"
            " `pip install 'ganger[server]'`"
        )
    raise error


def require_server() -> None:
    """Raise ModuleNotFoundError unless what master and daemon need is installed: before their processes are started."""
    for package in sorted(_SERVER):
        if find_spec(package) is None:
            raise ModuleNotFoundError(name=package)


def unavailable(command: str, error: ModuleNotFoundError) -> click.Command:
    """Return a command of that name which takes any arguments and fails with what it lacks. Raises the error itself
    for a module that is not to be expected."""
    why = lacking(command, error)

    def refuse(arguments: tuple[str, ...]) -> None:
        raise why

    anything = click.Argument(["arguments"], nargs=-1, type=click.UNPROCESSED)
    takes_all = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}
    return click.Command(
        command, params=[anything], callback=refuse, short_help="Needs more packages.", context_settings=takes_all
    )


@click.command()
@click.argument("name", required=False)
@click.option("--list", "is_list", is_flag=True, help="Name the benchmarks.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--quick", is_flag=True, help="Try it on a small scale; its figures mean little.")
@click.option("--only", metavar="CASE", help="Run one of its cases alone, such as jobs4_on1 of slice.")
def bench(name: str | None, is_list: bool, as_json: bool, quick: bool, only: str | None) -> int:
    """Run a benchmark by its NAME; exit code 0 only if it keeps all its limits. Raw samples go to build/bench."""
    import inspect
    from importlib.metadata import entry_points

    try:
        from benchmarks.machine import machine, processor_ticks
    except ModuleNotFoundError as error:
        raise lacking("bench", error) from None

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
        _print_benchmark(result)
    sys.stdout.flush()
    return ExitCode.OK if result.get("ok", "skipped" in result) else ExitCode.JOB_FAILED


def _print_benchmark(result: dict[str, Any]) -> None:
    if "skipped" in result:
        print(f"{result['name']}: skipped, {result['skipped']}")
        return
    limits, missed = result["limits"], result.get("missed", ())
    rows = [
        (name, f"{value:g}", f"{limits[name]:g}" if name in limits else "", "missed" if name in missed else "")
        for name, value in result["figures"].items()
    ]
    print_table(("FIGURE", "VALUE", "LIMIT", ""), rows)
    print(f"{result['name']}: {'all limits hold' if result['ok'] else 'not all limits hold'}")


@click.command()
@click.option(
    "--report",
    type=click.Path(path_type=Path, dir_okay=False),
    default=Path("build/demo.json"),
    show_default=True,
    help="Where the checks are written as JSON.",
)
@click.option(
    "--seed", type=int, default=None, help="Decides at which steps things happen; drawn and printed if absent."
)
@click.option("--all", "everything", is_flag=True, help="All examples in both forms, however long it takes.")
@click.option("--examples", type=click.Path(path_type=Path, file_okay=False), default=None, help="Where they are.")
@click.option("--keep", is_flag=True, help="Keep the cluster's directory, with all logs.")
def demo(report: Path, seed: int | None, everything: bool, examples: Path | None, keep: bool) -> None:
    """Show real jobs being suspended, moved and re-pinned without changing one bit.

    Takes two to three minutes on two cores. Exits with 0 only if every check holds.
    """
    # Loaded here: `ganger --help` must not pay for the demo.
    try:
        from examples.demo.demo_cluster import DemoCluster, DemoClusterError
        from examples.demo.programme import find_examples, play, programme
        from examples.demo.report import checks_of, is_ok, print_tables, write_report
        from examples.demo.undisturbed_run import Alone
    except ModuleNotFoundError as error:
        raise lacking("demo", error) from None

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    say = _Teller()
    chosen = secrets.randbelow(1 << 30) if seed is None else seed
    say(f"seed {chosen}")
    try:
        planned = programme(find_examples(examples))
        say("starting a master and two nodes with four virtual GPUs each")
        with ExitStack() as stack:
            cluster = DemoCluster(keep=keep)
            stack.callback(cluster.remove)
            # Begun before the cluster, so that both import at once.
            alone = stack.enter_context(Alone(cluster.directory / "alone.log"))
            stack.enter_context(cluster)
            client = stack.enter_context(cluster.client())
            outcomes = play(planned, cluster.directory / "runs", chosen, client, say, alone, everything=everything)
            figures = client.get_cluster()
            trouble = cluster.trouble()
            if keep:
                say(f"logs stay in {cluster.directory}")
    except KeyboardInterrupt:
        click.echo("everything is gone", err=True)
        raise SystemExit(130) from None
    except FileNotFoundError as problem:
        raise click.UsageError(str(problem)) from problem
    except DemoClusterError as problem:
        raise click.ClickException(f"the demo's cluster did not hold: {problem}") from problem
    checks = checks_of(outcomes, figures.verdicts_approved, figures.verdicts_rejected, say.seconds)
    write_report(report, checks, outcomes, chosen)
    print_tables(checks, outcomes)
    if trouble:
        raise click.ClickException(trouble)
    say(f"{'everything holds' if is_ok(checks) else 'NOT everything holds'}; written to {report}")
    if not is_ok(checks):
        raise SystemExit(1)


def _interrupt(*_: object) -> None:
    """Once: everything the demo started is then removed, which a second signal must not disturb."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    click.echo("interrupted: ending what the demo has started", err=True)
    raise KeyboardInterrupt


class _Teller:
    """Says what happens as it happens, with the time since the start."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._lock = threading.Lock()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def __call__(self, text: str) -> None:
        with self._lock:
            click.echo(f"[{self.seconds:5.1f} s] {text}")
