"""Who of those that take turns goes to be with whom, so that in the long run all have the same time on devices.

Where devices do not divide evenly among jobs, whoever has fewer neighbours has more than others, and no order of rows
mends that: six on four are two pairs and two alone. So of those on a device with who is furthest behind what it is
entitled to, who is behind the least goes to who is furthest ahead, where fewer are: the crowd moves on, and everybody
is alone in its turn. Gandiva (OSDI 2018, section 3.3) moves to balance load, once; the gap that decides here is one of
time received, so the moves go on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ganger_master.policies.slicing import Seat

# As of switches: what a move stops may be two per cent of the time to the next.
_PAUSES_BETWEEN: Final = 50.0
# Nobody moves again sooner.
_QUANTA_BETWEEN: Final = 2.0


@dataclass(frozen=True, slots=True)
class ServiceBalance:
    """One gang that runs, alone or in turns. `kind`: whose devices are as good for whom; `behind_s`: how far it is
    behind what it is entitled to, in seconds; `settled_s`: since it moved, or came; `pause_s`: what its move costs;
    `may_share`: it may take turns; `may_move`: and go elsewhere for them."""

    number: int
    kind: tuple[object, ...]
    seat: Seat
    behind_s: float
    settled_s: float
    pause_s: float
    may_share: bool = True
    may_move: bool = True


@dataclass(frozen=True, slots=True)
class Going:
    """`number` goes to where `host` is, from where `helped` is, who is `gap_s` seconds behind the host."""

    number: int
    host: int
    helped: int
    gap_s: float


def balanced(standings: Sequence[ServiceBalance], quantum_s: float) -> list[Going]:
    """Who goes now: only where the gap is more than the next quantum mends, each device once."""
    crowds = Counter([one.seat for one in standings])
    found: list[Going] = []
    touched: set[tuple[str, int]] = set()
    sharing = sorted([one for one in standings if one.may_share], key=lambda one: (one.behind_s, one.number))
    for one in sorted(sharing, key=lambda one: (-one.behind_s, one.number)):
        beside = [other for other in sharing if other.seat == one.seat and other.number != one.number]
        guest = next((other for other in beside if other.may_move and _is_worth_it(other, quantum_s)), None)
        if guest is None:
            continue
        for host in sharing:
            gap = one.behind_s - host.behind_s
            if gap <= quantum_s:
                break
            busy = touched.intersection((*one.seat, *host.seat))
            if host.kind == one.kind and crowds[host.seat] < crowds[one.seat] and not busy and _is_apart(one, host):
                found.append(Going(guest.number, host.number, one.number, gap))
                touched.update((*one.seat, *host.seat))
                break
    return found


def _is_worth_it(one: ServiceBalance, quantum_s: float) -> bool:
    return one.settled_s >= max(_QUANTA_BETWEEN * quantum_s, _PAUSES_BETWEEN * one.pause_s)


def _is_apart(one: ServiceBalance, host: ServiceBalance) -> bool:
    """Whether they have no device in common."""
    own = dict(one.seat)
    return not any(own.get(name, 0) & mask for name, mask in host.seat)
