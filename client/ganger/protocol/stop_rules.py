"""Where and when ranks stop: the boundary that a gang agrees on, and the execution lease.

A step is the number of boundaries a rank has passed. A rank that sees a stop acknowledges its step; it may then run on,
but never past the limit below, so that it cannot pass the step all will agree on. Pure: points in, decision out.

Why it is safe: a rank that has not acknowledged will do so at its published step or later, so the final stop step
max(acks) + 1 is never below any limit computed on the way. Why it is live: the limit follows the slowest rank that has
not acknowledged, so that rank always finds its partners in the collective operations before its next boundary.

An agreement whose number has `EPOCH_BIT` is carried out at the first end of an epoch at or after its stop step. All
ranks run the same loop, so they come to the same end without another message.

The lease says until when a rank may step without word from the master. The daemon and the launcher decide by the same
rule: whichever of them lives keeps the lease. A lease runs from the sending of the last answered call.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

# In the number of an agreement: ranks whose loop has epochs stop at the end of one. Above all orders of a master, below
# the bits of slice switches and checkpoints.
EPOCH_BIT = 1 << 60
_OTHER_AGREEMENTS = 0b11 << 61


def stops_at_epoch_end(agreement: int) -> bool:
    """Return whether a stop of this number waits for the end of an epoch."""
    return bool(agreement & EPOCH_BIT) and not agreement & _OTHER_AGREEMENTS


class RankPoint(NamedTuple):
    """What one rank has published about one agreement; ``ack`` is None until it has acknowledged this one.

    ``done``: the rank has left its training loop, and ``step`` is its last one.
    """

    step: int
    ack: int | None
    done: bool = False


class BoundaryDecision(NamedTuple):
    """What an acknowledged rank may do: begin steps while its own is below ``limit``; stop exactly at ``stop_step``.

    ``stop_step`` is None while undecided, and ``limit`` equals it once decided. ``finished``: training ends before that
    step, so no rank stops and every rank may run to its end; ``limit`` then says nothing.
    """

    limit: int
    stop_step: int | None
    finished: bool


def decide(points: Sequence[RankPoint], rank: int) -> BoundaryDecision:
    """Apply the rule for ``rank``, which must have acknowledged (or be done)."""
    own = _acknowledged(points[rank])
    if own is None:
        raise ValueError(f"rank {rank} has not acknowledged: acknowledge before asking how far it may run")
    step = stop_step(points)
    if step is not None:
        return BoundaryDecision(step, step, _ends_before(points, step))
    slowest_open = max(point.step for point in points if _acknowledged(point) is None)
    # A rank that is done has run past every limit of its time, so the stop lies past the end for all ranks.
    return BoundaryDecision(max(own, slowest_open) + 1, None, any(point.done for point in points))


def stop_step(points: Sequence[RankPoint]) -> int | None:
    """Return the step all ranks stop at, or None while one of them has neither acknowledged nor ended."""
    acks = []
    for point in points:
        ack = _acknowledged(point)
        if ack is None:
            return None
        acks.append(ack)
    # A single rank has no peers in the next step, so it stops at this boundary.
    return acks[0] if len(acks) == 1 else max(acks) + 1


def _ends_before(points: Sequence[RankPoint], step: int) -> bool:
    # A rank that stopped at `step` and was told to run on may be done right there: that one did stop.
    return any(point.done and (point.ack is None or point.step < step) for point in points)


def _acknowledged(point: RankPoint) -> int | None:
    if point.ack is not None:
        return point.ack
    return point.step if point.done else None


class RelayedPoint(NamedTuple):
    """Boundary point of one rank, as the daemons of a gang exchange it while an agreement is not settled.

    It never goes back: its step only rises, and an acknowledgement stays, together with its step."""

    rank: int
    step: int = 0
    ack_sequence: int = 0
    ack_step: int = 0
    done: bool = False


def merge_point(known: RelayedPoint, received: RelayedPoint) -> RelayedPoint:
    """Return the newer state of a rank. Its points are taken in the order it wrote them, so of two acks at one step the
    last received is newer; their numbers do not show it, since checkpoints and stops are counted apart. The caller
    drops messages that come out of order."""
    assert known.rank == received.rank, "points of different ranks never merge"
    newer = received if received.ack_sequence and received.ack_step >= known.ack_step else known
    step = max(known.step, received.step, known.ack_step, received.ack_step)
    return RelayedPoint(known.rank, step, newer.ack_sequence, newer.ack_step, known.done or received.done)


def merge_points(
    known: Mapping[int, RelayedPoint], received: Iterable[RelayedPoint], own: frozenset[int]
) -> dict[int, RelayedPoint]:
    """Merge the points that another node sent into `known`. Points of this node's own ranks are ignored."""
    merged = dict(known)
    for point in received:
        if point.rank in own or point.rank not in merged:
            continue
        merged[point.rank] = merge_point(merged[point.rank], point)
    return merged


# A lease word of zero means that no lease runs.
NEVER = 0


def expired(until_ns: int, now_ns: int) -> bool:
    """Return whether a lease (`Word.LEASE_UNTIL`) has ended."""
    return until_ns != NEVER and now_ns > until_ns


def must_be_frozen(has_agent: bool, is_opaque: bool) -> bool:
    """Return whether a rank does not stop by itself when its lease ends: it has no agent yet, or no boundaries."""
    return is_opaque or not has_agent


def longest_hold_s(most_s: float, lost_after_s: float | None) -> float:
    """Return how long a heartbeat may be held, in seconds: `most_s`, and at most a quarter of the lease.

    A held call must be answered well within the lease, which counts from the sending of the last answered call.
    """
    return most_s if lost_after_s is None else min(most_s, lost_after_s / 4)


def lease_until(sent_at_ns: int, lost_after_s: float | None) -> int:
    """CLOCK_BOOTTIME nanoseconds for Word.LEASE_UNTIL; NEVER when nodes are never given up.

    `sent_at_ns` is when the last answered Reconcile was sent: counting from the answer would let a slow answer
    stretch the lease beyond what the master counts.
    """
    if lost_after_s is None:
        return NEVER
    return sent_at_ns + int(lost_after_s * 1e9)


def renewed(until_ns: int | None, next_ns: int, has_orders: bool, now_ns: int) -> int | None:
    """Return until when ranks may step after an answer of the master; None if only the leases in their pages count.

    `until_ns`: end of the lease so far; `next_ns`: its end after this answer. `has_orders`: whether the master has sent
    a desired set. A master whose database is being restored sends none. Its answer extends a lease that still runs; it
    does not renew one that has ended, because the jobs may run elsewhere.
    """
    if has_orders or (until_ns is not None and not expired(until_ns, now_ns)):
        return next_ns
    return until_ns
