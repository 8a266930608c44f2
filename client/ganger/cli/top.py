"""`ganger top`: nodes and jobs, drawn again every second."""

from __future__ import annotations

import contextlib
import math
import os
import select
import shutil
import signal
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from ganger.cli.options import json_option, number, open_client
from ganger.console import Within, aligned, plain, print_json, rich_table
from ganger.text import counted, format_cores, format_duration, format_memory

if TYPE_CHECKING:
    from ganger.client import Client
    from ganger.v1.job_pb2 import Job
    from ganger.v1.node_pb2 import Cluster, ListNodesResponse

_JOB_HEADINGS = ("JOB", "NAME", "STATE", "GPUS", "TIME", "STEP", "STEPS/S", "LOSS", "DATA WAIT", "NODES")
_NODE_HEADINGS = ("NODE", "STATE", "GPUS HELD", "CORES HELD", "MEMORY HELD", "REASON")
_ROW_HEADINGS = ("NODES", "ROW", "SHARE", "QUANTUM", "LEAVES AT", "JOBS")
_CHANGE_HEADINGS = ("TIME", "JOB", "LAST CHANGES")
_MAX_JOBS = 1_000
# Looked through for changes when the watch begins, and of those shown.
_EVENTS_BACK = 2_000
_CHANGES_SHOWN = 6
# What is printed at once, where there is no screen to fill.
_ONCE_LINES = 100


class Picture(NamedTuple):
    """One refresh: a headline, rows of nodes and jobs, the number of each that did not fit on the screen, rows of the
    slice matrices, and the last changes of running jobs."""

    headline: str
    nodes: list[tuple[str, ...]]
    jobs: list[tuple[str, ...]]
    nodes_left_out: int
    jobs_left_out: int
    turns: list[tuple[str, ...]] = []  # noqa: RUF012 - never changed
    changes: list[tuple[str, ...]] = []  # noqa: RUF012 - as above

    def tables(self) -> list[tuple[tuple[str, ...], list[tuple[str, ...]], int]]:
        """Headings, rows, and how many are left out; of what there is nothing of no table."""
        every = [
            (_NODE_HEADINGS, self.nodes, self.nodes_left_out),
            (_ROW_HEADINGS, self.turns, 0),
            (_JOB_HEADINGS, self.jobs, self.jobs_left_out),
            (_CHANGE_HEADINGS, self.changes, 0),
        ]
        return [table for table in every if table[1] or table[0] in (_NODE_HEADINGS, _JOB_HEADINGS)]


class RecentChanges:
    """The last moves, packings, resizings and the like of the cluster, from its events as they come."""

    def __init__(self) -> None:
        self._after = -1
        self._shown: list[tuple[str, ...]] = []

    def read(self, client: Client, newest: int) -> list[tuple[str, ...]]:
        from ganger.cli.job_table import change_rows
        from ganger.wire.errors import EventsCompacted

        if self._after < 0:
            self._after = max(0, newest - _EVENTS_BACK)
        while self._after < newest:
            try:
                events = list(client.list_events("", self._after, _EVENTS_BACK))
            except EventsCompacted:
                # The master has compacted these events.
                events = []
            self._after = events[-1].sequence if events else newest
            self._shown = change_rows(events, self._shown)[-_CHANGES_SHOWN:]
        return self._shown


@click.command()
@click.option(
    "--interval", "-d", type=Within(0.1, 3_600), metavar="SECONDS", default=1.0, help="Time between looks [1]."
)
@click.option("--once", is_flag=True, help="Print once and end; so too where nothing can be drawn.")
@json_option
def top(interval: float, once: bool, as_json: bool) -> None:
    """Watch nodes and jobs, live; q or ctrl-C ends it. With --json it prints this moment once."""
    with open_client() as client:
        if as_json:
            _print_json(client)
            return
        if once or not sys.stdout.isatty() or os.environ.get("TERM") == "dumb":
            now = picture(client, _ONCE_LINES)
            print(now.headline, *(aligned(headings, rows) for headings, rows, _ in now.tables()), sep="\n\n")
            return
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, _leave)
        with contextlib.suppress(KeyboardInterrupt), _keys() as wait_for_key:
            _draw(client, lambda: wait_for_key(interval) == "q")


def _leave(number: int, _: object) -> None:
    """Exit by an exception, so that the handlers that restore the terminal run."""
    raise SystemExit(128 + number)


def _print_json(client: Client) -> None:
    cluster = client.get_cluster()
    print_json(
        {
            "cluster": plain(cluster),
            **plain(client.list_nodes()),
            "jobs": [plain(job) for job in _live_jobs(client, _MAX_JOBS)],
            "changes": [
                {"time": when, "subjects": subjects.split(), "text": text}
                for when, subjects, text in RecentChanges().read(client, cluster.event_sequence)
            ],
        }
    )


def _live_jobs(client: Client, enough: int) -> list[Job]:
    """Return up to about `enough` live jobs: those with a gang, then suspended ones, then pending ones."""
    from ganger.cli import job_table
    from ganger.v1.job_pb2 import Job

    jobs: list[Job] = []
    for states in ((Job.STATE_HOLDING,), (Job.STATE_SUSPENDED,), (Job.STATE_PENDING,)):
        if len(jobs) < enough:
            jobs += sorted(client.list_jobs(states, limit=_MAX_JOBS), key=job_table.order)
    return jobs[:enough]


