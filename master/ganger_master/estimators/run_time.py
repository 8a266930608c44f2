"""How long a job will still take, learned from the jobs like it: those submitted next to it.

People submit series: the same program again with other parameters, on as many GPUs. So a job is most like the jobs of
its kind (user and gang) that were submitted just before and after it, and of each of those something is known: how long
it took, or, while it lives, that it takes longer than it has run so far. From these the chance to end is estimated
bucket by bucket of the running time, as Kaplan and Meier do (1958), nearer jobs counting more:

    h(b) = (sum of w over neighbours that ended in b + lean x g(b)) / (sum of w over neighbours that came to b + lean).

It leans on g, the same of all jobs alike; and that leans on "as if every doubling were as likely". A neighbour that
still runs counts for the buckets it has left behind. From h follows Gittins's index of a job that has run for a:

    G(a) = max over D of  P(T - a <= D | T > a) / E[min(T - a, D) | T > a],

the best rate at which running ends such a job (Gittins 1979; Aalto, Ayesta and Righter 2009 for unknown service times):
serving the highest rate per GPU first minimises the mean time in system on one server. Nobody is told a duration.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from ganger_master.estimators.fitting import Floats

# Doublings from 8 s to 2**27 s (four years); what is shorter or longer counts at the ends.
_FIRST_LOG2, _LAST_LOG2, _PER_DOUBLING = 3, 27, 2
BUCKETS: Final = (_LAST_LOG2 - _FIRST_LOG2) * _PER_DOUBLING
EDGES_S: Final = 2.0 ** (_FIRST_LOG2 + np.arange(BUCKETS + 1) / _PER_DOUBLING)
_FIRST_EDGE_S: Final = float(EDGES_S[0])
# Where a job stands that is in the bucket: its lower edge; in the first one nothing is attained.
_STARTS_S: Final = np.concatenate(((0.0,), EDGES_S[1:-1]))
# Of those who end in a bucket, as if they were spread evenly over its logarithms.
_MEANS_S: Final = (EDGES_S[1:] - EDGES_S[:-1]) / np.log(EDGES_S[1:] / EDGES_S[:-1])
# From where one stands that is in a bucket (rows) to each bucket: whether that is ahead, seconds to the mean end in it,
# and seconds to its upper edge. Of a bucket behind, where nobody ends, one second, so that it can be divided by.
_IS_AHEAD: Final[Floats] = np.triu(np.ones((BUCKETS, BUCKETS)))
_MEANS_AHEAD_S: Final = _MEANS_S - _STARTS_S[:, None]
_ENDS_AHEAD_S: Final = np.where(_IS_AHEAD > 0, EDGES_S[1:] - _STARTS_S[:, None], 1.0)
# Of who comes to a bucket, the share that ends in it, if each bucket from it on is as likely.
_EVEN: Final = 1.0 / np.arange(BUCKETS, 0, -1)
# Who has run for less than this is in the bucket still; nobody leaves the last one.
_ALMOST_NEXT_S: Final = np.concatenate((EDGES_S[1:-1] * (1 - 1e-9), (np.inf,)))
# So many jobs outweigh what all jobs lean on, and the neighbours what they do.
_ALL_LEAN, _LEAN = 2.0, 0.5
# The next neighbour but one counts for so much of the next one, and so on, up to so many places away.
_NEARNESS, _REACH = 0.8, 16
_WEIGHTS: Final[Floats] = _NEARNESS ** np.arange(_REACH, dtype=np.float64)
# The same, to be asked for one by one.
_WEIGHT: Final = tuple(_WEIGHTS.tolist())
# What a neighbour adds to each bucket: a row for each number of buckets, from the first one on, that it counts for, of
# the nearest one first.
_ADDED: Final[Floats] = (_WEIGHTS[:, None, None] * (np.arange(BUCKETS) < np.arange(BUCKETS + 1)[:, None])).reshape(
    -1, BUCKETS
)
# Of all places from the one furthest back to the one furthest on; a job is no neighbour of itself.
_BESIDE: Final[Floats] = np.concatenate((_WEIGHTS[::-1], (0.0,), _WEIGHTS))
_FURTHEST_ON: Final = len(_BESIDE) - 1
# All indices are made anew once there is so much more news, by share; until then only where neighbours tell some.
STALE: Final = 0.05

Integers = np.ndarray[tuple[int], np.dtype[np.int64]]


@dataclass(slots=True)
class _Kind:
    """Jobs of one user and gang, by place in the line of their submissions."""

    submitted: int = 0
    slots: dict[int, int] = field(default_factory=dict)
    # Of the last few, the bucket each ended in; -1 of those that live, or went without being seen to end.
    ended: deque[int] = field(default_factory=lambda: deque(maxlen=_REACH))


class ServiceMemory:
    """Learns from ended jobs and from those that go on; answers for live ones, which it knows by a slot each: a small
    number that may be used again. Memory grows with live jobs and with kinds, not with ended jobs."""

    def __init__(self, stale: float = STALE) -> None:
        self._stale = stale
        self._kinds: dict[Hashable, _Kind] = {}
        # Of all jobs, by bucket: who ended there, and who came there and is known to have ended there or gone on.
        self._all_ended, self._all_came = np.zeros(BUCKETS), np.zeros(BUCKETS)
        # How often jobs ended or came to a next bucket.
        self._news = self._news_at_refresh = 0
        self._kind_of: list[_Kind | None] = []
        self._place: list[int] = []
        # By slot, and how long who is there has run when it leaves it.
        self._bucket, self._leaves_s = np.zeros(0, np.int64), np.zeros(0)
        # By slot: the same of its neighbours, weighted; the index and whether it is still what they say.
        self._ended, self._came = np.zeros((0, BUCKETS)), np.zeros((0, BUCKETS))
        self._index, self._is_fresh = np.zeros(0), np.zeros(0, bool)
        # By slot: the slots of those who live at the places from the one furthest back to the one furthest on; -1: of
        # nobody.
        self._beside = np.zeros((0, len(_BESIDE)), np.int64)

    def begin(self, slot: int, kind: Hashable) -> None:
        """A job of that kind was submitted; the slot is its own until its end."""
        while slot >= len(self._bucket):
            self._grow()
        assert self._kind_of[slot] is None, f"slot {slot} is taken"
        found = self._kinds.get(kind)
        if found is None:
            found = self._kinds[kind] = _Kind()
        place, found.submitted = found.submitted, found.submitted + 1
        self._kind_of[slot], self._place[slot] = found, place
        self._bucket[slot], self._leaves_s[slot], self._is_fresh[slot] = 0, _ALMOST_NEXT_S[0], False
        self._ended[slot], self._came[slot], self._beside[slot] = 0.0, 0.0, -1
        ended: dict[int, float] = {}
        added = []
        for distance, bucket in enumerate(reversed(found.ended)):
            if bucket >= 0:
                ended[bucket] = ended.get(bucket, 0.0) + _WEIGHT[distance]
                added.append(distance * (BUCKETS + 1) + bucket + 1)
            elif (other := found.slots.get(place - 1 - distance)) is not None:
                added.append(distance * (BUCKETS + 1) + self._bucket.item(other))
                self._beside[slot, _REACH - 1 - distance] = other
                self._beside[other, _REACH + 1 + distance] = slot
        for bucket, weight in ended.items():
            self._ended[slot, bucket] = weight
        if added:
            # Row by row, so that sums are those of one neighbour after the other.
            self._came[slot] = np.add.reduce(_ADDED.take(added, axis=0))
        found.slots[place] = slot
        found.ended.append(-1)

    def end(self, slot: int, ran_s: float) -> None:
        """The job in that slot ended by itself after running so long."""
        begun = self._bucket.item(slot)
        # Running times never fall, but what was told of them may have been ahead by what the last stop took.
        bucket = max(begun, bucket_of(ran_s))
        kind, place = self._kind_of[slot], self._place[slot]
        assert kind is not None, f"slot {slot} is free"
        near, weights = self._neighbours(slot)
        if len(near):
            self._ended[near, bucket] += weights
            self._came[near, begun : bucket + 1] += weights[:, None]
            self._is_fresh[near] = False
        self._all_ended[bucket] += 1.0
        self._all_came[begun : bucket + 1] += 1.0
        self._news += bucket + 1 - begun
        behind = kind.submitted - place
        if behind <= len(kind.ended):
            kind.ended[-behind] = bucket
        self.leave(slot)

    def leave(self, slot: int) -> None:
        """The job in that slot is gone, and how long it would have taken is not known."""
        kind = self._kind_of[slot]
        assert kind is not None, f"slot {slot} is free"
        del kind.slots[self._place[slot]]
        self._kind_of[slot] = None
        beside = self._beside[slot]
        at = (beside >= 0).nonzero()[0]
        if len(at):
            # Who is so far on from it has it as far back.
            self._beside[beside[at], _FURTHEST_ON - at] = -1

    def index(self, slots: Integers, ran_s: Floats) -> Floats:
        """Gittins's index of the jobs in these slots, which have run so long, in 1 / seconds."""
        self._are_at(slots, ran_s)
        if self._news > self._news_at_refresh * (1 + self._stale):
            self._news_at_refresh = self._news
            self._is_fresh[:] = False
        old = slots[~self._is_fresh[slots]]
        if len(old):
            self._index[old] = gittins(self._hazards(old), self._bucket[old])
            self._is_fresh[old] = True
        found: Floats = self._index[slots]
        return found

    def remaining_s(self, slots: Integers, ran_s: Floats) -> Floats:
        """How long the jobs in these slots, which have run so long, will run yet: the median, in seconds. NaN before
        any job has ended."""
        if not self._all_ended.any():
            return np.full(len(slots), np.nan)
        self._are_at(slots, ran_s)
        return median_left(self._hazards(slots), ran_s)

    def _are_at(self, slots: Integers, ran_s: Floats) -> None:
        # Logarithms and edges may differ in the last digit.
        for position in (ran_s >= self._leaves_s[slots]).nonzero()[0].tolist():
            slot, bucket = int(slots[position]), bucket_of(float(ran_s[position]))
            if bucket > self._bucket[slot]:
                self._goes_on(slot, bucket)

    def _hazards(self, slots: Integers) -> Floats:
        """(slots, BUCKETS): of who comes to a bucket the share that ends in it."""
        everybody = (self._all_ended + _ALL_LEAN * _EVEN) / (self._all_came + _ALL_LEAN)
        found: Floats = self._ended.take(slots, axis=0)
        found += _LEAN * everybody
        came = self._came.take(slots, axis=0)
        came += _LEAN
        found /= came
        return found

    def _goes_on(self, slot: int, bucket: int) -> None:
        """It has come to this bucket, so it ended in none before it."""
        begun = int(self._bucket[slot])
        if bucket <= begun:
            return
        assert self._kind_of[slot] is not None, f"slot {slot} is free"
        near, weights = self._neighbours(slot)
        if len(near):
            self._came[near, begun:bucket] += weights[:, None]
            self._is_fresh[near] = False
        self._all_came[begun:bucket] += 1.0
        self._news += bucket - begun
        self._bucket[slot], self._leaves_s[slot], self._is_fresh[slot] = bucket, _ALMOST_NEXT_S[bucket], False

    def _neighbours(self, slot: int) -> tuple[Integers, Floats]:
        """Slots of those that live next to this one's place, and how much they make of each other."""
        beside = self._beside[slot]
        at = (beside >= 0).nonzero()[0]
        return beside[at], _BESIDE[at]

    def _grow(self) -> None:
        more = max(64, len(self._bucket))
        self._kind_of += [None] * more
        self._place += [0] * more
        self._bucket = np.concatenate((self._bucket, np.zeros(more, np.int64)))
        self._leaves_s = np.concatenate((self._leaves_s, np.zeros(more)))
        self._ended = np.concatenate((self._ended, np.zeros((more, BUCKETS))))
        self._came = np.concatenate((self._came, np.zeros((more, BUCKETS))))
        self._index = np.concatenate((self._index, np.zeros(more)))
        self._beside = np.concatenate((self._beside, np.zeros((more, len(_BESIDE)), np.int64)))
        self._is_fresh = np.concatenate((self._is_fresh, np.zeros(more, bool)))


