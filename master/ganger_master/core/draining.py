"""How a node empties: each job that lives there is moved, or parked to storage when no place or no way is found."""

from __future__ import annotations

from ganger_master.core import attempts, capacity, moving
from ganger_master.core.arenas import has_arenas
from ganger_master.core.model import Gang, GangPhase, Intent, Job, JobState, SuspendLevel
from ganger_master.core.purpose import Goal, Purpose
from ganger_master.core.state import State

# A job whose storage was full is not stopped again sooner: each try costs it a pause.
_REFUSED_SECONDS = 60.0


def follow(state: State, now: float) -> None:
    """Starts the next job of a draining node on its way; one at a time: each must see the place the last one took."""
    for name in state.draining:
        for epoch in list(state.gangs_on.get(name, ())):
            gang = state.gangs.get(epoch)
            if gang is not None:
                _empty(state, state.jobs[gang.job], gang, now, f"drain:{name}")
            if state.dirty.jobs:
                return


def _empty(state: State, job: Job, gang: Gang, now: float, cause: str) -> None:
    if job.epoch != gang.epoch or job.next_epoch or job.ending is not None or not job.capabilities.known:
        return
    if gang.intent is Intent.PARK:
        if state.policy.moves and gang.parked_by_plan:
            return
        _to_storage(state, job, gang, now, cause)
        return
    if gang.intent is not Intent.RUN or gang.phase is not GangPhase.RUNNING:
        return
    can_leave = not gang.node_set or has_arenas(gang)
    if can_leave and moving.can_hand_over(job) and job.moves_aborted <= state.settings.moves_aborted_allowed:
        found = capacity.find_place(state, job, avoid=_draining_nodes(state))
        if found is not None:
            claims, level = found
            moving.begin(state, job.number, claims, level, now, cause, Purpose(Goal.DRAIN))
            return
        if state.policy.moves:
            # Others may make room for it elsewhere: the planner's to say.
            return
    _to_storage(state, job, gang, now, cause)


def _to_storage(state: State, job: Job, gang: Gang, now: float, cause: str) -> None:
    """A job that cannot be saved stays until it ends: draining loses no work."""
    if not job.capabilities.checkpoint or gang.park_level is SuspendLevel.CHECKPOINT:
        return
    if gang.refused_at and now - gang.refused_at < _REFUSED_SECONDS:
        return
    by_plan = job.state is not JobState.SUSPENDED
    attempts.suspend(state, job.number, SuspendLevel.CHECKPOINT, now, cause, by_plan=by_plan)


def _draining_nodes(state: State) -> frozenset[str]:
    return frozenset(state.draining)
