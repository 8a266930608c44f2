"""`ganger bench move`: what a move costs a training that carries much state.

A real master and two daemons; a job moves there and back. The pause is seen by the job itself, from the end of its last
step on the source to the end of its first on the destination; where it went is read from the control pages. What it is
measured against is a plain TCP stream of as many bytes over loopback, in the same run.
"""

from __future__ import annotations

import json
import mmap
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ganger.injob.page import Order, Page, PageError, State, Word, now_ns

from ganger_daemon.bench_report import Report, quantile

SIZES = (100 * 10**6, 10**9)
QUICK_SIZES = (20 * 10**6,)
MOVES = 3
SLACK_SECONDS = 0.3
LEAST_STREAM_BYTES_PER_SECOND = 1e9
POLL_SECONDS = 0.0005
START_SECONDS = 90.0
MOVE_SECONDS = 120.0
PIECE = 8 << 20
GANGER = (sys.executable, "-m", "ganger.cli.main")

# Most of the state is buffers that no step touches, so that a step stays a few milliseconds at any size.
JOB = """
import os, struct, sys, time
import torch
import ganger
torch.set_num_threads(1)
class Heavy(torch.nn.Module):
    def __init__(self, size):
        super().__init__()
        self.layer = torch.nn.Linear(64, 64)
        for part in range(16):
            self.register_buffer(f"part{part}", torch.full((size // 64,), float(part)))
    def forward(self, x):
        return self.layer(x)
model = Heavy(int(sys.argv[1]))
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
x = torch.ones(8, 64)
notes = open(sys.argv[2], "ab", buffering=0)
clock, BOOTTIME = time.clock_gettime_ns, time.CLOCK_BOOTTIME
job = ganger.attach(model=model, optimizer=optimizer)
while True:
    begin = clock(BOOTTIME)
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    time.sleep(0.002)
    notes.write(struct.pack("<QQQ", os.getpid(), begin, clock(BOOTTIME)))
    job.step(loss)
"""
NOTE = struct.Struct("<QQQ")


@dataclass(frozen=True, slots=True)
class Move:
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


class MoveError(Exception):
    """The move could not be measured; the text says where it stood."""


def main(sizes: Sequence[int] = SIZES, moves: int = MOVES, quick: bool = False) -> dict[str, object]:
    """Run it, for states of so many bytes and so many moves each; `quick`: one move of a small state."""
    if quick:
        sizes, moves = QUICK_SIZES, 1
    report = Report("move")
    factor = 1.3 if len(os.sched_getaffinity(0)) >= 4 else 1.7
    with _Cluster() as cluster:
        for size in sizes:
            name = f"state_{size // 10**6}MB"
            measured = _measure(cluster, size, moves, report)
            report.samples({"state": name, **_as_sample(move)} for move in measured)
            raw = quantile([move.raw_bytes_per_second for move in measured], 0.5)
            report.figure(f"{name}_raw_stream_bytes_per_second", raw)
            for part in ("pause", "stop", "copy", "start", "first_step"):
                figure = f"{name}_{part}_p50_milliseconds"
                report.figure(figure, 1000 * quantile([getattr(move, part) for move in measured], 0.5))
            pause = quantile([move.pause for move in measured], 0.5)
            report.at_most(f"{name}_pause_p50_seconds", pause, factor * size / raw + SLACK_SECONDS)
            report.figure(f"{name}_pause_over_raw_ratio", pause / (size / raw))
            rate = quantile([move.state_bytes / move.copy for move in measured], 0.5)
            if size >= 10**9:
                report.at_least(f"{name}_stream_bytes_per_second", rate, LEAST_STREAM_BYTES_PER_SECOND)
            else:
                report.figure(f"{name}_stream_bytes_per_second", rate)
    return report.result()


