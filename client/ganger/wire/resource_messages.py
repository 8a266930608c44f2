"""Messages of ganger.v1 and the values of `ganger.cluster` they carry, both ways.

Nodes are bare ids ("n1") in values and names ("nodes/n1") on the wire; jobs are names ("jobs/7") in both. Every
function named X_from_wire is the inverse of X_to_wire. Messages are trusted to be well-formed protobuf, not to be
sensible: a value that cannot exist (an unknown level) raises RequestInvalid.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

from msgspec.structs import replace

from ganger.cluster.refusals import Reason, Refusal
from ganger.cluster.resources import (
    DIMENSIONS,
    Bandwidth,
    Claim,
    ConfigurationSet,
    DeviceGroup,
    GangShape,
    Locality,
    LocalityLevel,
    NodeRow,
    Role,
    Socket,
    TaskShape,
)
from ganger.v1 import job_pb2, node_pb2, resources_pb2
from ganger.wire import resource_names as names
from ganger.wire import times
from ganger.wire.errors import RequestInvalid

# Limits of a refusal: figures, characters of their names, characters of its detail.
_FIGURES_MOST, _NAME_MOST, _DETAIL_MOST = 16, 64, 500
_FIGURE_MOST = (1 << 63) - 1
# A claim has cores by socket, and tasks by role.
_PARTS_MOST = 128
# Peak device bytes plus a tenth: what a rank's state may take in host memory.
_ARENA_NUMERATOR, _ARENA_DENOMINATOR = 11, 10


def level_to_wire(level: LocalityLevel | None) -> resources_pb2.Level.ValueType:
    """Unspecified for None; else the numbers are those of the values."""
    return cast("resources_pb2.Level.ValueType", int(level or resources_pb2.LEVEL_UNSPECIFIED))


def level_from_wire(level: int) -> LocalityLevel | None:
    """Return a locality level; None for unspecified. Raises RequestInvalid for an unknown one."""
    if level == resources_pb2.LEVEL_UNSPECIFIED:
        return None
    try:
        return LocalityLevel(level)
    except ValueError as error:
        raise RequestInvalid(f"level {level} is unknown here: the sender is newer than this program") from error


def configuration_set_to_wire(value: ConfigurationSet) -> resources_pb2.ConfigurationSet:
    return resources_pb2.ConfigurationSet(
        name=value.name,
        device_type=value.device_type,
        devices=value.devices,
        device_memory_bytes=value.device_memory_bytes,
        groups=[
            resources_pb2.DeviceGroup(level=level_to_wire(group.level), device_mask=group.device_mask)
            for group in value.groups
        ],
        sockets=[
            resources_pb2.Socket(millicores=socket.millicores, device_mask=socket.device_mask)
            for socket in value.sockets
        ],
        memory_bytes=value.memory_bytes,
        dimensions=dict(value.dimensions),
    )


def configuration_set_from_wire(message: resources_pb2.ConfigurationSet) -> ConfigurationSet:
    return ConfigurationSet(
        name=message.name,
        device_type=message.device_type,
        devices=message.devices,
        device_memory_bytes=message.device_memory_bytes,
        groups=tuple(
            DeviceGroup(level_from_wire(group.level) or LocalityLevel.CLUSTER, group.device_mask)
            for group in message.groups
        ),
        sockets=tuple(Socket(socket.millicores, socket.device_mask) for socket in message.sockets),
        memory_bytes=message.memory_bytes,
        dimensions=dict(message.dimensions),
    )


def node_row_to_wire(value: NodeRow, into: node_pb2.NodeState | None = None) -> node_pb2.NodeState:
    """`into`: an empty message that is to hold it, as one just added to a list."""
    # Setting fields takes half the time of naming them all to the constructor.
    message = node_pb2.NodeState() if into is None else into
    message.node = names.node_name(value.node)
    message.configuration_set = value.configuration_set
    message.free_mask = value.free_mask
    message.free_millicores.extend(value.free_millicores)
    message.free_memory_bytes = value.free_memory_bytes
    message.version = value.version
    message.available = value.available
    message.rack = value.rack
    message.fabric = value.fabric
    message.socket_jobs.extend(value.socket_jobs)
    message.group_jobs.extend(value.group_jobs)
    message.device_slices.extend(value.device_rows)
    message.affinity = value.affinity
    if value.parked_bytes:
        message.parked_bytes.extend(value.parked_bytes)
    if value.free_bandwidth:
        message.free_disk_mb_per_s, message.free_net_mb_per_s = value.free_bandwidth
    if value.partitions:
        message.partitions.extend(value.partitions)
    return message


def node_row_from_wire(message: node_pb2.NodeState) -> NodeRow:
    return NodeRow(
        node=names.parse_node_name(message.node),
        configuration_set=message.configuration_set,
        free_mask=message.free_mask,
        free_millicores=tuple(message.free_millicores),
        free_memory_bytes=message.free_memory_bytes,
        version=message.version,
        available=message.available,
        rack=message.rack,
        fabric=message.fabric,
        socket_jobs=tuple(message.socket_jobs),
        group_jobs=tuple(message.group_jobs),
        device_rows=tuple(message.device_slices),
        affinity=message.affinity,
        parked_bytes=tuple(message.parked_bytes),
        free_bandwidth=(
            (message.free_disk_mb_per_s, message.free_net_mb_per_s) if message.HasField("free_disk_mb_per_s") else ()
        ),
        partitions=tuple(message.partitions),
    )


def role_to_wire(value: Role, into: resources_pb2.Role | None = None) -> resources_pb2.Role:
    """`into`: an empty message that is to hold it, as one just added to a list."""
    message = resources_pb2.Role() if into is None else into
    message.name = value.name
    message.tasks = value.tasks
    shape = message.shape
    shape.gpus = value.shape.gpus
    shape.millicores = value.shape.millicores
    shape.memory_bytes = value.shape.memory_bytes
    if value.shape.bandwidth:
        shape.disk_mb_per_s, shape.net_mb_per_s = value.shape.bandwidth
    if value.tasks_max:
        message.tasks_min, message.tasks_max = value.tasks_min, value.tasks_max
    return message


def role_from_wire(message: resources_pb2.Role) -> Role:
    shape = message.shape
    bandwidth = _bandwidth_from_wire(shape)
    task = TaskShape(shape.gpus, shape.millicores, shape.memory_bytes, bandwidth)
    return Role(message.name, message.tasks, task, message.tasks_min, message.tasks_max)


def _bandwidth_from_wire(message: resources_pb2.TaskShape | resources_pb2.Claim) -> Bandwidth:
    disk, net = message.disk_mb_per_s, message.net_mb_per_s
    return (disk, net) if disk or net else ()


def locality_to_wire(value: Locality, into: resources_pb2.Locality | None = None) -> resources_pb2.Locality:
    """`into`: an empty message that is to hold it."""
    message = resources_pb2.Locality() if into is None else into
    message.widest = level_to_wire(value.widest)
    message.wish = level_to_wire(value.wish)
    if value.patience_s:
        message.patience.CopyFrom(times.duration(value.patience_s))
    return message


def locality_from_wire(message: resources_pb2.Locality) -> Locality:
    return Locality(
        widest=level_from_wire(message.widest) or LocalityLevel.CLUSTER,
        wish=level_from_wire(message.wish),
        patience_s=times.seconds(message.patience),
    )


def claim_to_wire(value: Claim) -> resources_pb2.Claim:
    return resources_pb2.Claim(
        node=names.node_name(value.node),
        device_mask=value.device_mask,
        millicores=value.millicores,
        memory_bytes=value.memory_bytes,
        arena_bytes=value.arena_bytes,
        tasks=value.tasks,
        parked_bytes=value.parked_bytes,
        shared_mask=value.shared_mask,
        parked_memory_bytes=value.parked_memory_bytes,
        **dict(zip(DIMENSIONS, value.bandwidth, strict=False)),
    )


def claim_from_wire(message: resources_pb2.Claim) -> Claim:
    """Return a claim without its parked bytes, which `parked_claims_from_wire` reads. Raises RequestInvalid."""
    tasks = message.tasks
    if len(message.millicores) > _PARTS_MOST or len(tasks) > _PARTS_MOST:
        raise RequestInvalid(f"a claim has at most {_PARTS_MOST} sockets, and roles")
    return Claim(
        names.parse_node_name(message.node),
        message.device_mask,
        # A slice is a list at once; to iterate takes twice as long.
        tuple(message.millicores[:]),
        message.memory_bytes,
        message.arena_bytes,
        # Most jobs have one role, and to iterate takes long.
        (tasks[0],) if len(tasks) == 1 else tuple(tasks),
        shared_mask=message.shared_mask,
        bandwidth=_bandwidth_from_wire(message),
    )


def claims_to_wire(values: Iterable[Claim]) -> list[resources_pb2.Claim]:
    return [claim_to_wire(value) for value in values]


def claims_from_wire(messages: Iterable[resources_pb2.Claim]) -> tuple[Claim, ...]:
    return tuple([claim_from_wire(message) for message in messages])


def parked_claims_from_wire(messages: Iterable[resources_pb2.Claim]) -> tuple[Claim, ...]:
    """Return the claims of a parked gang, with the device memory and host memory in bytes that it keeps."""
    return tuple(
        [
            replace(
                claim_from_wire(message),
                parked_bytes=tuple(message.parked_bytes),
                parked_memory_bytes=message.parked_memory_bytes,
            )
            for message in messages
        ]
    )


def arena_bytes_for(gpu_memory_bytes: int) -> int:
    """Host bytes to reserve per device so that its state fits at OFFLOAD: its peak and a tenth."""
    return -(-gpu_memory_bytes * _ARENA_NUMERATOR // _ARENA_DENOMINATOR)


def gang_shape_from_wire(
    spec: job_pb2.JobSpec,
    arena_bytes_per_device: int | None = None,
    device_memory_bytes: int | None = None,
    task_memory_bytes: int = 0,
) -> GangShape:
    """Return the gang shape of a job. Both amounts for devices default to values from the spec's gpu_memory_bytes."""
    return GangShape(
        roles=tuple(role_from_wire(role) for role in spec.roles),
        device_type=spec.device_type,
        locality=locality_from_wire(spec.locality),
        nodes=spec.nodes,
        arena_bytes_per_device=(
            arena_bytes_for(spec.gpu_memory_bytes) if arena_bytes_per_device is None else arena_bytes_per_device
        ),
        device_memory_bytes=spec.gpu_memory_bytes if device_memory_bytes is None else device_memory_bytes,
        task_memory_bytes=task_memory_bytes,
        partition=spec.partition,
    )


