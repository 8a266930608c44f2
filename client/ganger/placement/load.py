"""Whether the cluster is lightly or heavily loaded: spread gangs apart, or pack them."""

from __future__ import annotations

from ganger.resources.view import Mode

# Pack from here on, to keep holes for large gangs; spread again below the lower one. The gap keeps one gang's coming
# and going from flipping the mode. The values are ours: the paper that proposes the switch gives none.
_PACK_FROM = 0.7
_SPREAD_BELOW = 0.5


def choose_mode(previous: Mode, held: int, total: int) -> Mode:
    """`held` of `total` devices belong to gangs. In between the previous mode stays."""
    load = held / total if total else 0.0
    if load >= _PACK_FROM:
        return Mode.PACK
    if load < _SPREAD_BELOW:
        return Mode.SPREAD
    return previous
