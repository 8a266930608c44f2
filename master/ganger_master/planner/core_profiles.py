"""Measured curves of rate by CPU cores, and the trials of core counts that complete them.

A job starts with the curve of the last job of its series, scaled to its own rates; its points are replaced one by one.
A gain or loss of a probe below significance counts as none, so the tuning takes back the cores that gain nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import log
from statistics import median
from typing import Final, TypeAlias

import numpy as np
from ganger.cluster.resources import Claim
from ganger.cluster.view import View
from ganger.units import counted

from ganger_master.core.gang_model import Gang
from ganger_master.core.job_model import JobRecord
from ganger_master.estimators.cpu import CpuModel, CpuPoint, fit_cpu, next_probe, sweet_point_bracket
from ganger_master.planner.device_groups import shares_devices
from ganger_master.policies.job_facts import Integers
from ganger_master.policies.trials import (
    FIRST_WINDOWS,
    NO_WINDOWS,
    ProgressSample,
    RateWindows,
    TrialPace,
    TrialRates,
    TrialVerdict,
    judge,
)
from ganger_master.policies.tunings import NOTHING, Known, Profiles

# A relative deviation above this from a measured or predicted rate shows that the job has changed, or differs from the
# earlier jobs of its series.
SURPRISE: Final = 0.2


# What a job does between two boundaries. Each has a curve of its own: in an evaluation the input pipeline often limits
# the rate (Xiao et al., SoCC 2018 poster).
TRAINING: Final = "training"
EVALUATION: Final = "evaluation"
# A phase has begun once so many of its mini-batches were seen.
_PHASE_BATCHES: Final = 2
# Points of earlier jobs of a series, by phase.
OfSeries: TypeAlias = "Callable[[str], tuple[CpuPoint, ...]]"


@dataclass(frozen=True, slots=True)
class CoreProfile:
    """Points of one job: cores per GPU and steps/s, in the order in which they were measured."""

    own: tuple[CpuPoint, ...] = ()
    # Of the last job of the series.
    inherited: tuple[CpuPoint, ...] = ()

    @property
    def points(self) -> tuple[CpuPoint, ...]:
        """Own points and scaled inherited ones, at most one for each number of cores."""
        own = {point.cores for point in self.own}
        scale = self._scale
        others = [CpuPoint(one.cores, scale * one.rate) for one in self.inherited if one.cores not in own]
        return (*others, *self.own)

    @property
    def model(self) -> CpuModel | None:
        """Curve through the points; None for fewer than two, which do not show whether more cores help."""
        points = self.points
        return fitted(points) if len(points) > 1 else None

    @property
    def least_cores(self) -> float:
        """Least number of cores per GPU among the points; infinite without points."""
        return min([point.cores for point in self.points], default=math.inf)

    def at(self, cores: float) -> float | None:
        """Return the rate measured with this number of cores per GPU, in steps/s; None if there is none."""
        return next((point.rate for point in self.own if point.cores == cores), None)

    def with_point(self, point: CpuPoint) -> CoreProfile:
        """Return the profile with one more point. A surprising point makes earlier ones void."""
        rate = self.at(point.cores)
        if rate is not None:
            return self if _is_like(point.rate, rate) else CoreProfile((point,))
        if self.own and self.inherited and not _is_like(point.rate, self._rate(point.cores)):
            return replace(self, own=(*self.own, point), inherited=())
        return replace(self, own=(*self.own, point))

    @property
    def _scale(self) -> float:
        """Rate of this job relative to the inherited curve: the geometric mean over its own points."""
        model = fitted(self.inherited) if self.inherited else None
        if model is None or not self.own:
            return 1.0
        ratios = [math.log(point.rate / rate) for point in self.own if (rate := model.rate(point.cores)) > 0.0]
        return math.exp(sum(ratios) / len(ratios)) if ratios else 1.0

    def _rate(self, cores: float) -> float:
        model = fitted(self.points)
        return 0.0 if model is None else model.rate(cores)


@lru_cache(4096)
def fitted(points: tuple[CpuPoint, ...]) -> CpuModel | None:
    """Return the curve through these points. It is cached, since jobs of one series share points."""
    return fit_cpu(points)


def _is_like(rate: float, other: float) -> bool:
    return abs(rate - other) <= SURPRISE * max(rate, other)


# A smaller gain cannot be told from noise within a minute.
LEAST_GAIN: Final = 0.02
# The budget for trials of a job that has run for less is that of an hour.
_FIRST_S: Final = 3600.0
# A trial that has not got its cores by then ends.
_GRANT_S: Final = 10.0
# Free cores are worth a trial beyond this multiple of the most cores measured.
_FAR: Final = 1.25


@dataclass(frozen=True, slots=True)
class CoresTrial:
    """A trial of `millicores` per GPU by a job that had `held` per GPU. `before` are the windows with the held cores,
    in steps/s."""

    millicores: int
    held: int
    before: tuple[float, ...]
    began_s: float


@lru_cache(16_384)
def next_cores(profile: CoreProfile, held_millicores: int, free_millicores: int) -> int | None:
    """Return the whole number of cores per GPU to try next; None if no trial is worthwhile or possible now.
    `held_millicores` and `free_millicores` are per GPU: those that the job holds, and free ones that it could get
    besides."""
    available = (held_millicores + free_millicores) // 1000
    points = profile.points
    if not points or available < 1:
        return None
    if profile.inherited and len(profile.own) == 1:
        check = _check(profile, held_millicores / 1000, available)
        if check is not None:
            return check
    largest = max(point.cores for point in points)
    _, enough = sweet_point_bracket(points)
    # More cores gain nothing beyond a measured plateau, and the number of free cores fluctuates.
    is_far = available > _FAR * largest and enough >= largest
    found = next_probe(points, available if is_far else max(1, round(largest)))
    if found is None or found > available or found * 1000 == held_millicores:
        return None
    return found


def _check(profile: CoreProfile, held: float, available: int) -> int | None:
    """Return the inherited point farthest from the held cores per GPU; None if none can be reached. One such probe
    checks whether the inherited curve holds for this job. Without it the job might keep the optimum of another job for
    ever."""
    inherited = {round(point.cores) for point in profile.inherited}
    within_reach = sorted(cores for cores in inherited if 1 <= cores <= available and cores != held)
    return max(within_reach, key=lambda cores: abs(log(cores / held)), default=None)


def conclude(trial: CoresTrial, after: tuple[float, ...], is_last: bool = False) -> CpuPoint | None:
    """Return the point that a trial has measured; None while it is inconclusive. `after`: windows with the cores under
    trial, in steps/s. `is_last`: no window will follow, so an inconclusive gain or loss counts as none."""
    is_more = trial.millicores > trial.held
    threshold = 1.0 + (LEAST_GAIN if is_more else -LEAST_GAIN)
    verdict = judge([TrialRates(trial.before, after)], threshold).verdict
    if verdict is TrialVerdict.MEASURE and not (is_last and len(after) >= FIRST_WINDOWS):
        return None
    is_other = (verdict is TrialVerdict.KEEP) == is_more
    return CpuPoint(trial.millicores / 1000, median(after if is_other else trial.before))


# What a rate depends on: the epoch, and the millicores of each claim by socket.
_Running: TypeAlias = tuple[int, tuple[tuple[int, ...], ...]]


@dataclass(frozen=True, slots=True)
class ProfiledCores:
    """Profile and trial of one job. `millicores` are per GPU, of the claim with the fewest, and zero while the job does
    not run. `ended_s` is when its last trial ended, `tried_s` the time spent in ended trials, and `lost_s` how much of
    it the job would have needed less for the same steps without them."""

    profile: CoreProfile
    can_try: bool = False
    running: _Running | None = None
    nodes: tuple[str, ...] = ()
    gpus: tuple[int, ...] = ()
    millicores: int = 0
    windows: RateWindows = NO_WINDOWS
    trial: CoresTrial | None = None
    phase: str = TRAINING
    phase_since_s: float = -math.inf
    # The step at the last report of an evaluation, and profiles of the other phases.
    last_step: int = 0
    others: Mapping[str, CoreProfile] = field(default_factory=dict)
    ended_s: float = -math.inf
    tried_s: float = 0.0
    lost_s: float = 0.0

    def put(self, job: JobRecord, running: Gang | None, now: float, pace: TrialPace) -> ProfiledCores:
        """Return it for a job as it is now, with its gang while that runs."""
        # A job without an agent neither reports steps nor adapts its threads.
        has_agent = job.capabilities.checkpoint or job.capabilities.offload
        found = replace(self, can_try=job.spec.preemptible and has_agent)
        claims = () if running is None else _tuned_claims(running)
        condition = (job.epoch, tuple([claim.millicores for claim in claims])) if claims else None
        if condition == self.running:
            return found
        is_same_epoch = self.running is not None and condition is not None and self.running[0] == condition[0]
        wait_s = pace.settle_s if is_same_epoch else pace.warm_s
        gpus = tuple([claim.device_mask.bit_count() for claim in claims])
        millicores = min([sum(claim.millicores) // count for claim, count in zip(claims, gpus, strict=True)], default=0)
        if self.trial is not None and millicores != self.trial.millicores:
            # The plan gave it other cores than those of the trial, since other jobs needed them.
            found = found._ended(now)
        return replace(
            found,
            running=condition,
            nodes=tuple([claim.node for claim in claims]),
            gpus=gpus,
            millicores=millicores,
            windows=NO_WINDOWS if condition is None else RateWindows(since_s=max(now, job.running_since) + wait_s),
        )

    def is_in(self, evaluates: bool) -> bool:
        """Return whether a report is of the present phase."""
        return (self.phase == EVALUATION) == evaluates

    def in_phase(
        self, step: int, evaluated_in_row: int | None, now: float, pace: TrialPace, of_series: OfSeries
    ) -> ProfiledCores:
        """Return it in the phase that a report shows: with the curve of that phase, measured anew.

        A phase begins with its second mini-batch, and no sooner than the last one has settled: neither a single batch
        that is evaluated between two steps nor phases that alternate in a moment change any cores.

        `evaluated_in_row`: mini-batches evaluated since the last step; None: the job trains.
        """
        evaluates = evaluated_in_row is not None
        if self.is_in(evaluates):
            return replace(self, last_step=step) if evaluates and step != self.last_step else self
        if step < self.last_step:
            # It has restarted from an earlier checkpoint, and does those steps again.
            return replace(self, last_step=step)
        count = step - self.last_step if evaluated_in_row is None else evaluated_in_row
        if count < _PHASE_BATCHES or now < self.phase_since_s + pace.settle_s:
            return self
        phase = TRAINING if evaluated_in_row is None else EVALUATION
        found = self if self.trial is None else self._ended(now)
        others = {**self.others, self.phase: self.profile}
        profile = others.pop(phase, None) or CoreProfile(inherited=of_series(phase))
        windows = RateWindows(since_s=max(now, self.windows.since_s)) if self.running is not None else NO_WINDOWS
        return replace(
            found, phase=phase, phase_since_s=now, last_step=step, others=others, profile=profile, windows=windows
        )

    def on_device(self, of_series: OfSeries) -> ProfiledCores:
        """Return it on devices of another type: points of its own count as those of an earlier job, whose curve is
        scaled to the rates there."""
        inherited = of_series(self.phase) or self.profile.points
        others = {phase: CoreProfile(inherited=of_series(phase) or one.points) for phase, one in self.others.items()}
        return replace(self, profile=CoreProfile(inherited=inherited), others=others)

    def after(self, sample: ProgressSample, now: float, pace: TrialPace) -> ProfiledCores:
        """Return it after one more report; a full window may add a point or conclude the trial."""
        windows = self.windows.after(sample, now, pace)
        if windows is self.windows:
            return self
        found = replace(self, windows=windows)
        if windows.rates is self.windows.rates or not windows.is_enough:
            return found
        if self.trial is None:
            known = self.profile.at(self.millicores / 1000)
            # A surprising rate makes all points void, so noise must not be one.
            is_certain = known is None or windows.differs_from(known)
            return found._with_point(CpuPoint(self.millicores / 1000, windows.rate)) if is_certain else found
        concluded = found._concluded()
        return found if concluded is None else concluded._ended(now)

    def without_late_trial(self, now: float, pace: TrialPace) -> ProfiledCores:
        """Return it without a trial that has lasted too long, or whose cores other jobs need."""
        if self.trial is None:
            return self
        most_s = pace.most_s if self.millicores == self.trial.millicores else _GRANT_S
        if now <= self.trial.began_s + most_s:
            return self
        return (self._concluded(is_last=True) or self)._ended(now)

    def next_trial(self, view: View, running_s: float, now: float, pace: TrialPace) -> CoresTrial | None:
        """Return the trial to begin now; None if there is none."""
        if not self.can_try or self.trial is not None or not self.windows.is_enough:
            return None
        budget_s = max(running_s, _FIRST_S)
        if self.tried_s > pace.share * budget_s or self.profile.at(self.millicores / 1000) is None:
            return None
        slots = [view.slots.get(node) for node in self.nodes]
        free = [
            sum(view.millicores[slot]) // count if slot is not None else 0
            for slot, count in zip(slots, self.gpus, strict=True)
        ]
        cores = next_cores(self.profile, self.millicores, min(free))
        if cores is None or self.lost_s + self._cost_s(cores, pace) > pace.cost * budget_s:
            return None
        return CoresTrial(1000 * cores, self.millicores, self.windows.rates, now)

    def _cost_s(self, cores: int, pace: TrialPace) -> float:
        """Return the work that a trial of this many cores for each GPU is expected to cost, in seconds at the present
        rate; zero with more cores. Without a curve the rate is taken to fall in proportion to cores."""
        model, rate = self.profile.model, self.windows.rate
        share = min(1.0, 1000 * cores / self.millicores)
        expected = rate * share if model is None else min(rate, max(rate * share, model.rate(cores)))
        if share == 1.0 or not expected > 0.0:
            return 0.0
        window_s = max(pace.window_s, pace.window_steps / expected)
        return (pace.settle_s + FIRST_WINDOWS * window_s) * (1.0 - expected / rate)

    def describe(self) -> str:
        """Return the measurements behind a change of the job's cores, as text; empty without measurements."""
        points = sorted(self.profile.points, key=lambda point: point.cores)
        rates = ", ".join([f"{point.rate:.3g} with {point.cores:g}" for point in points])
        curve = f"steps/s by cores for each GPU: {rates}" if points else ""
        return (
            curve
            if self.trial is None
            else f"a trial of {counted(self.trial.millicores / 1000, 'core', 'g')} for each GPU; {curve}"
        )

    def _concluded(self, is_last: bool = False) -> ProfiledCores | None:
        """Return it with the point of its trial; None while that is inconclusive or the job lacks its cores."""
        trial = self.trial
        if trial is None or self.millicores != trial.millicores:
            return None
        point = conclude(trial, self.windows.rates, is_last)
        return None if point is None else self._with_point(point)

    def _with_point(self, point: CpuPoint) -> ProfiledCores:
        return replace(self, profile=self.profile.with_point(point)) if point.rate > 0.0 else self

    def _ended(self, now: float) -> ProfiledCores:
        trial = self.trial
        assert trial is not None, "there is a trial"
        took_s = max(0.0, now - trial.began_s)
        is_measured = self.millicores == trial.millicores and self.windows.rates
        slowdown = 1.0 - self.windows.rate / median(trial.before) if is_measured else 0.0
        lost_s = self.lost_s + took_s * max(0.0, slowdown)
        return replace(self, trial=None, ended_s=now, tried_s=self.tried_s + took_s, lost_s=lost_s)


