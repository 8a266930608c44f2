"""What running jobs show of themselves alone and beside others on their devices: rates, window by window, how busy they
keep a device, and who is where.

Whoever plans feeds it every job that changed and every report of progress. All of it may be lost at any time: it is
measured again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Final, TypeAlias

from ganger.cluster.topology import bits

from ganger_master.core.model import Gang, GangIntent, JobRecord, JobState
from ganger_master.planner import crowds
from ganger_master.planner.core_profiles import TrialPace
from ganger_master.planner.crowds import Crowds
from ganger_master.planner.windows import ProgressSample, RateWindows

_DEFAULT: Final = TrialPace()
_NO_WINDOWS: Final = RateWindows()
# Of when it ran alone, the last ones.
_MOST_ALONE: Final = 16
# Reports of how busy its devices are; the last ones.
_MOST_USES: Final = 60

_Place: TypeAlias = frozenset[tuple[str, int]]
_NOWHERE: Final[_Place] = frozenset()


@dataclass(frozen=True, slots=True)
class _Alone:
    """How it does with its devices to itself: with so many cores, in this incarnation. `first`: the first window of
    another one, of whom nobody knows yet how it scatters."""

    epoch: int = 0
    millicores: int = 0
    rates: tuple[float, ...] = ()
    uses: tuple[float, ...] = ()
    first: tuple[int, int, float] | None = None

    def after(self, epoch: int, millicores: int, rate: float) -> _Alone:
        """With one window more."""
        if (epoch, millicores) == (self.epoch, self.millicores):
            return replace(self, rates=(*self.rates, rate)[-_MOST_ALONE:])
        if self.first is None or self.first[:2] != (epoch, millicores):
            return replace(self, first=(epoch, millicores, rate))
        return _Alone(epoch, millicores, (self.first[2], rate), self.uses)

    @property
    def use(self) -> float:
        """Of whom nobody can tell it keeps its devices busy."""
        return fmean(self.uses) if self.uses else 1.0


@dataclass(frozen=True, slots=True)
class _Seen:
    """One job. `place`: its devices while it runs there; nothing of who takes turns, whom nobody runs beside."""

    create_time: float
    signature: int
    epoch: int = 0
    millicores: int = 0
    place: _Place = _NOWHERE
    # It runs whenever it is its turn.
    takes_turns: bool = False
    beside: frozenset[int] = frozenset()
    # The incarnation that ran last, and when it has warmed up.
    warm: tuple[int, float] = (0, 0.0)
    # From when on reports count: it, and who is beside it, have got used to running so.
    since_s: float = float("inf")
    windows: RateWindows = _NO_WINDOWS
    alone: _Alone = _Alone()


@dataclass(frozen=True, slots=True)
class RememberedColocations:
    """By number."""

    jobs: Mapping[int, _Seen] = field(default_factory=dict)
    crowds: crowds.Remembered = field(default_factory=dict)

    def create_time(self, number: int) -> float | None:
        """Of the job that had this number; None if nothing is known of any."""
        seen = self.jobs.get(number)
        return None if seen is None else seen.create_time


class ColocationRates:
    """By job number. Now is by the master's clock, which all times of jobs are of."""

    def __init__(self, pace: TrialPace = _DEFAULT) -> None:
        self._pace = pace
        self._jobs: dict[int, _Seen] = {}
        self._on: dict[tuple[str, int], set[int]] = {}
        self._crowds = Crowds(pace.settle_s, pace.window_s, pace.window_steps)

    # -- what it is told -----------------------------------------------------------------------------------------------

    def put(self, job: JobRecord, gang: Gang | None, signature: int, now: float) -> None:
        """A job as it is now."""
        number = job.number
        if job.state.is_finished:
            self.forget(number, now)
            return
        seen = self._jobs.get(number)
        if seen is None or seen.create_time != job.create_time:
            self.forget(number, now)
            seen = self._jobs[number] = _Seen(job.create_time, signature)
        runs = _runs(job, gang)
        takes_turns = runs and gang is not None and bool(gang.node_set)
        place = _place_of(gang) if gang is not None and runs and not takes_turns else _NOWHERE
        millicores = sum(sum(claim.millicores) for claim in gang.claims) if gang is not None and runs else 0
        now_is = (place, takes_turns, job.epoch, millicores)
        if now_is == (seen.place, seen.takes_turns, seen.epoch, seen.millicores):
            return
        begins_s = max(now, job.running_since)
        warm = seen.warm
        if runs and job.epoch != warm[0]:
            # Who was parked in memory and goes on need not warm up again.
            warm = job.epoch, begins_s + self._pace.warm_s
        neighbours = self._moved(number, seen.place, place)
        since_s = max(begins_s + self._pace.settle_s, warm[1])
        self._crowds.put(number, place, (millicores, len(place)) if place else None, since_s, now)
        self._jobs[number] = replace(
            seen,
            epoch=job.epoch,
            millicores=millicores,
            place=place,
            takes_turns=takes_turns,
            warm=warm,
            since_s=since_s if runs else float("inf"),
            windows=_NO_WINDOWS,
        )
        for other in {number, *neighbours}:
            self._look_around(other, now)

    def forget(self, number: int, now: float) -> None:
        """It has ended."""
        seen = self._jobs.pop(number, None)
        self._crowds.forget(number, now)
        if seen is not None:
            for other in self._moved(number, seen.place, _NOWHERE):
                self._look_around(other, now)

    def keep(self, is_live: Callable[[int], bool], now: float) -> None:
        """Forgets all others: nobody said how they ended."""
        for number in [number for number in self._jobs if not is_live(number)]:
            self.forget(number, now)

    def record(
        self, number: int, step: int, time_s: float, use: float | None, now: float, since_s: float = float("nan")
    ) -> None:
        """A report of progress, which says of when it is: clocks of nodes may differ. `use`: share of what its devices
        can do. `since_s`: as `Look` has it."""
        seen = self._jobs.get(number)
        if seen is None or now < seen.since_s:
            return
        # Its last step of its last turn, if that: nobody could tell its turn from its rest.
        if seen.takes_turns and not time_s >= since_s:
            return
        look = ProgressSample(time_s, step, since_s)
        if not seen.beside:
            self._crowds.record(number, look, now)
        if use is not None and self._is_alone(seen):
            alone = replace(seen.alone, uses=(*seen.alone.uses, use)[-_MOST_USES:])
            seen = self._jobs[number] = replace(seen, alone=alone)
        windows = seen.windows.after(look, self._pace.window_s, self._pace.window_steps)
        if windows is seen.windows:
            return
        is_full = windows.rates is not seen.windows.rates
        seen = replace(seen, windows=windows)
        if is_full and self._is_alone(seen):
            seen = replace(seen, alone=seen.alone.after(seen.epoch, seen.millicores, windows.rates[-1]))
        self._jobs[number] = seen

    def recall(self, remembered: RememberedColocations) -> None:
        """What one before this remembered."""
        self._jobs, self._on = dict(remembered.jobs), {}
        for number, seen in self._jobs.items():
            for device in seen.place:
                self._on.setdefault(device, set()).add(number)
        self._crowds.recall(remembered.crowds)

    # -- what was seen -------------------------------------------------------------------------------------------------

    @property
    def remembered(self) -> RememberedColocations:
        """For one that goes on from there."""
        return RememberedColocations(self._jobs, self._crowds.remembered)

    def alone(self, number: int) -> tuple[float, ...]:
        seen = self._jobs.get(number)
        return () if seen is None else seen.alone.rates

    def present(self, number: int) -> tuple[float, ...]:
        seen = self._jobs.get(number)
        return () if seen is None else seen.windows.rates

    def beside(self, number: int) -> frozenset[int]:
        seen = self._jobs.get(number)
        return frozenset() if seen is None else seen.beside

    def crowd(self, number: int) -> tuple[int, Mapping[int, tuple[float, ...]]]:
        return self._crowds.load(number), self._crowds.rates(number)

    def utilisation(self, number: int) -> float:
        seen = self._jobs.get(number)
        return 1.0 if seen is None else seen.alone.use

    def signature(self, number: int) -> str:
        seen = self._jobs.get(number)
        return "" if seen is None else f"{seen.signature:016x}"

    # -- one job -------------------------------------------------------------------------------------------------------

    def _is_alone(self, seen: _Seen) -> bool:
        """With all that it ever had alone in this incarnation: who has given cores to a guest that is still to come
        runs by itself, but not as alone."""
        return not seen.beside and (seen.epoch != seen.alone.epoch or seen.millicores >= seen.alone.millicores)

    def _moved(self, number: int, old: _Place, new: _Place) -> frozenset[int]:
        """Who is, or was, on devices with it."""
        found: set[int] = set()
        for device in old - new:
            self._on[device].discard(number)
            found |= self._on[device]
            if not self._on[device]:
                del self._on[device]
        for device in new:
            there = self._on.setdefault(device, set())
            found |= there
            there.add(number)
        return frozenset(found - {number})

    def _look_around(self, number: int, now: float) -> None:
        seen = self._jobs[number]
        beside = frozenset(other for device in seen.place for other in self._on[device]) - {number}
        if beside == seen.beside:
            return
        # Nobody is measured beside one who is only warming up.
        settled = max([self._jobs[other].since_s for other in beside], default=now)
        since_s = max(seen.since_s, settled, now + self._pace.settle_s)
        self._jobs[number] = replace(seen, beside=beside, since_s=since_s, windows=_NO_WINDOWS)


def _runs(job: JobRecord, gang: Gang | None) -> bool:
    holds = gang is not None and job.state is JobState.HOLDING and gang.intent is GangIntent.RUN
    return holds and bool(job.running_since)


def _place_of(gang: Gang) -> _Place:
    return frozenset((claim.node, device) for claim in gang.claims for device in bits(claim.device_mask))
