"""Time-sliced gangs on their way into a co-location, and back.

A time-sliced gang can neither be moved nor given other cores, so the guest is first parked in host memory, which takes
it out of its group, and resumes beside its host. A host without other gangs in its group then has its devices to
itself; else it is parked for a moment, too. Two gangs share a device only when a plan says so. When a co-location ends,
its guest stays parked until the host has its cores back; then both are time-sliced again (`planner.matrices`). This
runs in every pass, not once a quantum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final, TypeAlias

from ganger.cluster.view import View
from ganger.job_state import JobState

from ganger_master.core.gang_model import Gang, GangIntent
from ganger_master.core.job_model import JobRecord
from ganger_master.core.plan_changes import Goal, PlanChange, Purpose, ResumeChange
from ganger_master.planner.colocations import (
    Colocation,
    Colocations,
    TimesliceExit,
    is_resting,
    is_settled,
    move_in,
    parking,
    whole_again,
)
from ganger_master.planner.context import PlanContext
from ganger_master.planner.device_groups import Claims
from ganger_master.planner.job_table import LiveTable
from ganger_master.planner.migration_plans import is_free

# Longer than any boundary and any copy: a job that is not there by then stays time-sliced.
_LONGEST_S: Final = 120.0

_Pair: TypeAlias = tuple[JobRecord, Gang]


def follow(packs: Colocations, context: PlanContext) -> tuple[tuple[PlanChange, ...], Colocations]:
    """Return the changes to propose now, and the state if they are proposed."""
    table, view, now, changing = context.jobs, context.room.view, context.now, context.cluster.changing
    # A host that has left a group is in its active matrix until all nodes have acknowledged the next one.
    rotating = {node for _, gang in table.running if gang.node_set in changing for node in gang.nodes}
    changes: list[PlanChange] = []
    leaving: list[TimesliceExit] = []
    begun: list[Colocation] = []
    failed = packs.failed
    for one in packs.leaving:
        host, guest = _of(table, one.host), _of(table, one.guest)
        if host is None or guest is None:
            # It has ended, or was stopped by another change.
            continue
        if now > one.since_s + _LONGEST_S:
            failed = failed.noted(one.proposal.pair, now)
            continue
        if not (is_resting(*guest) and is_settled(*host) and not host[1].node_set):
            leaving.append(one)
            changes.extend(_next(one, host, guest, view))
        elif not rotating.isdisjoint(host[1].nodes):
            leaving.append(one)
        elif arrival := move_in(one.proposal, host, guest, view):
            changes.extend(arrival)
            begun.append(Colocation(one.proposal, now))
        else:
            failed = failed.noted(one.proposal.pair, now)
    parting = []
    for going in packs.parting:
        host, guest = _of(table, going.host), _of(table, going.guest)
        if guest is not None and not is_resting(*guest) and now <= going.since_s + _LONGEST_S:
            parting.append(going)
        elif host is not None:
            changes.extend(whole_again({going.host: host}, (), view, context.job_rates))
    followed = replace(packs, packs=(*packs.packs, *begun), leaving=tuple(leaving), parting=tuple(parting))
    return tuple(changes), replace(followed, failed=failed)


def places_of(table: LiveTable, change: PlanChange) -> Claims:
    """Return the claims that a resumed gang takes of what is free now."""
    found = _of(table, change.number)
    return found[1].lacking_claims if found is not None else ()


def _of(table: LiveTable, number: int) -> _Pair | None:
    found = table.get(number)
    if found is None or found[1] is None or found[0].state is not JobState.HOLDING or found[0].ending is not None:
        return None
    return found[0], found[1]


def _next(one: TimesliceExit, host: _Pair, guest: _Pair, view: View) -> Sequence[PlanChange]:
    purpose = Purpose(Goal.PACK, detail=f"out of its turns, to be tried with {host[0].name} on its devices")
    if _may_rest(*guest):
        return [parking(*guest, purpose)]
    if not is_resting(*guest):
        return []
    if host[1].node_set and _may_rest(*host):
        detail = f"out of its turns, to be tried with {guest[0].name} on its devices"
        return [parking(*host, Purpose(Goal.PACK, detail=detail))]
    # Another job may have come to its devices meanwhile.
    if is_resting(*host) and is_free(view, host[1].lacking_claims):
        return [ResumeChange(host[0].number, host[0].revision, purpose=Purpose(Goal.PACK))]
    return []


def _may_rest(job: JobRecord, gang: Gang) -> bool:
    return is_settled(job, gang) and gang.intent is GangIntent.RUN
