"""How much service a job will still take, learned from the jobs like it that have ended.

Service is GPU-seconds. Jobs are alike along a path from general to particular (all, those of a user, those of that user
and name, of that gang size): what is known of each step is the histogram of the services of its jobs that have ended,
and a step that knows little leans on the one before it (Dirichlet smoothing; the first leans on no scale at all, as if
every doubling were as likely). From a histogram follows Gittins's index of a job that has attained a:

    G(a) = max over D of  P(S - a <= D | S > a) / E[min(S - a, D) | S > a],

the best rate at which service ends such jobs (Gittins 1979; Aalto, Ayesta and Righter 2009 for unknown service times).
Serving the highest index first minimises the mean time in system on one server; nobody needs to know a duration.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ganger_master.models.accuracy import Floats

Integers = NDArray[np.int64]

# Half doublings from 8 GPU-seconds to 2**33 (270 GPU-years); what is shorter or longer counts at the ends.
_FIRST_LOG2, _LAST_LOG2, _PER_DOUBLING = 3, 33, 2
_BUCKETS: Final = (_LAST_LOG2 - _FIRST_LOG2) * _PER_DOUBLING
_EDGES: Final = 2.0 ** (_FIRST_LOG2 + np.arange(_BUCKETS + 1) / _PER_DOUBLING)
# Of a bucket's jobs, as if they were spread evenly over its logarithms.
_MEANS: Final = (_EDGES[1:] - _EDGES[:-1]) / np.log(_EDGES[1:] / _EDGES[:-1])
# Where a job stands that is in the bucket: its lower edge; in the first one nothing is attained.
_STARTS: Final = np.concatenate(((0.0,), _EDGES[1:-1]))
# So many jobs of its own outweigh what a step leans on.
_LEANING: Final = 2.0
# The indices of a step are made anew once it has grown by this share.
_STALE: Final = 0.05


class ServiceMemory:
    """Learns from ended jobs; answers for live ones. Memory grows with the number of different paths, not with jobs."""

    def __init__(self) -> None:
        self._step_of: dict[tuple[str, ...], int] = {(): 0}
        self._parent = [-1]
        self._counts = np.zeros((16, _BUCKETS))
        self._indices = np.zeros((16, _BUCKETS))
        self._made_at = np.full(16, -1.0)

    def step(self, path: Sequence[str]) -> int:
        """The number of the last step of a path, to ask about its jobs."""
        number = 0
        for length in range(1, len(path) + 1):
            key = tuple(path[:length])
            found = self._step_of.get(key)
            if found is None:
                found = self._step_of[key] = len(self._parent)
                self._parent.append(number)
                if found == len(self._counts):
                    self._grow()
            number = found
        return number

    def learn(self, step: int, service: float) -> None:
        """A job of that step ended after so many GPU-seconds."""
        bucket = int(_buckets(np.array([service]))[0])
        while step >= 0:
            self._counts[step, bucket] += 1.0
            step = self._parent[step]

    def index(self, steps: Integers, attained: Floats) -> Floats:
        """Gittins's index of jobs of these steps, in 1 / GPU-seconds."""
        for step in np.unique(steps).tolist():
            known = self._counts[step].sum()
            if self._made_at[step] < 0 or known > self._made_at[step] * (1 + _STALE) + 0.5:
                self._indices[step] = _gittins(self._distribution(step))
                self._made_at[step] = known
        indices: Floats = self._indices[steps, _buckets(attained)]
        return indices

    def _distribution(self, step: int) -> Floats:
        """Shares of the buckets for jobs of a step, with what it leans on."""
        if step < 0:
            return np.full(_BUCKETS, 1.0 / _BUCKETS)
        counts = self._counts[step]
        shares: Floats = (counts + _LEANING * self._distribution(self._parent[step])) / (counts.sum() + _LEANING)
        return shares

    def _grow(self) -> None:
        more = len(self._counts)
        self._counts = np.concatenate((self._counts, np.zeros((more, _BUCKETS))))
        self._indices = np.concatenate((self._indices, np.zeros((more, _BUCKETS))))
        self._made_at = np.concatenate((self._made_at, np.full(more, -1.0)))


def _buckets(service: Floats) -> Integers:
    """The bucket each service lies in."""
    with np.errstate(divide="ignore"):
        place = np.floor((np.log2(service) - _FIRST_LOG2) * _PER_DOUBLING)
    found: Integers = np.clip(place, 0, _BUCKETS - 1).astype(np.int64)
    return found


def _gittins(shares: Floats) -> Floats:
    """The index at the lower edge of every bucket, for services distributed so."""
    # From bucket i (row) up to and with bucket j (column).
    ending = np.triu(np.ones((_BUCKETS, _BUCKETS)))
    ends = np.cumsum(ending * shares, axis=1)
    taken_by_ended = np.cumsum(ending * shares * (_MEANS - _STARTS[:, None]), axis=1)
    longer = np.triu((shares[::-1].cumsum()[::-1] - shares)[None, :].repeat(_BUCKETS, 0))
    taken = taken_by_ended + longer * np.maximum(_EDGES[1:][None, :] - _STARTS[:, None], 0.0)
    rates = np.divide(ends, taken, out=np.zeros_like(ends), where=taken > 0)
    best: Floats = rates.max(axis=1)
    return best
