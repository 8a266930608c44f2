"""Ranks below one parent: started, ended and recorded like others, and restored together from one image."""

from __future__ import annotations

import os
import selectors
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ganger.injob.launcher.children import LauncherChild, LauncherChildren
from ganger.injob.launcher.client import ForkedTree, Launcher, LauncherError
from ganger.injob.launcher.namespaces import LINKS
from ganger.injob.launcher.process_record import LaunchError, parse_launch
from ganger.injob.process_identity import family, stat_fields
from injob.launcher_kit import Place, exit_record, launcher_place
from injob.test_units import dumped, inside, made, needs_criu, unit_of
from kit.waiting import eventually

# Counts until a file is there, and ends with the code in it.
COUNTING = """
import os, sys, time
count = 0
while not os.path.exists(sys.argv[1]):
    count += 1
    print(count, os.getpid(), flush=True)
    time.sleep(0.02)
sys.exit(int(open(sys.argv[1]).read()))
"""


@pytest.fixture
def place() -> Iterator[Place]:
    yield from launcher_place(preload=False)


def together(place: Place, launches: list[dict[str, Any]], store_host: str = "") -> ForkedTree:
    with Launcher(place.socket) as launcher:
        tree = launcher.fork_together(launches, store_host)
    place.started += [tree.root, *tree.ranks]
    return tree


def counting(place: Place, ranks: int) -> list[dict[str, Any]]:
    script = place.directory / "script.py"
    script.write_text(COUNTING)
    return [place.launch([sys.executable, str(script), str(place.directory / f"end-{rank}")]) for rank in range(ranks)]


def end(place: Place, rank: int, code: int) -> None:
    (place.directory / "new").write_text(str(code))
    os.replace(place.directory / "new", place.directory / f"end-{rank}")


def counts(launch: dict[str, Any]) -> list[int]:
    log = Path(launch["log"])
    return [int(line.split()[0]) for line in log.read_text().splitlines()] if log.exists() else []


def is_running(pid: int) -> bool:
    fields = stat_fields(pid)
    return bool(fields) and fields[0] not in (b"Z", b"X")


def test_ranks_with_one_parent_end_with_their_own_codes_and_the_parent_after_the_last(place: Place) -> None:
    launches = counting(place, 3)
    tree = together(place, launches)
    assert {int(stat_fields(rank.pid)[1]) for rank in tree.ranks} == {tree.root.pid}
    with Launcher(place.socket) as launcher:
        kinds = [child["kind"] for child in launcher.list()]
    assert sorted(kinds) == ["rank", "rank", "rank", "root"]
    for launch in launches:
        eventually(lambda launch=launch: len(counts(launch)) > 2)  # type: ignore[misc]
    end(place, 1, 7)
    assert exit_record(launches[1])["code"] == 7
    assert is_running(tree.root.pid)
    os.kill(tree.ranks[0].pid, 9)
    assert exit_record(launches[0])["signal"] == 9
    end(place, 2, 0)
    assert (exit_record(launches[2])["code"], exit_record(launches[2])["source"]) == (0, "wait")
    eventually(lambda: not is_running(tree.root.pid), what="the parent has ended")
    with Launcher(place.socket) as launcher:
        eventually(lambda: not launcher.list(), what="nothing is left")


def test_a_rank_that_cannot_be_executed_is_named_and_the_others_can_be_ended(place: Place) -> None:
    launches = [*counting(place, 1), place.launch(["/nowhere/at-all"])]
    with Launcher(place.socket) as launcher:
        with pytest.raises(LauncherError, match="cannot execute '/nowhere/at-all'") as raised:
            launcher.fork_together(launches)
        assert raised.value.reason == "COMMAND"
        assert exit_record(launches[1])["source"] == "launch"
        (left,) = [child for child in launcher.list() if child["kind"] == "rank"]
        os.kill(left["pid"], 9)
        eventually(lambda: not launcher.list(), what="nothing is left")


def test_a_rank_that_is_gone_with_its_parent_ends_no_launcher(place: Place) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    launch = parse_launch(place.launch(["true"]))
    with selectors.DefaultSelector() as selector, subprocess.Popen(["sleep", "60"]) as sleep:
        children = LauncherChildren(selector, lambda name: None)
        root = children.add(LauncherChild("root", "root", sleep.pid))
        with pytest.raises(LaunchError, match="killed as it was started"):
            children.add_ranks(root, [(launch, gone.pid)])
        sleep.kill()
        os.close(root.pidfd)


