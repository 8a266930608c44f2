"""Fair time slices: shares, the least quantum, and migrations between time-slice groups.

A share is max-min fair by weight, at most the whole time. A slice lasts a minute (Gandiva, OSDI 2018, section 3.2).

Where jobs do not divide evenly among devices, jobs with fewer neighbours receive more, and no order of slices corrects
that: six jobs on four devices are two pairs and two alone. So a neighbour of the job that is furthest behind its share
moves to the device of the job that is furthest ahead, if fewer jobs are there. The crowd moves on, and every job is
alone for a time. Gandiva (OSDI 2018, section 3.3) moves once, to balance load; here the gap in received time decides,
so the migrations continue.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from ganger.protocol.slice_rotation import SWITCHES_PER_QUANTUM
from msgspec import Struct

# Node and mask of its devices, by node.
Seat: TypeAlias = tuple[tuple[str, int], ...]

QUANTUM_S: Final = 60.0

# Minimum time between two migrations of a job, in pauses (which then cost two per cent) and in quanta.
_PAUSES_BETWEEN: Final = 50.0
_QUANTA_BETWEEN: Final = 2.0


@dataclass(frozen=True, slots=True)
class ServiceBalance:
    """A running gang, alone or time-sliced.

    `kind`: gangs of one kind can use each other's devices. `behind_s`: seconds it lacks of its share. `settled_s`:
    seconds since it moved or came. `pause_s`: cost of its migration. `may_share`: it may be time-sliced. `may_move`: it
    may migrate for that.
    """

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
    """Job `number` moves to the devices of `host` from those of `helped`, which is `gap_s` seconds behind the host."""

    number: int
    host: int
    helped: int
    gap_s: float


class SliceShare(Struct, frozen=True, gc=False):
    """A gang that shares devices, by its number."""

    number: int
    gpus: int
    weight: float = 1.0


def quantum_s(switch_s: float, wanted_s: float = QUANTUM_S) -> float:
    """Return the seconds of a slice: as wanted, and at least fifty times the measured switch."""
    return max(wanted_s, SWITCHES_PER_QUANTUM * switch_s)


def shares(sharers: Sequence[SliceShare], gpus: float) -> dict[int, float]:
    """Return the share of the time that each gang is entitled to on so many devices, by number: in proportion to
    weights, at most 1 (water-filling)."""
    found: dict[int, float] = {}
    rest, left = list(sharers), gpus
    while rest:
        level = left / sum([one.weight * one.gpus for one in rest])
        full = [one for one in rest if level * one.weight >= 1.0]
        if not full:
            found.update({one.number: level * one.weight for one in rest})
            break
        found.update(dict.fromkeys([one.number for one in full], 1.0))
        left -= sum([one.gpus for one in full])
        rest = [one for one in rest if level * one.weight < 1.0]
    return found


def balanced(standings: Sequence[ServiceBalance], quantum_s: float) -> list[Going]:
    """Return the migrations to make now: only where the gap exceeds a quantum, and each device at most once."""
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
    """Return whether they have no device in common."""
    own = dict(one.seat)
    return not any(own.get(name, 0) & mask for name, mask in host.seat)
