"""How far each job is behind its share, by the device time received."""

from __future__ import annotations

from core.drive import GIB, Drive, job_of
from ganger.cluster.resources import Role, TaskShape
from ganger_master.core.gang_model import Gang, GangPhase
from ganger_master.core.job_model import JobRecord
from ganger_master.core.job_spec import JobSpec
from ganger_master.planner.timeslice_shares import NOTHING, Fairness, credited
from msgspec.structs import replace


def pairs() -> tuple[Drive, list[tuple[JobRecord, Gang]]]:
    """Three of one device each that run."""
    drive = Drive()
    numbers = [drive.submit(job_of(1, GIB)) for _ in range(3)]
    for number in numbers:
        drive.start(number)
        drive.runs(number)
    return drive, [(drive.job(number), drive.state.gangs[drive.job(number).epoch]) for number in numbers]


def test_a_job_that_starts_where_it_moved_to_is_not_behind_for_that() -> None:
    drive, three = pairs()

    def after(before: Fairness, now: float, *received_s: float) -> Fairness:
        received = {job.number: own for (job, _), own in zip(three, received_s, strict=True)}
        return credited(before, three, {}, received, drive.state.view, now, 10.0)

    fairness = after(NOTHING, 0.0, 100.0, 100.0, 100.0)
    fairness = after(fairness, 10.0, 110.0, 110.0, 105.0)
    # Of 25 s it had 5, and was entitled to a third.
    assert round(fairness.behind_s[3], 3) == 3.333
    third, gang = three[2]
    three[2] = (third, replace(gang, phase=GangPhase.STARTING))
    fairness = after(fairness, 40.0, 140.0, 140.0, 105.0)
    assert round(fairness.behind_s[3], 3) == 3.333
    three[2] = (third, gang)
    fairness = after(fairness, 50.0, 150.0, 150.0, 106.0)
    assert round(fairness.behind_s[3], 3) == 3.333, "from here on it is looked at again"
    fairness = after(fairness, 60.0, 160.0, 160.0, 116.0)
    assert round(fairness.behind_s[3], 3) == 3.333


def test_a_job_without_devices_is_never_behind_and_counts_for_no_other() -> None:
    drive, three = pairs()
    number = drive.submit(JobSpec(("train",), (Role("worker", 1, TaskShape(0, 2_000, GIB)),)))
    drive.start(number)
    drive.runs(number)
    everything = [*three, (drive.job(number), drive.state.gangs[drive.job(number).epoch])]
    fairness = NOTHING
    for now in (0.0, 10.0):
        received = {1: now, 2: now, 3: 0.5 * now, number: now}
        fairness = credited(fairness, everything, {}, received, drive.state.view, now, 10.0)
    assert fairness.behind_s[number] == 0.0
    assert round(fairness.behind_s[3], 3) == 3.333