def test_a_rank_whose_launcher_died_is_adopted_by_the_next_one(place: Place) -> None:
    launches = counting(place, 2)
    tree = together(place, launches)
    place.kill()
    place.start()
    with Launcher(place.socket) as launcher:
        for launch, rank in zip(launches, tree.ranks, strict=True):
            assert launcher.adopt(launch["name"], *rank, page=launch["page"], exit_path=launch["exit_path"])
        end(place, 0, 0)
        assert exit_record(launches[0])["pid"] == tree.ranks[0].pid


@pytest.mark.torch
def test_the_ranks_find_a_rendezvous_store_beside_them(place: Place) -> None:
    body = (
        "import os\nfrom datetime import timedelta\nfrom torch.distributed import TCPStore\n"
        "port = int(os.environ['MASTER_PORT'])\n"
        "store = TCPStore('127.0.0.1', port, is_master=False, timeout=timedelta(seconds=60))\n"
        "print(store.add('ranks', 1), flush=True)\nwhile store.add('ranks', 0) < 2: pass\n"
    )
    launches = counting(place, 2)
    for launch in launches:
        place.script(launch, body)["argv"] = [sys.executable, "train.py"]
    tree = together(place, launches, "127.0.0.1")
    assert tree.port
    for launch in launches:
        assert exit_record(launch)["code"] == 0, Path(launch["log"]).read_text()
    assert sorted(count for launch in launches for count in counts(launch)) == [1, 2]
    eventually(lambda: not is_running(tree.root.pid), what="the store has ended with its ranks")


@pytest.mark.torch
def test_the_store_ends_with_the_parent_of_the_ranks_though_nothing_else_ends_it(place: Place) -> None:
    tree = together(place, counting(place, 2), "127.0.0.1")
    (store,) = family(tree.root.pid) - {tree.root.pid, *(rank.pid for rank in tree.ranks)}
    os.kill(tree.root.pid, signal.SIGKILL)
    eventually(lambda: not is_running(store), what="the store has ended")


@needs_criu
@pytest.mark.skipif(os.geteuid() != 0, reason="units need root")
def test_ranks_with_one_parent_are_restored_from_one_image_and_go_on_where_they_were(place: Place) -> None:
    launches = counting(place, 2)
    tree = together(place, launches)
    for launch in launches:
        eventually(lambda launch=launch: len(counts(launch)) > 3)  # type: ignore[misc]
    pids = [inside(rank.pid) for rank in tree.ranks]
    dumped(tree.root, place.directory / "image")
    for launch in launches:
        assert exit_record(launch)["signal"] == 9

    anew = [place.launch(launch["argv"]) for launch in launches]
    init = made(place, unit_of(anew[0], f"{LINKS}/{place.directory.name}"))
    command = [str(shutil.which("criu", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")), "restore"]
    command += ["-D", str(place.directory / "image"), "--restore-detached", "--restore-sibling"]
    command += ["--manage-cgroups=ignore", "--pidfile", "root.pid", "-o", "restore.log"]
    for number, launch in enumerate(launches, 90):
        command += ["--inherit-fd", f"fd[{number}]:{launch['log'][1:]}"]
    files = {number: launch["log"] for number, launch in enumerate(anew, 90)}
    ranks = [(launch | {"init": init.pid}, pid) for launch, pid in zip(anew, pids, strict=True)]
    with Launcher(place.socket) as launcher:
        restored = launcher.restore(ranks, command, files, str(place.directory / "image/root.pid"))
    place.started += [restored.root, *restored.ranks]
    assert [inside(rank.pid) for rank in restored.ranks] == pids
    for rank, (launch, old) in enumerate(zip(anew, launches, strict=True)):
        eventually(lambda launch=launch: len(counts(launch)) > 3)  # type: ignore[misc]
        end(place, rank, rank + 3)
        assert exit_record(launch)["code"] == rank + 3
        assert counts(old) + counts(launch) == list(range(1, len(counts(old)) + len(counts(launch)) + 1))
    eventually(lambda: not is_running(restored.root.pid), what="the parent has ended")
