"""`ganger scheduler`: runs job schedulers, the default host or a user's own."""

from __future__ import annotations

import sys

import click


@click.group()
def scheduler() -> None:
    """Run job schedulers."""


@scheduler.command()
@click.option("--state-dir", help="The master's state directory, or its address. Default: as for every command.")
@click.option("--until-stdin-closes", is_flag=True, help="End with the process that started it.")
@click.pass_obj
def host(master: str | None, state_dir: str | None, until_stdin_closes: bool) -> None:
    """Run a default host, beside those the master starts."""
    from ganger.scheduling import host as shell

    arguments = ["--state-dir", state_dir or master] if state_dir or master else []
    sys.exit(shell.main([*map(str, arguments), *(["--until-stdin-closes"] if until_stdin_closes else [])]))


@scheduler.command()
@click.argument("scheduler_class", metavar="MODULE:CLASS")
@click.option("--job", "jobs", multiple=True, required=True, help="Job to schedule: 7 or jobs/7. May be repeated.")
@click.pass_obj
def run(master: str | None, scheduler_class: str, jobs: tuple[str, ...]) -> None:
    """Schedule jobs with a class of your own, in this process."""
    import asyncio
    import logging

    from ganger.scheduling.host import Host, serve
    from ganger.scheduling.loading import LoadError, load_scheduler
    from ganger.wire import names

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    sys.path.insert(0, "")
    try:
        decider = load_scheduler(scheduler_class)
    except LoadError as error:
        raise click.UsageError(str(error)) from error
    asyncio.run(serve(Host(decider, master=master, jobs=[names.job_name_from_text(job) for job in jobs])))
