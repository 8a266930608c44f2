"""`ganger queue`: the jobs that live, or all: who has its gang or has ended by number, then who waits, in its order."""

from __future__ import annotations

import sys

import click

from ganger.cli.options import json_option, number, open_client

_HEADINGS = ("JOB", "NAME", "USER", "STATE", "GPUS", "TIME", "PLACE", "PROGRESS", "NODES/REASON")
_STATES = ("pending", "holding", "suspended", "succeeded", "failed", "cancelled", "stopped")


@click.command()
@click.option("--all", "-a", "everything", is_flag=True, help="Finished jobs too.")
@click.option("--state", "-s", "states", multiple=True, type=click.Choice(_STATES, case_sensitive=False))
@click.option("--user", "-u", default="", help="Only this user's.")
@click.option("--limit", "-n", type=click.IntRange(1), default=1_000, show_default=True, help="At most so many.")
@click.option("--members", "-r", is_flag=True, help="The members of arrays one by one, not folded into a line.")
@json_option
def queue(everything: bool, states: tuple[str, ...], user: str, limit: int, members: bool, as_json: bool) -> None:
    """List jobs; without options those that have not ended. A job array is one line."""
    from ganger.cli import array_lines, job_lines
    from ganger.console.plain import print_json
    from ganger.console.tables import print_table
    from ganger.v1.job_pb2 import Job

    wanted = [[Job.State.Value(f"STATE_{state.upper()}") for state in states]]
    if not states and not everything:
        # Those who have something first: however many wait, they are listed.
        wanted = [[Job.STATE_HOLDING, Job.STATE_SUSPENDED], [Job.STATE_PENDING]]
    with open_client() as client:
        found: list[Job] = []
        for group in wanted:
            if len(found) <= limit:
                found += client.list_jobs(group, user, limit + 1 - len(found), fold_arrays=not members)
        jobs = sorted(found[:limit], key=job_lines.order)
        # A state that is asked for is a job's: an array may have members in several.
        arrays = [] if members or states else client.list_arrays(user, live=not everything)
    if len(found) > limit or len(arrays) > limit:
        print(f"only {limit} are listed, those that wait or have ended from the newest: --limit N", file=sys.stderr)
    arrays = arrays[:limit]
    arrays.sort(key=lambda array: int(number(array.name)))
    if as_json:
        print_json([*jobs, *arrays])
        return
    rows: list[tuple[str, ...]] = [
        (
            job_lines.called(job),
            job_lines.label(job),
            job.user,
            job_lines.state_text(job),
            job_lines.gpus_text(job),
            job_lines.elapsed(job),
            str(job.queue_rank or ""),
            job_lines.progress_text(job.progress),
            job_lines.note(job),
        )
        for job in jobs
    ]
    rows += [array_lines.row(array) for array in arrays]
    print_table(_HEADINGS, rows, "no jobs" if everything or states else "no jobs that live; --all shows the others")
