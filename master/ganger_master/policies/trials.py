"""Trials of changes: whether one helped, from the rates before and after it, and the backoff of those that did not.
And the trials of co-locations: begun where a forecast promises a gain, kept only where measuring shows it.

A change is judged after 4, 8, 16, ... windows, each time with half the error probability of the time before, so all
looks together are wrong with a probability of at most `doubt`. One that is open after the last look is undone.

A co-location pays if its jobs' normalised rates (rate together over rate alone) sum to more than the better of its
parts reached before: one job alone reaches exactly 1, and so does time slicing (Gandiva, OSDI 2018, section 3.3).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import lru_cache
from itertools import combinations
from statistics import median
from typing import Any, Final, Generic, TypeAlias, TypeVar

import numpy as np
from msgspec import Struct

from ganger_master.estimators.speed import (
    UNKNOWN_DEVICE,
    ColocationTrial,
    Contention,
    Forecast,
    Pressure,
    fit_together,
    forecast,
    shared_speeds,
)
from ganger_master.policies.fairness import Seat

# The delay is an hour, then two, then four. At most `_MOST` failures are kept.
_RETRY_S: Final = 3600.0
_MOST_DOUBLINGS: Final = 8
_MOST: Final = 4096

# Reported times of one clock have this error.
_CLOCK_S: Final = 0.01

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True)
class FailedTrials(Generic[K]):
    """Failed trials by what was tried: number of failures, and when the next trial may begin."""

    notes: Mapping[K, tuple[int, float]] = field(default_factory=dict)

    def noted(self, tried: K, now: float) -> FailedTrials[K]:
        """Return these with one more failure."""
        times = self.notes.get(tried, (0, 0.0))[0] + 1
        until = now + _RETRY_S * 2.0 ** min(times - 1, _MOST_DOUBLINGS)
        notes: dict[Any, tuple[int, float]] = {**self.notes, tried: (times, until)}
        if len(notes) > _MOST:
            # Of equal ones the oldest.
            del notes[min(notes, key=lambda known: notes[known][1])]
        return FailedTrials(notes)

    def forgotten(self, tried: K) -> FailedTrials[K]:
        """Return these without the failures of a change that has helped."""
        if tried not in self.notes:
            return self
        notes = {**self.notes}
        del notes[tried]
        return FailedTrials(notes)

    def holds(self, tried: K, now: float) -> bool:
        """Return whether the change must not be tried now."""
        return now < self.notes.get(tried, (0, float("-inf")))[1]


# The first look and the last: Gandiva's ten mini-batches are a window or two; 64 resolve 2 % at a scatter of 5 %.
FIRST_WINDOWS: Final = 4
MOST_WINDOWS: Final = 64
DOUBT: Final = 0.05
# Doubt with which a rate counts as changed while nothing else has: it is judged after every window.
_SURE: Final = 0.001


class TrialVerdict(Enum):
    MEASURE = "measure on"
    KEEP = "keep"
    UNDO = "undo"


@dataclass(frozen=True, slots=True)
class GainEstimate:
    """A figure with its standard deviation and the degrees of freedom that this was estimated with."""

    value: float
    deviation: float = 0.0
    freedom: float = math.inf

    def bounds(self, doubt: float) -> tuple[float, float]:
        """Return the confidence bounds by Student's t; the error probability of each is `doubt`."""
        if self.deviation == 0.0:
            return self.value, self.value
        reach = _quantile(1.0 - doubt, self.freedom) * self.deviation
        return self.value - reach, self.value + reach


class TrialRates(Struct, frozen=True, gc=False):
    """Steps per second of one job, window by window: `before` the change (alone, where it was) and `after` it. A window
    in which nothing was done counts as zero."""

    before: tuple[float, ...]
    after: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Judged:
    """The outcome of a look at a trial. `gain`: the sum over jobs of the rate after by the rate before; NaN before the
    first look. `is_open`: undone because the last look showed neither a gain nor a loss."""

    verdict: TrialVerdict
    gain: GainEstimate = GainEstimate(math.nan)
    is_open: bool = False


def judge(
    jobs: Sequence[TrialRates], threshold: float, doubt: float = DOUBT, most_windows: int = MOST_WINDOWS
) -> Judged:
    """Keep a change whose gain is above the threshold, undo one whose gain is below, measure on while both may be.
    ValueError for no jobs, for windows that are negative or not finite, and for jobs that stood still before."""
    _check(jobs)
    windows = min(len(job.after) for job in jobs)
    look, used = 0, FIRST_WINDOWS
    found = Judged(TrialVerdict.MEASURE)
    while used <= min(windows, most_windows):
        look += 1
        gain = normalised(TrialRates(job.before, job.after[:used]) for job in jobs)
        low, high = gain.bounds(doubt / 2**look)
        if low > threshold:
            return Judged(TrialVerdict.KEEP, gain)
        if high < threshold:
            return Judged(TrialVerdict.UNDO, gain)
        is_last = 2 * used > most_windows
        found = Judged(TrialVerdict.UNDO if is_last else TrialVerdict.MEASURE, gain, is_last)
        used *= 2
    return found


