"""Files that are no recordings, or no longer whole ones: said in words, with the place."""

from __future__ import annotations

import fcntl
import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from decision_log.kit import busy, recorded, rerun_of, stormy
from ganger_master.decision_log.log_file import LogFile, RecordingUnreadable
from ganger_master.decision_log.recording import LineError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    cluster = stormy(1, is_calm=True)
    return recorded(tmp_path_factory.mktemp("whole"), cluster, lambda cluster: busy(cluster, 3)).path.read_bytes()


def problem_of(path: Path, data: bytes) -> str:
    path.write_bytes(data)
    with pytest.raises((RecordingUnreadable, LineError)) as raised:
        rerun_of(path)
    return str(raised.value)


def lines_of(whole: bytes) -> list[bytes]:
    return gzip.decompress(whole).splitlines(keepends=True)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=st.floats(0.0, 1.0, exclude_max=True))
def test_a_file_cut_anywhere_is_never_taken_for_a_whole_one(tmp_path: Path, whole: bytes, cut: float) -> None:
    text = problem_of(tmp_path / "cut", whole[: int(cut * len(whole))])
    # A single byte has no recognisable content.
    assert "breaks off" in text or "is empty" in text or "is no recording" in text


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.floats(0.0, 1.0, exclude_max=True), bit=st.integers(0, 7))
def test_a_flipped_bit_is_found_or_changes_nothing(tmp_path: Path, whole: bytes, at: float, bit: int) -> None:
    data = bytearray(whole)
    data[int(at * len(data))] ^= 1 << bit
    path = tmp_path / "flipped"
    try:
        # In the header of the packing there are bits that mean nothing.
        is_same = gzip.decompress(bytes(data)) == gzip.decompress(whole)
    except (OSError, EOFError, zlib.error):
        is_same = False
    if is_same:
        path.write_bytes(data)
        assert rerun_of(path).differences == []
    else:
        assert str(path) in problem_of(path, bytes(data))


def header(**changes: object) -> Callable[[list[bytes]], Iterator[bytes]]:
    def change(lines: list[bytes]) -> Iterator[bytes]:
        yield json.dumps({**json.loads(lines[0]), **changes}).encode() + b"\n"
        yield from lines[1:]

    return change


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (header(format=3, ganger="9.9"), "has format 3, written by ganger 9.9; this ganger reads format 2"),
        (header(program="planner", format=1), "has format 1, written by ganger test; this ganger reads format 3"),
        (header(line="trace"), "is no recording of Ganger"),
        (lambda lines: lines[:0], "is empty"),
        (lambda lines: lines[1:], "is no recording of Ganger"),
        (lambda lines: lines[:-1], "breaks off behind line"),
        (lambda lines: [*lines, lines[-1]], "there is more behind its end"),
        (lambda lines: [lines[0], *lines], ":2: it is damaged: no place for Header"),
        (lambda lines: [lines[0], b"{}\n", *lines[1:]], ":2: it is damaged"),
        (lambda lines: [lines[0], b"\xff\xfe\n", *lines[1:]], ":2: it is damaged"),
        (lambda lines: [lines[0], *[line for line in lines[1:] if b'"state"' not in line]], "before there is a state"),
        (
            lambda lines: [line for line in lines if b'"kind":"nodes"' not in line],
            "the parts of the state do not go together",
        ),
        (
            lambda lines: [line.replace(b'"kind":"Tick"', b'"kind":"Tock"') for line in lines],
            "there is no command 'Tock'",
        ),
    ],
)
def test_what_is_wrong_is_said(
    tmp_path: Path, whole: bytes, change: Callable[[list[bytes]], list[bytes]], says: str
) -> None:
    data = gzip.compress(b"".join(change(lines_of(whole))))
    assert says in problem_of(tmp_path / "changed", data)


def test_elements_with_fields_that_a_former_version_recorded_are_read_without_them(tmp_path: Path) -> None:
    cluster = stormy(1, is_calm=True)
    busy(cluster, 3)
    path = recorded(tmp_path, cluster, lambda cluster: busy(cluster, 1)).path
    former = {"jobs": {"suspend_wanted": 3}, "gangs": {"stop_reason": "moved away"}}
    lines, changed = [json.loads(line) for line in lines_of(path.read_bytes())], 0
    for line in lines:
        if line["line"] == "element" and line["kind"] in former:
            line["value"] |= former[line["kind"]]
            changed += 1
    path.write_bytes(gzip.compress("".join(json.dumps(line) + "\n" for line in lines).encode()))
    assert changed >= 2
    assert rerun_of(path).differences == []


def test_other_files_are_no_recordings(tmp_path: Path) -> None:
    assert "is no recording, or damaged" in problem_of(tmp_path / "text", b"job_id,submit_time_s\n1,2\n")
    with pytest.raises(RecordingUnreadable, match="no such file"):
        rerun_of(tmp_path / "missing")
    with pytest.raises(RecordingUnreadable, match="is a directory"):
        rerun_of(tmp_path)


def test_a_new_file_removes_what_a_killed_program_left_and_no_file_that_is_being_written(tmp_path: Path) -> None:
    (tmp_path / "killed.jsonl.gz.partial").touch()
    first, second = LogFile(tmp_path), LogFile(tmp_path)
    first.open()
    assert len(list(tmp_path.iterdir())) == 1
    second.open()
    assert len(list(tmp_path.iterdir())) == 2
    published = {first.publish(), second.publish()}
    assert set(tmp_path.iterdir()) == published


def test_a_file_that_another_program_removes_before_it_is_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, removed = fcntl.flock, []

    def lock_late(file: int, operation: int) -> None:
        if not removed:
            removed.extend(tmp_path.iterdir())
            removed[0].unlink()
        lock(file, operation)

    file = LogFile(tmp_path)
    monkeypatch.setattr(fcntl, "flock", lock_late)
    file.open()
    assert len(removed) == 1
    assert list(tmp_path.iterdir()) == removed
    assert list(tmp_path.iterdir()) != [file.publish()]
