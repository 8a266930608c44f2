"""What a policy that fits speeds and losses (Optimus) would have measured of the modelled jobs by now, and what it
believes by that.

Before a job is profiled nothing is known of it. Then its speeds with a few numbers of GPUs are, each off by some
percent, and the speed of every size it has really run with; and its losses as far as it has trained. Steps are seconds
of work at the pace of its trace.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ganger_master.core.model import Gang, Job
from ganger_master.models.allreduce import AllReduceModel, StepPoint, fit_allreduce
from ganger_master.models.convergence import Estimate, fit_convergence, steps_to_convergence
from ganger_master.policies.optimus_belief import NOTHING, Belief, first_sizes, steps_left
from ganger_master.sim.replay.losses import Losses

# Measured speeds scatter by this part.
_NOISE = 0.05
# Losses are fitted from so many epochs on, and anew once there are so many times as many.
_FIRST_EPOCHS, _REFIT = 2, 1.2


class Measured:
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
        self._speeds: dict[int, tuple[frozenset[int], AllReduceModel | None]] = {}
        self._sizes: dict[int, set[int]] = {}
        # Fits of losses, by how many points they are of.
        self._fits: dict[int, tuple[int, Estimate | None]] = {}

    def believed(self, jobs: Sequence[tuple[Job, Gang | None]]) -> list[Belief]:
        """Of live jobs, with the gangs they have."""
        return [self._believed(job, gang) for job, gang in jobs]

    def forget(self, number: int) -> None:
        """It has ended."""
        for kept in (self._speeds, self._sizes, self._fits):
            kept.pop(number, None)

    def _believed(self, job: Job, gang: Gang | None) -> Belief:
        at = job.number - 1
        if not self._is_profiled(at):
            return NOTHING
        done = self._work_done(at)
        epoch_s = self._losses.epoch_s(at)
        left, is_guess = steps_left(self._whole(job.number, done, epoch_s), done, epoch_s)
        return Belief(left, is_guess, self._speed(job, gang))

    def _whole(self, number: int, done: float, epoch_s: float) -> Estimate | None:
        """Steps until the losses have converged, by those reported so far."""
        epochs = int(done / epoch_s)
        if epochs < _FIRST_EPOCHS:
            return None
        known = self._fits.get(number)
        if known is None or epochs >= _REFIT * known[0]:
            model = fit_convergence(self._losses.points(number - 1, done))
            threshold = self._losses.threshold(number - 1)
            whole = None if model is None else steps_to_convergence(model, threshold, epoch_s)
            known = self._fits[number] = epochs, whole
        return known[1]

    def _speed(self, job: Job, gang: Gang | None) -> AllReduceModel | None:
        spec = job.spec
        sizes = self._sizes.get(job.number)
        if sizes is None:
            each = spec.roles[0].shape.gpus
            least, most = (spec.gpus_min, spec.gpus_max) if spec.is_elastic else (spec.gpus, spec.gpus)
            sizes = self._sizes[job.number] = set(first_sizes(least, most, each))
        if gang is not None and job.running_since:
            sizes.add(gang.devices)
        wanted = frozenset(sizes)
        known = self._speeds.get(job.number)
        if known is None or known[0] != wanted:
            points = [self._point(job.number - 1, gpus) for gpus in sorted(wanted)]
            known = self._speeds[job.number] = wanted, fit_allreduce(points)
        return known[1]

    def _point(self, at: int, gpus: int) -> StepPoint:
        scatter = float(np.random.default_rng([self._seed, 3, at, gpus]).standard_normal())
        seconds = 1.0 / (self._true_rate(at, gpus) * max(0.1, 1.0 + _NOISE * scatter))
        # The same samples a step whatever the size, so a GPU has its part of them.
        return StepPoint(gpus, -(-gpus // self._gpus_per_node), 1.0 / gpus, seconds)
