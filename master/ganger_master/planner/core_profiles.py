"""Measured curves of rate by CPU cores, and the trials of core counts that complete them.

The planner reports every changed job and every progress report, and calls `update_trials` periodically. All of it may
be lost at any time: it is measured again.

Users submit series of the same program, so a job starts with the curve of the last job of its series. Another batch
size changes the rate, but hardly how it depends on cores. The inherited curve is scaled to the rates measured of the
job itself, and its points are replaced one by one.

Probes are chosen by optimal experiment design (`estimators.cpu`) among the job's cores and the free cores of its
nodes. The windows of a probe are compared with those just before it, as for every trial (`policies.trials`). A gain
or loss below significance counts as none: the curve is flat there, and the tuning takes back the cores that gain
nothing. So the tuning keeps or reverts each change, by what was measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import log
from statistics import median
from typing import Final, TypeAlias

import numpy as np
from ganger.cluster.resources import Claim
from ganger.cluster.view import View
from ganger.job_state import JobState

from ganger_master.core.gang_model import Gang, GangIntent
from ganger_master.core.job_model import JobRecord
from ganger_master.estimators.cpu import CpuModel, CpuPoint, fit_cpu, next_probe, sweet_point_bracket
from ganger_master.planner.device_groups import shares_devices
from ganger_master.policies.job_facts import Integers
from ganger_master.policies.trials import (
    FIRST_WINDOWS,
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
# Free cores are worth a trial beyond this multiple of the most cores measured.
_FAR: Final = 1.25


@dataclass(frozen=True, slots=True)
class CoresTrial:
    """A trial of `millicores` per GPU by a job that had `held` per GPU.

    `before` are the windows with the held cores, in steps/s.
    """

    millicores: int
    held: int
    before: tuple[float, ...]
    began_s: float


@lru_cache(16_384)
def next_cores(profile: CoreProfile, held_millicores: int, free_millicores: int) -> int | None:
    """Return the whole number of cores per GPU to try next; None if no trial is worthwhile or possible now.

    Args:
        profile: Points of the job.
        held_millicores: Cores that the job holds per GPU.
        free_millicores: Free cores per GPU that it could get besides.
    """
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
    """Return the inherited point farthest from the held cores per GPU; None if none can be reached.

    One such probe checks whether the inherited curve holds for this job. Without it the job might keep the optimum of
    another job for ever.
    """
    inherited = {round(point.cores) for point in profile.inherited}
    within_reach = sorted(cores for cores in inherited if 1 <= cores <= available and cores != held)
    return max(within_reach, key=lambda cores: abs(log(cores / held)), default=None)


def conclude(trial: CoresTrial, after: tuple[float, ...], is_last: bool = False) -> CpuPoint | None:
    """Return the point that a trial has measured; None while it is inconclusive.

    Args:
        trial: The trial.
        after: Windows with the cores under trial, in steps/s.
        is_last: No window will follow, so an inconclusive gain or loss counts as none.
    """
    is_more = trial.millicores > trial.held
    threshold = 1.0 + (LEAST_GAIN if is_more else -LEAST_GAIN)
    verdict = judge([TrialRates(trial.before, after)], threshold).verdict
    if verdict is TrialVerdict.MEASURE and not (is_last and len(after) >= FIRST_WINDOWS):
        return None
    is_other = (verdict is TrialVerdict.KEEP) == is_more
    return CpuPoint(trial.millicores / 1000, median(after if is_other else trial.before))


# Number of series whose points are kept, the most recently measured ones.
_MOST_SERIES: Final = 4096
_DEFAULT: Final = TrialPace()
_NO_WINDOWS: Final = RateWindows()

# What a rate depends on: the epoch, and the millicores of each claim by socket.
_Running: TypeAlias = tuple[int, tuple[tuple[int, ...], ...]]


@dataclass(frozen=True, slots=True)
class _ProfiledJob:
    """Profile and trial of one job.

    `millicores` are per GPU, of the claim with the fewest, and zero while the job does not run. `tried_s` is the time
    spent in ended trials.
    """

    submitted_s: float
    signature: int
    profile: CoreProfile
    can_try: bool = False
    running: _Running | None = None
    nodes: tuple[str, ...] = ()
    gpus: tuple[int, ...] = ()
    millicores: int = 0
    # Reports count from then on: the job has settled.
    since_s: float = float("inf")
    windows: RateWindows = _NO_WINDOWS
    trial: CoresTrial | None = None
    tried_s: float = 0.0


@dataclass(frozen=True, slots=True)
class RememberedProfiles:
    """State of `CoreProfiles`: jobs by number, and points of series by signature."""

    jobs: Mapping[int, _ProfiledJob] = field(default_factory=dict)
    series: Mapping[int, tuple[CpuPoint, ...]] = field(default_factory=dict)


class CoreProfiles:
    """Profiles and trials of all live jobs, by job number.

    `now` is in seconds of the master's clock, like all times of jobs.
    """

    def __init__(self, pace: TrialPace = _DEFAULT) -> None:
        self._pace = pace
        self._jobs: dict[int, _ProfiledJob] = {}
        self._series: dict[int, tuple[CpuPoint, ...]] = {}
        self._known = NOTHING
        self._is_stale = False

    def put(self, job: JobRecord, gang: Gang | None, signature: int, now: float) -> None:
        """Record a job's current state. Of a job that has ended only the points of its series are kept."""
        number = job.number
        if job.state.is_finished:
            self.forget(number)
            return
        profiled = self._jobs.get(number)
        if profiled is None or profiled.submitted_s != job.create_time:
            inherited = self._series.get(signature, ())
            profiled = _ProfiledJob(job.create_time, signature, CoreProfile(inherited=inherited))
            self._is_stale = self._is_stale or bool(inherited)
        # A job without an agent neither reports steps nor adapts its threads.
        has_agent = job.capabilities.checkpoint or job.capabilities.offload
        profiled = replace(profiled, can_try=job.spec.preemptible and has_agent)
        claims = _running_claims(job, gang)
        running = (job.epoch, tuple([claim.millicores for claim in claims])) if claims else None
        if running != profiled.running:
            profiled = self._changed(profiled, job, claims, running, now)
        self._jobs[number] = profiled

    def forget(self, number: int) -> None:
        """Remove a job that has ended."""
        if self._jobs.pop(number, None) is not None:
            self._is_stale = True

    def keep(self, is_live: Callable[[int], bool]) -> None:
        """Remove all jobs that are not live. Their ends were not reported."""
        for number in [number for number in self._jobs if not is_live(number)]:
            self.forget(number)

    def record(self, number: int, step: int, time_s: float, now: float) -> None:
        """Record a progress report: `step` was done at `time_s` by the node's clock, which may differ from `now`'s."""
        profiled = self._jobs.get(number)
        if profiled is None or now < profiled.since_s:
            return
        pace = self._pace
        windows = profiled.windows.after(ProgressSample(time_s, step), pace.window_s, pace.window_steps)
        if windows is profiled.windows:
            return
        is_full = windows.rates is not profiled.windows.rates
        profiled = replace(profiled, windows=windows)
        self._jobs[number] = self._judged(profiled, now) if is_full else profiled

    def update_trials(self, view: View, running_s: Mapping[int, float], now: float) -> bool:
        """Begin and end trials. Return whether curves or trials have changed since the last plan.

        Args:
            view: The cluster, for the free cores of the jobs' nodes.
            running_s: Total running time of the jobs, by number.
            now: Current time.
        """
        before = self.trials
        for number, profiled in self._jobs.items():
            if profiled.trial is not None and now > profiled.trial.began_s + self._pace.most_s:
                self._jobs[number] = self._ended(
                    self._concluded(profiled, profiled.trial, is_last=True) or profiled, now
                )
        busy = {node for profiled in self._jobs.values() if profiled.trial is not None for node in profiled.nodes}
        for number in sorted(self._jobs):
            profiled = self._jobs[number]
            if busy.isdisjoint(profiled.nodes) and (
                trial := self._next_trial(profiled, view, running_s.get(number, 0.0), now)
            ):
                self._jobs[number] = replace(profiled, trial=trial)
                busy.update(profiled.nodes)
        return self._is_stale or before != self.trials

    @property
    def remembered(self) -> RememberedProfiles:
        """State from which `recall` continues."""
        return RememberedProfiles(self._jobs, self._series)

    def recall(self, remembered: RememberedProfiles) -> None:
        """Continue from what an earlier instance `remembered`."""
        self._jobs, self._series = dict(remembered.jobs), dict(remembered.series)
        self._is_stale = True

    @property
    def trials(self) -> dict[int, int]:
        """Millicores per GPU that jobs are to have for their trials, by job number."""
        return {
            number: profiled.trial.millicores for number, profiled in self._jobs.items() if profiled.trial is not None
        }

    @property
    def known(self) -> Known:
        """Curves of all jobs with enough points, for a tuning policy."""
        if self._is_stale:
            self._known, self._is_stale = self._curves(), False
        return self._known

    def describe(self, number: int) -> str:
        """Return the measurements behind a change of a job's cores, as text; empty without measurements."""
        profiled = self._jobs.get(number)
        if profiled is None:
            return ""
        points = sorted(profiled.profile.points, key=lambda point: point.cores)
        rates = ", ".join([f"{point.rate:.3g} with {point.cores:g}" for point in points])
        curve = f"steps/s by cores for each GPU: {rates}" if points else ""
        if profiled.trial is None:
            return curve
        return f"a trial of {profiled.trial.millicores / 1000:g} cores for each GPU; {curve}"

    # -- one job -------------------------------------------------------------------------------------------------------

    def _changed(
        self, profiled: _ProfiledJob, job: JobRecord, claims: tuple[Claim, ...], running: _Running | None, now: float
    ) -> _ProfiledJob:
        """Return the job after its cores or epoch have changed, or it has stopped running."""
        is_same_epoch = profiled.running is not None and running is not None and profiled.running[0] == running[0]
        wait_s = self._pace.settle_s if is_same_epoch else self._pace.warm_s
        gpus = tuple([claim.device_mask.bit_count() for claim in claims])
        millicores = min([sum(claim.millicores) // count for claim, count in zip(claims, gpus, strict=True)], default=0)
        since_s = max(now, job.running_since) + wait_s if running is not None else float("inf")
        trial = profiled.trial
        if trial is not None and millicores != trial.millicores:
            # The plan gave it other cores than those of the trial, since other jobs needed them.
            profiled = self._ended(profiled, now)
        return replace(
            profiled,
            running=running,
            nodes=tuple([claim.node for claim in claims]),
            gpus=gpus,
            millicores=millicores,
            since_s=since_s,
            windows=_NO_WINDOWS,
        )

    def _judged(self, profiled: _ProfiledJob, now: float) -> _ProfiledJob:
        """Return the job after one more full window."""
        trial = profiled.trial
        if not profiled.windows.is_enough:
            return profiled
        if trial is None:
            return self._with_point(profiled, CpuPoint(profiled.millicores / 1000, profiled.windows.rate))
        concluded = self._concluded(profiled, trial)
        return profiled if concluded is None else self._ended(concluded, now)

    def _concluded(self, profiled: _ProfiledJob, trial: CoresTrial, is_last: bool = False) -> _ProfiledJob | None:
        """Return the job with the point of its trial; None while that is inconclusive or the job lacks its cores."""
        if profiled.millicores != trial.millicores:
            return None
        point = conclude(trial, profiled.windows.rates, is_last)
        return None if point is None else self._with_point(profiled, point)

    def _with_point(self, profiled: _ProfiledJob, point: CpuPoint) -> _ProfiledJob:
        profile = profiled.profile.with_point(point) if point.rate > 0.0 else profiled.profile
        if profile == profiled.profile:
            return profiled
        self._is_stale = True
        self._series.pop(profiled.signature, None)
        self._series[profiled.signature] = profile.points
        if len(self._series) > _MOST_SERIES:
            del self._series[next(iter(self._series))]
        return replace(profiled, profile=profile)

    def _ended(self, profiled: _ProfiledJob, now: float) -> _ProfiledJob:
        """Return the job without its trial."""
        assert profiled.trial is not None, "there is a trial"
        return replace(profiled, trial=None, tried_s=profiled.tried_s + max(0.0, now - profiled.trial.began_s))

    def _next_trial(self, profiled: _ProfiledJob, view: View, running_s: float, now: float) -> CoresTrial | None:
        if not profiled.can_try or profiled.trial is not None or not profiled.windows.is_enough:
            return None
        if profiled.tried_s > self._pace.share * running_s or profiled.profile.at(profiled.millicores / 1000) is None:
            return None
        slots = [view.slots.get(node) for node in profiled.nodes]
        free = [
            sum(view.millicores[slot]) // count if slot is not None else 0
            for slot, count in zip(slots, profiled.gpus, strict=True)
        ]
        cores = next_cores(profiled.profile, profiled.millicores, min(free))
        return None if cores is None else CoresTrial(1000 * cores, profiled.millicores, profiled.windows.rates, now)

    # -- all jobs ------------------------------------------------------------------------------------------------------

    def _curves(self) -> Known:
        found = [
            (number, (model, profiled.profile.least_cores))
            for number, profiled in sorted(self._jobs.items())
            if (model := profiled.profile.model) is not None
        ]
        if not found:
            return NOTHING
        of_curve: dict[tuple[CpuModel, float], int] = {}
        positions = np.array([of_curve.setdefault(curve, len(of_curve)) for _, curve in found], np.int64)
        numbers = np.array([number for number, _ in found], np.int64)
        return Known(_profiles(list(of_curve)), _position_of(numbers, positions), knows_memory=False)


def _running_claims(job: JobRecord, gang: Gang | None) -> tuple[Claim, ...]:
    """Return the claims of a running job; none if it does not run, or has claims without devices or shared ones, which
    no policy tunes."""
    if gang is None or job.state is not JobState.HOLDING or gang.intent is not GangIntent.RUN or not job.running_since:
        return ()
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


def _position_of(sorted_numbers: Integers, positions: Integers) -> Callable[[Integers], Integers]:
    """Return a function from job numbers to the positions of their curves, -1 for jobs without one."""

    def position(numbers: Integers) -> Integers:
        at = np.minimum(np.searchsorted(sorted_numbers, numbers), len(sorted_numbers) - 1)
        return np.where(sorted_numbers[at] == numbers, positions[at], -1)

    return position
