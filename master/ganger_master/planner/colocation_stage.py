"""Packs beside an order that stops jobs: while some wait, who runs makes room for them by sharing devices.

Two gangs that run are tried on the devices of one of them, and stay so where they make more together than one by one
(`planner.packs`); what the other one had is free for who waits. Who turns out to make too little beside the other waits
in line again. While nobody waits for devices, who is in a pack goes to devices of its own, if there are any.
"""

from __future__ import annotations

import math
from collections.abc import Set
from dataclasses import dataclass, field, replace
from typing import Final

from ganger.cluster.capacity_index import CapacityIndex
from ganger.cluster.fit import demand
from ganger.cluster.resources import GangShape
from ganger.cluster.trial import WhatIf
from ganger.cluster.view import View
from msgspec import structs

from ganger_master.core.change_reason import Goal, Purpose, TrialFinding
from ganger_master.core.commands import Change
from ganger_master.core.model import GangIntent, JobRecord
from ganger_master.core.moves import can_hand_over
from ganger_master.planner.job_table import LiveTable
from ganger_master.planner.packs import Colocations, JobRates, is_settled, may_be_slower, plan_packs, with_refusals
from ganger_master.planner.refusal_backoff import NONE_EXCLUDED, ExcludedJobs
from ganger_master.planner.slices import as_held
from ganger_master.policies.colocation_choice import Berth
from ganger_master.policies.placements import PlacementPreference, Want

# Between two looks, of the time between two plans that stop somebody: while packs are measured, after one that changed
# something, and after one that did not. By default a minute, five and ten.
_TRIAL: Final = 0.2
_BUSY: Final = 1.0
_QUIET: Final = 2.0
# So many of these somebody has waited for before anybody is packed: who has not will find room by the next plan, more
# often than not.
_LONG: Final = 2.0
# However short the interval is.
_LEAST_S: Final = 1.0
# So many gangs that name no memory find some on a device.
_RESIDENTS: Final = 2


@dataclass(frozen=True, slots=True)
class OrderColocation:
    """What is remembered. `looked_s`: when it was last looked what could be packed; `is_quiet`: nothing could.
    `halved`: numbers of those whose packs have ended, and who have not all of their cores back."""

    packs: Colocations = field(default_factory=Colocations)
    looked_s: float = -math.inf
    is_quiet: bool = False
    halved: tuple[int, ...] = ()

    def next_look_s(self, table: LiveTable, plan_every_s: float) -> float:
        """Infinite while there is nothing to look at."""
        if not (self.packs.packs or self.halved or table.has_waiting or table.has_sharing):
            return math.inf
        pace = _TRIAL if self.packs.is_trying else _QUIET if self.is_quiet else _BUSY
        return self.looked_s + max(_LEAST_S, pace * plan_every_s)

    def without(self, before: OrderColocation, refused: Set[int], barred: Set[int] = frozenset()) -> OrderColocation:
        """If changes of these jobs were refused; `before`: what was remembered before they were planned. `barred`:
        those who would be refused again."""
        return replace(self, packs=with_refusals(before.packs, self.packs, refused, barred))


def plan_packing(
    packing: OrderColocation,
    placement: PlacementPreference,
    table: LiveTable,
    room: CapacityIndex,
    now: float,
    seen: JobRates,
    gpus: int,
    plan_every_s: float,
    kept_out: ExcludedJobs = NONE_EXCLUDED,
) -> tuple[tuple[Change, ...], OrderColocation, tuple[TrialFinding, ...]]:
    """The changes to propose now, what to remember if they are proposed, and what was found. `gpus`: of the cluster.
    Ask once other plans have nothing to change. `plan_every_s`: the least time between two plans that stop somebody.
    `kept_out`: who is refused whatever is free."""
    room.refresh()
    waiting = _Waiting(table, room.view, gpus, kept_out)
    is_crowded = waiting.longest_s(now) > max(_LEAST_S, _LONG * plan_every_s)
    before = packing.packs
    changes, packs, findings = plan_packs(
        before, table, room.view, now, seen, gpus, is_crowded, in_turns=False, wanted=waiting.wanted
    )
    # Who has gone from a pack waits with the others, and its host needs nobody to look after it.
    packs = replace(packs, parting=())
    if not (waiting.jobs or changes):
        changes, packs = _apart(packs, placement, table, room)
    left = {pack.numbers for pack in packs.packs}
    parted = [number for pack in before.packs if pack.numbers not in left for number in pack.numbers]
    known = sorted({*packing.halved, *parted})
    halved = tuple([number for number in known if _lacks_cores(table, room.view, number)])
    return changes, OrderColocation(packs, now, not changes, halved), findings


