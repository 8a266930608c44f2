"""The file of what a planner remembers: whatever is wrong with it costs a line in the log and nothing else."""

from __future__ import annotations

import asyncio
import logging
import stat
from pathlib import Path

import pytest
from ganger.wire.endpoints import Endpoint
from ganger_master.planner.memory import PlannerMemory
from ganger_master.planner.migration_plans import MigrationMemory
from ganger_master.planner_process.planner_files import Note
from ganger_master.planner_process.run import Planner

POLICY, NOW = "gandiva", 1_000.0


def memory(now: float) -> PlannerMemory:
    return PlannerMemory(moving=MigrationMemory(moved_at={7: now}))


def recall(path: Path | None, policy: str = POLICY) -> PlannerMemory | None:
    return Note(path).recall(policy, NOW, lambda number: None)


def logged(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    return [(one.message, getattr(one, "reason", "")) for one in caplog.records if one.levelno >= logging.WARNING]


def test_the_last_note_is_what_the_next_planner_reads(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "planner.note"
    assert recall(path) is None
    note = Note(path)
    for now in (1.0, 2.0):
        note.write(memory(now), POLICY, NOW)
        assert recall(path) == memory(now)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [one.name for one in tmp_path.iterdir()] == ["planner.note"]
    assert logged(caplog) == []


def test_what_is_as_it_was_is_not_written_again(tmp_path: Path) -> None:
    path = tmp_path / "planner.note"
    note = Note(path)
    note.write(memory(1.0), POLICY, NOW)
    before = path.stat()
    note.write(memory(1.0), POLICY, NOW + 10.0)
    assert path.stat() == before
    note.write(memory(2.0), POLICY, NOW + 10.0)
    assert path.stat().st_ino != before.st_ino


def test_without_a_file_nothing_is_noted_or_recalled(caplog: pytest.LogCaptureFixture) -> None:
    Note(None).write(memory(1.0), POLICY, NOW)
    Note(None).forget()
    assert recall(None) is None
    assert logged(caplog) == []


@pytest.mark.parametrize(
    ("content", "policy", "why"),
    [
        (b"", POLICY, "it is damaged: Input data was truncated"),
        (b"\x93garbage", POLICY, "it is damaged"),
        (None, "las", "it is of policy gandiva"),
    ],
)
def test_a_bad_note_costs_a_line_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes | None, policy: str, why: str
) -> None:
    path = tmp_path / "planner.note"
    Note(path).write(memory(1.0), POLICY, NOW)
    if content is not None:
        path.write_bytes(content)
    assert recall(path, policy) is None
    ((message, reason),) = logged(caplog)
    assert (message, reason.startswith(why)) == ("note not used", True)


def test_a_note_that_cannot_be_read_or_written_is_logged_once_and_stops_no_planner(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "planner.note").mkdir()
    assert recall(tmp_path / "planner.note") is None
    note = Note(tmp_path / "nowhere" / "planner.note")
    for now in (1.0, 2.0):
        note.write(memory(now), POLICY, NOW)
    assert logged(caplog) == [
        ("note not read", "Is a directory"),
        ("note not written", "No such file or directory"),
    ]
    (tmp_path / "nowhere").mkdir()
    note.write(memory(2.0), POLICY, NOW)
    assert recall(tmp_path / "nowhere" / "planner.note") == memory(2.0)


def test_a_planner_that_fails_by_itself_leaves_no_note_for_the_next_one_to_fail_by(tmp_path: Path) -> None:
    path = tmp_path / "planner.note"
    Note(path).write(memory(1.0), POLICY, NOW)

    def fails() -> Endpoint:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        asyncio.run(Planner(fails, note=path).run())
    assert not path.exists()
