"""What is believed of a job before it ran: the numbers of the throughput law for each class of model, and their spread.

Middles and spreads of published measurements, never of the job at hand: synchronisation from all-reduce fits of the
Pollux and Sia profiles (T4, RTX 2080 Ti, A100; see tests), cores and memory from Synergy's profiles and the SoCC 2018
poster, locality from Xiao et al. (SOSP 2017 SRC) and Chronus. Jobs that have run teach their class (`taught`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from enum import Enum, IntEnum

import numpy as np

from ganger_master.models.accuracy import Floats
from ganger_master.models.interference import UNKNOWN_DEVICE, Contention
from ganger_master.models.posterior import Belief


class Number(IntEnum):
    """The numbers of the law (see throughput); shares are of the seconds one GPU computes for a reference step."""

    SCALE = 0  # log seconds to compute a reference step on one GPU
    FIXED = 1  # logit of the share of it that does not shrink with the batch
    LOCAL = 2  # log share: synchronising two GPUs in one server
    LOCAL_PER_GPU = 3  # log share: ... for each GPU beyond two
    ACROSS = 4  # log share: synchronising two GPUs in two servers
    ACROSS_PER_GPU = 5  # log share: ... for each GPU beyond two
    ACROSS_PER_NODE = 6  # log share: ... for each server beyond two
    OVERLAP = 7  # logit of Pollux's gamma between 1 and 10
    INSIDE = 8  # log growth of LOCAL for each level wider than NVLINK
    BEYOND = 9  # log growth of ACROSS for each level wider than RACK
    CORES = 10  # log of P2 / P1: cores for one GPU, were the CPU curve straight
    BEND = 11  # log of 1 + P0 / P1
    MISS = 12  # log share: fetching a reference step's input with nothing cached
    DATASET = 13  # log bytes to cache for one GPU
    SHARING = 14  # log multiplier of utilisation on a shared GPU
    RESIDENT = 15  # log overhead of each resident of a shared GPU
    HOST = 16  # log slowdown by a neighbour under the same switch


class ModelClass(Enum):
    """Kinds of models whose published profiles look alike."""

    UNKNOWN = "unknown"
    IMAGE = "image"
    DETECTION = "detection"
    LANGUAGE = "language"
    SPEECH = "speech"
    RECOMMENDATION = "recommendation"


# Any speed at all: from microseconds to hours a step.
_SCALE_DEVIATION = 4.0
# Medians of LOCAL, LOCAL_PER_GPU, ACROSS, ACROSS_PER_GPU over the fits of each class, at the middle batch (a test
# recomputes them).
_SYNCHRONISING: Mapping[ModelClass, tuple[float, float, float, float]] = {
    ModelClass.UNKNOWN: (0.27, 0.065, 0.53, 0.030),
    ModelClass.IMAGE: (0.15, 0.042, 0.32, 0.025),
    ModelClass.DETECTION: (0.36, 0.16, 1.1, 0.061),
    ModelClass.LANGUAGE: (0.16, 0.054, 0.97, 0.028),
    ModelClass.SPEECH: (0.37, 0.066, 0.43, 0.032),
    ModelClass.RECOMMENDATION: (0.60, 0.082, 1.1, 0.042),
}
# Cores, miss share and gigabytes to cache: Synergy's image models need 3 to 10 cores, its speech models 3 to 8, its
# language models one at most; at 62.5 GB and up memory matters for three of its twelve.
_FEEDING: Mapping[ModelClass, tuple[float, float, float]] = {
    ModelClass.UNKNOWN: (2.0, 0.5, 60.0),
    ModelClass.IMAGE: (5.9, 3.0, 80.0),
    ModelClass.DETECTION: (5.9, 3.0, 80.0),
    ModelClass.LANGUAGE: (0.5, 0.02, 20.0),
    ModelClass.SPEECH: (5.2, 2.0, 100.0),
    ModelClass.RECOMMENDATION: (1.0, 0.5, 20.0),
}
# Natural logarithms; the spread of the fits over all classes.
_SYNCHRONISING_DEVIATION = 0.9
_FEEDING_DEVIATIONS = {
    ModelClass.UNKNOWN: (1.2, 1.5, 1.0),
    # Bi-Att-Flow needs eight cores where other language models need one (SoCC 2018 poster)
    ModelClass.LANGUAGE: (1.2, 1.5, 0.7),
}
_KNOWN_FEEDING_DEVIATIONS = (0.5, 1.0, 0.7)
# A class belief is worth this many jobs when others teach it.
_PRIOR_JOBS = 4.0


def belief_of(model_class: ModelClass = ModelClass.UNKNOWN, contention: Contention = UNKNOWN_DEVICE) -> Belief:
    """The belief over all `Number`s for a job of the class, on GPUs of the given contention."""
    local, local_more, across, across_more = (math.log(share) for share in _SYNCHRONISING[model_class])
    cores, miss, gigabytes = _FEEDING[model_class]
    cores_spread, miss_spread, dataset_spread = _FEEDING_DEVIATIONS.get(model_class, _KNOWN_FEEDING_DEVIATIONS)
    spread = _SYNCHRONISING_DEVIATION
    numbers: dict[Number, tuple[float, float]] = {
        Number.SCALE: (0.0, _SCALE_DEVIATION),
        Number.FIXED: (0.0, 1.5),
        Number.LOCAL: (local, spread),
        Number.LOCAL_PER_GPU: (local_more, spread),
        Number.ACROSS: (across, spread),
        Number.ACROSS_PER_GPU: (across_more, spread),
        Number.ACROSS_PER_NODE: (math.log(0.02), 1.2),
        # gamma of 1.6
        Number.OVERLAP: (math.log(0.6 / 8.4), 1.2),
        Number.INSIDE: (math.log(0.25), 0.8),
        Number.BEYOND: (math.log(0.1), 0.8),
        Number.CORES: (math.log(cores), cores_spread),
        Number.BEND: (0.0, 0.3),
        Number.MISS: (math.log(miss), miss_spread),
        Number.DATASET: (math.log(gigabytes * 1e9), dataset_spread),
        Number.HOST: (math.log(0.05), 1.0),
    }
    mean, deviations = np.zeros(len(Number)), np.ones(len(Number))
    for number, (middle, deviation) in numbers.items():
        mean[number], deviations[number] = middle, deviation
    covariance = np.diag(deviations**2)
    shared = [Number.SHARING, Number.RESIDENT]
    mean[shared] = contention.belief.mean
    covariance[np.ix_(shared, shared)] = contention.belief.covariance
    return Belief(mean, covariance)


def taught(prior: Belief, jobs: Sequence[Belief]) -> Belief:
    """The belief for the next job of a class, from those of jobs that ran: means and variances pooled with the prior,
    which counts as four jobs. A number the jobs learned nothing of stays as it was."""
    if not jobs:
        return prior
    before = prior.deviations**2
    means, learned = np.array([job.mean for job in jobs]), np.array([job.deviations**2 for job in jobs])
    # a job that learned nothing of a number has its prior variance still, and no say
    weights = np.clip(1.0 - learned / before, 0.0, 1.0)
    total = _PRIOR_JOBS + weights.sum(axis=0)
    mean = (_PRIOR_JOBS * prior.mean + (weights * means).sum(axis=0)) / total
    scatter: Floats = (weights * ((means - mean) ** 2 + learned)).sum(axis=0)
    variance = (_PRIOR_JOBS * (before + (prior.mean - mean) ** 2) + scatter) / total
    ratio = np.sqrt(variance / before)
    return Belief(mean, prior.covariance * np.outer(ratio, ratio))
