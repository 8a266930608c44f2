"""`ganger reserve`: nodes that are kept for some users, or for maintenance, for a time."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click

from ganger.cli.options import json_option, open_client
from ganger.console import CommandError, ExitCode, print_json, print_pairs, print_table
from ganger.text import format_duration, parse_duration, visible
from ganger.wire import times
from ganger.wire.errors import ReservationNotFound

if TYPE_CHECKING:
    from ganger.v1.node_pb2 import Reservation, UpdateReservationRequest

_HEADINGS = ("NAME", "STATE", "START", "END", "FOR", "NODES", "REASON")
_SPARE = ("REASON", "END")
_USERS_SHOWN = 3


@click.group(invoke_without_command=True, short_help="Keep nodes for users or for maintenance, for a time.")
@click.pass_context
@json_option
def reserve(context: click.Context, as_json: bool) -> None:
    """Keep nodes for some users, or for maintenance, for a time; without a subcommand list what is reserved."""
    if context.invoked_subcommand is None:
        _list(as_json)


@reserve.command("create")
@click.argument("name")
@click.option("--nodes", required=True, metavar="NODES", help="Names and ranges: gpu[01-08],big.")
@click.option("--start", required=True, metavar="TIME", help="2026-12-24T18:00, 18:00, 6h from now, or now.")
@click.option("--duration", required=True, metavar="TIME", help="How long, e.g. 4h.")
@click.option("--users", metavar="USERS", help="Only these users' jobs, ann,bob; without: maintenance.")
@click.option("--lead", metavar="TIME", help="How long before the start the nodes are emptied. Default 10m.")
@click.option("--reason", "-m", default="", metavar="TEXT", help="Shown to users.")
@json_option
def create(
    name: str, nodes: str, start: str, duration: str, users: str | None, lead: str | None, reason: str, as_json: bool
) -> None:
    """Reserve nodes. Their jobs are moved away before, and none is started that could not leave or end in time."""
    from ganger.v1.node_pb2 import Reservation

    begin, length = _start(start), _duration("--duration", duration)
    reservation = Reservation(
        name=name,
        nodes=nodes,
        start_time=times.timestamp(begin),
        end_time=times.timestamp(begin + length),
        users=[] if users is None else _users(users, "leave it out for maintenance"),
        lead=None if lead is None else times.duration(_duration("--lead", lead)),
        reason=reason,
    )
    with open_client() as client:
        made = client.create_reservation(reservation)
    if as_json:
        print_json(made)
    else:
        print(f"reserved {_in_words(made)}")


@reserve.command("update")
@click.argument("name")
@click.option("--nodes", metavar="NODES", help="These nodes instead: gpu[01-08],big; += adds, -= removes: +=gpu09.")
@click.option("--start", metavar="TIME", help="As of create. Without --duration it is as long as before.")
@click.option("--duration", metavar="TIME", help="How long, from the start on.")
@click.option("--users", metavar="USERS", help="These users instead: ann,bob; += adds, -= removes: +=eve.")
@click.option("--maintenance", is_flag=True, help="No user's jobs: maintenance.")
@click.option("--lead", metavar="TIME", help="How long before the start the nodes are emptied.")
@click.option("--reason", "-m", metavar="TEXT", help="Shown to users.")
@json_option
def update(
    name: str,
    nodes: str | None,
    start: str | None,
    duration: str | None,
    users: str | None,
    maintenance: bool,
    lead: str | None,
    reason: str | None,
    as_json: bool,
) -> None:
    """Change a reservation that is not over. What is not named stays; nodes that it loses take jobs again at once.

    `--nodes +=gpu09` adds a node, `--nodes -=gpu[01-02]` removes two; `--users` likewise.
    """
    from ganger.v1.node_pb2 import UpdateReservationRequest

    if all(value is None for value in (nodes, start, duration, users, lead, reason)) and not maintenance:
        options = "--start, --duration, --nodes, --users, --maintenance, --lead or --reason"
        raise click.UsageError(f"name what to change: {options}")
    if users is not None and maintenance:
        raise click.UsageError("--maintenance goes without --users")
    nodes_change, named = _change(nodes or "")
    users_change, named_users = _change(users or "")
    if nodes is not None and not named.strip():
        raise click.UsageError(f"--nodes: {nodes!r} names no node; `ganger reserve delete {name}` ends it")
    request = UpdateReservationRequest(
        name=name,
        nodes=named,
        nodes_change=nodes_change,
        start_time=None if start is None else times.timestamp(_start(start)),
        duration=None if duration is None else times.duration(_duration("--duration", duration)),
        users=[] if users is None else _users(named_users, "--maintenance makes it maintenance"),
        users_change=users_change,
        maintenance=maintenance,
        reason=reason,
        lead=None if lead is None else times.duration(_duration("--lead", lead)),
    )
    with open_client() as client:
        changed = client.update_reservation(request)
    if as_json:
        print_json(changed)
    else:
        print(f"reservation {visible(name)}: {_in_words(changed)}")


@reserve.command("list")
@json_option
def list_(as_json: bool) -> None:
    """List what is reserved now or later, by its start."""
    _list(as_json)


@reserve.command("show")
@click.argument("name")
@json_option
def show(name: str, as_json: bool) -> None:
    """Show all that is known of a reservation."""
    with open_client() as client:
        found = {one.name: one for one in client.list_reservations()}
    one = found.get(name)
    if one is None:
        there = f"there are {', '.join(found)}" if found else "there are none"
        raise CommandError(f"there is no reservation {name!r}: {there}", ExitCode.NOT_FOUND)
    if as_json:
        print_json(one)
        return
    values = (*_row(one)[:4], ", ".join(map(visible, one.users)) or "maintenance", *_row(one)[5:])
    lead = format_duration(times.seconds(one.lead)) if one.HasField("lead") else ""
    print_pairs([*zip(map(str.lower, _HEADINGS), values, strict=True), ("lead", lead), ("created by", one.user)])


@reserve.command("delete")
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
def delete(names: tuple[str, ...]) -> None:
    """Delete reservations: nodes take jobs again."""
    with open_client() as client:
        unknown = []
        for name in names:
            try:
                client.delete_reservation(name)
            except ReservationNotFound as error:
                unknown.append(str(error))
            else:
                print(f"deleted reservation {name}")
    if unknown:
        raise CommandError("; ".join(unknown), ExitCode.NOT_FOUND)


def _list(as_json: bool) -> None:
    with open_client() as client:
        found = client.list_reservations()
    if as_json:
        print_json(found)
    else:
        print_table(_HEADINGS, [_row(one) for one in found], "no reservations", _SPARE)


def _row(one: Reservation) -> tuple[str, ...]:
    return (
        visible(one.name),
        _state(one),
        _local(one.start_time),
        _local(one.end_time),
        _purpose(one),
        visible(one.nodes),
        visible(one.reason),
    )


def _state(one: Reservation) -> str:
    """Return "in 2h", "emptying its nodes" or "since 5m"."""
    seconds = times.unix_s(one.start_time) - time.time()
    if one.phase == one.PHASE_EMPTYING:
        return f"emptying, begins in {format_duration(max(0.0, seconds))}"
    return f"since {format_duration(-seconds)}" if seconds <= 0 else f"in {format_duration(seconds)}"


def _in_words(one: Reservation) -> str:
    return f"{visible(one.nodes)} from {_local(one.start_time)} to {_local(one.end_time)}: {_purpose(one)}"


def _purpose(one: Reservation) -> str:
    users = ", ".join(map(visible, one.users[:_USERS_SHOWN]))
    return users + (", ..." if len(one.users) > _USERS_SHOWN else "") if users else "maintenance"


def _local(time_: object) -> str:
    return times.local_datetime(time_).strftime("%Y-%m-%d %H:%M")  # type: ignore[arg-type]


def _users(text: str, remedy: str) -> list[str]:
    """Return the users of a list. Raises UsageError for one without any, which would be maintenance."""
    users = [user.strip() for user in text.split(",") if user.strip()]
    if not users:
        raise click.UsageError(f"--users: {text!r} names no user; {remedy}")
    return users


def _change(text: str) -> tuple[UpdateReservationRequest.ListChange.ValueType, str]:
    """Return how a list is to be changed, and the names: "+=a,b" adds, "-=a,b" removes, "a,b" replaces."""
    from ganger.v1.node_pb2 import UpdateReservationRequest as Request

    if text.startswith("+="):
        return Request.LIST_CHANGE_ADD, text[2:]
    return (Request.LIST_CHANGE_REMOVE, text[2:]) if text.startswith("-=") else (Request.LIST_CHANGE_UNSPECIFIED, text)


def _start(text: str) -> float:
    """Return a time in Unix seconds. Raises UsageError."""
    from ganger.spec_values import parse_deadline

    if text == "now":
        return time.time()
    try:
        return parse_deadline(text)
    except ValueError as error:
        raise click.UsageError(f"--start: {error}") from error


def _duration(flag: str, text: str) -> float:
    try:
        return parse_duration(text)
    except ValueError as error:
        raise click.UsageError(f"{flag}: {error}") from error
