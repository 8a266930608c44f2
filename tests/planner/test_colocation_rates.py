"""Rates of jobs alone on their devices, co-located, and by the load of their nodes."""

from __future__ import annotations

from math import nan

import pytest
from ganger.cluster.resources import Claim, LocalityLevel
from ganger.job_state import JobState
from ganger_master.core.gang_model import Gang, GangIntent, GangPhase, GangRole, Piece
from ganger_master.core.job_model import JobRecord
from ganger_master.core.job_spec import JobSpec
from ganger_master.planner.rate_registry import ProgressReport, RateRegistry
from ganger_master.policies.trials import TrialPace
from msgspec.structs import replace

PACE = TrialPace(warm_s=30.0, settle_s=5.0, window_s=2.0, window_steps=5)


def job(number: int, epoch: int = 0, create_time: float = 1.0) -> JobRecord:
    return JobRecord(number, "", "", JobSpec(("x",), ()), create_time, epoch=epoch)


def running(
    number: int, mask: int, epoch: int = 1, cores: int = 4_000, intent: GangIntent = GangIntent.RUN
) -> tuple[JobRecord, Gang]:
    claim = Claim("n1", mask, (cores,), 1)
    gang = Gang(
        epoch,
        number,
        GangRole.ACTIVE,
        GangPhase.RUNNING,
        (Piece(claim, claim),),
        LocalityLevel.NODE,
        1.0,
        intent=intent,
    )
    return replace(job(number, epoch), state=JobState.HOLDING, running_since=1.0), gang


class SteppingJobs(RateRegistry):
    """The rates of jobs that step at given rates and report it every second."""

    def __init__(self) -> None:
        super().__init__(PACE)
        self.now = 100.0
        self.rates: dict[int, float] = {}
        self.steps: dict[int, float] = {}

    def runs(self, number: int, mask: int, epoch: int = 1, cores: int = 4_000, rate: float = 10.0) -> None:
        self._put(number, mask, epoch, cores, GangIntent.RUN)
        self.rates[number] = rate

    def parks(self, number: int, mask: int, epoch: int = 1) -> None:
        self._put(number, mask, epoch, 4_000, GangIntent.PARK)
        self.rates[number] = 0.0

    def _put(self, number: int, mask: int, epoch: int, cores: int, intent: GangIntent) -> None:
        self.put(*running(number, mask, epoch, cores, intent), 7, self.now)

    def ends(self, number: int) -> None:
        self.put(replace(job(number), state=JobState.SUCCEEDED), None, 7, self.now)
        del self.rates[number]

    def go_on(self, seconds: float, use: float | None = None) -> None:
        """Let time pass. `use`: utilisation of all devices, from 0 to 1."""
        for _ in range(int(seconds)):
            self.now += 1.0
            for number, rate in self.rates.items():
                self.steps[number] = self.steps.get(number, 0.0) + rate
                self.record(number, ProgressReport(int(self.steps[number]), self.now, use=use), self.now)


def test_rates_of_a_job_alone_count_once_it_has_warmed_up() -> None:
    jobs = SteppingJobs()
    jobs.runs(1, 0b1)
    jobs.go_on(31.0, use=0.5)
    assert jobs.alone(1) == ()
    assert jobs.utilisation(1) == 0.5
    # One window does not show the variance.
    jobs.go_on(1.0)
    assert jobs.alone(1) == ()
    jobs.go_on(2.0)
    assert jobs.alone(1) == jobs.present(1) == (10.0, 10.0)
    assert jobs.neighbours(1) == frozenset()
    jobs.go_on(100.0)
    assert len(jobs.alone(1)) == 16


def test_a_device_without_utilisation_reports_counts_as_fully_utilised() -> None:
    jobs = SteppingJobs()
    jobs.runs(1, 0b1)
    jobs.go_on(40.0)
    assert jobs.utilisation(1) == jobs.utilisation(99) == 1.0