def _measure(cluster: _Cluster, size: int, moves: int, report: Report) -> list[Move]:
    notes = cluster.directory / f"notes-{size}"
    # twice on the host: tensors of a virtual device are host memory, and the arena is as large again
    memory = f"{(2 * size >> 20) + 2048}M"
    submitted = cluster.ganger(
        "submit",
        *("--gpus", "1", "--cpus-per-gpu", "1", "--memory", memory, "--gpu-memory", f"{(size >> 20) + 64}M"),
        *("--checkpoint-every", "never", "--directory", str(cluster.directory), "--json", "--"),
        *(sys.executable, str(cluster.script), str(size), str(notes)),
    )
    job = str(json.loads(submitted)["name"])
    measured: list[Move] = []
    try:
        cluster.until(lambda: len(_notes(notes)) >= 20, START_SECONDS, f"{job} trains")
        for number in range(moves):
            report.say(f"{size / 1e6:g} MB: move {number + 1} of {moves}, and a raw stream over loopback")
            measured.append(_move(cluster, job, notes, _raw_stream(size)))
    finally:
        cluster.ganger("cancel", job)
        cluster.until(lambda: not cluster.pages(), START_SECONDS, f"{job} is gone")
        notes.unlink(missing_ok=True)
    return measured


def _move(cluster: _Cluster, job: str, notes: Path, raw_bytes_per_second: float) -> Move:
    source = next(iter(cluster.pages().values()))
    watch = _PageWatch(cluster, source)
    pid = _notes(notes)[-1][0]
    with watch:
        cluster.ganger("move", job, "--no-wait")
        cluster.until(lambda: _first_of_another(_notes(notes), pid) is not None, MOVE_SECONDS, f"{job} moves")
        cluster.until(lambda: source not in cluster.pages().values(), MOVE_SECONDS, "the source is reaped")
    steps = _notes(notes)
    first = _first_of_another(steps, pid)
    assert first is not None
    last_end = max(end for of, _, end in steps if of == pid)
    seen = watch.times
    if not {"ordered", "stopped", "complete"} <= seen.keys():
        raise MoveError(f"the pages of {job} showed only {sorted(seen)}")
    return Move(
        pause=(first[2] - last_end) / 1e9,
        stop=(seen["stopped"] - seen["ordered"]) / 1e9,
        copy=(seen["complete"] - seen["stopped"]) / 1e9,
        start=(first[1] - seen["complete"]) / 1e9,
        first_step=(first[2] - first[1]) / 1e9,
        state_bytes=watch.state_bytes,
        raw_bytes_per_second=raw_bytes_per_second,
    )


class _PageWatch:
    """Notes when the words of a move appear: the stop on the source's page, the last byte on the destination's."""

    def __init__(self, cluster: _Cluster, source: Path) -> None:
        self.times: dict[str, int] = {}
        self.state_bytes = 0
        self._cluster, self._source = cluster, source
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, name="pages", daemon=True)

    def __enter__(self) -> _PageWatch:
        self._thread.start()
        return self

    def __exit__(self, *reason: object) -> None:
        self._stop.set()
        self._thread.join()

    def _look(self) -> None:
        source = Page.open(str(self._source), writable=False)
        destination: Page | None = None
        while not self._stop.wait(POLL_SECONDS):
            if source.get(Word.ORDER) == Order.STOP:
                self.times.setdefault("ordered", now_ns())
            if source.get(Word.STATE) in (State.PAUSED, State.SAVING, State.HANDED_OVER):
                self.times.setdefault("stopped", now_ns())
            self.state_bytes = max(self.state_bytes, source.get(Word.ARENA_SIZE))
            if destination is None:
                destination = self._open_other()
            elif self.state_bytes and destination.get(Word.ARENA_AVAILABLE) >= self.state_bytes:
                self.times.setdefault("complete", now_ns())
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


