"""How a job reads in one line: its state, place, pace and, if it waits, the reason."""

from __future__ import annotations

import math
import time

from ganger.console.plain import short_enum
from ganger.job import FINISHED
from ganger.units import format_duration
from ganger.v1 import job_pb2, resources_pb2
from ganger.wire import times


def state_text(job: job_pb2.Job) -> str:
    """ "running" rather than "holding": the phase of the gang where it has one."""
    if job.state == job_pb2.Job.STATE_HOLDING:
        phase = short_enum(job_pb2.Gang.Phase.Name(job.gang.phase), "Phase").lower()
        level = level_text(job.gang.parked_level)
        return f"parked({level})" if phase == "parked" and level else phase if phase != "unspecified" else "holding"
    state = short_enum(job_pb2.Job.State.Name(job.state), "State").lower()
    if job.state == job_pb2.Job.STATE_SUSPENDED:
        level = level_text(job.suspended_level)
        return f"suspended({level})" if level else state
    return state


def level_text(level: job_pb2.SuspendLevel.ValueType) -> str:
    return "" if level == 0 else short_enum(job_pb2.SuspendLevel.Name(level), "SuspendLevel").lower()


def locality_text(level: resources_pb2.Level.ValueType) -> str:
    return "" if level == 0 else short_enum(resources_pb2.Level.Name(level), "Level").lower()


def gpus(spec: job_pb2.JobSpec) -> int:
    return sum(role.tasks * role.shape.gpus for role in spec.roles)


def tasks(spec: job_pb2.JobSpec) -> int:
    return sum(role.tasks for role in spec.roles)


def label(job: job_pb2.Job) -> str:
    """Its name, else the last path component of what it runs."""
    if job.spec.display_name:
        return job.spec.display_name
    scripts = [word for word in job.spec.command if word.endswith(".py")]
    word = scripts[0] if scripts else job.spec.command[0] if job.spec.command else ""
    return word.rpartition("/")[2]


def devices(mask: int) -> str:
    """Bit masks as people write them: "0-3,6"."""
    parts: list[str] = []
    first: int | None = None
    for bit in range(mask.bit_length() + 1):
        if mask >> bit & 1:
            first = bit if first is None else first
        elif first is not None:
            parts.append(f"{first}" if first == bit - 1 else f"{first}-{bit - 1}")
            first = None
    return ",".join(parts)


def place(job: job_pb2.Job) -> str:
    """ "n1[0-3] n2[0-3]", and where it is going."""
    here = " ".join(_claim(claim) for claim in job.gang.claims)
    there = " ".join(_claim(claim) for claim in job.gang.move_claims)
    return f"{here} → {there}" if there else here


def progress_text(progress: job_pb2.Progress) -> str:
    parts = [f"step {progress.step}"] if progress.step else []
    if progress.steps_per_second > 0:
        parts.append(f"{progress.steps_per_second:.3g}/s")
    if progress.step and math.isfinite(progress.loss) and progress.loss:
        parts.append(f"loss {progress.loss:.4g}")
    return " ".join(parts)


def elapsed(job: job_pb2.Job, now: float | None = None) -> str:
    """Since its first step while it lives, from first step to end afterwards; waiting time before that."""
    begin = job.start_time if job.HasField("start_time") else job.create_time
    end = times.unix_seconds(job.end_time) if job.HasField("end_time") else time.time() if now is None else now
    return format_duration(max(0.0, end - times.unix_seconds(begin)))


def note(job: job_pb2.Job) -> str:
    """Place, or why it has none."""
    if job.state == job_pb2.Job.STATE_FAILED:
        return f"{job.failure.reason}: {job.failure.message}"
    if job.state in FINISHED:
        return ""
    if job.state == job_pb2.Job.STATE_PENDING and job.blockers:
        return f"({job.blockers[0].reason}) {job.blockers[0].message}"
    return place(job)


def _claim(claim: resources_pb2.Claim) -> str:
    node = claim.node.removeprefix("nodes/")
    return f"{node}[{devices(claim.device_mask)}]" if claim.device_mask else node
