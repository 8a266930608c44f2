"""What `ganger bench slice` makes of notes of steps."""

from __future__ import annotations

from pathlib import Path

import pytest
from ganger_daemon.bench.slice import NOTE, Step, _gaps, _jain, _on_devices, _steps, _turns


def steps(*times: tuple[int, int]) -> list[Step]:
    return [Step(1, begin, end, end) for begin, end in times]


def test_turns_are_steps_of_one_job_on_end_and_gaps_what_lies_between_two_jobs() -> None:
    one, other = steps((0, 9), (10, 19), (50, 59)), steps((22, 30), (31, 40))
    turns = _turns([0, 1], [one, other])
    assert [(turn.job, turn.begin, turn.end, turn.steps) for turn in turns] == [
        (0, 0, 19, 2),
        (1, 22, 40, 2),
        (0, 50, 59, 1),
    ]
    assert _gaps(turns) == pytest.approx([3e-9, 10e-9])


def test_jobs_on_one_device_are_those_whose_steps_never_lie_beside_each_other() -> None:
    one, other, alone = steps((0, 9), (30, 39)), steps((11, 20)), steps((0, 39))
    assert _on_devices([one, alone, other], 2) == [[0, 2], [1]]
    assert _on_devices([one, alone, other], 1) == [[0, 1, 2]]


def test_shares_that_are_equal_have_the_index_one() -> None:
    assert _jain([2.0, 2.0, 2.0]) == pytest.approx(1.0)
    assert _jain([1.0, 0.0]) == pytest.approx(0.5)


def test_a_note_that_is_half_written_does_not_count(tmp_path: Path) -> None:
    path = tmp_path / "notes"
    path.write_bytes(NOTE.pack(1, 2, 3, 4) + b"half")
    assert _steps(path) == [Step(1, 2, 3, 4)]
