"""`ganger logs`: what the ranks of a job wrote, as one stream each, across suspends, moves and restarts."""

from __future__ import annotations

import base64
import contextlib
import json
import queue
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING

import click

from ganger.cli.options import Selection, chooses_jobs, each_of, number, open_client
from ganger.console import ExitCode, LogText, plain, print_line
from ganger.text import counted

if TYPE_CHECKING:
    from ganger.client import Client
    from ganger.v1.job_service_pb2 import LogChunk

# Several ranks are printed line by line; a line longer than this is printed in pieces.
_MAX_LINE_BYTES = 64 * 1024
_MAX_QUEUED_CHUNKS = 256
# Read from the end at first, to find the last lines.
_TAIL_BYTES = 16 * 1024
_NEWLINE = 0x0A
# A job that starts within this time needs no message that it waits.
_QUIET_S = 2.0


@click.command()
# --all is for all tasks.
@chooses_jobs(has_all=False)
@click.option("--rank", "-r", type=click.IntRange(0), default=0, show_default=True, help="Which task (of the role).")
@click.option("--role", help="Only tasks of this role, which are numbered from 0.")
@click.option("--all", "-a", "everyone", is_flag=True, help="All tasks, each line with its number.")
@click.option("--follow", "-f", is_flag=True, help="Go on until the job ends.")
@click.option(
    "--offset",
    "-o",
    type=click.IntRange(-(2**63), 2**63 - 1),
    default=0,
    help="Start at this byte; negative: so many before the end.",
)
@click.option("--tail", "-n", type=click.IntRange(0), metavar="N", help="Only the last N lines, and what follows.")
@click.option("--raw", is_flag=True, help="On a terminal, too, print bytes as they are.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a chunk: job, rank, offset, data, lost_bytes.")
def logs(
    selection: Selection,
    rank: int,
    role: str | None,
    everyone: bool,
    follow: bool,
    offset: int,
    tail: int | None,
    raw: bool,
    as_json: bool,
) -> int:
    """Print what jobs wrote.

    On a terminal, codes that would move its cursor or rename its window are written out; colours stay. To a pipe or a
    file, and with --raw, go the bytes as they are.
    """
    if tail is not None and offset:
        raise click.UsageError("--tail does not go with --offset: give one of them")
    with open_client() as client:
        jobs = selection.named(client, ended=True)
        if follow and len(jobs) > 1:
            raise click.UsageError(f"--follow takes one job, not {len(jobs)}: `ganger logs -f {number(jobs[0])}`")

        def begin(job: str, rank: int) -> int:
            return offset if tail is None else tail_offset(client, job, rank, tail)

        def read_and_print(job: str) -> bool:
            """Print the log of one task, or of all; return whether there was any."""
            # Of one task without a role the master knows whether there is such a rank.
            labels = _labels(client, job, role) if everyone or role is not None else {}
            if everyone:
                with _written_out(raw or as_json) as write:
                    return _write_all(client, job, labels, partial(begin, job), follow, as_json, write)
            if labels and rank >= len(labels):
                raise click.UsageError(f"{number(job)} has {counted(len(labels), 'task')} of role {role}, from 0")
            chosen = [*labels][rank] if labels else rank
            chunks = client.read_log(job, chosen, begin(job, chosen), follow=follow)
            if not as_json:
                return print_chunks(chunks, raw)
            for chunk in chunks:
                sys.stdout.buffer.write(_object(job, chosen, chunk))
                sys.stdout.buffer.flush()
            return True

        def print_one(job: str) -> None:
            if len(jobs) > 1 and not as_json:
                print(f"==> job {number(job)} <==", flush=True)
            with _telling_why_it_waits(client, job if follow else ""):
                written = read_and_print(job)
            if not (written or follow or as_json or offset or tail == 0):
                _tell_why_nothing(client, job)

        if len(jobs) == 1:
            print_one(jobs[0])
            return ExitCode.OK
        return each_of(jobs, print_one)[1]


