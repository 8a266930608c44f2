"""Ends of launchers and leases with real processes: ranks survive their launcher, and freeze without a lease."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any, NoReturn

import psutil
import pytest
from ganger.injob.bootstrap import prepare_inject_directory
from ganger.injob.launcher.client import Launcher, LauncherError, start_launcher
from ganger.injob.launcher.starter import begin, make_starter
from ganger.injob.page import now_ns
from ganger.injob.page_layout import Opaque, Word
from ganger.injob.process_identity import ProcessId, start_ticks
from injob.launcher_kit import Place, exit_record, log_text, page_of, user_environment
from kit.waiting import eventually

# Of a rank: how it ends once it may.
EXITS, IS_KILLED = "import sys; open('go').read(); sys.exit(5)", "import os; open('go').read(); os.kill(os.getpid(), 9)"


def waiting(place: Place, body: str, **more: Any) -> tuple[dict[str, Any], ProcessId]:
    launch = place.script(place.launch([sys.executable, "train.py"], **more), body)
    os.mkfifo(os.path.join(launch["cwd"], "go"))
    return launch, place.fork(launch)


def let_end(launch: dict[str, Any]) -> None:
    with open(os.path.join(launch["cwd"], "go"), "w"):
        pass


@pytest.mark.parametrize("with_reaper", [False, True])
def test_ranks_survive_their_launcher_and_the_next_one_knows_their_end(mortal: Place, with_reaper: bool) -> None:
    launches = [waiting(mortal, body, arena={"bytes": 4096}) for body in (EXITS, IS_KILLED)]
    mortal.kill(with_reaper=with_reaper)
    assert all(start_ticks(forked.pid) == forked.start_ticks for _, forked in launches)
    mortal.start()
    with Launcher(mortal.socket) as launcher:
        for launch, forked in launches:
            assert launcher.adopt(
                launch["name"], *forked, page=launch["page"], exit_path=launch["exit_path"], arena_name=launch["name"]
            )
            os.close(launcher.arena(launch["name"]))
        assert {child["adopted"] for child in launcher.list()} == {True}
        with pytest.raises(LauncherError, match="still the parent"):
            launcher.stop()
    for launch, _ in launches:
        let_end(launch)
    known, killed = (exit_record(launch) for launch, _ in launches)
    # the first process of the machine may reap a rank before its launcher looks
    assert (known["code"], known["source"]) in ([(5, "wait")] if not with_reaper else [(5, "wait"), (5, "page")])
    found = (killed["code"], killed.get("signal"), killed["source"])
    assert found in ([(137, 9, "wait")] if not with_reaper else [(137, 9, "wait"), (None, None, "unknown")])


@pytest.mark.parametrize(("body", "ending"), [(EXITS, (5, None)), (IS_KILLED, (137, 9))])
def test_the_end_of_a_rank_is_recorded_where_no_launcher_is_left(
    mortal: Place, body: str, ending: tuple[int, int | None]
) -> None:
    launch, forked = waiting(mortal, body)
    mortal.kill()
    let_end(launch)
    record = exit_record(launch)
    assert (record["code"], record.get("signal")) == ending
    assert (record["pid"], record["start_ticks"]) == forked
    # the next launcher leaves the record as it is
    mortal.start()
    with Launcher(mortal.socket) as launcher:
        assert not launcher.adopt(launch["name"], *forked, page=launch["page"], exit_path=launch["exit_path"])
    assert exit_record(launch) == record


def test_rank_that_ended_without_a_launcher_and_its_reaper_is_recorded_on_adoption(mortal: Place) -> None:
    launch, forked = waiting(mortal, "import sys; open('go').read(); print('x'); sys.exit(6)")
    mortal.kill(with_reaper=True)
    let_end(launch)
    eventually(lambda: start_ticks(forked.pid) != forked.start_ticks, what="the rank's end")
    assert not os.path.exists(launch["exit_path"])
    mortal.start()
    with Launcher(mortal.socket) as launcher:
        assert not launcher.adopt(launch["name"], *forked, page=launch["page"], exit_path=launch["exit_path"])
    assert exit_record(launch)["code"] == 6


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]


def _child_of(launch: dict[str, Any]) -> int:
    """Pid of what a shell has started; it writes it into a file."""
    path = Path(launch["cwd"], "pid")
    eventually(lambda: path.exists() and path.read_text().strip(), what="a child of the shell")
    return int(path.read_text())


_SHELL = ["sh", "-c", "setsid sleep 600 & echo $! > pid; wait"]


@pytest.mark.parametrize("is_adopted", [False, True], ids=["forked", "adopted"])
def test_a_job_that_does_not_stop_by_itself_is_frozen_with_all_its_processes_when_its_lease_ends(
    mortal: Place, is_adopted: bool
) -> None:
    launch = mortal.launch(_SHELL)
    page = page_of(launch)
    page.extend_lease(now_ns() + 3600 * 10**9)
    forked = mortal.fork(launch)
    child = _child_of(launch)
    try:
        if is_adopted:
            mortal.kill()
            mortal.start()
            with Launcher(mortal.socket) as launcher:
                assert launcher.adopt(launch["name"], *forked, page=launch["page"], exit_path=launch["exit_path"])
        page.extend_lease(now_ns() + 10**8)
        eventually(lambda: _state(forked.pid) == _state(child) == "T", what="both standing still")
        # The daemon extends the lease before it thaws: it is not frozen again under the one that ended.
        page.extend_lease(now_ns() + 3600 * 10**9)
        for pid in (forked.pid, child):
            os.kill(pid, signal.SIGCONT)
        _looks_again(mortal)
        # For a moment after SIGCONT a process runs before it waits again.
        eventually(lambda: _state(forked.pid) == _state(child) == "S", what="both waiting, not frozen again")
    finally:
        os.kill(child, signal.SIGKILL)


def _looks_again(place: Place) -> None:
    """Wait until a launcher has been at its leases: it does so before each wait for callers."""
    with Launcher(place.socket) as launcher:
        launcher.info()
        launcher.info()


def test_a_job_goes_on_for_as_long_as_its_lease_is_extended(plain: Place) -> None:
    launch = plain.launch(["sh", "-c", "while :; do read line < go; echo $line; done"])
    os.mkfifo(os.path.join(launch["cwd"], "go"))
    page = page_of(launch)
    page.extend_lease(now_ns() + 2 * 10**9)
    forked = plain.fork(launch)
    began = now_ns()
    beats = 0
    while now_ns() < began + 4 * 10**9:
        page.extend_lease(now_ns() + 2 * 10**9)
        with open(os.path.join(launch["cwd"], "go"), "w") as go:
            go.write(f"beat {beats}\n")
        eventually(lambda beat=beats: f"beat {beat}" in log_text(launch), what="a line of a job that runs")
        beats += 1
    eventually(lambda: _state(forked.pid) == "T", what="standing still at last")
    os.kill(forked.pid, signal.SIGKILL)


def test_a_job_that_stops_at_boundaries_is_not_frozen_when_its_lease_ends(plain: Place) -> None:
    attached, silent = plain.launch(["sleep", "600"]), plain.launch(["sleep", "600"])
    pids = []
    for launch in (attached, silent):
        page = page_of(launch)
        if launch is attached:
            page.set(Word.HELLO_TIME, now_ns())
        page.extend_lease(now_ns() + 10**8)
        pids.append(plain.fork(launch).pid)
    eventually(lambda: _state(pids[1]) == "T", what="the silent one standing still")
    assert _state(pids[0]) == "S"
    page_of(attached).set(Word.OPAQUE, Opaque.AGENT_FAILED)
    eventually(lambda: _state(pids[0]) == "T", what="standing still once it has no boundaries any more")
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def test_a_job_that_removes_and_cuts_off_its_page_is_frozen_under_the_lease_that_it_had(plain: Place) -> None:
    launch = plain.launch(["sh", "-c", "echo > cut; read line < go"])
    os.mkfifo(os.path.join(launch["cwd"], "go"))
    page_of(launch).extend_lease(now_ns() + 2 * 10**9)
    forked = plain.fork(launch)
    _looks_again(plain)
    os.truncate(launch["page"], 8)
    os.unlink(launch["page"])
    eventually(lambda: _state(forked.pid) == "T", what="standing still")
    os.kill(forked.pid, signal.SIGKILL)


def test_what_is_executed_comes_from_the_small_starter_and_without_it_from_the_launcher(mortal: Place) -> None:
    """As children of the launcher either way."""
    with Launcher(mortal.socket) as launcher:
        owner = launcher.info()["pid"]
    (starter,) = psutil.Process(owner).children()
    for code in (3, 4):
        launch = mortal.launch(["/bin/sh", "-c", f"echo $PPID; exit {code}"])
        mortal.fork(launch)
        assert (exit_record(launch)["code"], exit_record(launch)["source"]) == (code, "wait")
        assert log_text(launch) == f"{owner}\n"
        if code == 3:
            starter.kill()
    assert not starter.is_running()


def test_a_starter_without_word_from_its_launcher_starts_no_process(tmp_path: Path) -> None:
    def run(content: Any, write_end: int, arena: int | None) -> NoReturn:
        Path(content["path"]).touch()
        os._exit(0)

    starter = make_starter(run)
    assert starter is not None, "no machine these tests run on is without"
    ends = []
    for path, is_told in ((tmp_path / "told", True), (tmp_path / "untold", False)):
        read_end, write_end = os.pipe()
        pid, word = starter.start({"path": str(path)}, write_end, None)
        if is_told:
            begin(word)
        else:
            os.close(word)
        ends.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        os.close(read_end)
        os.close(write_end)
    starter.end()
    assert ends == [0, 127]
    assert [path.name for path in tmp_path.iterdir()] == ["told"]


def test_second_launcher_on_a_socket_leaves_it_to_the_first(mortal: Place) -> None:
    with Launcher(mortal.socket) as launcher:
        before = launcher.info()["pid"]
    mortal.start()
    with Launcher(mortal.socket) as launcher:
        assert launcher.info()["pid"] == before


def test_idle_launcher_ends_by_itself() -> None:
    directory = Path(tempfile.mkdtemp(prefix="ganger-launcher-"))
    path = str(directory / "l.sock")
    try:
        start_launcher(
            sys.executable,
            path,
            inject=prepare_inject_directory(str(directory / "inject")),
            env=user_environment(),
            log=str(directory / "log"),
            idle_s=0.2,
            preload=False,
        )
        eventually(lambda: not os.path.exists(path), what="the launcher's end")
    finally:
        shutil.rmtree(directory)


def test_launcher_whose_socket_is_gone_ends_when_its_last_rank_has(mortal: Place) -> None:
    launch = mortal.launch(["/bin/sh", "-c", "read line < go; exit 0"])
    os.mkfifo(os.path.join(launch["cwd"], "go"))
    mortal.fork(launch)
    with Launcher(mortal.socket) as launcher:
        info = launcher.info()
    os.unlink(mortal.socket)
    with open(os.path.join(launch["cwd"], "go"), "w") as go:
        go.write("\n")
    assert exit_record(launch)["code"] == 0
    eventually(lambda: start_ticks(info["pid"]) != info["start_ticks"], what="the launcher's end")
    mortal.start()


def test_interpreter_that_cannot_run_a_launcher_is_named(tmp_path: Path) -> None:
    with pytest.raises(LauncherError, match="/bin/false runs no launcher"):
        start_launcher(
            "/bin/false",
            str(tmp_path / "l.sock"),
            inject=prepare_inject_directory(str(tmp_path / "inject")),
            env=user_environment(),
            log=str(tmp_path / "log"),
        )
