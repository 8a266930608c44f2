"""Estimates for live jobs from their reports: received device time, and for elastic ones the steps left and the rate
with other numbers of GPUs (Optimus, EuroSys 2018, section 3).

A job that reports a convergence criterion (`submit --converges`) ends where its fitted losses meet it; one that reports
only its number of passes over the data (`job.epochs`) ends with these, and no job goes beyond them. A job that reports
neither counts as needing twenty more passes, as in Optimus's public code, or, before the end of its first pass, as many
steps as it has done. Such an end, and one that the losses do not show yet, is a guess. Fits are cached: each takes some
milliseconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from ganger_master.core.job_model import JobRecord
from ganger_master.estimators.convergence import LossPoint, StepsLeftEstimate, fit_convergence, steps_to_convergence
from ganger_master.estimators.speed import AllReduceModel, StepPoint, fit_allreduce
from ganger_master.policies.optimus_sizes import NOTHING, OptimusEstimate, steps_left

# Passes over the data before the first fit of losses, and their growth until the next one.
_FIRST_PASSES: Final = 2
_REFIT: Final = 1.2
# Rates that differ by no more than this need no new fit.
_ALIKE: Final = 0.05


class FitCache:
    """Fits by job number. One writer."""

    def __init__(self) -> None:
        self._ends: dict[int, tuple[int, StepsLeftEstimate | None]] = {}
        self._speeds: dict[int, tuple[Mapping[int, float], AllReduceModel | None]] = {}

    def forget(self, number: int) -> None:
        self._ends.pop(number, None)
        self._speeds.pop(number, None)

    def end(
        self,
        number: int,
        passes: int,
        losses: Callable[[], Iterable[LossPoint]],
        least_decrease: float,
        pass_steps: float,
        in_a_row: int = 1,
    ) -> StepsLeftEstimate | None:
        """Return the steps from the start until convergence, by the losses of so many `passes` of `pass_steps` each;
        None while there are too few. The rest as in `steps_to_convergence`."""
        if passes < _FIRST_PASSES:
            return None
        known = self._ends.get(number)
        if known is None or passes >= _REFIT * known[0] or passes < known[0]:
            model = fit_convergence(losses())
            end = None if model is None else steps_to_convergence(model, least_decrease, pass_steps, in_a_row)
            known = self._ends[number] = passes, end
        return known[1]

    def speed(self, number: int, seconds: Mapping[int, float], gpus_per_node: int) -> AllReduceModel | None:
        """Return the model of the rate by the seconds per step with each measured number of GPUs; None without any. A
        step has the same samples at every size, divided among its GPUs."""
        known = self._speeds.get(number)
        if known is None or not _is_alike(known[0], seconds):
            model = fit_allreduce(_points(seconds, gpus_per_node))
            known = self._speeds[number] = dict(seconds), model
        return known[1]


def _points(seconds: Mapping[int, float], gpus_per_node: int) -> Sequence[StepPoint]:
    return [StepPoint(gpus, -(-gpus // gpus_per_node), 1.0 / gpus, seconds[gpus]) for gpus in sorted(seconds)]


def _is_alike(known: Mapping[int, float], seconds: Mapping[int, float]) -> bool:
    if known.keys() != seconds.keys():
        return False
    return all(abs(seconds[gpus] - was) <= _ALIKE * was for gpus, was in known.items())


# Loss points of a job; beyond that, neighbours are averaged, which halves them.
MOST_POINTS: Final = 256


# Seconds between two reports of a job that steps all the time, at most.
_STEADY_S: Final = 2.5
# The time per step grows at most by this factor; it shrinks at once.
_SLOWER: Final = 1.1


@dataclass(slots=True)
class AttainedTime:
    """Device time that a job has received: a time-sliced one steps only in its slices. `step` was done at `time_s`.

    Between two close reports it stepped all the time; between two distant ones its steps count, each with the job's
    time per step.
    """

    step: int
    time_s: float
    step_s: float = math.inf
    received_s: float = 0.0

    def follow(self, step: int, time_s: float) -> None:
        """Take the next report into account."""
        steps, span_s = step - self.step, time_s - self.time_s
        self.step, self.time_s = step, time_s
        if steps <= 0 or span_s <= 0.0:
            return
        if span_s <= _STEADY_S:
            self.received_s += span_s
            self.step_s = span_s / steps
            return
        self.step_s = min(_SLOWER * self.step_s, span_s / steps)
        self.received_s += min(span_s, steps * self.step_s)


@dataclass(slots=True)
class ReportedLosses:
    """What a job last reported, and points of its loss curve. `each`: reports that a point stands for; `open`: those of
    the next point."""

    step: int = 0
    # Passes over the data done, and in total; zero if not reported.
    passes: int = 0
    passes_in_all: int = 0
    points: list[LossPoint] = field(default_factory=list)
    each: int = 1
    open: list[LossPoint] = field(default_factory=list)
    # Steps of a pass; zero until the first one is done.
    pass_steps: float = 0.0

    def record(self, step: int, loss: float, passes: int, passes_in_all: int) -> None:
        """Take a report into account. `loss`: NaN if it is not known."""
        if step < self.step:
            # It resumed from a checkpoint, and repeats these steps.
            self.points = [point for point in self.points if point.step <= step]
            self.open = []
        if passes > max(0, self.passes):
            # The pass began just now, or, at the first report, some time ago.
            begun = passes if self.step else passes + 0.5
            self.pass_steps = step / begun
        if math.isfinite(loss) and step > self.step:
            self._add(LossPoint(step, loss))
        self.step, self.passes, self.passes_in_all = step, passes, passes_in_all

    @property
    def curve(self) -> Sequence[LossPoint]:
        """Return the points to fit."""
        return (*self.points, *self.open)

    def _add(self, point: LossPoint) -> None:
        self.open.append(point)
        if len(self.open) < self.each:
            return
        self.points.append(_mean(self.open))
        self.open = []
        if len(self.points) >= MOST_POINTS:
            self.points = [_mean(self.points[at : at + 2]) for at in range(0, len(self.points), 2)]
            self.each *= 2


def belief_of(
    job: JobRecord, losses: ReportedLosses | None, rates: Mapping[int, float], fits: FitCache, gpus_per_node: int
) -> OptimusEstimate:
    """Return the estimate of a job. `rates`: in steps/s by number of GPUs; without any, or without a report, the
    estimate is empty."""
    seconds = {gpus: 1.0 / rate for gpus, rate in rates.items() if rate > 0.0}
    if losses is None or not seconds:
        return NOTHING
    left, is_guess = _left(job, losses, fits)
    return OptimusEstimate(left, is_guess, fits.speed(job.number, seconds, gpus_per_node))


def _left(job: JobRecord, losses: ReportedLosses, fits: FitCache) -> tuple[float, bool]:
    done, pass_steps = losses.step, losses.pass_steps
    if not pass_steps:
        return max(1.0, done), True
    end, spec = None, job.spec
    if spec.least_decrease:
        end = fits.end(
            job.number, losses.passes, lambda: losses.curve, spec.least_decrease, pass_steps, spec.converged_passes
        )
    left, is_guess = steps_left(end, done, pass_steps)
    most = losses.passes_in_all * pass_steps
    if most and (most - done <= left or not spec.least_decrease):
        return max(1.0, most - done), False
    return left, is_guess


def _mean(points: Sequence[LossPoint]) -> LossPoint:
    count = len(points)
    return LossPoint(sum([point.step for point in points]) / count, sum([point.loss for point in points]) / count)
