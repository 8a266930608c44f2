"""Units: a rank is restored from a process image with the pids and the paths that it was saved with."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from ganger.injob.launcher.client import Launcher, LauncherError
from ganger.injob.launcher.namespaces import LINKS, Unit, make_links
from ganger.injob.process_identity import ProcessId, start_ticks
from injob.launcher_kit import Place, exit_record, launcher_place, page_of
from kit.waiting import eventually

CRIU = shutil.which("criu", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="units need root")
needs_criu = pytest.mark.skipif(CRIU is None, reason="CRIU is not installed (make criu)")

COUNTING = """
import mmap, os, sys, time
page = mmap.mmap(os.open(os.environ["GANGER_PAGE"], os.O_RDWR), 4096)
count = 0
while not os.path.exists(sys.argv[1] + str(count)):
    count += 1
    print(count, os.getpid(), int.from_bytes(page[8:16], "little"), flush=True)
    time.sleep(0.05)
"""


@pytest.fixture
def place() -> Iterator[Place]:
    yield from launcher_place(preload=False)


def unit_of(launch: dict[str, Any], directory: str) -> Unit:
    run = str(Path(launch["page"]).parent)
    return Unit(launch["name"], directory, {"run": run})


def inside(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line.split()[-1] for line in status.splitlines() if line.startswith("NSpid:")))


def made(place: Place, unit: Unit) -> ProcessId:
    with Launcher(place.socket) as launcher:
        return launcher.make_unit(unit._asdict())


def dumped(rank: ProcessId, image: Path) -> None:
    image.mkdir()
    command = [CRIU, "dump", "-t", str(rank.pid), "-D", str(image), "--manage-cgroups=ignore", "-o", "dump.log"]
    subprocess.run(command, check=True, capture_output=True)


@needs_criu
def test_a_rank_is_restored_in_a_unit_and_goes_on_where_it_was(place: Place) -> None:
    script = place.directory / "script.py"
    script.write_text(COUNTING)
    launch = place.launch([sys.executable, str(script), str(place.directory / "stop-")])
    directory = f"{LINKS}/{place.directory.name}"
    make_links(directory, {"run": str(Path(launch["page"]).parent)})
    launch["env"]["GANGER_PAGE"] = f"{directory}/run/{Path(launch['page']).name}"
    try:
        rank = place.fork(launch)
        log = Path(launch["log"])
        eventually(lambda: log.exists() and len(log.read_text().splitlines()) > 3)
        dumped(rank, place.directory / "image")
        assert exit_record(launch)["signal"] == 9
    finally:
        # any daemon that starts meanwhile removes names that no process knows
        shutil.rmtree(directory, ignore_errors=True)

    again = place.launch(launch["argv"])
    page_of(again).words[1] = 7
    init = made(place, unit_of(again, directory))
    command = [CRIU, "restore", "-D", str(place.directory / "image"), "--restore-detached", "--restore-sibling"]
    command += ["--manage-cgroups=ignore", "--pidfile", "root.pid", "-o", "restore.log"]
    command += ["--inherit-fd", f"fd[7]:{launch['log'][1:]}", "--inherit-fd", f"fd[8]:{launch['page'][1:]}"]
    files = {7: again["log"], 8: again["page"]}
    with Launcher(place.socket) as launcher:
        pid_file = str(place.directory / "image/root.pid")
        restored = launcher.restore([(again | {"init": init.pid}, 0)], command, files, pid_file).root
    place.started.append(restored)
    assert inside(restored.pid) == rank.pid != restored.pid
    assert start_ticks(restored.pid) == restored.start_ticks
    new = Path(again["log"])
    eventually(lambda: len(new.read_text().splitlines()) > 3)
    lines = [line.split() for line in (*log.read_text().splitlines(), *new.read_text().splitlines())]
    assert [int(count) for count, _, _ in lines] == list(range(1, len(lines) + 1))
    assert {pid for _, pid, _ in lines} == {str(rank.pid)}
    # it reads the page of its new epoch
    assert (lines[0][2], lines[-1][2]) == ("1", "7")
    (place.directory / f"stop-{len(lines) + 20}").touch()
    assert exit_record(again)["code"] == 0
    assert exit_record(again)["source"] == "wait"


def test_a_unit_has_shared_memory_and_names_of_its_own(place: Place) -> None:
    launch = place.launch(["true"])
    init = made(place, unit_of(launch, f"{LINKS}/a-job"))
    root = Path(f"/proc/{init.pid}/root")
    assert list((root / "dev/shm").iterdir()) == []
    assert os.readlink(root / f"{LINKS[1:]}/a-job/run") == str(Path(launch["page"]).parent)
    assert not Path(f"{LINKS}/a-job").exists()


def test_a_unit_that_cannot_be_made_says_why(place: Place) -> None:
    unit = unit_of(place.launch(["true"]), f"{LINKS}/a-job")._replace(binds=[("/nowhere", str(place.directory / "x"))])
    with Launcher(place.socket) as launcher:
        with pytest.raises(LauncherError, match="cannot mount /nowhere at"):
            launcher.make_unit(unit._asdict())
        eventually(lambda: not launcher.list(), what="its init is waited for")


def test_a_restore_takes_as_long_as_it_takes_and_keeps_no_other_call_waiting(place: Place) -> None:
    launch = place.launch(["restored"])
    init = made(place, unit_of(launch, f"{LINKS}/{place.directory.name}"))
    go = place.directory / "go"
    waits = ["/bin/sh", "-c", f"while [ ! -e {go} ]; do sleep 0.02; done; exit 3"]
    with Launcher(place.socket, timeout=1.0) as launcher, ThreadPoolExecutor(1) as thread:
        restored = thread.submit(launcher.restore, [(launch | {"init": init.pid}, 0)], waits, {}, "/nowhere")
        begun = time.monotonic()
        while time.monotonic() - begun < 1.5:
            assert launcher.info()["pid"]
        go.touch()
        with pytest.raises(LauncherError, match="was not restored"):
            restored.result()
