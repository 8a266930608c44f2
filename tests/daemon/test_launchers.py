"""Launchers outlive daemons: which one a rank gets, and which ones go."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from daemon.kit import stop_launcher
from ganger.injob.launcher.client import Launcher, LauncherError
from ganger_daemon.node import launchers as module
from ganger_daemon.node.launchers import Launchers, code_of, interpreter_of
from kit.waiting import eventually

ENVIRONMENT = {"PATH": os.environ["PATH"]}


@pytest.fixture
def place() -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="gl", dir="/tmp"))
    (directory / "run").mkdir()
    yield directory
    for path in (directory / "run").glob("*.sock"):
        stop_launcher(path)
    shutil.rmtree(directory, ignore_errors=True)


def make(place: Path) -> Launchers:
    return Launchers(place / "run", place / "inject", preload=False)


def start(launchers: Launchers) -> Launcher:
    return launchers.get(launchers.key(sys.executable, ENVIRONMENT), sys.executable, ENVIRONMENT)


def sleeper(place: Path) -> dict[str, object]:
    return {
        "name": "sleeper",
        "argv": ["sleep", "60"],
        "env": ENVIRONMENT,
        "cwd": str(place),
        "log": str(place / "log"),
        "exit_path": str(place / "exit.json"),
    }


def answers(path: Path) -> bool:
    try:
        with Launcher(str(path), 1.0) as launcher:
            launcher.info()
    except LauncherError:
        return False
    return True


def test_the_code_of_the_library_is_part_of_the_key(tmp_path: Path) -> None:
    for part in ("injob", "training"):
        (tmp_path / part).mkdir()
    (tmp_path / "__init__.py").write_text("")
    (tmp_path / "injob" / "page.py").write_text("WORDS = 512\n")
    before = code_of(tmp_path)
    assert before == code_of(tmp_path)
    (tmp_path / "injob" / "page.py").write_text("WORDS = 513\n")
    os.utime(tmp_path / "injob" / "page.py", ns=(1, 1))
    changed = code_of(tmp_path)
    assert changed != before
    (tmp_path / "training" / "new.py").write_text("")
    assert code_of(tmp_path) not in (before, changed)


def test_a_launcher_with_older_code_is_not_used_and_ends_once_it_is_idle(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "code_of", lambda: "00000000")
    yesterday = make(place)
    old = start(yesterday)
    old_path = yesterday.socket_path(yesterday.key(sys.executable, ENVIRONMENT))
    sleeping = old.fork(sleeper(place))
    yesterday.close()
    monkeypatch.undo()

    today = make(place)
    today.stop_idle(older_only=True)
    assert answers(old_path), "it still has a rank"
    new = start(today)
    assert new.info()["pid"] != 0
    assert len(list((place / "run").glob("*.sock"))) == 2
    with Launcher(str(old_path)) as launcher:
        os.kill(sleeping.pid, 9)
        eventually(lambda: not launcher.list(), what="the end of its rank")
    today.stop_idle(older_only=True)
    eventually(lambda: not answers(old_path), what="the end of the old launcher")
    assert new.info()["pid"], "ours goes on"
    today.close()


def test_idle_launchers_end_with_the_daemon_that_asks_them_to(place: Path) -> None:
    launchers = make(place)
    start(launchers)
    path = launchers.socket_path(launchers.key(sys.executable, ENVIRONMENT))
    launchers.close()
    launchers.stop_idle(older_only=False)
    eventually(lambda: not path.exists(), what="the end of the launcher")


def test_a_launcher_that_no_gang_needs_is_let_go(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_UNUSED_S", 0.0)
    launchers = make(place)
    launcher = start(launchers)
    key = launchers.key(sys.executable, ENVIRONMENT)
    launchers.let_go({key})
    assert launcher.info()["pid"]
    launchers.let_go(())
    with pytest.raises(LauncherError):
        launcher.info()
    assert launchers.running(key) is not None, "it is found again while it lasts"
    launchers.close()


def test_all_threads_share_one_connection_and_none_is_left_open(place: Path) -> None:
    launchers = make(place)
    start(launchers).close()
    launchers.let_go(())
    key, known = launchers.key(sys.executable, ENVIRONMENT), make(place)
    with ThreadPoolExecutor(8) as threads:
        found = set(threads.map(lambda _: known.running(key), range(32)))
    assert len(found) == 1
    known.close()
    assert known.running(key) is None, "a thread that comes late opens no other"
    launchers.close()


def test_names_of_one_interpreter_share_a_launcher_and_other_paths_do_not(tmp_path: Path) -> None:
    directory = os.path.dirname(sys.executable)
    one = interpreter_of(("python", "a.py"), {"PATH": directory}, "/")
    other = interpreter_of(("python3", "a.py"), {"PATH": directory}, "/")
    assert Launchers.key(one, {}) == Launchers.key(other, {})
    assert Launchers.key(one, {"PATH": "/bin"}) == Launchers.key(one, {})
    assert Launchers.key(one, {"PYTHONPATH": "/there"}) != Launchers.key(one, {})
    link = tmp_path / "python"
    link.symlink_to(os.path.realpath(sys.executable))
    assert Launchers.key(str(link), {}) != Launchers.key(one, {})


@pytest.mark.parametrize(
    "answer",
    [
        b"no json\n",
        b"[]\n",
        b"[" * 100_000 + b"\n",
        b'{"id": 1}\n',
        b'{"id": 1, "children": 7}\n',
        b'{"id": 1, "children": [7]}\n',
        b'{"id": 1, "children": [{"name": "a", "kind": "rank", "pid": "x", "start_ticks": 1}]}\n',
        b'{"id": 1, "children": [{"name": "a", "kind": "rank", "pid": -1, "start_ticks": 1}]}\n',
        b'{"id": 1, "children": [{"name": 7, "kind": "rank", "pid": 1, "start_ticks": 1}]}\n',
        b'{"id": 1, "error": "x"}\n',
        b'{"id": 1, "error": {"reason": 7}}\n',
        b"x" * (17 << 20),
    ],
    ids=lambda answer: answer[:40].decode(),
)
def test_what_a_launcher_answers_is_checked_as_it_may_be_another_accounts_program(place: Path, answer: bytes) -> None:
    path = place / "run" / "a.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        listener.listen()

        def serve() -> None:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):
                connection.recv(4096)
                connection.sendall(answer)

        with ThreadPoolExecutor(1) as threads:
            serving = threads.submit(serve)
            with Launcher(str(path), 5.0) as launcher, pytest.raises(LauncherError):
                launcher.list()
            serving.result()
    path.unlink()


def test_a_file_that_a_launcher_gives_for_an_arena_has_to_be_one(place: Path) -> None:
    path, file = place / "run" / "a.sock", place / "file"
    file.write_bytes(b"x" * 64)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        listener.listen()

        def serve() -> None:
            connection, _ = listener.accept()
            with connection, file.open("rb") as given:
                connection.recv(4096)
                socket.send_fds(connection, [b'{"id": 1}\n'], [given.fileno()])

        with ThreadPoolExecutor(1) as threads:
            serving = threads.submit(serve)
            with Launcher(str(path), 5.0) as launcher, pytest.raises(LauncherError, match="a file that is no arena"):
                launcher.arena("a/1/rank-0")
            serving.result()
    path.unlink()


def test_the_log_of_a_launcher_is_kept_small_while_it_is_written_to(place: Path) -> None:
    launchers = make(place)
    path = place / "run" / "any-one.log"
    with path.open("ab", buffering=0) as log:
        log.write(b"x" * (9 << 20))
        launchers.tend_logs()
        log.write(b"the end\n")
    assert path.stat().st_blocks * 512 <= 4 << 20
    assert path.read_bytes().endswith(b"x" * (1 << 20) + b"the end\n")


def test_the_logs_of_launchers_that_have_ended_are_removed_after_a_while(place: Path) -> None:
    launchers, run = make(place), place / "run"
    (run / "1001").mkdir()
    for name in ("gone-code", "1001-gone.1-code", "alive-code", "1001-alive-code", "starting-code", "fresh-code"):
        (run / f"{name}.log").touch()
        if not name.startswith("fresh"):
            os.utime(run / f"{name}.log", (1.0, 1.0))
    for socket_path in (run / "alive-code.sock", run / "1001" / "alive-code.sock"):
        socket_path.touch()
    with launchers._starting.setdefault("starting-code", threading.Lock()):
        launchers.tend_logs()
    left = sorted(path.stem for path in run.glob("*.log"))
    assert left == ["1001-alive-code", "alive-code", "fresh-code", "starting-code"]


def test_a_gang_that_needs_a_launcher_alone_takes_the_first_that_no_other_holds(place: Path) -> None:
    launchers = make(place)
    names = [launchers.take("1001/kind-code", gang) for gang in ("a", "b", "a", "c")]
    assert names == ["1001/kind-code", "1001/kind.1-code", "1001/kind-code", "1001/kind.2-code"]
    launchers.give_up(names[1], "b")
    # as the next daemon does it
    launchers.hold("1001/kind-code", "a")
    assert launchers.take("1001/kind-code", "d") == names[1]
    assert launchers.take("1001/other-code", "d") == "1001/other-code"


@pytest.mark.torch
def test_of_the_launchers_that_gangs_have_alone_only_the_first_import_pytorch_ahead(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MOST_PRELOADED", 1)
    launchers = Launchers(place / "run", place / "inject")
    kind = launchers.key(sys.executable, ENVIRONMENT, is_private=True)
    names = [launchers.take(kind, gang) for gang in "ab"]
    started = [launchers.get(name, sys.executable, ENVIRONMENT).info() for name in names]
    assert [one["torch"] for one in started] == [True, False]
    launchers.close()
