"""Files beside the database: the marks are the newest after each commit, and are written again if removed."""

from __future__ import annotations

from pathlib import Path

import pytest
from ganger_master.core.node_model import Counters
from ganger_master.runtime import state_directory
from ganger_master.runtime.state_directory import DatabaseMarks


def version(written: DatabaseMarks) -> int:
    marks = written.marks()
    assert marks is not None
    return marks.desired_version


def test_the_marks_are_those_of_the_last_commit(tmp_path: Path) -> None:
    written = DatabaseMarks(tmp_path / "ganger.db")
    for number in (1, 2, 1_000_000, 3):
        written.note([Counters(store="a", desired_version=number)])
        assert version(written) == number
    assert version(DatabaseMarks(tmp_path / "ganger.db")) == 3


def test_the_file_of_marks_is_opened_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []
    really_open = state_directory.os.open

    def counted(path: Path, flags: int, mode: int = 0o777) -> int:
        opened.append(path)
        return really_open(path, flags, mode)

    monkeypatch.setattr(state_directory.os, "open", counted)
    written = DatabaseMarks(tmp_path / "ganger.db")
    for number in range(50):
        written.note([Counters(store="a", desired_version=number)])
    assert opened == [tmp_path / "ganger.db.marks"]


def test_marks_that_were_removed_are_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(state_directory.time, "monotonic", lambda: now)
    written = DatabaseMarks(tmp_path / "ganger.db")
    written.note([Counters(store="a", desired_version=1)])
    (tmp_path / "ganger.db.marks").unlink()
    now += 11.0
    written.note([Counters(store="a", desired_version=2)])
    assert version(written) == 2
