"""Training and evaluation of one job have curves of their own, and cores follow the phase, not the noise."""

from __future__ import annotations

import numpy as np
import pytest
from ganger_master.planner.cores_curves import curve_of
from ganger_master.planner.rate_registry import ProgressReport
from ganger_master.planner.resource_trials import EVALUATION, TRAINING
from hypothesis import given, settings
from hypothesis import strategies as st
from planner.test_resource_trials import Curve, Profiled, needs

# Mini-batches a second while it has enough cores; a report comes each second.
TRAIN, EVALUATE = needs(2), needs(9)


class Phased(Profiled):
    """A job that trains and evaluates: steps stand still while it evaluates."""

    def __init__(self, noise: float = 0.02, seed: int = 7) -> None:
        super().__init__("las+predictor", noise)
        self.random = np.random.default_rng(seed)
        self.evaluated: dict[int, float] = {}
        self.in_row: dict[int, float] = {}
        self.evaluating: dict[int, Curve] = {}

    def spend(self, seconds: int) -> None:
        for _ in range(seconds):
            self.now += 1.0
            for number, curve in self.curves.items():
                curve = self.evaluating.get(number, curve)
                rate = curve(self.cores(number)) * (1.0 + self.noise * self.random.standard_normal())
                done = max(rate, 0.0)
                report = ProgressReport(int(self.steps[number]), self.now)
                if number in self.evaluating:
                    self.evaluated[number] = self.evaluated.get(number, 0.0) + done
                    self.in_row[number] = self.in_row.get(number, 0.0) + done
                    counts = (int(self.evaluated[number]), int(self.in_row[number]))
                    report = ProgressReport(
                        int(self.steps[number]), self.now, evaluated=counts[0], evaluated_in_row=counts[1],
                        evaluated_s=self.now,
                    )  # fmt: skip
                else:
                    self.in_row[number] = 0.0
                    self.steps[number] += done
                    report = ProgressReport(int(self.steps[number]), self.now)
                self.measured.record(number, report, self.now)
            ran = {number: self.now - self.job(number).running_since for number in self.curves}
            if self.measured.update_trials(self.state.view, ran, self.now):
                self.plan()

    def evaluate(self, number: int, seconds: int, curve: Curve = EVALUATE) -> None:
        self.evaluating[number] = curve
        self.spend(seconds)
        del self.evaluating[number]

    def learned(self) -> int:
        """Return a job whose curves of both phases are complete."""
        number = self.add(TRAIN)
        self.spend(300)
        self.evaluate(number, 500)
        self.spend(100)
        return number


def wait_for_other_cores(drive: Phased, number: int) -> None:
    """Let time pass until the job has other cores. AssertionError after half a minute."""
    before = drive.cores(number)
    for _ in range(30):
        drive.spend(1)
        if drive.cores(number) != before:
            return
    raise AssertionError(f"still {before:g} cores")


def test_each_phase_has_its_own_curve_and_its_own_cores() -> None:
    drive = Phased()
    number = drive.learned()
    assert drive.cores(number) == 2
    drive.evaluating[number] = EVALUATE
    drive.spend(10)
    assert drive.cores(number) == pytest.approx(9, abs=1)
    curve = curve_of(number, drive.measured._jobs[number].cores)
    assert (curve.phase, [one.phase for one in curve.others]) == (EVALUATION, [TRAINING])
    assert curve.others[0].enough_millicores == 2_000
    assert curve.enough_millicores == pytest.approx(9_000, abs=1_000)


def test_cores_follow_a_phase_that_is_known_within_twenty_mini_batches_each_way() -> None:
    def slowly(most: float) -> Curve:
        """Mini-batches of a tenth of a second with enough cores."""
        return lambda cores: 10.0 * min(cores, most) / most

    drive = Phased()
    slow = (slowly(2.0), slowly(9.0))
    number = drive.add(slow[0])
    drive.spend(600)
    drive.evaluate(number, 600, slow[1])
    drive.spend(60)
    drive.evaluating[number] = slow[1]
    began = drive.evaluated[number]
    wait_for_other_cores(drive, number)
    assert drive.cores(number) == pytest.approx(9, abs=1)
    assert drive.evaluated[number] - began <= 20
    drive.spend(30)
    del drive.evaluating[number]
    began = drive.steps[number]
    wait_for_other_cores(drive, number)
    assert drive.cores(number) == 2
    assert drive.steps[number] - began <= 20