def refusal_to_wire(value: Refusal, into: resources_pb2.Refusal | None = None) -> resources_pb2.Refusal:
    """`into`: an empty message that is to hold it, as one just added to a list."""
    message = resources_pb2.Refusal() if into is None else into
    message.reason = value.reason.name
    message.message = value.message
    figures = message.figures
    for name, figure in value.figures.items():
        figures[name] = max(-_FIGURE_MOST, min(figure, _FIGURE_MOST))
    if value.node:
        message.node = names.node_name(value.node)
    message.job = value.job
    return message


def refusal_from_wire(message: resources_pb2.Refusal) -> Refusal:
    """Return a refusal; one for a reason of a newer sender is UNKNOWN, with the sender's code and sentence. Raises
    RequestInvalid."""
    reason = Reason.__members__.get(message.reason, Reason.UNKNOWN)
    is_known = message.reason in Reason.__members__
    if len(message.figures) > _FIGURES_MOST or any(len(name) > _NAME_MOST for name in message.figures):
        raise RequestInvalid(f"a refusal has at most {_FIGURES_MOST} figures, of names of {_NAME_MOST} characters")
    plain = Refusal(
        reason,
        # The sentence has those of an unknown reason already, in words that may be unknown, too.
        dict(message.figures) if is_known else {},
        node=names.parse_node_name(message.node) if message.node else "",
        job=names.job_name(names.parse_job_name(message.job)) if message.job else "",
    )
    # The wire carries the whole sentence; its tail is made of the other fields, so the detail is what precedes it.
    tail = plain.message.removeprefix(reason.meaning)
    detail = message.message.removesuffix(tail)[:_DETAIL_MOST]
    if not is_known:
        return replace(plain, detail=f"{message.reason[:_NAME_MOST]}: {detail}")
    return plain if detail == reason.meaning else replace(plain, detail=detail)


def refusals_to_wire(values: Iterable[Refusal]) -> list[resources_pb2.Refusal]:
    return [refusal_to_wire(value) for value in values]


def refusals_from_wire(messages: Iterable[resources_pb2.Refusal]) -> tuple[Refusal, ...]:
    return tuple(refusal_from_wire(message) for message in messages)
