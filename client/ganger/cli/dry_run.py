"""`ganger submit --dry-run`: what would be submitted, by the keys of a job file, and whether it could ever run."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Final

from ganger.cli import job_table
from ganger.cli.job_details import role_text
from ganger.console import CommandError, ExitCode, enum_text, print_json, print_pairs
from ganger.text import counted, format_duration, format_memory
from ganger.v1.job_pb2 import JobSpec, Mechanism
from ganger.v1.job_service_pb2 import CreateArrayRequest
from ganger.wire import times

if TYPE_CHECKING:
    from ganger.v1.node_pb2 import ListNodesResponse, Partition

# Of the members of an array.
_SHOWN = 3


def print_dry_run(found: JobSpec | CreateArrayRequest, as_json: bool) -> None:
    """Print a job or an array in place of submitting it; where a master answers, with the partition and the time limit
    that it would get. What is not checked goes to stderr. Raises GangImpossible or CommandError where the submission
    would be refused."""
    spec = found if isinstance(found, JobSpec) else found.spec
    is_checked = _check_with_master(spec)
    unchecked = "quotas, and whether the user may use the partition" if is_checked else "all but the description"
    print(f"note: not checked: {unchecked}{'' if is_checked else ', as no master answers'}", file=sys.stderr)
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


def _check_with_master(spec: JobSpec) -> bool:
    """Put the partition and the time limit that the job would get into its spec. Return whether a master answered.

    Raises CommandError if its partition is not there or is too small, and GangImpossible, in the words of the master,
    if no node of its cluster could ever run the job."""
    from ganger.cli.options import open_client
    from ganger.wire.endpoints import EndpointError
    from ganger.wire.errors import ApiError, GangImpossible

    with ExitStack() as stack:
        try:
            client = stack.enter_context(open_client())
            nodes, partitions = client.list_nodes(), client.list_partitions()
        except (ApiError, EndpointError):
            return False
    _settle_partition(spec, partitions)
    if refusal := _impossible(nodes, spec):
        raise GangImpossible(refusal)
    return True


def _settle_partition(spec: JobSpec, partitions: Sequence[Partition]) -> None:
    """Put the partition of a job, and its time limit, into the spec. Raises CommandError if it may not be there."""
    from ganger.cli.nodes import check_partition

    if spec.partition:
        check_partition(spec.partition, partitions)
    chosen = next(
        (one for one in partitions if one.name == spec.partition or (not spec.partition and one.is_default)), None
    )
    if chosen is None:
        return
    spec.partition, needed = chosen.name, job_table.gpus(spec)
    if chosen.HasField("time_limit"):
        longest = times.seconds(chosen.time_limit)
        if spec.HasField("time_limit") and times.seconds(spec.time_limit) > longest:
            given = format_duration(times.seconds(spec.time_limit))
            text = f"its time limit is {given}, and partition {chosen.name!r} allows {format_duration(longest)}"
            raise CommandError(text, ExitCode.REFUSED)
        if not spec.HasField("time_limit"):
            spec.time_limit.CopyFrom(chosen.time_limit)
    for field, whose in _LIMITS:
        if chosen.HasField(field) and needed > (limit := getattr(chosen, field)):  # type: ignore[arg-type]
            text = f"partition {chosen.name!r} allows {whose} {counted(limit, 'GPU')} ({needed} needed)"
            raise CommandError(text, ExitCode.REFUSED)


_LIMITS: Final = (
    ("gpus_per_job_limit", "a job"),
    ("gpus_per_user_limit", "a user"),
    ("gpus_limit", "all its jobs together"),
)


def _impossible(nodes: ListNodesResponse, spec: JobSpec) -> str:
    """Return why no gang of the job could ever run on these nodes; empty if one could."""
    from ganger.cluster.placement import impossible
    from ganger.cluster.view import View
    from ganger.wire import resource_messages as convert

    view = View(map(convert.configuration_set_from_wire, nodes.configuration_sets))
    for node in nodes.nodes:
        if node.view_entry.configuration_set in view.sets:
            row = convert.node_row_from_wire(node.view_entry)
            faulty = sum(1 << device for device in node.device_faults)
            view.put(row, ~faulty & (1 << view.sets[row.configuration_set].devices) - 1)
    refusal = impossible(view, convert.gang_shape_from_wire(spec, arena_bytes_per_device=0))
    return "" if refusal is None else refusal.message
