"""`ganger queue`: list live jobs, or all: jobs with a gang and finished ones by number, then pending jobs in order."""

from __future__ import annotations

import re
import sys
from itertools import islice
from typing import TYPE_CHECKING

import click

from ganger.cli.options import json_option, number, open_client, pairs

if TYPE_CHECKING:
    from ganger.v1.job_pb2 import Job

_HEADINGS = ("JOB", "NAME", "USER", "STATE", "GPUS", "TIME", "PLACE", "PROGRESS", "NODES/REASON")
# Columns that a narrow terminal goes without before the reason is cut.
_SPARE = ("USER", "PLACE")
# What STATE says, and in which states a job can be that reads so.
_HOLDING, _RESTING = ("HOLDING",), ("HOLDING", "SUSPENDED")
_STATES = {
    "pending": ("PENDING",),
    "held": ("PENDING",),
    "starting": _HOLDING,
    "running": _HOLDING,
    "waiting": _HOLDING,
    "parked": _HOLDING,
    "moving": _HOLDING,
    "resizing": _HOLDING,
    "stopping": _RESTING,
    "suspended": _RESTING[1:],
    "succeeded": ("SUCCEEDED",),
    "failed": ("FAILED",),
    "cancelled": ("CANCELLED",),
    "stopped": ("STOPPED",),
    # Every job with a gang, in any phase.
    "holding": _HOLDING,
}


@click.command()
@click.option("--all", "-a", "everything", is_flag=True, help="Finished jobs too.")
@click.option(
    "--state",
    "-s",
    "states",
    multiple=True,
    metavar="STATE",
    type=click.Choice(tuple(_STATES), case_sensitive=False),
    help="Only jobs in this state, members of arrays among them; holding: jobs that have a gang. Repeat for more.",
)
@click.option("--user", "-u", default="", help="Only this user's.")
@click.option("--name", metavar="TEXT", default="", help="Only jobs submitted with this --name.")
@click.option("--label", "-l", "labels", multiple=True, metavar="NAME=VALUE", help="Only jobs with this label.")
@click.option("--limit", "-n", type=click.IntRange(1), default=1_000, show_default=True, help="At most so many.")
@click.option("--members", "-r", is_flag=True, help="The members of arrays one by one, not folded into a line.")
@json_option
def queue(
    everything: bool,
    states: tuple[str, ...],
    user: str,
    name: str,
    labels: tuple[str, ...],
    limit: int,
    members: bool,
    as_json: bool,
) -> None:
    """List jobs; without options those that have not ended. A job array is one line."""
    from ganger.cli import job_table
    from ganger.console import print_json, print_table
    from ganger.v1.job_pb2 import Job

    asked, wrong = pairs("--label", labels)
    if wrong:
        raise click.UsageError("; ".join(f"{field}: {what}" for field, what in wrong))
    wanted = [
        [Job.State.Value(f"STATE_{each}") for each in sorted({each for state in states for each in _STATES[state]})]
    ]
    if not states and not everything:
        # Jobs that hold devices come first, so that a long queue never cuts them off.
        wanted = [[Job.STATE_HOLDING, Job.STATE_SUSPENDED], [Job.STATE_PENDING]]
    # What is asked for is said of jobs: of an array some members may be so.
    members = members or bool(states or name or asked)
    with open_client() as client:
        arrays = [] if members else client.list_arrays(user, live=not everything)
        room = max(0, limit - len(arrays))
        found: list[Job] = []
        for group in wanted:
            listed = client.list_jobs(group, user, fold_arrays=not members, name=name, labels=asked)
            fitting = (job for job in listed if not states or _is_in(job, states))
            found += islice(fitting, max(0, room + 1 - len(found)))
        jobs = sorted(found[:room], key=job_table.order)
    if len(found) + len(arrays) > limit:
        print(f"only {limit} are listed, those that wait or have ended from the newest: --limit N", file=sys.stderr)
    arrays = sorted(arrays[:limit], key=lambda array: int(number(array.name)))
    if as_json:
        print_json([*jobs, *arrays])
        return
    rows: list[tuple[str, ...]] = [
        (
            job_table.called(job),
            job_table.label(job),
            job_table.column(job.user),
            job_table.state_text(job),
            job_table.gpus_text(job),
            job_table.elapsed(job),
            str(job.queue_rank or ""),
            job_table.progress_text(job.progress),
            job_table.note(job),
        )
        for job in jobs
    ]
    rows += [job_table.array_row(array) for array in arrays]
    is_chosen = everything or states or name or asked
    empty = "no jobs" if is_chosen else "no jobs that live; --all shows the others"
    print_table(_HEADINGS, rows, empty, _SPARE)


def _is_in(job: Job, states: tuple[str, ...]) -> bool:
    from ganger.cli.job_table import state_text

    # "parked(OFFLOAD)", "running, in turn", "waiting for its turn"
    word = re.split(r"\W", state_text(job), maxsplit=1)[0]
    return word in states or ("holding" in states and job.state == job.STATE_HOLDING)
