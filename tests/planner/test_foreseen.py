"""What is believed of jobs by what they report: the end that their losses, or their loops, tell, and their speeds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import pytest
from core.drive import job_of
from ganger_master.core.job_model import JobRecord
from ganger_master.estimators.convergence import LossPoint
from ganger_master.planner.job_measurements import MOST_POINTS
from ganger_master.planner.rate_registry import ProgressReport, RateRegistry
from ganger_master.policies.optimus_sizes import NOTHING, OptimusEstimate
from msgspec.structs import replace

PASS = 100


class Measured(RateRegistry):
    """Measures job 1, and is given steps a second by number of GPUs, alike for all jobs."""

    def __init__(self, rates: Mapping[int, float]) -> None:
        super().__init__()
        self.of_all = rates
        self.weighs_sizes = True
        self.put(job(), None, 0, 0.0)

    def by_gpus(self, number: int) -> Mapping[int, float]:
        return self.of_all

    def hears(self, step: int, loss: float, passes: int, passes_in_all: int = 0) -> None:
        report = ProgressReport(step, float(step), loss=loss, passes=passes, passes_in_all=passes_in_all)
        self.record(1, report, float(step))

    @property
    def losses(self) -> Sequence[LossPoint]:
        known = self._jobs.get(1)
        return () if known is None or known.losses is None else known.losses.curve


def job(least_decrease: float = 0.0, passes: int = 1, number: int = 1) -> JobRecord:
    spec = replace(job_of(1), gpus_min=1, gpus_max=8, least_decrease=least_decrease, converged_passes=passes)
    return JobRecord(number, "", "", spec, 0.0)


def trained(steps: int, in_all: int = 0, every: int = 5, rates: Mapping[int, float] | None = None) -> Measured:
    """A job whose loss falls from 1.1 to a tenth, by half of the rest in ten passes of a hundred steps."""
    foreseen = Measured({1: 10.0, 2: 18.0} if rates is None else rates)
    for step in range(every, steps + 1, every):
        loss = 1.0 / (0.1 * step / PASS + 1.0) + 0.1
        foreseen.hears(step, loss, step // PASS, in_all)
    return foreseen


def belief(foreseen: Measured, of: JobRecord) -> OptimusEstimate:
    (found,) = foreseen.believed(4)([(of, None)])
    return found


def test_the_end_is_where_the_fitted_losses_fall_by_less_than_its_owner_said() -> None:
    # One pass lowers 1 / (u * (u + 0.1)) by 0.1 of itself: below 0.02 of 1.1 from u = 2.08 on, 10.8 passes, and one.
    found = belief(trained(600), job(0.02))
    assert not found.is_young
    assert found.steps_left == pytest.approx(11.8 * PASS - 600, rel=0.02)
    later = belief(trained(600), job(0.02, passes=4))
    assert later.steps_left - found.steps_left == pytest.approx(3 * PASS)


def test_no_job_goes_on_beyond_the_passes_that_it_makes() -> None:
    assert belief(trained(600, in_all=8), job(0.02)).steps_left == 200.0
    assert belief(trained(600, in_all=8), job()).steps_left == 200.0
    assert belief(trained(600, in_all=100), job()).steps_left == 9_400.0
    assert belief(trained(600, in_all=100), job(0.02)).steps_left == pytest.approx(580, rel=0.05)


@pytest.mark.parametrize(
    ("steps", "in_all", "left"),
    [
        # No pass is over yet: as much as it has done.
        (50, 8, 50.0),
        (50, 0, 50.0),
        # Twenty more passes, since no end is reported.
        (250, 0, 2_000.0),
    ],
)
def test_an_end_that_is_not_reported_is_a_guess(steps: int, in_all: int, left: float) -> None:
    found = belief(trained(steps, in_all), job())
    assert (found.steps_left, found.is_young) == (left, True)


def test_before_losses_tell_the_end_it_is_a_guess_too() -> None:
    found = belief(trained(150), job(0.02))
    assert (found.steps_left, found.is_young) == (2_000.0, True)


def test_nothing_is_believed_of_whose_speed_was_not_measured() -> None:
    assert belief(trained(600, rates={}), job()) == NOTHING
    assert belief(trained(600), job(number=2)) == NOTHING


def test_speeds_with_other_numbers_of_gpus_are_fitted_to_those_it_has_had() -> None:
    speed = belief(trained(600), job()).speed
    assert speed is not None
    assert 1.0 / speed.step_s(1, 1, 1.0) == pytest.approx(10.0, rel=0.1)
    assert 1.0 / speed.step_s(2, 1, 0.5) == pytest.approx(18.0, rel=0.1)
    assert 18.0 < 1.0 / speed.step_s(4, 1, 0.25) < 40.0


def test_what_was_undone_by_a_restart_is_forgotten_and_a_long_run_is_kept_in_few_points() -> None:
    foreseen = trained(600)
    foreseen.hears(300, 0.5, 3)
    assert max(point.step for point in foreseen.losses) == 300
    foreseen = trained(50_000)
    assert MOST_POINTS // 2 <= len(foreseen.losses) <= MOST_POINTS + 100
    assert max(point.step for point in foreseen.losses) > 49_000


def test_a_loss_that_is_none_is_no_point() -> None:
    foreseen = trained(600)
    before = foreseen.losses
    for loss in (math.nan, math.inf):
        foreseen.hears(601, loss, 6)
    assert foreseen.losses == before


def test_a_job_first_reported_within_a_pass_counts_as_in_its_middle_until_the_next_begins() -> None:
    foreseen = Measured({1: 10.0})
    foreseen.hears(460, 0.5, 4, 10)
    assert belief(foreseen, job()).steps_left == pytest.approx(10 * 460 / 4.5 - 460)
    foreseen.hears(500, 0.5, 5, 10)
    assert belief(foreseen, job()).steps_left == 500.0


def test_a_job_that_has_ended_is_dropped() -> None:
    foreseen = trained(600)
    foreseen.keep(lambda number: number == 1, 1e6)
    assert foreseen.losses
    foreseen.keep(lambda number: False, 1e6)
    assert not foreseen.losses
