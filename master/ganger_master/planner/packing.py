"""Packs beside an order that stops jobs: while some wait, who runs makes room for them by sharing devices.

Two gangs that run are tried on the devices of one of them, and stay so where they make more together than one by one
(`planner.packs`); what the other one had is free for who waits. Who turns out to make too little beside the other waits
in line again. While nobody waits for devices, who is in a pack goes to devices of its own, if there are any.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Set
from dataclasses import dataclass, field, replace
from typing import Final

from ganger.resources.fit import share_of_memory
from ganger.resources.values import GangShape
from ganger.resources.view import View

from ganger_master.core.commands import Change
from ganger_master.core.model import Job
from ganger_master.core.purpose import Finding, Goal, Purpose
from ganger_master.planner.packs import Packs, Seen, is_settled, may_be_slower, plan_packs, with_refusals
from ganger_master.planner.slices import thin
from ganger_master.planner.table import LiveTable
from ganger_master.policies.introspect.whatif import WhatIf
from ganger_master.policies.place import Placement, Want
from ganger_master.policies.room import Room

# Between two looks, of the time between two plans that stop somebody: while packs are measured, after one that changed
# something, and after one that did not. By default a minute, five and ten.
_TRIAL: Final = 0.2
_BUSY: Final = 1.0
_QUIET: Final = 2.0
# So many of these somebody has waited for before anybody is packed: who has not will find room by the next plan, more
# often than not.
_LONG: Final = 2.0
# So many gangs that name no memory fit onto a device.
_RESIDENTS: Final = 2


@dataclass(frozen=True, slots=True)
class Packing:
    """What is remembered. `looked_s`: when it was last looked what could be packed; `is_quiet`: nothing could."""

    packs: Packs = field(default_factory=Packs)
    looked_s: float = -math.inf
    is_quiet: bool = False

    def next_look_s(self, table: LiveTable, plan_every_s: float) -> float:
        """Infinite while there is nothing to look at."""
        if not (self.packs.packs or table.has_waiting or table.sharing):
            return math.inf
        pace = _TRIAL if self.packs.on_trial else _QUIET if self.is_quiet else _BUSY
        return self.looked_s + pace * plan_every_s

    def without(self, before: Packing, refused: Set[int]) -> Packing:
        """If changes of these jobs were refused; `before`: what was remembered before they were planned."""
        return replace(self, packs=with_refusals(before.packs, self.packs, refused))


def plan_packing(
    packing: Packing,
    placement: Placement,
    table: LiveTable,
    room: Room,
    now: float,
    seen: Seen,
    gpus: int,
    plan_every_s: float,
) -> tuple[tuple[Change, ...], Packing, tuple[Finding, ...]]:
    """The changes to propose now, what to remember if they are proposed, and what was found. `gpus`: of the cluster.
    Ask once other plans have nothing to change. `plan_every_s`: the least time between two plans that stop somebody."""
    is_crowded = table.longest_wait_s(now) > _LONG * plan_every_s
    packs = packing.packs
    room.refresh()
    # What is free, and no place for them, may be one once there is more of it.
    wanted = table.waiting_gpus - room.free_devices
    changes, packs, findings = plan_packs(
        packs, table, room.view, now, seen, gpus, is_crowded, in_turns=False, most_gpus=wanted
    )
    # Who has gone from a pack waits with the others, and its host needs nobody to look after it.
    packs = replace(packs, parting=())
    if not (table.has_waiting or changes):
        changes, packs = _apart(packs, placement, table, room)
    return changes, Packing(packs, now, not changes), findings


def shape_for_two(view: View) -> Callable[[Job], GangShape]:
    """What a job is placed with: of host memory, where it names none, what leaves as much for one who may come to its
    devices."""
    shares = [share_of_memory(made, 1) for made in view.sets.values() if made.devices]
    least = min(shares, default=0) // _RESIDENTS
    return lambda job: thin(job.shape, least) if may_be_slower(job) else job.shape


def _apart(packs: Packs, placement: Placement, table: LiveTable, room: Room) -> tuple[tuple[Change, ...], Packs]:
    """Guests go to devices of their own, as far as there are any."""
    room.refresh()
    trying, shape = WhatIf(room), shape_for_two(room.view)
    changes, left = [], []
    for pack in packs.packs:
        found = table.get(pack.guest)
        claims = None
        if pack.is_kept and found is not None and found[1] is not None and is_settled(found[0], found[1]):
            claims = placement.place(room, shape(found[0]), _ANYWHERE)
        if found is None or claims is None:
            left.append(pack)
            continue
        trying.take(claims)
        job, _ = found
        changes.append(Change(job.number, job.revision, "MOVE", claims, purpose=_ROOM_AGAIN))
    trying.undo()
    return tuple(changes), replace(packs, packs=tuple(left))


_ANYWHERE: Final = Want(math.inf)
_ROOM_AGAIN: Final = Purpose(Goal.UNPACK, detail="nobody waits for the devices that it goes to")
