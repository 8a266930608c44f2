"""A program in a unit, dumped and restored by a real launcher: what the tests of process images share."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from ganger.injob.launcher.client import Forked, Launcher
from ganger.injob.launcher.namespaces import TEMPORARY_DIRECTORY, Unit
from ganger_daemon.images.contract import PID_FILE, ImageFacts, ProcessImages, UnitProcesses
from ganger_daemon.images.criu import choose_images
from injob.launcher_kit import Place
from kit.waiting import eventually


class Job:
    """A program in a unit."""

    def __init__(self, place: Place, launch: dict[str, Any], init: int, root: Forked) -> None:
        self.place, self.launch, self.init, self.root = place, launch, init, root
        self.unit = UnitProcesses(init, root.pid, ("/dev/shm", TEMPORARY_DIRECTORY))

    @property
    def log(self) -> Path:
        return Path(self.launch["log"])

    def counts(self) -> list[int]:
        """The numbers that the program has printed, whole lines only."""
        text = self.log.read_text() if self.log.exists() else ""
        return [int(line.split()[0]) for line in text.split("\n")[:-1]]

    def until_it_counts(self, more: int = 3) -> None:
        begun = len(self.counts())
        eventually(lambda: len(self.counts()) >= begun + more, what="more numbers", story=lambda: self.log.read_text())

    def own_file(self, path: str) -> Path:
        return Path(f"/proc/{self.init}/root{path}")


def real() -> ProcessImages:
    found = choose_images()
    if found.unavailable:
        pytest.skip(f"no images by CRIU here: {found.unavailable}")
    return found


def made_unit(place: Place, launch: dict[str, Any], *, is_restored: bool = False) -> int:
    run = Path(launch["page"]).parent
    temporary = run / "tmp"
    temporary.mkdir()
    unit = Unit(launch["name"], str(run), str(run), str(temporary), is_restored)
    with Launcher(place.socket) as launcher:
        return launcher.make_unit(unit._asdict()).pid


def started(place: Place, program: str, *arguments: str) -> Job:
    launch = place.launch([sys.executable, "-c", program, *arguments])
    # Not a rank: the agent has no part in this.
    launch["env"] = {"PATH": os.environ["PATH"], "TMPDIR": TEMPORARY_DIRECTORY}
    init = made_unit(place, launch)
    job = Job(place, launch, init, place.fork(launch | {"init": init}))
    job.until_it_counts()
    return job


def restored(images: ProcessImages, place: Place, image: Path, facts: ImageFacts) -> Job:
    launch = place.launch(["restored"])
    init = made_unit(place, launch, is_restored=True)
    images.fill(init, image)
    (log,) = facts.logs
    command = images.restore_arguments(image, {log.path: 7})
    with Launcher(place.socket) as launcher:
        pid_file = str(image / PID_FILE)
        root = launcher.restore(launch | {"init": init}, command, {7: launch["log"]}, pid_file)
    place.started.append(root)
    return Job(place, launch, init, root)