def bucket_of(ran_s: float) -> int:
    """The bucket in which a running time lies."""
    if ran_s < _FIRST_EDGE_S:
        return 0
    return min(int((np.log2(ran_s) - _FIRST_LOG2) * _PER_DOUBLING), BUCKETS - 1)


def gittins(hazards: Floats, buckets: Integers) -> Floats:
    """The index of jobs (rows) at the lower edges of these buckets, in 1 / seconds. `hazards` (jobs, BUCKETS): of who
    comes to a bucket the share that ends in it."""
    ending = hazards * _IS_AHEAD.take(buckets, axis=0)
    # In place: of few jobs to make room for columns takes as long as to fill them.
    goes_on = 1.0 - ending
    np.multiply.accumulate(goes_on, axis=1, out=goes_on)
    # Of all who are here, those who end in each bucket.
    ending[:, 1:] *= goes_on[:, :-1]
    ending *= _MEANS_AHEAD_S.take(buckets, axis=0)
    taken = np.add.accumulate(ending, axis=1, out=ending)
    taken += goes_on * _ENDS_AHEAD_S.take(buckets, axis=0)
    best: Floats = np.maximum.reduce((1.0 - goes_on) / taken, axis=1, initial=0.0)
    return best


def median_left(hazards: Floats, ran_s: Floats) -> Floats:
    """Seconds until half of such jobs (rows) have ended that have run for `ran_s`. `hazards` (jobs, BUCKETS) as for
    `gittins`; ends of a bucket are spread evenly over its logarithm. To the last edge where more than half go on beyond
    it; never less than nothing."""
    edges = np.log2(EDGES_S)
    at = np.log2(np.clip(ran_s, EDGES_S[0], EDGES_S[-1]))
    first = np.minimum(np.searchsorted(edges, at, side="right") - 1, BUCKETS - 1)
    rows = np.arange(len(hazards))
    goes_on = np.where(np.arange(BUCKETS) < first[:, None], 1.0, 1.0 - hazards)
    survives = np.concatenate((np.ones((len(hazards), 1)), np.cumprod(goes_on, axis=1)), axis=1)
    part = (at - edges[first]) / (edges[first + 1] - edges[first])
    now = survives[rows, first] + part * (survives[rows, first + 1] - survives[rows, first])
    # Of those who are left, half.
    is_past = (survives <= now[:, None] / 2.0) & (np.arange(BUCKETS + 1) > first[:, None])
    after = np.where(is_past.any(axis=1), is_past.argmax(axis=1), BUCKETS)
    high, low = survives[rows, after - 1], survives[rows, after]
    fallen = np.divide(high - now / 2.0, high - low, out=np.ones(len(rows)), where=high > low)
    end = edges[after - 1] + np.clip(fallen, 0.0, 1.0) * (edges[after] - edges[after - 1])
    left: Floats = np.maximum(2.0**end - np.maximum(ran_s, 0.0), 0.0)
    return left
