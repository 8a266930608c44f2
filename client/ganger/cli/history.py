"""`ganger history` (also `ganger events`): what happened to a job, a node, or the cluster."""

from __future__ import annotations

import sys
import time

import click

from ganger.cli.options import json_option, open_client

_FOLLOW_SECONDS = 1.0


@click.command()
@click.argument("subject", default="")
@click.option("--follow", "-f", is_flag=True, help="Go on as things happen.")
@click.option("--after", type=click.IntRange(0, 2**63 - 1), default=0, help="Only events after this number.")
@click.option("--limit", "-n", type=click.IntRange(1), help="At most so many, oldest first.")
@json_option
def history(subject: str, follow: bool, after: int, limit: int | None, as_json: bool) -> None:
    """List what happened to SUBJECT: a job (7, jobs/7) or a node (n1, nodes/n1). Without it, everything."""
    from ganger.console.plain import print_json, print_json_line
    from ganger.wire.names import job_name_from_text, node_name_from_text

    if subject:
        is_job = subject.isdecimal() or subject.startswith("jobs/")
        subject = job_name_from_text(subject) if is_job else node_name_from_text(subject)
    with open_client() as client:
        # What is gone has a history still; what has none may never have been.
        if subject and next(iter(client.list_events(subject, 0, 1)), None) is None:
            if subject.startswith("jobs/"):
                client.get_job(subject)
            else:
                client.get_node(subject)
        if as_json and not follow:
            print_json(list(client.list_events(subject, after, limit)))
            return
        while True:
            for event in client.list_events(subject, after, limit):
                after = event.sequence
                if as_json:
                    print_json_line(event)
                else:
                    print(line(event), flush=True)
            if not follow:
                return
            time.sleep(_FOLLOW_SECONDS)


def line(event: object) -> str:
    """ "2026-11-21 13:11:49.120  jobs/7  gang_parked  at offload, step=120, by user:ann"."""
    from ganger.v1.job_pb2 import Event
    from ganger.wire import times

    assert isinstance(event, Event)
    then = times.local_datetime(event.time)
    # A line of a terminal is short, and today is known there.
    is_today = sys.stdout.isatty() and then.date() == then.now(then.tzinfo).date()
    when = then.strftime("%H:%M:%S.%f" if is_today else "%Y-%m-%d %H:%M:%S.%f")[:-3]
    figures = " ".join(f"{name}={value}" for name, value in sorted(event.figures.items()))
    # Of "scheduler:" without a name the colon goes: it is the default one.
    cause = f"by {event.cause.rstrip(':')}" if event.cause else ""
    text = ", ".join(part for part in (event.message, figures, cause) if part)
    return f"{when}  {event.subject:<8}  {event.kind:<15}  {text}".rstrip()
