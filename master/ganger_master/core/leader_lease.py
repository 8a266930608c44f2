"""Which of several masters on one database may lead: decisions about the lease of the leader.

The lease is a row of the database: a term, the holder, its address and an expiry by the database's clock. A master
takes the lease only once it has expired, and raises the term with it. Every commit requires the term of its master (a
fencing token), so that a former leader commits nothing, however late it finds out. Clocks of machines are never
compared.
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct

# A leader renews its lease this often within one, so that one renewal may be late or lost.
_RENEWALS: Final = 3
# A stand-by reads the lease this often within one, for a leader that stops gives it back before its end.
_READS: Final = 8
# Shortest wait between two reads of the lease.
_LEAST_WAIT_S: Final = 0.02


class LeaseCandidate(Struct, frozen=True, gc=False):
    """A master that may lead. `holder`: unique for its process; `address`: where it serves, for clients; `lease_s`: how
    long its lease lasts without a renewal."""

    holder: str
    address: str
    lease_s: float


class LeaderLease(Struct, frozen=True, gc=False):
    """The lease as the database has it. `left_s`: until its expiry, by the database's clock; 0 or less: expired."""

    term: int
    holder: str
    address: str
    left_s: float


def may_take(lease: LeaderLease | None) -> bool:
    """Return whether a master may take the lease. `lease`: the present one; None where there was never any."""
    return lease is None or lease.left_s <= 0.0


def renewal_interval_s(lease_s: float) -> float:
    """Return the seconds between two renewals."""
    return lease_s / _RENEWALS


def read_again_s(lease: LeaderLease, lease_s: float) -> float:
    """Return the seconds after which a stand-by reads the lease again: at its end, or earlier."""
    return max(_LEAST_WAIT_S, min(lease.left_s, lease_s / _READS))


def is_held(verified_at: float, now: float, lease_s: float) -> bool:
    """Return whether a leader surely holds its lease at `now`. `verified_at`: when its last good renewal began.

    Both are seconds of one clock of the leader that is never set and that counts the time the machine sleeps. The lease
    in the database began later than `verified_at`, so it ends later than what this function assumes."""
    return now < verified_at + lease_s
