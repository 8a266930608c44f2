"""What running jobs show of themselves: their rates with the cores they have, trials with others, and what is known by
that for a policy that tunes.

Whoever plans feeds it every job that changed and every report of progress, and asks it now and then to look around.
All of it may be lost at any time: it is measured again.

What is known of what cores do to one job: what was measured of it, and before that what those before it tell.

People submit series of the same program, so the next one begins with the curve of the last one. How fast it is may
differ (another batch size), how it depends on cores hardly: the curve is brought to the height of the first rate that
is measured of the job itself, and what is measured replaces it point by point.

Which number of cores to try next with a job, and what a trial has shown.

Probes are chosen by optimal experiment design (`estimators.cpu_design`) among what the job has and what is free beside
it:
nobody else gives anything for a trial. Each is measured in windows against those just before it, and judged as every
other change (`policies.trial_test`). A gain that is not to be seen counts as none, and a loss likewise: the point
is put where the rate was before, the curve is flat there, and the tuning takes the cores back that it gains nothing
by. So a change is kept or undone by the tuning, from what was measured.
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

from ganger_master.core.model import Gang, GangIntent, JobRecord, JobState
from ganger_master.estimators.cpu import CpuModel, CpuPoint, fit_cpu, sweet_point_bracket
from ganger_master.estimators.cpu_design import next_probe
from ganger_master.planner.windows import ProgressSample, RateWindows
from ganger_master.policies.job_facts import Integers
from ganger_master.policies.trial_test import FIRST_WINDOWS, TrialRates, TrialVerdict, judge
from ganger_master.policies.tunings import Profiles
from ganger_master.policies.tunings.demand import NOTHING, Known

# A rate this far from what was measured or expected before says that the job is another one now, or never was like
# those before it.
SURPRISE: Final = 0.2


@dataclass(frozen=True, slots=True)
class CoreProfile:
    """Points with cores for each GPU and steps per second, in the order in which they were measured."""

    own: tuple[CpuPoint, ...] = ()
    # Of the last job of the series.
    inherited: tuple[CpuPoint, ...] = ()

    @property
    def points(self) -> tuple[CpuPoint, ...]:
        """All there is to go by, at most one for each number of cores."""
        known = {point.cores for point in self.own}
        height = self._height
        others = [CpuPoint(one.cores, height * one.rate) for one in self.inherited if one.cores not in known]
        return (*others, *self.own)

    @property
    def model(self) -> CpuModel | None:
        """None before there are two points: of one nobody knows whether more cores help."""
        points = self.points
        return fitted(points) if len(points) > 1 else None

    @property
    def least_cores(self) -> float:
        """That were measured; infinite for none."""
        return min([point.cores for point in self.points], default=math.inf)

    def at(self, cores: float) -> float | None:
        """What was measured with so many."""
        return next((point.rate for point in self.own if point.cores == cores), None)

    def measured(self, point: CpuPoint) -> CoreProfile:
        """With one point more. One that is a surprise makes those before it void."""
        known = self.at(point.cores)
        if known is not None:
            return self if _is_like(point.rate, known) else CoreProfile((point,))
        if self.own and self.inherited and not _is_like(point.rate, self._rate(point.cores)):
            return replace(self, own=(*self.own, point), inherited=())
        return replace(self, own=(*self.own, point))

    @property
    def _height(self) -> float:
        """Of this job against the one before it: the geometric mean over what was measured of it."""
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
    """Jobs of one series ask for the same curve."""
    return fit_cpu(points)


def _is_like(rate: float, other: float) -> bool:
    return abs(rate - other) <= SURPRISE * max(rate, other)


# Below that nobody can tell a gain from chance in a minute.
LEAST_GAIN: Final = 0.02
# So many times the most cores that were measured are worth a trial of their own.
_FAR: Final = 1.25


@dataclass(frozen=True, slots=True)
class TrialPace:
    """How long things take, in seconds. `warm_s`: from the start of a stretch until it runs as it will; `settle_s`:
    from a change of cores until threads, caches and loaders have followed it; a window is at least `window_s` long and
    `window_steps` steps. After `most_s` a trial is over. Of its running time a job spends at most `share` in trials."""

    warm_s: float = 30.0
    settle_s: float = 5.0
    window_s: float = 2.0
    window_steps: int = 5
    most_s: float = 600.0
    share: float = 0.1


@dataclass(frozen=True, slots=True)
class CoresTrial:
    """`millicores` for each GPU are tried by a job that had `held`, and did so well with them: `before` are rates of
    windows, in steps per second."""

    millicores: int
    held: int
    before: tuple[float, ...]
    began_s: float


@lru_cache(16_384)
def next_cores(profile: CoreProfile, held_millicores: int, free_millicores: int) -> int | None:
    """Whole cores for each GPU to try next with a job that holds so much for each and could have so much more; None if
    enough is known, or what is to be known next cannot be had now."""
    there_are = (held_millicores + free_millicores) // 1000
    points = profile.points
    if not points or there_are < 1:
        return None
    if profile.inherited and len(profile.own) == 1:
        check = _check(profile, held_millicores / 1000, there_are)
        if check is not None:
            return check
    largest = max(point.cores for point in points)
    _, enough = sweet_point_bracket(points)
    # Beyond a plateau that was seen nothing is to be found, and what is free comes and goes.
    is_far = there_are > _FAR * largest and enough >= largest
    found = next_probe(points, there_are if is_far else max(1, round(largest)))
    if found is None or found > there_are or found * 1000 == held_millicores:
        return None
    return found


def _check(profile: CoreProfile, held: float, there_are: int) -> int | None:
    """One look, as far away as can be, at whether the curve of the one before holds for this job: else it might keep
    for ever what another one made the most of."""
    known = {round(point.cores) for point in profile.inherited}
    reach = sorted(cores for cores in known if 1 <= cores <= there_are and cores != held)
    return max(reach, key=lambda cores: abs(log(cores / held)), default=None)


def shown(trial: CoresTrial, after: tuple[float, ...], is_last: bool = False) -> CpuPoint | None:
    """What the trial has shown; None as long as that cannot be said. `is_last`: there will be no more windows, so what
    is open yet is not to be seen."""
    is_more = trial.millicores > trial.held
    threshold = 1.0 + (LEAST_GAIN if is_more else -LEAST_GAIN)
    verdict = judge([TrialRates(trial.before, after)], threshold).verdict
    if verdict is TrialVerdict.MEASURE and not (is_last and len(after) >= FIRST_WINDOWS):
        return None
    is_other = (verdict is TrialVerdict.KEEP) == is_more
    return CpuPoint(trial.millicores / 1000, median(after if is_other else trial.before))


# Of ended series so many are remembered, those that were measured last.
_MOST_SERIES: Final = 4096
_DEFAULT: Final = TrialPace()
_NO_WINDOWS: Final = RateWindows()

# What a rate hangs on: the incarnation, and the cores of each piece.
_Running: TypeAlias = tuple[int, tuple[tuple[int, ...], ...]]


@dataclass(frozen=True, slots=True)
class _Seen:
    """One job. `millicores`: for each GPU of the piece that has the fewest; zero while it does not run."""

    submitted_s: float
    signature: int
    profile: CoreProfile
    may_try: bool = False
    running: _Running | None = None
    nodes: tuple[str, ...] = ()
    gpus: tuple[int, ...] = ()
    millicores: int = 0
    # From when on reports count: it has got used to running so.
    since_s: float = float("inf")
    windows: RateWindows = _NO_WINDOWS
    trial: CoresTrial | None = None
    tried_s: float = 0.0


@dataclass(frozen=True, slots=True)
class RememberedProfiles:
    """By number, and the points of ended series by signature."""

    jobs: Mapping[int, _Seen] = field(default_factory=dict)
    series: Mapping[int, tuple[CpuPoint, ...]] = field(default_factory=dict)


class CoreProfiles:
    """Now is by the master's clock, which all times of jobs are of."""

    def __init__(self, pace: TrialPace = _DEFAULT) -> None:
        self._pace = pace
        self._jobs: dict[int, _Seen] = {}
        self._series: dict[int, tuple[CpuPoint, ...]] = {}
        self._known = NOTHING
        self._is_stale = False

    def put(self, job: JobRecord, gang: Gang | None, signature: int, now: float) -> None:
        """A job as it is now; one that has ended is only remembered by its series."""
        number = job.number
        if job.state.is_finished:
            self.forget(number)
            return
        seen = self._jobs.get(number)
        if seen is None or seen.submitted_s != job.create_time:
            inherited = self._series.get(signature, ())
            seen = _Seen(job.create_time, signature, CoreProfile(inherited=inherited))
            self._is_stale = self._is_stale or bool(inherited)
        # Who has no agent neither reports steps nor changes its threads.
        has_agent = job.capabilities.checkpoint or job.capabilities.offload
        seen = replace(seen, may_try=job.spec.preemptible and has_agent)
        claims = _running_claims(job, gang)
        running = (job.epoch, tuple([claim.millicores for claim in claims])) if claims else None
        if running != seen.running:
            seen = self._changed(seen, job, claims, running, now)
        self._jobs[number] = seen

    def forget(self, number: int) -> None:
        if self._jobs.pop(number, None) is not None:
            self._is_stale = True

    def keep(self, is_live: Callable[[int], bool]) -> None:
        """Forgets all others: nobody said how they ended."""
        for number in [number for number in self._jobs if not is_live(number)]:
            self.forget(number)

    def record(self, number: int, step: int, time_s: float, now: float) -> None:
        """A report of progress that says of when it is; clocks of nodes may differ."""
        seen = self._jobs.get(number)
        if seen is None or now < seen.since_s:
            return
        pace = self._pace
        windows = seen.windows.after(ProgressSample(time_s, step), pace.window_s, pace.window_steps)
        if windows is seen.windows:
            return
        is_full = windows.rates is not seen.windows.rates
        seen = replace(seen, windows=windows)
        self._jobs[number] = self._judged(seen, now) if is_full else seen

    def update_trials(self, view: View, running_s: Mapping[int, float], now: float) -> bool:
        """Begins and ends trials; whether there is anything new to plan by. `running_s`: for how long jobs have
        run, by number."""
        before = self.trials
        for number, seen in self._jobs.items():
            if seen.trial is not None and now > seen.trial.began_s + self._pace.most_s:
                self._jobs[number] = self._over(self._shown(seen, seen.trial, is_last=True) or seen, now)
        busy = {node for seen in self._jobs.values() if seen.trial is not None for node in seen.nodes}
        for number in sorted(self._jobs):
            seen = self._jobs[number]
            if busy.isdisjoint(seen.nodes) and (trial := self._next(seen, view, running_s.get(number, 0.0), now)):
                self._jobs[number] = replace(seen, trial=trial)
                busy.update(seen.nodes)
        return self._is_stale or before != self.trials

    @property
    def remembered(self) -> RememberedProfiles:
        """For one that goes on from there."""
        return RememberedProfiles(self._jobs, self._series)

    def recall(self, remembered: RememberedProfiles) -> None:
        """What one before this remembered."""
        self._jobs, self._series = dict(remembered.jobs), dict(remembered.series)
        self._is_stale = True

    @property
    def trials(self) -> dict[int, int]:
        """Millicores for each GPU that jobs are to have for a trial."""
        return {number: seen.trial.millicores for number, seen in self._jobs.items() if seen.trial is not None}

    @property
    def known(self) -> Known:
        """For a policy that tunes: the curves of all jobs of which enough was measured."""
        if self._is_stale:
            self._known, self._is_stale = self._curves(), False
        return self._known

    def describe(self, number: int) -> str:
        """What a change of a job's cores rests on; nothing where nothing was measured."""
        seen = self._jobs.get(number)
        if seen is None:
            return ""
        points = sorted(seen.profile.points, key=lambda point: point.cores)
        rates = ", ".join([f"{point.rate:.3g} with {point.cores:g}" for point in points])
        what = f"steps/s by cores for each GPU: {rates}" if points else ""
        if seen.trial is None:
            return what
        return f"a trial of {seen.trial.millicores / 1000:g} cores for each GPU; {what}"

    # -- one job -------------------------------------------------------------------------------------------------------

    def _changed(
        self, seen: _Seen, job: JobRecord, claims: tuple[Claim, ...], running: _Running | None, now: float
    ) -> _Seen:
        """It runs otherwise than before, or not any more."""
        is_same_stretch = seen.running is not None and running is not None and seen.running[0] == running[0]
        wait_s = self._pace.settle_s if is_same_stretch else self._pace.warm_s
        gpus = tuple([claim.device_mask.bit_count() for claim in claims])
        millicores = min([sum(claim.millicores) // count for claim, count in zip(claims, gpus, strict=True)], default=0)
        since_s = max(now, job.running_since) + wait_s if running is not None else float("inf")
        trial = seen.trial
        if trial is not None and millicores != trial.millicores:
            # It was given something else, or nothing: others needed it.
            seen = self._over(seen, now)
        return replace(
            seen,
            running=running,
            nodes=tuple([claim.node for claim in claims]),
            gpus=gpus,
            millicores=millicores,
            since_s=since_s,
            windows=_NO_WINDOWS,
        )

    def _judged(self, seen: _Seen, now: float) -> _Seen:
        """After a window more."""
        trial = seen.trial
        if not seen.windows.is_enough:
            return seen
        if trial is None:
            return self._with(seen, CpuPoint(seen.millicores / 1000, seen.windows.rate))
        done = self._shown(seen, trial)
        return seen if done is None else self._over(done, now)

    def _shown(self, seen: _Seen, trial: CoresTrial, is_last: bool = False) -> _Seen | None:
        """With what its trial has shown, once that can be said; not while it does not run so."""
        if seen.millicores != trial.millicores:
            return None
        point = shown(trial, seen.windows.rates, is_last)
        return None if point is None else self._with(seen, point)

    def _with(self, seen: _Seen, point: CpuPoint) -> _Seen:
        profile = seen.profile.measured(point) if point.rate > 0.0 else seen.profile
        if profile == seen.profile:
            return seen
        self._is_stale = True
        self._series.pop(seen.signature, None)
        self._series[seen.signature] = profile.points
        if len(self._series) > _MOST_SERIES:
            del self._series[next(iter(self._series))]
        return replace(seen, profile=profile)

    def _over(self, seen: _Seen, now: float) -> _Seen:
        assert seen.trial is not None, "there is a trial"
        return replace(seen, trial=None, tried_s=seen.tried_s + max(0.0, now - seen.trial.began_s))

    def _next(self, seen: _Seen, view: View, ran_s: float, now: float) -> CoresTrial | None:
        if not seen.may_try or seen.trial is not None or not seen.windows.is_enough:
            return None
        if seen.tried_s > self._pace.share * ran_s or seen.profile.at(seen.millicores / 1000) is None:
            return None
        slots = [view.slots.get(node) for node in seen.nodes]
        free = [
            sum(view.millicores[slot]) // count if slot is not None else 0
            for slot, count in zip(slots, seen.gpus, strict=True)
        ]
        cores = next_cores(seen.profile, seen.millicores, min(free))
        return None if cores is None else CoresTrial(1000 * cores, seen.millicores, seen.windows.rates, now)

    # -- all jobs ------------------------------------------------------------------------------------------------------

    def _curves(self) -> Known:
        found = [
            (number, (model, seen.profile.least_cores))
            for number, seen in sorted(self._jobs.items())
            if (model := seen.profile.model) is not None
        ]
        if not found:
            return NOTHING
        of_curve: dict[tuple[CpuModel, float], int] = {}
        positions = np.array([of_curve.setdefault(curve, len(of_curve)) for _, curve in found], np.int64)
        numbers = np.array([number for number, _ in found], np.int64)
        return Known(_profiles(list(of_curve)), _position_of(numbers, positions), knows_memory=False)


def _running_claims(job: JobRecord, gang: Gang | None) -> tuple[Claim, ...]:
    """Nothing of who does not run, or has pieces without devices: by those nobody tunes."""
    if gang is None or job.state is not JobState.HOLDING or gang.intent is not GangIntent.RUN or not job.running_since:
        return ()
    return gang.claims if all(claim.device_mask for claim in gang.claims) else ()


def _profiles(curves: Sequence[tuple[CpuModel, float]]) -> Profiles:
    """On whole cores. Below the least that was measured every core counts in full: less is for a trial to find out."""
    most = max(int(np.ceil(max(model.knee, least))) for model, least in curves)
    cores = np.arange(1.0, max(2, most) + 1.0)
    rates = [
        np.where(cores < least, np.minimum(model.rates(cores), model.rate(least) * cores / least), model.rates(cores))
        for model, least in curves
    ]
    return Profiles(cores, np.ones(1), np.maximum.accumulate(np.array(rates)[:, :, None], axis=1))


def _position_of(known: Integers, positions: Integers) -> Callable[[Integers], Integers]:
    def position(numbers: Integers) -> Integers:
        at = np.minimum(np.searchsorted(known, numbers), len(known) - 1)
        return np.where(known[at] == numbers, positions[at], -1)

    return position
