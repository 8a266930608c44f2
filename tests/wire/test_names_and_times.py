"""Names and times survive the way to text and back, and bad ones are named."""

from __future__ import annotations

import time

import pytest
from ganger.wire import resource_names as names
from ganger.wire import times
from ganger.wire.errors import NameInvalid
from hypothesis import given
from hypothesis import strategies as st


@given(st.integers(1, 10**17))
def test_a_job_name_gives_its_number_back(number: int) -> None:
    assert names.parse_job_name(names.job_name(number)) == number
    assert names.job_name_from_text(str(number)) == names.job_name(number)


@pytest.mark.parametrize(
    "name", ["", "7", "jobs/", "jobs/0", "jobs/07", "jobs/-1", "jobs/x", "nodes/7", "jobs/1/2", "jobs/" + "9" * 30]
)
def test_a_bad_job_name_is_refused_and_shown(name: str) -> None:
    with pytest.raises(NameInvalid, match="jobs/"):
        names.parse_job_name(name)


@pytest.mark.parametrize(
    "name", ["", "n1", "nodes/", "nodes/..", "nodes/a/b", "nodes/-a", "nodes/a b", "nodes/" + "a" * 64]
)
def test_a_bad_node_name_is_refused(name: str) -> None:
    with pytest.raises(NameInvalid):
        names.parse_node_name(name)


def test_people_may_leave_out_the_prefix() -> None:
    assert names.node_name_from_text("gpu-01.lab") == "nodes/gpu-01.lab"
    assert names.node_name_from_text("nodes/n1") == "nodes/n1"


@given(st.floats(-1e8, 1e8))
def test_seconds_come_back_to_the_nanosecond(seconds: float) -> None:
    message = times.duration(seconds)
    assert times.seconds(message) == pytest.approx(seconds, abs=1e-6)
    # A Duration whose parts differ in sign is invalid.
    assert message.seconds * message.nanos >= 0


@pytest.mark.parametrize("seconds", [1e300, -1e300, float("inf"), 2.0**63])
def test_more_seconds_than_a_duration_holds_become_what_it_holds(seconds: float) -> None:
    assert abs(times.duration(seconds).seconds) == 315_576_000_000


@pytest.mark.parametrize(("instant", "year"), [(253_402_300_799.0, 9999), (3e11, 9999), (-1e11, 1), (0.0, 1970)])
def test_every_instant_has_a_date_for_people(instant: float, year: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "UTC-5")
    time.tzset()
    try:
        assert times.local_datetime(times.timestamp(instant)).year == year
    finally:
        monkeypatch.undo()
        time.tzset()


@given(st.floats(0, 4e9))
def test_unix_seconds_come_back(instant: float) -> None:
    assert times.unix_s(times.timestamp(instant)) == pytest.approx(instant, abs=1e-6)


@given(st.floats(1e9, 4e9))
def test_an_instant_of_today_comes_back_exactly(instant: float) -> None:
    assert times.unix_s(times.timestamp(instant)) == instant


@given(st.integers(0, 1 << 52))
def test_a_whole_number_of_nanoseconds_comes_back_exactly(nanoseconds: int) -> None:
    seconds = round(nanoseconds / 1e9, 9)
    assert times.seconds(times.duration(seconds)) == seconds
