"""`ganger bench image`: how long a process is away while an image of it moves, beside its raw bytes on the same link.

A process with random memory counts in a unit. Its image is packed, streamed over loopback by the daemon's own server
while it is packed, unpacked while it arrives, and restored in another unit, all on this machine. The raw stream sends
the packed file again in the same run, complete from the beginning. Nothing is dumped before the pause: that needs a
kernel that tracks dirty pages (`criu check --feature mem_dirty_track`), and training writes most of its memory anew.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ganger.injob import state_image
from ganger.injob.launcher.client import Launcher, start_launcher
from ganger.injob.launcher.namespaces import LINKS, Unit
from ganger_daemon.images.contract import (
    PID_FILE,
    SHARED_MEMORY,
    DumpRequest,
    ImageRefusedError,
    ProcessImages,
    UnitProcesses,
)
from ganger_daemon.images.criu import choose_images
from ganger_daemon.images.packing import pack, unpack
from ganger_daemon.transfer.state_stream import Landing, StreamRequest, fetch
from ganger_daemon.transfer.stream_server import StreamServer

from benchmarks.report import BenchReport, quantile

SIZES, QUICK_SIZES = (100 * 10**6, 10**9), (100 * 10**6,)
ROUNDS, QUICK_ROUNDS = 3, 1
WAIT_S = 120.0
TOKEN = "bench"
# A pause lasts at most so many times the raw stream of the same run, and so much longer.
PAUSE_RATIO, PAUSE_BEYOND_S = 1.5, 0.5
PARTS = ("dump", "stream", "unit", "restore", "first_number")

# Random, so that neither the kernel nor the disk finds two pages alike.
PROGRAM = """
import os, sys, time
memory = bytearray(os.urandom(1 << 20) * (int(sys.argv[1]) >> 20))
for place in range(0, len(memory), 4096):
    memory[place : place + 4] = place.to_bytes(4, "little")
count = 0
while True:
    count += 1
    print(count, flush=True)
    time.sleep(0.001)
