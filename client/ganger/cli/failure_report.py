"""Where a failed job ran, and the last lines of its log."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ganger.client import Client
    from ganger.v1.job_pb2 import Job

_LINES = 10
_LINE_CHARACTERS = 500
_TAIL_BYTES = 8 * 1024


def pairs(client: Client, job: Job) -> list[tuple[str, str]]:
    """Return names and texts for `show`: "ran on" and "log of rank K"; none for a job that has not failed."""
    from ganger.v1.job_pb2 import Job as Message
    from ganger.wire.errors import ApiError

    if job.state != Message.STATE_FAILED:
        return []
    try:
        nodes = _places(client, job)
    except ApiError as error:
        nodes = f"unknown: {error.message}"
    if not nodes and not job.HasField("start_time"):
        return [("ran on", "no node: it was never given a place")]
    return [("ran on", nodes), (f"log of rank {job.failure.rank}", _last_lines(client, job))]


def lines(client: Client, job: Job) -> list[str]:
    """Return the same as lines of text, for `why` and `history`."""
    found: list[str] = []
    for name, text in pairs(client, job):
        first, *more = text.split("\n")
        found += [f"{name}: {first}"] if not more else [f"{name} ends:", *[f"  {line}" for line in (first, *more)]]
    return found


def _places(client: Client, job: Job) -> str:
    """Return the nodes of the attempt that failed, "n1, n2"; "" for a job that was never given a gang."""
    nodes = ""
    for event in client.list_events(job.name):
        if event.kind == "gang_approved":
            nodes = event.figures.get("nodes", "")
            if event.figures.get("epoch") == str(job.failure.epoch):
                break
    return ", ".join(nodes.split())


def _last_lines(client: Client, job: Job) -> str:
    """Return the last lines that the failed rank wrote, or why there are none."""
    from ganger.wire.errors import ApiError

    try:
        data = b"".join([chunk.data for chunk in client.read_log(job.name, job.failure.rank, -_TAIL_BYTES)])
    except ApiError as error:
        return f"cannot be read: {error.message}"
    written = data.decode(errors="replace").rstrip("\n").split("\n")
    if len(data) >= _TAIL_BYTES and len(written) > 1:
        # The first line is cut.
        written = written[1:]
    return "\n".join([line[:_LINE_CHARACTERS] for line in written[-_LINES:]]) or "nothing was written"
