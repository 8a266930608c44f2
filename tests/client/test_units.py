"""Amounts as people write them."""

from __future__ import annotations

import pytest
from ganger import units
from hypothesis import given
from hypothesis import strategies as st


@pytest.mark.parametrize(
    ("text", "count"),
    [("16G", 16 << 30), ("512m", 512 << 20), ("1.5GiB", 3 << 29), ("2GB", 2 * 10**9), ("100", 100), (7, 7)],
)
def test_memory_is_read(text: str | int, count: int) -> None:
    assert units.parse_memory(text) == count


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("2h30m", 9_000),
        ("90s", 90),
        ("1d 2h", 93_600),
        ("500ms", 0.5),
        ("90", 90),
        ("1-12:00:00", 129_600),
        ("12:30:00", 45_000),
        ("12:30", 750),
        (5, 5),
        ("1-02:03", 93_780),
    ],
)
def test_durations_are_read(text: str | int, seconds: float) -> None:
    assert units.parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "2x", "h", "-5m", "1h2", "1:2:3", "2h;rm", [], True, float("nan"), -1, 10**400])
def test_what_is_no_duration_is_refused(text: object) -> None:
    with pytest.raises(ValueError, match="duration"):
        units.parse_duration(text)


@pytest.mark.parametrize("text", ["", "G", "-1G", "3Q", "1e9", "16 GG"])
def test_what_is_no_memory_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="memory"):
        units.parse_memory(text)


@given(st.integers(0, 2**50))
def test_printed_memory_reads_as_nearly_the_same(count: int) -> None:
    assert units.parse_memory(units.format_memory(count)) == pytest.approx(count, rel=0.06)


@given(st.floats(0, 1e7))
def test_printed_durations_read_as_nearly_the_same(seconds: float) -> None:
    assert units.parse_duration(units.format_duration(seconds)) == pytest.approx(seconds, rel=0.06, abs=0.6)