"""


def main(quick: bool = False) -> dict[str, object]:
    report = BenchReport("image")
    images = choose_images()
    if images.unavailable:
        report.say(f"there are no images of processes here: {images.unavailable}")
        return report.result()
    for size in QUICK_SIZES if quick else SIZES:
        samples = []
        for number in range(QUICK_ROUNDS if quick else ROUNDS):
            report.say(f"{size // 10**6} MB, round {number + 1}")
            samples.append({"size": size, **_measure(images, size)})
        report.samples(samples)
        median = {name: quantile([one[name] for one in samples], 0.5) for name in samples[0] if name != "size"}
        for name, value in median.items():
            report.figure(f"image_{size // 10**6}MB_{name}", value)
        limit_s = PAUSE_RATIO * median["raw_stream_seconds"] + PAUSE_BEYOND_S
        report.at_most(f"image_{size // 10**6}MB_pause_seconds", median["pause_seconds"], limit_s)
    return report.result()


def _measure(images: ProcessImages, size: int) -> dict[str, float]:
    """Move one process once. Return bytes and seconds."""
    # Not in /dev/shm, which is another one in a unit.
    with tempfile.TemporaryDirectory(prefix="ganger-bench-") as directory, _launcher(Path(directory)) as launcher:
        place = Path(directory)
        source = BenchProcess(launcher, place / "source")
        source.start(["-c", PROGRAM, str(size)])
        image, again = place / "image", place / "again"
        image.mkdir()
        again.mkdir()
        clock = _Clock()
        facts = images.dump(DumpRequest(source.unit(), image, goes_on=False))
        clock.note("dump")
        with PackedStream() as stream:
            total = stream.move(lambda target, filled: pack(image, {}, target, filled=filled), again)
            clock.note("stream")
            target = BenchProcess(launcher, place / "target")
            target.make_unit(source.temporary)
            images.fill(target.init, again)
            clock.note("unit")
            target.restore(images.restore_arguments(again, {log.path: 7 for log in facts.logs}), again / PID_FILE)
            clock.note("restore")
            target.wait_for_number()
            clock.note("first_number")
            raw = time.monotonic()
            stream.send(ArrivedBytes(), lambda landed: None)
            raw = time.monotonic() - raw
        found = {f"{name}_seconds": clock.spent[name] for name in PARTS}
        pause = sum(clock.spent.values())
        return {**found, "bytes": total, "pause_seconds": pause, "raw_stream_seconds": raw, "pause_ratio": pause / raw}


class _Clock:
    def __init__(self) -> None:
        self.spent: dict[str, float] = {}
        self._at = time.monotonic()

    def note(self, name: str) -> None:
        now = time.monotonic()
        self.spent[name], self._at = now - self._at, now


@contextmanager
def _launcher(directory: Path) -> Iterator[Launcher]:
    """Start a launcher; its children are ended with it."""
    path = str(directory / "launcher.sock")
    inject = directory / "inject"
    inject.mkdir()
    environment = {"PATH": os.environ["PATH"]}
    log = str(directory / "launcher.log")
    start_launcher(sys.executable, path, inject=str(inject), env=environment, log=log, idle_s=30, preload=False)
    with Launcher(path) as launcher:
        try:
            yield launcher
        finally:
            for child in launcher.list():
                with suppress(ProcessLookupError):
                    os.kill(child["pid"], signal.SIGKILL)
            deadline = time.monotonic() + WAIT_S
            while launcher.list() and time.monotonic() < deadline:
                time.sleep(0.01)
            launcher.stop()


class BenchProcess:
    """A process, in a unit once it is restored. `temporary`: its own directory."""

    def __init__(self, launcher: Launcher, directory: Path) -> None:
        self._launcher, self._directory = launcher, directory
        self._log = directory / "log"
        self.temporary = directory / "tmp"
        self.temporary.mkdir(parents=True)
        self.init = self._root = 0

    def make_unit(self, known: Path) -> None:
        """Make a unit for a process that knows its own directory by this path."""
        unit = Unit(str(self._directory), f"{LINKS}/bench-{os.getpid()}", {}, [(str(self.temporary), str(known))])
        self.init = self._launcher.make_unit(unit._asdict()).pid

    def start(self, arguments: list[str]) -> None:
        self._root = self._launcher.fork(self._launch([sys.executable, *arguments])).pid
        self.wait_for_number()

    def restore(self, command: list[str], pid_file: Path) -> None:
        files = {7: str(self._log)}
        self._root = self._launcher.restore([(self._launch(["restored"]), 0)], command, files, str(pid_file)).root.pid

    def unit(self) -> UnitProcesses:
        return UnitProcesses(self.init, self._root, (SHARED_MEMORY, str(self.temporary)))

    def wait_for_number(self) -> None:
        """Raises RuntimeError if none comes."""
        deadline = time.monotonic() + WAIT_S
        while not (self._log.exists() and self._log.stat().st_size):
            if time.monotonic() > deadline:
                raise RuntimeError(f"the process does not count within {WAIT_S:g} s")
            time.sleep(0.001)

    def _launch(self, argv: list[str]) -> dict[str, Any]:
        return {
            "name": str(self._directory),
            "argv": argv,
            "env": {"PATH": os.environ["PATH"]},
            "cwd": str(self._directory),
            "log": str(self._log),
            "exit_path": str(self._directory / "exit.json"),
            "init": self.init,
        }


class ArrivedBytes:
    """How many bytes of a packed image have arrived, from the thread that receives it to the one that unpacks it."""

    def __init__(self) -> None:
        self._count = 0
        self._failure = ""
        self._changed = threading.Condition()

    def note(self, count: int) -> None:
        with self._changed:
            self._count = count
            self._changed.notify_all()

    def fail(self, reason: str) -> None:
        """Let all waits raise: no more bytes arrive."""
        with self._changed:
            self._failure = reason
            self._changed.notify_all()

    def wait(self, count: int) -> None:
        """Wait until that many bytes are there. Raises ImageRefusedError if they never will be."""
        with self._changed:
            self._changed.wait_for(lambda: self._failure or self._count >= count)
            if self._count < count:
                raise ImageRefusedError(self._failure)


class PackedStream:
    """One file in memory that is sent over loopback while it is written, by the daemon's server."""

    def __init__(self) -> None:
        self._file = os.memfd_create("packed", os.MFD_CLOEXEC)
        self._size = self._filled = 0
        self._failed: list[BaseException] = []
        self._never = threading.Event()

    def __enter__(self) -> PackedStream:
        self._server = StreamServer(self.find, TOKEN)
        self._server.start()
        return self

    def __exit__(self, *of: object) -> None:
        self._server.close()
        os.close(self._file)

    def move(self, write: Callable[[int, Callable[[int], None]], int], directory: Path) -> int:
        """Write, send and unpack at once, into a directory. Return the bytes."""
        arrived = ArrivedBytes()

        def work() -> None:
            try:
                write(self._file, self._note)
            except BaseException as error:
                self._failed.append(error)
                raise

        def unpacked(landed: int) -> None:
            try:
                unpack(landed, directory, arrived.wait)
            except BaseException as error:
                self._failed.append(error)
                raise

        writer = threading.Thread(target=work)
        writer.start()
        while not self._size and writer.is_alive():
            time.sleep(0.0005)
        try:
            self.send(arrived, unpacked)
        finally:
            writer.join()
        if self._failed:
            raise self._failed[0]
        return self._size

    def send(self, arrived: ArrivedBytes, use: Callable[[int], None]) -> None:
        """Send what is written, or is still being written. `use` has the received file in a thread of its own."""
        target = os.memfd_create("received", os.MFD_CLOEXEC)
        os.ftruncate(target, self._size)
        reader = threading.Thread(target=use, args=(target,))
        reader.start()
        try:
            with Landing(target, self._size) as landing:
                fetch(self._server.address, StreamRequest(TOKEN, "", 0, 0, 0), landing, arrived.note, self._never)
        finally:
            arrived.fail("the stream has ended")
            reader.join()
            os.close(target)

    def _note(self, count: int) -> None:
        if not self._size:
            head = os.pread(self._file, state_image.PREAMBLE_BYTES, 0)
            self._size = state_image.parse_preamble(head).total_bytes
        self._filled = count

    # What the server asks its sources.

    def find(self, request: StreamRequest) -> PackedStream:
        return self

    def progress(self) -> tuple[int, int]:
        return self._size, self._filled

    def valid(self) -> bool:
        return not self._failed

    def open_arena(self) -> int:
        return os.dup(self._file)