def _labels(client: Client, job: str, role: str | None) -> dict[int, str]:
    """Return the ranks of a job with their labels in its log: those of a role, or all. Raises click.UsageError."""
    from ganger.cli.job_table import rank_labels

    spec = client.get_job(job).spec
    labels = rank_labels(spec, role)
    if not labels:
        names = ", ".join(each.name for each in spec.roles)
        raise click.UsageError(f"job {number(job)} has no role {role!r}; it has {names}")
    return labels


def _tell_why_nothing(client: Client, job: str) -> None:
    """Report on stderr, of a job with an empty log, whether it was ever launched, and if not, why."""
    from ganger.cli.job_table import job_sentence
    from ganger.wire.errors import ApiError

    with contextlib.suppress(ApiError):
        answer = client.explain_job(job)
        kinds = {event.kind for event in client.list_events(answer.job.name)}
        if answer.job.HasField("start_time") or "gang_running" in kinds:
            print_line(f"ganger: {job_sentence(answer.job)} and has written nothing", sys.stderr)
            return
        because = "".join(f" because {one.reason}: {one.message}" for one in answer.blockers[:1])
        if answer.job.HasField("end_time"):
            why = f"the job was never launched; {job_sentence(answer.job)}{because}"
            print_line(f"ganger: there is no log: {why}", sys.stderr)
            return
        hint = f"`ganger logs -f {number(job)}` prints it from its first line on"
        print_line(f"ganger: there is no log yet: {job_sentence(answer.job)}{because}; {hint}", sys.stderr)


def follow_job(client: Client, job: str) -> int:
    """Prints the log of rank 0 until the job ends, then how it ended. Ctrl-C leaves the job running."""
    from ganger.job import Job, JobState, state_of

    try:
        with _telling_why_it_waits(client, job):
            print_chunks(client.read_log(job, follow=True))
        handle = Job(client, client.get_job(job))
        handle.wait(check=False)
    except KeyboardInterrupt:
        print(f"\nganger: job {number(job)} goes on; `ganger logs -f {number(job)}` follows it again", file=sys.stderr)
        return ExitCode.INTERRUPTED
    message = handle.message
    state = state_of(message)
    if state is JobState.SUCCEEDED:
        return ExitCode.OK
    reason = f": {message.failure.reason}, {message.failure.message}" if message.HasField("failure") else ""
    print_line(f"ganger: job {number(job)} {state.lower()}{reason}", sys.stderr)
    return ExitCode.JOB_FAILED


@contextlib.contextmanager
def _telling_why_it_waits(client: Client, job: str) -> Iterator[None]:
    """Says on stderr, after a while, why nothing comes from a job that is followed: it may wait for hours."""

    def tell() -> None:
        from ganger.cli.job_table import job_sentence
        from ganger.v1.job_pb2 import Job
        from ganger.wire.errors import ApiError

        # A failure here does not matter to the reader of the log.
        with contextlib.suppress(ApiError, ValueError):
            answer = client.explain_job(job)
            if answer.job.state in (Job.STATE_PENDING, Job.STATE_SUSPENDED):
                because = "".join(f", {one.reason}: {one.message}" for one in answer.blockers[:1])
                print_line(f"ganger: {job_sentence(answer.job)}{because}", sys.stderr)

    timer = threading.Timer(_QUIET_S, tell)
    timer.daemon = True
    if job:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def print_chunks(chunks: Iterable[LogChunk], raw: bool = False) -> bool:
    """Print a log to stdout; report on stderr what is missing. Return whether there was any."""
    is_any = False
    with _written_out(raw) as write:
        for chunk in chunks:
            is_any = True
            if chunk.lost_bytes:
                sys.stdout.flush()
                verb = "is" if chunk.lost_bytes == 1 else "are"
                print(f"ganger: {counted(chunk.lost_bytes, 'byte')} of the log {verb} missing here", file=sys.stderr)
            write(chunk.data)
            sys.stdout.buffer.flush()
    return is_any


