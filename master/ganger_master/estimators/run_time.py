"""Estimates of remaining running time from jobs of the same kind (user and gang size) submitted next to a job.

With weights w of neighbours, which are larger for nearer ones, the hazard of each bucket of running time is

    h(b) = (sum of w over neighbours that ended in b + lean x g(b)) / (sum of w over neighbours that came to b + lean)

as by Kaplan and Meier (1958); g is the same estimate over all jobs. From h follows Gittins's index of a job that has
run for a (Gittins 1979; Aalto, Ayesta and Righter 2009): the max over D of

    P(T - a <= D | T > a) / E[min(T - a, D) | T > a].
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
# Time attained by a job in the bucket: the bucket's lower edge, and 0 in the first.
_STARTS_S: Final = np.concatenate(((0.0,), EDGES_S[1:-1]))
# Mean running time of jobs that end in a bucket, spread evenly over its logarithm.
_MEANS_S: Final = (EDGES_S[1:] - EDGES_S[:-1]) / np.log(EDGES_S[1:] / EDGES_S[:-1])
# From a job's bucket (rows) to each bucket: whether that is ahead, seconds to the mean end in it, and seconds to its
# upper edge. Passed buckets have one second, to avoid a division by zero.
_IS_AHEAD: Final[Floats] = np.triu(np.ones((BUCKETS, BUCKETS)))
_MEANS_AHEAD_S: Final = _MEANS_S - _STARTS_S[:, None]
_ENDS_AHEAD_S: Final = np.where(_IS_AHEAD > 0, EDGES_S[1:] - _STARTS_S[:, None], 1.0)
# Hazard of each bucket if all buckets from it on are equally likely.
_EVEN: Final = 1.0 / np.arange(BUCKETS, 0, -1)
# Jobs that have run for less are in the bucket for certain; no job leaves the last one.
_ALMOST_NEXT_S: Final = np.concatenate((EDGES_S[1:-1] * (1 - 1e-9), (np.inf,)))
# Weights of the two priors, in jobs: of the hazard of all jobs, and of that of the neighbours.
_ALL_LEAN, _LEAN = 2.0, 0.5
# The weight of a neighbour falls by this factor with each place, up to so many places away.
_NEARNESS, _REACH = 0.8, 16
_WEIGHTS: Final[Floats] = _NEARNESS ** np.arange(_REACH, dtype=np.float64)
# The same as Python floats.
_WEIGHT: Final = tuple(_WEIGHTS.tolist())
# Weights that a neighbour adds to each bucket: one row for each distance and number of buckets that it counts for.
_ADDED: Final[Floats] = (_WEIGHTS[:, None, None] * (np.arange(BUCKETS) < np.arange(BUCKETS + 1)[:, None])).reshape(
    -1, BUCKETS
)
# Weights of all places from the furthest back to the furthest on; a job is no neighbour of itself.
_BESIDE: Final[Floats] = np.concatenate((_WEIGHTS[::-1], (0.0,), _WEIGHTS))
_FURTHEST_ON: Final = len(_BESIDE) - 1
# All indices are recomputed once the number of events has grown by this share; until then only those of neighbours.
STALE: Final = 0.05

Integers = np.ndarray[tuple[int], np.dtype[np.int64]]


@dataclass(slots=True)
class _Kind:
    submitted: int = 0
    slots: dict[int, int] = field(default_factory=dict)
    # Buckets in which the latest jobs ended; -1 for live jobs and for those without an observed end.
    ended: deque[int] = field(default_factory=lambda: deque(maxlen=_REACH))


class ServiceMemory:
    """Estimator of live jobs from ended and live ones. Each live job has a slot, a small number that is reused. Memory
    grows with the numbers of live jobs and kinds, not with that of ended jobs."""

    def __init__(self, stale: float = STALE) -> None:
        self._stale = stale
        self._kinds: dict[Hashable, _Kind] = {}
        # Over all jobs, by bucket: jobs that ended there, and jobs that ended there or passed it.
        self._all_ended, self._all_came = np.zeros(BUCKETS), np.zeros(BUCKETS)
        # How often jobs ended or came to a next bucket.
        self._news = self._news_at_refresh = 0
        self._kind_of: list[_Kind | None] = []
        self._place: list[int] = []
        # By slot: the bucket of the job, and the running time at which it leaves the bucket.
        self._bucket, self._leaves_s = np.zeros(0, np.int64), np.zeros(0)
        # By slot: the same counts of its neighbours, weighted; the index, and whether it is up to date.
        self._ended, self._came = np.zeros((0, BUCKETS)), np.zeros((0, BUCKETS))
        self._index, self._is_fresh = np.zeros(0), np.zeros(0, bool)
        # By slot: the slots of live neighbours at the places from the furthest back to the furthest on; -1: none.
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
        # Running times never fall, but what was reported of them may have been ahead by what the last stop took.
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
            # Neighbourhood is symmetric: the distance is the same, in the other direction.
            self._beside[beside[at], _FURTHEST_ON - at] = -1

    def index(self, slots: Integers, ran_s: Floats) -> Floats:
        """Return Gittins's index, in 1 / seconds, of the jobs in these slots, which have run for `ran_s`."""
        self._are_at(slots, ran_s)
        if self._news > self._news_at_refresh * (1 + self._stale):
            self._news_at_refresh = self._news
            self._is_fresh[:] = False
        old = slots[~self._is_fresh[slots]]
        if len(old):
            self._index[old] = gittins(self._hazards(old), self._bucket[old])
            self._is_fresh[old] = True
        return np.asarray(self._index[slots], float)

    def remaining_s(self, slots: Integers, ran_s: Floats) -> Floats:
        """The median seconds that jobs in these slots, which ran so long, run yet. NaN before any has ended."""
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
        of_all_jobs = (self._all_ended + _ALL_LEAN * _EVEN) / (self._all_came + _ALL_LEAN)
        found: Floats = self._ended.take(slots, axis=0)
        found += _LEAN * of_all_jobs
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
    """Return the index, in 1 / seconds, of jobs (rows) at the lower edges of these buckets. `hazards` (jobs, BUCKETS):
    the share of the jobs that come to a bucket that ends in it."""
    ending = hazards * _IS_AHEAD.take(buckets, axis=0)
    # In place: for few jobs an allocation takes as long as the arithmetic.
    goes_on = 1.0 - ending
    np.multiply.accumulate(goes_on, axis=1, out=goes_on)
    # Share of all jobs that ends in each bucket.
    ending[:, 1:] *= goes_on[:, :-1]
    ending *= _MEANS_AHEAD_S.take(buckets, axis=0)
    taken = np.add.accumulate(ending, axis=1, out=ending)
    taken += goes_on * _ENDS_AHEAD_S.take(buckets, axis=0)
    return np.asarray(np.maximum.reduce((1.0 - goes_on) / taken, axis=1, initial=0.0), float)


