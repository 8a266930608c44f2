"""Elastic jobs: the numbers of devices that a job may start with or be resized to, and the resize itself.

A job between two sizes has two worlds: the new one is the destination of a move whose source is the old one. Devices
that both hold are counted once, so the cluster never needs more than the larger of the two. The old world is parked
first, with its state in host memory, if it gives devices back or if its devices have no memory for both worlds; else it
runs until the new one is ready. Until the commit the old world is the job.

A job whose roles have ranges keeps parts of its state in different ranks. It is stopped with a checkpoint, which has
all of them, and starts from that with other numbers of tasks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

from ganger.cluster.fit import MEMORY_SHARE
from ganger.cluster.placement import beside, resized
from ganger.cluster.refusals import Reason, Refusal
from ganger.cluster.resources import Claim, GangShape, LocalityLevel, more_bandwidth, tasks_of
from ganger.job_state import JobState
from ganger.text import counted
from msgspec.structs import replace

from ganger_master.core import gang_orders
from ganger_master.core.answers import RefusedError
from ganger_master.core.approval import has_room_for, judge_change
from ganger_master.core.colocation import has_arenas
from ganger_master.core.events import ResizeBegun, SizeChosen
from ganger_master.core.gang_model import Gang, GangPhase, GangRole, Piece, Restore
from ganger_master.core.job_model import JobRecord, SuspendLevel
from ganger_master.core.job_rules import rules
from ganger_master.core.job_spec import JobSpec
from ganger_master.core.preconditions import busy, check_suspend, not_running
from ganger_master.core.state import State


def devices_of(claims: Sequence[Claim]) -> int:
    return sum([claim.device_mask.bit_count() for claim in claims])


def tasks_divide(job: JobRecord, gpus: int) -> bool:
    """Return whether the ranks on that many devices divide the job's global batch."""
    each = job.spec.roles[0].shape.gpus
    return not job.capabilities.resize_divides or not job.capabilities.resize_divides % (gpus // each)


def shape_for(job: JobRecord, claims: Sequence[Claim], rests_for_any_size: bool = False) -> GangShape | Refusal:
    """Return the shape that claims with this number of devices are judged by, or why the job may not have that many.

    rests_for_any_size: it is parked where another number of ranks can restore its state."""
    if job.spec.has_role_ranges:
        return _shape_for_tasks(job, tasks_of(claims))
    gpus = devices_of(claims)
    if not job.spec.is_elastic or gpus == job.gpus:
        return job.shape
    spec = job.spec
    if not spec.accepts(gpus):
        figures = {"claimed": gpus, "gpus_min": spec.gpus_min, "gpus_max": spec.gpus_max}
        figures["gpus_per_task"] = spec.roles[0].shape.gpus
        detail = "the job does not accept so many devices"
        return Refusal(Reason.CLAIM_MISMATCH, figures, job=job.name, detail=detail)
    if job.is_bound and not rests_for_any_size:
        figures = {"needed": job.gpus, "claimed": gpus}
        where = "it rests on its devices" if job.epoch else "its checkpoint cannot be brought back with another number"
        return Refusal(Reason.CLAIM_MISMATCH, figures, job=job.name, detail=where)
    if job.capabilities.starts_at_any_size and not tasks_divide(job, gpus):
        figures = {"claimed": gpus, "global_batch": job.capabilities.resize_divides}
        detail = "so many ranks do not divide its global batch"
        return Refusal(Reason.CLAIM_MISMATCH, figures, job=job.name, detail=detail)
    return job.shape_for(gpus)


def _shape_for_tasks(job: JobRecord, tasks: tuple[int, ...]) -> GangShape | Refusal:
    if tasks == job.tasks_by_role:
        return job.shape
    why = why_not_tasks(job, tasks) or ("it rests on its devices" if job.epoch else "")
    if why:
        return Refusal(Reason.CLAIM_MISMATCH, {"claimed": sum(tasks)}, job=job.name, detail=why)
    return job.shape_for_tasks(tasks)


def why_not_tasks(job: JobRecord, tasks: Sequence[int]) -> str:
    """Return why a job with ranges of roles may not start with these numbers of tasks, by role; empty if it may.

    That it holds a gang, and that there may be no room, is not considered."""
    roles, capabilities = job.spec.roles, job.capabilities
    if len(tasks) != len(roles):
        return f"it has {counted(len(roles), 'role')}"
    for role, number in zip(roles, tasks, strict=True):
        least, most = (role.tasks_min, role.tasks_max) if role.tasks_max else (role.tasks, role.tasks)
        if not least <= number <= most:
            allowed = f"{least} to {most}" if least < most else str(most)
            return f"role {role.name} has {allowed} tasks, not {number}"
    if (job.checkpoint is not None or job.epoch) and not capabilities.starts_at_any_size:
        missing = capabilities.missing.get("RESIZE", "it has not reported that it can")
        return f"its state cannot be brought back with other numbers of tasks: {missing}"
    for role, number, divided in zip(roles, tasks, capabilities.role_divides, strict=False):
        if divided % number:
            text = f"{counted(number, 'task')} of role {role.name} do not divide its global batch"
            return f"{text} ({counted(divided, 'sample')})"
    return ""


def begin_resize(state: State, event: ResizeBegun) -> None:
    """Prepare the new world, and park the old one if it cannot run on."""
    job, claims, now, purpose = state.jobs[event.number], event.claims, event.time, event.purpose
    job = replace(job, revision=job.revision + 1, trouble="")
    source = state.gangs[job.epoch]
    epoch = begin_with(state, job, source, claims, event.level, now)
    state.put_gang(replace(state.gangs[epoch], purpose=purpose))
    if source.phase is not GangPhase.PARKED:
        masks = {claim.node: claim.device_mask for claim in claims}
        gives_back = any(claim.device_mask & ~masks.get(claim.node, 0) for claim in source.claims)
        source = replace(source, stops_at_epoch_end=gang_orders.waits_for_epoch(job, event.cause))
        if gives_back or state.gangs[epoch].restore.alone:
            at_epoch_end = source.stops_at_epoch_end
            source = gang_orders.park(source, SuspendLevel.OFFLOAD, now, by_plan=True, at_epoch_end=at_epoch_end)
        state.put_gang(replace(source, phase=GangPhase.RESIZING))
    figures = {"devices": source.devices, "becomes": devices_of(claims)}
    state.history(now, job, "resize_begun", event.cause, event.reason, epoch=epoch, **figures, **purpose.figures)


def begin_with(
    state: State, job: JobRecord, source: Gang, claims: Sequence[Claim], level: LocalityLevel, now: float
) -> int:
    """Create the new world as the destination of the resize; return the job's next epoch."""
    alone = source.phase is not GangPhase.PARKED and not _fits_twice(state, job, source, claims)
    restore = Restore(
        parked_epoch=source.epoch, step=source.stop_step, alone=alone, peak_device_bytes=job.peak_device_bytes
    )
    gang = gang_orders.new_gang(state, job.number, claims, level, now, GangRole.DESTINATION, restore)
    taken = taken_by(source, claims)
    pieces = tuple([replace(piece, held=held) for piece, held in zip(gang.pieces, taken, strict=True)])
    state.put_gang(replace(gang, phase=GangPhase.RESIZING, resizes=True, pieces=pieces, attempt=job.attempt))
    state.put_job(replace(job, next_epoch=gang.epoch))
    return gang.epoch


def share_pieces(state: State, job: JobRecord, gangs: Sequence[Gang]) -> bool:
    """Divide the pieces among the worlds of a job; return whether a world holds other pieces than before.

    The present world holds all of its claims; the others hold what theirs need besides, the next world first, then
    worlds that were given up and are stopping."""
    if len(gangs) < 2:
        return False
    sources = {gang.restore.parked_epoch for gang in gangs if gang.resizes}
    worlds = [gang for gang in gangs if gang.resizes or gang.epoch in sources]
    if len(worlds) < 2:
        return False
    changed = False
    taken = _Taken()
    if job.epoch in [gang.epoch for gang in worlds]:
        # A single world holds its own pieces, and its cores may be shared by time-sliced gangs.
        changed = gang_orders.has_two_worlds(state, job.number) and _hold(state, state.gangs[job.epoch], taken)
        taken.present = {piece.claim.node: piece.held for piece in state.gangs[job.epoch].pieces}
    for gang in sorted(worlds, key=lambda gang: (gang.epoch != job.next_epoch, gang.epoch)):
        if gang.epoch != job.epoch:
            changed = _hold(state, gang, taken) or changed
            taken.add(state.gangs[gang.epoch])
    return changed


def rests_for_any_size(state: State, job: JobRecord) -> bool:
    """Return whether the job waits with its state parked where a world of another size can restore it."""
    gang = state.gangs.get(job.epoch)
    return gang is not None and job.capabilities.resize and gang.rested_level is SuspendLevel.OFFLOAD


def taken_by(gang: Gang, claims: Sequence[Claim]) -> tuple[Claim, ...]:
    """Return what a resize to these claims takes at once, besides what the gang holds."""
    held = {piece.claim.node: piece.held for piece in gang.pieces}
    return tuple([beside(claim, held.get(claim.node)) for claim in claims])


class _Taken:
    """What the worlds considered so far hold on each node."""

    def __init__(self) -> None:
        self.present: Mapping[str, Claim | None] = {}
        self._others: dict[str, Claim] = {}

    def add(self, gang: Gang) -> None:
        for held in gang.held:
            before = self._others.get(held.node)
            self._others[held.node] = held if before is None else _sum(before, held)

    def on(self, node: str) -> Claim | None:
        present, others = self.present.get(node), self._others.get(node)
        if present is None or others is None:
            return present or others
        # Each stopping world still has its own memory, besides that of the present one.
        both = _sum(present, others)
        return replace(both, memory_bytes=present.memory_bytes, arena_bytes=present.arena_bytes)


def _sum(one: Claim, other: Claim) -> Claim:
    cores = zip_longest(one.millicores, other.millicores, fillvalue=0)
    return replace(
        one,
        device_mask=one.device_mask | other.device_mask,
        millicores=tuple([own + beside for own, beside in cores]),
        memory_bytes=one.memory_bytes + other.memory_bytes,
        arena_bytes=one.arena_bytes + other.arena_bytes,
        bandwidth=more_bandwidth(one.bandwidth, other.bandwidth),
    )


def _hold(state: State, gang: Gang, taken: _Taken) -> bool:
    pieces = tuple([_holding(gang, piece, taken.on(piece.claim.node)) for piece in gang.pieces])
    if pieces == gang.pieces:
        return False
    state.put_gang(replace(gang, pieces=pieces))
    return True


def _holding(gang: Gang, piece: Piece, taken: Claim | None) -> Piece:
    if piece.gone or piece.held is None:
        return piece
    rests = gang.rested_level is SuspendLevel.OFFLOAD
    wanted = gang_orders.kept_offloaded(gang, piece) if rests else piece.claim
    return replace(piece, held=beside(wanted, taken))


def _fits_twice(state: State, job: JobRecord, gang: Gang, claims: Sequence[Claim]) -> bool:
    """Return whether devices of both worlds have memory for both: the job's measured use and residue."""
    common = [
        claim.node
        for claim in claims
        if any(own.node == claim.node and own.device_mask & claim.device_mask for own in gang.claims)
    ]
    used = max(job.used_device_bytes, job.spec.gpu_memory_bytes)
    for node in common:
        whole = state.nodes.configuration_sets[state.nodes[node].configuration_set].device_memory_bytes
        if not used or 2 * (used + min(state.settings.residue_bytes, used)) > MEMORY_SHARE * whole:
            return False
    return True


def check_resize(state: State, job: JobRecord, gpus: int) -> Gang:
    """Return the gang if it may be resized to that many devices, wherever they are. Raises RefusedError."""
    gang, spec, capabilities = state.gangs.get(job.epoch), job.spec, job.capabilities
    if not spec.is_elastic:
        raise _bounds_refused(job, gpus)
    if job.next_epoch or job.ending is not None:
        raise busy(job, "it is being moved or ends")
    if gang is not None:
        _check_not_sliced(state, job, gang)
    rests = gang is not None and gang.phase is GangPhase.PARKED and gang.parked_by_plan
    if job.state is not JobState.HOLDING or gang is None or not (gang.phase is GangPhase.RUNNING or rests):
        raise not_running(job, gang)
    if not spec.accepts(gpus):
        raise _bounds_refused(job, gpus)
    if not capabilities.resize:
        why = capabilities.missing.get("RESIZE", "it has not reported that it can")
        text = f"{job.name} cannot be resized: {why}"
        raise RefusedError("LEVEL_UNAVAILABLE", text, {"job": job.name, "level": "RESIZE"})
    if not tasks_divide(job, gpus):
        raise _refused(
            job, f"{gpus} GPUs do not divide its global batch ({counted(capabilities.resize_divides, 'sample')})"
        )
    if gpus == gang.devices:
        raise _refused(job, f"it has {counted(gpus, 'GPU')}")
    if any(claim.shared_mask for claim in gang.claims):
        raise _refused(job, "it shares its GPUs with another job")
    if gang.phase is GangPhase.PARKED and gang.rested_level is not SuspendLevel.OFFLOAD:
        raise _refused(job, f"it is parked at {gang.rested_level.name}")
    if not has_arenas(gang):
        why = capabilities.missing.get("OFFLOAD", "no host memory is reserved for its state")
        text = f"{job.name} cannot be resized: {why}"
        raise RefusedError("LEVEL_UNAVAILABLE", text, {"job": job.name, "level": "OFFLOAD"})
    return gang


def _check_not_sliced(state: State, job: JobRecord, gang: Gang) -> None:
    if gang.epoch in state.gangs.set_of:
        raise _refused(
            job, "it is time-sliced with other jobs on its GPUs, and keeps its size until it has some to itself"
        )


def rests_without_devices(state: State, job: JobRecord) -> bool:
    """Return whether the job holds nothing on any node: it was not started yet, or all of its state is on storage."""
    return not job.epoch and not job.next_epoch and not state.gangs.of_job(job.number) and job.ending is None


def check_size(job: JobRecord, gpus: int) -> None:
    """Raise RefusedError unless a job that holds no devices may start with that many."""
    if not job.spec.is_elastic or not job.spec.accepts(gpus):
        raise _bounds_refused(job, gpus)
    if job.is_bound:
        raise _refused(job, "its checkpoint cannot be brought back with another number of GPUs")
    if job.checkpoint is not None and not tasks_divide(job, gpus):
        raise _refused(
            job, f"{gpus} GPUs do not divide its global batch ({counted(job.capabilities.resize_divides, 'sample')})"
        )


def choose_size(state: State, event: SizeChosen) -> None:
    """Record with how many devices a job is to start."""
    job, gpus, tasks = state.jobs[event.number], event.gpus, event.tasks
    chosen = job.with_size_chosen(gpus, tasks or job.spec.tasks_by_role)
    state.put_job(replace(chosen, revision=job.revision + 1))
    figures: dict[str, Any] = {"devices": job.gpus, "becomes": gpus}
    if tasks:
        figures = {"tasks": tasks_text(job.spec, job.tasks_by_role), "becomes": tasks_text(job.spec, tasks)}
    state.history(event.time, job, "size_chosen", event.cause, **figures)


def tasks_text(spec: JobSpec, tasks: Sequence[int]) -> str:
    """Return numbers of tasks as people write them: "ps=1 worker=4"."""
    return " ".join([f"{role.name}={number}" for role, number in zip(spec.roles, tasks, strict=True)])


def check_tasks(state: State, job: JobRecord, wanted: Sequence[tuple[str, int]]) -> tuple[int, ...]:
    """Return the numbers of tasks, by role, with which a job of roles with ranges is to continue. Raises RefusedError.

    wanted: (role, number) pairs; other roles keep theirs."""
    names = [role.name for role in job.spec.roles]
    form = " ".join([f"{role.name}={role.tasks}" for role in job.spec.roles if role.tasks_max])
    if job.spec.is_elastic:
        raise _refused(job, f"it has a range of GPUs: `ganger resize {job.number} GPUS`")
    if not job.spec.has_role_ranges:
        raise _refused(job, "its roles have no ranges (`tasks: 1:4` in its job file)")
    if not wanted:
        raise _refused(job, f"name the tasks of its roles: `ganger resize {job.number} {form}`")
    unknown = [name for name, _ in wanted if name not in names]
    if unknown:
        raise _refused(job, f"it has no role {unknown[0][:40]!r}: its roles are {', '.join(names)}")
    numbers = dict(wanted)
    # Of a job that is stopped to be resized, those that it is to have then.
    present = dict(zip(names, job.tasks_by_role, strict=True))
    tasks = tuple([numbers.get(name, present[name]) for name in names])
    if why := why_not_tasks(job, tasks):
        raise _refused(job, why)
    if job.epoch:
        _check_stop(state, job, tasks)
    elif not rests_without_devices(state, job):
        raise busy(job, "it ends")
    return tasks


def _check_stop(state: State, job: JobRecord, tasks: tuple[int, ...]) -> None:
    """Raise RefusedError unless a running job can be stopped, and has room then for these numbers of tasks."""
    gang = state.gangs.get(job.epoch)
    if job.next_epoch or job.ending is not None:
        raise busy(job, "it is being moved or ends")
    if job.state is not JobState.HOLDING or gang is None or gang.phase is not GangPhase.RUNNING:
        raise not_running(job, gang)
    _check_not_sliced(state, job, gang)
    if tasks == tasks_of(gang.claims):
        raise _refused(job, f"it has {tasks_text(job.spec, tasks)}")
    check_suspend(state, job, SuspendLevel.CHECKPOINT)
    shape = job.shape_for_tasks(tasks)
    if refusals := rules(state, job, shape.gpus):
        raise _refused(job, refusals[0].message)
    if not has_room_for(state, job, gang, shape):
        raise _refused(job, f"there is no room for {tasks_text(job.spec, tasks)} (`ganger nodes` shows what is free)")


def _bounds_refused(job: JobRecord, gpus: int) -> RefusedError:
    spec = job.spec
    if not spec.is_elastic:
        return _refused(job, "it was submitted with one number of GPUs (an elastic job has a range, `--gpus 2:8`)")
    each = f", whole tasks of {spec.roles[0].shape.gpus}" if spec.roles[0].shape.gpus > 1 else ""
    return _refused(job, f"it accepts {spec.gpus_min} to {spec.gpus_max} GPUs{each}, not {gpus}")


def judge_resize(state: State, job: JobRecord, gang: Gang, claims: Sequence[Claim]) -> tuple[Refusal, ...]:
    """Return why a gang cannot have these claims instead of its own; empty if it can."""
    gpus = devices_of(claims)
    if any(claim.shared_mask for claim in claims):
        return (shares_nothing(job),)
    refusals = rules(state, job, gpus)
    if refusals:
        return refusals
    shape = job.shape_for(gpus)
    holding = gang.held
    refusals = judge_change(state, job, tuple(claims), holding, retune=True, shape=shape)
    return refusals or _no_memory_for_both(state, job, gang, claims)


def _no_memory_for_both(state: State, job: JobRecord, gang: Gang, claims: Sequence[Claim]) -> tuple[Refusal, ...]:
    """Return the refusal if host memory is too small for both worlds; empty if it suffices.

    Until the old world is gone, tasks of the new one cannot have the memory that arenas of the old one are in."""
    for taken in taken_by(gang, claims):
        needed, free = taken.memory_bytes + taken.arena_bytes, state.view.memory[state.view.slots[taken.node]]
        if needed > free:
            figures = {"needed_bytes": needed, "free_bytes": free}
            detail = "beside what it holds until its new processes go on"
            return (Refusal(Reason.MEMORY, figures, job=job.name, node=taken.node, detail=detail),)
    return ()


def place_resized(state: State, job: JobRecord, gang: Gang, gpus: int) -> tuple[Claim, ...]:
    """Return claims for that many devices, as close to the present ones as possible. Raises RefusedError."""
    shape = job.shape_for(gpus)
    claims = resized(state.view, shape, gang.claims)
    if claims is None:
        raise _refused(job, f"there is no room for {counted(gpus, 'GPU')} (`ganger nodes` shows what is free)")
    refusals = judge_resize(state, job, gang, claims)
    if refusals:
        raise _refused(job, refusals[0].message)
    return claims


def shares_nothing(job: JobRecord) -> Refusal:
    """Return the refusal of shared devices: the worlds of a job share pieces only with each other."""
    return Refusal(Reason.NOT_SUPPORTED, job=job.name, detail="a world of another size shares no devices with others")


def _refused(job: JobRecord, why: str) -> RefusedError:
    return RefusedError("RESIZE_REFUSED", f"{job.name} cannot be resized: {why}", {"job": job.name})
