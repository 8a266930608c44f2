"""A process that uses a GPU without Ganger, freed and continued by the driver's checkpoint calls.

NVIDIA's driver (570 or newer) copies the device memory of a process to its host memory and gives the device back:
lock, checkpoint, restore, unlock. The process itself stays, or is written to files by CRIU in between. Every value of
its state is checked afterwards by the process itself.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from ganger_daemon.devices.inventory import UNREADABLE
from ganger_daemon.devices.nvml import NoDriverError, NvmlDevices
from ganger_daemon.images.criu import errors_of
from ganger_daemon.images.driver import LOCK_S, CudaBindings, DriverCallError

START_S = 90.0
CYCLES = 2

# Counts up, and checks its state at each number that it writes to the file.
PROGRAM = """
import os, sys, time
import torch
size, path = int(sys.argv[1]), sys.argv[2]
device = "cuda" if torch.cuda.is_available() else "cpu"
parts = [torch.full((size // 16,), number, dtype=torch.uint8, device=device) for number in range(16)]
count = torch.zeros(1, dtype=torch.int64, device=device)
while True:
    count += 1
    kept = all(int(part[0]) == int(part[-1]) == number for number, part in enumerate(parts))
    with open(path + ".new", "w") as file:
        file.write(f"{int(count.item())} {int(kept)}")
    os.rename(path + ".new", path)
    time.sleep(0.01)
"""


def measure_calls(size: int, say: Callable[[str], None]) -> dict[str, float]:
    """Return the figures of a process with `size` bytes on the device: bytes by NVML and seconds of each call.

    Raises DriverCallError, or RuntimeError where there is no driver or the process does not go on as it was.
    """
    return _measure(size, lambda driver, program, directory: _cycles(driver, program, say))


def measure_image(size: int, say: Callable[[str], None]) -> dict[str, float]:
    """Return the figures of an image of such a process by the CRIU on the path. Raises as `measure_calls`."""
    return _measure(size, lambda driver, program, directory: _image(driver, program, directory, say))


def criu_program() -> str:
    """Return CRIU, as a daemon finds it: on the path, or beside the interpreter; empty without one."""
    return shutil.which("criu") or shutil.which("criu", path=str(Path(sys.executable).parent)) or ""


def count_in(path: Path) -> tuple[int, bool]:
    """Return the number that the program has written last, and whether it found its state as it was."""
    try:
        number, kept = path.read_text().split()
    except FileNotFoundError:
        return 0, True
    return int(number), kept == "1"


def _measure(size: int, how: Callable[[_Driver, _Program, Path], dict[str, float]]) -> dict[str, float]:
    driver = _Driver()
    with tempfile.TemporaryDirectory(prefix="ganger-bench-") as directory:
        program = _Program(size, Path(directory))
        try:
            return how(driver, program, Path(directory))
        finally:
            program.kill()
            driver.close()


def _cycles(driver: _Driver, program: _Program, say: Callable[[str], None]) -> dict[str, float]:
    figures: dict[str, float] = {"used_before_bytes": driver.used_bytes(program.pid)}
    for number in range(CYCLES):
        say(f"process: checkpoint and restore by the driver, {number + 1} of {CYCLES}")
        for call in ("lock", "checkpoint"):
            figures[f"{call}_seconds"] = driver.call(call, program.pid)
        figures["used_while_checkpointed_bytes"] = driver.used_bytes(program.pid)
        for call in ("restore", "unlock"):
            figures[f"{call}_seconds"] = driver.call(call, program.pid)
        program.until_it_counts()
    figures["used_after_restore_bytes"] = driver.used_bytes(program.pid)
    return figures


def _image(driver: _Driver, program: _Program, directory: Path, say: Callable[[str], None]) -> dict[str, float]:
    """Dump the process to files with its device memory in its host memory, end it, and restore it."""
    say("process: image by CRIU")
    images = directory / "images"
    images.mkdir()
    for call in ("lock", "checkpoint"):
        driver.call(call, program.pid)
    options = ("--images-dir", str(images), "--shell-job", "--file-locks", "--tcp-close")
    criu = criu_program()
    dump = _timed([criu, "dump", "--tree", str(program.pid), "--log-file", "dump.log", *options], images / "dump.log")
    program.reap()
    restore = _timed(
        [criu, "restore", "--restore-detached", "--log-file", "restore.log", *options], images / "restore.log"
    )
    for call in ("restore", "unlock"):
        driver.call(call, program.pid)
    program.until_it_counts()
    size = sum(file.stat().st_size for file in images.iterdir())
    return {"image_bytes": float(size), "image_dump_seconds": dump, "image_restore_seconds": restore}


def _timed(command: list[str], log: Path) -> float:
    began = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        errors = errors_of(log.read_text(errors="replace")) if log.exists() else (done.stderr,)
        raise RuntimeError(f"criu {command[1]}: exit code {done.returncode}: {'; '.join(errors[-6:])}")
    return time.monotonic() - began


class _Program:
    """The process: a leader of its own session, as CRIU wants it."""

    def __init__(self, size: int, directory: Path) -> None:
        self._counts = directory / "count"
        with (directory / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, str(size), str(self._counts)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.pid = self._process.pid
        self._log = directory / "log"
        self.until_it_counts()

    def until_it_counts(self) -> None:
        """Wait for three more numbers. Raises RuntimeError if it does not count or its state is another."""
        begun, deadline = self._count()[0], time.monotonic() + START_S
        while self._count()[0] < begun + 3:
            if time.monotonic() > deadline or not Path(f"/proc/{self.pid}").exists():
                raise RuntimeError(f"the process does not go on: {self._log.read_text(errors='replace')[-1500:]}")
            time.sleep(0.01)
        if not self._count()[1]:
            raise RuntimeError("the process goes on with another state")

    def reap(self) -> None:
        """Take the exit of the process after it was dumped, so that its id is free again."""
        self._process.wait(30)

    def kill(self) -> None:
        try:
            os.kill(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        if self._process.returncode is None:
            self._process.wait(30)

    def _count(self) -> tuple[int, bool]:
        return count_in(self._counts)


class _Driver:
    """The driver's checkpoint calls through cuda-bindings, and its figure of a process's memory."""

    def __init__(self) -> None:
        try:
            bindings = CudaBindings()
            self._devices = NvmlDevices()
        except (ImportError, NoDriverError, DriverCallError) as error:
            raise RuntimeError(f"no driver with checkpoint calls: {error}") from error
        self._calls: dict[str, Callable[[int], None]] = {
            "lock": lambda pid: bindings.lock(pid, LOCK_S),
            "checkpoint": bindings.checkpoint,
            "restore": lambda pid: bindings.restore(pid, {}),
            "unlock": bindings.unlock,
        }

    def call(self, name: str, pid: int) -> float:
        """Make one call; return the seconds that it took. Raises DriverCallError."""
        began = time.monotonic()
        self._calls[name](pid)
        return time.monotonic() - began

    def used_bytes(self, pid: int) -> float:
        """Zero once the driver does not list the process."""
        return float(sum(used for used in self._devices.used_by([pid]) if used != UNREADABLE))

    def close(self) -> None:
        self._devices.close()
