"""Specs of the jobs of a workload, as a user would submit them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
from ganger.cluster.resources import Locality, LocalityLevel, Role, Socket, TaskShape
from msgspec import structs

from ganger_master.core.job_model import JobSpec
from ganger_master.simulator.traces.servers import ServerGroup, Servers
from ganger_master.simulator.traces.workload import Workload

_NOTHING = (Socket(0, 0),)
_TOGETHER = Locality(LocalityLevel.NODE)
_ANYWHERE = Locality(LocalityLevel.CLUSTER)
_COMMAND = ("train",)
# Per server: the number of bits of a device mask.
_MOST_DEVICES = 64


def specs_of(jobs: Workload, servers: Servers, ideal: bool, epoch_s: float = 0.0) -> Sequence[JobSpec]:
    """Return one spec per job; equal jobs share one object.

    A gang that fits into one server of its GPU type has to run in one. Missing cores and memory are left to the master,
    which gives shares in proportion to the devices. `ideal`: request devices only, anywhere. `epoch_s`: start of the
    trace's clock.
    """
    largest = _largest_by_type(servers)
    made: dict[tuple[int, int, int, int, int, int, str, str, float, float], JobSpec] = {}
    nothing = [math.nan] * len(jobs)
    # Lists: reading single elements of NumPy arrays takes seconds for a hundred thousand jobs.
    columns = zip(
        jobs.gpus.tolist(),
        jobs.min_gpus.tolist(),
        jobs.max_gpus.tolist(),
        nothing if ideal else jobs.cpus.tolist(),
        nothing if ideal else jobs.memory_bytes.tolist(),
        jobs.priority.tolist(),
        [""] * len(jobs) if ideal else jobs.gpu_type.texts(),
        jobs.model.texts(),
        np.where(np.isnan(jobs.deadline_s), 0.0, jobs.deadline_s + epoch_s).tolist(),
        jobs.weight.tolist(),
        strict=True,
    )
    specs = []
    for gpus, least, most, cpus, memory, priority, device_type, model, deadline, weight in columns:
        millicores = 0 if math.isnan(cpus) else int(1000 * cpus) // gpus
        each = 0 if math.isnan(memory) else int(memory) // gpus
        sizes = (least, most) if least < most else (0, 0)
        key = (gpus, *sizes, millicores, each, priority, device_type, model, deadline, weight)
        spec = made.get(key)
        if spec is None:
            spec = made[key] = JobSpec(
                _COMMAND,
                (Role("worker", gpus, TaskShape(1, millicores, each)),),
                locality=_TOGETHER if max(gpus, sizes[1]) <= largest[device_type] and not ideal else _ANYWHERE,
                priority=priority,
                gpus_min=sizes[0],
                gpus_max=sizes[1],
                device_type=device_type,
                display_name=model,
                deadline=deadline,
                weight=weight,
            )
        specs.append(spec)
    return specs


def users_of(jobs: Workload) -> list[str]:
    """Return the user of each job, or else its tenant; empty if the trace names neither."""
    return [user or tenant for user, tenant in zip(jobs.user.texts(), jobs.tenant.texts(), strict=True)]


def _largest_by_type(servers: Servers) -> Mapping[str, int]:
    """Return the GPUs of the largest server by type; "": of any type. A type that no server has maps to 0."""
    largest: defaultdict[str, int] = defaultdict(int)
    for group in servers.groups:
        made = group.configuration_set
        for device_type in ("", made.device_type):
            largest[device_type] = max(largest[device_type], made.devices)
    return largest


def devices_only(servers: Servers) -> Servers:
    """Return few large servers with the same number of devices of each type and no other resource.

    For placements that accept any free devices, the boundaries of servers make no difference.
    """
    groups = []
    for group in servers.groups:
        made = structs.replace(group.configuration_set, sockets=_NOTHING, groups=(), memory_bytes=0)
        full, rest = divmod(group.nodes * made.devices, _MOST_DEVICES)
        if full:
            name = f"{made.name}-{_MOST_DEVICES}"
            groups.append(ServerGroup(structs.replace(made, name=name, devices=_MOST_DEVICES), full))
        if rest:
            groups.append(ServerGroup(structs.replace(made, devices=rest), 1))
    return Servers(tuple(groups))