def test_a_single_batch_that_is_evaluated_between_steps_changes_no_cores() -> None:
    drive = Phased()
    number = drive.learned()
    before = len(drive.changes)
    for _ in range(60):
        drive.spend(2)
        report = ProgressReport(
            int(drive.steps[number]), drive.now, evaluated=9_000, evaluated_in_row=1, evaluated_s=drive.now
        )
        drive.measured.record(number, report, drive.now)
        if drive.measured.update_trials(drive.state.view, {number: 1e4}, drive.now):
            drive.plan()
    assert drive.changes[before:] == []


def test_phases_that_alternate_in_a_moment_do_not_change_cores_each_time() -> None:
    drive = Phased()
    number = drive.learned()
    before = len(drive.changes)
    for _ in range(60):
        drive.evaluate(number, 1)
        drive.spend(1)
    assert len(drive.changes[before:]) <= 120 / 2.0 + 1


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 2**31))
def test_noise_of_a_tenth_makes_no_other_changes_than_phases_do(seed: int) -> None:
    drive = Phased(noise=0.1, seed=seed)
    number = drive.learned()
    drive.evaluate(number, 300)
    drive.spend(300)
    drive.evaluate(number, 60)
    before = len(drive.changes)
    for _ in range(5):
        drive.spend(60)
        drive.evaluate(number, 60)
    changes = [cores for changed, cores in drive.changes[before:] if changed == number]
    assert changes == [*changes[:2]] * 5, "one for each phase, and always to the cores of that phase"
    assert changes[0] < changes[1]


def test_the_windows_of_other_measurements_contain_no_evaluation() -> None:
    drive = Phased(noise=0.0)
    number = drive.learned()
    drive.spend(30)
    drive.evaluate(number, 40)
    drive.spend(30)
    rates = drive.measured.present(number)
    assert rates
    assert min(rates) > 0.8 * max(rates)


def test_a_new_job_of_a_series_has_the_curves_of_both_phases_and_prefers_those_of_its_gpus() -> None:
    drive = Phased()
    first = drive.learned()
    second = drive.add(TRAIN, signature=drive.signatures[first])
    assert drive.cores(second) == 2
    drive.evaluating[second] = EVALUATE
    drive.spend(15)
    assert drive.cores(second) == pytest.approx(9, abs=1)
    points = drive.measured._of_series(drive.measured._jobs[first])
    drive.measured._series["0000000000000001/fast/training"] = points(TRAINING)[:1]
    job = drive.measured._jobs[first]
    assert len(points(TRAINING)) > 1
    job.device_type = "fast"
    assert len(points(TRAINING)) == 1
    job.device_type = "never seen"
    assert points(TRAINING), "any other type is better than none"


def test_a_job_that_is_suspended_keeps_its_own_curve_on_the_same_type() -> None:
    drive = Phased()
    number = drive.learned()
    job, gang = drive.job(number), drive.state.gangs[drive.job(number).epoch]
    drive.measured.put(job, gang, number, drive.now, "fast")
    drive.spend(300)
    own = drive.measured._jobs[number].cores.profile.own
    assert own
    for gang_now, kind in ((None, ""), (gang, "fast")):
        drive.measured.put(job, gang_now, number, drive.now, kind)
        assert drive.measured._jobs[number].cores.profile.own == own
    drive.measured.put(job, gang, number, drive.now, "slow")
    assert drive.measured._jobs[number].cores.profile.own == ()


def test_a_job_that_repeats_steps_after_an_evaluation_trains_again_at_once() -> None:
    drive = Phased()
    number = drive.learned()
    drive.evaluate(number, 100)
    assert drive.measured._jobs[number].cores.phase == EVALUATION
    drive.steps[number] = 0.0
    drive.spend(10)
    assert drive.measured._jobs[number].cores.phase == TRAINING
