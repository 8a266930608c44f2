"""Belief and measurements: the linear case in closed form, and what is left where nothing was measured."""

from __future__ import annotations

import numpy as np
import pytest
from ganger_master.estimators.fitting import Belief, jacobian, posterior


def test_a_linear_law_gives_the_textbook_answer() -> None:
    random = np.random.default_rng(1)
    slopes = random.standard_normal((6, 3))
    root = random.standard_normal((3, 3))
    prior = Belief(random.standard_normal(3), root @ root.T + np.eye(3))
    noise = np.diag(random.uniform(0.01, 0.1, 6))
    measured = random.standard_normal(6)
    found = posterior(prior, lambda numbers: slopes @ numbers, measured, noise)
    precision = np.linalg.inv(prior.covariance) + slopes.T @ np.linalg.inv(noise) @ slopes
    covariance = np.linalg.inv(precision)
    mean = covariance @ (np.linalg.inv(prior.covariance) @ prior.mean + slopes.T @ np.linalg.inv(noise) @ measured)
    assert found.mean == pytest.approx(mean, rel=1e-4)
    assert found.covariance == pytest.approx(covariance, rel=1e-3, abs=1e-6)


def test_correlated_noise_counts_once() -> None:
    prior = Belief.independent(np.zeros(1), np.full(1, 10.0))
    alike = np.array([[1.0, 0.999], [0.999, 1.0]])
    twice = posterior(prior, lambda n: np.repeat(n, 2), np.array([3.0, 3.0]), alike)
    once = posterior(prior, lambda n: n, np.array([3.0]), np.eye(1))
    assert twice.deviations == pytest.approx(once.deviations, rel=1e-2)


def test_what_nothing_measured_stays_as_believed() -> None:
    prior = Belief.independent(np.array([1.0, -2.0]), np.array([0.5, 0.7]))
    assert posterior(prior, lambda n: n[:0], np.zeros(0), np.zeros((0, 0))) is prior
    found = posterior(prior, lambda n: n[:1], np.array([2.0]), 1e-6 * np.eye(1))
    assert found.mean == pytest.approx([2.0, -2.0], abs=1e-3)
    assert found.deviations[1] == pytest.approx(0.7, rel=1e-3)
    assert found.deviations[0] < 0.01


def test_derivatives_are_those_of_the_law() -> None:
    belief = Belief.independent(np.array([0.3, -1.0]), np.array([0.1, 2.0]))
    found = jacobian(belief, lambda n: np.array([np.exp(n[0]), n[0] * n[1]]))
    assert found == pytest.approx(np.array([[np.exp(0.3), 0.0], [-1.0, 0.3]]), abs=1e-6)
