"""How long a move will make a job stand still: as its own last one did, else as those of others of its size did."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, TypeAlias

from ganger_master.core.model import Gang, JobRecord

# Bytes of state, and seconds that its move took.
_Measured: TypeAlias = tuple[float, float]
# What `ganger bench move` promises of a machine nobody has moved anything on: 0.3 s, and a gigabyte a second. Counts as
# one measurement at either end.
_UNMEASURED: Final[tuple[_Measured, ...]] = ((0.0, 0.3), (1e9, 1.3))
# So many of the last ones count.
_MOST: Final = 64


@dataclass(frozen=True, slots=True)
class MoveCosts:
    """Seconds of any move, and for each byte of state."""

    base_s: float
    byte_s: float

    def pause_s(self, job: JobRecord, gang: Gang) -> float:
        """Of the gang's next move."""
        return job.move_pause_seconds or self.base_s + self.byte_s * state_bytes(job, gang)


def move_costs(pairs: Iterable[tuple[JobRecord, Gang]]) -> MoveCosts:
    """By the running jobs that were moved: a line through them, of least squares and with neither part below zero."""
    moved = [(state_bytes(job, gang), job.move_pause_seconds) for job, gang in pairs if job.move_pause_seconds]
    points = (*_UNMEASURED, *moved[-_MOST:])
    count = len(points)
    mean_x, mean_y = sum([x for x, _ in points]) / count, sum([y for _, y in points]) / count
    spread = sum([(x - mean_x) ** 2 for x, _ in points])
    slope = max(0.0, sum([(x - mean_x) * (y - mean_y) for x, y in points]) / spread)
    return MoveCosts(max(0.0, mean_y - slope * mean_x), slope)


def state_bytes(job: JobRecord, gang: Gang) -> float:
    """What a node sends, at most: all nodes send at once."""
    most = max([claim.device_mask.bit_count() for claim in gang.claims], default=0)
    return float(most * job.used_device_bytes)
