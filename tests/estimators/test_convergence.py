"""Where a loss is heading: the dossier's synthetic test, real curves, and losses that do not converge."""

from __future__ import annotations

import math
from collections import defaultdict

import numpy as np
import pytest
from estimators.published import rows
from ganger_master.estimators.convergence import (
    MOST_POINTS,
    ConvergenceModel,
    Curve,
    LossPoint,
    fit_convergence,
    steps_to_convergence,
    without_outliers,
)
from hypothesis import example, given, settings
from hypothesis import strategies as st

# The dossier's section 3a.1: l = 1/(0.08 k + 0.5) + 0.25, noise, one point half as high again.
TRUTH = Curve(0.08, 0.5, 0.25)
THRESHOLD = 0.001


def fitted(points: list[LossPoint]) -> ConvergenceModel:
    model = fit_convergence(points)
    assert model is not None
    return model


def converged_at() -> float:
    return TRUTH.slow_from(THRESHOLD * TRUTH.loss(0), 1.0) + 1.0


def seen(progress: float, noise: float, random: np.random.Generator) -> list[LossPoint]:
    steps = np.arange(int(converged_at() * progress))
    losses = np.array([TRUTH.loss(float(k)) for k in steps]) * (1.0 + noise * random.standard_normal(len(steps)))
    losses[len(steps) // 2] *= 1.5
    return [LossPoint(float(k), float(loss)) for k, loss in zip(steps, losses, strict=True)]


# Mean error in percent the dossier's own implementation reached at 10, 30 and 50 % progress, for 1 % and 3 % noise.
@pytest.mark.parametrize(
    ("progress", "noise", "limit"),
    [(0.1, 0.01, 21), (0.1, 0.03, 20), (0.3, 0.01, 9), (0.3, 0.03, 5), (0.5, 0.01, 3), (0.5, 0.03, 5)],
)
def test_steps_to_convergence_are_known_better_than_in_the_dossier(progress: float, noise: float, limit: float) -> None:
    random = np.random.default_rng(11)
    errors, held = [], 0
    for _ in range(30):
        model = fitted(seen(progress, noise, random))
        threshold = THRESHOLD * TRUTH.loss(0) / model.largest_loss
        found = steps_to_convergence(model, threshold, 1.0)
        errors.append(abs(found.value / converged_at() - 1.0))
        held += found.low <= converged_at() <= found.high
    assert 100 * np.mean(errors) <= limit
    # a range of nominal 90 %; noise in proportion to the loss takes some of it
    assert held >= 20


@pytest.mark.parametrize("progress", [0.1, 0.3, 0.5, 0.9])
def test_without_noise_the_curve_comes_back_exactly_outlier_or_not(progress: float) -> None:
    points = seen(progress, 0.0, np.random.default_rng(0))
    model = fitted(points)
    found = steps_to_convergence(model, THRESHOLD * TRUTH.loss(0) / model.largest_loss, 1.0)
    assert found.value == pytest.approx(converged_at(), rel=1e-3)
    assert model.points == len(points) - 1


def test_error_falls_with_progress_on_measured_validation_curves() -> None:
    """Sia's measured metrics, learning-rate steps and all: the last value predicted from the first part."""
    curves: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for row in rows("profile_sia_validation.csv"):
        if row["app"] in ("cifar10", "ncf", "imagenet"):
            curves[row["app"], row["batch_size"]].append((float(row["iteration"]), float(row["metric"])))
    wrong: dict[float, list[float]] = {0.3: [], 0.5: [], 0.7: []}
    for curve in curves.values():
        top = 100.0 if max(metric for _, metric in curve) > 1.5 else 1.0
        points = [LossPoint(step, 1.0 - metric / top) for step, metric in curve]
        final = float(np.median([point.loss for point in points[-3:]]))
        for progress, errors in wrong.items():
            if len(points) >= 10:
                model = fitted(points[: int(len(points) * progress)])
                errors.append(abs(model.best.loss(points[-1].step) - final))
    assert len(wrong[0.5]) > 15
    means = [float(np.mean(wrong[progress])) for progress in (0.3, 0.5, 0.7)]
    assert means[0] > means[1] > means[2]
    assert means[1] < 0.03
    assert means[2] < 0.015


@given(st.floats(1e-4, 1.0), st.floats(0.05, 2.0), st.floats(0.0, 2.0), st.floats(1e-5, 0.1), st.floats(0.5, 100.0))
def test_first_slow_step_is_where_the_loss_first_falls_that_little(
    b0: float, b1: float, b2: float, least: float, stride: float
) -> None:
    curve = Curve(b0, b1, b2)
    step = curve.slow_from(least, stride)
    decrease = curve.loss(step) - curve.loss(step + stride)
    assert decrease <= least * (1 + 1e-6)
    if step > 0.0:
        assert decrease == pytest.approx(least, rel=1e-4)


def test_patience_adds_strides_and_neither_may_be_zero() -> None:
    model = fitted([LossPoint(float(k), TRUTH.loss(k)) for k in range(40)])
    one, three = (steps_to_convergence(model, 0.001, 1.0, patience) for patience in (1, 3))
    assert three.value == pytest.approx(one.value + 2.0)
    for stride, patience in ((0.0, 1), (math.nan, 1), (1.0, 0)):
        with pytest.raises(ValueError, match="must be positive"):
            steps_to_convergence(model, 0.001, stride, patience)


def test_fewer_than_three_points_are_no_curve_and_three_have_no_range() -> None:
    assert fit_convergence([]) is None
    assert fit_convergence([LossPoint(0, 2.0), LossPoint(1, 1.0)]) is None
    assert fit_convergence([LossPoint(0, 2.0), LossPoint(0, 1.9), LossPoint(1, 1.0)]) is None
    found = steps_to_convergence(fitted([LossPoint(float(k), TRUTH.loss(k)) for k in range(3)]), 0.001, 1.0)
    assert not found.is_known
    assert found.high == math.inf


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, -1.0])
def test_unusable_points_are_left_out(bad: float) -> None:
    good = [LossPoint(float(k), TRUTH.loss(k)) for k in range(10)]
    assert fit_convergence([*good, LossPoint(3.5, bad), LossPoint(bad, 1.0)]) == fit_convergence(good)


