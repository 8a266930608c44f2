"""What scans read of a view: a NumPy column for each thing that they look at, with one entry per slot."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(slots=True)
class Columns:
    """Slots without a node are never available."""

    free: NDArray[np.uint64]
    available: NDArray[np.bool_]
    millicores: NDArray[np.int64]
    memory: NDArray[np.int64]
    sets: NDArray[np.int32]
    racks: NDArray[np.int32]
    fabrics: NDArray[np.int32]

    @classmethod
    def empty(cls, size: int) -> Columns:
        """Of so many slots, none with a node yet."""
        return cls(
            free=np.zeros(size, np.uint64),
            available=np.zeros(size, np.bool_),
            millicores=np.zeros(size, np.int64),
            memory=np.zeros(size, np.int64),
            sets=np.zeros(size, np.int32),
            racks=np.zeros(size, np.int32),
            fabrics=np.zeros(size, np.int32),
        )

    def copy(self) -> Columns:
        return Columns(*[getattr(self, name).copy() for name in Columns.__slots__])
