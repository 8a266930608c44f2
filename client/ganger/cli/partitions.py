"""`ganger partitions`: partitions of the cluster, with what is free there and the limits of their jobs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from ganger.cli.options import json_option, open_client
from ganger.console import CommandError, ExitCode, print_json, print_table
from ganger.text import counted, format_duration, visible
from ganger.wire import times

if TYPE_CHECKING:
    from ganger.v1.node_pb2 import Partition

_HEADINGS = (
    *("PARTITION", "TIME", "NODES", "GPUS", "FREE", "HELD", "JOBS", "PENDING", "PRIORITY", "MOST GPUS", "FOR"),
    "NODELIST",
)
_SPARE = ("PRIORITY", "HELD", "PENDING", "JOBS", "FOR")
# Most users and teams that the table names.
_NAMES_SHOWN = 3


@click.command()
@click.argument("names", nargs=-1, metavar="[NAME]...")
@json_option
def partitions(names: tuple[str, ...], as_json: bool) -> None:
    """List partitions, with what is free there and the limits of their jobs.

    The default is marked with *. NODES: those that take jobs, of all. HELD: GPUs of the partition's own jobs.
    """
    with open_client() as client:
        found = client.list_partitions()
    for name in names:
        check_partition(name, found)
    chosen = [one for one in found if not names or one.name in names]
    if as_json:
        print_json(chosen)
        return
    print_table(
        _HEADINGS,
        [_row(one) for one in chosen],
        "no partitions: jobs may be on all nodes",
        _SPARE,
    )
    for one in chosen:
        if one.absent_node_count:
            absent = counted(one.absent_node_count, "node")
            have = "has" if one.absent_node_count == 1 else "have"
            print(
                f"ganger: partition {one.name} names {absent} that {have} not joined: {visible(one.absent_nodes)}",
                file=sys.stderr,
            )


def check_partition(name: str, found: Sequence[Partition]) -> None:
    """Raise CommandError unless a partition of this name is among those of the cluster."""
    known = [one.name for one in found]
    if name not in known:
        there = f"there are {', '.join(known)}" if known else "the cluster has none"
        raise CommandError(f"there is no partition {name!r}: {there}", ExitCode.NOT_FOUND)


def _row(one: Partition) -> tuple[str, ...]:
    return (
        visible(one.name) + "*" * one.is_default,
        format_duration(times.seconds(one.time_limit)) if one.HasField("time_limit") else "any",
        f"{one.available_node_count}/{one.node_count}",
        str(one.devices),
        str(one.devices_free),
        str(one.devices_held),
        str(one.jobs_holding),
        str(one.jobs_pending),
        f"{one.priority}{'' if one.preemptible else ', not preempted'}",
        _limits(one),
        _users(one),
        visible(one.nodes) or "none",
    )


def _limits(one: Partition) -> str:
    """Return "64, 8 a user, 4 a job"; "any" without limits."""
    limits = [
        str(one.gpus_limit) if one.HasField("gpus_limit") else "",
        f"{one.gpus_per_user_limit} a user" if one.HasField("gpus_per_user_limit") else "",
        f"{one.gpus_per_job_limit} a job" if one.HasField("gpus_per_job_limit") else "",
    ]
    return ", ".join(filter(None, limits)) or "any"


def _users(one: Partition) -> str:
    names = [*map(visible, one.users), *[f"team {visible(team)}" for team in one.teams]]
    more = ", ..." if len(names) > _NAMES_SHOWN else ""
    return ", ".join(names[:_NAMES_SHOWN]) + more if names else "all"
