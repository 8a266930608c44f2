"""The condition under which a master may extend a node's lease: it is known to own the store.

A daemon counts its lease from the sending of the call that was answered. A newer master waits for lost_after and a
margin from the moment at which it took the store over. So an answer is safe if the store was still this master's at,
or shortly before, the time at which it received the call: the lease then ends within the newer master's margin.
"""

from __future__ import annotations

from typing import Final

from ganger_master.core.settings import CoreSettings

# The share of the margin by which the last check may precede the call; the rest is for clocks that drift.
_SHARE_OF_MARGIN: Final = 1.0 / 30.0


def covers(settings: CoreSettings, verified_at: float, received_at: float) -> bool:
    """Return whether a check of the store that began at `verified_at` permits an answer to a call of `received_at`.

    Both are seconds of one clock that is never set and that counts the time the machine sleeps."""
    return received_at <= verified_at + settings.lost_margin_seconds * _SHARE_OF_MARGIN
