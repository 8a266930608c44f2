"""A directory with a launcher, and what its tests read of the ranks that it starts."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ganger.injob.bootstrap import prepare_inject_directory
from ganger.injob.launcher.client import Launcher, start_launcher
from ganger.injob.launcher.process_record import rank_environment
from ganger.injob.page import Page, page_path
from ganger.injob.page_layout import PageOrderKind
from ganger.injob.process_identity import ProcessId, start_ticks, stat_fields
from kit.waiting import eventually

HAS_TORCH = importlib.util.find_spec("torch") is not None


class Place:
    """A directory with a launcher in it, and the means to start ranks."""

    def __init__(self, directory: Path, preload: bool) -> None:
        self.directory = directory
        self.socket = str(directory / "l.sock")
        self.preload = preload
        self.inject = prepare_inject_directory(str(directory / "inject"))
        self.log = directory / "launcher.log"
        self.count = 0
        self.started: list[ProcessId] = []
        self.start()

    def start(self) -> None:
        start_launcher(
            sys.executable,
            self.socket,
            inject=self.inject,
            env=user_environment(),
            log=str(self.log),
            idle_s=30,
            preload=self.preload,
        )

    def launch(self, argv: list[str], *, base: Mapping[str, str] | None = None, **more: Any) -> dict[str, Any]:
        number = self.count
        self.count += 1
        directory = self.directory / f"job-{number}"
        (directory / "orders").mkdir(parents=True)
        page = Page.create(page_path(str(directory), 0), epoch=1, rank=0, world=1)
        page.write_order(1, PageOrderKind.RUN)
        environment = rank_environment(
            base={**user_environment(), **(base or {})},
            page=page.path,
            job_dir=str(directory),
            socket="",
            threads=more.get("threads", 1),
            inject=self.inject,
        )
        return {
            "name": f"uid-{number}/1/rank-0",
            "argv": argv,
            "env": environment,
            "cwd": str(directory),
            "log": str(directory / "rank.log"),
            "page": page.path,
            "exit_path": str(directory / "rank-0.exit.json"),
            "threads": 1,
            **more,
        }

    def fork(self, launch: dict[str, Any]) -> ProcessId:
        with Launcher(self.socket) as launcher:
            forked = launcher.fork(launch)
        self.started.append(forked)
        return forked

    def script(self, launch: dict[str, Any], body: str, name: str = "train.py") -> dict[str, Any]:
        Path(launch["cwd"], name).write_text(body)
        return launch

    def kill(self, *, with_reaper: bool = False) -> None:
        with Launcher(self.socket) as launcher:
            info = launcher.info()
        if with_reaper:
            os.kill(int(stat_fields(info["pid"])[1]), signal.SIGKILL)
        os.kill(info["pid"], signal.SIGKILL)
        eventually(lambda: start_ticks(info["pid"]) != info["start_ticks"], what="the launcher's death")

    def end(self) -> None:
        for pid, ticks in self.started:
            if start_ticks(pid) == ticks:
                os.kill(pid, signal.SIGKILL)
        with Launcher(self.socket) as launcher:
            for child in launcher.list():
                with suppress(ProcessLookupError):
                    os.kill(child["pid"], signal.SIGKILL)
            eventually(lambda: not launcher.list(), what="the end of all children")
            launcher.stop()


def user_environment() -> dict[str, str]:
    return {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("PYTEST", "GANGER", "OMP_", "OPENBLAS_")) and key != "PYTHONUNBUFFERED"
    }


def launcher_place(preload: bool) -> Iterator[Place]:
    # A short path: socket names have 107 bytes.
    directory = Path(tempfile.mkdtemp(prefix="ganger-launcher-"))
    place = Place(directory, preload)
    try:
        yield place
        place.end()
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def exit_record(launch: dict[str, Any]) -> dict[str, Any]:
    path = Path(launch["exit_path"])
    eventually(path.exists, what="the exit record", story=lambda: log_text(launch))
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def log_text(launch: dict[str, Any]) -> str:
    path = Path(launch["log"])
    return path.read_text() if path.exists() else "no log"


def page_of(launch: dict[str, Any]) -> Page:
    return Page.open(launch["page"])
