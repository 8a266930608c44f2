"""Run-time directories that another account could replace, with the sockets in them, are not used."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from ganger_daemon.claimed_directories import DaemonError, DaemonObstacle, check_storage
from ganger_daemon.node import node_context
from ganger_daemon.node.daemon_files import DaemonPaths, DirectoryError, choose_run_directory, path_trouble

STRANGER = 12345


@pytest.mark.parametrize(
    ("name", "former", "reason"),
    [
        ("typo", "", "no such file or directory; mount the cluster's storage there"),
        ("plain", "", "it is not a directory"),
        ("plain/below", "", "not a directory"),
        ("typo", "typo", ""),
        ("there", "", ""),
    ],
)
def test_storage_is_refused_at_the_start_where_it_was_never_a_directory(
    tmp_path: Path, name: str, former: str, reason: str
) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "plain").touch()
    storage = node_context.Storage(override=tmp_path / name)
    known = str(tmp_path / former) if former else ""
    if not reason:
        asyncio.run(check_storage(storage, known))
        return
    with pytest.raises(DaemonError, match=reason) as refused:
        asyncio.run(check_storage(storage, known))
    assert refused.value.obstacle is DaemonObstacle.SETTING


def test_storage_that_hangs_at_the_start_is_waited_for(tmp_path: Path) -> None:
    class Hung(node_context.StorageWork):
        async def run(self, *_: object, within_s: float) -> object:  # type: ignore[override]
            raise node_context.StorageHungError(f"{within_s} s")

    asyncio.run(check_storage(node_context.Storage(override=tmp_path / "typo", work=Hung()), ""))


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
