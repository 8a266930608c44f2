"""May a job be accepted? Everything that is wrong with a spec at once, and gangs no cluster of this make could hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from ganger.placement.impossible import impossible

from ganger_master.core.answers import Refused
from ganger_master.core.model import JobSpec
from ganger_master.core.state import State

Expect: TypeAlias = Callable[[bool, str, str], None]

_TASKS_LIMIT = 10_000
_COMMAND_LIMIT = 1_000
_COMMAND_BYTES_LIMIT = 64 * 1024
_NAME_LIMIT = 63
_PRIORITY_LIMIT = 1_000
_FAILURES_LIMIT = 1_000_000
_GPUS_PER_TASK_LIMIT = 64
_TEXT_LIMIT = 4_096
_LABELS_LIMIT = 100
_ENVIRONMENT_LIMIT = 256 * 1024
# Above these nobody means what the numbers say, and sums of them would not fit into the wire's.
_MILLICORES_LIMIT = 65_536_000
_BYTES_LIMIT = 1 << 50
_ALL_BYTES_LIMIT = 1 << 60
_SECONDS_LIMIT = 36_525 * 86_400.0
_CENTURY = "at most a century"
_SEVERAL = 20


def check_submission(state: State, spec: JobSpec) -> Refused | None:
    """None if the job may be accepted."""
    violations = violations_of(spec)
    if violations:
        text = "; ".join(f"{path}: {what}" for path, what in violations[:_SEVERAL])
        return Refused("SPEC_INVALID", text, violations=violations)
    if spec.gpus_min or spec.gpus_max:
        return Refused("NOT_SUPPORTED", "elastic jobs (gpus_min, gpus_max) are not built yet")
    if len(state.waiting) >= state.settings.jobs_waiting_limit:
        return Refused("QUEUE_FULL", f"{len(state.waiting)} jobs wait already; cancel some or try later")
    refusal = impossible(state.view, spec.shape())
    if refusal is not None:
        figures = {name: str(value) for name, value in sorted(refusal.figures.items())}
        return Refused("GANG_IMPOSSIBLE", refusal.message, figures)
    return None


def violations_of(spec: JobSpec) -> tuple[tuple[str, str], ...]:
    """(path, what is wrong) pairs."""
    found: list[tuple[str, str]] = []

    def expect(holds: bool, path: str, what: str) -> None:
        if not holds:
            found.append((path, what))

    size = sum([len(word.encode(errors="surrogatepass")) for word in spec.command])
    expect(bool(spec.command) and bool(spec.command[0]), "spec.command", "must name a program to run")
    expect(len(spec.command) <= _COMMAND_LIMIT, "spec.command", f"at most {_COMMAND_LIMIT} words")
    expect(size <= _COMMAND_BYTES_LIMIT, "spec.command", f"at most {_COMMAND_BYTES_LIMIT} bytes in all")
    expect(not any("\0" in word for word in spec.command), "spec.command", "no word may contain a NUL character")
    expect(spec.working_directory.startswith("/"), "spec.working_directory", "must be an absolute path")
    is_path = len(spec.working_directory) <= _TEXT_LIMIT and "\0" not in spec.working_directory
    expect(is_path, "spec.working_directory", f"at most {_TEXT_LIMIT} characters, no NUL")
    expect(_is_text(spec.display_name), "spec.display_name", f"at most {_NAME_LIMIT} printable characters")
    expect(_is_text(spec.device_type), "spec.device_type", f"at most {_NAME_LIMIT} printable characters")
    expect(abs(spec.priority) <= _PRIORITY_LIMIT, "spec.priority", f"from -{_PRIORITY_LIMIT} to {_PRIORITY_LIMIT}")
    limit = spec.time_limit_seconds
    expect(limit is None or limit > 0, "spec.time_limit", "must be more than zero")
    expect(limit is None or limit <= _SECONDS_LIMIT, "spec.time_limit", _CENTURY)
    expect(spec.checkpoint_interval_seconds <= _SECONDS_LIMIT, "spec.checkpoint_interval", _CENTURY)
    expect(0 <= spec.max_failures <= _FAILURES_LIMIT, "spec.max_failures", f"from 0 to {_FAILURES_LIMIT}")
    expect(spec.nodes >= 0, "spec.nodes", "must not be negative")
    expect(0 <= spec.gpu_memory_bytes <= _BYTES_LIMIT, "spec.gpu_memory_bytes", f"from 0 to {_BYTES_LIMIT}")
    bad_names = [name for name in spec.environment if not name or "=" in name or "\0" in name]
    expect(not bad_names, "spec.environment", f"no such variable name is possible: {bad_names[:3]}")
    values = spec.environment.values()
    expect(not any("\0" in value for value in values), "spec.environment", "no value may contain a NUL character")
    variables = sum(map(len, spec.environment)) + sum(map(len, values))
    expect(variables <= _ENVIRONMENT_LIMIT, "spec.environment", f"at most {_ENVIRONMENT_LIMIT} characters in all")
    labels = [*spec.labels, *spec.labels.values()]
    expect(len(spec.labels) <= _LABELS_LIMIT, "spec.labels", f"at most {_LABELS_LIMIT}")
    expect(all(map(_is_text, labels)), "spec.labels", f"at most {_NAME_LIMIT} printable characters each")
    _check_roles(spec, expect)
    wish = spec.locality.wish
    expect(wish is None or wish <= spec.locality.widest, "spec.locality.wish", "must not be wider than widest")
    expect(spec.locality.patience_seconds >= 0, "spec.locality.patience", "must not be negative")
    expect(spec.locality.patience_seconds <= _SECONDS_LIMIT, "spec.locality.patience", _CENTURY)
    if spec.scheduler:
        expect(_is_text(spec.scheduler, _TEXT_LIMIT), "spec.scheduler", f"at most {_TEXT_LIMIT} characters")
        module, colon, name = spec.scheduler.partition(":")
        expect(bool(module and colon and name), "spec.scheduler", "write module:Class")
    return tuple(found)


def _check_roles(spec: JobSpec, expect: Expect) -> None:
    expect(bool(spec.roles), "spec.roles", "at least one role")
    expect(1 <= spec.tasks <= _TASKS_LIMIT or not spec.roles, "spec.roles", f"1 to {_TASKS_LIMIT} tasks in all")
    size = sum([role.tasks * role.shape.memory_bytes for role in spec.roles])
    expect(size <= _ALL_BYTES_LIMIT, "spec.roles", f"at most {_ALL_BYTES_LIMIT} bytes of memory in all")
    names = [role.name for role in spec.roles]
    expect(len(set(names)) == len(names), "spec.roles", "role names must differ")
    for index, role in enumerate(spec.roles):
        path = f"spec.roles[{index}]"
        expect(_is_text(role.name), f"{path}.name", f"at most {_NAME_LIMIT} printable characters")
        expect(role.tasks >= 1, f"{path}.tasks", "at least one task")
        expect(0 <= role.shape.gpus <= _GPUS_PER_TASK_LIMIT, f"{path}.shape.gpus", f"0 to {_GPUS_PER_TASK_LIMIT}")
        cores, memory = role.shape.millicores, role.shape.memory_bytes
        expect(0 <= cores <= _MILLICORES_LIMIT, f"{path}.shape.millicores", f"from 0 to {_MILLICORES_LIMIT}")
        expect(0 <= memory <= _BYTES_LIMIT, f"{path}.shape.memory_bytes", f"from 0 to {_BYTES_LIMIT}")
    expect(spec.nodes <= max(1, spec.tasks), "spec.nodes", "more nodes than tasks")


def _is_text(text: str, limit: int = _NAME_LIMIT) -> bool:
    return len(text) <= limit and text.isprintable()
