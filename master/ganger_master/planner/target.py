"""One pass of the planner: who should run where, and the changes of one plan that lead there.

Jobs are ranked by the policy's order and chosen by counts; who runs and stays chosen keeps its place. The others are
placed in order into what would be free if nobody else ran. What is there already free starts now; what somebody has to
leave first waits for a later pass, and only those who are in the way are stopped. The pass remembers nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from ganger.resources.values import Claim, GangShape

from ganger_master.core.commands import Change
from ganger_master.core.model import SuspendLevel
from ganger_master.planner.table import LiveTable
from ganger_master.policies.facts import Capacity, Facts, Floats, Integers
from ganger_master.policies.order import Order, ranked
from ganger_master.policies.selection import selected


class Room(Protocol):
    """What is free, as a what-if."""

    def take(self, claims: tuple[Claim, ...]) -> None: ...

    def give(self, claims: tuple[Claim, ...]) -> None: ...


# Where a gang would go, or None where it finds no room.
PlaceIn = Callable[[GangShape], tuple[Claim, ...] | None]


@dataclass(frozen=True, slots=True)
class Pass:
    """`waits`: somebody chosen waits for what others are leaving, so the next pass follows when they have."""

    changes: tuple[Change, ...] = ()
    waits: bool = False


def plan(
    order: Order,
    table: LiveTable,
    now: float,
    capacity: Capacity,
    room: Room,
    place: PlaceIn,
    remaining_s: Callable[[Integers], Floats] | None = None,
) -> Pass:
    """The changes to propose now. `room` is as it is now and is left so; `remaining_s` gives an oracle's seconds by
    number, for orders that ask for one."""
    rows, facts = table.facts(now)
    if not len(rows):
        return Pass()
    if order.knows_durations:
        assert remaining_s is not None, f"{order.name} asks an oracle, and there is none"
        facts = facts.with_remaining(remaining_s(facts.number))
    first = ranked(order, facts, now, capacity)
    taken = selected(order, facts, first, capacity.gpus)
    is_chosen = np.zeros(len(rows), bool)
    is_chosen[taken] = True
    waiting = table.is_waiting(rows)
    starting = [int(job) for job in taken if waiting[job]]
    leaving = [int(job) for job in first if facts.is_running[job] and not is_chosen[job]]
    if not starting and not leaving:
        return Pass()
    going = [int(job) for job in np.flatnonzero(table.is_going(rows))]
    return _Fitting(table, rows, facts, room, place).changes(starting, leaving, going)


class _Fitting:
    """Places who was chosen into what would be free without those who were not."""

    def __init__(self, table: LiveTable, rows: Integers, facts: Facts, room: Room, place: PlaceIn) -> None:
        self._table = table
        self._rows = rows
        self._facts = facts
        self._room = room
        self._place = place

    def changes(self, starting: list[int], leaving: list[int], going: list[int]) -> Pass:
        """`leaving`: who runs and was not chosen; `going`: who was told to go already."""
        held = {job: self._claims(job) for job in (*leaving, *going)}
        starts: list[Change] = []
        later: list[tuple[Claim, ...]] = []
        # First into what is free now: nobody is stopped for what is there anyhow.
        crowded: list[int] = []
        for job in starting:
            claims = self._find(job)
            if claims is None:
                crowded.append(job)
            else:
                self._room.take(claims)
                starts.append(self._start(job, claims))
        for claims in held.values():
            self._room.give(claims)
        for job in crowded:
            claims = self._find(job)
            if claims is not None:
                self._room.take(claims)
                later.append(claims)
        taken = _masks(later)
        stopped = [job for job in leaving if any(taken.get(c.node, 0) & c.device_mask for c in held[job])]
        # Back to how it was.
        for claims in later:
            self._room.give(claims)
        for change in starts:
            self._room.give(change.claims)
        for claims in held.values():
            self._room.take(claims)
        return Pass((*map(self._stop, stopped), *starts), bool(later))

    def _find(self, job: int) -> tuple[Claim, ...] | None:
        found = self._table.jobs[self._rows[job]]
        assert found is not None
        return self._place(found.shape)

    def _claims(self, job: int) -> tuple[Claim, ...]:
        gang = self._table.gangs[self._rows[job]]
        assert gang is not None
        return tuple([piece.held for piece in gang.pieces if piece.held is not None])

    def _start(self, job: int, claims: tuple[Claim, ...]) -> Change:
        found = self._table.jobs[self._rows[job]]
        assert found is not None
        return Change(found.number, found.revision, "START", claims)

    def _stop(self, job: int) -> Change:
        found = self._table.jobs[self._rows[job]]
        assert found is not None
        return Change(found.number, found.revision, "SUSPEND", level=SuspendLevel.CHECKPOINT)


def _masks(claims: list[tuple[Claim, ...]]) -> dict[str, int]:
    masks: dict[str, int] = {}
    for gang in claims:
        for claim in gang:
            masks[claim.node] = masks.get(claim.node, 0) | claim.device_mask
    return masks
