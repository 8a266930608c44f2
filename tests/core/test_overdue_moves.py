"""A move that is not complete at its deadline is undone, whichever side is silent, and at any point."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from core.drive import Drive, job_of
from ganger.job_state import JobState
from ganger_master.core.answers import JobAnswer
from ganger_master.core.commands import MoveJob, ObservedGang, Tick
from ganger_master.core.gang_model import Gang, GangIntent, GangPhase, ObservedPhase
from ganger_master.core.machine import next_wake
from ganger_master.core.settings import CoreSettings
from msgspec.structs import replace

DEADLINE = 120.0


def moving(**settings: float | None) -> tuple[Drive, int, int, int]:
    """A move that has just begun: the job, its source and its destination."""
    drive = Drive(2, CoreSettings(move_deadline_s=DEADLINE, **settings))  # type: ignore[arg-type]
    number = drive.submit(job_of(2))
    source = drive.start(number)
    drive.runs(number)
    assert drive.step(MoveJob(number)) == JobAnswer(number)
    return drive, number, source, drive.job(number).next_epoch


def _no_daemon_reports(drive: Drive, number: int, source: int, destination: int) -> None:
    pass


def _the_destination_starts_for_ever(drive: Drive, number: int, source: int, destination: int) -> None:
    drive.seen(number, destination, ObservedPhase.STARTING)


def _the_source_never_parks(drive: Drive, number: int, source: int, destination: int) -> None:
    drive.seen(number, destination, ObservedPhase.PREPARED)


def _the_source_is_stopping_for_ever(drive: Drive, number: int, source: int, destination: int) -> None:
    drive.seen(number, destination, ObservedPhase.PREPARED)
    drive.seen(number, source, ObservedPhase.STOPPING)


def _the_destination_is_never_ready(drive: Drive, number: int, source: int, destination: int) -> None:
    drive.seen(number, destination, ObservedPhase.PREPARED)
    drive.seen(number, source, ObservedPhase.PARKED, 40)


def _the_destination_never_says_its_step(drive: Drive, number: int, source: int, destination: int) -> None:
    _the_destination_is_never_ready(drive, number, source, destination)
    drive.seen(number, destination, ObservedPhase.READY)


def _only_the_destination_is_ready(drive: Drive, number: int, source: int, destination: int) -> None:
    drive.seen(number, destination, ObservedPhase.READY, 40)


POINTS: dict[Callable[[Drive, int, int, int], None], str] = {
    _no_daemon_reports: "nodes/n2 was not ready within 120 s",
    _the_destination_starts_for_ever: "nodes/n2 was not ready within 120 s (STARTING)",
    _the_source_never_parks: "nodes/n1 did not stop within 120 s (RUNNING)",
    _the_source_is_stopping_for_ever: "nodes/n1 did not stop within 120 s (STOPPING)",
    _the_destination_is_never_ready: "nodes/n2 was not ready within 120 s (PREPARED)",
    _the_destination_never_says_its_step: "nodes/n2 was not ready within 120 s (READY)",
    _only_the_destination_is_ready: "nodes/n1 did not stop within 120 s (RUNNING)",
}


@pytest.mark.parametrize("point", POINTS, ids=lambda point: point.__name__)
def test_a_move_that_stands_still_is_undone_at_its_deadline_and_names_the_late_node(
    point: Callable[[Drive, int, int, int], None],
) -> None:
    drive, number, source, destination = moving()
    point(drive, number, source, destination)
    wake = next_wake(drive.state, drive.now)
    assert wake is not None
    assert wake <= drive.state.gangs[destination].since + DEADLINE
    drive.now = drive.state.gangs[destination].since + DEADLINE - 1.0
    drive.step(Tick())
    assert drive.job(number).next_epoch == destination
    drive.now += 1.0
    drive.step(Tick())
    job = drive.job(number)
    assert (job.state, job.epoch, job.next_epoch) == (JobState.HOLDING, source, 0)
    assert drive.state.gangs[source].intent is GangIntent.RUN
    assert drive.state.gangs[source].phase in (GangPhase.RUNNING, GangPhase.STARTING)
    assert drive.state.gangs[destination].intent is GangIntent.STOP
    said = [one for one in drive.history if one.kind == "move_aborted"]
    assert [one.message for one in said] == [POINTS[point]]
    assert job.trouble == f"its move was given up: {POINTS[point]}"
    # Once its daemon reports that it is gone, nothing of it is held.
    drive.seen_without("n2", number)
    assert destination not in drive.state.gangs
    assert drive.state.view.row("n2").free_mask == 0b1111


@pytest.mark.parametrize("point", POINTS, ids=lambda point: point.__name__)
@pytest.mark.parametrize("dead", ["n1", "n2"])
def test_a_daemon_that_dies_during_a_move_delays_the_job_no_longer_than_the_deadline(
    point: Callable[[Drive, int, int, int], None], dead: str
) -> None:
    drive, number, source, destination = moving(lost_after_s=None)
    point(drive, number, source, destination)
    alive = "n2" if dead == "n1" else "n1"
    for _ in range(24):
        drive.now += 10.0
        drive.step(Tick())
        # The other daemon goes on to report what it has.
        drive.observe(alive, *(_as_before(drive, gang, alive) for gang in drive.on(alive)))
    job = drive.job(number)
    assert (job.epoch, job.next_epoch) == (source, 0)
    assert drive.state.gangs[source].intent is GangIntent.RUN
    if destination in drive.state.gangs:
        assert drive.state.gangs[destination].intent is GangIntent.STOP


def _as_before(drive: Drive, gang: Gang, node: str) -> ObservedGang:
    piece = gang.piece(node)
    assert piece is not None
    phase = piece.phase if piece.phase is not ObservedPhase.NONE else ObservedPhase.STARTING
    return drive.report(gang, phase, 40 if phase is ObservedPhase.PARKED else 0)


def test_a_source_that_cannot_stop_gives_the_move_up_before_the_deadline() -> None:
    drive, number, source, destination = moving()
    drive.seen(number, destination, ObservedPhase.PREPARED)
    gang = drive.state.gangs[source]
    report = replace(drive.report(gang, ObservedPhase.STOPPING), trouble="it did not stop for a move within 60 s")
    drive.observe("n1", report)
    assert drive.job(number).next_epoch == 0
    assert drive.state.gangs[source].intent is GangIntent.RUN
