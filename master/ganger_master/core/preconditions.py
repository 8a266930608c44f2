"""What a job's state allows: whether it exists, may be suspended at a level, or may be moved."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from ganger.cluster.resources import Claim
from ganger.job_state import JobState

from ganger_master.core import quarantine
from ganger_master.core.answers import RefusedError
from ganger_master.core.approval import find_place, judge_change
from ganger_master.core.colocation import has_arenas, offload_obstacle
from ganger_master.core.gang_model import Gang, GangIntent, GangPhase
from ganger_master.core.job_model import JobRecord, SuspendLevel, members_of
from ganger_master.core.job_rules import closed_to_image
from ganger_master.core.moves import reason_against
from ganger_master.core.state import State


def find_job(state: State, number: int) -> JobRecord:
    """Raises RefusedError, as all functions here that return what a command needs."""
    job = state.jobs.get(number)
    if job is None:
        raise no_job(state, number)
    return job


def no_job(state: State, number: int) -> RefusedError:
    """Return the refusal for a number without a job: never given, forgotten, an array, or lost by a restore."""
    text = f"there is no jobs/{number}: `ganger queue --all` lists what there is"
    members = members_of(state.jobs, number)
    if members:
        shown = next(f"{number}_{job.spec.array.index}" for job in members if job.spec.array is not None)
        text = f"{number} is an array of jobs: name a member, for example {shown}; `ganger show {number}` lists them"
        return RefusedError("JOB_NOT_FOUND", text, {"array": f"arrays/{number}"})
    # One that is not durable yet is in the state only.
    if 0 < number < state.counters.next_job and number not in state.jobs:
        ended = f"jobs/{number} has ended and is no longer kept: `ganger history {number}` says what became of it"
        text = quarantine.unknown_job(state, number) or ended
    return RefusedError("JOB_NOT_FOUND", text, {"job": f"jobs/{number}"})


def array_members(jobs: Mapping[int, JobRecord], number: int) -> list[JobRecord]:
    """Return the remembered members of an array. Raises RefusedError if there are none."""
    if members := members_of(jobs, number):
        return members
    text = f"there is no array {number}: `ganger queue --all` lists what there is"
    raise RefusedError("ARRAY_NOT_FOUND", text, {"array": f"arrays/{number}"})


def has_ended(job: JobRecord) -> bool:
    """Return whether a job has ended or is about to."""
    return job.state.is_finished or (job.ending is not None and job.ending.is_finished)


_ENDS = {
    JobState.SUCCEEDED: "has succeeded",
    JobState.FAILED: "has failed",
    JobState.CANCELLED: "was cancelled",
    JobState.STOPPED: "was stopped by the rule of its array",
}


def unfinished(state: State, number: int, order: str = "changed") -> JobRecord:
    """Return the job if it has neither ended nor is about to. `order`: what it cannot be any more, for the refusal."""
    job = find_job(state, number)
    if has_ended(job):
        end = job.ending or job.state
        text = f"job {number} {_ENDS[end]}; it cannot be {order}"
        raise RefusedError("JOB_FINISHED", text, {"job": job.name, "state": end.value})
    return job


def check_suspend(state: State, job: JobRecord, level: SuspendLevel) -> SuspendLevel:
    """Return the level to suspend at, NONE if there is nothing to do."""
    gang = state.gangs.get(job.epoch)
    if job.next_epoch:
        raise busy(job, "it is being moved")
    if gang is None or job.ending is not None:
        return SuspendLevel.NONE if job.state is JobState.SUSPENDED else SuspendLevel.CHECKPOINT
    offered = job.capabilities
    present = gang.park_level if gang.intent is GangIntent.PARK else SuspendLevel.NONE
    if level is SuspendLevel.NONE:
        if present and job.state is JobState.SUSPENDED:
            return SuspendLevel.NONE
        order = (SuspendLevel.OFFLOAD, SuspendLevel.CHECKPOINT, SuspendLevel.PAUSE)
        may_offload, may_pause = has_arenas(gang), gang.epoch not in state.gangs.set_of
        possible = order[0 if may_offload else 1 : 3 if may_pause else 2]
        chosen = next((one for one in possible if offered.offers(one)), None)
        if chosen is None:
            raise _unavailable(job, "any level")
        # A stop at a deeper level, as of a job that is resized or preempted, is not taken back.
        return max(chosen, present)
    if not offered.offers(level):
        raise _unavailable(job, level.name)
    if level is SuspendLevel.PAUSE and gang.epoch in state.gangs.set_of:
        what = "is time-sliced with others on its devices, and a paused job keeps them"
        text = f"{job.name} {what}: use OFFLOAD or CHECKPOINT"
        raise RefusedError("LEVEL_UNAVAILABLE", text, {"job": job.name, "level": level.name})
    if present > level:
        raise RefusedError(
            "LEVEL_UNAVAILABLE",
            f"{job.name} is suspended at {present.name}, which keeps less than {level.name}; resume it first",
            {"job": job.name, "level": level.name},
        )
    if present == level and job.state is JobState.SUSPENDED:
        return SuspendLevel.NONE
    if level is SuspendLevel.OFFLOAD and gang.intent is GangIntent.RUN and not has_arenas(gang):
        otherwise = offload_obstacle(job, gang) or "no host memory is reserved for it: submit with --gpu-memory"
        why = job.capabilities.missing.get("OFFLOAD", otherwise)
        raise RefusedError("LEVEL_UNAVAILABLE", f"{job.name} cannot be offloaded: {why}", {"job": job.name})
    return level


def check_move(
    state: State, job: JobRecord, nodes: tuple[str, ...] = (), claims: tuple[Claim, ...] = ()
) -> tuple[Claim, ...]:
    """Return the claims to move a job to. With claims, also a job that a plan has parked may move."""
    gang = state.gangs.get(job.epoch)
    if job.next_epoch or job.ending is not None:
        raise busy(job, "it is being moved or ends")
    if gang is not None and gang.node_set and not has_arenas(gang):
        raise busy(
            job, "it is time-sliced with other jobs on its devices, and no host memory is reserved to leave them"
        )
    may_rest = bool(claims) and gang is not None and gang.phase is GangPhase.PARKED and gang.parked_by_plan
    if job.state is not JobState.HOLDING or gang is None or not (gang.phase is GangPhase.RUNNING or may_rest):
        raise not_running(job, gang)
    if not job.capabilities.can_move:
        text = f"{job.name} cannot be moved: {reason_against(job)}"
        raise RefusedError("LEVEL_UNAVAILABLE", text, {"job": job.name})
    unknown = [name for name in nodes if name not in state.nodes]
    if unknown:
        raise RefusedError("NODE_NOT_FOUND", f"there is no nodes/{unknown[0]}", {"node": f"nodes/{unknown[0]}"})
    if claims:
        refusals = judge_change(state, job, claims, retune=True)
        if not refusals:
            return claims
        text = refusals[0].message
    else:
        avoid = frozenset() if nodes else frozenset(gang.nodes)
        found = find_place(state, job, avoid, frozenset(nodes) or None)
        if found is not None:
            return found[0]
        where = "on " + ", ".join(f"nodes/{name}" for name in nodes) if nodes else "on other nodes"
        text = f"there is no room for it {where}"
        closed = {name: why for name, why in closed_to_image(state, job).items() if name in nodes or not nodes}
        if closed:
            name = min(closed)
            text += f"; {len(closed)} cannot restore its process image, as nodes/{name}: {closed[name]}"
    candidates = {claim.node for claim in claims} or set(nodes) or state.nodes.keys() - set(gang.nodes)
    leaving = _leaving(state, job, candidates)
    if leaving:
        text = f"{text} yet; {leaving}: move it again once that is gone (`ganger nodes` shows what is free)"
    raise RefusedError("MOVE_REFUSED", f"{job.name} cannot be moved: {text}", {"job": job.name})


def _leaving(state: State, job: JobRecord, nodes: Collection[str]) -> str:
    """Return the text about gangs that are still stopping on these nodes; empty if there are none."""
    found: dict[str, list[str]] = {}
    for node in sorted(nodes):
        for epoch in state.gangs.places_on.get(node, {}):
            gang = state.gangs[epoch]
            if gang.intent is GangIntent.STOP:
                name = f"what {job.name} was moved from" if gang.job == job.number else f"jobs/{gang.job}"
                found.setdefault(name, []).append(f"nodes/{node}")
    return "; ".join(f"{name} is still leaving {', '.join(places)}" for name, places in found.items())


def busy(job: JobRecord, why: str) -> RefusedError:
    return RefusedError("JOB_BUSY", f"{job.name} is busy: {why}; try again", {"job": job.name})


def not_running(job: JobRecord, gang: Gang | None) -> RefusedError:
    present = (gang.phase.value if gang is not None else job.state.value).lower()
    if gang is not None and gang.phase is GangPhase.STARTING:
        text = f"{job.name} has not reached its first boundary yet: it is {present}; try again once it runs"
        return RefusedError("NOT_RUNNING", text, {"job": job.name})
    remedy = "; resume it first" if job.state is JobState.SUSPENDED else ""
    return RefusedError("NOT_RUNNING", f"{job.name} is not running: it is {present}{remedy}", {"job": job.name})


def _unavailable(job: JobRecord, level: str) -> RefusedError:
    missing = job.capabilities.missing
    why = missing.get(level) or "; ".join(f"{name}: {text}" for name, text in sorted(missing.items()))
    text = f"{job.name} does not offer {level}: {why or 'it has not reported what it can do yet'}"
    return RefusedError("LEVEL_UNAVAILABLE", text, {"job": job.name, "level": level})
