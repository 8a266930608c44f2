"""Submissions and updates of jobs: all violations of a spec at once, and gangs that no node of the cluster could hold.

The new spec of an update is judged as a submitted one. A waiting job takes the place in the queue that its new priority
gives it, and gets a lease anew. For a running job only the time limit, the priority and the name change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from signal import Signals
from typing import Any, Final, NamedTuple

from ganger.cluster.placement import impossible
from ganger.cluster.resources import DIMENSIONS, Locality, LocalityLevel
from ganger.protocol.gang_orders import Mechanism
from ganger.text import format_cores, format_duration, format_memory
from msgspec.structs import replace

from ganger_master.core import answers, commands, ending, events, reservations
from ganger_master.core.answers import Refused, RefusedError
from ganger_master.core.events import Decision
from ganger_master.core.job_model import JobRecord, JobSpec, Submitted, Update, Updated, bytes_of
from ganger_master.core.limits import beyond
from ganger_master.core.preconditions import array_members, find_job, has_ended, unfinished
from ganger_master.core.state import State

_TASKS_LIMIT = 10_000
_COMMAND_LIMIT = 1_000
COMMAND_BYTES_LIMIT = 64 * 1024
_NAME_LIMIT = 63
_PRIORITY_LIMIT = 1_000
_LEAST_WEIGHT, _MOST_WEIGHT = 0.01, 100
_PASSES_LIMIT = 1_000
_FAILURES_LIMIT = 1_000_000
_GPUS_PER_TASK_LIMIT = 64
_TEXT_LIMIT = 4_096
_LABELS_LIMIT = 100
_ENVIRONMENT_LIMIT = 256 * 1024
# The longest string that Linux passes to a program (MAX_ARG_STRLEN), without "=" and the NUL at the end.
_VARIABLE_LIMIT = 128 * 1024 - 2
# Larger values are mistakes, and sums of them would not fit into the fields of the wire.
_MILLICORES_LIMIT = 65_536_000
_BYTES_LIMIT = 1 << 50
_MB_PER_S_LIMIT = 10**9
_ALL_BYTES_LIMIT = 1 << 60
_SECONDS_LIMIT = 36_525 * 86_400.0
# Of the year 9999, by Unix's clock.
_LAST_SECOND = 253_402_300_799.0
_CENTURY = "at most a century"
SEVERAL = 20


def repeated_request(state: State, user: str, request_id: str, now: float) -> JobRecord | None:
    """Return the job, or the first of the array, that was accepted under this id; None for a new id, or none. Raises
    RefusedError if that job is no longer kept."""
    kept_s, known = state.settings.request_kept_s, state.jobs.requests.get((user, request_id)) if request_id else None
    if known is not None and now - state.jobs[known].create_time <= kept_s:
        return state.jobs[known]
    former = state.jobs.former.get((user, request_id))
    if former is not None and now - former.time <= kept_s:
        name = f"jobs/{former.number}"
        text = f"request id {request_id} was accepted as {name}, which has ended and is no longer kept"
        raise RefusedError("REQUEST_REUSED", text, {"job": name})
    return None


def check_submission(state: State, spec: JobSpec, user: str) -> None:
    """Raise RefusedError unless the user's job is accepted."""
    violations = violations_of(spec)
    if violations:
        text = "; ".join(f"{path}: {what}" for path, what in violations[:SEVERAL])
        raise RefusedError("SPEC_INVALID", text, violations=violations)
    check_room(state, spec, user)


def check_room(state: State, spec: JobSpec, user: str, jobs: int = 1) -> None:
    """Raise RefusedError unless so many jobs of this kind may wait, and could run."""
    if len(state.queue.waiting) + jobs > state.settings.jobs_waiting_limit:
        raise RefusedError("QUEUE_FULL", f"{len(state.queue.waiting)} jobs wait already; cancel some or try later")
    check_partition(state, spec, user)
    check_possible(state, spec)
    # A job beyond the quota of its user or team would never start.
    found = beyond(state.limits, state.limits.owners(user, state.teams.of(user)), spec.gpus)
    if found is not None:
        owner, refusal = found
        limit = state.limits.of(owner)
        fewer = f"ask for {limit} or fewer, or " if limit else ""
        figures = {"user": user, **{name: str(value) for name, value in refusal.figures.items()}}
        figures |= {"team": owner.team} if owner.team else {}
        raise RefusedError("QUOTA_EXCEEDED", f"{refusal.detail}: {fewer}have an operator raise the quota", figures)


