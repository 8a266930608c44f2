"""Gangs that run on nodes and that the master did not start: listing them, ending them, adopting them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click
from click.shell_completion import CompletionItem

from ganger.cli.options import completing_client, confirm, json_option, number, open_client

if TYPE_CHECKING:
    from ganger.client import Client
    from ganger.v1.node_pb2 import QuarantinedGang

_HEADINGS = ("GANG", "JOB", "USER", "NODES", "STATE", "WHY")


class GangType(click.ParamType):  # type: ignore[type-arg]  # as of nodes
    """A quarantined gang as it is listed, "UID-EPOCH" or an unambiguous beginning of that; completes from the list."""

    name = "gang"

    def shell_complete(self, context: click.Context, parameter: click.Parameter, text: str) -> list[CompletionItem]:
        try:
            with completing_client(context) as client:
                gangs = [number(gang.name) for gang in client.list_quarantined_gangs()]
                return [CompletionItem(gang) for gang in gangs if gang.startswith(text)]
        # Whatever goes wrong, nothing is completed.
        except Exception:
            return []


@click.group(invoke_without_command=True, short_help="List, adopt or end gangs that the master did not start.")
@json_option
@click.pass_context
def quarantine(context: click.Context, as_json: bool) -> None:
    """List gangs that run on nodes and that the master did not start; end or adopt them."""
    if context.invoked_subcommand is not None:
        context.default_map = {context.invoked_subcommand: {"as_json": as_json}}
        return
    _list(as_json)


@quarantine.command("list")
@json_option
def list_gangs(as_json: bool) -> None:
    """List quarantined gangs."""
    _list(as_json)


def _list(as_json: bool) -> None:
    from ganger.console.json_output import print_json
    from ganger.console.tables import print_table

    with open_client() as client:
        gangs = client.list_quarantined_gangs()
    if as_json:
        print_json(list(gangs))
        return
    rows = [
        (
            number(gang.name),
            number(gang.job) if gang.job_known else f"{number(gang.job)} (unknown)",
            gang.user,
            " ".join(number(part.node) for part in gang.parts),
            " ".join(dict.fromkeys(part.phase.lower() for part in gang.parts)),
            f"{gang.reason}; {gang.adoption_refusal}" if gang.adoption_refusal else f"{gang.reason}; it can be adopted",
        )
        for gang in gangs
    ]
    print_table(_HEADINGS, rows, "no gang is quarantined")


@quarantine.command("end")
@click.argument("gang", type=GangType())
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
@json_option
def end(gang: str, yes: bool, as_json: bool) -> None:
    """Kill a quarantined gang.

    A job that the master has then starts again from its newest checkpoint: cancel it if it is not wanted.
    """
    with open_client() as client:
        found = _found(client, gang)
        confirm(f"kill the processes of {_description(found)}?", yes)
        client.end_quarantined_gang(found.name)
    _print({"name": found.name, "ended": True}, f"{_description(found)} is ended", as_json)


@quarantine.command("adopt", short_help="Take a quarantined gang as that of its job.")
@click.argument("gang", type=GangType())
@json_option
def adopt(gang: str, as_json: bool) -> None:
    """Take a quarantined gang as the gang of its job. Where the master has no such job, it makes one."""
    with open_client() as client:
        found = _found(client, gang)
        job = client.adopt_quarantined_gang(found.name)
    _print({"name": found.name, "job": job}, f"job {number(job)} has the gang of epoch {found.epoch}", as_json)


@quarantine.command("go-on", short_help="Go on without nodes that have not reported.")
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
@json_option
def go_on(yes: bool, as_json: bool) -> None:
    """After a restore of the master's database, go on without the nodes that have not reported.

    What they run may be started a second time, and is quarantined when they report.
    """
    with open_client() as client:
        awaited = client.get_cluster().restore.awaited_nodes
        names = " ".join(map(number, awaited))
        if awaited:
            confirm(f"go on without {names}? Jobs that run there may run twice.", yes)
        missing = client.settle_restore()
    text = f"goes on without {' '.join(map(number, missing))}" if missing else "goes on: all nodes have reported"
    _print({"missing_nodes": list(missing)}, f"the master {text}", as_json)


def restore_line(client: Client) -> str:
    """Return what the master waits for after a restore of its database; empty if it waits for nothing."""
    cluster = client.get_cluster()
    if not cluster.HasField("restore"):
        return ""
    awaited = cluster.restore.awaited_nodes
    waits = f"waits for what {' '.join(map(number, awaited))} run" if awaited else "settles what nodes have reported"
    return f"the master's database was restored ({cluster.restore.reason}): it starts nothing, and {waits}"


def _found(client: Client, text: str) -> QuarantinedGang:
    """Return the gang of this name, or of an unambiguous beginning of it. Raises GangNotFound."""
    from ganger.wire.errors import GangNotFound

    gangs: Sequence[QuarantinedGang] = client.list_quarantined_gangs()
    fitting = [gang for gang in gangs if number(gang.name).startswith(number(text))]
    exact = [gang for gang in fitting if number(gang.name) == number(text)]
    if len(exact or fitting) == 1:
        return (exact or fitting)[0]
    what = f"{len(fitting)} quarantined gangs begin with" if fitting else "no quarantined gang is"
    raise GangNotFound(f"{what} {text[:80]!r}: `ganger nodes quarantine list` shows them")


def _description(gang: QuarantinedGang) -> str:
    return f"epoch {gang.epoch} of job {number(gang.job)} on {' '.join(number(part.node) for part in gang.parts)}"


def _print(fields: dict[str, object], line: str, as_json: bool) -> None:
    from ganger.console.json_output import print_json
    from ganger.console.safe_text import print_line

    if as_json:
        print_json(fields)
    else:
        print_line(line)