def median_left(hazards: Floats, ran_s: Floats) -> Floats:
    """Return the seconds, at least 0, until half of the jobs like each (rows) that have run for `ran_s` have ended.
    `hazards` (jobs, BUCKETS): as for `gittins`. Ends in a bucket are spread evenly over its logarithm. Where more than
    half of the jobs pass the last edge, the result is the time to that edge."""
    edges = np.log2(EDGES_S)
    at = np.log2(np.clip(ran_s, EDGES_S[0], EDGES_S[-1]))
    first = np.minimum(np.searchsorted(edges, at, side="right") - 1, BUCKETS - 1)
    rows = np.arange(len(hazards))
    goes_on = np.where(np.arange(BUCKETS) < first[:, None], 1.0, 1.0 - hazards)
    survives = np.concatenate((np.ones((len(hazards), 1)), np.cumprod(goes_on, axis=1)), axis=1)
    part = (at - edges[first]) / (edges[first + 1] - edges[first])
    now = survives[rows, first] + part * (survives[rows, first + 1] - survives[rows, first])
    # Half of the jobs that are live now.
    is_past = (survives <= now[:, None] / 2.0) & (np.arange(BUCKETS + 1) > first[:, None])
    after = np.where(is_past.any(axis=1), is_past.argmax(axis=1), BUCKETS)
    high, low = survives[rows, after - 1], survives[rows, after]
    fallen = np.divide(high - now / 2.0, high - low, out=np.ones(len(rows)), where=high > low)
    end = edges[after - 1] + np.clip(fallen, 0.0, 1.0) * (edges[after] - edges[after - 1])
    return np.asarray(np.maximum(2.0**end - np.maximum(ran_s, 0.0), 0.0), float)
