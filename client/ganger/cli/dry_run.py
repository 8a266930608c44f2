"""`ganger submit --dry-run`: what would be submitted, by the keys of a job file, as a master would accept it."""

from __future__ import annotations

import shlex
import sys
from contextlib import ExitStack

from grpc import StatusCode

from ganger.cli import job_table
from ganger.cli.job_details import role_programs, role_text
from ganger.console import enum_text, print_json, print_pairs
from ganger.text import counted, format_duration, format_memory
from ganger.v1.job_pb2 import JobSpec, Mechanism
from ganger.v1.job_service_pb2 import CreateArrayRequest
from ganger.wire import times

# Of the members of an array.
_SHOWN = 3


def print_dry_run(found: JobSpec | CreateArrayRequest, as_json: bool) -> None:
    """Print a job or an array in place of submitting it; where a master answers, with the partition and the time limit
    that it would get. Raises ApiError where the submission would be refused."""
    spec = found if isinstance(found, JobSpec) else found.spec
    if unchecked := _settle(found, spec):
        print(f"note: only the description is checked, as {unchecked}", file=sys.stderr)
    if as_json:
        print_json(found)
        return
    print_pairs([*([] if isinstance(found, JobSpec) else _array_pairs(found)), *_spec_pairs(spec)])


def _array_pairs(request: CreateArrayRequest) -> list[tuple[str, str]]:
    members = [f"{one.index}: {job_table.pairs(one.parameters)}".rstrip(": ") for one in request.members[:_SHOWN]]
    more = len(request.members) - len(members)
    return [
        ("array", counted(len(request.members), "job")),
        ("members", "\n".join([*members, *([f"and {more} more"] if more else [])])),
        ("at_once", str(request.max_concurrent or "")),
        ("stop", job_table.rule_text(request.rule) if request.HasField("rule") else ""),
    ]


def _spec_pairs(spec: JobSpec) -> list[tuple[str, str]]:
    """Return the keys of a job file with the values of this job; empty where it has none."""
    gpus = f"{spec.gpus_min}:{spec.gpus_max}" if spec.gpus_max else str(job_table.gpus(spec))
    locality, every = spec.locality, times.seconds(spec.checkpoint_interval)
    passes = f",{spec.convergence.passes}" if spec.convergence.passes > 1 else ""
    return [
        ("name", spec.display_name),
        ("command", shlex.join(spec.command)),
        *role_programs(spec),
        ("directory", spec.working_directory),
        ("environment", " ".join(sorted(spec.environment))),
        ("gpus", gpus),
        ("tasks", "\n".join(role_text(role, job_table.bounds(spec)) for role in spec.roles)),
        ("partition", spec.partition),
        ("gpu_type", spec.device_type),
        ("gpu_memory", format_memory(spec.gpu_memory_bytes) if spec.gpu_memory_bytes else ""),
        ("nodes", str(spec.nodes or "")),
        ("locality", job_table.locality_text(locality.wish or locality.widest)),
        ("tolerance", job_table.locality_text(locality.widest) if locality.wish else ""),
        ("patience", _time(locality, "patience")),
        ("priority", str(spec.priority or "")),
        ("weight", f"{spec.weight:g}" if spec.weight else ""),
        ("converges", f"{spec.convergence.least_decrease:g}{passes}" if spec.HasField("convergence") else ""),
        ("time", _time(spec, "time_limit")),
        ("deadline", job_table.instant(spec.deadline)),
        ("max_failures", str(spec.max_failures or "")),
        ("checkpoint_every", "never" if every < 0 else _time(spec, "checkpoint_interval")),
        ("preemptible", "false" if spec.HasField("preemptible") and not spec.preemptible else ""),
        ("movable", "false" if spec.HasField("movable") and not spec.movable else ""),
        ("scheduler", spec.scheduler),
        ("agent", "none" if spec.agent == JobSpec.AGENT_NONE else ""),
        ("mechanism", enum_text(Mechanism, spec.mechanism) if spec.mechanism else ""),
        ("must_move", "true" if spec.is_move_required else ""),
        ("close_connections", "true" if spec.closes_connections else ""),
        ("signal", spec.stop_signal),
        ("grace", _time(spec, "stop_grace")),
        ("distributed", "true" if spec.distributed else ""),
        ("labels", job_table.pairs(spec.labels)),
    ]


def _time(message: object, field: str) -> str:
    is_set = message.HasField(field)  # type: ignore[attr-defined]  # every message has it
    return format_duration(times.seconds(getattr(message, field))) if is_set else ""


def _settle(found: JobSpec | CreateArrayRequest, spec: JobSpec) -> str:
    """Have the master judge the submission, and put the partition and the time limit that the job would get into its
    spec. Return why that was not possible; empty if it was. Raises ApiError if the submission would be refused."""
    from ganger.cli.options import open_client
    from ganger.wire.endpoints import EndpointError
    from ganger.wire.errors import ApiError, DeadlineExceeded, NotReady, Unreachable

    with ExitStack() as stack:
        try:
            job = stack.enter_context(open_client()).validate(found)
        except (EndpointError, Unreachable, DeadlineExceeded, NotReady):
            return "no master answers"
        except ApiError as error:
            if error.code is StatusCode.UNIMPLEMENTED:
                return "the master is of an older version"
            raise
    spec.partition = job.spec.partition
    if job.spec.HasField("time_limit"):
        spec.time_limit.CopyFrom(job.spec.time_limit)
    return ""
