"""Trials of cores and memory: which one a job begins next, and what it has shown.

A trial of memory holds file caches back, and the job keeps what it claims. A gain or loss of a probe below significance
counts as none, so the tuning takes back the cores that gain nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import log
from statistics import median
from typing import Final, TypeAlias

from ganger.cluster.resources import Claim
from ganger.cluster.view import View
from ganger.text import counted
from msgspec import Struct

from ganger_master.core.gang_model import Gang
from ganger_master.core.job_model import WHOLE_SHARE, JobRecord
from ganger_master.estimators.cores_and_memory import (
    LEAST_DIFFERENCE,
    REFILL_BYTES_PER_S,
    CpuPoint,
    next_memory,
    next_probe,
    sweet_point_bracket,
)
from ganger_master.planner.core_profiles import CoreProfile, MemoryLimits
from ganger_master.planner.device_groups import shares_devices
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

# What a job does between two boundaries. Each has a curve of its own: in an evaluation the input pipeline often limits
# the rate (Xiao et al., SoCC 2018 poster).
TRAINING: Final = "training"
EVALUATION: Final = "evaluation"
# A phase has begun once so many of its mini-batches were seen.
_PHASE_BATCHES: Final = 2
# Points of earlier jobs of a series, by phase.
OfSeries: TypeAlias = "Callable[[str], tuple[CpuPoint, ...]]"

# The budget for trials of a job that has run for less is that of an hour.
_FIRST_S: Final = 3600.0
# A trial that has not got its cores by then ends.
_GRANT_S: Final = 10.0
# Free cores are worth a trial beyond this multiple of the most cores measured.
_FAR: Final = 1.25


@dataclass(frozen=True, slots=True)
class ResourceTrial:
    """A trial of `millicores` per GPU by a job that had `held` per GPU. `before` are the windows with the held cores,
    in steps/s. `memory_bytes`: per GPU, in a trial of less memory with the held cores; zero: all of it. `used_bytes`:
    what was used of it before, per GPU."""

    millicores: int
    held: int
    before: tuple[float, ...]
    began_s: float
    memory_bytes: int = 0
    used_bytes: int = 0


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


def conclude(trial: ResourceTrial, after: tuple[float, ...], is_last: bool = False) -> CpuPoint | None:
    """Return the point that a trial has measured; None while it is inconclusive. `after`: windows with the cores under
    trial, in steps/s. `is_last`: no window will follow, so an inconclusive gain or loss counts as none."""
    is_more = trial.millicores > trial.held
    threshold = 1.0 + (LEAST_DIFFERENCE if is_more else -LEAST_DIFFERENCE)
    verdict = judge([TrialRates(trial.before, after)], threshold).verdict
    if verdict is TrialVerdict.MEASURE and not (is_last and len(after) >= FIRST_WINDOWS):
        return None
    is_other = (verdict is TrialVerdict.KEEP) == is_more
    return CpuPoint(trial.millicores / 1000, median(after if is_other else trial.before))


class MemorySample(Struct, frozen=True, gc=False):
    """Host memory of a job's processes on its node, in bytes: used, the least to which a trial may hold them, zero
    where there can be none, and what a trial holds them to now, zero without one."""

    used: int = 0
    least: int = 0
    tried: int = 0


NO_MEMORY: Final = MemorySample()

# What a rate depends on: the epoch, and the memory and the millicores of each claim by socket.
_Running: TypeAlias = tuple[int, tuple[tuple[int, ...], ...]]


@dataclass(frozen=True, slots=True)
class ProfiledResources:
    """Profile and trial of one job. `millicores` are per GPU, of the claim with the fewest, and zero while the job does
    not run. `ended_s` is when its last trial ended, `tried_s` the time spent in ended trials, and `lost_s` how much of
    it the job would have needed less for the same steps without them. `memory_bytes` is the claimed host memory per GPU
    and `memory` the last report; `tunes_memory`: its user names none, and it never ran out of less than its share."""

    profile: CoreProfile
    can_try: bool = False
    running: _Running | None = None
    nodes: tuple[str, ...] = ()
    gpus: tuple[int, ...] = ()
    millicores: int = 0
    windows: RateWindows = NO_WINDOWS
    trial: ResourceTrial | None = None
    phase: str = TRAINING
    phase_since_s: float = -math.inf
    # The step at the last report of an evaluation, and profiles of the other phases.
    last_step: int = 0
    others: Mapping[str, CoreProfile] = field(default_factory=dict)
    ended_s: float = -math.inf
    tried_s: float = 0.0
    lost_s: float = 0.0
    memory_bytes: int = 0
    memory: MemorySample = NO_MEMORY
    tunes_memory: bool = False
    # Its node has not carried out a trial of memory.
    lacks_memory_trials: bool = False
    # When its caches should be full again after the last trial of memory.
    refilled_s: float = -math.inf

    def put(self, job: JobRecord, running: Gang | None, now: float, pace: TrialPace) -> ProfiledResources:
        """Return it for a job as it is now, with its gang while that runs."""
        # A job without an agent neither reports steps nor adapts its threads.
        has_agent = job.capabilities.checkpoint or job.capabilities.offload
        roles, ran_out = job.spec.roles, job.working_set_bytes == WHOLE_SHARE
        tunes_memory = len(roles) == 1 and not (roles[0].shape.memory_bytes or ran_out)
        found = replace(self, can_try=job.spec.preemptible and has_agent, tunes_memory=tunes_memory)
        claims = () if running is None else _tuned_claims(running)
        amounts = tuple([(claim.memory_bytes, *claim.millicores) for claim in claims])
        condition = (job.epoch, amounts) if claims else None
        if condition == self.running:
            return found
        is_same_epoch = self.running is not None and condition is not None and self.running[0] == condition[0]
        wait_s = pace.settle_s if is_same_epoch else pace.warm_s
        gpus = tuple([claim.device_mask.bit_count() for claim in claims])
        millicores = min([sum(claim.millicores) // count for claim, count in zip(claims, gpus, strict=True)], default=0)
        memory = min([claim.memory_bytes // count for claim, count in zip(claims, gpus, strict=True)], default=0)
        if self.trial is not None and millicores != self.trial.millicores:
            # The plan gave it other cores than those of the trial, since other jobs needed them.
            found = found._ended(now)
        return replace(
            found,
            running=condition,
            nodes=tuple([claim.node for claim in claims]),
            gpus=gpus,
            millicores=millicores,
            memory_bytes=memory,
            # Each epoch begins without a trial.
            memory=self.memory if is_same_epoch else NO_MEMORY,
            windows=NO_WINDOWS if condition is None else RateWindows(since_s=max(now, job.running_since) + wait_s),
        )

    def is_in(self, evaluates: bool) -> bool:
        """Return whether a report is of the present phase."""
        return (self.phase == EVALUATION) == evaluates

    def in_phase(
        self, step: int, evaluated_in_row: int | None, now: float, pace: TrialPace, of_series: OfSeries
    ) -> ProfiledResources:
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

    def on_device(self, of_series: OfSeries) -> ProfiledResources:
        """Return it on devices of another type: its own points count as an earlier job's, scaled to the rates there."""
        inherited = of_series(self.phase) or self.profile.all_points
        others = {
            phase: CoreProfile(inherited=of_series(phase) or one.all_points) for phase, one in self.others.items()
        }
        return replace(self, profile=CoreProfile(inherited=inherited), others=others)

    def with_memory(self, sample: MemorySample, now: float, pace: TrialPace) -> ProfiledResources:
        """Return it after a report of its memory. Where a trial has come into effect or ended, rates are measured
        anew, and the longer after it the more of a cache that the job needs has to be filled again."""
        if sample == self.memory:
            return self
        found = replace(self, memory=sample)
        if len(self.gpus) == 1:
            found = replace(found, profile=self.profile.with_least_memory(sample.least / self.gpus[0]))
        if sample.tried == self.memory.tried or self.running is None:
            return found
        since_s = max(now + pace.settle_s, self.refilled_s, self.windows.since_s)
        return replace(found, windows=RateWindows(since_s=since_s), refilled_s=since_s)

    def is_short_of_memory(self, now: float) -> bool:
        """Return whether a trial of memory slows it, or has just done so."""
        return self.memory.tried > 0 or now < self.refilled_s

    def after(self, sample: ProgressSample, now: float, pace: TrialPace) -> ProfiledResources:
        """Return it after one more report; a full window may add a point or conclude the trial."""
        windows = self.windows.after(sample, now, pace)
        if windows is self.windows:
            return self
        found = replace(self, windows=windows)
        if windows.rates is self.windows.rates or not windows.is_enough:
            return found
        if self.trial is None:
            if self.memory.tried:
                return found
            known = self.profile.at(self.millicores / 1000)
            # A surprising rate makes all points void, so noise must not be one.
            is_certain = known is None or windows.differs_from(known)
            return found._with_point(CpuPoint(self.millicores / 1000, windows.rate)) if is_certain else found
        concluded = found._concluded()
        return found if concluded is None else concluded._ended(now)

    def without_late_trial(self, now: float, pace: TrialPace) -> ProfiledResources:
        """Return it without a trial that has lasted too long, or whose cores other jobs need."""
        if self.trial is None:
            return self
        is_granted = self._is_granted(self.trial)
        if now <= self.trial.began_s + (pace.most_s if is_granted else _GRANT_S):
            return self
        found = (self._concluded(is_last=True) or self)._ended(now)
        return found if is_granted or not self.trial.memory_bytes else replace(found, lacks_memory_trials=True)

    def _is_granted(self, trial: ResourceTrial) -> bool:
        return self.millicores == trial.millicores and (not trial.memory_bytes or self.memory.tried > 0)

    def next_trial(self, view: View, running_s: float, now: float, pace: TrialPace) -> ResourceTrial | None:
        """Return the trial to begin now; None if there is none."""
        if not self.can_try or self.trial is not None or self.memory.tried or not self.windows.is_enough:
            return None
        budget_s = max(running_s, _FIRST_S)
        if self.tried_s > pace.share * budget_s or self.profile.at(self.millicores / 1000) is None:
            return None
        slots = [view.slots.get(node) for node in self.nodes]
        free = [
            sum(view.millicores[slot]) // count if slot is not None else 0
            for slot, count in zip(slots, self.gpus, strict=True)
        ]
        cores, left_s = next_cores(self.profile, self.millicores, min(free)), pace.cost * budget_s - self.lost_s
        if cores is not None and self._cost_s(cores, pace) <= left_s:
            return ResourceTrial(1000 * cores, self.millicores, self.windows.rates, now)
        return self._memory_trial(left_s, now)

    def _memory_trial(self, left_s: float, now: float) -> ResourceTrial | None:
        """Return a trial of less memory that costs at most so many seconds of work, should its caches have to be filled
        again; None if there is none. What a series has shown is not tried again, and gangs of several nodes are not
        tried."""
        points = self.profile.memory_points
        is_known = bool(points) and all(one.memory_bytes == math.inf for one in self.profile.own)
        if is_known or len(self.gpus) != 1 or not (self.tunes_memory and self.memory.least):
            return None
        if self.lacks_memory_trials:
            return None
        gpus = self.gpus[0]
        used, least = min(self.memory_bytes, self.memory.used // gpus), self.memory.least // gpus
        found = next_memory(points, used, least, max(0.0, left_s) * REFILL_BYTES_PER_S / gpus)
        if found is None:
            return None
        return ResourceTrial(self.millicores, self.millicores, self.windows.rates, now, int(found), used)

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
        if self.trial is None or self.trial.memory_bytes:
            return curve
        return f"a trial of {counted(self.trial.millicores / 1000, 'core', 'g')} for each GPU; {curve}"

    def _concluded(self, is_last: bool = False) -> ProfiledResources | None:
        """Return it with the point of its trial; None while that is inconclusive or the job lacks its cores."""
        trial = self.trial
        if trial is None or not self._is_granted(trial):
            return None
        point = conclude(trial, self.windows.rates, is_last)
        if point is None or not trial.memory_bytes:
            return None if point is None else self._with_point(point)
        # In proportion to the rate that was measured with all memory, which a long time ago may have been another one.
        full = self.profile.at(point.cores) or 0.0
        rate = full * min(1.0, point.rate / median(trial.before))
        held = self.memory.tried / self.gpus[0]
        if not rate > 0.0 or held >= self.memory_bytes:
            return self
        return replace(self, profile=self.profile.with_memory(CpuPoint(point.cores, rate, held), self.memory_bytes))

    def _with_point(self, point: CpuPoint) -> ProfiledResources:
        return replace(self, profile=self.profile.with_point(point)) if point.rate > 0.0 else self

    def _ended(self, now: float) -> ProfiledResources:
        trial = self.trial
        assert trial is not None, "there is a trial"
        took_s = max(0.0, now - trial.began_s)
        is_measured = self._is_granted(trial) and self.windows.rates
        slowdown = max(0.0, 1.0 - self.windows.rate / median(trial.before)) if is_measured else 0.0
        refill_s = 0.0
        if trial.memory_bytes and slowdown > LEAST_DIFFERENCE:
            refill_s = max(0, trial.used_bytes - trial.memory_bytes) * sum(self.gpus) / REFILL_BYTES_PER_S
        # While a cache fills, its hits and so the rate rise in a line.
        lost_s = self.lost_s + (took_s + refill_s / 2) * slowdown
        tried_s, refilled_s = self.tried_s + took_s, max(self.refilled_s, now + refill_s)
        return replace(self, trial=None, ended_s=now, tried_s=tried_s, lost_s=lost_s, refilled_s=refilled_s)

    @property
    def memory_limits(self) -> MemoryLimits:
        """Return `CoreProfile.limits` as a tuning may use them: empty also where the job's memory is not tuned."""
        return self.profile.limits(self.memory_bytes) if self.tunes_memory else ()


# -- all jobs ----------------------------------------------------------------------------------------------------------


def next_trials(
    jobs: Mapping[int, ProfiledResources], view: View, running_s: Mapping[int, float], now: float, pace: TrialPace
) -> Iterator[tuple[int, ProfiledResources]]:
    """Yield the jobs, by number, whose trial ends or begins now. A node has at most one trial at a time. `jobs` and
    `running_s`, total running times of those that the tuning decides on, are by number; `view` has the free cores of
    the jobs' nodes."""
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
        if number in running_s and busy.isdisjoint(cores.nodes):
            trial = cores.next_trial(view, running_s[number], now, pace)
        if trial is not None:
            busy.update(cores.nodes)
            yield number, replace(cores, trial=trial)
        elif cores is not jobs[number]:
            yield number, cores


def _tuned_claims(gang: Gang) -> tuple[Claim, ...]:
    """Return the claims; none if some have no devices, or shared ones, which no policy tunes."""
    return gang.claims if all(claim.device_mask for claim in gang.claims) and not shares_devices(gang) else ()