def normalised(jobs: Iterable[TrialRates]) -> GainEstimate:
    """Return the sum of rates after by before: errors by the delta method, freedom by Welch and Satterthwaite."""
    value = variance = by_freedom = 0.0
    for job in jobs:
        (before, of_before), (after, of_after) = _mean(tuple(job.before)), _mean(tuple(job.after))
        value += after / before
        parts = ((after * of_before / before**2) ** 2, len(job.before)), ((of_after / before) ** 2, len(job.after))
        for part, windows in parts:
            variance += part
            by_freedom += part**2 / (windows - 1)
    return GainEstimate(value, math.sqrt(variance), variance**2 / by_freedom if by_freedom else math.inf)


# Kept co-locations are judged in every pass, mostly by the same windows.
@lru_cache(4096)
def _mean(rates: tuple[float, ...]) -> tuple[float, float]:
    values = np.asarray(rates, float)
    return float(values.mean()), float(values.std(ddof=1)) / math.sqrt(len(values))


def _check(jobs: Sequence[TrialRates]) -> None:
    if not jobs:
        raise ValueError("no job was measured")
    for job in jobs:
        if len(job.before) < 2 or not sum(job.before) > 0.0:
            raise ValueError("a job needs two windows before the change, and some progress in them")
        if not all(0.0 <= rate < math.inf for rate in (*job.before, *job.after)):
            raise ValueError("rates of windows must be finite and not negative")


def _quantile(share: float, freedom: float) -> float:
    # Loading it takes longer than a short simulation, which may try nothing.
    from scipy.special import ndtri, stdtrit

    return float(ndtri(share) if math.isinf(freedom) else stdtrit(freedom, share))


# -- windows of rates ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TrialPace:
    """Durations of measurements and trials.

    Args:
        warm_s: Time from the start of an epoch until its rate is steady.
        settle_s: Time from a change of cores until threads, caches and data loaders have followed it.
        window_s: Least length of a window.
        window_steps: Least number of steps of a window.
        most_s: Longest duration of a trial.
        share: Largest share of its running time, and of its first hour, that a job spends in trials.
        cost: Largest share of its running time, and of its first hour, that trials may cost a job in work.
    """

    warm_s: float = 30.0
    settle_s: float = 5.0
    window_s: float = 2.0
    window_steps: int = 5
    most_s: float = 600.0
    share: float = 0.1
    cost: float = 0.02


@dataclass(frozen=True, slots=True)
class ProgressSample:
    """Steps done at a time, in seconds of one clock. `since_s`: when the first step since the last start or resume was
    done, by that clock; NaN if it was not reported."""

    time_s: float
    step: int
    since_s: float = float("nan")

    def goes_on_from(self, began: ProgressSample) -> bool:
        """Return whether neither job nor clock went back since `began`, and the job was not parked."""
        if self.step < began.step or self.time_s < began.time_s - _CLOCK_S:
            return False
        return not began.time_s < self.since_s - _CLOCK_S


@dataclass(frozen=True, slots=True)
class RateWindows:
    """Windows of one job under one condition.

    open: Where the unfinished window began.
    rates: Of the last full ones, in steps/s.
    since_s: When the job runs steadily, by the master's clock: reports count from then on. Infinite: it does not run.
    """

    open: ProgressSample | None = None
    rates: tuple[float, ...] = ()
    since_s: float = math.inf

    def after(self, sample: ProgressSample, now: float, pace: TrialPace) -> RateWindows:
        """Return the windows after a sample received at `now`. One begins anew after a park, restart or set clock."""
        if now < self.since_s:
            return self
        began = self.open
        if began is None or not sample.goes_on_from(began):
            return replace(self, open=sample)
        seconds, steps = sample.time_s - began.time_s, sample.step - began.step
        if seconds < pace.window_s or seconds <= 0.0 or steps < pace.window_steps:
            return self
        return replace(self, open=sample, rates=(*self.rates, steps / seconds)[-MOST_WINDOWS:])

    @property
    def is_enough(self) -> bool:
        """Whether there are enough windows for a first verdict."""
        return len(self.rates) >= FIRST_WINDOWS

    def differs_from(self, rate: float) -> bool:
        """Return whether the mean rate differs from this one with 99.9 % confidence on each side."""
        if len(self.rates) < 2:
            return False
        mean, error = _mean(self.rates)
        low, high = GainEstimate(mean, error, len(self.rates) - 1).bounds(_SURE)
        return not low <= rate <= high

    @property
    def rate(self) -> float:
        """The median rate, so that an evaluation or a checkpoint in one window does not count; NaN without windows."""
        return median(self.rates) if self.rates else float("nan")