def test_flat_rising_and_zero_losses_have_nothing_left_to_lose() -> None:
    for losses in ([0.7] * 12, [0.5 + 0.01 * k for k in range(12)], [0.0] * 12):
        model = fitted([LossPoint(float(k), loss) for k, loss in enumerate(losses)])
        assert steps_to_convergence(model, 0.01, 1.0).value == pytest.approx(1.0)
        assert model.best.loss(1e6) == pytest.approx(float(np.mean(losses)), abs=0.07)


@settings(max_examples=40)
@given(st.lists(st.builds(LossPoint, st.floats(), st.one_of(st.floats(), st.floats(0.0, 10.0))), max_size=12))
@example([LossPoint(0.0, 0.0), LossPoint(1.0, 0.0), LossPoint(2.0, 1.0)])
@example([LossPoint(0.0, 0.0), LossPoint(1.0, 9e5), LossPoint(9e5, 1.0), LossPoint(1e17, 0.0)])
def test_any_points_give_an_ordered_range_or_none(points: list[LossPoint]) -> None:
    model = fit_convergence(points)
    if model is not None:
        found = steps_to_convergence(model, 0.01, 1.0)
        assert 0.0 <= found.low <= found.value <= found.high


def test_scale_of_loss_and_steps_changes_nothing() -> None:
    plain = seen(0.5, 0.02, np.random.default_rng(3))
    scaled = [LossPoint(1000.0 * point.step, 7.0 * point.loss) for point in plain]
    one = steps_to_convergence(fitted(plain), 0.001, 1.0)
    other = steps_to_convergence(fitted(scaled), 0.001, 1000.0)
    assert other.value == pytest.approx(1000.0 * one.value, rel=1e-3)


def test_many_points_are_averaged_and_say_the_same() -> None:
    random = np.random.default_rng(9)
    points = [LossPoint(k / 100.0, TRUTH.loss(k / 100.0) * (1 + 0.03 * random.standard_normal())) for k in range(5000)]
    model = fitted(points)
    assert 0.9 * MOST_POINTS <= model.points <= MOST_POINTS
    assert model.best.loss(500.0) == pytest.approx(TRUTH.loss(500.0), rel=0.02)


@given(st.lists(st.floats(0.0, 10.0), max_size=20))
def test_outliers_are_replaced_as_a_loop_would(losses: list[float]) -> None:
    found = without_outliers(np.array(losses))
    count = len(losses)
    if count < 5:
        assert found.tolist() == losses
        return
    expected = {i: float(np.median([losses[j] for j in (i - 2, i - 1, i + 1, i + 2)])) for i in range(2, count - 2)}
    typical = float(np.median([abs(losses[i] - middle) for i, middle in expected.items()]))
    limit = 4.0 * max(typical, 1e-6 * max(losses))
    wanted = [
        expected[i] if i in expected and abs(loss - expected[i]) > limit else loss for i, loss in enumerate(losses)
    ]
    assert found.tolist() == wanted