class _Cluster:
    """A master and two daemons, as programs; nothing of them is left afterwards."""

    def __init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="ganger-bench-"))
        shared = "/dev/shm"
        self._run = Path(tempfile.mkdtemp(prefix="ganger-bench-", dir=shared if os.access(shared, os.W_OK) else None))
        self.script = self.directory / "heavy.py"
        self.script.write_text(JOB)
        self._master = self.directory / "master"
        self._processes: list[subprocess.Popen[bytes]] = []
        self._environment = {**os.environ, "GANGER_MASTER": str(self._master), "PYTHONUNBUFFERED": "1"}

    def __enter__(self) -> _Cluster:
        # who ends the benchmark ends what it started
        self._before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        try:
            (self.directory / "storage").mkdir()
            self._spawn("master", "--state-dir", str(self._master), "--storage", str(self.directory / "storage"))
            self.until((self._master / "endpoint.json").exists, START_SECONDS, "the master serves")
            for name in ("n1", "n2"):
                self._spawn(
                    "daemon",
                    *("--node", name, "--master", str(self._master)),
                    *("--state-dir", str(self.directory / name), "--run-dir", str(self._run / name)),
                    *("--virtual-gpus", "1", "--virtual-cores", "2", "--virtual-memory", "8G"),
                    *("--cgroup-root", f"ganger-bench-{os.getpid()}-{name}"),
                )
            self.until(self._are_ready, START_SECONDS, "both nodes are ready")
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *reason: object) -> None:
        self.stop()

    def ganger(self, *arguments: str) -> str:
        """What the command prints. Raises MoveError with what it complained of."""
        done = subprocess.run(
            [*GANGER, *arguments], env=self._environment, capture_output=True, text=True, timeout=60, check=False
        )
        if done.returncode:
            raise MoveError(f"ganger {arguments[0]}: {done.stderr.strip() or done.stdout.strip()}")
        return done.stdout

    def pages(self) -> dict[str, Path]:
        """The control pages there are, by "JOB/EPOCH"."""
        return {
            "/".join(path.relative_to(self._run).parts[1:-1]): path for path in sorted(self._run.rglob("rank-0.page"))
        }

    def until(self, holds: Callable[[], bool], seconds: float, what: str) -> None:
        deadline = time.monotonic() + seconds
        while not holds():
            for process in self._processes:
                if process.poll() is not None:
                    raise MoveError(f"a program of the cluster ended:\n{self._logs()}")
            if time.monotonic() > deadline:
                raise MoveError(f"not within {seconds:g} s: {what}\n{self._logs()}")
            time.sleep(0.01)

    def stop(self) -> None:
        signal.signal(signal.SIGTERM, self._before)
        for process in self._processes:
            process.send_signal(signal.SIGTERM)
        for process in self._processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        marks = (os.fsencode(self.directory), os.fsencode(self._run))
        for entry in Path("/proc").iterdir():
            # launchers and ranks outlive their daemons by design
            if entry.name.isdigit() and int(entry.name) != os.getpid() and _names_one_of(entry, marks):
                try:
                    os.kill(int(entry.name), signal.SIGKILL)
                except ProcessLookupError:
                    continue
        shutil.rmtree(self._run, ignore_errors=True)
        shutil.rmtree(self.directory, ignore_errors=True)

    def _spawn(self, *arguments: str) -> None:
        with (self.directory / f"program-{len(self._processes)}.log").open("wb") as log:
            self._processes.append(
                subprocess.Popen(
                    [*GANGER, *arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    env=self._environment,
                )
            )

    def _are_ready(self) -> bool:
        nodes = json.loads(self.ganger("nodes", "--json"))["nodes"]
        return sum(str(node["state"]).removeprefix("STATE_") == "READY" for node in nodes) == 2

    def _logs(self) -> str:
        return "\n".join(
            f"-- {log.name}\n{log.read_text(errors='replace')[-1500:]}" for log in sorted(self.directory.glob("*.log"))
        )


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
        for offset in range(0, size, PIECE):  # written: what is sent is real memory
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


def _notes(path: Path) -> list[tuple[int, int, int]]:
    """(pid, begin, end) of each step so far."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return []
    whole = len(content) // NOTE.size * NOTE.size
    return list(NOTE.iter_unpack(content[:whole]))


def _first_of_another(steps: list[tuple[int, int, int]], pid: int) -> tuple[int, int, int] | None:
    last = max(number for number, step in enumerate(steps) if step[0] == pid)
    return steps[last + 1] if last + 1 < len(steps) else None


def _as_sample(move: Move) -> dict[str, float]:
    return asdict(move)


def _names_one_of(process: Path, marks: tuple[bytes, ...]) -> bool:
    try:
        text = (process / "environ").read_bytes() + (process / "cmdline").read_bytes()
    except OSError:
        return False
    return any(mark in text for mark in marks)
