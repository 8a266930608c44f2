"""Submissions of jobs: all violations of a spec at once, and gangs that no node of the cluster could hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from signal import Signals

from ganger.cluster.placement import impossible
from ganger.cluster.resources import DIMENSIONS
from ganger.protocol.gang_orders import Mechanism
from ganger.text import counted

from ganger_master.core import dependencies
from ganger_master.core.accounting import beyond
from ganger_master.core.answers import RefusedError
from ganger_master.core.job_model import JobRecord
from ganger_master.core.job_spec import JobSpec, bytes_of
from ganger_master.core.state import State
from ganger_master.core.state_indexes import bytes_of_all

_TASKS_LIMIT = 10_000
_COMMAND_LIMIT = 1_000
COMMAND_BYTES_LIMIT = 64 * 1024
_NAME_LIMIT = 63
_PRIORITY_LIMIT = 1_000
_LEAST_WEIGHT, _MOST_WEIGHT = 0.01, 100
_COPIES_LIMIT = 2
_DEPENDENCIES_LIMIT = 100
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
    violations = (*violations_of(spec), *dependencies.violations_of(state.jobs, spec))
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
        *_wrong_copies(spec),
        *_wrong_dependencies(spec),
        *_wrong_numbers(spec),
        *_wrong_mechanism(spec),
        *_wrong_texts(spec),
        *_wrong_roles(spec),
        *(_wrong_role_ranges(spec) if spec.has_role_ranges else _wrong_sizes(spec)),
    )


def _wrong_program(spec: JobSpec) -> Iterator[tuple[str, str]]:
    yield from _wrong_command("spec.command", spec.command)
    path, directory = "spec.working_directory", spec.working_directory
    if not directory.startswith("/"):
        yield path, "must be an absolute path"
    if bytes_of(directory) > _TEXT_LIMIT or "\0" in directory:
        yield path, f"at most {_TEXT_LIMIT} bytes, no NUL"
    yield from _wrong_environment("spec.environment", spec.environment)
    if spec.role_programs:
        yield from _wrong_role_programs(spec)
    if spec.scheduler:
        path = "spec.scheduler"
        if not _is_text(spec.scheduler, _TEXT_LIMIT):
            yield path, f"at most {_TEXT_LIMIT} characters"
        module, _, name = spec.scheduler.partition(":")
        if not (module and name):
            yield path, "write module:Class"


def _wrong_command(path: str, command: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    if not command or not command[0]:
        yield path, "must name a program to run"
    if len(command) > _COMMAND_LIMIT:
        yield path, f"at most {_COMMAND_LIMIT} words"
    if bytes_of("".join(command)) > COMMAND_BYTES_LIMIT:
        yield path, f"at most {COMMAND_BYTES_LIMIT} bytes in all"
    if "\0" in "".join(command):
        yield path, "no word may contain a NUL character"


def _wrong_role_programs(spec: JobSpec) -> Iterator[tuple[str, str]]:
    roles, named = {role.name for role in spec.roles}, [program.role for program in spec.role_programs]
    if len(set(named)) < len(named):
        yield "spec.role_programs", "at most one for a role"
    all_bytes = bytes_of_all(spec.environment)
    for index, program in enumerate(spec.role_programs):
        path = f"spec.role_programs[{index}]"
        if program.role not in roles:
            yield f"{path}.role", f"the job has no role {program.role[:40]!r}"
        if program.command:
            yield from _wrong_command(f"{path}.command", program.command)
        yield from _wrong_environment(f"{path}.environment", program.environment)
        all_bytes += bytes_of_all(program.environment)
    if all_bytes > _ENVIRONMENT_LIMIT:
        yield "spec.role_programs", f"with the job's environment at most {_ENVIRONMENT_LIMIT} bytes in all"
    if sum([bytes_of("".join(program.command)) for program in spec.role_programs]) > COMMAND_BYTES_LIMIT:
        yield "spec.role_programs", f"at most {COMMAND_BYTES_LIMIT} bytes of commands in all"


def _wrong_environment(path: str, environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    if not environment:
        return
    names, values = "".join(environment), "".join(environment.values())
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


def _wrong_copies(spec: JobSpec) -> Iterator[tuple[str, str]]:
    if not 0 <= spec.checkpoint_copies <= _COPIES_LIMIT:
        yield "spec.checkpoint_copies", f"from 0 to {_COPIES_LIMIT}"


def _wrong_dependencies(spec: JobSpec) -> Iterator[tuple[str, str]]:
    if len(spec.dependencies) > _DEPENDENCIES_LIMIT:
        yield "spec.dependencies", f"at most {_DEPENDENCIES_LIMIT}"
    if len(set(spec.dependencies)) < len(spec.dependencies):
        yield "spec.dependencies", "each only once"


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


def _wrong_role_ranges(spec: JobSpec) -> Iterator[tuple[str, str]]:
    for index, role in enumerate(spec.roles):
        least, most = role.tasks_min, role.tasks_max
        if (least or most) and not 1 <= least <= role.tasks <= most <= _TASKS_LIMIT:
            bounds = f"at least 1, at most {_TASKS_LIMIT}, with the {counted(role.tasks, 'task')} of the role in it"
            yield f"spec.roles[{index}].tasks_max", f"the range of a role: {bounds}"
    if spec.gpus_min or spec.gpus_max:
        yield "spec.gpus_max", "does not go with ranges of roles"
    if spec.nodes:
        yield "spec.nodes", "a job with ranges of its roles cannot say on how many nodes it is"


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
