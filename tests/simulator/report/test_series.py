"""Series keep their time-weighted mean whatever is merged, and answer as a walk over their steps would."""

from __future__ import annotations

import math

import pytest
from ganger_master.simulator.report.outcomes import SeriesRecorder, StepSeries
from hypothesis import given
from hypothesis import strategies as st

steps = st.lists(st.tuples(st.integers(1, 9), st.integers(-5, 5)), min_size=1, max_size=40)


def made(changes: list[tuple[int, int]], rest: int = 3) -> StepSeries:
    times, now = [], 0
    for wait, _ in changes:
        times.append(now)
        now += wait
    return StepSeries.of(times, [value for _, value in changes], times[-1] + rest)


def naive_integral(series: StepSeries, first: float, last: float) -> float:
    ends: list[float] = [*series.times.tolist()[1:], series.end]
    steps: list[tuple[float, float, float]] = list(
        zip(series.times.tolist(), ends, series.values.tolist(), strict=True)
    )
    return sum(value * max(0.0, min(end, last) - max(begin, first)) for begin, end, value in steps)


@given(steps, st.integers(0, 400), st.integers(0, 400))
def test_mean_of_any_part_is_that_of_a_walk(changes: list[tuple[int, int]], one: int, other: int) -> None:
    series = made(changes)
    first, last = sorted((min(one, series.end), min(other, series.end)))
    if first == last:
        assert math.isnan(series.mean(first, last))
    else:
        assert series.mean(first, last) == pytest.approx(naive_integral(series, first, last) / (last - first))


@given(steps, st.integers(1, 10), st.integers(0, 3))
def test_thinning_keeps_the_mean_and_few_steps(changes: list[tuple[int, int]], most: int, rest: int) -> None:
    series = made(changes, rest)
    thin = series.thinned(most)
    assert len(thin.times) <= most
    assert (thin.start, thin.end) == (series.start, series.end)
    assert thin.mean() == pytest.approx(series.mean(), nan_ok=True)


def test_values_are_those_from_a_change_on_and_unknown_outside() -> None:
    series = StepSeries.of([1, 4], [2, 5], 6)
    assert series.at([0.9, 1, 3.9, 4, 6]).tolist()[1:] == [2, 2, 5, 5]
    assert all(map(math.isnan, series.at([0.9, 6.1])))


@pytest.mark.parametrize(
    ("times", "values", "end"),
    [([], [], 0), ([1, 1], [0, 0], 2), ([2, 1], [0, 0], 3), ([1], [0], 0.5), ([1], [0, 1], 2)],
)
def test_series_that_make_no_sense_are_refused(times: list[float], values: list[float], end: float) -> None:
    with pytest.raises(ValueError, match="series"):
        StepSeries.of(times, values, end)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4)), max_size=300))
def test_recording_holds_few_steps_and_loses_no_area(changes: list[tuple[int, int]]) -> None:
    recorder = SeriesRecorder(0.0, 1.0, most_steps=8)
    area, now, value = 0.0, 0.0, 1.0
    for wait, new in changes:
        area += value * wait
        now, value = now + wait, float(new)
        recorder.record(now, value)
    series = recorder.series(now + 1)
    assert len(series.times) <= 17
    assert series.integral_to(series.end) == pytest.approx(area + value)
    assert series.at(now + 1) == value


def test_time_does_not_go_back() -> None:
    recorder = SeriesRecorder(5.0)
    with pytest.raises(AssertionError, match="time went back"):
        recorder.record(4.0, 1.0)
