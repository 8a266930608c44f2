"""The clock is set, or the master stands still: durations are counted on, and no node or job is penalised."""

from __future__ import annotations

import pytest
from core.drive import Drive, job_of
from ganger.job_state import JobState
from ganger_master.core.availability import ClockReading, noticed
from ganger_master.core.commands import Tick
from ganger_master.core.settings import CoreSettings
from msgspec.structs import replace

HOUR = 3_600.0


@pytest.mark.parametrize(
    ("wall", "steady", "tick"),
    [
        (105.0, 5.0, None),
        # What clocks drift, and are slewed.
        (106.0, 5.0, None),
        (105.0 + HOUR, 5.0, Tick(set_by=HOUR)),
        (105.0 - HOUR, 5.0, Tick(set_by=-HOUR)),
        (100.0 + HOUR, HOUR, Tick(stood_still=True)),
        (100.0, HOUR, Tick(set_by=-HOUR, stood_still=True)),
    ],
)
def test_a_clock_that_was_set_is_distinguished_from_a_standstill(wall: float, steady: float, tick: Tick | None) -> None:
    assert noticed(ClockReading(100.0, 0.0), ClockReading(wall, steady)) == tick


@pytest.mark.parametrize("set_by", [HOUR, -HOUR])
def test_a_job_is_given_the_time_it_may_run_whatever_the_clock_says(set_by: float) -> None:
    drive = Drive(settings=CoreSettings(lost_after_s=None))
    number = drive.submit(replace(job_of(1), time_limit_s=1_000.0))
    drive.start(number)
    drive.runs(number)
    drive.now += 400.0 + set_by
    drive.step(Tick(set_by=set_by))
    drive.now += 500.0
    drive.step(Tick())
    assert drive.job(number).ending is None
    drive.now += 200.0
    drive.step(Tick())
    assert drive.job(number).ending is JobState.FAILED
    assert drive.job(number).run_s == pytest.approx(1_100.0, abs=1.0)


@pytest.mark.parametrize("set_by", [HOUR, -HOUR])
def test_how_long_a_job_waits_is_counted_on(set_by: float) -> None:
    drive = Drive()
    number = drive.submit(job_of(4))
    drive.now += set_by
    drive.step(Tick(set_by=set_by))
    assert drive.now - drive.job(number).pending_since == pytest.approx(0.0, abs=1.0)


def test_no_scheduler_loses_a_lease_while_the_master_stands_still() -> None:
    drive = Drive(settings=CoreSettings(lost_turns_allowed=1))
    number = drive.submit(job_of(4))
    (before,) = drive.state.leases
    drive.now += HOUR
    drive.step(Tick(stood_still=True))
    (after,) = drive.state.leases
    assert before != after
    assert drive.state.leases.lost_turns == {}
    assert drive.state.leases.turn_of == {number: after}
