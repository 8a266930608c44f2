"""Which cores are probed: the best set by definition, and few probes on published curves."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from estimators.published import GRID, SYNERGY
from ganger_master.estimators.cpu import CpuModel, CpuPoint, a_optimal, fit_cpu, next_probe
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


@pytest.mark.parametrize("budget", [1.0, 2.0, 3.0])
def test_a_optimal_set_is_the_best_of_all_sets(budget: float) -> None:
    model = CpuModel(0.2, 0.3, float(0.2 * np.log(6) + 1.8), 6.0)
    cores = range(1, 9)
    cost = {count: 1.0 + 0.1 * count for count in cores}

    def row(count: int) -> np.ndarray:
        if count >= model.sweet_point:
            return np.array([0.0, 0.0, 1.0 / model.plateau])
        return np.array([np.log(count), count, 0.0]) / model.rate(count)

    def variance(chosen: tuple[int, ...]) -> float:
        information = 1e-3 * np.eye(3) + sum((np.outer(row(c), row(c)) for c in chosen), np.zeros((3, 3)))
        return float(np.trace(np.linalg.inv(information)))

    sets = [s for size in range(5) for s in combinations(cores, size) if sum(cost[c] for c in s) <= budget]
    found = a_optimal(cores, budget, model, cost=cost)
    assert sum(cost[count] for count in found) <= budget
    assert variance(found) == pytest.approx(min(variance(chosen) for chosen in sets), rel=1e-6)


def test_a_budget_for_nothing_chooses_nothing_and_many_cores_are_thinned() -> None:
    assert a_optimal(range(1, 25), 0.0) == ()
    assert len(a_optimal(range(1, 1025), 2.0)) == 2
    assert a_optimal([], 3.0) == ()
