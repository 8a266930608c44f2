"""Which cores are probed: the best set by definition, and few probes on published curves."""

from __future__ import annotations

import numpy as np
import pytest
from estimators.published import GRID, SYNERGY
from ganger_master.estimators.cores_and_memory import CpuModel, CpuPoint, fit_cpu, most_telling, next_probe
from ganger_master.estimators.fitting import fit_error

# Mean error in percent after the sequential design, and the probes it may take.
REACHED = {
    "resnet50": (2.0, 6),
    "mobilenet": (3.0, 6),
    "resnet18": (6.0, 9),
    "m5": (4.0, 9),
    "alexnet": (6.0, 9),
    "shufflenet": (6.0, 9),
    "deepspeech": (1.0, 4),
    "gnmt": (0.1, 2),
}


def profile(rate: dict[int, float], most: int) -> list[CpuPoint]:
    """Follows the sequential design on a curve until it has enough."""
    points: list[CpuPoint] = []
    while (count := next_probe(points, most)) is not None:
        assert count not in {round(point.cores) for point in points}
        points.append(CpuPoint(count, rate[count]))
    return points


def interpolated(name: str) -> dict[int, float]:
    return {count: float(np.interp(count, GRID, SYNERGY[name])) for count in range(1, 25)}


@pytest.mark.parametrize("name", REACHED)
def test_sequential_design_learns_a_published_curve_from_few_probes(name: str) -> None:
    points = profile(interpolated(name), 24)
    model = fit_cpu(points)
    assert model is not None
    mean, most = REACHED[name]
    assert len(points) <= most
    assert 100 * fit_error(model.rates(GRID), SYNERGY[name]).mean <= mean


def test_a_flat_curve_takes_two_probes() -> None:
    assert len(profile(dict.fromkeys(range(1, 65), 5.0), 64)) == 2


def test_one_core_takes_one_probe_and_none_takes_none() -> None:
    assert next_probe([], 0) is None
    assert len(profile({1: 5.0}, 1)) == 1


@pytest.mark.parametrize("theta", [2, 5, 9, 16, 30, 60])
def test_exact_curves_are_learned_within_a_tenth_everywhere(theta: int) -> None:
    truth = CpuModel(0.1, 0.4, float(0.1 * np.log(theta) + 0.4 * theta), theta)
    points = profile({count: truth.rate(count) for count in range(1, 65)}, 64)
    model = fit_cpu(points)
    assert model is not None
    assert len(points) <= 9
    assert fit_error(model.rates(range(1, 65)), truth.rates(range(1, 65))).worst < 0.1


def test_noise_of_three_percent_does_not_keep_the_design_going() -> None:
    random = np.random.default_rng(5)
    truth = CpuModel(0.0, 0.5, 4.0, 8.0)
    for _ in range(20):
        curve = {count: truth.rate(count) * (1 + 0.03 * random.standard_normal()) for count in range(1, 25)}
        points = profile(curve, 24)
        model = fit_cpu(points)
        assert model is not None
        assert len(points) <= 9
        assert fit_error(model.rates(GRID), truth.rates(GRID)).mean < 0.06


def test_the_most_telling_probe_is_the_best_of_all() -> None:
    model = CpuModel(0.2, 0.3, float(0.2 * np.log(6) + 1.8), 6.0)
    known = [CpuPoint(1.0, model.rate(1)), CpuPoint(8.0, model.rate(8))]

    def row(count: float) -> np.ndarray:
        if count >= model.sweet_point:
            return np.array([0.0, 0.0, 1.0 / model.plateau])
        return np.array([np.log(count), count, 0.0]) / model.rate(count)

    def variance(probe: int) -> float:
        rows = [row(count) for count in (1.0, 8.0, float(probe))]
        return float(np.trace(np.linalg.inv(1e-3 * np.eye(3) + sum(np.outer(one, one) for one in rows))))

    assert most_telling(range(2, 6), model, known) == min(range(2, 6), key=variance)
