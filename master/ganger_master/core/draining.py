"""Draining a node: each job on it is moved, or parked to storage where no place or no way is found."""

from __future__ import annotations

from ganger.cluster.refusals import Reason, Refusal
from ganger.cluster.resources import Claim, LocalityLevel
from ganger.job_state import JobState

from ganger_master.core import approval, attempts, moves
from ganger_master.core.colocation import has_arenas
from ganger_master.core.events import JobSuspended, MoveBegun
from ganger_master.core.gang_model import Gang, GangIntent, GangPhase
from ganger_master.core.job_model import JobRecord, SuspendLevel
from ganger_master.core.plan_changes import Goal, Purpose
from ganger_master.core.state import State

# A job whose storage was full is not stopped again sooner: each try costs it a pause.
_REFUSED_S = 60.0


def follow(state: State, now: float) -> None:
    """Begin to move the next job off a draining node; one at a time, because each changes the free places."""
    for name in state.nodes.draining:
        for epoch in list(state.gangs.places_on.get(name, ())):
            gang = state.gangs.get(epoch)
            if gang is not None:
                _empty(state, state.jobs[gang.job], gang, now, f"drain:{name}")
            if state.dirty.jobs:
                return


def held_up(state: State, job: JobRecord, now: float) -> tuple[Refusal, ...]:
    """Return why a job is still on a draining node: what it waits for, then what it lacks elsewhere.

    Empty for a job that is moving away, and for one on no such node."""
    gang = state.gangs.get(job.epoch)
    node = next((name for name in (gang.nodes if gang is not None else ()) if name in state.nodes.draining), "")
    if gang is None or not node or job.next_epoch or job.ending is not None:
        return ()

    def waits(text: str) -> Refusal:
        return Refusal(Reason.NODE_UNAVAILABLE, detail=f"it is to leave nodes/{node}, which is being drained: {text}")

    if gang.park_level is SuspendLevel.CHECKPOINT or (
        gang.intent is GangIntent.PARK and gang.phase is GangPhase.STOPPING
    ):
        return ()
    if gang.refused_at and now - gang.refused_at < _REFUSED_S:
        return (waits(f"saving it failed ({job.trouble}), and is tried again after a minute"),)
    if not job.capabilities.known or (gang.intent is GangIntent.RUN and gang.phase is GangPhase.STARTING):
        return (waits("it goes once it steps"),)
    if gang.intent is not GangIntent.RUN:
        if state.policy.migrates and gang.parked_by_plan:
            return (waits("it goes on elsewhere once there is room"),)
        return (waits("it rests there and cannot be saved: resume it, or end it"),)
    if not _can_move(state, job, gang) and job.capabilities.presumed:
        return (waits("it stays until it ends, unless its agent speaks up, which it has not so far"),)
    if not _can_move(state, job, gang):
        return (waits("it stays until it ends, for it can neither be moved nor saved"),)
    is_saved = state.policy.migrates and job.spec.preemptible and job.capabilities.checkpoint
    meanwhile = "is saved on storage if no job can make room" if is_saved else "runs on until then"
    if not any(other.takes_gangs for other in state.nodes.values()):
        return (waits(f"it goes once another node takes jobs, and {meanwhile}"),)
    lacks = [
        one for one in approval.lacks(state, job, _draining_nodes(state)) if one.reason is not Reason.NODE_UNAVAILABLE
    ]
    return (waits(f"it goes once there is room elsewhere, and {meanwhile}"), *lacks)


def _empty(state: State, job: JobRecord, gang: Gang, now: float, cause: str) -> None:
    if job.epoch != gang.epoch or job.next_epoch or job.ending is not None or not job.capabilities.known:
        return
    if gang.intent is GangIntent.PARK:
        if state.policy.migrates and gang.parked_by_plan:
            return
        _to_storage(state, job, gang, now, cause)
        return
    if gang.intent is not GangIntent.RUN or gang.phase is not GangPhase.RUNNING:
        return
    if _can_move(state, job, gang):
        found = _place_for(state, job, gang, now)
        if found is not None:
            claims, level = found
            moves.begin(state, MoveBegun(now, cause, job.number, claims, level, Purpose(Goal.DRAIN)))
            return
        if state.policy.migrates:
            # Others may make room for it elsewhere: the planner's to say.
            return
    _to_storage(state, job, gang, now, cause)


def _place_for(state: State, job: JobRecord, gang: Gang, now: float) -> tuple[tuple[Claim, ...], LocalityLevel] | None:
    """Return claims outside draining nodes and their locality level, or None. A search that failed is repeated only
    after devices were freed or `_LOOKED_S` passed."""
    freed, looked = state.nodes.drained_in_vain.get(gang.epoch, (-1, 0.0))
    if freed == state.view.freed and 0.0 <= now - looked < _LOOKED_S:
        return None
    found = approval.find_place(state, job, avoid=_draining_nodes(state))
    if found is None:
        state.nodes.note_drained_in_vain(gang.epoch, state.view.freed, now)
    return found


# To look for a place takes as long as many verdicts, and as many events come in a second.
_LOOKED_S = 5.0


def _can_move(state: State, job: JobRecord, gang: Gang) -> bool:
    can_leave = not gang.node_set or has_arenas(gang)
    return can_leave and job.capabilities.can_move and job.moves_aborted <= state.settings.moves_aborted_allowed


def _to_storage(state: State, job: JobRecord, gang: Gang, now: float, cause: str) -> None:
    """Park a job to storage, if it can be saved; otherwise it stays until it ends, because a drain loses no work."""
    if not job.capabilities.checkpoint or gang.park_level is SuspendLevel.CHECKPOINT:
        return
    if gang.refused_at and now - gang.refused_at < _REFUSED_S:
        return
    by_plan = job.state is not JobState.SUSPENDED
    attempts.suspend(state, JobSuspended(now, cause, job.number, SuspendLevel.CHECKPOINT, by_plan))


def _draining_nodes(state: State) -> frozenset[str]:
    return frozenset(state.nodes.draining)
