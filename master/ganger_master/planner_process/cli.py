"""`ganger planner`: the cluster-wide planner, run by hand, or by the master as a module."""

from __future__ import annotations

from pathlib import Path

import click
from ganger.console import Directory


@click.group()
def planner() -> None:
    """Run the planner, which places all jobs where the policy weighs them against each other."""


@planner.command()
@click.option("--master", "--state-dir", "master", help="State directory of the master, or its address.")
@click.option("--policy", default="", metavar="NAME", help="Default: the master's.")
@click.option(
    "--plan-every", default="", metavar="TIME", help="Least time between two plans that preempt running jobs."
)
@click.option(
    "--note",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Save the planner's state to FILE, and continue from it after a restart.",
)
@click.option(
    "--record",
    "record_to",
    type=Directory(),
    metavar="DIR",
    help="Record observations and plans in DIR.",
)
@click.option("--until-stdin-closes", is_flag=True, help="End when standard input closes.")
@click.pass_context
def run(
    context: click.Context,
    master: str | None,
    policy: str,
    plan_every: str,
    note: Path | None,
    record_to: Path | None,
    until_stdin_closes: bool,
) -> None:
    """Rank jobs, suggest their places, and preempt jobs for others, until stopped. A master whose policy needs a
    planner starts one itself, unless it has --no-planner."""
    import asyncio

    # Plans are computed with it, later: where it is missing, the command line says now what to install.
    import scipy  # noqa: F401
    from ganger.console import CommandError, ExitCode
    from ganger.program_setup import set_up_log
    from ganger.scheduling.program import until_stopped
    from ganger.wire.endpoints import find_endpoint

    from ganger_master.config import parse_duration
    from ganger_master.planner_process.run import NoPlannerError, Planner

    try:
        seconds = parse_duration(plan_every) if plan_every else None
    except ValueError as error:
        raise click.UsageError(f"--plan-every: {error}") from error
    if record_to is not None:
        _make_directory(record_to)
    set_up_log("planner")
    where = master or context.find_root().obj
    # Later a master that is away comes back; one that never was does not.
    find_endpoint(where)
    work = Planner(lambda: find_endpoint(where), policy=policy, plan_every_s=seconds, note=note, record_to=record_to)
    try:
        asyncio.run(until_stopped(work.run(), until_stdin_closes))
    except NoPlannerError as error:
        raise CommandError(str(error), ExitCode.USAGE) from error


def _make_directory(record_to: Path) -> None:
    """Make the directory of recordings, and check that a file can be made in it. Raises click.UsageError."""
    import tempfile

    from ganger.text import os_reason

    try:
        record_to.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=record_to):
            pass
    except OSError as error:
        raise click.UsageError(f"--record: cannot write to {record_to}: {os_reason(error)}") from error


if __name__ == "__main__":
    run()
