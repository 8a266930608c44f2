"""GPUs that running jobs do not use: when that is reported, and when such a job is parked.

Daemons report a part of a gang that has made no step and used no device for the time in its desired state. A gang is
idle while all its parts with devices are. After a longer time it is parked at OFFLOAD, as by its user's `suspend`, and
stays suspended until it is resumed. Only jobs that can be stopped at any point are parked. A job that stops only at
boundaries reaches none without a step, and the order would end in killing it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

from ganger.job_state import JobState
from ganger.text import format_duration
from msgspec.structs import replace

from ganger_master.core import attempts
from ganger_master.core.answers import RefusedError
from ganger_master.core.commands import ObservedGang
from ganger_master.core.events import JobSuspended
from ganger_master.core.gang_model import Gang, GangIntent, GangRole, Idleness, ObservedPhase, Piece
from ganger_master.core.job_model import JobRecord, SuspendLevel
from ganger_master.core.plan_changes import Goal, Purpose
from ganger_master.core.preconditions import check_suspend
from ganger_master.core.state import State

CAUSE: Final = "idle"


def piece_idle_since(state: State, gang: Gang, piece: Piece, observed: ObservedGang, now: float) -> float:
    """Return since when a part uses none of its devices, in Unix seconds; zero: it uses one, is suspended or starts.

    piece: as it was before the report. now: Unix seconds."""
    after_s = state.settings.idle_after_s(state.jobs[gang.job].partition.name)
    if not observed.devices_idle or observed.phase is not ObservedPhase.RUNNING or not after_s:
        return 0.0
    return piece.idle_since or now - after_s


def noted(state: State, gang: Gang, now: float) -> Gang:
    """Return a gang after a report on one of its parts, with `Gang.idle` renewed. A change of that is recorded in the
    history of its job. now: Unix seconds."""
    if gang.intent is not GangIntent.RUN or gang.role is not GangRole.ACTIVE:
        return gang
    job, before, idle = state.jobs[gang.job], gang.idle, _idleness(state, gang)
    if idle == before:
        return gang
    cause = f"epoch:{gang.epoch}"
    if idle is None and before is not None:
        state.history(now, job, "gpus_used", cause, idle_s=f"{now - before.since:.0f}", gpus=gang.devices)
    elif before is None and idle is not None:
        figures = {"idle_s": f"{now - idle.since:.0f}", "gpus": str(gang.devices)}
        if idle.park_time:
            figures["parked_in_s"] = f"{max(0.0, idle.park_time - now):.0f}"
        state.history(now, job, "gpus_idle", cause, idle.park_refusal, **figures)
    return replace(gang, idle=idle)


def _idleness(state: State, gang: Gang) -> Idleness | None:
    times = [piece.idle_since for piece in gang.pieces if piece.claim.device_mask and not piece.gone]
    if not times or not all(times):
        return None
    job, since = state.jobs[gang.job], max(times)
    park_s = state.settings.idle_times_s(job.partition.name)[1]
    if park_s == math.inf:
        return Idleness(since)
    refusal = park_refusal(state, job, gang)
    return Idleness(since, park_refusal=refusal) if refusal else Idleness(since, since + park_s)


def park_refusal(state: State, job: JobRecord, gang: Gang) -> str:
    """Return why a gang that does not use its devices is not parked for that; empty if it can be."""
    if not job.preemptible:
        return "it may not be preempted"
    offered = job.capabilities
    if offered.offload and not offered.offload_by:
        return "it stops between two steps only, and makes none"
    try:
        check_suspend(state, job, SuspendLevel.OFFLOAD)
    except RefusedError as error:
        return error.refused.message.removeprefix(f"{job.name} ")
    return ""


def park_times(state: State) -> Iterator[float]:
    """Yield when gangs are to be parked because they do not use their devices, in Unix seconds."""
    for epoch in state.gangs.idle:
        gang = state.gangs[epoch]
        if gang.idle is not None and gang.idle.park_time and _is_reported(state, gang):
            yield gang.idle.park_time


def _is_reported(state: State, gang: Gang) -> bool:
    """Return whether the last reports of a gang still hold. A master that starts, or that a node does not call, does
    not know whether the gang has used its devices since."""
    nodes = [state.nodes.get(name) for name in gang.nodes]
    return not any(node is None or node.silent or not node.heard for node in nodes)


def follow(state: State, now: float) -> None:
    """Park the gangs whose time to be parked has come, in Unix seconds."""
    for epoch in list(state.gangs.idle):
        gang = state.gangs[epoch]
        idle = gang.idle
        if idle is None or not idle.park_time or now < idle.park_time or not _is_reported(state, gang):
            continue
        job = state.jobs[gang.job]
        if job.state is not JobState.HOLDING or job.ending is not None or job.epoch != epoch:
            state.put_gang(replace(gang, idle=replace(idle, park_time=0.0)))
        elif refusal := park_refusal(state, job, gang):
            state.put_gang(replace(gang, idle=replace(idle, park_time=0.0, park_refusal=refusal)))
            state.history(now, job, "gpus_idle", CAUSE, refusal, idle_s=f"{now - idle.since:.0f}", gpus=gang.devices)
        else:
            purpose = Purpose(Goal.IDLE, detail=f"for {format_duration(now - idle.since)}")
            event = JobSuspended(now, CAUSE, job.number, SuspendLevel.OFFLOAD, purpose=purpose)
            attempts.suspend(state, event)
            state.put_gang(replace(state.gangs[epoch], idle=idle))
