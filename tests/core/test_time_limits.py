"""A job with a time limit gives its devices back when that is over, whatever it does with it."""

from __future__ import annotations

from core.drive import Drive, job_of
from ganger.job_state import JobState
from ganger_master.core.commands import ObservedGang, ResumeJob, SuspendJob, Tick
from ganger_master.core.gang_model import ObservedPhase
from ganger_master.core.job_model import SuspendLevel
from ganger_master.core.machine import next_wake
from ganger_master.core.settings import CoreSettings
from msgspec.structs import replace

LIMIT = 1_000.0


class Limited(Drive):
    def __init__(self, gpus: int = 4, nodes: int = 1) -> None:
        super().__init__(nodes, CoreSettings(lost_after_s=None, silent_margin_s=None, policy="backfill"))
        self.number = self.submit(replace(job_of(gpus), time_limit_s=LIMIT))
        self.start(self.number)

    def launched(self, node: str = "n1", phase: ObservedPhase = ObservedPhase.STARTING) -> ObservedGang:
        gang = self.state.gangs[self.job(self.number).epoch]
        return replace(self.report(gang, phase), pids=(7,))

    def is_over(self, after: float) -> bool:
        self.now += after
        self.step(Tick())
        return self.job(self.number).ending is JobState.FAILED


def test_a_job_that_hangs_before_the_first_step_is_stopped_at_its_time_limit() -> None:
    drive = Limited()
    drive.observe("n1", drive.launched())
    began = drive.now
    assert next_wake(drive.state, drive.now) == began + LIMIT
    assert not drive.is_over(after=LIMIT - 1.0)
    assert drive.is_over(after=2.0)
    failure = drive.job(drive.number).failure
    assert failure is not None
    assert (failure.reason, failure.message) == ("TIME_LIMIT", "did not come to a step within its time limit of 1000 s")


def test_nothing_is_counted_before_the_last_of_its_processes_is_there() -> None:
    drive = Limited(gpus=8, nodes=2)
    drive.observe("n1", drive.launched("n1"))
    assert not drive.is_over(after=2 * LIMIT)
    drive.observe("n2", drive.launched("n2"))
    assert not drive.is_over(after=LIMIT - 1.0)
    assert drive.is_over(after=2.0)


def test_from_its_first_step_on_running_time_alone_counts() -> None:
    drive = Limited()
    drive.observe("n1", drive.launched())
    assert not drive.is_over(after=LIMIT - 10.0)
    drive.observe("n1", drive.launched(phase=ObservedPhase.RUNNING))
    assert not drive.is_over(after=LIMIT - 10.0)
    assert drive.is_over(after=20.0)


def test_suspended_time_is_not_counted_and_a_later_start_only_while_it_lasts() -> None:
    drive = Limited()
    drive.observe("n1", drive.launched(phase=ObservedPhase.RUNNING))
    assert not drive.is_over(after=LIMIT - 100.0)
    drive.step(SuspendJob(drive.number, SuspendLevel.PAUSE))
    drive.observe("n1", drive.launched(phase=ObservedPhase.PARKED))
    assert not drive.is_over(after=5 * LIMIT)
    drive.step(ResumeJob(drive.number))
    assert not drive.is_over(after=99.0)
    assert drive.is_over(after=2.0)
