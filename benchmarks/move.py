"""`ganger bench move`: what a move costs a training that carries much state.

A real master and two daemons; a job moves there and back. The pause is seen by the job itself, from the end of its last
step on the source to the end of its first on the destination; where it went is read from the control pages. What it is
measured against is a plain TCP stream of as many bytes over loopback, in the same run.
"""

from __future__ import annotations

import json
import mmap
import os
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ganger.injob.page import Page, now_ns
from ganger.injob.page_access import PageError
from ganger.injob.page_layout import PageOrderKind, PageState, Word

from benchmarks.bench_cluster import START_S, BenchCluster, BenchClusterError
from benchmarks.report import BenchReport, quantile
from benchmarks.step_notes import HEAVY, NOTING, NotedStep, steps_of
from benchmarks.switch_timing import Watch

SIZES = (100 * 10**6, 10**9)
QUICK_SIZES = (20 * 10**6,)
MOVES = 3
SLACK_S = 0.3
LEAST_STREAM_BYTES_PER_SECOND = 1e9
MOVE_S = 120.0
PIECE = 8 << 20

JOB = f"""
import sys
import ganger
{NOTING}{HEAVY}
torch.set_num_threads(1)
model = Heavy(int(sys.argv[1]))
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
x = torch.ones(8, 64)
note = note_to(sys.argv[2])
job = ganger.attach(model=model, optimizer=optimizer)
for step in job.steps():
    begin = now()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.002)
    note(step + 1, begin)
    job.step(loss)
"""


@dataclass(frozen=True, slots=True)
class MoveSample:
    """One move, in seconds. `stop`: order to every rank at K; `copy`: until the last byte is there; `start`: until the
    first step begins; `first_step`: that step. `pause`: end of the last step to end of the first. The raw stream is of
    the moment before, as a machine that others use is not the same all the time."""

    pause: float
    stop: float
    copy: float
    start: float
    first_step: float
    state_bytes: int
    raw_bytes_per_second: float


def main(sizes: Sequence[int] = SIZES, moves: int = MOVES, quick: bool = False) -> dict[str, object]:
    """Run it, for states of so many bytes and so many moves each; `quick`: one move of a small state."""
    if quick:
        sizes, moves = QUICK_SIZES, 1
    report = BenchReport("move")
    factor = 1.3 if len(os.sched_getaffinity(0)) >= 4 else 1.7
    with BenchCluster(nodes=2, gpus=1, cores=2) as cluster:
        (cluster.directory / "heavy.py").write_text(JOB)
        for size in sizes:
            name = f"state_{size // 10**6}MB"
            measured = measure_moves(cluster, size, moves, report, (str(cluster.directory / "heavy.py"),))
            report.samples({"state": name, **_as_sample(move)} for move in measured)
            raw = quantile([move.raw_bytes_per_second for move in measured], 0.5)
            report.figure(f"{name}_raw_stream_bytes_per_second", raw)
            for part in ("pause", "stop", "copy", "start", "first_step"):
                figure = f"{name}_{part}_p50_milliseconds"
                report.figure(figure, 1000 * quantile([getattr(move, part) for move in measured], 0.5))
            pause = quantile([move.pause for move in measured], 0.5)
            report.at_most(f"{name}_pause_p50_seconds", pause, factor * size / raw + SLACK_S)
            report.figure(f"{name}_pause_over_raw_ratio", pause / (size / raw))
            rate = quantile([move.state_bytes / move.copy for move in measured], 0.5)
            if size >= 10**9:
                report.at_least(f"{name}_stream_bytes_per_second", rate, LEAST_STREAM_BYTES_PER_SECOND)
            else:
                report.figure(f"{name}_stream_bytes_per_second", rate)
    return report.result()


def measure_moves(
    cluster: BenchCluster,
    size: int,
    moves: int,
    report: BenchReport,
    script: Sequence[str],
    arguments: Sequence[str] = (),
) -> list[MoveSample]:
    """Move a job with `size` bytes of state `moves` times. `script`: its program, which takes the size, the path of its
    notes and `arguments`."""
    notes = cluster.directory / f"notes-{size}"
    # Twice on the host: tensors of a virtual device are host memory, and the arena is as large again.
    memory = f"{(2 * size >> 20) + 2048}M"
    submitted = cluster.ganger(
        "submit",
        *("--gpus", "1", "--cpus-per-gpu", "1", "--memory", memory, "--gpu-memory", f"{(size >> 20) + 64}M"),
        *("--checkpoint-every", "never", "--directory", str(cluster.directory), "--json", "--"),
        *(sys.executable, *script, str(size), str(notes), *arguments),
    )
    job = str(json.loads(submitted)["name"])
    measured: list[MoveSample] = []
    try:
        cluster.until(lambda: len(steps_of(notes)) >= 20, START_S, f"{job} trains")
        for number in range(moves):
            report.say(f"{size / 1e6:g} MB: move {number + 1} of {moves}, and a raw stream over loopback")
            measured.append(_move(cluster, job, notes, _raw_stream(size)))
    finally:
        cluster.ganger("cancel", job)
        cluster.until(lambda: not cluster.pages(), START_S, f"{job} is gone")
        notes.unlink(missing_ok=True)
    return measured


