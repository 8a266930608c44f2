"""Estimates for live elastic jobs from their reports: the steps left, and the rate with other numbers of GPUs (Optimus,
EuroSys 2018, section 3).

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
from typing import Final, Protocol

from ganger_master.core.gang_model import Gang
from ganger_master.core.job_model import JobRecord
from ganger_master.estimators.convergence import LossPoint, StepsLeftEstimate, fit_convergence, steps_to_convergence
from ganger_master.estimators.speed import AllReduceModel, StepPoint, fit_allreduce
from ganger_master.planner.job_measures import JobMeasures
from ganger_master.policies.optimus_sizes import NOTHING, Believed, OptimusEstimate, steps_left

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

    def keep(self, is_live: Callable[[int], bool]) -> None:
        """Drop the jobs that are not live."""
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


class RatesByGpusSource(Protocol):
    def rates(self, number: int) -> Mapping[int, float]:
        """Return the rate last measured with each number of GPUs, in steps per second."""
        ...


@dataclass(frozen=True, slots=True)
class LossReport:
    """Steps done; the loss there, NaN if it is not known; passes over the data done, and in total, zero if not
    reported."""

    step: int
    loss: float = math.nan
    passes: int = 0
    passes_in_all: int = 0


@dataclass(slots=True)
class ReportedLosses:
    """Points of the loss curve of a job. `each`: reports that a point stands for; `open`: those of the next point."""

    last: LossReport = field(default_factory=lambda: LossReport(0))
    points: list[LossPoint] = field(default_factory=list)
    each: int = 1
    open: list[LossPoint] = field(default_factory=list)
    # Steps of a pass; zero until the first one is done.
    pass_steps: float = 0.0


class JobEstimates(JobMeasures[ReportedLosses]):
    """Estimates by job number. One writer. Lost reports are collected again."""

    def __init__(self, rates: RatesByGpusSource) -> None:
        super().__init__()
        self._rates = rates
        self._fits = FitCache()

    def record(self, number: int, report: LossReport) -> None:
        known = self._jobs.setdefault(number, ReportedLosses())
        before, known.last = known.last, report
        if report.step < before.step:
            # It resumed from a checkpoint, and repeats these steps.
            known.points = [point for point in known.points if point.step <= report.step]
            known.open = []
        if report.passes > max(0, before.passes):
            # The pass began just now, or, at the first report, some time ago.
            begun = report.passes if before.step else report.passes + 0.5
            known.pass_steps = report.step / begun
        if math.isfinite(report.loss) and report.step > before.step:
            _add(known, LossPoint(report.step, report.loss))

    def forget(self, number: int) -> None:
        super().forget(number)
        self._fits.forget(number)

    def keep(self, is_live: Callable[[int], bool]) -> None:
        super().keep(is_live)
        self._fits.keep(is_live)

    def losses(self, number: int) -> Sequence[LossPoint]:
        """Return the points to fit."""
        known = self._jobs.get(number)
        return () if known is None else (*known.points, *known.open)

    def believed(self, gpus_per_node: int) -> Believed:
        """Return the function that estimates jobs with their gangs; without a measured rate the estimate is empty."""
        return lambda jobs: [self._belief(job, gang, max(1, gpus_per_node)) for job, gang in jobs]

    def _belief(self, job: JobRecord, gang: Gang | None, gpus_per_node: int) -> OptimusEstimate:
        seconds = {gpus: 1.0 / rate for gpus, rate in self._rates.rates(job.number).items() if rate > 0.0}
        known = self._jobs.get(job.number)
        if known is None or not seconds:
            return NOTHING
        left, is_guess = self._left(job, known)
        return OptimusEstimate(left, is_guess, self._fits.speed(job.number, seconds, gpus_per_node))

    def _left(self, job: JobRecord, known: ReportedLosses) -> tuple[float, bool]:
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


def _add(known: ReportedLosses, point: LossPoint) -> None:
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
