"""`ganger top`: nodes and jobs, drawn again every second."""

from __future__ import annotations

import contextlib
import math
import os
import select
import shutil
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from ganger.cli.options import number, open_client
from ganger.console.numbers import Within

if TYPE_CHECKING:
    from ganger.client import Client

_JOB_HEADINGS = ("JOB", "NAME", "STATE", "GPUS", "TIME", "STEP", "STEPS/S", "LOSS", "DATA WAIT", "NODES")
_NODE_HEADINGS = ("NODE", "STATE", "GPUS HELD", "CORES HELD", "MEMORY HELD")
_MAX_JOBS = 1_000
# What is printed at once, where there is no screen to fill.
_ONCE_LINES = 100


class Picture(NamedTuple):
    """A moment: one line of figures, rows of nodes and of jobs, and how many of each had no room."""

    headline: str
    nodes: list[tuple[str, ...]]
    jobs: list[tuple[str, ...]]
    nodes_left_out: int
    jobs_left_out: int


@click.command()
@click.option("--interval", "-d", type=Within(0.1, 3_600), default=1.0, show_default=True, help="Seconds.")
@click.option("--once", is_flag=True, help="Print once and end; so too if the output is no terminal.")
def top(interval: float, once: bool) -> None:
    """Watch nodes and jobs, live; q or ctrl-C ends it."""
    with open_client() as client:
        if once or not sys.stdout.isatty():
            from ganger.console.tables import aligned

            now = picture(client, _ONCE_LINES)
            print(now.headline, aligned(_NODE_HEADINGS, now.nodes), aligned(_JOB_HEADINGS, now.jobs), sep="\n\n")
            return
        with contextlib.suppress(KeyboardInterrupt), _keys() as wait_for_key:
            _draw(client, lambda: wait_for_key(interval) == "q")


def _draw(client: Client, is_over: Callable[[], bool]) -> None:
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    from ganger.console.tables import rich_table
    from ganger.wire.errors import DeadlineExceeded, NotReady, Unreachable

    def left_out(number: int) -> Text:
        return Text(f"and {number} more" if number else "", style="dim")

    with Live(screen=True, auto_refresh=False) as live:
        while True:
            width, height = shutil.get_terminal_size()
            try:
                now = picture(client, height)
                parts: list[Any] = [
                    Text(now.headline, style="bold", no_wrap=True, overflow="ellipsis"),
                    rich_table(_NODE_HEADINGS, now.nodes, width),
                    left_out(now.nodes_left_out),
                    rich_table(_JOB_HEADINGS, now.jobs, width),
                    left_out(now.jobs_left_out),
                ]
                live.update(Group(*parts), refresh=True)
            except (Unreachable, NotReady, DeadlineExceeded) as error:
                # Jobs go on without a master, and so does the watch.
                live.update(Text(f"{error.message}; trying again", style="red"), refresh=True)
            if is_over():
                return


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """A function that waits so many seconds for a key, and returns it or "". Keys are not echoed meanwhile."""

    def wait(seconds: float) -> str:
        if not sys.stdin.isatty():
            time.sleep(seconds)
            return ""
        ready, _, _ = select.select([sys.stdin], [], [], seconds)
        return os.read(sys.stdin.fileno(), 1).decode(errors="replace") if ready else ""

    if not sys.stdin.isatty():
        yield wait
        return
    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)
        yield wait
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def picture(client: Client, lines: int) -> Picture:
    """This moment in so many lines: nodes take a third at most; jobs with a gang come first, then who waits longest."""
    from ganger.cli import job_lines
    from ganger.v1.job_pb2 import Job

    cluster = client.get_cluster()
    nodes = _node_rows(client)
    nodes_shown = nodes[: max(1, lines // 3)]
    # The headline, two lines of headings, two that say what was left out.
    room = max(1, lines - len(nodes_shown) - 5)
    jobs: list[Job] = []
    for states in ((Job.STATE_HOLDING,), (Job.STATE_SUSPENDED,), (Job.STATE_PENDING,)):
        if len(jobs) < room:
            jobs += sorted(client.list_jobs(states, limit=_MAX_JOBS), key=job_lines.order)
    every = cluster.jobs_holding + cluster.jobs_pending + cluster.jobs_suspended
    headline = (
        f"{cluster.devices_held} of {cluster.devices} GPUs held   {cluster.jobs_holding} holding"
        f"  {cluster.jobs_pending} pending  {cluster.jobs_suspended} suspended   policy {cluster.policy}"
        f"   {time.strftime('%H:%M:%S')}"
    )
    shown = jobs[:room]
    left_out = max(0, every - len(shown))
    return Picture(headline, nodes_shown, [_job_row(job) for job in shown], len(nodes) - len(nodes_shown), left_out)


def _job_row(job: object) -> tuple[str, ...]:
    from ganger.cli import job_lines
    from ganger.v1.job_pb2 import Job

    assert isinstance(job, Job)
    progress = job.progress
    return (
        job_lines.called(job),
        job_lines.label(job),
        job_lines.state_text(job),
        job_lines.gpus_text(job),
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
