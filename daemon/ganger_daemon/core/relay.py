"""Boundary points that the daemons of one gang exchange while a stop is undecided, and their merging.

A point never goes back: its step only rises, and an acknowledgement of a stop stays. A point carries the
acknowledgement together with its step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RelayedPoint:
    rank: int
    step: int = 0
    ack_sequence: int = 0
    ack_step: int = 0
    done: bool = False


def merge(known: RelayedPoint, heard: RelayedPoint) -> RelayedPoint:
    """Return the newer state of a rank. Its points arrive in the order it wrote them, so of two acks at one step the
    last received is newer; their numbers do not show it, since checkpoints and stops are counted apart."""
    assert known.rank == heard.rank, "points of different ranks never merge"
    newer = heard if heard.ack_sequence and heard.ack_step >= known.ack_step else known
    step = max(known.step, heard.step, known.ack_step, heard.ack_step)
    return RelayedPoint(known.rank, step, newer.ack_sequence, newer.ack_step, known.done or heard.done)


def merge_all(
    known: Mapping[int, RelayedPoint], heard: Iterable[RelayedPoint], own: frozenset[int]
) -> dict[int, RelayedPoint]:
    """Merge the points that another node sent into `known`. Points of this node's own ranks are ignored."""
    merged = dict(known)
    for point in heard:
        if point.rank in own or point.rank not in merged:
            continue
        merged[point.rank] = merge(merged[point.rank], point)
    return merged
