"""The defrag bench: what it holds the planner against."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.defrag import DefragJob, fewest
from benchmarks.step_notes import NOTE


def test_the_fewest_moves_are_found_by_trying_all() -> None:
    assert fewest([3, 3, 3, 3], [0] * 4, 4, 4) == (0, 3)
    assert fewest([3, 2, 3, 3], [0] * 4, 4, 4) == (0, 2)
    assert fewest([0, 4, 4, 4], [0] * 4, 4, 4) == (0, 0)
    # One of four rests on each node, and three go to where the others were.
    assert fewest([3] * 4, [1] * 4, 4, 4) == (4, 3)
    assert fewest([0, 4, 4, 4], [4, 0, 0, 0], 4, 4) == (4, 0)
    with pytest.raises(ValueError, match="no moves"):
        fewest([4, 4], [0, 0], 4, 4)


def test_a_step_done_twice_or_left_out_is_seen_and_so_is_the_pause(tmp_path: Path) -> None:
    def job(*notes: tuple[int, int, int]) -> DefragJob:
        path = tmp_path / str(len(list(tmp_path.iterdir())))
        path.write_bytes(b"".join(NOTE.pack(pid, step, end - 1, end, 0) for pid, step, end in notes) + b"half")
        return DefragJob("jobs/1", path, 0)

    moved = job((7, 1, 10**6), (7, 2, 2 * 10**6), (9, 3, 52 * 10**6))
    assert (moved.replayed(), moved.skipped(), moved.pauses_ms()) == (0, 0, [50.0])
    assert job((7, 1, 1), (7, 2, 2), (9, 2, 3)).replayed() == 1
    assert job((7, 1, 1), (9, 3, 3)).skipped() == 1
