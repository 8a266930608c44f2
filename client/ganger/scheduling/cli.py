"""`ganger scheduler`: run job schedulers by hand, one's own or the default ones."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import click


@click.group()
def scheduler() -> None:
    """Run job schedulers."""


@scheduler.command()
@click.option("--state-dir", "--master", "master", help="State directory of the master, or its address.")
@click.option("--until-stdin-closes", is_flag=True, help="End when standard input closes.")
def host(master: str | None, until_stdin_closes: bool) -> None:
    """Serve all jobs that bring no scheduler of their own."""
    from ganger.scheduling.host import main

    arguments = ["--state-dir", master] if master else []
    sys.exit(main([*arguments, *(["--until-stdin-closes"] if until_stdin_closes else [])]))


@scheduler.command()
@click.argument("name", metavar="MODULE:CLASS")
@click.option("--job", "jobs", multiple=True, required=True, help="Job to serve, 'jobs/7'; may be repeated.")
@click.option("--master", "--state-dir", "master", help="State directory of the master, or its address.")
def run(name: str, jobs: tuple[str, ...], master: str | None) -> None:
    """Serve jobs with a scheduler of your own, until they have ended.

    MODULE is looked for in the working directory first.
    """
    import asyncio

    from ganger.scheduling.host import Host, run_host
    from ganger.wire.endpoints import find_endpoint
    from ganger.wire.errors import ApiError

    made = _load(name)
    full_names = [job if job.startswith("jobs/") else f"jobs/{job}" for job in jobs]
    try:
        asyncio.run(run_host(Host(lambda: find_endpoint(master), made, jobs=full_names)))
    except ApiError as error:
        raise click.ClickException(error.message) from error


def _load(name: str) -> type:
    """The class, checked; a click error says what is wrong with it."""
    from ganger.scheduling.scheduler import JobScheduler

    module_name, colon, class_name = name.partition(":")
    if not (module_name and colon and class_name):
        raise click.UsageError(f"scheduler {name!r} is not of the form module:Class")
    sys.path.insert(0, str(Path.cwd()))
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        raise click.UsageError(f"scheduler {name!r} cannot be loaded: {error}") from error
    if not (isinstance(found, type) and issubclass(found, JobScheduler)):
        raise click.UsageError(f"scheduler {name!r} does not derive from ganger.scheduling.JobScheduler")
    return found
