"""`ganger history`: what happened to a job or an array, with causes and figures; `ganger events`: the events."""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from collections.abc import Iterable
from datetime import datetime
from typing import TYPE_CHECKING, Any

import click

from ganger.cli.options import Selection, array_of, each_of, filter_options, json_option, open_client, split
from ganger.console import plain, print_json, print_json_line, print_line

if TYPE_CHECKING:
    from ganger.client import Client
    from ganger.history import HistoryEvent, HistorySection
    from ganger.job_state import Totals
    from ganger.v1.job_pb2 import Event

follow_option = click.option("--follow", "-f", is_flag=True, help="Print what happens from now on, too.")


@click.command()
@click.argument("subject", required=False)
@follow_option
@click.option("--after", type=click.IntRange(0, 2**63 - 1), default=0, help="Only events after this number.")
@click.option("--limit", "-n", type=click.IntRange(1), help="Only the newest so many, and with -f what follows.")
@json_option
def events(subject: str | None, follow: bool, after: int, limit: int | None, as_json: bool) -> None:
    """List what happened to SUBJECT, event by event: a job (7, 7_3), an array (arrays/7), a node (n1) or the cluster
    as a whole (cluster). Without it, everything."""
    with open_client() as client:
        _print_events(client, _subject(client, subject), follow, after, limit, as_json)


@click.command()
@click.argument("subjects", nargs=-1)
@filter_options
@follow_option
@json_option
def history(
    subjects: tuple[str, ...], by_name: str, by_user: str, by_all: bool, follow: bool, as_json: bool
) -> int | None:
    """Print what happened to SUBJECTS and why: jobs (7, 7_3, 1,2 or 3-5) or arrays (7), from submission to end.

    Of a node, and without SUBJECT of everything, it lists the events: see `ganger events`.
    """
    if subjects and (by_name or by_user or by_all):
        raise click.UsageError("give jobs or a filter (--name, --user, --all), not both")
    with open_client() as client:
        if by_name or by_user or by_all:
            words: list[str | None] = [*Selection((), by_name, by_user).named(client, ended=True)]
        else:
            words = [word for subject in subjects for word in split(subject)] or [None]
        if len(words) == 1:
            _print_history(client, _subject(client, words[0]), follow, as_json)
            return None
        if follow:
            raise click.UsageError(f"--follow takes one subject, not {len(words)}")

        if as_json:
            answers, worst = each_of(words, lambda word: _as_json(client, _subject(client, word)))
            print_json(answers)
            return worst

        def print_one(word: str | None) -> None:
            name = _subject(client, word)
            kind, _, rest = name.rpartition("/")
            print(f"==> {kind.removesuffix('s')} {rest} <==" if kind else f"==> {name} <==", flush=True)
            _print_history(client, name, False, False)

        return each_of(words, print_one)[1]


def _print_history(client: Client, name: str, follow: bool, as_json: bool) -> None:
    from ganger.cli.job_table import plain_event
    from ganger.history import history_of, summary

    if not name.startswith(("jobs/", "arrays/")):
        _print_events(client, name, follow, 0, None, as_json)
        return
    if as_json and not follow:
        print_json(_as_json(client, name))
        return
    events: list[HistoryEvent] = []
    printed = 0
    for news in client.follow_events(name) if follow else [client.list_events(name)]:
        events += map(plain_event, news)
        sections, totals = history_of(events, time.time())
        for section in sections[printed:]:
            print(json.dumps(_plain(section))) if as_json else print_line(_section_line(section))
        printed = len(sections)
        sys.stdout.flush()
        if sections and sections[-1].kind in _LAST:
            break
    if as_json:
        print(json.dumps({"subject": name, "totals": _figures(totals)}))
        return
    if line := summary(totals):
        print(f"in all: {line}")
    if sections and sections[-1].kind == "job_failed":
        _print_failure(client, name)


def _print_failure(client: Client, name: str) -> None:
    """Print where a failed job ran and how its log ends, while the master still keeps the job."""
    from ganger.cli.job_details import failure_lines
    from ganger.wire.errors import JobNotFound

    try:
        report = failure_lines(client, client.get_job(name))
    except JobNotFound:
        return
    for text in report:
        print_line(text)


