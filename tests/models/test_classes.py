"""Beliefs by class: where they come from, and how jobs that ran teach them."""

from __future__ import annotations

import math

import numpy as np
import pytest
from ganger_master.models.allreduce import fit_allreduce
from ganger_master.models.classes import ModelClass, Number, belief_of, taught
from ganger_master.models.cpu import fit_cpu
from ganger_master.models.interference import UNKNOWN_DEVICE, Pressure, Trial, learn
from ganger_master.models.posterior import Belief
from models.published import step_points, synergy_points

APPLICATIONS = {
    "bert": ModelClass.LANGUAGE,
    "cifar10": ModelClass.IMAGE,
    "imagenet": ModelClass.IMAGE,
    "deepspeech2": ModelClass.SPEECH,
    "ncf": ModelClass.RECOMMENDATION,
    "yolov3": ModelClass.DETECTION,
}


@pytest.mark.parametrize("model_class", ModelClass)
def test_every_class_has_a_proper_belief(model_class: ModelClass) -> None:
    belief = belief_of(model_class)
    assert belief.mean.shape == (len(Number),)
    assert np.all(np.linalg.eigvalsh(belief.covariance) > 0.0)
    assert belief.deviations[Number.SCALE] > 3.0


def shares() -> dict[ModelClass, list[list[float]]]:
    """LOCAL, LOCAL_PER_GPU, ACROSS, ACROSS_PER_GPU of every published profile's fit at its middle batch."""
    found: dict[ModelClass, list[list[float]]] = {model_class: [] for model_class in ModelClass}
    for (application, _), points in step_points().items():
        batches = sorted({point.samples for point in points})
        middle = batches[len(batches) // 2]
        model = fit_allreduce([point for point in points if point.samples == middle])
        assert model is not None
        compute = model.compute_seconds(middle)
        row = [model.local, model.local_per_gpu, model.across, model.across_per_gpu]
        for model_class in (APPLICATIONS[application], ModelClass.UNKNOWN):
            found[model_class].append([seconds / compute for seconds in row])
    return found


def test_synchronising_beliefs_are_the_middle_of_the_published_profiles() -> None:
    numbers = [Number.LOCAL, Number.LOCAL_PER_GPU, Number.ACROSS, Number.ACROSS_PER_GPU]
    for model_class, rows in shares().items():
        belief = belief_of(model_class)
        assert np.exp(belief.mean[numbers]) == pytest.approx(np.median(rows, axis=0), rel=0.05), model_class
        far = np.abs(np.log(rows) - belief.mean[numbers]) > 2.0 * belief.deviations[numbers]
        assert float(np.mean(far)) < 0.2, model_class


def test_feeding_beliefs_hold_synergys_curves() -> None:
    kinds = {"resnet50": ModelClass.IMAGE, "alexnet": ModelClass.IMAGE, "m5": ModelClass.SPEECH}
    for name, model_class in kinds.items():
        curve = fit_cpu(synergy_points(name))
        assert curve is not None
        belief = belief_of(model_class)
        cores = math.log(curve.peak / curve.linear_coefficient)
        assert abs(cores - belief.mean[Number.CORES]) < 2.0 * belief.deviations[Number.CORES]


def test_contention_of_the_device_is_part_of_the_belief() -> None:
    learned = learn(UNKNOWN_DEVICE, [Trial((Pressure(0.9), Pressure(0.9)), (0.4, 0.4))])
    belief = belief_of(contention=learned)
    assert math.exp(belief.mean[Number.SHARING]) == pytest.approx(learned.multiplier)
    assert belief.covariance[Number.SHARING, Number.RESIDENT] == pytest.approx(learned.belief.covariance[0, 1])


def test_jobs_teach_what_they_learned_and_nothing_else() -> None:
    prior = belief_of()
    mean, deviations = prior.mean.copy(), prior.deviations
    mean[Number.CORES], deviations[Number.CORES] = math.log(8.0), 0.1
    jobs = [Belief.independent(mean, deviations)] * 12
    after = taught(prior, jobs)
    assert prior.mean[Number.CORES] < after.mean[Number.CORES] < math.log(8.0)
    assert after.mean[Number.CORES] == pytest.approx(math.log(8.0), abs=0.4)
    others = [number for number in Number if number is not Number.CORES]
    assert after.mean[others] == pytest.approx(prior.mean[others])
    assert after.deviations[others] == pytest.approx(prior.deviations[others])
    assert np.all(np.linalg.eigvalsh(after.covariance) > 0.0)


def test_jobs_that_disagree_widen_the_belief_and_no_jobs_leave_it() -> None:
    prior = belief_of(ModelClass.SPEECH)
    low, high = (Belief.independent(prior.mean + shift, 0.2 * prior.deviations) for shift in (-2.0, 2.0))
    after = taught(prior, [low, high] * 6)
    assert after.deviations[Number.CORES] > prior.deviations[Number.CORES]
    assert taught(prior, []) is prior