def _draw(client: Client, is_over: Callable[[], bool]) -> None:
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    from ganger.wire.errors import DeadlineExceeded, NotReady, Unreachable

    def left_out(number: int) -> Text:
        return Text(f"and {number} more" if number else "", style="dim")

    changes = RecentChanges()
    with Live(screen=True, auto_refresh=False) as live:
        while True:
            width, height = shutil.get_terminal_size()
            try:
                now = picture(client, height, changes)
                parts: list[Any] = [Text(now.headline, style="bold", no_wrap=True, overflow="ellipsis")]
                for headings, rows, more in now.tables():
                    parts += [rich_table(headings, rows, width), left_out(more)]
                live.update(Group(*parts), refresh=True)
            except (Unreachable, NotReady, DeadlineExceeded) as error:
                # Jobs continue without a master, and so does the watch.
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


def picture(client: Client, lines: int, changes: RecentChanges | None = None) -> Picture:
    """This moment in so many lines: nodes, and rows of turns, take a quarter at most each; jobs with a gang come first,
    then the jobs that have waited longest."""
    cluster = client.get_cluster()
    answer = client.list_nodes()
    nodes = _node_rows(answer)
    turns = _turn_rows(answer)[: max(1, lines // 4)]
    changed = (changes or RecentChanges()).read(client, cluster.event_sequence)
    nodes_shown = nodes[: max(1, lines // (4 if turns else 3))]
    # The headline, and of each table its headings and the line that says what was left out.
    others = sum(len(table) + 2 for table in (turns, changed) if table)
    room = max(1, lines - len(nodes_shown) - 5 - others)
    every = cluster.jobs_holding + cluster.jobs_pending + cluster.jobs_suspended
    headline = (
        f"{cluster.devices_held} of {counted(cluster.devices, 'GPU')} held   {cluster.jobs_holding} holding"
        f"  {cluster.jobs_pending} pending  {cluster.jobs_suspended} suspended   policy {cluster.policy}"
        f"{_mode(cluster)}   {time.strftime('%H:%M:%S')}"
    )
    shown = _live_jobs(client, room)
    left_out = max(0, every - len(shown))
    jobs_shown = [_job_row(job) for job in shown]
    return Picture(headline, nodes_shown, jobs_shown, len(nodes) - len(nodes_shown), left_out, turns, changed)


def _mode(cluster: Cluster) -> str:
    """Under light load gangs are spread apart, under heavy load packed."""
    from ganger.v1.resources_pb2 import LOAD_MODE_PACK, LOAD_MODE_SPREAD

    words = {LOAD_MODE_SPREAD: "   gangs spread apart", LOAD_MODE_PACK: "   gangs packed"}
    return words.get(cluster.load_mode, "")


def _job_row(job: object) -> tuple[str, ...]:
    from ganger.cli import job_table
    from ganger.v1.job_pb2 import Job

    assert isinstance(job, Job)
    progress = job.progress
    return (
        job_table.called(job),
        job_table.label(job),
        job_table.state_text(job),
        job_table.gpus_text(job),
        job_table.elapsed(job),
        str(progress.step or ""),
        f"{progress.steps_per_s:.3g}" if progress.steps_per_s else "",
        f"{progress.loss:.4g}" if progress.step and math.isfinite(progress.loss) else "",
        f"{progress.data_wait_share:.0%}" if progress.step else "",
        job_table.note(job),
    )


def _turn_rows(answer: ListNodesResponse) -> list[tuple[str, ...]]:
    from ganger.cli import job_table
    from ganger.wire import times

    rows: list[tuple[str, ...]] = []
    for node_set in answer.node_sets:
        nodes = " ".join(number(node) for node in node_set.nodes)
        for place, row in enumerate(node_set.slices):
            mark = " (runs)" if place + 1 == node_set.active_slice else " (new)" if node_set.is_changing else ""
            rows.append(
                (
                    nodes if place == 0 else "",
                    f"{place + 1}{mark}",
                    f"1 of {len(node_set.slices)}",
                    format_duration(times.seconds(node_set.quantum)),
                    job_table.level_text(node_set.level),
                    # A job that moves is in it twice.
                    " ".join(number(job) for job in dict.fromkeys(row.jobs)),
                )
            )
    return rows


def _node_rows(answer: ListNodesResponse) -> list[tuple[str, ...]]:
    from ganger.cli.nodes import reason_text, state_text

    kinds = {kind.name: kind for kind in answer.configuration_sets}
    rows: list[tuple[str, ...]] = []
    for node in sorted(answer.nodes, key=lambda node: node.name):
        kind = kinds.get(node.configuration_set)
        if kind is None:
            # It was never accepted: nothing is known but the reason.
            rows.append((number(node.name), state_text(node), "", "", "", reason_text(node)))
            continue
        cores = sum(socket.millicores for socket in kind.sockets)
        held_memory = max(0, kind.memory_bytes - node.view_entry.free_memory_bytes)
        rows.append(
            (
                number(node.name),
                state_text(node),
                f"{kind.devices - node.view_entry.free_mask.bit_count()} of {kind.devices}",
                f"{format_cores(cores - sum(node.view_entry.free_millicores))} of {format_cores(cores)}",
                f"{format_memory(held_memory)} of {format_memory(kind.memory_bytes)}",
                reason_text(node),
            )
        )
    return rows