@contextlib.contextmanager
def _written_out(raw: bool) -> Iterator[Callable[[bytes], object]]:
    """Give a function that writes bytes of a log to stdout: as they are, or as a terminal may have them."""
    write = sys.stdout.buffer.write
    if raw or not sys.stdout.isatty():
        yield write
        return

    text = LogText()
    try:
        yield lambda data: write(text.feed(data).encode(errors="backslashreplace"))
    finally:
        write(text.end().encode(errors="backslashreplace"))
        sys.stdout.buffer.flush()


def _object(job: str, rank: int, chunk: LogChunk) -> bytes:
    """Return a chunk as one line of JSON. Data that is not valid UTF-8 is also given in base64."""
    fields = {"job": job, "rank": rank, **plain(chunk), "data_base64": None}
    if fields["data"].encode() != chunk.data:
        fields["data_base64"] = base64.b64encode(chunk.data).decode()
    return json.dumps(fields).encode() + b"\n"


def lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Whole lines, each with its newline, of chunks cut anywhere."""
    rest = b""
    for chunk in chunks:
        *whole, rest = (rest + chunk).split(b"\n")
        for line in whole:
            yield line + b"\n"
        if len(rest) > _MAX_LINE_BYTES:
            whole_bytes = len(rest) - _begun_character(rest)
            yield rest[:whole_bytes] + b"\n"
            rest = rest[whole_bytes:]
    if rest:
        yield rest + b"\n"


def _begun_character(text: bytes) -> int:
    """Return how many bytes at the end begin a UTF-8 character that is cut."""
    for count in range(1, min(len(text), 3) + 1):
        byte = text[-count]
        if byte & 0xC0 == 0x80:
            continue  # Not the first byte of a character
        needs = 4 if byte >= 0xF0 else 3 if byte >= 0xE0 else 2 if byte >= 0xC0 else 1
        return count if needs > count else 0
    return 0


def tail_offset(client: Client, job: str, rank: int, count: int) -> int:
    """The byte at which the last `count` lines begin, found from the end in growing steps; the last may be unended."""
    span = _TAIL_BYTES
    while True:
        chunks = list(client.read_log(job, rank, -span))
        text = b"".join(chunk.data for chunk in chunks)
        first = chunks[0].offset if chunks else 0
        newlines = [index for index, byte in enumerate(text[:-1]) if byte == _NEWLINE]
        if count == 0:
            return first + len(text)
        if len(newlines) >= count:
            return first + newlines[-count] + 1
        if first == 0 or len(text) < span:
            return first
        span *= 8


def _write_all(
    client: Client,
    job: str,
    labels: Mapping[int, str],
    begin: Callable[[int], int],
    follow: bool,
    as_json: bool,
    write: Callable[[bytes], object],
) -> bool:
    width = max(map(len, labels.values()))

    def rank_lines(rank: int) -> Iterator[bytes]:
        chunks = client.read_log(job, rank, begin(rank), follow=follow)
        if as_json:
            return (_object(job, rank, chunk) for chunk in chunks)
        prefix = f"{labels[rank]:>{width}}: ".encode()
        return (prefix + line for line in lines(chunk.data for chunk in chunks))

    if not follow:
        is_any = False
        for rank in labels:
            for line in rank_lines(rank):
                is_any = True
                write(line)
        sys.stdout.buffer.flush()
        return is_any
    # A thread a rank, as each stream blocks; None is a rank's end, an exception ends all.
    printed: queue.Queue[bytes | BaseException | None] = queue.Queue(_MAX_QUEUED_CHUNKS)

    def read(rank: int) -> None:
        try:
            for line in rank_lines(rank):
                printed.put(line)
            printed.put(None)
        except Exception as error:
            printed.put(error)

    for rank in labels:
        threading.Thread(target=read, args=(rank,), daemon=True).start()
    open_ranks = len(labels)
    while open_ranks:
        item = printed.get()
        if isinstance(item, BaseException):
            raise item
        if item is None:
            open_ranks -= 1
        else:
            write(item)
            sys.stdout.buffer.flush()
    return True
