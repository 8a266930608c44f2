"""The losses that modelled jobs report as they train: l(k) = 1/(b0*k + b1) + b2 of epoch k, with noise, until it has
converged.

Optimus (EuroSys 2018, section 3.1) fits this curve, and its jobs end when an epoch lowers the loss by less than their
owner said, 1 to 5 % of the largest loss. How steep a curve is, how high its floor and how patient the owner are drawn
for each job by the seed (declared here, for the paper publishes none); with them it is known how many epochs it takes,
and how much work is in one follows from the work after which the job converges. That is when it ends, if the trace says
nothing else (`converges_s`): a job that is stopped earlier, or goes on, misleads whoever believes its losses.
"""

from __future__ import annotations

import math

import numpy as np

from ganger_master.estimators.convergence import Curve, LossPoint
from ganger_master.simulator.traces.workload import Workload

# Epochs it takes for the falling part to halve, the floor as a part of the first loss, what the owner gives an epoch
# at least to fall, of the first loss.
_HALVES, _FLOORS, _THRESHOLDS = (2.0, 20.0), (0.1, 0.5), (0.01, 0.05)
_NOISE = 0.03
POINTS_AN_EPOCH = 10


class Losses:
    """Of the jobs of a workload, by position."""

    def __init__(self, jobs: Workload, seed: int) -> None:
        count = len(jobs)
        random = np.random.default_rng([seed, 1])
        self._slope = 1.0 / np.exp(random.uniform(math.log(_HALVES[0]), math.log(_HALVES[1]), count))
        floor = random.uniform(*_FLOORS, count)
        self._floor = floor / (1.0 - floor)
        self._threshold = random.uniform(*_THRESHOLDS, count)
        self._work = np.where(np.isnan(jobs.converges_s), jobs.duration_s, jobs.converges_s)
        self._seed = seed

    def threshold(self, job: int) -> float:
        """Converged is what falls by less than this part of the largest loss in an epoch; its owner says so."""
        return float(self._threshold[job])

    def epoch_s(self, job: int) -> float:
        """Work in an epoch: what the size of its data tells."""
        curve = self._curve(job)
        return float(self._work[job]) / (curve.slow_from(self.threshold(job) * curve.loss(0.0), 1.0) + 1.0)

    def points(self, job: int, done_s: float) -> list[LossPoint]:
        """What it has reported by now, by work done."""
        curve, each = self._curve(job), self.epoch_s(job) / POINTS_AN_EPOCH
        count = math.floor(done_s / each)
        noise = np.random.default_rng([self._seed, 2, job]).standard_normal(count)
        return [
            LossPoint(at * each, curve.loss(at / POINTS_AN_EPOCH) * max(0.1, 1.0 + _NOISE * scatter))
            for at, scatter in enumerate(noise.tolist(), 1)
        ]

    def _curve(self, job: int) -> Curve:
        """By epoch; falls from one to the floor."""
        return Curve(float(self._slope[job]), 1.0, float(self._floor[job]))