NO_WINDOWS: Final = RateWindows()


# Least gain of a co-location: covers the cost of a trial and of two sets of caches and data loaders.
MARGIN: Final = 0.05
# Least speed of each job, relative to alone; time slicing between two would leave 0.5.
LEAST_SPEED: Final = 0.6
# Windows of a job alone before a trial. Where windows scatter by a tenth, a co-location with gain 1.5 is kept in 16 of
# 100 trials with two such windows, in 59 with four, in 98 with eight.
ALONE_WINDOWS: Final = 8
# Candidates per kind (size of gang, type of GPU): those that use the least of their GPUs.
_MOST_BERTHS: Final = 64

# Type of GPU, and the sorted signatures of all jobs that would share it.
Pair: TypeAlias = tuple[str, tuple[str, ...]]
_Rank: TypeAlias = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Resident:
    """A job as profiled alone. `signature`: jobs with the same one behave alike (model, batch, precision).
    `least_speed`: the least part of its rate alone that it must keep; 1 for a job that may not be co-located."""

    number: int
    signature: str
    pressure: Pressure
    least_speed: float = LEAST_SPEED


@dataclass(frozen=True, slots=True)
class Berth:
    """The devices of one gang, and all jobs that run on all of them."""

    seat: Seat
    device_type: str
    device_memory_bytes: int
    residents: tuple[Resident, ...]

    @property
    def gpus(self) -> int:
        return sum(mask.bit_count() for _, mask in self.seat)

    @property
    def pressures(self) -> list[Pressure]:
        return [one.pressure for one in self.residents]

    @property
    def utilisation(self) -> float:
        return sum(one.pressure.utilisation for one in self.residents)


@dataclass(frozen=True, slots=True)
class ColocationProposal:
    """The guest's residents move to the host's devices, whose own residents stay."""

    guest: Berth
    host: Berth
    forecast: Forecast

    @property
    def residents(self) -> tuple[Resident, ...]:
        return (*self.host.residents, *self.guest.residents)

    @property
    def pair(self) -> Pair:
        return pair_of(self.host, self.guest)


def pair_of(*berths: Berth) -> Pair:
    return berths[0].device_type, tuple(sorted(one.signature for berth in berths for one in berth.residents))


def proposals(
    berths: Collection[Berth],
    failed: FailedTrials[Pair],
    now: float,
    contention: Mapping[str, Contention] = {},
    most: int = 1,
    may: Callable[[Berth, Berth], bool] = lambda host, guest: True,
    wanted: Callable[[Berth], float] = lambda guest: math.inf,
) -> list[ColocationProposal]:
    """Return at most `most` co-locations to try, the largest forecast gain first, no berth in two of them. Call it only
    while the cluster is oversubscribed. `may(host, guest)`: whether the host can take in the guest. `wanted(guest)`:
    GPUs that pending jobs would use of those that this guest and others like it leave."""
    kinds: dict[tuple[int, str, int], list[Berth]] = {}
    for berth in berths:
        if berth.residents and all(one.least_speed < 1.0 for one in berth.residents):
            kinds.setdefault((berth.gpus, berth.device_type, berth.device_memory_bytes), []).append(berth)
    found: dict[_Rank, list[tuple[Berth, Berth]]] = {}
    # By the number of the first resident: the GPUs that earlier guests may leave before those of this one are surplus.
    room: dict[int, float] = {}
    for of_kind in kinds.values():
        first = sorted(of_kind, key=lambda berth: (berth.utilisation, berth.seat))[:_MOST_BERTHS]
        gpus, belief = first[0].gpus, contention.get(first[0].device_type, UNKNOWN_DEVICE)
        room.update({_number(berth): wanted(berth) - gpus for berth in first})
        if max([room[_number(berth)] for berth in first]) < 0:
            continue
        # Gangs that run the same are ranked once for all of them.
        alike: dict[Hashable, int] = {}
        ranks: dict[frozenset[int], _Rank | None] = {}
        grouped = [(alike.setdefault(_likeness(berth), len(alike)), berth) for berth in first]
        for (group, one), (other_group, other) in combinations(grouped, 2):
            both = frozenset((group, other_group))
            if both not in ranks:
                ranks[both] = _rank(one, other, failed, now, belief)
            if (rank := ranks[both]) is not None:
                found.setdefault(rank, []).append(_host_and_guest(one, other))
    chosen: list[ColocationProposal] = []
    used: set[Seat] = set()
    left = 0
    for rank in sorted(found):
        for host, guest in sorted(found[rank], key=lambda pair: (pair[0].seat, pair[1].seat)):
            if len(chosen) == most:
                return chosen
            if host.seat in used or guest.seat in used or left > max(room[_number(host)], room[_number(guest)]):
                continue
            # It takes longer than all the rest, so it is asked last.
            if not may(host, guest):
                if not may(guest, host):
                    continue
                host, guest = guest, host
            if left > room[_number(guest)]:
                continue
            belief = contention.get(host.device_type, UNKNOWN_DEVICE)
            expected = forecast([*host.pressures, *guest.pressures], host.device_memory_bytes, belief)
            chosen.append(ColocationProposal(guest, host, expected))
            left += guest.gpus
            used.update((host.seat, guest.seat))
    return chosen