def check_share(state: State, user: str, jobs: int, size_bytes: int) -> None:
    """Raise RefusedError unless the user may submit so many more jobs, whose specs take so many bytes."""
    settings, held = state.settings, state.jobs.holdings
    pending, most = held.pending[user], settings.pending_jobs_per_user
    if pending + jobs > most:
        text = (
            f"user {user} has {pending} pending jobs, this submission has {jobs}, and a user may have {most}"
            " (pending_jobs_per_user): wait until some have started, or cancel some"
        )
        raise RefusedError("USER_LIMIT", text, {"pending": str(pending), "limit": str(most)})
    size, most = held.live_bytes[user], settings.spec_bytes_per_user
    if size + size_bytes > most:
        text = (
            f"the commands and environments of the jobs of user {user} take {size} bytes, those of this submission"
            f" {size_bytes}, and a user may have {most} (spec_bytes_per_user): put large values into files, or wait"
            " until some jobs have ended"
        )
        raise RefusedError("USER_LIMIT", text, {"bytes": str(size), "limit": str(most)})


def check_partition(state: State, spec: JobSpec, user: str) -> None:
    """Raise RefusedError unless the user's job may be in the partition that it names, or else in the default."""
    if not (state.partitions or spec.partition):
        return
    name = spec.partition or state.partitions.default
    refusal = state.partitions.refusal(name, user, state.teams.of(user), spec.gpus, spec.time_limit_s)
    if refusal is not None:
        figures = {figure: str(value) for figure, value in sorted(refusal.figures.items())}
        raise RefusedError(refusal.reason.value, refusal.message, {"partition": name, **figures})


def check_possible(state: State, spec: JobSpec) -> None:
    """Raise RefusedError for a spec whose gang could never run."""
    refusal = impossible(state.view, spec.shape(partition=state.partitions.terms_of(spec.partition).name))
    if refusal is not None:
        figures = {name: str(value) for name, value in sorted(refusal.figures.items())}
        raise RefusedError("GANG_IMPOSSIBLE", refusal.message, figures)


def violations_of(spec: JobSpec) -> tuple[tuple[str, str], ...]:
    """Return (path, what is wrong) pairs."""
    return (*_wrong_program(spec), *wrong_wishes(spec))


def wrong_wishes(spec: JobSpec) -> tuple[tuple[str, str], ...]:
    """Return the same, for all fields but those of the program that the job runs."""
    return (
        *_wrong_numbers(spec),
        *_wrong_mechanism(spec),
        *_wrong_texts(spec),
        *_wrong_roles(spec),
        *_wrong_sizes(spec),
    )


def _wrong_program(spec: JobSpec) -> Iterator[tuple[str, str]]:
    path, command = "spec.command", spec.command
    if not command or not command[0]:
        yield path, "must name a program to run"
    if len(command) > _COMMAND_LIMIT:
        yield path, f"at most {_COMMAND_LIMIT} words"
    if bytes_of("".join(command)) > COMMAND_BYTES_LIMIT:
        yield path, f"at most {COMMAND_BYTES_LIMIT} bytes in all"
    if "\0" in "".join(command):
        yield path, "no word may contain a NUL character"
    path, directory = "spec.working_directory", spec.working_directory
    if not directory.startswith("/"):
        yield path, "must be an absolute path"
    if bytes_of(directory) > _TEXT_LIMIT or "\0" in directory:
        yield path, f"at most {_TEXT_LIMIT} bytes, no NUL"
    if spec.environment:
        yield from _wrong_environment(spec.environment)
    if spec.scheduler:
        path = "spec.scheduler"
        if not _is_text(spec.scheduler, _TEXT_LIMIT):
            yield path, f"at most {_TEXT_LIMIT} characters"
        module, _, name = spec.scheduler.partition(":")
        if not (module and name):
            yield path, "write module:Class"


