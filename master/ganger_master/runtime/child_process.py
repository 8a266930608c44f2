"""Keeps a child of the master running, the default job-scheduler host or the planner: started again when it dies."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

log = logging.getLogger(__name__)

_BACKOFF_SECONDS: Final = (0.1, 0.5, 2.0, 5.0, 15.0)
# Having lived this long, a child's death is not the start of a series.
_HEALTHY_SECONDS: Final = 30.0
_GRACE_SECONDS: Final = 3.0


def host_command(state_dir: Path) -> tuple[str, ...]:
    """The host ends when its standard input does, so it never outlives a master that was killed."""
    return (
        sys.executable,
        "-m",
        "ganger.scheduling.host",
        "--state-dir",
        str(state_dir),
        "--until-stdin-closes",
    )


def planner_command(state_dir: Path) -> tuple[str, ...]:
    """It ends when its standard input does, too. Policy and pace it hears from the master; what it remembers lies
    beside the master's own files."""
    return (
        sys.executable,
        "-m",
        "ganger_master.planner_process",
        "--state-dir",
        str(state_dir),
        "--note",
        str(state_dir / "planner.note"),
        "--until-stdin-closes",
    )


class SupervisedProcess:
    """One child and the task that keeps it."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = tuple(command)
        self._process: asyncio.subprocess.Process | None = None
        self._task: asyncio.Task[None] | None = None
        self.starts = 0

    @property
    def pid(self) -> int | None:
        process = self._process
        return process.pid if process is not None and process.returncode is None else None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._keep())

    async def stop(self) -> None:
        """Ends the child, by force if it does not obey."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        process = self._process
        if process is None or process.returncode is not None:
            return
        process.terminate()
        try:
            await asyncio.wait_for(process.wait(), _GRACE_SECONDS)
        except TimeoutError:
            process.kill()
            await process.wait()

    async def _keep(self) -> None:
        loop = asyncio.get_running_loop()
        failures = 0
        while True:
            began = loop.time()
            self.starts += 1
            try:
                self._process = await asyncio.create_subprocess_exec(
                    *self._command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
                )
                code = await self._process.wait()
            except OSError as error:
                log.error("child cannot be started", extra={"command": self._command[2], "error": str(error)})
                code = -1
            failures = 1 if loop.time() - began >= _HEALTHY_SECONDS else failures + 1
            pause = _BACKOFF_SECONDS[min(failures, len(_BACKOFF_SECONDS)) - 1]
            log.warning("child ended", extra={"command": self._command[2], "code": code, "again_seconds": pause})
            await asyncio.sleep(pause)
