"""Fits of what jobs report, kept and made anew only once there is more to fit: each takes some milliseconds.

What is believed of live elastic jobs by what they report: how many steps each has left, and how fast it would go
with other numbers of GPUs (Optimus, EuroSys 2018, section 3).

Of a job that says when it has converged (`submit --converges`) the end is where its fitted losses come to that; of one
that only says how many passes over its data it makes (`job.epochs`) it is their end, and no job goes on beyond that. Of
one that says neither nobody knows: it counts as needing twenty passes more, as in Optimus's public code, or, while not
even one is over, as much as it has done. Such an end, and one that the losses do not tell yet, is a guess.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol, TypeAlias

from ganger_master.core.model import Gang, JobRecord
from ganger_master.estimators.convergence import LossPoint, StepsLeftEstimate, fit_convergence, steps_to_convergence
from ganger_master.estimators.speed import AllReduceModel, StepPoint, fit_allreduce
from ganger_master.policies.optimus_sizes import NOTHING, Believed, OptimusEstimate, steps_left

# Losses are fitted from so many passes over the data on, and anew once there are so many times as many.
_FIRST_PASSES: Final = 2
_REFIT: Final = 1.2
# Speeds that are off by no more say the same.
_ALIKE: Final = 0.05


class FitCache:
    """By job number. One writer."""

    def __init__(self) -> None:
        self._ends: dict[int, tuple[int, StepsLeftEstimate | None]] = {}
        self._speeds: dict[int, tuple[Mapping[int, float], AllReduceModel | None]] = {}

    def forget(self, number: int) -> None:
        self._ends.pop(number, None)
        self._speeds.pop(number, None)

    def keep(self, is_live: Callable[[int], bool]) -> None:
        """Forgets all others."""
        for number in [number for number in {*self._ends, *self._speeds} if not is_live(number)]:
            self.forget(number)

    def end(
        self,
        number: int,
        passes: int,
        losses: Callable[[], Iterable[LossPoint]],
        least_decrease: float,
        pass_steps: float,
        in_a_row: int = 1,
    ) -> StepsLeftEstimate | None:
        """Steps from the start until its losses have converged, by those of so many `passes` over its data, each of
        `pass_steps`; None while they say too little. The rest as `steps_to_convergence` has it."""
        if passes < _FIRST_PASSES:
            return None
        known = self._ends.get(number)
        if known is None or passes >= _REFIT * known[0] or passes < known[0]:
            model = fit_convergence(losses())
            end = None if model is None else steps_to_convergence(model, least_decrease, pass_steps, in_a_row)
            known = self._ends[number] = passes, end
        return known[1]

    def speed(self, number: int, seconds: Mapping[int, float], gpus_per_node: int) -> AllReduceModel | None:
        """By the seconds of a step with each number of GPUs that was measured; None where none was. The same samples a
        step whatever the size, so a GPU has its part of them."""
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


# Of a job; beyond, neighbours are averaged, so that there are half as many.
MOST_POINTS: Final = 256


class RatesByGpusSource(Protocol):
    def rates(self, number: int) -> Mapping[int, float]:
        """Steps a second by number of GPUs, as last measured with each."""
        ...


@dataclass(frozen=True, slots=True)
class LossReport:
    """Boundaries passed; the loss there, NaN where it is not known; passes over the data behind it, and in all, zero
    where nobody says."""

    step: int
    loss: float = math.nan
    passes: int = 0
    passes_in_all: int = 0


@dataclass(slots=True)
class _Known:
    """Every point stands for so many reports; `open` are those of the next one."""

    last: LossReport = field(default_factory=lambda: LossReport(0))
    points: list[LossPoint] = field(default_factory=list)
    each: int = 1
    open: list[LossPoint] = field(default_factory=list)
    # Steps of a pass; zero until one is over.
    pass_steps: float = 0.0


Remembered: TypeAlias = Mapping[int, _Known]


class JobEstimates:
    """By job number; one writer. Lost, it is measured again."""

    def __init__(self, rates: RatesByGpusSource) -> None:
        self._rates = rates
        self._fits = FitCache()
        self._jobs: dict[int, _Known] = {}

    def record(self, number: int, report: LossReport) -> None:
        known = self._jobs.setdefault(number, _Known())
        before, known.last = known.last, report
        if report.step < before.step:
            # It goes on from a checkpoint, and comes to these steps once more.
            known.points = [point for point in known.points if point.step <= report.step]
            known.open = []
        if report.passes > max(0, before.passes):
            # Seen as it began, or, if it is the first that is heard of it, somewhere in it.
            begun = report.passes if before.step else report.passes + 0.5
            known.pass_steps = report.step / begun
        if math.isfinite(report.loss) and report.step > before.step:
            _add(known, LossPoint(report.step, report.loss))

    def forget(self, number: int) -> None:
        self._jobs.pop(number, None)
        self._fits.forget(number)

    def keep(self, is_live: Callable[[int], bool]) -> None:
        """Forgets all others: nobody said how they ended."""
        for number in [number for number in self._jobs if not is_live(number)]:
            self.forget(number)
        self._fits.keep(is_live)

    @property
    def remembered(self) -> Remembered:
        """For one that goes on from there; what was fitted to it is fitted anew."""
        return self._jobs

    def recall(self, remembered: Remembered) -> None:
        """What one before this remembered."""
        self._jobs = dict(remembered)

    def losses(self, number: int) -> Sequence[LossPoint]:
        """What there is to fit."""
        known = self._jobs.get(number)
        return () if known is None else (*known.points, *known.open)

    def believed(self, gpus_per_node: int) -> Believed:
        """Of jobs with the gangs they have; nothing of those whose speed was not measured yet."""
        return lambda jobs: [self._belief(job, gang, max(1, gpus_per_node)) for job, gang in jobs]

    def _belief(self, job: JobRecord, gang: Gang | None, gpus_per_node: int) -> OptimusEstimate:
        seconds = {gpus: 1.0 / rate for gpus, rate in self._rates.rates(job.number).items() if rate > 0.0}
        known = self._jobs.get(job.number)
        if known is None or not seconds:
            return NOTHING
        left, is_guess = self._left(job, known)
        return OptimusEstimate(left, is_guess, self._fits.speed(job.number, seconds, gpus_per_node))

    def _left(self, job: JobRecord, known: _Known) -> tuple[float, bool]:
        done, pass_steps = known.last.step, known.pass_steps
        if not pass_steps:
            return max(1.0, done), True
        end, spec = None, job.spec
        if spec.least_decrease:
            end = self._fits.end(
                job.number,
                known.last.passes,
                lambda: self.losses(job.number),
                spec.least_decrease,
                pass_steps,
                spec.converged_passes,
            )
        left, is_guess = steps_left(end, done, pass_steps)
        most = known.last.passes_in_all * pass_steps
        if most and (most - done <= left or not spec.least_decrease):
            return max(1.0, most - done), False
        return left, is_guess


def _add(known: _Known, point: LossPoint) -> None:
    known.open.append(point)
    if len(known.open) < known.each:
        return
    known.points.append(_mean(known.open))
    known.open = []
    if len(known.points) >= MOST_POINTS:
        known.points = [_mean(known.points[at : at + 2]) for at in range(0, len(known.points), 2)]
        known.each *= 2


def _mean(points: Sequence[LossPoint]) -> LossPoint:
    count = len(points)
    return LossPoint(sum([point.step for point in points]) / count, sum([point.loss for point in points]) / count)
