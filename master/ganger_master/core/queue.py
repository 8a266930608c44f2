"""Pending jobs by priority and arrival, subsets of them, and their placement leases."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Mapping
from typing import Final, TypeAlias

from ganger.cluster.refusals import Reason, Refusal
from ganger.cluster.resources import Claim
from msgspec import Struct

# The policy's key of a job, and its number behind.
Place: TypeAlias = tuple[int, ...]


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
    kept_nodes: tuple[str, ...] = ()
    # Where a plan would start the job, with its cores and its number of devices.
    suggested: tuple[Claim, ...] = ()

    def is_sent_late(self, now: float) -> bool:
        """Return whether so much of the lease has passed before it is sent that it must begin anew."""
        return now - self.given > _AT_ONCE * (self.expires - self.given)


# The share of a lease within which it must be sent to its holder.
_AT_ONCE: Final = 0.1


class Blocked(Struct, frozen=True, gc=False):
    """The first waiting jobs that lack pieces, and the time from which room is kept for one of them."""

    numbers: tuple[int, ...]
    waited_from: float


class KeptPlaces(Struct, frozen=True, gc=False):
    """The places that were last found for the jobs of these numbers, by job name."""

    numbers: tuple[int, ...]
    view_version: int
    time: float
    places: Mapping[str, tuple[Claim, ...]]


def is_lack(refusals: tuple[Refusal, ...]) -> bool:
    return bool(refusals) and refusals[0].reason.waits_for_capacity


def is_lasting(refusals: tuple[Refusal, ...], is_strict: bool) -> bool:
    """Return whether a job with these refusals waits for no other job. A strict queue also keeps room for nodes."""
    if not refusals or not refusals[0].reason.is_passed_over:
        return False
    return refusals[0].reason is not Reason.NODE_UNAVAILABLE or not is_strict


class Waiting:
    """A sorted set of places; the caller adds each place at most once."""

    def __init__(self) -> None:
        self._places: list[Place] = []

    def add(self, place: Place) -> None:
        insort(self._places, place)

    def remove(self, place: Place) -> None:
        """Remove a place, which must be present."""
        del self._places[bisect_left(self._places, place)]

    def rank(self, place: Place) -> int:
        """Return how many places are before this one."""
        return bisect_left(self._places, place)

    def __iter__(self) -> Iterator[int]:
        """Iterate over the job numbers, in order."""
        return (place[-1] for place in self._places)

    def places(self) -> Iterator[Place]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


class QueueSubset(Waiting):
    """Some of the waiting jobs, in the same order."""

    def __init__(self) -> None:
        super().__init__()
        self._place_of: dict[int, Place] = {}

    def note(self, place: Place, belongs: bool) -> None:
        """Record whether the job at that place belongs to the subset."""
        number = place[-1]
        if belongs and number not in self._place_of:
            self._place_of[number] = place
            self.add(place)
        elif not belongs:
            self.forget(number)

    def forget(self, number: int) -> None:
        place = self._place_of.pop(number, None)
        if place is not None:
            self.remove(place)

    def __contains__(self, number: int) -> bool:
        return number in self._place_of


class JobQueue:
    """The waiting jobs, and what a restart loses of them: refusals, and the planner's ranking.

    front: all waiting jobs except those that are aside. aside: jobs whose last refusal depends on no other job;
    aside_from: the offset of those that are considered now; aside_at: since when. lacking: jobs whose last refusal was
    a lack of pieces. resuming: jobs that are parked somewhere, and keep memory there. passed: jobs that were refused or
    passed at a view version, and when: they get no lease until the view changes or time passes. declined: jobs whose
    schedulers left places unused, which keep no room, while they wait or (True) for a locality wish. conflicts: refused
    tries. blocked: what `kept_places` found, until a refusal or a conflict comes or goes. kept: the places that are
    kept for these jobs. ranks, ranked_by: the planner's last ranking, and its policy. kept_by_plan: the places that the
    planner keeps for waiting jobs; kept_by_plan_at: when it last reported them. suggested: places at which a plan
    starts jobs, in its order, until these jobs get a lease.
    """

    def __init__(self) -> None:
        self.waiting = Waiting()
        self.front = Waiting()
        self.aside = QueueSubset()
        self.aside_from = 0
        self.aside_at = 0.0
        self.lacking = QueueSubset()
        self.resuming: dict[int, None] = {}
        self.refusals: dict[int, tuple[Refusal, ...]] = {}
        self.conflicts: dict[int, int] = {}
        self.passed: dict[int, tuple[int, float]] = {}
        self.declined: dict[int, bool] = {}
        self.blocked: Blocked | None = None
        self.kept: KeptPlaces | None = None
        self.ranks: dict[int, int] = {}
        self.ranked_by = ""
        self.kept_by_plan: dict[int, tuple[Claim, ...]] = {}
        self.kept_by_plan_at = 0.0
        self.suggested: dict[int, tuple[Claim, ...]] = {}

    def join(self, place: Place) -> None:
        if place[-1] in self.refusals:
            self.blocked = None
        self.waiting.add(place)
        if place[-1] not in self.aside:
            self.front.add(place)

    def leave(self, place: Place) -> None:
        number = place[-1]
        self.waiting.remove(place)
        if number not in self.aside:
            self.front.remove(place)
        self.forget_refusals(number)
        for known in (self.conflicts, self.passed, self.declined, self.kept_by_plan, self.suggested):
            if known:
                known.pop(number, None)

    def note_refusals(self, place: Place, refusals: tuple[Refusal, ...], waits: bool, is_strict: bool) -> None:
        """Record why the last request of a job was refused. waits: it is in the queue. is_strict: see `is_lasting`."""
        number = place[-1]
        self.refusals[number] = refusals
        self.lacking.note(place, is_lack(refusals))
        lasts = is_lasting(refusals, is_strict)
        if lasts != (number in self.aside) and waits:
            (self.front.remove if lasts else self.front.add)(place)
        self.aside.note(place, lasts)

    def forget_refusals(self, number: int) -> None:
        self.lacking.forget(number)
        self.aside.forget(number)
        if self.refusals.pop(number, None) is not None and self.blocked is not None and number in self.blocked.numbers:
            self.blocked = None

    def note_conflicts(self, number: int, count: int) -> None:
        self.conflicts[number] = self.conflicts.get(number, 0) + count
        self.blocked = None

    def note_declined(self, number: int, is_patient: bool | None) -> None:
        """Record that a job's scheduler left a place unused; None: it is asked anew."""
        if is_patient is None:
            del self.declined[number]
        else:
            self.declined[number] = is_patient
        self.blocked = None

    def set_clock(self, moved: Callable[[float], float]) -> None:
        """Replace times by `moved` ones."""
        self.passed = {number: (version, moved(time)) for number, (version, time) in self.passed.items()}
        # It depends on how long blocked jobs have waited.
        self.blocked = None
        self.kept_by_plan_at = moved(self.kept_by_plan_at)


