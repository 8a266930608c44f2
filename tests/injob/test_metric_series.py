"""The series of what a job logs: bounded, the same in whatever order copies are merged, and never of repeated steps."""

from __future__ import annotations

import math
from pathlib import Path

from ganger.injob.metrics import SeriesFile, series_path
from ganger.protocol.metric_series import EPOCH, MOST_NAMES, MOST_POINTS, MetricSeries, merged, parsed
from hypothesis import given, settings
from hypothesis import strategies as st


def series(attempt: int, *lines: tuple[int, str, float]) -> MetricSeries:
    return parsed("".join(f"{step} {1000 + step} {name} {value!r}\n" for step, name, value in lines), attempt)


def values(one: MetricSeries, name: str = "loss") -> dict[int, float]:
    return {point.step: point.values[0] for point in one.of(name)}


def test_what_was_logged_comes_back_by_name_and_step(tmp_path: Path) -> None:
    file = SeriesFile(str(tmp_path / "series"))
    file.start(0)
    file.log(1, {"loss": 0.5, "accuracy": 0.1})
    file.log(2, {"loss": 0.25})
    file.flush()
    read = parsed((tmp_path / "series").read_text(), 3)
    assert read.names() == ["accuracy", "loss"]
    assert values(read) == {1: 0.5, 2: 0.25}
    assert {point.attempt for point in read.points.values()} == {3}
    assert merged([parsed(read.text())]) == merged([read])


def test_the_losses_of_steps_give_way_to_those_that_the_script_logs(tmp_path: Path) -> None:
    file = SeriesFile(str(tmp_path / "series"))
    file.add_loss(1, 9.0)
    file.log(2, {"loss": 0.25})
    file.add_loss(3, 9.0)
    file.flush()
    assert values(parsed((tmp_path / "series").read_text())) == {1: 9.0, 2: 0.25}


def test_a_second_value_at_one_step_replaces_the_first(tmp_path: Path) -> None:
    file = SeriesFile(str(tmp_path / "series"))
    file.log(4, {"accuracy": 0.5})
    file.log(4, {"accuracy": 0.75})
    file.flush()
    assert values(parsed((tmp_path / "series").read_text()), "accuracy") == {4: 0.75}


def test_a_file_stays_small_however_much_is_logged_and_its_points_are_equally_far_apart(tmp_path: Path) -> None:
    path = tmp_path / "series"
    file = SeriesFile(str(path))
    for step in range(60_000):
        file.log(step, {"loss": 1 / (step + 1)})
    file.flush()
    read = merged([parsed(path.read_text(), 1)])
    assert path.stat().st_size < 512 << 10
    stride = read.strides["loss"]
    steps = sorted(values(read))
    assert MOST_POINTS / 2 <= len(steps) <= MOST_POINTS
    assert steps == list(range(0, 60_000, stride))
    assert not list(tmp_path.glob("*.tmp"))


def test_steps_that_an_attempt_repeats_are_those_of_the_attempt() -> None:
    first = series(1, (0, "@start", 0.0), (10, "loss", 5.0), (20, "loss", 4.0), (30, "loss", 3.0))
    again = series(2, (20, "@start", 0.0), (25, "loss", 3.5))
    assert values(merged([first, again])) == {10: 5.0, 20: 4.0, 25: 3.5}
    assert values(merged([again, first])) == {10: 5.0, 20: 4.0, 25: 3.5}


def test_an_epoch_has_its_begin_its_end_its_steps_and_the_mean_of_its_losses() -> None:
    lines = "".join(f"{step} {100 + step} loss {float(step)}\n" for step in range(8))
    read = parsed(f"{lines}4 105.5 {EPOCH} 0.0 100.0 0.0 3.5\n8 111.0 {EPOCH} 1.0 106.0 4.0 2.0\n")
    first, second = read.epochs()
    assert (first.number, first.begin_s, first.end_s, first.steps, first.active_s) == (0, 100.0, 105.5, 4, 3.5)
    assert first.mean_loss == 1.5
    assert (second.first_step, second.steps, second.mean_loss) == (4, 4, 5.5)


def test_an_epoch_without_a_loss_has_no_mean() -> None:
    (epoch,) = parsed(f"4 105.5 {EPOCH} 0.0 100.0 0.0 3.5\n").epochs()
    assert math.isnan(epoch.mean_loss)


def test_names_and_points_are_bounded_whatever_a_job_writes() -> None:
    names = parsed("".join(f"1 1 m{number} 1.0\n" for number in range(100)))
    assert len(merged([names]).names()) == MOST_NAMES
    many = merged([series(1, *[(step * 7, "loss", 1.0) for step in range(5_000)])])
    assert len(many.points) <= MOST_POINTS


@given(st.text(alphabet="0123456789 .-@aenidtrsp\n", max_size=300))
def test_whatever_a_job_writes_is_read_as_a_series(text: str) -> None:
    read = merged([parsed(text)])
    read.epochs()
    # The text has milliseconds, so it is compared with what is read from it.
    again = parsed(read.text())
    assert parsed(again.text()) == again


LINES = st.lists(st.tuples(st.integers(0, 200), st.sampled_from(["loss", "accuracy"]), st.floats(0, 1)), max_size=60)


@settings(max_examples=60)
@given(LINES, LINES, LINES)
def test_copies_are_merged_to_the_same_in_any_order(
    one: list[tuple[int, str, float]], two: list[tuple[int, str, float]], three: list[tuple[int, str, float]]
) -> None:
    parts = [series(1, *one), series(1, *two), series(1, *three)]
    whole = merged(parts)
    assert merged([merged(parts[:2]), parts[2]]) == whole
    assert merged([parts[2], merged(reversed(parts[:2]))]) == whole
    assert merged([whole, whole]) == whole


def test_merging_in_parts_thins_as_merging_at_once() -> None:
    parts = [series(1, *[(step, "loss", 1.0) for step in range(begin, begin + 900)]) for begin in range(0, 9_000, 900)]
    in_parts = parts[0]
    for part in parts[1:]:
        in_parts = merged([in_parts, part])
    assert in_parts == merged(parts)


def test_a_path_that_cannot_be_written_costs_the_values_and_nothing_else(tmp_path: Path) -> None:
    file = SeriesFile(str(tmp_path / "missing" / "series"))
    file.log(1, {"loss": 1.0})
    file.flush()
    assert series_path(str(tmp_path)).endswith("rank-0.series")
