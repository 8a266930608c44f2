"""`ganger queue`: the jobs that live, or all: who has its gang or has ended by number, then who waits, in its order."""

from __future__ import annotations

import click

from ganger.cli.options import json_option, number, open_client

_HEADINGS = ("JOB", "NAME", "USER", "STATE", "GPUS", "TIME", "PLACE", "PROGRESS", "NODES/REASON")
_STATES = ("pending", "holding", "suspended", "succeeded", "failed", "cancelled")


@click.command()
@click.option("--all", "-a", "everything", is_flag=True, help="Finished jobs too.")
@click.option("--state", "-s", "states", multiple=True, type=click.Choice(_STATES, case_sensitive=False))
@click.option("--user", "-u", default="", help="Only this user's.")
@click.option("--limit", "-n", type=click.IntRange(1), default=1_000, show_default=True, help="At most so many.")
@json_option
def queue(everything: bool, states: tuple[str, ...], user: str, limit: int, as_json: bool) -> None:
    """List jobs; without options those that have not ended."""
    from ganger.cli import job_lines
    from ganger.console.plain import print_json
    from ganger.console.tables import print_table
    from ganger.v1.job_pb2 import Job

    wanted = [Job.State.Value(f"STATE_{state.upper()}") for state in states]
    if not wanted and not everything:
        wanted = [Job.STATE_PENDING, Job.STATE_HOLDING, Job.STATE_SUSPENDED]
    with open_client() as client:
        jobs = sorted(client.list_jobs(wanted, user, limit), key=job_lines.order)
    if as_json:
        print_json(jobs)
        return
    rows = [
        (
            number(job.name),
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
    print_table(_HEADINGS, rows, "no jobs" if everything or states else "no jobs that live; --all shows the others")
