"""`ganger demo`: the proof, on this machine. Real trainings are placed as gangs, suspended between two mini-batches,
moved to other nodes and re-pinned to other cores; then every loss and the final weights are compared, bit by bit, with
the same trainings left alone."""

from __future__ import annotations

import secrets
import signal
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import click

from ganger.cli.checkout import is_of_a_checkout, needs_checkout


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
    """Show that it works: real jobs, suspended, moved and re-pinned without changing one bit.

    Takes two to three minutes on two cores. Exits with 0 only if every check holds.
    """
    # Loaded here: `ganger --help` must not pay for the demo.
    try:
        from examples.demo.demo_cluster import DemoCluster, DemoClusterError
        from examples.demo.programme import find_examples, play, programme
        from examples.demo.report import checks_of, is_ok, print_tables, write_report
        from examples.demo.undisturbed_run import Alone
    except ModuleNotFoundError as error:
        if not is_of_a_checkout(error):
            raise
        raise needs_checkout("demo") from None

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
            # begun before the cluster, so that both import at once
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
