"""Until when the ranks of this node may step without word from the master: from the sending of the last answered
call."""

from __future__ import annotations

from ganger.injob.lease import NEVER, expired


def lease_until(sent_at_ns: int, lost_after_seconds: float | None) -> int:
    """CLOCK_BOOTTIME nanoseconds for Word.LEASE_UNTIL; NEVER when nodes are never given up.

    `sent_at_ns` is when the last answered Reconcile was sent: counting from the answer would let a slow answer
    stretch the lease beyond what the master counts.
    """
    if lost_after_seconds is None:
        return NEVER
    return sent_at_ns + int(lost_after_seconds * 1e9)


def renewed(until_ns: int | None, next_ns: int, has_orders: bool, now_ns: int) -> int | None:
    """Return until when ranks may step after an answer of the master; None where only what the ranks have counts.

    `until_ns` is the lease so far, `next_ns` what the answer extends it to. `has_orders`: whether the answer says what
    is to run here. One without orders, of a master whose database is being restored, extends a lease that still runs.
    It does not renew one that has ended: the jobs may run elsewhere, and that master does not know yet.
    """
    if has_orders or (until_ns is not None and not expired(until_ns, now_ns)):
        return next_ns
    return until_ns
