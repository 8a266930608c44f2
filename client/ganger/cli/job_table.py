"""How a job array reads: in one line, and with its members below each other."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence

from ganger.cli import job_lines
from ganger.cli.options import number
from ganger.units import format_duration
from ganger.v1 import array_pb2, job_pb2
from ganger.wire import times

# What people look for first.
_STATES = ("holding", "pending", "held", "suspended", "succeeded", "stopped", "failed", "cancelled", "forgotten")


def array_row(array: array_pb2.Array) -> tuple[str, ...]:
    """A line of `ganger queue`."""
    return (
        f"{number(array.name)}[{array.size}]",
        job_lines.column(array.display_name),
        job_lines.column(array.user),
        "ended" if array.HasField("end_time") else "array",
        str(array.gpus * array.states["holding"]),
        array_elapsed(array),
        "",
        job_lines.column(best(array, "")),
        states(array),
    )


def states(array: array_pb2.Array) -> str:
    """ "2 holding, 5 held, 1 stopped"."""
    return ", ".join(f"{array.states[state]} {state}" for state in _STATES if array.states.get(state))


def best(array: array_pb2.Array, otherwise: str) -> str:
    if not array.HasField("best"):
        return otherwise
    given = pairs(array.best.parameters)
    return (
        f"best {array.rule.metric} {array.best_value:.4g} of {number(array.name)}_{array.best.index} {given}".rstrip()
    )


def pairs(parameters: Mapping[str, str]) -> str:
    return " ".join(f"{name}={text}" for name, text in sorted(parameters.items()))


def array_elapsed(array: array_pb2.Array) -> str:
    end = times.unix_seconds(array.end_time) if array.HasField("end_time") else time.time()
    return format_duration(max(0.0, end - times.unix_seconds(array.create_time)))


def rule_text(rule: array_pb2.StopRule) -> str:
    """ "halving by accuracy, more is better, from step 100 on, by 2"."""
    kind = array_pb2.StopRule.Kind.Name(rule.kind).removeprefix("KIND_").lower()
    goal = "more" if rule.maximise else "less"
    parts = [f"{kind} by {rule.metric}, {goal} is better, from {rule.resource} {rule.first:g} on"]
    if kind in ("halving", "asha"):
        parts.append(f"then at {rule.factor:g} times as many, where 1 of {rule.factor:g} goes on")
    else:
        parts.append(f"every {rule.every or rule.first:g}")
    if kind == "threshold":
        parts.append(f"no worse than {rule.bound:g}")
    return ", ".join(parts)


def array_facts(array: array_pb2.Array) -> list[tuple[str, str]]:
    """What `ganger show` prints above the members."""

    def instant(when: object) -> str:
        return times.local_datetime(when).strftime("%Y-%m-%d %H:%M:%S")  # type: ignore[arg-type]

    return [
        ("array", number(array.name)),
        ("name", array.display_name),
        ("user", array.user),
        ("members", f"{array.size}: {states(array)}"),
        ("at once", str(array.at_once or "")),
        ("stop rule", rule_text(array.rule) if array.HasField("rule") else ""),
        ("best", best(array, "").removeprefix("best ")),
        ("submitted", instant(array.create_time)),
        ("ended", instant(array.end_time) if array.HasField("end_time") else ""),
        ("time", array_elapsed(array)),
    ]


def members_table(members: Sequence[job_pb2.Job]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Headings and rows, a member each: parameters and what it reported in columns of their own."""
    parameters = sorted({name for job in members for name in job.array.member.parameters})
    metrics = sorted({metric.name for job in members for metric in job.progress.metrics})
    headings = ("MEMBER", "JOB", "STATE", "TIME", *parameters, "PROGRESS", *metrics, "NODES/REASON")
    rows = []
    for job in members:
        told = {metric.name: value_text(metric.value) for metric in job.progress.metrics}
        rows.append(
            (
                job_lines.called(job),
                number(job.name),
                job_lines.state_text(job),
                job_lines.elapsed(job),
                *(job_lines.column(job.array.member.parameters.get(name, "")) for name in parameters),
                job_lines.progress_text(job.progress),
                *(told.get(name, "") for name in metrics),
                job_lines.note(job),
            )
        )
    return headings, rows


def value_text(value: float) -> str:
    return f"{value:.5g}" if math.isfinite(value) else "no number"