def judge_colocation(proposal: ColocationProposal, rates: Mapping[int, TrialRates]) -> Judged:
    """Judge a co-location by its windows so far; it is also undone when one job has become too slow. `rates`: by number
    of all residents, `before` alone and `after` co-located, without the first mini-batches."""
    found = judge([rates[one.number] for one in proposal.residents], 1.0 + MARGIN)
    if found.verdict is TrialVerdict.UNDO:
        return found
    each = [judge([rates[one.number]], one.least_speed) for one in proposal.residents]
    too_slow = [one for one in each if one.verdict is TrialVerdict.UNDO]
    if too_slow:
        return Judged(TrialVerdict.UNDO, found.gain, all(one.is_open for one in too_slow))
    if any(one.verdict is TrialVerdict.MEASURE for one in each):
        return Judged(TrialVerdict.MEASURE, found.gain)
    return found


def still_pays(residents: Sequence[Resident], rates: Mapping[int, TrialRates]) -> bool:
    """Return whether a kept co-location should stay: until, beyond doubt, time slicing would be better or one job is
    too slow. `after` of `rates`: the latest windows."""
    windows = tuple([rates[one.number] for one in residents])
    return _still_pays(windows, tuple([one.least_speed for one in residents]))


def lesson(proposal: ColocationProposal, rates: Mapping[int, TrialRates]) -> ColocationTrial:
    """Return the measurement for the interference model, whatever the verdict was."""
    speeds = tuple(normalised([rates[one.number]]).value for one in proposal.residents)
    return ColocationTrial(tuple(one.pressure for one in proposal.residents), speeds)


# Kept co-locations are judged in every pass, mostly by the same windows.
@lru_cache(4096)
def _still_pays(windows: tuple[TrialRates, ...], least_speeds: tuple[float, ...]) -> bool:
    if min(len(one.after) for one in windows) < FIRST_WINDOWS:
        return True
    if normalised(windows).bounds(DOUBT / 10)[1] < 1.0:
        return False
    each = zip(windows, least_speeds, strict=True)
    return all(normalised([one]).bounds(DOUBT / 10)[1] >= least_speed for one, least_speed in each)


def _likeness(berth: Berth) -> Hashable:
    return tuple([(one.signature, one.pressure, one.least_speed) for one in berth.residents])


def _rank(host: Berth, guest: Berth, failed: FailedTrials[Pair], now: float, belief: Contention) -> _Rank | None:
    """Return the sort key of a pair, smaller is better; None if it is not worth trying. Of equal gains the one that
    leaves more of the GPU idle is better: its forecast is surer."""
    residents = (*host.residents, *guest.residents)
    speeds = shared_speeds([one.pressure for one in residents], belief)
    too_slow = any(speed < one.least_speed for speed, one in zip(speeds, residents, strict=True))
    pays = sum(speeds) > 1.0 + MARGIN
    if not pays or too_slow or failed.holds(pair_of(host, guest), now):
        return None
    if not fit_together([one.pressure for one in residents], host.device_memory_bytes):
        return None
    return -sum(speeds), host.utilisation + guest.utilisation


def _number(berth: Berth) -> int:
    return berth.residents[0].number


def _host_and_guest(one: Berth, other: Berth) -> tuple[Berth, Berth]:
    """Return host and guest: the fewer residents move, then the less memory."""

    def key(berth: Berth) -> tuple[int, float, Seat]:
        return (len(berth.residents), sum(pressure.memory_bytes for pressure in berth.pressures), berth.seat)

    guest, host = sorted((one, other), key=key)
    return host, guest
