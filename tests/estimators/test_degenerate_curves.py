"""Measurements that say nothing, or nonsense: what is made of them, and that no other job pays for it.

| measured | speed by tasks | losses |
|---|---|---|
| constant | more tasks do not help: it keeps one of each kind | it has converged: one epoch more |
| worse and worse | more tasks hurt: it keeps one of each kind | one epoch more, without a bound |
| not a number | no speed: it keeps what it begins with | no estimate: a guess |
| one point | met; elsewhere a guess within a factor of the tasks | no estimate: a guess |
| noise | finite and above zero everywhere | one epoch more, without a bound |
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from ganger_master.estimators.convergence import LossPoint, fit_convergence, steps_to_convergence
from ganger_master.estimators.server_speed import ServerPoint, ServerSpeed, UpdateMode, fit_server_speed
from ganger_master.estimators.speed import StepPoint, fit_allreduce
from ganger_master.policies.optimus_sizes import UNKNOWN_EPOCHS, allocated, growing, server_speeds, steps_left

GRID = [(p, w) for p in (1, 2, 4) for w in (1, 2, 4)]
NOISE = np.random.default_rng(7).lognormal(0.0, 1.0, len(GRID)).tolist()
RATES = {
    "constant": [3.0] * len(GRID),
    "worse and worse": [1.0 / (p * w) for p, w in GRID],
    "one point": [2.0],
    "noise": NOISE,
}
# A job whose speed grows with its workers, beside which the others are judged.
HEALTHY = ServerSpeed(UpdateMode.SYNCHRONOUS, (1.0, 0.01, 0.0, 0.0, 0.0, 0.0), batch=8.0)
EPOCH = 100.0
LOSSES = {
    "constant": [1.0] * 12,
    "worse and worse": [1.0 + 0.2 * epoch for epoch in range(12)],
    "not a number": [math.nan] * 12,
    "one point": [1.0],
    "noise": np.random.default_rng(3).uniform(0.5, 1.5, 12).tolist(),
}


def points(rates: list[float]) -> list[ServerPoint]:
    return [ServerPoint(*pair, rate) for pair, rate in zip(GRID, rates, strict=False)]


def tasks_beside_a_healthy_job(model: ServerSpeed | None) -> tuple[list[int], list[int]]:
    """The (servers, workers) of the job, and of the healthy one, of sixteen cores; each task takes one."""
    left = [math.nan if model is None else 1_000.0, 1_000.0]
    jobs = growing(left, server_speeds([model or HEALTHY, HEALTHY]), np.ones((2, 2, 1)))
    found = allocated(jobs, np.array([16.0])).tolist()
    return found[0], found[1]


@pytest.mark.parametrize("mode", [*UpdateMode, None])
@pytest.mark.parametrize("case", RATES)
def test_every_fitted_speed_is_finite_and_above_zero_where_nothing_was_measured(
    case: str, mode: UpdateMode | None
) -> None:
    model = fit_server_speed(points(RATES[case]), mode)
    assert model is not None
    p, w = np.meshgrid(np.arange(1, 65), np.arange(1, 65))
    speeds = model.all_steps_per_second(p, w)
    assert np.isfinite(speeds).all()
    assert (speeds > 0.0).all()
    assert float(speeds.max()) <= 64.0 * max(RATES[case])


@pytest.mark.parametrize("case", ["constant", "worse and worse"])
def test_a_job_that_gains_nothing_gets_one_task_of_each_kind_and_the_rest_goes_to_the_other(case: str) -> None:
    own, healthy = tasks_beside_a_healthy_job(fit_server_speed(points(RATES[case])))
    assert own == [1, 1]
    assert sum(healthy) >= 8


@pytest.mark.parametrize("case", ["one point", "noise"])
def test_a_job_of_which_little_is_known_takes_no_more_than_its_half(case: str) -> None:
    own, healthy = tasks_beside_a_healthy_job(fit_server_speed(points(RATES[case])))
    assert min(own) >= 1
    assert sum(own) <= 9
    assert healthy[1] >= 4


@pytest.mark.parametrize("bad", [math.nan, math.inf, 0.0, -1.0])
def test_rates_that_are_none_leave_a_job_with_what_it_begins_with(bad: float) -> None:
    model = fit_server_speed(points([bad] * len(GRID)))
    assert model is None
    own, healthy = tasks_beside_a_healthy_job(model)
    assert own == [1, 1]
    assert sum(healthy) >= 8
    assert fit_allreduce([StepPoint(1, 1, 1.0, bad), StepPoint(2, 1, 0.5, bad)]) is None


@pytest.mark.parametrize("case", RATES)
def test_every_fitted_all_reduce_step_is_finite_and_above_zero(case: str) -> None:
    rates = RATES[case][:4]
    model = fit_allreduce([StepPoint(n, 1, 1.0 / n, 1.0 / rate) for n, rate in zip((1, 2, 4, 8), rates, strict=False)])
    assert model is not None
    steps = [model.step_s(n, -(-n // 4), 1.0 / n) for n in range(1, 65)]
    assert all(0.0 < step < math.inf for step in steps)
    assert min(steps) >= min(1.0 / rate for rate in rates) / 64.0


@pytest.mark.parametrize("case", LOSSES)
def test_losses_without_a_curve_leave_a_guess_of_the_epochs_or_a_bounded_number(case: str) -> None:
    losses = LOSSES[case]
    model = fit_convergence(LossPoint(EPOCH * at, loss) for at, loss in enumerate(losses, 1))
    end = None if model is None else steps_to_convergence(model, 0.01, EPOCH)
    done = EPOCH * len(losses)
    left, is_guess = steps_left(end, done, EPOCH)
    assert EPOCH <= left < math.inf
    if end is None or math.isinf(end.value):
        assert (left, is_guess) == (UNKNOWN_EPOCHS * EPOCH, True)
    else:
        assert end.low <= end.value <= end.high
