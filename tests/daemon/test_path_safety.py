"""Run-time directories that another account could replace, with the sockets in them, are not used."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from ganger_daemon.node.daemon_files import DaemonPaths, DirectoryError, choose_run_directory, path_trouble

STRANGER = 12345


@pytest.fixture
def shared() -> Iterator[Path]:
    """A directory that all may write into; its name is short enough for sockets."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="s") as name:
        os.chmod(name, 0o1777)
        yield Path(name)


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs a second account")


def test_a_path_that_only_this_user_and_root_can_change_is_safe(tmp_path: Path) -> None:
    (tmp_path / "sticky").mkdir()
    (tmp_path / "sticky").chmod(0o1777)
    (tmp_path / "sticky" / "own").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "sticky" / "own")
    for path in (tmp_path, tmp_path / "sticky" / "own", tmp_path / "link", tmp_path / "link" / "to" / "come"):
        assert path_trouble(path) == ""


def _of_a_stranger(path: Path) -> None:
    path.mkdir()
    os.chown(path, STRANGER, STRANGER)


def _through_a_strangers_link(path: Path) -> None:
    (path.parent / "own").mkdir(mode=0o700)
    path.symlink_to(path.parent / "own")
    os.lchown(path, STRANGER, STRANGER)


def _writable_by_others(path: Path) -> None:
    path.mkdir()
    path.chmod(0o777)


def _a_file(path: Path) -> None:
    path.touch()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        pytest.param(_of_a_stranger, "belongs to user 12345", marks=needs_root),
        pytest.param(_through_a_strangers_link, "belongs to user 12345", marks=needs_root),
        (_writable_by_others, "others may write into"),
        (_a_file, "is no directory"),
    ],
)
@pytest.mark.parametrize("below", ["", "deeper"])
def test_a_path_that_another_account_can_change_is_refused(
    shared: Path, make: Callable[[Path], None], said: str, below: str
) -> None:
    path = shared / "ganger-0"
    make(path)
    if below and path.is_dir():
        (path / below).mkdir()
    assert said in path_trouble(path / below)
    if path.is_dir():
        with pytest.raises(DirectoryError, match=r"is not safe: .*--run-dir"):
            DaemonPaths(shared / "state", path / below).prepare()


@needs_root
def test_a_directory_that_another_account_made_first_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Path("/dev/shm/ganger-54321")
    made.mkdir()
    try:
        os.chown(made, STRANGER, STRANGER)
        monkeypatch.setattr(os, "geteuid", lambda: 54321)
        monkeypatch.setattr(os, "getuid", lambda: 54321)
        monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
        chosen = choose_run_directory(tmp_path, {"machine_uuid": "m"})
    finally:
        shutil.rmtree(made)
    assert chosen.parent == tmp_path / "run"