# -- all jobs ----------------------------------------------------------------------------------------------------------


def next_trials(
    jobs: Mapping[int, ProfiledCores], view: View, running_s: Mapping[int, float], now: float, pace: TrialPace
) -> Iterator[tuple[int, ProfiledCores]]:
    """Yield the jobs, by number, whose trial ends or begins now. A node has at most one trial at a time. `jobs` and
    `running_s`, total running times, are by number; `view` has the free cores of the jobs' nodes."""
    left = {number: cores.without_late_trial(now, pace) for number, cores in jobs.items()}
    # Cores of a trial that has just ended are not given back yet, and those that it freed seem to be free.
    busy = {
        node
        for cores in left.values()
        if cores.trial is not None or now < cores.ended_s + pace.settle_s
        for node in cores.nodes
    }
    for number, cores in sorted(left.items()):
        trial = None
        if busy.isdisjoint(cores.nodes):
            trial = cores.next_trial(view, running_s.get(number, 0.0), now, pace)
        if trial is not None:
            busy.update(cores.nodes)
            yield number, replace(cores, trial=trial)
        elif cores is not jobs[number]:
            yield number, cores


def curves_of(profiles: Iterable[tuple[int, CoreProfile]]) -> Known:
    """Return the curves of the jobs with enough points, for a tuning policy. `profiles`: by job number, ascending."""
    found = [(number, (model, profile.least_cores)) for number, profile in profiles if (model := profile.model)]
    if not found:
        return NOTHING
    of_curve: dict[tuple[CpuModel, float], int] = {}
    positions = np.array([of_curve.setdefault(curve, len(of_curve)) for _, curve in found], np.int64)
    numbers = np.array([number for number, _ in found], np.int64)

    def position(asked: Integers) -> Integers:
        at = np.minimum(np.searchsorted(numbers, asked), len(numbers) - 1)
        return np.where(numbers[at] == asked, positions[at], -1)

    return Known(_profiles(list(of_curve)), position, knows_memory=False)


def _tuned_claims(gang: Gang) -> tuple[Claim, ...]:
    """Return the claims; none if some have no devices, or shared ones, which no policy tunes."""
    return gang.claims if all(claim.device_mask for claim in gang.claims) and not shares_devices(gang) else ()


def _profiles(curves: Sequence[tuple[CpuModel, float]]) -> Profiles:
    """Return the curves at whole numbers of cores, as a tuning policy reads them.

    `curves` are pairs of a model and the least number of cores measured. Below that number the rate is taken to fall in
    proportion to the cores: only a trial may show that it falls more slowly.
    """
    most = max(int(np.ceil(max(model.knee, least))) for model, least in curves)
    cores = np.arange(1.0, max(2, most) + 1.0)
    rates = [
        np.where(cores < least, np.minimum(model.rates(cores), model.rate(least) * cores / least), model.rates(cores))
        for model, least in curves
    ]
    return Profiles(cores, np.ones(1), np.maximum.accumulate(np.array(rates)[:, :, None], axis=1))