def shape_for_two(job: JobRecord) -> GangShape:
    """What a job is placed with: of host memory, where it names none, what leaves as much for one who may come to its
    devices."""
    return structs.replace(job.shape, residents=_RESIDENTS) if may_be_slower(job) else job.shape


class _Waiting:
    """Those who wait for devices, and could use some."""

    def __init__(self, table: LiveTable, view: View, gpus: int, kept_out: ExcludedJobs) -> None:
        self._table, self._view = table, view
        self._lacking: dict[tuple[str, int], int] = {}
        kinds = {"", *[made.device_type for made in view.sets.values()]}
        vain = {*kept_out.not_started, *kept_out.unplaced}
        self.jobs = [
            job
            for job in table.waiting_at_most(gpus)
            if job.gpus and job.number not in vain and job.spec.device_type in kinds
        ]

    def longest_s(self, now: float) -> float:
        """For how long the one of them that has waited longest has."""
        return now - min([job.pending_since for job in self.jobs], default=math.inf)

    def wanted(self, guest: Berth) -> float:
        """Devices of its kind that those lack who rank no lower than this guest: what is free, and no place for them,
        may be one once there is more of it."""
        found = self._table.get(guest.residents[0].number)
        of = guest.device_type, found[0].spec.priority if found is not None else 0
        if of not in self._lacking:
            self._lacking[of] = self._lacks(*of)
        return self._lacking[of]

    def _lacks(self, device_type: str, least: int) -> int:
        kinds = ("", device_type)
        asked = [job.gpus for job in self.jobs if job.spec.priority >= least and job.spec.device_type in kinds]
        return sum(asked) - self._free(device_type)

    def _free(self, device_type: str) -> int:
        view = self._view
        return sum(
            [
                free.bit_count()
                for free, topology, available in zip(view.free, view.topologies, view.available, strict=True)
                if available and free and topology.configuration_set.device_type == device_type
            ]
        )


def _lacks_cores(table: LiveTable, view: View, number: int) -> bool:
    """Whether it runs with fewer than go with its devices."""
    job, gang = table.get(number) or (None, None)
    if job is None or gang is None or gang.intent is not GangIntent.RUN:
        return False
    wanted = [
        (claim, demand(view.topology(claim.node).configuration_set, job.shape, claim.tasks).millicores)
        for claim in gang.claims
        if claim.node in view
    ]
    return any(sum(claim.millicores) < millicores for claim, millicores in wanted)


def _apart(
    packs: Colocations, placement: PlacementPreference, table: LiveTable, room: CapacityIndex
) -> tuple[tuple[Change, ...], Colocations]:
    """Guests go to devices of their own, as far as there are any."""
    room.refresh()
    trying = WhatIf(room)
    changes, left = [], []
    for pack in packs.packs:
        job, gang = table.get(pack.guest) or (None, None)
        claims = None
        if pack.is_kept and job is not None and gang is not None and is_settled(job, gang) and can_hand_over(job):
            claims = placement.place(room, as_held(job.shape, gang), _ANYWHERE)
        if job is None or claims is None:
            left.append(pack)
            continue
        trying.take(claims)
        changes.append(Change(job.number, job.revision, "MOVE", claims, purpose=_ROOM_AGAIN))
    trying.undo()
    return tuple(changes), replace(packs, packs=tuple(left))


_ANYWHERE: Final = Want(math.inf)
_ROOM_AGAIN: Final = Purpose(Goal.UNPACK, detail="no job waits for the devices that it goes to")
