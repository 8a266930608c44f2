"""One master per directory; its secrets are its owner's."""

from __future__ import annotations

from pathlib import Path

import pytest
from ganger.wire.endpoints import read_endpoint
from ganger_master.runtime.state_directory import MasterObstacle, StartError, StateDirectory, obstacle_of, storage_token


def test_second_master_in_one_directory_is_refused_naming_the_first(tmp_path: Path) -> None:
    first = StateDirectory(tmp_path / "state")
    with pytest.raises(StartError, match="another master"):
        StateDirectory(tmp_path / "state")
    first.close()
    StateDirectory(tmp_path / "state").close()


def test_token_stays_across_restarts_and_is_private(tmp_path: Path) -> None:
    directory = StateDirectory(tmp_path / "state")
    token = directory.token()
    directory.close()
    again = StateDirectory(tmp_path / "state")
    assert again.token() == token
    assert (tmp_path / "state" / "token").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "state").stat().st_mode & 0o777 == 0o700
    again.close()


def test_endpoint_is_there_only_while_the_master_serves(tmp_path: Path) -> None:
    directory = StateDirectory(tmp_path)
    token = directory.token()
    directory.write_endpoint("127.0.0.1:7")
    found = read_endpoint(tmp_path)
    assert (found.address, found.token) == ("127.0.0.1:7", token)
    # Killed: the next one clears it away before it serves.
    directory.close()
    StateDirectory(tmp_path).close()
    assert not (tmp_path / "endpoint.json").exists()


def test_directory_that_cannot_be_used_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StartError, match="cannot use state directory"):
        StateDirectory(tmp_path / "file")


def test_storage_token_is_made_once_and_kept(tmp_path: Path) -> None:
    token = storage_token(tmp_path / "storage")
    assert len(token) == 32
    assert storage_token(tmp_path / "storage") == token
    assert [path.name for path in (tmp_path / "storage").iterdir()] == [".ganger-token"]


def test_storage_that_cannot_be_used_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StartError, match="cannot use storage"):
        storage_token(tmp_path / "file" / "storage")
    with pytest.raises(StartError, match=r"there is no directory .*/typo; mount it or make it") as refused:
        storage_token(tmp_path / "typo" / "storage")
    assert refused.value.obstacle is MasterObstacle.SETTING
    assert not (tmp_path / "typo").exists()


def test_missing_rights_are_told_apart_wherever_they_hide() -> None:
    hidden = RuntimeError("cannot open it")
    hidden.__cause__ = PermissionError()
    assert [obstacle_of(error) for error in (PermissionError(), hidden, FileNotFoundError())] == [
        MasterObstacle.RIGHTS,
        MasterObstacle.RIGHTS,
        MasterObstacle.STATE,
    ]