class LeaseTable(dict[int, GrantedLease]):
    """The placement leases by their own number.

    turn_of: by job. lost_turns: leases of a job that expired unused. returned: when a scheduler that had lost its
    leases last came back, by job. claimed_by: the stream that claims a job.
    """

    def __init__(self) -> None:
        super().__init__()
        self.turn_of: dict[int, int] = {}
        self.next_turn = 1
        self.lost_turns: dict[int, int] = {}
        self.returned: dict[int, float] = {}
        self.claimed_by: dict[int, str] = {}

    def put(self, lease: GrantedLease) -> None:
        self[lease.turn] = lease
        self.turn_of[lease.number] = lease.turn
        self.next_turn = max(self.next_turn, lease.turn + 1)

    def of_job(self, number: int) -> GrantedLease | None:
        return self.get(self.turn_of.get(number, 0))

    def drop(self, number: int) -> None:
        """Take the job's lease back, if it has one."""
        turn = self.turn_of.pop(number, None)
        if turn is not None:
            del self[turn]

    def drop_all(self) -> None:
        self.turn_of.clear()
        self.clear()

    def give_up_claims(self, scheduler: str) -> None:
        for number in [number for number, owner in self.claimed_by.items() if owner == scheduler]:
            del self.claimed_by[number]

    def set_clock(self, moved: Callable[[float], float]) -> None:
        """Replace times by `moved` ones."""
        self.returned = {number: moved(time) for number, time in self.returned.items()}