def _move(cluster: BenchCluster, job: str, notes: Path, raw_bytes_per_second: float) -> MoveSample:
    source = next(iter(cluster.pages().values()))
    watch = _PageWatch(cluster, source)
    pid = steps_of(notes)[-1].pid
    with watch:
        cluster.ganger("move", job, "--no-wait")
        cluster.until(lambda: _first_of_another(steps_of(notes), pid) is not None, MOVE_S, f"{job} moves")
        cluster.until(lambda: source not in cluster.pages().values(), MOVE_S, "the source is reaped")
    steps = steps_of(notes)
    first = _first_of_another(steps, pid)
    assert first is not None
    last_end = max(step.end for step in steps if step.pid == pid)
    seen = watch.times
    if not {"ordered", "stopped", "complete"} <= seen.keys():
        raise BenchClusterError(f"the pages of {job} showed only {sorted(seen)}")
    return MoveSample(
        pause=(first.end - last_end) / 1e9,
        stop=(seen["stopped"] - seen["ordered"]) / 1e9,
        copy=(seen["complete"] - seen["stopped"]) / 1e9,
        start=(first.begin - seen["complete"]) / 1e9,
        first_step=(first.end - first.begin) / 1e9,
        state_bytes=watch.state_bytes,
        raw_bytes_per_second=raw_bytes_per_second,
    )


class _PageWatch(Watch):
    """Notes when the words of a move appear: the stop on the source's page, the last byte on the destination's."""

    def __init__(self, cluster: BenchCluster, source: Path) -> None:
        super().__init__()
        self.times: dict[str, int] = {}
        self.state_bytes = 0
        self._cluster, self._source = cluster, source

    def look(self) -> None:
        source = Page.open(str(self._source), writable=False)
        destination: Page | None = None
        while self.goes_on():
            # What comes last is read first: this thread may be held up between two reads for longer than a copy takes.
            self.state_bytes = max(self.state_bytes, source.get(Word.ARENA_SIZE))
            complete = bool(destination and 0 < self.state_bytes <= destination.get(Word.ARENA_AVAILABLE))
            stopped = source.get(Word.STATE) in (PageState.PAUSED, PageState.SAVING, PageState.HANDED_OVER)
            ordered = source.get(Word.ORDER) == PageOrderKind.STOP
            for word, seen in (("ordered", ordered), ("stopped", stopped), ("complete", complete)):
                if seen:
                    self.times.setdefault(word, now_ns())
            destination = destination or self._open_other()
        source.close()
        if destination is not None:
            destination.close()

    def _open_other(self) -> Page | None:
        for path in self._cluster.pages().values():
            if path != self._source:
                try:
                    return Page.open(str(path), writable=False)
                except (OSError, PageError):
                    return None
        return None


def _raw_stream(size: int) -> float:
    """Bytes per second of one TCP connection over loopback between two processes: sendfile out of a memory file,
    recv_into memory that was touched before."""
    listener = socket.create_server(("127.0.0.1", 0))
    child = os.fork()
    if child == 0:
        try:
            _receive(listener, size)
        finally:
            os._exit(0)
    memory = os.memfd_create("raw")
    try:
        piece = bytes(PIECE)
        for offset in range(0, size, PIECE):  # Written: what is sent is real memory
            os.pwrite(memory, piece[: min(PIECE, size - offset)], offset)
        with socket.create_connection(listener.getsockname()) as connection:
            connection.recv(1)
            began, offset = time.monotonic(), 0
            while offset < size:
                offset += os.sendfile(connection.fileno(), memory, offset, size - offset)
            connection.recv(1)
            seconds = time.monotonic() - began
    finally:
        os.close(memory)
        listener.close()
        os.waitpid(child, 0)
    return size / seconds


def _receive(listener: socket.socket, size: int) -> None:
    memory = mmap.mmap(-1, size)
    for offset in range(0, size, mmap.PAGESIZE):
        memory[offset] = 1
    connection, _ = listener.accept()
    connection.sendall(b"r")
    view, got = memoryview(memory), 0
    while got < size:
        news = connection.recv_into(view[got : got + PIECE])
        if news == 0:
            return
        got += news
    connection.sendall(b"d")


def _first_of_another(steps: Sequence[NotedStep], pid: int) -> NotedStep | None:
    last = max(number for number, step in enumerate(steps) if step.pid == pid)
    return steps[last + 1] if last + 1 < len(steps) else None


def _as_sample(move: MoveSample) -> dict[str, float]:
    return asdict(move)
