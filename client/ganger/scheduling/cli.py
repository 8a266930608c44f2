"""`ganger scheduler`: run job schedulers by hand, one's own or the default ones."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from pathlib import Path

import click


@click.group()
def scheduler() -> None:
    """Run job schedulers."""


@scheduler.command()
@click.option("--state-dir", "--master", "master", help="State directory of the master, or its address.")
@click.option("--until-stdin-closes", is_flag=True, help="End when standard input closes.")
@click.pass_context
def host(context: click.Context, master: str | None, until_stdin_closes: bool) -> None:
    """Serve all jobs that bring no scheduler of their own."""
    from ganger.scheduling.host import main
    from ganger.wire.endpoints import find_endpoint

    # Later a master that is away comes back; one that never was does not.
    master = master or context.find_root().obj
    find_endpoint(master)
    arguments = ["--state-dir", master] if master else []
    sys.exit(main([*arguments, *["--until-stdin-closes"] * until_stdin_closes]))


@scheduler.command()
@click.argument("name", metavar="MODULE:CLASS")
@click.option("--job", "jobs", multiple=True, help="Job to serve, 'jobs/7'; may be repeated.")
@click.option("--job-from-stdin", is_flag=True, hidden=True, help="Say 'ready', then read the job's name.")
@click.option("--master", "--state-dir", "master", help="State directory of the master, or its address.")
@click.pass_context
def run(context: click.Context, name: str, jobs: tuple[str, ...], job_from_stdin: bool, master: str | None) -> None:
    """Serve jobs with a scheduler of your own, until they have ended.

    MODULE is looked for in the working directory first.
    """
    import asyncio

    from ganger.scheduling.host import SchedulerHost
    from ganger.scheduling.program import until_stopped
    from ganger.wire.endpoints import find_endpoint
    from ganger.wire.resource_names import job_name_from_text

    if bool(jobs) == job_from_stdin:
        raise click.UsageError("name the jobs to serve: --job jobs/7")
    names = [job_name_from_text(job) for job in jobs]
    made = _load(name)
    master = master or context.find_root().obj
    find_endpoint(master)
    if job_from_stdin:
        names = _read_job()
        if not names:
            return
    served = SchedulerHost(lambda: find_endpoint(master), made, jobs=names)
    asyncio.run(until_stopped(served.run(), until_stdin_closes=False))


def _read_job() -> list[str]:
    """The job that was submitted, once it is; none if the submission failed."""
    from ganger.scheduling.detached_scheduler import READY

    os.write(sys.stdout.fileno(), READY)
    # The process that waited for READY closes the pipe: output of the user's code belongs in the log.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    line = sys.stdin.readline().strip()
    return [line] if line else []


def _load(name: str) -> type:
    """The class, checked; a click error says what is wrong with it."""
    from ganger.scheduling.job_scheduler import JobScheduler

    module_name, colon, class_name = name.partition(":")
    if not (module_name and colon and class_name):
        raise click.UsageError(f"scheduler {name!r} is not of the form module:Class")
    sys.path.insert(0, str(Path.cwd()))
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        raise click.UsageError(f"scheduler {name!r} cannot be loaded: {error}") from error
    except Exception as error:
        # The user's own code: where it broke is what its author wants to know.
        where = traceback.extract_tb(error.__traceback__)[-1]
        what = f"{type(error).__name__}: {error}, in {where.filename}, line {where.lineno}"
        raise click.UsageError(f"scheduler {name!r} cannot be loaded: {what}") from error
    if not (isinstance(found, type) and issubclass(found, JobScheduler)):
        raise click.UsageError(f"scheduler {name!r} does not derive from ganger.scheduling.JobScheduler")
    return found
