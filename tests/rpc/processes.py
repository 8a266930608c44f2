"""Real masters as processes of their own."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

START_S = 60.0


class MasterProcess:
    """A `ganger master` on DIRECTORY/state and a Unix socket; the same directory can be started again."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.state_dir = directory / "state"
        self.process: subprocess.Popen[str] | None = None

    def start(self, environment: Mapping[str, str] | None = None, *flags: str) -> str:
        """Returns the line it prints when it is ready, or "" if it ended first."""
        command = [
            sys.executable,
            "-m",
            "ganger.cli.main",
            "master",
            "--state-dir",
            str(self.state_dir),
            "--listen",
            f"unix:{self.directory}/s",
            "--no-scheduler-host",
            *flags,
        ]
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={"GANGER_MASTER_POLICY": "fifo-backfill", **os.environ, **(environment or {})},
        )
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], START_S)
        assert ready, "the master said nothing in time"
        return self.process.stdout.readline()

    def end(self, signal_number: int) -> tuple[int, str]:
        """Exit code and what it said on stderr."""
        assert self.process is not None
        self.process.send_signal(signal_number)
        return self.wait()

    def wait(self, seconds: float = 30.0) -> tuple[int, str]:
        assert self.process is not None
        _, said = self.process.communicate(timeout=seconds)
        code = self.process.returncode
        self.process = None
        return code, said

    def is_alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.communicate()


@contextmanager
def master_process(directory: Path) -> Iterator[MasterProcess]:
    process = MasterProcess(directory)
    try:
        yield process
    finally:
        process.close()


def wait_until_dead(process: MasterProcess, seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while process.is_alive():
        assert time.monotonic() < end, "the master lives on"
        time.sleep(0.005)
