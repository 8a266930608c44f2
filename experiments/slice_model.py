"""Fair time slices: the gangs of a time-slice group that run in the next slice, and their devices.

Each gang is entitled to a share of the time (max-min fair by weight, at most all of it). The next slice goes to the
gang that would first be one quantum behind its share (earliest pseudo-deadline first; Baruah et al., Algorithmica
1996). So gangs of equal size are never a quantum behind or ahead. Among gangs of different sizes some can never receive
their whole share; their deficit is bounded, and among these the longest wait goes first. Gandiva (OSDI 2018, section
3.2) rotates a queue instead, which is fair only among equals. As there, gangs are chosen in that order if they fit
beside those chosen before, no gang is suspended for one of lower priority, and a slice lasts a minute. Nodes switch the
slices; this module does not.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ganger.cluster.resources import LocalityLevel
from ganger.cluster.topology import Topology
from ganger_master.policies.fairness import Seat, SliceShare, shares
from msgspec import Struct
from msgspec.structs import replace


@dataclass(frozen=True, slots=True)
class SharedNode:
    """`mask`: the devices that are sliced."""

    name: str
    topology: Topology
    mask: int


class RotatedGang(Struct, frozen=True, gc=False):
    """One gang. `joined_s`: when it came; `received_s`: seconds for which it has run here; `deficit_s`: how far it is
    behind what it is entitled to; `waited_s`: since it last ran. `seat`: where it runs, or ran last; one that
    `is_bound` runs nowhere else."""

    number: int
    gpus: int
    joined_s: float = 0.0
    weight: float = 1.0
    priority: int = 0
    is_preemptible: bool = True
    is_bound: bool = False
    seat: Seat = ()
    runs: bool = False
    received_s: float = 0.0
    deficit_s: float = 0.0
    waited_s: float = 0.0

    @property
    def stays(self) -> bool:
        """It runs, and must not be suspended."""
        return self.runs and not self.is_preemptible


@dataclass(frozen=True, slots=True)
class TimeSlice:
    """Seats of the gangs that run in one slice, by number."""

    seats: Mapping[int, Seat]

    def entering(self, sharers: Iterable[RotatedGang]) -> list[int]:
        return [one.number for one in sharers if one.number in self.seats and not one.runs]

    def leaving(self, sharers: Iterable[RotatedGang]) -> list[int]:
        return [one.number for one in sharers if one.runs and one.number not in self.seats]

    def shifted(self, sharers: Iterable[RotatedGang]) -> list[int]:
        """Return the gangs that continue on devices other than those of their state: more than a switch."""
        return [
            one.number
            for one in sharers
            if one.seat and one.number in self.seats and self.seats[one.number] != one.seat
        ]


def entitled(sharers: Sequence[RotatedGang], gpus: int) -> dict[int, float]:
    """Return the share of the time that each gang is entitled to, by number: 1 for unpreemptible running gangs, then by
    priority in proportion to weights as far as the devices go, at most 1."""
    found = dict.fromkeys((one.number for one in sharers), 0.0)
    left = float(gpus)
    for one in sharers:
        if one.stays:
            found[one.number] = 1.0
            left -= one.gpus
    for priority in sorted({one.priority for one in sharers}, reverse=True):
        rest = [one for one in sharers if one.priority == priority and not one.stays]
        level = shares([SliceShare(one.number, one.gpus, one.weight) for one in rest], max(0.0, left))
        found.update(level)
        left -= sum([level[one.number] * one.gpus for one in rest])
    return found


def credited(
    sharers: Sequence[RotatedGang], running: Collection[int], seconds: float, quantum: float
) -> tuple[RotatedGang, ...]:
    """After these have run for so long, by the clock: a boundary may come late, and what it gave too much is taken into
    account at the next rows. What gangs of mixed sizes cannot be given is not owed to them for ever."""
    wanted = sum(one.gpus for one in sharers)
    used = sum(one.gpus for one in sharers if one.number in running)
    share_of = entitled(sharers, used)
    most = quantum * (1 + math.ceil(wanted / used)) if used else quantum
    found = []
    for one in sharers:
        received = seconds if one.number in running else 0.0
        deficit = one.deficit_s + seconds * share_of[one.number] - received
        deficit = min(max(deficit, -most), most)
        found.append(
            replace(
                one,
                runs=one.number in running,
                received_s=one.received_s + received,
                deficit_s=deficit,
                waited_s=0.0 if one.number in running else one.waited_s + seconds,
            )
        )
    return tuple(found)


def next_row(sharers: Sequence[RotatedGang], nodes: Sequence[SharedNode], quantum: float) -> TimeSlice:
    """Return the slice for the next quantum. Gangs that have not run yet go first, so that their first mini-batches
    come within a quantum; among equals running gangs, to save a switch."""
    line = _line(sharers, nodes, quantum)
    chosen = _seated(line, nodes)
    # Gangs that continue keep their devices if the newcomers fit elsewhere.
    settled = sorted(
        (one for one in line if one.number in chosen), key=lambda one: (not one.is_bound, not one.runs, not one.seat)
    )
    better = _seated(settled, nodes)
    return TimeSlice(better if len(better) == len(chosen) else chosen)


def seated(sharers: Sequence[RotatedGang], row: TimeSlice) -> tuple[RotatedGang, ...]:
    """The sharers as they are once the row runs."""
    return tuple(
        replace(one, seat=row.seats.get(one.number, one.seat), runs=one.number in row.seats) for one in sharers
    )


def _line(sharers: Sequence[RotatedGang], nodes: Sequence[SharedNode], quantum: float) -> list[RotatedGang]:
    gpus = sum(node.mask.bit_count() for node in nodes)
    # Gangs of four use no more than eight of ten devices.
    step = math.gcd(*(one.gpus for one in sharers)) or 1
    share_of = entitled(sharers, gpus // step * step)

    def key(one: RotatedGang) -> tuple[float, ...]:
        share = share_of[one.number]
        would_be_ahead = one.deficit_s + share * quantum <= 1e-6 * quantum
        behind_in = (quantum - one.deficit_s) / share if share > 0.0 else math.inf
        return (
            not one.stays,
            -one.priority,
            one.received_s > 0.0,
            would_be_ahead,
            # Sums of seconds are equal but for rounding.
            round(behind_in / quantum, 6) if behind_in < math.inf else behind_in,
            not one.runs,
            # Whose deficit is at its bound can be told apart by nothing else.
            -one.waited_s,
            one.joined_s,
            one.number,
        )

    return sorted(sharers, key=key)


def _seated(line: Iterable[RotatedGang], nodes: Sequence[SharedNode]) -> dict[int, Seat]:
    """Return the seats of the gangs that fit beside those before them, in order."""
    free = {node.name: node.mask for node in nodes}
    found = {}
    for one in line:
        seat = _seat(one, nodes, free)
        if seat is not None:
            found[one.number] = seat
            for name, mask in seat:
                free[name] &= ~mask
    return found


def _seat(one: RotatedGang, nodes: Sequence[SharedNode], free: Mapping[str, int]) -> Seat | None:
    if one.seat and all(free.get(name, 0) & mask == mask for name, mask in one.seat):
        return one.seat
    if one.is_bound and one.seat:
        return None
    # One node if one will do, the fullest; else as few as possible, the emptiest first.
    rooms = [(free[node.name].bit_count(), node) for node in nodes]
    whole = [(room, node) for room, node in rooms if room >= one.gpus]
    if whole:
        _, node = min(whole, key=lambda pair: (_level(pair[1], free, one.gpus), pair[0], pair[1].name))
        return ((node.name, _best(node, free, one.gpus)),)
    missing, seat = one.gpus, []
    for room, node in sorted(rooms, key=lambda pair: (-pair[0], pair[1].name)):
        count = min(room, missing)
        if count:
            seat.append((node.name, _best(node, free, count)))
            missing -= count
    return tuple(seat) if not missing else None


def _best(node: SharedNode, free: Mapping[str, int], count: int) -> int:
    mask = node.topology.best(free[node.name], count)
    assert mask is not None, f"{node.name} has no {count} devices free"
    return mask


def _level(node: SharedNode, free: Mapping[str, int], count: int) -> LocalityLevel:
    return node.topology.level(_best(node, free, count))
