"""Everybody off nodes that are drained; and whoever rests by a plan goes on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from msgspec.structs import replace as replace_of

from ganger_master.core.commands import Change
from ganger_master.core.model import Gang, GangIntent, GangPhase, JobRecord, SuspendLevel
from ganger_master.core.moving import can_hand_over
from ganger_master.core.purpose import Goal, Purpose
from ganger_master.planner.job_table import LiveTable, shares_devices
from ganger_master.planner.migration_context import MOST_AT_ONCE, Acting
from ganger_master.planner.migration_plans import is_free
from ganger_master.policies.make_room import Hole
from ganger_master.policies.migration_choice import drained
from ganger_master.policies.placements import Want

_ON_THE_WAY: Final = (GangPhase.MOVING, GangPhase.RESIZING)


def drain(acting: Acting, node: str) -> None:
    """Who can leave does, also where others have to make room; who cannot is parked on storage."""
    busy = acting.busy
    gangs = [one for number, (_, _, one) in acting.gangs.items() if number not in busy]
    proposals, stuck = drained(acting.room, node, gangs, acting.others(busy), acting.terms.placement)
    for proposal in proposals:
        if acting.under_way + len(proposal.moves) > MOST_AT_ONCE or acting.busy & {m.number for m in proposal.moves}:
            break
        acting.begin(Goal.DRAIN, Hole((), proposal.moves))
    if not acting.errands and not _is_anybody_on_the_way(acting.table):
        # Who is could leave room.
        for job in (*[acting.gangs[number][0] for number in stuck], *_sharing(acting, node)):
            if job.capabilities.checkpoint:
                level, purpose = SuspendLevel.CHECKPOINT, Purpose(Goal.DRAIN)
                acting.changes.append(Change(job.number, job.revision, "SUSPEND", level=level, purpose=purpose))


def _is_anybody_on_the_way(table: LiveTable) -> bool:
    """Also who hands over just now, and so is not to run where it is."""
    gangs = zip(table.jobs, table.gangs, strict=True)
    return any((job and job.next_epoch) or (gang and gang.phase in _ON_THE_WAY) for job, gang in gangs)


def _sharing(acting: Acting, node: str) -> list[JobRecord]:
    """Who is on a node beside others, at once or in turns. The master has moved those for whom devices are free, and
    where they could take turns they are sent by those who make matrices, before anybody is asked for here: once all who
    share devices run, nobody else makes room for them."""
    sharing = [(job, gang) for job, gang in acting.running if shares_devices(gang)]
    if any(gang.phase is not GangPhase.RUNNING for _, gang in sharing):
        return []
    return [
        job
        for job, gang in sharing
        if any(claim.node == node for claim in gang.claims)
        and gang.intent is GangIntent.RUN
        and job.ending is None
        and job.spec.preemptible
        and job.number not in acting.busy | acting.terms.on_trial
    ]


def parked(acting: Acting) -> list[tuple[JobRecord, Gang]]:
    """Who rests in host memory because a plan said so, and is on no errand, first one first."""
    busy = acting.busy
    found = [
        (job, gang)
        for job, gang in acting.table.parked
        if job.number not in busy and gang.park_level is SuspendLevel.OFFLOAD and job.ending is None
    ]
    return sorted(found, key=lambda one: (-one[0].spec.priority, one[0].number))


def bring_back(acting: Acting, pairs: Sequence[tuple[JobRecord, Gang]]) -> None:
    """Where it was, if that is free, else elsewhere out of its memory."""
    for job, gang in pairs:
        purpose = Purpose(Goal.RETURN, pause_seconds=acting.costs.pause_s(job, gang))
        own = tuple([replace_of(claim, memory_bytes=0, arena_bytes=0) for claim in gang.claims])
        if is_free(acting.room.view, own):
            acting.changes.append(Change(job.number, job.revision, "RESUME", purpose=purpose))
            acting.trying.take(own)
            continue
        claims = acting.terms.placement.place(acting.room, job.shape, Want(math.inf)) if can_hand_over(job) else None
        if claims is not None:
            acting.changes.append(Change(job.number, job.revision, "MOVE", claims, purpose=purpose))
            acting.trying.take(claims)
