"""The whole pass of `gandiva`: packs are tried, kept and undone at the end of a quantum, and gangs take turns."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TypeAlias

from ganger_master.core.commands import Change
from ganger_master.planner.packs import Packs, Seen, plan_packs
from ganger_master.planner.slices import Turns, plan_slices
from ganger_master.planner.table import LiveTable
from ganger_master.policies.place import Placement
from ganger_master.policies.room import Room

Remembered: TypeAlias = tuple[Turns, Packs]
NOTHING: Remembered = (Turns(), Packs())


def plan_shared(
    placement: Placement,
    table: LiveTable,
    now: float,
    room: Room,
    remembered: Remembered,
    seen: Seen,
    gpus: int,
    quantum_s: float,
) -> tuple[tuple[Change, ...], Remembered, float]:
    """The changes to propose now, what to remember if they are proposed, and when to ask again though nothing happens;
    infinite: not before. `gpus`: of the cluster."""
    turns, packs = remembered
    is_due = now >= turns.since_s + quantum_s
    changes: tuple[Change, ...] = ()
    if is_due:
        is_crowded = table.has_waiting or bool(turns.sharers)
        changes, packs = plan_packs(packs, table, room.view, now, seen, gpus, is_crowded)
    busy = packs.on_trial | {change.number for change in changes}
    found, turns = plan_slices(placement, table, now, room, turns, quantum_s, busy=busy, units=packs.together)
    next_s = found.next_change_s
    if packs.packs:
        # They are watched as long as they last.
        turns = replace(turns, since_s=now) if is_due else turns
        next_s = min(next_s, turns.since_s + quantum_s)
    return (*changes, *found.changes), (turns, packs), max(next_s, now + 1.0) if next_s < math.inf else next_s
