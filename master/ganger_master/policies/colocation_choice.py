"""Which jobs to put on one GPU together: tried where a forecast promises a gain, kept only where measuring shows it.

A co-location pays if its jobs' normalised rates (rate together over rate alone) sum to more than the better of its
parts reached before: one job alone reaches exactly 1, and so does time slicing (Gandiva, OSDI 2018, section 3.3).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from typing import Final, TypeAlias

from ganger_master.estimators.slowdown import (
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
from ganger_master.policies.trials import (
    DOUBT,
    FIRST_WINDOWS,
    FailedTrials,
    Judged,
    TrialRates,
    TrialVerdict,
    judge,
    normalised,
)

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