def test_co_located_jobs_are_measured_once_the_newcomer_has_warmed_up() -> None:
    jobs = SteppingJobs()
    jobs.runs(1, 0b01)
    jobs.runs(2, 0b10, rate=20.0)
    jobs.go_on(40.0)
    jobs.runs(1, 0b01, cores=2_000, rate=8.0)
    jobs.go_on(20.0)
    assert set(jobs.alone(1)) == {10.0}, "a rate with half of the cores does not count as the rate alone"
    jobs.runs(2, 0b01, epoch=3, rate=15.0)
    assert jobs.neighbours(1) == {2}
    assert jobs.neighbours(2) == {1}
    jobs.go_on(30.0)
    assert jobs.present(1) == jobs.present(2) == ()
    jobs.go_on(7.0)
    assert set(jobs.present(1)) == {8.0}
    assert set(jobs.present(2)) == {15.0}
    assert set(jobs.alone(2)) == {20.0}


def test_a_job_that_is_alone_again_is_measured_alone_again() -> None:
    jobs = SteppingJobs()
    jobs.runs(1, 0b1)
    jobs.go_on(40.0)
    jobs.runs(2, 0b1, epoch=2)
    jobs.go_on(40.0)
    for leave in (lambda: jobs.parks(2, 0b1, epoch=2), lambda: jobs.ends(2)):
        jobs.runs(2, 0b1, epoch=2)
        assert jobs.neighbours(1) == {2}
        leave()
        assert jobs.neighbours(1) == frozenset()
    jobs.rates[1] = 12.0
    jobs.go_on(20.0)
    assert set(jobs.present(1)) == {12.0}
    assert jobs.alone(1)[-1] == 12.0


def test_a_job_that_resumes_in_place_adds_windows_without_warming_up_again() -> None:
    jobs = SteppingJobs()
    jobs.runs(1, 0b1)
    jobs.go_on(33.0)
    assert jobs.alone(1) == (), "one window does not show the variance"
    for _ in range(3):
        jobs.parks(1, 0b1)
        jobs.go_on(10.0)
        jobs.runs(1, 0b1)
        jobs.go_on(7.0)
    assert len(jobs.alone(1)) == 1 + 3


def test_a_gang_is_beside_every_job_on_any_of_its_devices() -> None:
    jobs = SteppingJobs()
    jobs.runs(1, 0b0011)
    jobs.runs(2, 0b0110)
    jobs.runs(3, 0b0100)
    assert [jobs.neighbours(number) for number in (1, 2, 3)] == [{2}, {1, 3}, {2}]
    jobs.keep(lambda number: number != 2, jobs.now)
    assert [jobs.neighbours(number) for number in (1, 2, 3)] == [frozenset()] * 3


def test_a_new_job_with_the_number_of_an_old_one_starts_without_rates() -> None:
    jobs = SteppingJobs()
    jobs.runs(1, 0b1)
    jobs.go_on(40.0)
    pending = JobRecord(1, "", "", JobSpec(("x",), ()), 60.0, state=JobState.PENDING)
    jobs.put(pending, None, 8, jobs.now)
    assert jobs.alone(1) == ()
    assert jobs.signature(1) == "0000000000000008"


def run_time_sliced(jobs: SteppingJobs, seconds: float, reports_resumption: bool = True) -> None:
    """Run job 1 in a time slice of 6 seconds out of every 12, at 10 steps/s. Outside it the last step is reported."""
    claim = Claim("n1", 0b1, (4_000,), 1)
    piece = (Piece(claim, claim),)
    gang = Gang(
        1, 1, GangRole.ACTIVE, GangPhase.RUNNING, piece, LocalityLevel.NODE, 1.0, intent=GangIntent.RUN, node_set=3
    )
    job = JobRecord(1, "", "", JobSpec(("x",), ()), 1.0, state=JobState.HOLDING, epoch=1, running_since=1.0)
    jobs.put(job, gang, 7, jobs.now)
    steps, last_s, resumed_s = 0, 0.0, nan
    for second in range(int(seconds)):
        jobs.now += 1.0
        if second % 12 < 6:
            resumed_s = jobs.now - 0.9 if second % 12 == 0 else resumed_s
            steps, last_s = steps + 10, jobs.now
        report = ProgressReport(steps, last_s, resumed_s if reports_resumption else nan, 0.3)
        jobs.record(1, report, jobs.now)


