"""The queue of waiting jobs in the policy's order, and subsets of it."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Final, TypeAlias

from ganger.cluster.refusals import Reason, Refusal
from ganger.cluster.resources import Claim
from msgspec import Struct

# The policy's key of a job, and its number behind.
Place: TypeAlias = tuple[int, ...]

# Blockers that only a change of the free pieces removes. Room is kept for jobs that have one.
WAITS_FOR_PIECES: Final = frozenset(
    {Reason.GPUS, Reason.CORES, Reason.MEMORY, Reason.DEVICE_MEMORY, Reason.LOCALITY, Reason.NODE_UNAVAILABLE}
)
# Blockers that do not depend on other jobs of the queue: a job that has one is passed over.
_LASTING: Final = frozenset(
    {
        Reason.QUOTA,
        Reason.DEVICE_TYPE,
        Reason.NODE_UNAVAILABLE,
        Reason.STORAGE_NOT_SHARED,
        Reason.CANNOT_SWITCH_USER,
    }
)
_LONGEST_RUN: Final = 512


class GrantedLease(Struct, frozen=True, gc=False):
    """A placement lease: the right to request a gang until `expires`.

    `given`: when it was decided, in seconds; the holder receives it once that is durable. `tries`: requests so far.
    """

    turn: int
    number: int
    revision: int
    rank: int
    given: float
    expires: float
    scheduler: str
    tries: int = 0
    reserved_nodes: tuple[str, ...] = ()
    # Where a plan would start the job, with its cores and its number of devices.
    suggested: tuple[Claim, ...] = ()

    def is_told_late(self, now: float) -> bool:
        """Return whether so much of the lease has passed before it is sent that it must begin anew."""
        return now - self.given > _AT_ONCE * (self.expires - self.given)


# The share of a lease within which it must be sent to its holder.
_AT_ONCE: Final = 0.1


class Blocked(Struct, frozen=True, gc=False):
    """The first waiting jobs that lack pieces, and the time from which room is kept for one of them."""

    numbers: tuple[int, ...]
    waited_from: float


class ReservedPlaces(Struct, frozen=True, gc=False):
    """The places that were last found for the jobs of these numbers, by job name."""

    numbers: tuple[int, ...]
    view_version: int
    time: float
    places: Mapping[str, tuple[Claim, ...]]


def is_lack(refusals: tuple[Refusal, ...]) -> bool:
    return bool(refusals) and refusals[0].reason in WAITS_FOR_PIECES


def is_lasting(refusals: tuple[Refusal, ...], is_strict: bool) -> bool:
    """Return whether a job with these refusals waits for no other job. A strict queue keeps room also for jobs that
    wait for nodes."""
    if not refusals or refusals[0].reason not in _LASTING:
        return False
    return refusals[0].reason is not Reason.NODE_UNAVAILABLE or not is_strict


class Waiting:
    """A sorted set of places; the caller adds each place at most once.

    Short sorted runs bound the cost of a change: in one list, removing the first place would move all others.
    """

    def __init__(self) -> None:
        self._runs: list[list[Place]] = []
        # The first of each run.
        self._heads: list[Place] = []
        self._count = 0

    def add(self, place: Place) -> None:
        self._count += 1
        if not self._runs:
            self._runs.append([place])
            self._heads.append(place)
            return
        at = max(0, bisect_right(self._heads, place) - 1)
        run = self._runs[at]
        insort(run, place)
        self._heads[at] = run[0]
        if len(run) > _LONGEST_RUN:
            half = len(run) // 2
            self._runs.insert(at + 1, run[half:])
            self._heads.insert(at + 1, run[half])
            del run[half:]

    def remove(self, place: Place) -> None:
        """Remove a place, which must be present."""
        at = bisect_right(self._heads, place) - 1
        run = self._runs[at]
        del run[bisect_left(run, place)]
        self._count -= 1
        if run:
            self._heads[at] = run[0]
        else:
            del self._runs[at], self._heads[at]

    def rank(self, place: Place) -> int:
        """Return how many places are before this one."""
        at = max(0, bisect_right(self._heads, place) - 1)
        before = sum([len(run) for run in self._runs[:at]])
        return before + (bisect_left(self._runs[at], place) if self._runs else 0)

    def __iter__(self) -> Iterator[int]:
        """Iterate over the job numbers, in order."""
        return (place[-1] for place in self.places())

    def places(self) -> Iterator[Place]:
        return chain.from_iterable(self._runs)

    def __len__(self) -> int:
        return self._count


class QueueSubset:
    """Some of the waiting jobs, in the same order."""

    def __init__(self) -> None:
        self._places: dict[int, Place] = {}
        self._order = Waiting()

    def note(self, place: Place, belongs: bool) -> None:
        """Record whether the job at that place belongs to the subset."""
        number = place[-1]
        if belongs and number not in self._places:
            self._places[number] = place
            self._order.add(place)
        elif not belongs:
            self.forget(number)

    def forget(self, number: int) -> None:
        place = self._places.pop(number, None)
        if place is not None:
            self._order.remove(place)

    def __contains__(self, number: int) -> bool:
        return number in self._places

    def __iter__(self) -> Iterator[int]:
        return iter(self._order)

    def __len__(self) -> int:
        return len(self._places)

    def places(self) -> Iterator[Place]:
        return self._order.places()
