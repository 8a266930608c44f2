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
    expect(spec.working_directory.startswith("/"), "spec.working_directory", "must be an absolute path")
    expect(len(spec.display_name) <= _NAME_LIMIT, "spec.display_name", f"at most {_NAME_LIMIT} characters")
    expect(abs(spec.priority) <= _PRIORITY_LIMIT, "spec.priority", f"from -{_PRIORITY_LIMIT} to {_PRIORITY_LIMIT}")
    limit = spec.time_limit_seconds
    expect(limit is None or limit > 0, "spec.time_limit", "must be more than zero")
    expect(0 <= spec.max_failures <= _FAILURES_LIMIT, "spec.max_failures", f"from 0 to {_FAILURES_LIMIT}")
    expect(spec.nodes >= 0, "spec.nodes", "must not be negative")
    expect(spec.gpu_memory_bytes >= 0, "spec.gpu_memory_bytes", "must not be negative")
    bad_names = [name for name in spec.environment if not name or "=" in name or "\0" in name]
    expect(not bad_names, "spec.environment", f"no such variable name is possible: {bad_names[:3]}")
    _check_roles(spec, expect)
    wish = spec.locality.wish
    expect(wish is None or wish <= spec.locality.widest, "spec.locality.wish", "must not be wider than widest")
    expect(spec.locality.patience_seconds >= 0, "spec.locality.patience", "must not be negative")
    if spec.scheduler:
        module, colon, name = spec.scheduler.partition(":")
        expect(bool(module and colon and name), "spec.scheduler", "write module:Class")
    return tuple(found)


def _check_roles(spec: JobSpec, expect: Expect) -> None:
    expect(bool(spec.roles), "spec.roles", "at least one role")
    expect(1 <= spec.tasks <= _TASKS_LIMIT or not spec.roles, "spec.roles", f"1 to {_TASKS_LIMIT} tasks in all")
    names = [role.name for role in spec.roles]
    expect(len(set(names)) == len(names), "spec.roles", "role names must differ")
    for index, role in enumerate(spec.roles):
        path = f"spec.roles[{index}]"
        expect(role.tasks >= 1, f"{path}.tasks", "at least one task")
        expect(0 <= role.shape.gpus <= _GPUS_PER_TASK_LIMIT, f"{path}.shape.gpus", f"0 to {_GPUS_PER_TASK_LIMIT}")
        expect(role.shape.millicores >= 0, f"{path}.shape.millicores", "must not be negative")
        expect(role.shape.memory_bytes >= 0, f"{path}.shape.memory_bytes", "must not be negative")
    expect(spec.nodes <= max(1, spec.tasks), "spec.nodes", "more nodes than tasks")
