"""Until when the ranks of this node may step without word from the master: from the sending of the last answered
call."""

from __future__ import annotations

from ganger.injob.lease import NEVER


def lease_until(sent_at_ns: int, lost_after_seconds: float | None) -> int:
    """CLOCK_BOOTTIME nanoseconds for Word.LEASE_UNTIL; NEVER when nodes are never given up.

    `sent_at_ns` is when the last answered Reconcile was sent: counting from the answer would let a slow answer
    stretch the lease beyond what the master counts.
    """
    if lost_after_seconds is None:
        return NEVER
    return sent_at_ns + int(lost_after_seconds * 1e9)
