"""Updates of jobs. The new spec is judged as a submitted one.

A waiting job takes the place in the queue that its new priority gives it, and gets a lease anew. For a running job only
the time limit, the priority and the name change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

from ganger.cluster.resources import Locality, LocalityLevel
from ganger.text import format_cores, format_duration, format_memory
from msgspec.structs import replace

from ganger_master.core import answers, commands, ending, events, reservations
from ganger_master.core.answers import Refused, RefusedError
from ganger_master.core.events import Decision
from ganger_master.core.job_model import JobRecord
from ganger_master.core.job_spec import JobSpec, Submitted, Update, Updated
from ganger_master.core.preconditions import array_members, find_job, has_ended, unfinished
from ganger_master.core.state import State
from ganger_master.core.submission import check_partition, check_possible, wrong_wishes

# Request ids kept of a job: a request is repeated within seconds.
_KEPT: Final = 8
# Where a violation of the new spec stands in the request, if not under the same name.
_PATHS: Final = {
    "spec.roles": "update.memory_bytes",
    "spec.roles[0].shape.memory_bytes": "update.memory_bytes",
    "spec.roles[0].shape.millicores": "update.millicores_per_gpu",
}


def update(state: State, command: commands.UpdateJob, now: float) -> Decision:
    """Update a job, all of it or nothing. The same request again changes nothing, whatever became of the job since."""
    job = find_job(state, command.number)
    spec = _updated_spec(state, job, command.update, command.request_id, now)
    if spec == job.spec:
        return (), answers.JobAnswer(job.number)
    if not command.may_end:
        _check_ends_none(state, [(job.number, spec)], now, job.name)
    event = events.JobUpdated(now, f"user:{command.user}", job.number, spec, command.update, command.request_id)
    return (event,), answers.JobAnswer(job.number)


def update_array(state: State, command: commands.UpdateArray, now: float) -> Decision:
    """Update every member that has not ended. Members that have started or are time-sliced may be refused alone; any
    other refusal is one of the update itself."""
    name, members = f"arrays/{command.number}", array_members(state.jobs, command.number)
    # One that has ended may have had this update before it did.
    wanted = [job for job in members if not has_ended(job) or _earlier_update(job, command.request_id)]
    if not wanted:
        raise RefusedError("JOB_FINISHED", f"every member of {name} has ended", {"array": name})
    specs: list[tuple[int, JobSpec]] = []
    refused: list[tuple[int, Refused]] = []
    for job in wanted:
        try:
            specs.append((job.number, _updated_spec(state, job, command.update, command.request_id, now)))
        except RefusedError as error:
            if error.refused.reason != _NOT_NOW:
                raise
            refused.append((job.number, error.refused))
    answer = answers.UpdateAnswer(command.number, len(specs), tuple(refused))
    changed = tuple([(number, spec) for number, spec in specs if spec != state.jobs[number].spec])
    if not changed:
        return (), answer
    if not command.may_end:
        _check_ends_none(state, changed, now, name)
    cause = f"user:{command.user}"
    return (events.ArrayUpdated(now, cause, command.number, changed, command.update, command.request_id),), answer


def carry_out(state: State, event: events.JobUpdated) -> None:
    job = state.jobs[event.number]
    old, spec, request_id = job.spec, event.spec, event.request_id
    updates = (*job.updates, Updated(request_id, event.update))[-_KEPT:] if request_id else job.updates
    submitted = job.submitted or Submitted(**{name: getattr(old, name) for name in Submitted.__struct_fields__})
    state.put_job(replace(job, spec=spec, revision=job.revision + 1, submitted=submitted, updates=updates))
    state.history(event.time, job, "job_updated", event.cause, _change_text(old, spec))


def carry_out_array(state: State, event: events.ArrayUpdated) -> None:
    now, cause, (number, spec) = event.time, event.cause, event.specs[0]
    change = _change_text(state.jobs[number].spec, spec)
    for number, spec in event.specs:
        carry_out(state, events.JobUpdated(now, cause, number, spec, event.update, event.request_id))
    state.history(now, f"arrays/{event.number}", "array_updated", cause, change, members=len(event.specs))


class _Aspect(NamedTuple):
    """A value of a spec that can be updated: its name, and how it reads. `lasts`: once a gang was formed by it."""

    name: str
    of: Callable[[JobSpec], Any]
    text: Callable[[Any], str]
    lasts: bool = True


def _otherwise(old: JobSpec, new: JobSpec) -> list[_Aspect]:
    return [aspect for aspect in _ASPECTS if aspect.of(old) != aspect.of(new)]


def _change_text(old: JobSpec, new: JobSpec) -> str:
    """ "priority 0 -> 5, time limit none -> 2h"."""
    found = _otherwise(old, new)
    return ", ".join([f"{one.name} {one.text(one.of(old))} -> {one.text(one.of(new))}" for one in found])


def _locality_text(locality: Locality) -> str:
    widest = "any" if locality.widest is LocalityLevel.CLUSTER else locality.widest.name.lower()
    if locality.wish is None:
        return widest
    return f"{locality.wish.name.lower()} for {format_duration(locality.patience_s)}, then {widest}"


_ASPECTS: Final = (
    _Aspect("name", lambda spec: spec.display_name, lambda name: name or "none", lasts=False),
    _Aspect("priority", lambda spec: spec.priority, str, lasts=False),
    _Aspect(
        "time limit",
        lambda spec: spec.time_limit_s,
        lambda seconds: "none" if seconds is None else format_duration(seconds),
        lasts=False,
    ),
    _Aspect("GPU type", lambda spec: spec.device_type, lambda kind: kind or "any"),
    _Aspect("partition", lambda spec: spec.partition, lambda name: name or "the default"),
    _Aspect("locality", lambda spec: spec.locality, _locality_text),
    _Aspect(
        "memory of a task",
        lambda spec: spec.roles[0].shape.memory_bytes,
        lambda count: format_memory(count) if count else "a share",
    ),
    _Aspect(
        "cores of a task",
        lambda spec: spec.roles[0].shape.millicores,
        lambda millicores: format_cores(millicores) if millicores else "a share",
    ),
)

_NOT_NOW: Final = "UPDATE_REFUSED"


def _earlier_update(job: JobRecord, request_id: str) -> Updated | None:
    return next((one for one in job.updates if request_id and one.request_id == request_id), None)


def _updated_spec(state: State, job: JobRecord, wanted: Update, request_id: str, now: float) -> JobSpec:
    known = _earlier_update(job, request_id)
    if known is not None:
        if known.update == wanted:
            return job.spec
        text = f"request id {request_id} was used for {job.name} with another update; use a new one"
        raise RefusedError("REQUEST_REUSED", text, {"job": job.name})
    unfinished(state, job.number)
    spec = _changed(job.spec, wanted)
    wishes = [(_PATHS.get(path) or path.replace("spec.", "update.", 1), what) for path, what in wrong_wishes(spec)]
    violations = (*_wrong_update(job.spec, wanted), *wishes)
    if violations:
        raise RefusedError("SPEC_INVALID", f"{job.name} cannot be updated so", {"job": job.name}, violations)
    _check_now(state, job, spec, now)
    return spec


def _changed(spec: JobSpec, wanted: Update) -> JobSpec:
    same = ("display_name", "priority", "device_type", "partition", "locality")
    plain = {name: getattr(wanted, name) for name in same}
    spec = replace(spec, **{name: value for name, value in plain.items() if value is not None})
    if wanted.time_limit_s is not None:
        spec = replace(spec, time_limit_s=wanted.time_limit_s or None)
    shape = spec.roles[0].shape
    if wanted.memory_bytes is not None:
        shape = replace(shape, memory_bytes=wanted.memory_bytes)
    if wanted.millicores_per_gpu is not None:
        shape = replace(shape, millicores=wanted.millicores_per_gpu * shape.gpus)
    return replace(spec, roles=(replace(spec.roles[0], shape=shape), *spec.roles[1:]))


def with_cores(spec: JobSpec, millicores: int) -> JobSpec:
    """Return the spec with these cores named for each task; zero leaves those of tasks with GPUs to the scheduler."""
    roles = [
        replace(role, shape=replace(role.shape, millicores=millicores)) if millicores or role.shape.gpus else role
        for role in spec.roles
    ]
    return replace(spec, roles=tuple(roles))


def _wrong_update(spec: JobSpec, wanted: Update) -> Iterator[tuple[str, str]]:
    if wanted == Update():
        yield "update", "must say what to change"
    for name in ("memory_bytes", "millicores_per_gpu"):
        if getattr(wanted, name) is not None and len(spec.roles) > 1:
            yield f"update.{name}", "each role of the job has its own: cancel it and submit it again"
    if wanted.millicores_per_gpu is not None and not spec.roles[0].shape.gpus:
        yield "update.millicores_per_gpu", "the job has no GPUs"


def _check_now(state: State, job: JobRecord, spec: JobSpec, now: float) -> None:
    """Raise RefusedError if the state of the job, or the cluster, forbids the new spec."""
    otherwise = _otherwise(job.spec, spec)
    if any(aspect.name in ("partition", "time limit") for aspect in otherwise):
        check_partition(state, spec, job.user)
    lasting = [aspect.name for aspect in otherwise if aspect.lasts]
    text = ""
    if not lasting:
        is_sliced = job.epoch in state.gangs.set_of or job.next_epoch in state.gangs.set_of
        if is_sliced and any(aspect.name in ("priority", "time limit") for aspect in otherwise):
            text = (
                f"{job.name} is time-sliced with others, which is for jobs of one priority and without a time limit: "
                "suspend it, update it, and resume it"
            )
        text = text or reservations.reached_by(state, job, spec, now)
    elif job.start_time or job.checkpoint is not None or state.gangs.epochs_of.get(job.number):
        text = (
            f"{job.name} has started: its priority, time limit and name can be changed, "
            f"not its {' and its '.join(lasting)}: cancel it and submit it again"
        )
    else:
        check_possible(state, spec)
    if text:
        raise RefusedError(_NOT_NOW, text, {"job": job.name})


def _check_ends_none(state: State, specs: Sequence[tuple[int, JobSpec]], now: float, subject: str) -> None:
    """Refuse an update by which jobs end at once: those that have run for longer than their new time limit.

    specs: (number, new spec) of the jobs that change. subject: what is updated, "jobs/7" or "arrays/5".
    """
    over = []
    for number, spec in specs:
        job, limit = state.jobs[number], spec.time_limit_s
        ran = ending.counted_s(state, job, now)
        if limit is not None and limit != job.spec.time_limit_s and ran >= limit:
            over.append((number, ran, limit))
    if not over:
        return
    number, ran, limit = max(over, key=lambda one: one[1])
    first, (have, them) = f"jobs/{number}", ("has", "it") if len(over) == 1 else ("have", "them")
    which = subject if subject == first else f"{len(over)} of the jobs of {subject}, {first} first of all,"
    text = (
        f"{which} {have} run for {format_duration(ran)}, longer than the new time limit of {format_duration(limit)}: "
        f"the update would end {them} at once; confirm that (--yes, may_end) or give more"
    )
    figures = {"job": first, "jobs": str(len(over)), "ran": f"{ran:g}", "limit": f"{limit:g}"}
    raise RefusedError("UPDATE_ENDS_JOB", text, figures)
