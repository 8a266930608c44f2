"""What `ganger bench slice` makes of notes of steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.slice import main
from benchmarks.step_notes import (
    NOTE,
    NotedStep,
    jain,
    rate,
    share_outside,
    shares_of_cycles,
    steps_of,
    switches,
    turns_of,
)
from benchmarks.switch_timing import PageChange, SwitchTiming, parts, switch_of


def steps(*times: tuple[int, int]) -> list[NotedStep]:
    return [NotedStep(1, number, begin, end, end) for number, (begin, end) in enumerate(times)]


SECOND = 1_000_000_000


def stepping_in(*spans: tuple[int, int], pid: int = 1) -> list[NotedStep]:
    """A step each tenth of a second, each of which takes as much processor time."""
    moments = [tenth for begin, end in spans for tenth in range(10 * begin, 10 * end)]
    return [NotedStep(pid, n, at * SECOND // 10, (at + 1) * SECOND // 10, n * 10) for n, at in enumerate(moments)]


def test_turns_are_steps_of_one_job_on_end() -> None:
    one, other = steps((0, 9), (10, 19), (50, 59)), steps((22, 30), (31, 40))
    assert [(turn.job, turn.begin, turn.end, turn.steps) for turn in turns_of([one, other])] == [
        (0, 0, 19, 2),
        (1, 22, 40, 2),
        (0, 50, 59, 1),
    ]


def test_a_switch_is_from_the_end_of_a_turn_to_the_next_begin_of_one_on_whatever_device() -> None:
    alone = stepping_in((0, 60))
    one, other = stepping_in((0, 10), (23, 30), (47, 60)), stepping_in((11, 20), (32, 45))
    going_on, starting = switches([alone, one, other], 0, 60 * SECOND)
    assert (going_on, starting) == (pytest.approx([1.0, 3.0, 2.0, 2.0]), [])


def test_what_a_device_waits_for_a_program_to_start_there_is_no_switch() -> None:
    here, there = stepping_in((0, 10), (20, 30)), stepping_in((42, 50), pid=2)
    going_on, starting = switches([[*here, *there], stepping_in((11, 19), (31, 37))], 0, 50 * SECOND)
    assert (going_on, starting) == (pytest.approx([1.0, 1.0, 1.0]), pytest.approx([5.0]))


def test_a_device_that_waited_for_a_job_running_elsewhere_counts_too() -> None:
    # the mover runs on until it is handed over; its host rests for it from 10, its neighbour has its device from 17 on
    mover = [*stepping_in((0, 16)), *stepping_in((16, 30), pid=2)]
    host, neighbour = stepping_in((0, 10)), stepping_in((17, 30))
    going_on, starting = switches([mover, host, neighbour], 0, 30 * SECOND)
    assert (going_on, starting) == (pytest.approx([1.0]), pytest.approx([6.0]))


def test_shares_are_those_of_whole_cycles_whatever_the_look_at_them_cut() -> None:
    one, other = stepping_in((0, 1), (10, 20), (30, 40), (50, 51)), stepping_in((1, 10), (20, 30), (40, 50))
    assert jain(shares_of_cycles(turns_of([one, other]), 2)) > 0.99
    with pytest.raises(ValueError, match="whole cycle"):
        shares_of_cycles(turns_of([one[:5], other[:5]]), 2)


def test_a_job_that_was_moved_is_rated_by_each_of_its_processes() -> None:
    here, there = stepping_in((0, 2)), stepping_in((5, 7), pid=2)
    assert rate([[*here, *there]]) == pytest.approx(rate([here]))


def test_shares_that_are_equal_have_the_index_one() -> None:
    assert jain([2.0, 2.0, 2.0]) == pytest.approx(1.0)
    assert jain([1.0, 0.0]) == pytest.approx(0.5)


def test_a_note_that_is_half_written_does_not_count(tmp_path: Path) -> None:
    path = tmp_path / "notes"
    path.write_bytes(NOTE.pack(1, 2, 3, 4, 5) + b"half")
    assert steps_of(path) == [NotedStep(1, 2, 3, 4, 5)]


def test_what_is_used_between_turns_beyond_a_step_is_no_work() -> None:
    hundredth = SECOND // 100
    own = [NotedStep(1, n, n * hundredth, n * hundredth + 1, n * 10) for n in range(9)]
    own += [NotedStep(1, n, (500 + n) * hundredth, (500 + n) * hundredth + 1, 100 + n * 10) for n in range(9)]
    # sixteen steps of 10 each, and 20 between the turns, of which 10 are a step
    assert share_outside([own]) == pytest.approx(10 / 180)
    assert share_outside([own[:5]]) == 0.0


def test_parts_of_switches_on_two_devices_at_once_are_not_mixed() -> None:
    switch = [
        *((10, 0, 0, "ordered"), (12, 0, 0, "stopped"), (15, 0, 0, "offloaded")),
        *((19, 1, 0, "told"), (24, 1, 0, "runs"), (30, 1, 0, "stepped")),
        *((11, 2, 1, "ordered"), (13, 2, 1, "stopped"), (16, 2, 1, "offloaded")),
        *((20, 3, 1, "told"), (25, 3, 1, "runs"), (31, 3, 1, "stepped")),
    ]
    seen = [PageChange(moment * 1_000_000_000, *rest) for moment, *rest in switch]
    found = parts(seen, [3_000_000_000, 9_000_000_000])
    expected = {"order": 1.0, "wait_for_k": 2.0, "offload": 3.0, "release_seen": 4.0, "restore": 5.0, "first_step": 6.0}
    assert set(found) == set(expected)
    for part, each in found.items():
        assert each == pytest.approx([expected[part]] * 2, abs=1.01)
    assert parts(seen[2:3], []) == {}


@pytest.mark.parametrize(
    "line", ["", "row switched", '{"event": "row switched"}', '{"event": "row switched", "time": 3}']
)
def test_a_line_of_a_log_that_tells_no_switch_is_left_out(line: str) -> None:
    assert switch_of(line) is None


def test_a_switch_is_when_its_daemon_says_it_was() -> None:
    line = '{"time": "1970-01-01T00:00:02.005Z", "event": "row switched", "row": 1, "switch_seconds": 0.25}'
    assert switch_of(line) == SwitchTiming(2_005_000_000, 0.25)


def test_a_case_there_is_not_is_refused_with_those_there_are() -> None:
    with pytest.raises(ValueError, match="jobs4_on1"):
        main(only="jobs9_on9")
