"""Which jobs to put on one GPU together: tried where a forecast promises a gain, kept only where measuring shows it.

A pack pays when the sum of its residents' rates, each by its rate alone, is more than the best of its parts made of the
GPU before: one job alone makes exactly 1, and so does time slicing. Gandiva (OSDI 2018, section 3.3) tries the job of
the lowest utilisation on the GPU of the lowest utilisation; here the interference model, which learns from every
trial, says what to try first and what not at all. Pairs that did not work are remembered by what kinds of jobs they
were, and tried again after a while, for jobs change. Packs are watched as long as they last.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import combinations
from typing import Final, TypeAlias

from ganger_master.models.interference import (
    UNKNOWN_DEVICE,
    Contention,
    Forecast,
    Pressure,
    Trial,
    forecast,
    shared_speeds,
)
from ganger_master.policies.introspect.failed import Failed
from ganger_master.policies.introspect.slicing import Seat
from ganger_master.policies.introspect.trial import DOUBT, FIRST_WINDOWS, Judged, Rates, Verdict, judge, normalised

# A pack must be better by this much: what a trial costs, and what two sets of caches and data loaders do besides.
MARGIN: Final = 0.05
# Nobody is to lose more than slicing among two would take from it, nearly.
LEAST_SPEED: Final = 0.6
# Windows of a job alone before it is tried: what they leave open no trial can settle. Where windows scatter by a tenth,
# a pack that makes 1.5 is kept in 16 of 100 trials with two of them, in 59 with four, in 98 with eight.
ALONE_WINDOWS: Final = 8
# Of each kind (size of gang, type of GPU) so many are looked at, those that use the least of their GPUs.
_MOST_BERTHS: Final = 64

# Type of GPU, and the signatures of all who would share it, in order.
Pair: TypeAlias = tuple[str, tuple[str, ...]]
_Rank: TypeAlias = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Resident:
    """A job as profiled alone. `signature`: what behaves like it (model, batch, precision). `least_speed`: the least of
    its rate alone that it may be slowed down to; who may not be packed has 1."""

    number: int
    signature: str
    pressure: Pressure
    least_speed: float = LEAST_SPEED


@dataclass(frozen=True, slots=True)
class Berth:
    """The devices of one gang, and all who run on all of them. `gain`: measured sum of normalised rates."""

    seat: Seat
    device_type: str
    device_memory_bytes: int
    residents: tuple[Resident, ...]
    gain: float = 1.0

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
class Proposal:
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

    @property
    def threshold(self) -> float:
        """The gain from which on the pack is kept."""
        return (1.0 + MARGIN) * max(self.host.gain, self.guest.gain)


def pair_of(*berths: Berth) -> Pair:
    return berths[0].device_type, tuple(sorted(one.signature for berth in berths for one in berth.residents))


def proposals(
    berths: Collection[Berth],
    failed: Failed[Pair],
    now: float,
    contention: Mapping[str, Contention] = {},
    most: int = 1,
    may: Callable[[Berth, Berth], bool] = lambda host, guest: True,
    wanted: Callable[[Berth], float] = lambda guest: math.inf,
) -> list[Proposal]:
    """At most so many packs to try, the largest forecast gain first, no berth in two of them. Ask only while more is
    wanted than there is: else everybody has a GPU of its own. `may`: whether this host can take in this guest.
    `wanted`: how many GPUs others would take of those that this guest leaves, and others like it."""
    kinds: dict[tuple[int, str, int], list[Berth]] = {}
    for berth in berths:
        if berth.residents and all(one.least_speed < 1.0 for one in berth.residents):
            kinds.setdefault((berth.gpus, berth.device_type, berth.device_memory_bytes), []).append(berth)
    found: list[tuple[_Rank, Berth, Berth]] = []
    for of_kind in kinds.values():
        of_kind.sort(key=lambda berth: (berth.utilisation, berth.seat))
        first = of_kind[:_MOST_BERTHS]
        belief = contention.get(first[0].device_type, UNKNOWN_DEVICE)
        # Of many gangs some run the same, and what is said of two of them holds for others.
        numbers: dict[Hashable, int] = {}
        like = [numbers.setdefault(_likeness(berth), len(numbers)) for berth in first]
        ranks: dict[tuple[int, int], _Rank | None] = {}
        for (one, host), (other, guest) in combinations(zip(like, first, strict=True), 2):
            if (one, other) not in ranks:
                ranks[one, other] = _rank(host, guest, failed, now, belief)
            rank = ranks[one, other]
            if rank is not None:
                found.append((rank, host, guest))
    chosen: list[Proposal] = []
    used: set[Seat] = set()
    left = 0

    def comes_too_late(one: Berth, other: Berth) -> bool:
        """Whether the two are in no pack any more, whoever of them were the guest."""
        if one.seat in used or other.seat in used:
            return True
        return left + one.gpus > max(wanted(one), wanted(other))

    for host, guest in _best_first(found, may, comes_too_late):
        if len(chosen) == most:
            break
        if left + guest.gpus > wanted(guest):
            continue
        belief = contention.get(host.device_type, UNKNOWN_DEVICE)
        expected = forecast([*host.pressures, *guest.pressures], host.device_memory_bytes, belief)
        if expected.fits:
            chosen.append(Proposal(guest, host, expected))
            left += guest.gpus
            used.update((host.seat, guest.seat))
    return chosen


def verdict(proposal: Proposal, rates: Mapping[int, Rates]) -> Judged:
    """What measuring says so far: `rates` of all residents by number, `before` alone and `after` in the pack, those of
    its first mini-batches left out. Undone as well when somebody has become too slow."""
    everybody = proposal.residents
    found = judge([rates[one.number] for one in everybody], proposal.threshold)
    if found.verdict is Verdict.UNDO:
        return found
    each = [judge([rates[one.number]], one.least_speed) for one in everybody]
    too_slow = [one for one in each if one.verdict is Verdict.UNDO]
    if too_slow:
        return Judged(Verdict.UNDO, found.gain, all(one.is_open for one in too_slow))
    if any(one.verdict is Verdict.MEASURE for one in each):
        return Judged(Verdict.MEASURE, found.gain)
    return found


def still_pays(residents: Sequence[Resident], rates: Mapping[int, Rates], doubt: float = DOUBT / 10) -> bool:
    """Whether a pack that was kept is to stay: until it is less than time slicing would give, or somebody in it too
    slow, beyond doubt. `after`: its latest windows."""
    measured = [rates[one.number] for one in residents]
    if min(len(one.after) for one in measured) < FIRST_WINDOWS:
        return True
    if normalised(measured).bounds(doubt)[1] < 1.0:
        return False
    return all(
        normalised([one]).bounds(doubt)[1] >= resident.least_speed
        for one, resident in zip(measured, residents, strict=True)
    )


def lesson(proposal: Proposal, rates: Mapping[int, Rates]) -> Trial:
    """For the interference model, whatever the verdict was."""
    speeds = tuple(normalised([rates[one.number]]).value for one in proposal.residents)
    return Trial(tuple(one.pressure for one in proposal.residents), speeds)


def _likeness(berth: Berth) -> Hashable:
    """All that a forecast asks of it."""
    residents = [(one.signature, one.pressure, one.least_speed) for one in berth.residents]
    return berth.gain, tuple(residents)


def _rank(host: Berth, guest: Berth, failed: Failed[Pair], now: float, belief: Contention) -> _Rank | None:
    """Smaller is better; None: not worth trying. Of equal gains the surer one: that which leaves more of the GPU
    idle."""
    residents = (*host.residents, *guest.residents)
    speeds = shared_speeds([one.pressure for one in residents], belief)
    too_slow = any(speed < one.least_speed for speed, one in zip(speeds, residents, strict=True))
    pays = sum(speeds) > (1.0 + MARGIN) * max(host.gain, guest.gain)
    if not pays or too_slow or failed.holds(pair_of(host, guest), now):
        return None
    return -sum(speeds), host.utilisation + guest.utilisation


def _best_first(
    found: Collection[tuple[_Rank, Berth, Berth]],
    may: Callable[[Berth, Berth], bool],
    comes_too_late: Callable[[Berth, Berth], bool],
) -> Iterator[tuple[Berth, Berth]]:
    """Hosts and guests, by rank, then by seat; none of which is said by its turn that it comes too late. `may` is asked
    of no more pairs than come to be looked at: it takes longer than all the rest."""
    line: list[tuple[_Rank, tuple[Seat, Seat], int, bool, Berth, Berth]] = []
    for number, (rank, one, other) in enumerate(found):
        # Either of them may turn out to be the host: the pair comes no earlier than so.
        seats = (one.seat, other.seat) if one.seat < other.seat else (other.seat, one.seat)
        line.append((rank, seats, number, False, one, other))
    heapify(line)
    while line:
        rank, seats, number, is_certain, host, guest = heappop(line)
        if comes_too_late(host, guest):
            continue
        if not is_certain:
            host, guest = _who_moves(host, guest)
            fitting = next((pair for pair in ((host, guest), (guest, host)) if may(*pair)), None)
            if fitting is None:
                continue
            host, guest = fitting
            if (host.seat, guest.seat) != seats:
                heappush(line, (rank, (host.seat, guest.seat), number, True, host, guest))
                continue
        yield host, guest


def _who_moves(one: Berth, other: Berth) -> tuple[Berth, Berth]:
    """Host and guest: the fewer residents move, then the less memory."""

    def key(berth: Berth) -> tuple[int, float, Seat]:
        return (len(berth.residents), sum(pressure.memory_bytes for pressure in berth.pressures), berth.seat)

    guest, host = sorted((one, other), key=key)
    return host, guest