def test_rates_of_a_time_sliced_job_count_only_its_own_slices() -> None:
    jobs = SteppingJobs()
    run_time_sliced(jobs, 120.0)
    assert len(jobs.alone(1)) > 4
    assert set(jobs.alone(1)) == {10.0}
    assert (jobs.neighbours(1), jobs.utilisation(1)) == (frozenset(), pytest.approx(0.3))


def test_a_time_sliced_job_is_not_measured_if_the_starts_of_its_slices_are_not_reported() -> None:
    jobs = SteppingJobs()
    run_time_sliced(jobs, 120.0, reports_resumption=False)
    assert jobs.alone(1) == jobs.present(1) == ()


# -- load of the job's nodes


def test_a_job_is_measured_with_each_load_of_its_node_as_others_come_and_go() -> None:
    jobs = SteppingJobs()
    jobs.runs(1, 0b1, rate=10.0)
    jobs.go_on(60.0)
    load, rates = jobs.interference(1)
    assert (load, set(rates)) == (0, {0})
    jobs.runs(2, 0b1110)
    jobs.rates[1] = 7.0
    # The new load has not settled yet.
    jobs.go_on(4.0)
    assert set(jobs.interference(1)[1]) == {0}
    assert not jobs.compared
    jobs.go_on(40.0)
    load, rates = jobs.interference(1)
    assert (load, set(rates)) == (3, {0, 3})
    assert list(jobs.compared) == [1]
    assert rates[0] == pytest.approx([10.0] * len(rates[0]))
    assert rates[3] == pytest.approx([7.0] * len(rates[3]), rel=0.1)
    assert len(rates[0]) <= 16
    jobs.ends(2)
    assert jobs.interference(1)[0] == 0


def test_a_job_of_a_known_series_has_the_rates_by_load_of_those_before_it() -> None:
    jobs = SteppingJobs()
    jobs.runs(1, 0b1)
    jobs.go_on(60.0)
    jobs.runs(2, 0b1110)
    jobs.rates[1] = 7.0
    jobs.go_on(60.0)
    jobs.ends(1)
    jobs.runs(3, 0b1, epoch=2)
    (known,) = jobs.same_series(3, gpus=1).values()
    assert {load: round(rates[0]) for load, rates in known.by_load.items()} == {0: 10, 3: 7}
    assert jobs.same_series(3, gpus=2) == jobs.same_series(4, gpus=1) == {}
    again = RateRegistry(PACE)
    again.recall(jobs.remembered)
    assert again.same_series(3, gpus=1) == jobs.same_series(3, gpus=1)
    # Rates with other cores are others, and those with the most windows count.
    jobs.ends(2)
    jobs.runs(3, 0b1, epoch=3, cores=2_000, rate=5.0)
    jobs.go_on(60.0)
    (with_few,) = jobs.same_series(3, gpus=1).values()
    assert with_few.by_load == known.by_load
    assert {load: round(rates[0]) for load, rates in with_few.by_cores[2_000].items()} == {0: 5}


def test_rates_by_load_leave_out_co_located_jobs_and_are_void_after_a_change_of_cores() -> None:
    jobs = SteppingJobs()
    jobs.runs(1, 0b1)
    jobs.go_on(60.0)
    jobs.runs(2, 0b1)
    jobs.go_on(60.0)
    assert set(jobs.interference(1)[1]) == {0}
    jobs.ends(2)
    jobs.runs(1, 0b1, cores=2_000)
    assert jobs.interference(1) == (0, {})
    jobs.ends(1)
    assert jobs.interference(1) == (0, {})
