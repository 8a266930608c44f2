"""`ganger nodes`, `drain`, `cordon`, `uncordon`, `lost`: nodes, and gangs on them that the master did not start."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import click
from click.shell_completion import CompletionItem

from ganger.cli.options import CompletedType, NodeType, confirm, json_option, number, open_client, yes_option
from ganger.cluster.resources import UNLIMITED_MB_PER_S
from ganger.console import CommandError, enum_text, print_json, print_line, print_pairs, print_table
from ganger.text import counted, format_cores, format_duration, format_memory
from ganger.wire import times

if TYPE_CHECKING:
    from ganger.client import Client
    from ganger.v1.job_service_pb2 import Explanation
    from ganger.v1.node_pb2 import ListNodesResponse, Node, NodeState, QuarantinedGang

_QUARANTINE_HEADINGS = ("GANG", "JOB", "USER", "NODES", "STATE", "WHY")


class GangType(CompletedType):
    """A quarantined gang as it is listed, "UID-EPOCH" or an unambiguous beginning of that; completes from the list."""

    name = "gang"

    def names(self, client: Client) -> Iterable[CompletionItem]:
        return [CompletionItem(number(gang.name)) for gang in client.list_quarantined_gangs()]


def _passed_on(context: click.Context, as_json: bool) -> bool:
    """Return whether a command of the group was given; --json before it counts for it."""
    if context.invoked_subcommand is not None:
        context.default_map = {context.invoked_subcommand: {"as_json": as_json}}
    return context.invoked_subcommand is not None


@click.group(invoke_without_command=True, short_help="List, adopt or end gangs that the master did not start.")
@json_option
@click.pass_context
def quarantine(context: click.Context, as_json: bool) -> None:
    """List gangs that run on nodes and that the master did not start; end or adopt them."""
    if not _passed_on(context, as_json):
        _list(as_json)


@quarantine.command("list")
@json_option
def list_gangs(as_json: bool) -> None:
    """List quarantined gangs."""
    _list(as_json)


def _list(as_json: bool) -> None:
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
    print_table(_QUARANTINE_HEADINGS, rows, "no gang is quarantined")


@quarantine.command("end")
@click.argument("gang", type=GangType())
@yes_option
@json_option
def end(gang: str, is_sure: bool, as_json: bool) -> None:
    """Kill a quarantined gang.

    A job that the master has then starts again from its newest checkpoint: cancel it if it is not wanted.
    """
    with open_client() as client:
        found = _found(client, gang)
        confirm(f"kill the processes of {_description(found)}?", is_sure)
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
@yes_option
@json_option
def go_on(is_sure: bool, as_json: bool) -> None:
    """Go on after a restore of the master's database without the nodes that have not reported.

    Jobs on these nodes may be started a second time. Their old gangs are quarantined when the nodes report.
    """
    with open_client() as client:
        awaited = client.get_cluster().restore.awaited_nodes
        names = " ".join(map(number, awaited))
        if awaited:
            confirm(f"go on without {names}? Jobs that run there may run twice.", is_sure)
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


def _print(value: object, line: str, as_json: bool) -> None:
    if as_json:
        print_json(value)
    else:
        print_line(line)


_HEADINGS = ("NODE", "STATE", "TYPE", "GPUS", "FREE", "CORES", "FREE", "MEMORY", "FREE", "SEEN", "REASON")
reason_option = click.option("--reason", "-m", required=True, help="For others, and the history.")


@click.group(invoke_without_command=True)
@json_option
@click.pass_context
def nodes(context: click.Context, as_json: bool) -> None:
    """List nodes; drain, cordon, uncordon them, declare one lost, or remove it; see what is quarantined there."""
    if _passed_on(context, as_json):
        return

    with open_client() as client:
        answer = client.list_nodes()
        restore = "" if as_json else restore_line(client)
    if as_json:
        print_json(answer)
        return
    print_table(_HEADINGS, rows(answer), "no nodes: start a daemon with `ganger daemon`")
    if restore:
        print(restore, file=sys.stderr)


@click.command()
@click.argument("node", type=NodeType())
@reason_option
@json_option
def drain(node: str, reason: str, as_json: bool) -> None:
    """Move all jobs off a node and give it no new ones.

    Reports of each job where it goes, or what it waits for; later `ganger why JOB` does.
    """
    from ganger.v1.job_pb2 import Job
    from ganger.wire.errors import JobNotFound

    with open_client() as client:
        _print_node(client.drain_node(node, reason), as_json)
        if as_json:
            return
        for job in client.list_jobs([Job.STATE_HOLDING, Job.STATE_SUSPENDED]):
            if any(claim.node == node for claim in job.gang.claims):
                # One that has gone meanwhile is off it.
                with contextlib.suppress(JobNotFound):
                    print_line(f"  job {number(job.name)}: {_leaves(client.explain_job(job.name))}")


def _leaves(answer: Explanation) -> str:
    """Return what becomes of a job on a drained node: where it moves, or what it waits for."""
    from ganger.cli.job_table import state_text
    from ganger.v1.job_pb2 import SUSPEND_LEVEL_CHECKPOINT

    job = answer.job
    if job.gang.parked_level == SUSPEND_LEVEL_CHECKPOINT:
        return "is being saved on storage"
    if job.gang.move_claims:
        return f"moves to {' '.join(dict.fromkeys(number(claim.node) for claim in job.gang.move_claims))}"
    if not answer.blockers:
        return f"{state_text(job)}, and goes on elsewhere"
    first, *lacks = answer.blockers
    # `why` has the others.
    return "; ".join([first.message, *(f"{one.reason}: {one.message}" for one in lacks[:1])])


@click.command()
@click.argument("node", type=NodeType())
@reason_option
@json_option
def cordon(node: str, reason: str, as_json: bool) -> None:
    """Give a node no new jobs; those there stay."""
    with open_client() as client:
        _print_node(client.cordon_node(node, reason), as_json)


@click.command()
@click.argument("node", type=NodeType())
@click.option("--test", "is_tested", is_flag=True, help="Only once a test of its GPUs has passed.")
@json_option
def uncordon(node: str, is_tested: bool, as_json: bool) -> None:
    """Undo drain and cordon, and forget that launches failed on it. Without --test, end a test of it."""
    from ganger.v1.node_pb2 import Node

    with open_client() as client:
        found = client.uncordon_node(node, is_tested)
        _print_node(found, as_json)
    if is_tested and found.state == Node.STATE_READY:
        raise CommandError(f"the master is of an older version, and has returned {number(node)} without a test")


@click.command()
@click.argument("node", type=NodeType())
@yes_option
@json_option
def lost(node: str, is_sure: bool, as_json: bool) -> None:
    """Vouch that a node is down: its jobs restart elsewhere at once.

    If it is not down its jobs run twice; the master refuses while the node still answers.
    """
    with open_client() as client:
        if not is_sure:
            client.get_node(node)  # Without such a node there is nothing to confirm.
        confirm(f"is {number(node)} powered off, or sure never to come back as it is?", is_sure)
        _print_node(client.declare_node_lost(node), as_json)


@click.command()
@click.argument("node", type=NodeType())
@json_option
def show(node: str, as_json: bool) -> None:
    """Show all that is known of a node."""
    from ganger.cli.job_table import devices

    with open_client() as client:
        message = client.get_node(node)
    if as_json:
        print_json(message)
        return
    print_pairs(
        [
            ("node", number(message.name)),
            ("state", " ".join(filter(None, (state_text(message), message.state_reason)))),
            ("configuration", message.configuration_set),
            ("free devices", (devices(message.view_entry.free_mask) or "none") if message.configuration_set else ""),
            ("free cores", " + ".join(format_cores(socket) for socket in message.view_entry.free_millicores)),
            ("free memory", format_memory(message.view_entry.free_memory_bytes) if message.configuration_set else ""),
            ("free bandwidth", free_bandwidth(message.view_entry)),
            ("partitions", " ".join(message.view_entry.partitions)),
            ("place", " ".join(filter(None, (message.rack, message.fabric)))),
            ("address", message.peer_address),
            ("faults", "\n".join(fault_texts(message))),
            ("failed starts", launches_text(message)),
            ("quarantined", "\n".join(message.quarantined)),
            ("can", "\n".join(f"{name}: {text}" for name, text in sorted(message.capabilities.items()))),
            ("machine", message.machine_uuid),
        ]
    )


def fault_texts(node: Node) -> list[str]:
    """Return what is out of order on a node and its devices, one text each."""
    found = (*sorted(node.device_faults.items()), *sorted(node.device_warnings.items()))
    return [*(why for _, why in sorted(node.faults.items())), *[f"device {index}: {why}" for index, why in found]]


def free_bandwidth(row: NodeState) -> str:
    """Return what is free of declared bandwidth; empty where none is declared."""
    if not row.HasField("free_disk_mb_per_s"):
        return ""
    free = zip(("disk", "network"), (row.free_disk_mb_per_s, row.free_net_mb_per_s), strict=True)
    return ", ".join([f"{name} {amount} MB/s" for name, amount in free if amount < UNLIMITED_MB_PER_S // 2])


@click.command()
@click.argument("node", type=NodeType())
@json_option
def remove(node: str, as_json: bool) -> None:
    """Forget a node that does not come back.

    Its daemon must be stopped, and no job may have anything on it: drain it first, or declare it lost. If its daemon
    is started again all the same, it joins as a new node.
    """
    with open_client() as client:
        client.remove_node(node)
    _print({"name": node, "removed": True}, f"node {number(node)} is removed", as_json)


for _command in (show, drain, cordon, uncordon, lost, remove, quarantine):
    nodes.add_command(_command)


def rows(answer: ListNodesResponse) -> list[tuple[str, ...]]:
    """A table row for each node."""
    import time

    kinds = {kind.name: kind for kind in answer.configuration_sets}
    result: list[tuple[str, ...]] = []
    for node in sorted(answer.nodes, key=lambda node: node.name):
        kind = kinds.get(node.configuration_set)
        row = node.view_entry
        seen = time.time() - times.unix_s(node.last_seen_time) if node.HasField("last_seen_time") else None
        result.append(
            (
                number(node.name),
                state_text(node),
                kind.device_type if kind else "",
                str(kind.devices if kind else ""),
                str(row.free_mask.bit_count()) if kind else "",
                format_cores(sum(socket.millicores for socket in kind.sockets)) if kind else "",
                format_cores(sum(row.free_millicores)) if kind else "",
                format_memory(kind.memory_bytes) if kind else "",
                format_memory(row.free_memory_bytes) if kind else "",
                "never" if seen is None else f"{format_duration(max(0.0, seen))} ago",
                reason_text(node),
            )
        )
    return result


def reason_text(node: Node) -> str:
    """Why a node is as it is, and what is out of order on it."""
    faults, slow = len(node.device_faults), len(node.device_warnings)
    reasons = (
        node.state_reason,
        f"{counted(faults, 'device')} out of service" if faults else "",
        f"{counted(slow, 'device')} slowed down" if slow else "",
        f"{len(node.quarantined)} unknown gangs quarantined" if node.quarantined else "",
        launches_text(node),
    )
    return "; ".join(filter(None, reasons))


def state_text(node: Node) -> str:
    return enum_text(node.State, node.state)


def launches_text(node: Node) -> str:
    """ "" where the last gang started."""
    if not node.launch_failures:
        return ""
    starts = "the last start" if node.launch_failures == 1 else f"the last {node.launch_failures} starts"
    return f"{starts} failed here, {node.launch_failure}"


def _print_node(node: Node, as_json: bool) -> None:
    reason = f": {node.state_reason}" if node.state_reason else ""
    _print(node, f"node {number(node.name)} is {state_text(node)}{reason}", as_json)
