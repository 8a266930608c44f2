"""How many tasks of one kind each rack, each fabric and the cluster could take: sums that follow single nodes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ganger.cluster.resources import LocalityLevel

Counts = NDArray[np.int64]
# Where more nodes than one in so many changed, all are counted again.
_MANY = 8


class CapacityTotals:
    """`racks` and `fabrics`: by slot, the number of its span; -1 where nobody named it. `most`: tasks counted on one
    node, however many more it could take."""

    def __init__(self, most: int, racks: NDArray[np.int32], fabrics: NDArray[np.int32]) -> None:
        self._most = most
        self._racks = racks
        self._fabrics = fabrics
        self._counts = np.zeros(0, np.int64)
        # What belongs to no span is summed up behind the last one, where -1 points; None until somebody asks.
        self._by_rack: Counts | None = None
        self._by_fabric: Counts | None = None
        self._whole = np.zeros(1, np.int64)
        self._seen = 0

    def follow(self, journal: Sequence[int], entries: NDArray[np.int32], room_of: Counts) -> None:
        """`journal`: slots that changed since the room was made; `entries`: by slot, which entry of the index it is;
        `room_of`: by entry, the tasks that such a node could take."""
        behind = len(journal) - self._seen
        if not len(self._counts) or behind * _MANY > len(entries):
            self._counts = np.minimum(room_of[entries], self._most)
            self._by_rack = self._by_fabric = None
            self._whole = self._counts.sum(keepdims=True)
        elif behind:
            changed = set(journal[self._seen :])
            slots = np.fromiter(changed, np.intp, len(changed))
            counts = np.minimum(room_of[entries[slots]], self._most)
            more = counts - self._counts[slots]
            self._counts[slots] = counts
            if self._by_rack is not None:
                np.add.at(self._by_rack, self._racks[slots], more)
            if self._by_fabric is not None:
                np.add.at(self._by_fabric, self._fabrics[slots], more)
            self._whole += more.sum()
        self._seen = len(journal)

    def totals(self, level: LocalityLevel) -> Counts:
        """By number of rack or fabric, or of the whole cluster; not to be written to."""
        if level is LocalityLevel.RACK:
            if self._by_rack is None:
                self._by_rack = _summed(self._racks, self._counts)
            return self._by_rack[:-1]
        if level is LocalityLevel.FABRIC:
            if self._by_fabric is None:
                self._by_fabric = _summed(self._fabrics, self._counts)
            return self._by_fabric[:-1]
        return self._whole


def _summed(spans: NDArray[np.int32], counts: Counts) -> Counts:
    size = int(spans.max(initial=-1)) + 2
    # Sums of whole numbers far below 2**53 are exact.
    return np.bincount(np.where(spans < 0, size - 1, spans), weights=counts, minlength=size).astype(np.int64)
