"""`ganger top`: jobs and nodes, drawn again every second."""

from __future__ import annotations

import math
import sys
import time
from typing import TYPE_CHECKING

import click

from ganger.cli.options import number, open_client

if TYPE_CHECKING:
    from ganger.client import Client

_JOB_HEADINGS = ("JOB", "NAME", "STATE", "GPUS", "TIME", "STEP", "STEPS/S", "LOSS", "DATA WAIT", "NODES")
_NODE_HEADINGS = ("NODE", "STATE", "GPUS HELD", "CORES HELD", "MEMORY HELD")
_MAX_JOBS = 100


@click.command()
@click.option("--interval", "-d", type=click.FloatRange(0.1, 3_600), default=1.0, show_default=True, help="Seconds.")
@click.option("--once", is_flag=True, help="Print once and end; so too if the output is no terminal.")
def top(interval: float, once: bool) -> None:
    """Watch jobs and nodes, live; ctrl-C ends it."""
    with open_client() as client:
        if once or not sys.stdout.isatty():
            from ganger.console.tables import aligned

            headline, jobs, nodes = picture(client)
            print(headline, aligned(_JOB_HEADINGS, jobs), aligned(_NODE_HEADINGS, nodes), sep="\n\n")
            return
        _draw(client, interval)


def _draw(client: Client, interval: float) -> None:
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    from ganger.console.tables import rich_table
    from ganger.wire.errors import DeadlineExceeded, NotReady, Unreachable

    with Live(screen=True, auto_refresh=False) as live:
        while True:
            try:
                headline, jobs, nodes = picture(client)
                tables = [rich_table(_JOB_HEADINGS, jobs), Text(""), rich_table(_NODE_HEADINGS, nodes)]
                live.update(Group(Text(headline, style="bold"), Text(""), *tables), refresh=True)  # type: ignore[arg-type]
            except (Unreachable, NotReady, DeadlineExceeded) as error:
                # Jobs go on without a master, and so does the watch.
                live.update(Text(f"{error.message}; trying again", style="red"), refresh=True)
            time.sleep(interval)


def picture(client: Client) -> tuple[str, list[tuple[str, ...]], list[tuple[str, ...]]]:
    """Headline, job rows and node rows of this moment."""
    from ganger.v1.job_pb2 import Job

    cluster = client.get_cluster()
    live = [Job.STATE_PENDING, Job.STATE_HOLDING, Job.STATE_SUSPENDED]
    jobs = sorted(client.list_jobs(live, limit=_MAX_JOBS), key=lambda job: (-job.state, int(number(job.name))))
    headline = (
        f"{cluster.devices_held} of {cluster.devices} GPUs held   {cluster.jobs_holding} holding"
        f"  {cluster.jobs_pending} pending  {cluster.jobs_suspended} suspended   policy {cluster.policy}"
        f"   {time.strftime('%H:%M:%S')}"
    )
    return headline, [_job_row(job) for job in jobs], _node_rows(client)


def _job_row(job: object) -> tuple[str, ...]:
    from ganger.cli import job_lines
    from ganger.v1.job_pb2 import Job

    assert isinstance(job, Job)
    progress = job.progress
    return (
        number(job.name),
        job_lines.label(job)[:24],
        job_lines.state_text(job),
        str(job_lines.gpus(job.spec)),
        job_lines.elapsed(job),
        str(progress.step or ""),
        f"{progress.steps_per_second:.3g}" if progress.steps_per_second else "",
        f"{progress.loss:.4g}" if progress.loss and math.isfinite(progress.loss) else "",
        f"{progress.data_wait_share:.0%}" if progress.step else "",
        job_lines.note(job),
    )


def _node_rows(client: Client) -> list[tuple[str, ...]]:
    from ganger.cli.nodes import state_text
    from ganger.units import format_cores, format_memory

    answer = client.list_nodes()
    kinds = {kind.name: kind for kind in answer.configuration_sets}
    rows: list[tuple[str, ...]] = []
    for node in sorted(answer.nodes, key=lambda node: node.name):
        kind = kinds.get(node.configuration_set)
        if kind is None:
            continue
        cores = sum(socket.millicores for socket in kind.sockets)
        held_memory = kind.memory_bytes - node.row.free_memory_bytes
        rows.append(
            (
                number(node.name),
                state_text(node),
                f"{kind.devices - node.row.free_mask.bit_count()} of {kind.devices}",
                f"{format_cores(cores - sum(node.row.free_millicores))} of {format_cores(cores)}",
                f"{format_memory(held_memory)} of {format_memory(kind.memory_bytes)}",
            )
        )
    return rows
