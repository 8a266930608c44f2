"""The one fit function: whether the claims of a gang can be held, and if not, why, with numbers.

The approver, job schedulers, planner and simulator all use it: two that disagreed would propose and refuse for ever.
It reads plain Python lists of the view: a verdict touches few nodes, and NumPy scalars would cost ten times as much.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import gt
from types import MappingProxyType
from typing import Final, TypeAlias

from msgspec import Struct

from ganger.cluster.refusals import Reason, Refusal
from ganger.cluster.resources import (
    Bandwidth,
    Claim,
    ConfigurationSet,
    GangShape,
    LocalityLevel,
    accepts_type,
    exceeds,
    more_bandwidth,
)
from ganger.cluster.topology import bits
from ganger.cluster.view import View

# A gang of thousands of claims that all conflict is explained by the first few.
_MOST_REFUSALS = 16
_CORE = 1000
# Of a device, what gangs that share it may use together: the rest is contexts and what allocators keep beside.
MEMORY_SHARE: Final = 0.95
# By node and device: bytes needed by the gangs that share the device; negative where no gang may be co-located.
Company: TypeAlias = Mapping[str, Sequence[int]]
_NO_COMPANY: Final[Company] = MappingProxyType({})
# Why a node has too little, in the order of `Bandwidth`.
BANDWIDTH_REASONS: Final = (Reason.DISK, Reason.NETWORK)


class Demand(Struct, frozen=True, gc=False):
    """What some tasks of a gang need on one node: devices, thousandths of cores, bytes, bytes, megabytes per second."""

    gpus: int
    millicores: int
    memory_bytes: int
    arena_bytes: int
    bandwidth: Bandwidth = ()


def demand(configuration_set: ConfigurationSet, shape: GangShape, tasks: Sequence[int]) -> Demand:
    """The pieces for `tasks[r]` tasks of role r on a node of this set.

    Zero millicores or memory in a task's shape become the node's proportional share: whole cores where a share is at
    least one, and of the memory what is left beside the arenas of all devices (at most half of it is kept for them),
    divided by the shape's residents. What a task was measured to need takes the place of a larger share of memory.
    A task without devices gets one core and the memory that goes with a core.
    """
    if len(tasks) == 1 == len(shape.roles) and (task := shape.roles[0].shape).millicores and task.memory_bytes:
        # One role that says all it needs, as most do.
        gpus = tasks[0] * task.gpus
        arena = gpus * shape.arena_bytes_per_device
        bandwidth = task.bandwidth and bandwidth_of(shape, tasks)
        return Demand(gpus, tasks[0] * task.millicores, tasks[0] * task.memory_bytes, arena, bandwidth)
    gpus = millicores = memory = 0
    assert len(tasks) == len(shape.roles), f"{len(tasks)} numbers of tasks for {len(shape.roles)} roles"
    for index, role in enumerate(shape.roles):
        count = tasks[index]
        if count:
            task = role.shape
            gpus += count * task.gpus
            millicores += count * (task.millicores or share_of_cores(configuration_set, task.gpus))
            memory += count * (task.memory_bytes or _memory_of_a_task(configuration_set, shape, task.gpus))
    return Demand(gpus, millicores, memory, gpus * shape.arena_bytes_per_device, bandwidth_of(shape, tasks))


def bandwidth_of(shape: GangShape, tasks: Sequence[int]) -> Bandwidth:
    """Return what `tasks[r]` tasks of role r name."""
    found: Bandwidth = ()
    for role, count in zip(shape.roles, tasks, strict=True):
        if role.shape.bandwidth and count:
            found = more_bandwidth(found, tuple([count * amount for amount in role.shape.bandwidth]))
    return found


def _memory_of_a_task(configuration_set: ConfigurationSet, shape: GangShape, gpus: int) -> int:
    """Return the bytes of a task that names none: what it was measured to need, if that is less than its share."""
    share = share_of_memory(configuration_set, gpus)
    return min(share, shape.task_memory_bytes) if shape.task_memory_bytes else share // shape.residents


def share_of_cores(configuration_set: ConfigurationSet, gpus: int) -> int:
    """Proportional millicores of one task with so many devices."""
    total = sum([socket.millicores for socket in configuration_set.sockets])
    if not gpus or not configuration_set.devices:
        return min(_CORE, total)
    share = total * gpus // configuration_set.devices
    return share // _CORE * _CORE if share >= _CORE else share


def share_of_memory(configuration_set: ConfigurationSet, gpus: int) -> int:
    """Proportional bytes of one task with so many devices."""
    arenas = configuration_set.devices * configuration_set.device_memory_bytes * 11 // 10
    memory = configuration_set.memory_bytes - min(arenas, configuration_set.memory_bytes // 2)
    if gpus and configuration_set.devices:
        return memory * gpus // configuration_set.devices
    total = sum(socket.millicores for socket in configuration_set.sockets)
    return memory * min(_CORE, total) // total if total else 0


def fit(
    view: View,
    shape: GangShape,
    claims: Sequence[Claim],
    *,
    holding: Sequence[Claim] = (),
    retune: bool = False,
    company: Company = _NO_COMPANY,
) -> tuple[Refusal, ...]:
    """Why the claims cannot be held on this view; empty when they can.

    `holding`: pieces the gang holds already and would give up for these. With `retune` cores and memory may differ from
    what the shape asks for, but memory is never less than what it names. `company`: gangs it may join on devices of
    its claims' `shared_mask`, which all of them must fit into. Mistakes come first, then what is missing node by node,
    then the gang's locality.
    """
    if not holding and _fits_at_a_glance(view, shape, claims):
        return ()
    return _why_not(view, shape, claims, holding, retune, company)


def _fits_at_a_glance(view: View, shape: GangShape, claims: Sequence[Claim]) -> bool:
    """Return whether `_why_not` would find nothing to say, in a fraction of its time, for most requests are made to
    fit. Never for gangs of several roles, which are few."""
    if len(shape.roles) != 1 or (shape.nodes and len(claims) != shape.nodes):
        return False
    if len(claims) > 1 and _mixed_types(view, shape, claims):
        return False
    role, device_type, room = shape.roles[0], shape.device_type, shape.device_memory_bytes
    task, partition = role.shape, shape.partition
    gpus, cores, memory = task.gpus, task.millicores, task.memory_bytes
    placed = 0
    for claim in claims:
        slot = view.slots.get(claim.node)
        if slot is None or not view.available[slot] or len(claim.tasks) != 1 or claim.parked_bytes or claim.shared_mask:
            return False
        count, mask = claim.tasks[0], claim.device_mask
        if count <= 0 or mask & ~view.free[slot] or mask.bit_count() != count * gpus:
            return False
        configuration_set = view.topologies[slot].configuration_set
        if mask and not accepts_type(device_type, configuration_set.device_type):
            return False
        if partition and not view.topologies[slot].is_in(partition):
            return False
        if room and mask & ~view.roomy(slot, room):
            return False
        if not (task.millicores and task.memory_bytes):
            one = demand(configuration_set, shape, _ONE_TASK)
            cores, memory = one.millicores, one.memory_bytes
        arena = claim.arena_bytes
        if claim.memory_bytes != count * memory or claim.memory_bytes + arena > view.memory[slot]:
            return False
        if arena and arena != count * gpus * shape.arena_bytes_per_device:
            return False
        if (task.bandwidth or claim.bandwidth) and _bandwidth_differs(view, slot, shape, claim):
            return False
        wanted, have = claim.millicores, view.millicores[slot]
        if len(wanted) != len(have) or sum(wanted) != count * cores or min(wanted) < 0 or any(map(gt, wanted, have)):
            return False
        placed += count
    if placed != role.tasks or (len(claims) > 1 and len({claim.node for claim in claims}) != len(claims)):
        return False
    widest = shape.locality.widest
    return widest is LocalityLevel.CLUSTER or gang_level(view, claims) <= widest


_ONE_TASK: Final = (1,)


def _bandwidth_differs(view: View, slot: int, shape: GangShape, claim: Claim) -> bool:
    wanted = claim.bandwidth
    return wanted != bandwidth_of(shape, claim.tasks) or exceeds(wanted, view.bandwidth.get(slot, ()))


def _why_not(
    view: View,
    shape: GangShape,
    claims: Sequence[Claim],
    holding: Sequence[Claim],
    retune: bool,
    company: Company = _NO_COMPANY,
) -> tuple[Refusal, ...]:
    if not claims or len({claim.node for claim in claims}) != len(claims):
        return (Refusal(Reason.CLAIM_MISMATCH, {"claims": len(claims)}, detail="a gang claims each node once"),)
    mistake = _mismatch(shape, claims)
    if mistake is not None:
        return (mistake,)
    own = {claim.node: claim for claim in holding}
    refusals: list[Refusal] = []
    for claim in claims:
        slot = view.slots.get(claim.node)
        if slot is None:
            refusals.append(Refusal(Reason.NODE_GONE, node=claim.node))
        else:
            _fit_node(view, slot, shape, claim, own.get(claim.node), retune, company.get(claim.node, ()), refusals)
        if len(refusals) >= _MOST_REFUSALS:
            return tuple(refusals)
    if refusals:
        return tuple(refusals)
    mixed = _mixed_types(view, shape, claims)
    if mixed:
        detail = f"all GPUs of a gang are of one of {shape.device_type}, these are of {' and '.join(mixed)}"
        return (Refusal(Reason.DEVICE_TYPE, detail=detail),)
    widest = shape.locality.widest
    if widest is not LocalityLevel.CLUSTER and (level := gang_level(view, claims)) > widest:
        figures = {"level": int(level), "widest": int(widest)}
        detail = f"the gang's worst pair is at {level.name}, the job accepts {widest.name}"
        return (Refusal(Reason.LOCALITY, figures, detail=detail),)
    return ()


def _mixed_types(view: View, shape: GangShape, claims: Sequence[Claim]) -> list[str]:
    """Return the device types of the claims, by name, where the gang accepts several but has to be of one."""
    if "," not in shape.device_type:
        return []
    slots = [slot for one in claims if one.device_mask and (slot := view.slots.get(one.node)) is not None]
    types = sorted({view.topologies[slot].configuration_set.device_type for slot in slots})
    return types if len(types) > 1 else []


def outside_partition(node: str, partition: str, job: str = "") -> Refusal:
    """Return the refusal of a node that is not in the partition of a gang."""
    detail = f"the node is not in partition {partition!r}"
    return Refusal(Reason.NOT_IN_PARTITION, node=node, job=job, detail=detail)


def gang_level(view: View, claims: Sequence[Claim]) -> LocalityLevel:
    """Worst pair of the gang's devices; without devices, of its nodes. Nodes must be known.

    Nodes without a named rack or fabric count as far apart: only the cluster is common to them.
    """
    placed = claims if len(claims) == 1 else [claim for claim in claims if claim.device_mask] or claims
    if len(placed) == 1:
        claim = placed[0]
        return view.topologies[view.slots[claim.node]].level(claim.device_mask)
    slots = [view.slots[claim.node] for claim in placed]
    fabrics = {view.fabrics[slot] for slot in slots}
    racks = {view.racks[slot] for slot in slots}
    if len(fabrics) == 1 and len(racks) == 1 and "" not in racks:
        return LocalityLevel.RACK
    if len(fabrics) == 1 and "" not in fabrics:
        return LocalityLevel.FABRIC
    return LocalityLevel.CLUSTER


def _mismatch(shape: GangShape, claims: Sequence[Claim]) -> Refusal | None:
    roles = len(shape.roles)
    for claim in claims:
        tasks = claim.tasks
        if len(tasks) != roles or (roles and min(tasks) < 0):
            return Refusal(
                Reason.CLAIM_MISMATCH, {"roles": roles}, detail="a claim counts tasks of each of the job's roles"
            )
    for index, role in enumerate(shape.roles):
        placed = sum([claim.tasks[index] for claim in claims])
        if placed != role.tasks:
            figures = {"needed": role.tasks, "claimed": placed}
            return Refusal(Reason.CLAIM_MISMATCH, figures, detail=f"tasks of role {role.name} do not add up")
    for claim in claims:
        if not any(claim.tasks):
            return Refusal(Reason.CLAIM_MISMATCH, detail="a claim without tasks")
    if shape.nodes and len(claims) != shape.nodes:
        figures = {"needed": shape.nodes, "claimed": len(claims)}
        return Refusal(Reason.CLAIM_MISMATCH, figures, detail="the job asks for another number of nodes")
    return None


def _fit_node(
    view: View,
    slot: int,
    shape: GangShape,
    claim: Claim,
    own: Claim | None,
    retune: bool,
    company: Sequence[int],
    refusals: list[Refusal],
) -> None:
    node = claim.node
    topology = view.topologies[slot]
    configuration_set = topology.configuration_set
    needed = demand(configuration_set, shape, claim.tasks)
    named = memory_named(shape, claim.tasks) if retune else 0
    mistake = _claim_mistake(claim, needed, len(topology.sockets), retune, named)
    if mistake:
        refusals.append(Refusal(Reason.CLAIM_MISMATCH, mistake, node=node))
        return
    # A gang may shrink or stay on a node that takes no new ones.
    if not view.available[slot] and own is None:
        refusals.append(Refusal(Reason.NODE_UNAVAILABLE, node=node))
        return
    # As on a node that has left the partition.
    if own is None and not topology.is_in(shape.partition):
        refusals.append(outside_partition(node, shape.partition))
        return
    if claim.device_mask and not accepts_type(shape.device_type, configuration_set.device_type):
        has = configuration_set.device_type or "none"
        refusals.append(Refusal(Reason.DEVICE_TYPE, node=node, detail=f"needs {shape.device_type}, the node has {has}"))
        return
    mask, memory = claim.device_mask, view.memory[slot]
    joined, missing = _missing_devices(view, slot, claim, own, company)
    if missing is not None:
        refusals.append(missing)
    lacking = _lacking_cores(view, slot, claim, own)
    if lacking is not None:
        refusals.append(lacking)
    if own is not None:
        memory += own.memory_bytes + own.arena_bytes
    wanted_memory = claim.memory_bytes + claim.arena_bytes
    if wanted_memory > memory:
        refusals.append(Refusal(Reason.MEMORY, {"needed_bytes": wanted_memory, "free_bytes": memory}, node=node))
    refusals.extend(lacking_bandwidth(view, slot, claim.bandwidth, () if own is None else own.bandwidth))
    own_mask, own_bytes = (own.device_mask, own.parked_bytes) if own is not None else (0, ())
    # What holds a device already has found room there.
    short = mask & topology.all_mask & ~own_mask & ~view.roomy(slot, shape.device_memory_bytes, own_bytes)
    if short:
        left = view.device_memory_left(slot, own_bytes)
        figures = {
            "needed_bytes": shape.device_memory_bytes,
            "free_bytes": min(left[device] for device in bits(short)),
            "conflicting": short.bit_count(),
        }
        refusals.append(Refusal(Reason.DEVICE_MEMORY, figures, node=node))
    elif joined:
        refusals.extend(_fit_together(view, slot, shape.device_memory_bytes, joined, own_bytes, company))


def _missing_devices(
    view: View, slot: int, claim: Claim, own: Claim | None, company: Sequence[int]
) -> tuple[int, Refusal | None]:
    """Return the devices that the claim shares with other gangs, or the refusal of what is neither free nor shared."""
    mask, free = claim.device_mask, view.free[slot] | (0 if own is None else own.device_mask)
    joined = mask & ~free & claim.shared_mask & sum([1 << at for at, size in enumerate(company) if size >= 0])
    conflicting = mask & ~free & ~joined
    if not conflicting:
        return joined, None
    figures = {"needed": mask.bit_count(), "free": free.bit_count(), "conflicting": conflicting.bit_count()}
    return joined, Refusal(Reason.GPUS, figures, node=claim.node)


def _lacking_cores(view: View, slot: int, claim: Claim, own: Claim | None) -> Refusal | None:
    millicores = view.millicores[slot]
    if own is not None and own.millicores:
        millicores = tuple(have + more for have, more in zip(millicores, own.millicores, strict=True))
    for socket, (wanted, have) in enumerate(zip(claim.millicores, millicores, strict=False)):
        if wanted > have:
            figures = {"needed_millicores": wanted, "free_millicores": have, "socket": socket}
            return Refusal(Reason.CORES, figures, node=claim.node)
    return None


def lacking_bandwidth(view: View, slot: int, wanted: Bandwidth, own: Bandwidth = ()) -> list[Refusal]:
    """Return a refusal for each dimension of which a node has too little. `own`: what counts as free."""
    free = more_bandwidth(view.bandwidth.get(slot, ()), own) if slot in view.bandwidth else ()
    pairs = zip(BANDWIDTH_REASONS, wanted, free, strict=True) if wanted and free else ()
    return [
        Refusal(reason, {"needed_mb_per_s": needed, "free_mb_per_s": max(0, left)}, node=view.nodes[slot])
        for reason, needed, left in pairs
        if needed > left
    ]


def _fit_together(
    view: View, slot: int, needed: int, joined: int, own: Sequence[int], company: Sequence[int]
) -> list[Refusal]:
    """Check that all gangs on the shared devices fit into device memory together, with what parked gangs keep."""
    node = view.nodes[slot]
    capacity = view.topologies[slot].configuration_set.device_memory_bytes
    if not needed or not capacity:
        detail = "how much memory of a device it uses is not known yet, so it can share none"
        if needed:
            detail = "the configuration set does not say how much memory a device has, so none can be shared"
        return [Refusal(Reason.DEVICE_MEMORY, {"needed_bytes": needed}, node=node, detail=detail)]
    free = memory_beside(view, slot, joined, company, own)
    if needed <= free:
        return []
    figures = {"needed_bytes": needed, "free_bytes": max(0, free), "conflicting": joined.bit_count()}
    return [
        Refusal(Reason.DEVICE_MEMORY, figures, node=node, detail="beside the jobs that use the device it does not fit")
    ]


def memory_beside(view: View, slot: int, devices: int, company: Sequence[int], own: Sequence[int] = ()) -> int:
    """Return the bytes of each of these devices that one more gang may use; negative where they are overcommitted.

    `company`: bytes by device that the gangs there need. Bytes of parked gangs are taken; `own` of them count as free.
    """
    left = view.device_memory_left(slot, own)
    capacity = view.topologies[slot].configuration_set.device_memory_bytes
    spare = capacity - int(MEMORY_SHARE * capacity)
    return min([left[device] - company[device] for device in bits(devices)]) - spare


def memory_named(shape: GangShape, tasks: Sequence[int]) -> int:
    """Bytes that the shape names for `tasks[r]` tasks of role r; where it leaves a share to be found, none."""
    return sum([count * role.shape.memory_bytes for count, role in zip(tasks, shape.roles, strict=True)])


def _claim_mistake(
    claim: Claim, needed: Demand, sockets: int, retune: bool, named_memory: int
) -> dict[str, int] | None:
    gpus = claim.device_mask.bit_count()
    if claim.shared_mask & ~claim.device_mask:
        return {"needed_shared": 0, "claimed_shared": (claim.shared_mask & ~claim.device_mask).bit_count()}
    if claim.device_mask < 0 or gpus != needed.gpus:
        return {"needed": needed.gpus, "claimed": gpus}
    if len(claim.millicores) != sockets or min(claim.millicores) < 0:
        return {"sockets": sockets, "claimed_sockets": len(claim.millicores)}
    millicores = sum(claim.millicores)
    if millicores != needed.millicores and not (retune and millicores):
        return {"needed_millicores": needed.millicores, "claimed_millicores": millicores}
    if claim.memory_bytes != needed.memory_bytes and not (retune and claim.memory_bytes >= max(1, named_memory)):
        return {"needed_bytes": needed.memory_bytes, "claimed_bytes": claim.memory_bytes}
    if claim.bandwidth != needed.bandwidth:
        return {"needed_mb_per_s": sum(needed.bandwidth), "claimed_mb_per_s": sum(claim.bandwidth)}
    # The arena is a courtesy beside the claim: a scheduler may leave it out where it does not fit.
    if claim.arena_bytes not in (0, needed.arena_bytes):
        return {"needed_arena_bytes": needed.arena_bytes, "claimed_arena_bytes": claim.arena_bytes}
    if claim.parked_bytes:
        return {"needed_parked_bytes": 0, "claimed_parked_bytes": sum(claim.parked_bytes)}
    return None
