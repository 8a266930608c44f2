"""When a rank may go on without word from the master, and which ranks have to be made to stand still afterwards.

The daemon and the launcher decide by the same rule: whichever of them lives keeps the lease.
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
