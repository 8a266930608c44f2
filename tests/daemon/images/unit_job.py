"""A program in a unit, dumped and restored by a real launcher: what the tests of process images share."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from ganger.injob.launcher.client import Launcher
from ganger.injob.launcher.namespaces import LINKS, Unit
from ganger.injob.process_identity import ProcessId
from ganger_daemon.images.contract import PID_FILE, SHARED_MEMORY, ImageFacts, ProcessImages, UnitProcesses
from ganger_daemon.images.criu import choose_images
from injob.launcher_kit import Place
from kit.waiting import eventually


class Job:
    """A program, in a unit once it is restored. `temporary`: the path by which it knows its own directory."""

    def __init__(self, place: Place, launch: dict[str, Any], init: int, root: ProcessId, temporary: str) -> None:
        self.place, self.launch, self.init, self.root = place, launch, init, root
        self.unit = UnitProcesses(init, root.pid, (SHARED_MEMORY, temporary))

    @property
    def log(self) -> Path:
        return Path(self.launch["log"])

    def counts(self) -> list[int]:
        """The numbers that the program has printed, whole lines only."""
        text = self.log.read_text() if self.log.exists() else ""
        return [int(line.split()[0]) for line in text.split("\n")[:-1] if line.strip()]

    def until_it_counts(self, more: int = 3) -> None:
        begun = len(self.counts())
        eventually(lambda: len(self.counts()) >= begun + more, what="more numbers", story=lambda: self.log.read_text())

    def goes_on_from(self, job: Job, more: int = 3) -> None:
        """Check that this program counts on from where a former one stood, with no number left out or twice."""
        self.until_it_counts(more)
        counts = job.counts() + self.counts()
        assert counts == list(range(1, len(counts) + 1)), counts

    def own_file(self, path: str) -> Path:
        return Path(f"/proc/{self.init}/root{path}")


def real() -> ProcessImages:
    found = choose_images()
    if found.unavailable:
        pytest.skip(f"no images by CRIU here: {found.unavailable}")
    return found


def started(place: Place, program: str, *arguments: str) -> Job:
    launch = place.launch([sys.executable, "-c", program, *arguments])
    temporary = Path(launch["page"]).parent / "tmp"
    temporary.mkdir()
    # Not a rank: the agent has no part in this.
    launch["env"] = {"PATH": os.environ["PATH"], "TMPDIR": str(temporary)}
    job = Job(place, launch, 0, place.fork(launch), str(temporary))
    job.until_it_counts()
    return job


def restored(images: ProcessImages, place: Place, image: Path, facts: ImageFacts) -> Job:
    launch = place.launch(["restored"])
    temporary = Path(launch["page"]).parent / "tmp"
    temporary.mkdir()
    _, known = facts.own_directories
    unit = Unit(launch["name"], f"{LINKS}/{place.directory.name}", {}, [(str(temporary), known)])
    with Launcher(place.socket) as launcher:
        init = launcher.make_unit(unit._asdict()).pid
    images.fill(init, image)
    (log,) = facts.logs
    command = images.restore_arguments(image, {log.path: 7})
    with Launcher(place.socket) as launcher:
        pid_file = str(image / PID_FILE)
        root = launcher.restore([(launch | {"init": init}, 0)], command, {7: launch["log"]}, pid_file).root
    place.started.append(root)
    return Job(place, launch, init, root, known)
