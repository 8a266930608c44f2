"""What running jobs show of themselves: their rates with the cores they have, trials with others, and what is known by
that for a policy that tunes.

Whoever plans feeds it every job that changed and every report of progress, and asks it now and then to look around.
All of it may be lost at any time: it is measured again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, TypeAlias

import numpy as np
from ganger.cluster.resources import Claim
from ganger.cluster.view import View

from ganger_master.core.model import Gang, GangIntent, JobRecord, JobState
from ganger_master.estimators.cpu import CpuModel, CpuPoint
from ganger_master.planner.profile import CoreProfile
from ganger_master.planner.trials import CoresTrial, TrialPace, next_cores, shown
from ganger_master.planner.windows import ProgressSample, RateWindows
from ganger_master.policies.job_facts import Integers
from ganger_master.policies.tunings import Profiles
from ganger_master.policies.tunings.known import NOTHING, Known

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

    def hear(self, number: int, step: int, time_s: float, now: float) -> None:
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

    def look(self, view: View, running_s: Mapping[int, float], now: float) -> bool:
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

    def figures(self, number: int) -> str:
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
