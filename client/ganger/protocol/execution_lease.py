"""The execution lease: until when a rank may step without word from the master, and which ranks are frozen afterwards.

The daemon and the launcher decide by the same rule: whichever of them lives keeps the lease. A lease runs from the
sending of the last answered call.
"""

from __future__ import annotations

# A lease word of zero means that no lease runs.
NEVER = 0


def expired(until_ns: int, now_ns: int) -> bool:
    """Whether a lease (`Word.LEASE_UNTIL`) has ended."""
    return until_ns != NEVER and now_ns > until_ns


def must_be_frozen(has_agent: bool, is_opaque: bool) -> bool:
    """Whether a rank does not stop by itself when its lease ends: no agent has reported, or it has no boundaries."""
    return is_opaque or not has_agent


def lease_until(sent_at_ns: int, lost_after_seconds: float | None) -> int:
    """CLOCK_BOOTTIME nanoseconds for Word.LEASE_UNTIL; NEVER when nodes are never given up.

    `sent_at_ns` is when the last answered Reconcile was sent: counting from the answer would let a slow answer
    stretch the lease beyond what the master counts.
    """
    if lost_after_seconds is None:
        return NEVER
    return sent_at_ns + int(lost_after_seconds * 1e9)


def renewed(until_ns: int | None, next_ns: int, has_orders: bool, now_ns: int) -> int | None:
    """Return until when ranks may step after an answer of the master; None if only the leases in their pages count.

    `until_ns`: end of the lease so far; `next_ns`: its end after this answer. `has_orders`: whether the master has sent
    a desired set. A master whose database is being restored sends none. Its answer extends a lease that still runs; it
    does not renew one that has ended, because the jobs may run elsewhere.
    """
    if has_orders or (until_ns is not None and not expired(until_ns, now_ns)):
        return next_ns
    return until_ns
