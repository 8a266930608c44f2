"""What a policy that fits speeds and losses (Optimus) would have measured of the modelled jobs by now, and what it
believes by that.

Before a job is profiled nothing is known of it. Then its speeds with a few numbers of GPUs are, each off by some
percent, and the speed of every size it has really run with; and its losses as far as it has trained. Steps are seconds
of work at the pace of its trace.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ganger_master.core.model import Gang, JobRecord
from ganger_master.estimators.speed import AllReduceModel
from ganger_master.planner.job_estimates import Fits
from ganger_master.policies.optimus_belief import NOTHING, OptimusEstimate, first_sizes, steps_left
from ganger_master.simulator.measurement_model import Losses

# Measured speeds scatter by this part.
_NOISE = 0.05


class ModelledEstimates:
    """`work_done(position)`: steps; `true_rate(position, GPUs)`: steps a second, the noise is added here;
    `is_profiled(position)`."""

    def __init__(
        self,
        losses: Losses,
        work_done: Callable[[int], float],
        true_rate: Callable[[int, int], float],
        is_profiled: Callable[[int], bool],
        gpus_per_node: int,
        seed: int,
    ) -> None:
        self._losses = losses
        self._work_done = work_done
        self._true_rate = true_rate
        self._is_profiled = is_profiled
        self._gpus_per_node = gpus_per_node
        self._seed = seed
        self._fits = Fits()
        # With each number of GPUs it has had, the seconds of a step.
        self._seconds: dict[int, dict[int, float]] = {}

    def believed(self, jobs: Sequence[tuple[JobRecord, Gang | None]]) -> list[OptimusEstimate]:
        """Of live jobs, with the gangs they have."""
        return [self._believed(job, gang) for job, gang in jobs]

    def forget(self, number: int) -> None:
        """It has ended."""
        self._fits.forget(number)
        self._seconds.pop(number, None)

    def _believed(self, job: JobRecord, gang: Gang | None) -> OptimusEstimate:
        at = job.number - 1
        if not self._is_profiled(at):
            return NOTHING
        done = self._work_done(at)
        epoch_s = self._losses.epoch_s(at)
        threshold = self._losses.threshold(at)
        whole = self._fits.end(
            job.number, int(done / epoch_s), lambda: self._losses.points(at, done), threshold, epoch_s
        )
        left, is_guess = steps_left(whole, done, epoch_s)
        return OptimusEstimate(left, is_guess, self._speed(job, gang))

    def _speed(self, job: JobRecord, gang: Gang | None) -> AllReduceModel | None:
        spec = job.spec
        seconds = self._seconds.get(job.number)
        if seconds is None:
            each = spec.roles[0].shape.gpus
            least, most = (spec.gpus_min, spec.gpus_max) if spec.is_elastic else (spec.gpus, spec.gpus)
            sizes = first_sizes(least, most, each)
            seconds = self._seconds[job.number] = {gpus: self._step_s(job.number - 1, gpus) for gpus in sizes}
        if gang is not None and job.running_since and gang.devices not in seconds:
            seconds[gang.devices] = self._step_s(job.number - 1, gang.devices)
        return self._fits.speed(job.number, seconds, self._gpus_per_node)

    def _step_s(self, at: int, gpus: int) -> float:
        scatter = float(np.random.default_rng([self._seed, 3, at, gpus]).standard_normal())
        return 1.0 / (self._true_rate(at, gpus) * max(0.1, 1.0 + _NOISE * scatter))
