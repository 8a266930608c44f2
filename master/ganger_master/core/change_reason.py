"""Who is on the way for a gang that waits: the moves and rests that make room for it, and the nodes kept for it."""

from __future__ import annotations

from msgspec import Struct

from ganger_master.core.model import GangPhase
from ganger_master.core.purpose import Purpose
from ganger_master.core.state import State


class OnTheWay(Struct, frozen=True, gc=False):
    """A job that leaves `source`; `destination` is empty for one that rests. `phase`: of the gang it leaves."""

    number: int
    purpose: Purpose
    source: tuple[str, ...]
    destination: tuple[str, ...]
    phase: GangPhase


def making_room_for(state: State, number: int) -> tuple[OnTheWay, ...]:
    """By number."""
    found = []
    for mover in sorted(state.live):
        job = state.jobs[mover]
        gang = state.gangs.get(job.epoch)
        if gang is None:
            continue
        destination = state.gangs.get(job.next_epoch)
        if destination is not None and destination.purpose.job == number:
            found.append(OnTheWay(mover, destination.purpose, gang.nodes, destination.nodes, gang.phase))
        elif destination is None and gang.parked_by_plan and gang.purpose.job == number:
            found.append(OnTheWay(mover, gang.purpose, gang.nodes, (), gang.phase))
    return tuple(found)


def kept_for(state: State, number: int) -> tuple[str, ...]:
    """The nodes of the place that the planner keeps for it."""
    return tuple([claim.node for claim in state.promised.get(number, ())])
