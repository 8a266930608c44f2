"""Units: a rank in namespaces of its own, and one that is restored from a process image into another unit."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ganger.injob.launcher.client import Forked, Launcher, LauncherError
from ganger.injob.launcher.namespaces import RUN_DIRECTORY, UNIT_VARIABLE, Unit, in_unit
from ganger.injob.process_identity import start_ticks
from injob.launcher_kit import Place, exit_record, launcher_place, page_of
from kit.waiting import eventually

CRIU = shutil.which("criu", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="units need root")
needs_criu = pytest.mark.skipif(CRIU is None, reason="CRIU is not installed (make criu)")

COUNTING = """
import os, sys, time
kept = open("/dev/shm/kept", "w+")
count = 0
while not os.path.exists(sys.argv[1] + str(count)):
    count += 1
    print(count, os.getpid(), flush=True)
    time.sleep(0.05)
print("end", flush=True)
"""


@pytest.fixture
def place() -> Iterator[Place]:
    yield from launcher_place(preload=False)


def unit_of(place: Place, launch: dict[str, Any], **more: Any) -> dict[str, Any]:
    run = Path(launch["page"]).parent
    temporary = run / "tmp"
    temporary.mkdir(exist_ok=True)
    unit = Unit(launch["name"], str(run), str(run), str(temporary), **more)
    launch["env"]["GANGER_PAGE"] = in_unit(launch["page"], unit)
    launch["env"]["GANGER_JOB_DIR"] = in_unit(launch["env"]["GANGER_JOB_DIR"], unit)
    launch["env"][UNIT_VARIABLE] = "1"
    return unit._asdict()


def made(place: Place, unit: dict[str, Any]) -> Forked:
    with Launcher(place.socket) as launcher:
        return launcher.make_unit(unit)


def inside(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line.split()[-1] for line in status.splitlines() if line.startswith("NSpid:")))


def test_a_rank_in_a_unit_has_pids_and_shared_memory_of_its_own(place: Place) -> None:
    script = place.directory / "script.py"
    script.write_text(COUNTING)
    launch = place.launch([sys.executable, str(script), str(place.directory / "stop-")])
    init = made(place, unit_of(place, launch))
    rank = place.fork(launch | {"init": init.pid})
    eventually(lambda: Path(launch["log"]).exists() and Path(launch["log"]).read_text())
    assert inside(rank.pid) > 1000
    assert not Path("/dev/shm/kept").exists()
    assert page_of(launch).identity().pid == rank.pid


@needs_criu
def test_a_rank_is_restored_in_another_unit_and_goes_on_where_it_was(place: Place) -> None:
    script = place.directory / "script.py"
    script.write_text(COUNTING)
    launch = place.launch([sys.executable, str(script), str(place.directory / "stop-")])
    init = made(place, unit_of(place, launch))
    rank = place.fork(launch | {"init": init.pid})
    log = Path(launch["log"])
    eventually(lambda: log.exists() and len(log.read_text().splitlines()) > 3)
    image = place.directory / "image"
    image.mkdir()
    pid = inside(rank.pid)
    enter = ["nsenter", "-t", str(init.pid), "-m", "-p", "-i"]
    archive = str(image / "shm.tar")
    dump = [CRIU, "dump", "-t", str(pid), "-D", str(image), "--manage-cgroups=ignore", "-o", "dump.log", "-v4"]
    subprocess.run([*enter, "tar", "-C", "/dev/shm", "-cf", archive, "."], check=True)
    subprocess.run([*enter, *dump], check=True, capture_output=True)
    seen = log.read_text().splitlines()
    assert exit_record(launch)["signal"] == 9

    again = place.launch(launch["argv"])
    init = made(place, unit_of(place, again, is_restored=True))
    subprocess.run(["nsenter", "-t", str(init.pid), "-m", "tar", "-C", "/dev/shm", "-xf", archive], check=True)
    command = [CRIU, "restore", "-D", str(image), "--restore-detached", "--restore-sibling", "--manage-cgroups=ignore"]
    command += [
        "--pidfile",
        str(image / "pid"),
        "-o",
        "restore.log",
        "-v4",
        "--inherit-fd",
        f"fd[7]:{log.as_posix()[1:]}",
    ]
    with Launcher(place.socket) as launcher:
        rank = launcher.restore(again | {"init": init.pid}, command, {7: again["log"]}, str(image / "pid"))
    place.started.append(rank)
    assert inside(rank.pid) == pid
    assert start_ticks(rank.pid) == rank.start_ticks
    new = Path(again["log"])
    eventually(lambda: len(new.read_text().splitlines()) > 3)
    counts = [int(line.split()[0]) for line in (*seen, *new.read_text().splitlines())]
    assert counts == list(range(1, len(counts) + 1))
    (place.directory / f"stop-{counts[-1] + 20}").touch()
    assert exit_record(again)["code"] == 0
    assert exit_record(again)["source"] == "wait"


def test_a_unit_that_cannot_be_made_says_why(place: Place) -> None:
    launch = place.launch(["true"])
    unit = unit_of(place, launch) | {"run": "/nowhere"}
    with (
        Launcher(place.socket) as launcher,
        pytest.raises(LauncherError, match=f"cannot mount /nowhere at {RUN_DIRECTORY}"),
    ):
        launcher.make_unit(unit)
