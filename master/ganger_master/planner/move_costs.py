"""How long a move will make a job stand still: as its own last one did, else as those of others of its size did."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, TypeAlias

from ganger_master.core.model import Gang, Job

# Bytes of state, and seconds that its move took.
Measured: TypeAlias = tuple[tuple[float, float], ...]

# What `ganger bench move` promises of a machine nobody has moved anything on: 0.3 s, and a gigabyte a second. Counts as
# one measurement at either end.
_UNMEASURED: Final[Measured] = ((0.0, 0.3), (1e9, 1.3))
# So many of the last ones count.
_MOST: Final = 64


def pause_s(job: Job, gang: Gang, measured: Measured = ()) -> float:
    """Seconds of the gang's next move."""
    if job.move_pause_seconds:
        return job.move_pause_seconds
    return _expected(state_bytes(job, gang), (*_UNMEASURED, *measured))


def state_bytes(job: Job, gang: Gang) -> float:
    """What a node sends, at most: all nodes send at once."""
    most = max([claim.device_mask.bit_count() for claim in gang.claims], default=0)
    return float(most * job.used_device_bytes)


def measured_moves(pairs: Iterable[tuple[Job, Gang]]) -> Measured:
    """Of running jobs those that were moved."""
    found = [(state_bytes(job, gang), job.move_pause_seconds) for job, gang in pairs if job.move_pause_seconds]
    return tuple(found[-_MOST:])


def _expected(size: float, points: Measured) -> float:
    """A line through the points, of least squares and with neither part below zero."""
    count = len(points)
    mean_x, mean_y = sum([x for x, _ in points]) / count, sum([y for _, y in points]) / count
    spread = sum([(x - mean_x) ** 2 for x, _ in points])
    slope = max(0.0, sum([(x - mean_x) * (y - mean_y) for x, y in points]) / spread) if spread else 0.0
    base = max(0.0, mean_y - slope * mean_x)
    return base + slope * size
