"""Whether an elastic job may go on with another number of devices, and where: in its own place, as far as it goes."""

from __future__ import annotations

from collections.abc import Sequence

from ganger.cluster.refusals import Reason, Refusal
from ganger.cluster.resized import resized

from ganger_master.core.answers import Refused
from ganger_master.core.capacity import judge_change, rules
from ganger_master.core.colocation import has_arenas
from ganger_master.core.model import Claim, Gang, GangPhase, JobRecord, JobState, SuspendLevel
from ganger_master.core.preconditions import busy, not_running
from ganger_master.core.sizes import devices_of, tasks_divide
from ganger_master.core.state import State
from ganger_master.core.worlds import taken_by


def check_resize(state: State, job: JobRecord, gpus: int) -> Gang | Refused:
    """The gang that may go on with so many devices, or why it may not, wherever they are."""
    gang, spec, capabilities = state.gangs.get(job.epoch), job.spec, job.capabilities
    if not spec.is_elastic:
        return _refused(job, "it was submitted with one number of GPUs (an elastic job has a range, `--gpus 2:8`)")
    if job.next_epoch or job.ending is not None:
        return busy(job, "it is being moved or ends")
    if gang is not None and gang.epoch in state.set_of:
        return _refused(job, "it takes turns with others on its GPUs, and keeps its size until it has some to itself")
    rests = gang is not None and gang.phase is GangPhase.PARKED and gang.parked_by_plan
    if job.state is not JobState.HOLDING or gang is None or not (gang.phase is GangPhase.RUNNING or rests):
        return not_running(job, gang)
    if not spec.accepts(gpus):
        each = f", whole tasks of {spec.roles[0].shape.gpus}" if spec.roles[0].shape.gpus > 1 else ""
        return _refused(job, f"it accepts {spec.gpus_min} to {spec.gpus_max} GPUs{each}, not {gpus}")
    if not capabilities.resize:
        why = capabilities.missing.get("RESIZE", "it has not reported that it can")
        text = f"{job.name} cannot be resized: {why}"
        return Refused("LEVEL_UNAVAILABLE", text, {"job": job.name, "level": "RESIZE"})
    if not tasks_divide(job, gpus):
        return _refused(job, f"{gpus} GPUs do not divide its global batch ({capabilities.resize_divides} samples)")
    if gpus == gang.devices:
        return _refused(job, f"it has {gpus} GPUs")
    if any(claim.shared_mask for claim in gang.claims):
        return _refused(job, "it shares its GPUs with another job")
    if gang.phase is GangPhase.PARKED and gang.rested_level is not SuspendLevel.OFFLOAD:
        return _refused(job, f"it is parked at {gang.rested_level.name}")
    if not has_arenas(gang):
        why = capabilities.missing.get("OFFLOAD", "no host memory is reserved for its state")
        text = f"{job.name} cannot be resized: {why}"
        return Refused("LEVEL_UNAVAILABLE", text, {"job": job.name, "level": "OFFLOAD"})
    return gang


def judge_resize(state: State, job: JobRecord, gang: Gang, claims: Sequence[Claim]) -> tuple[Refusal, ...]:
    """Why a gang cannot have these claims instead of its own; empty if it can."""
    gpus = devices_of(claims)
    if any(claim.shared_mask for claim in claims):
        return (shares_nothing(job),)
    refusals = rules(state, job, gpus)
    if refusals:
        return refusals
    shape = job.spec.shape(job.arena_bytes_per_device, job.used_device_bytes, gpus)
    holding = tuple([piece.held for piece in gang.pieces if piece.held is not None])
    refusals = judge_change(state, job, tuple(claims), holding, retune=True, shape=shape)
    return refusals or _no_memory_for_both(state, job, gang, claims)


def _no_memory_for_both(state: State, job: JobRecord, gang: Gang, claims: Sequence[Claim]) -> tuple[Refusal, ...]:
    """Until the old world has gone both hold what they need, the larger of each kind: tasks of the new one cannot have
    what arenas of the old one are in."""
    for taken in taken_by(gang, claims):
        needed, free = taken.memory_bytes + taken.arena_bytes, state.view.memory[state.view.slots[taken.node]]
        if needed > free:
            figures = {"needed_bytes": needed, "free_bytes": free}
            detail = "beside what it holds until its new processes go on"
            return (Refusal(Reason.MEMORY, figures, job=job.name, node=taken.node, detail=detail),)
    return ()


def place_resized(state: State, job: JobRecord, gang: Gang, gpus: int) -> tuple[Claim, ...] | Refused:
    """Where it can have so many devices, as close to where it is as can be."""
    shape = job.spec.shape(job.arena_bytes_per_device, job.used_device_bytes, gpus)
    claims = resized(state.view, shape, gang.claims)
    if claims is None:
        return _refused(job, f"there is no room for {gpus} GPUs (`ganger nodes` shows what is free)")
    refusals = judge_resize(state, job, gang, claims)
    return _refused(job, refusals[0].message) if refusals else claims


def shares_nothing(job: JobRecord) -> Refusal:
    """Two worlds of one job have pieces in common, and with others none."""
    return Refusal(Reason.NOT_SUPPORTED, job=job.name, detail="a world of another size shares no devices with others")


def _refused(job: JobRecord, why: str) -> Refused:
    return Refused("RESIZE_REFUSED", f"{job.name} cannot be resized: {why}", {"job": job.name})