def _as_json(client: Client, name: str) -> dict[str, Any]:
    """Return the history of a job or array, or the events of anything else, as one value for JSON."""
    from ganger.cli.job_table import plain_event
    from ganger.history import history_of

    events = list(client.list_events(name))
    if not name.startswith(("jobs/", "arrays/")):
        return {"subject": name, "events": [plain(event) for event in events]}
    sections, totals = history_of(list(map(plain_event, events)), time.time())
    return {"subject": name, "chapters": list(map(_plain, sections)), "totals": _figures(totals)}


_LAST = frozenset({"job_succeeded", "job_failed", "job_cancelled", "job_stopped", "array_ended"})


def _subject(client: Client, subject: str | None) -> str:
    """Return the resource name of a subject, "" for everything. One that has gone is found while it has a history."""
    from ganger.wire.errors import JobNotFound
    from ganger.wire.resource_names import (
        array_name,
        job_name_from_text,
        node_name_from_text,
        parse_array_name,
        parse_member,
    )

    if subject is None:
        return ""
    if subject == "cluster":
        return subject
    if parse_member(subject) is not None:
        return client.get_job(subject).name
    if subject.startswith("arrays/"):
        name = array_name(parse_array_name(subject))
    elif subject.isdecimal() or subject.startswith("jobs/"):
        name = job_name_from_text(subject)
    else:
        name = node_name_from_text(subject)
    if next(iter(client.list_events(name, 0, 1)), None) is not None:
        return name
    if name.startswith("nodes/"):
        client.get_node(name)
    elif name.startswith("arrays/"):
        client.get_array(name)
    else:
        # The number may be that of an array, and its members may be kept no longer.
        array = name.replace("jobs/", "arrays/")
        if next(iter(client.list_events(array, 0, 1)), None) is not None:
            return array
        try:
            client.get_job(name)
        except JobNotFound as error:
            return array_of(name, error)
    return name


def _print_events(client: Client, subject: str, follow: bool, after: int, limit: int | None, as_json: bool) -> None:
    known = client.list_events(subject, after) if limit is None else _newest(client, subject, after, limit)
    if as_json and not follow:
        print_json(list(known))
        return

    def show(event: Event) -> None:
        if as_json:
            print_json_line(event)
        else:
            print_line(line(event))

    for event in known:
        after = event.sequence
        show(event)
    if not follow:
        return
    for news in client.follow_events(subject, after):
        for event in news:
            show(event)
        sys.stdout.flush()


def _newest(client: Client, subject: str, after: int, limit: int) -> Iterable[Event]:
    """The last so many, oldest first, looked for from the end in growing steps: all there are may be very many."""
    from ganger.wire.errors import EventsCompacted

    newest, span = client.get_cluster().event_sequence, limit
    while (first := newest - span) > after:
        try:
            found = list(client.list_events(subject, first))
        except EventsCompacted:
            break
        if len(found) >= limit:
            return found[-limit:]
        span *= 8
    return deque(client.list_events(subject, after), limit)


def line(event: Event) -> str:
    """ "2026-11-21 13:11:49.120  jobs/7  gang_parked  at offload, step=120, by user:ann"."""
    from ganger.wire import times

    figures = " ".join(f"{name}={value}" for name, value in sorted(event.figures.items()))
    # "scheduler:" without a name is the default scheduler, printed without the colon.
    cause = f"by {event.cause.rstrip(':')}" if event.cause else ""
    text = ", ".join(part for part in (event.message, figures, cause) if part)
    return f"{_when(times.local_datetime(event.time))}  {event.subject:<8}  {event.kind:<15}  {text}".rstrip()


def _section_line(section: HistorySection) -> str:
    from ganger.wire import times

    return f"{_when(times.local_datetime(times.timestamp(section.time)))}  {section.text}"


def _when(then: datetime) -> str:
    # A line of a terminal is short, and today is known there.
    is_today = sys.stdout.isatty() and then.date() == then.now(then.tzinfo).date()
    return then.strftime("%H:%M:%S.%f" if is_today else "%Y-%m-%d %H:%M:%S.%f")[:-3]


def _plain(section: HistorySection) -> dict[str, Any]:
    from ganger.wire import times

    return {
        "time": times.local_datetime(times.timestamp(section.time)).isoformat(),
        "kind": section.kind,
        "text": section.text,
        "figures": dict(section.figures),
    }


def _figures(totals: Totals) -> dict[str, float]:
    from dataclasses import asdict

    return {key: round(value, 4) for key, value in asdict(totals).items()}