def _wrong_environment(environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    path, names, values = "spec.environment", "".join(environment), "".join(environment.values())
    if "" in environment or "=" in names or "\0" in names:
        bad = [name for name in environment if not name or "=" in name or "\0" in name]
        yield path, f"no such variable name is possible: {bad[:3]}"
    if "\0" in values:
        yield path, "no value may contain a NUL character"
    if bytes_of(names) + bytes_of(values) > _ENVIRONMENT_LIMIT:
        yield path, f"at most {_ENVIRONMENT_LIMIT} bytes in all"
    for name, value in environment.items():
        if bytes_of(name) + bytes_of(value) > _VARIABLE_LIMIT:
            yield path, f"{name[:40]}: at most {_VARIABLE_LIMIT} bytes, for no program can be started with more"
            break


def _wrong_mechanism(spec: JobSpec) -> Iterator[tuple[str, str]]:
    if spec.stop_signal and f"SIG{spec.stop_signal}" not in Signals.__members__:
        yield "spec.stop_signal", 'the name of a signal without SIG, "TERM"'
    if spec.stop_signal in ("KILL", "STOP"):
        yield "spec.stop_signal", "a script cannot handle it"
    if spec.mechanism is Mechanism.SIGNAL and not spec.stop_signal:
        yield "spec.stop_signal", "name the signal at which the script saves itself"
    if not 0 < spec.stop_grace_s <= _SECONDS_LIMIT:
        yield "spec.stop_grace", f"more than zero, {_CENTURY}"


def _wrong_numbers(spec: JobSpec) -> Iterator[tuple[str, str]]:
    # The bounds are tested positively, because NaN is neither more nor less.
    if abs(spec.priority) > _PRIORITY_LIMIT:
        yield "spec.priority", f"from -{_PRIORITY_LIMIT} to {_PRIORITY_LIMIT}"
    if not _LEAST_WEIGHT <= spec.weight <= _MOST_WEIGHT:
        yield "spec.weight", f"from {_LEAST_WEIGHT} to {_MOST_WEIGHT}"
    limit = spec.time_limit_s
    if limit is not None and not limit > 0:
        yield "spec.time_limit", "must be more than zero"
    if limit is not None and not limit <= _SECONDS_LIMIT:
        yield "spec.time_limit", _CENTURY
    if not 0 <= spec.deadline <= _LAST_SECOND:
        yield "spec.deadline", "a time up to the year 9999"
    if not spec.checkpoint_interval_s <= _SECONDS_LIMIT:
        yield "spec.checkpoint_interval", _CENTURY
    if not 0 <= spec.least_decrease < 1:
        yield "spec.convergence.least_decrease", "from 0 to less than 1"
    if not 1 <= spec.converged_passes <= _PASSES_LIMIT:
        yield "spec.convergence.passes", f"from 1 to {_PASSES_LIMIT}"
    if not 0 <= spec.max_failures <= _FAILURES_LIMIT:
        yield "spec.max_failures", f"from 0 to {_FAILURES_LIMIT}"
    if spec.nodes < 0:
        yield "spec.nodes", "must not be negative"
    if not 0 <= spec.gpu_memory_bytes <= _BYTES_LIMIT:
        yield "spec.gpu_memory_bytes", f"from 0 to {_BYTES_LIMIT}"
    locality = spec.locality
    if locality.wish is not None and locality.wish > locality.widest:
        yield "spec.locality.wish", "must not be wider than widest"
    if not locality.patience_s >= 0:
        yield "spec.locality.patience", "must not be negative"
    if not locality.patience_s <= _SECONDS_LIMIT:
        yield "spec.locality.patience", _CENTURY


def _wrong_texts(spec: JobSpec) -> Iterator[tuple[str, str]]:
    printable = f"at most {_NAME_LIMIT} printable characters"
    if not _is_text(spec.display_name):
        yield "spec.display_name", printable
    if not _is_text(spec.partition):
        yield "spec.partition", printable
    if not _is_text(spec.device_type):
        yield "spec.device_type", printable
    types = spec.device_type.split(",")
    if len(types) > 1 and (len(set(types)) < len(types) or any(not one or one != one.strip() for one in types)):
        yield "spec.device_type", "several types are separated by single commas, each named once"
    if len(spec.labels) > _LABELS_LIMIT:
        yield "spec.labels", f"at most {_LABELS_LIMIT}"
    if not all(map(_is_text, spec.labels)) or not all(map(_is_text, spec.labels.values())):
        yield "spec.labels", f"{printable} each"


def _wrong_roles(spec: JobSpec) -> Iterator[tuple[str, str]]:
    path, roles, tasks = "spec.roles", spec.roles, spec.tasks
    if not roles:
        yield path, "at least one role"
    elif not 1 <= tasks <= _TASKS_LIMIT:
        yield path, f"1 to {_TASKS_LIMIT} tasks in all"
    if sum([role.tasks * role.shape.memory_bytes for role in roles]) > _ALL_BYTES_LIMIT:
        yield path, f"at most {_ALL_BYTES_LIMIT} bytes of memory in all"
    if len({role.name for role in roles}) != len(roles):
        yield path, "role names must differ"
    for index, role in enumerate(roles):
        shape = role.shape
        if not _is_text(role.name):
            yield f"{path}[{index}].name", f"at most {_NAME_LIMIT} printable characters"
        if role.tasks < 1:
            yield f"{path}[{index}].tasks", "at least one task"
        if not 0 <= shape.gpus <= _GPUS_PER_TASK_LIMIT:
            yield f"{path}[{index}].shape.gpus", f"0 to {_GPUS_PER_TASK_LIMIT}"
        if not 0 <= shape.millicores <= _MILLICORES_LIMIT:
            yield f"{path}[{index}].shape.millicores", f"from 0 to {_MILLICORES_LIMIT}"
        if not 0 <= shape.memory_bytes <= _BYTES_LIMIT:
            yield f"{path}[{index}].shape.memory_bytes", f"from 0 to {_BYTES_LIMIT}"
        for name, amount in zip(DIMENSIONS, shape.bandwidth, strict=False):
            if not 0 <= amount <= _MB_PER_S_LIMIT:
                yield f"{path}[{index}].shape.{name}", f"from 0 to {_MB_PER_S_LIMIT}"
    if spec.nodes > max(1, tasks):
        yield "spec.nodes", "more nodes than tasks"


def _wrong_sizes(spec: JobSpec) -> Iterator[tuple[str, str]]:
    least, most = spec.gpus_min, spec.gpus_max
    if not (least or most):
        return
    if len(spec.roles) != 1 or spec.roles[0].shape.gpus < 1:
        yield "spec.gpus_max", "an elastic job has one role, of tasks with GPUs"
        return
    each, gpus = spec.roles[0].shape.gpus, spec.gpus
    if not 1 <= least <= gpus:
        yield "spec.gpus_min", f"from 1 to {gpus}, which its tasks have"
    elif least % each:
        yield "spec.gpus_min", f"whole tasks of {each}"
    if not gpus <= most <= each * _TASKS_LIMIT:
        yield "spec.gpus_max", f"from {gpus}, which its tasks have, to {each * _TASKS_LIMIT}"
    elif most % each:
        yield "spec.gpus_max", f"whole tasks of {each}"
    if spec.nodes:
        yield "spec.nodes", "an elastic job cannot say on how many nodes it is"


def _is_text(text: str, limit: int = _NAME_LIMIT) -> bool:
    return len(text) <= limit and text.isprintable()


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
    told = _change_text(state.jobs[number].spec, spec)
    for number, spec in event.specs:
        carry_out(state, events.JobUpdated(now, cause, number, spec, event.update, event.request_id))
    state.history(now, f"arrays/{event.number}", "array_updated", cause, told, members=len(event.specs))


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
                f"{job.name} takes turns with others, which is for jobs of one priority and without a time limit: "
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
