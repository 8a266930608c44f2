"""What the jobs of a workload ask for, as the specs of real jobs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from ganger.resources.values import Level, Locality, Role, Socket, TaskShape
from msgspec import structs

from ganger_master.core.model import JobSpec
from ganger_master.sim.traces.servers import Servers
from ganger_master.sim.traces.workload import Workload

_NOTHING = (Socket(0, 0),)
_TOGETHER = Locality(Level.NODE)
_ANYWHERE = Locality(Level.CLUSTER)
_COMMAND = ("train",)


def specs_of(jobs: Workload, servers: Servers, ideal: bool, epoch_s: float = 0.0) -> Sequence[JobSpec]:
    """One spec a job; equal jobs share one. A gang that fits into a server wants to stay in one; what a trace does not
    say of cores and memory is a share in proportion to the devices. `ideal`: only devices count, anywhere. `epoch_s`:
    when the trace's clock begins."""
    largest = max(group.configuration_set.devices for group in servers.groups)
    made: dict[tuple[int, int, int, int, int, int, str, str, float, float], JobSpec] = {}
    deadlines = np.where(np.isnan(jobs.deadline_s), 0.0, jobs.deadline_s + epoch_s).tolist()
    specs = []
    cpus, memory = jobs.cpus, jobs.memory_bytes
    for job in range(len(jobs)):
        gpus = int(jobs.gpus[job])
        millicores = 0 if ideal or np.isnan(cpus[job]) else int(1000 * cpus[job]) // gpus
        each = 0 if ideal or np.isnan(memory[job]) else int(memory[job]) // gpus
        least, most = int(jobs.min_gpus[job]), int(jobs.max_gpus[job])
        is_elastic = least < most
        sizes = (least, most) if is_elastic else (0, 0)
        device_type = "" if ideal else jobs.gpu_type[job]
        priority, deadline, weight = int(jobs.priority[job]), deadlines[job], float(jobs.weight[job])
        key = (gpus, *sizes, millicores, each, priority, device_type, jobs.model[job], deadline, weight)
        spec = made.get(key)
        if spec is None:
            spec = made[key] = JobSpec(
                _COMMAND,
                (Role("worker", gpus, TaskShape(1, millicores, each)),),
                locality=_TOGETHER if max(gpus, sizes[1]) <= largest and not ideal else _ANYWHERE,
                priority=priority,
                gpus_min=sizes[0],
                gpus_max=sizes[1],
                device_type=device_type,
                display_name=jobs.model[job],
                deadline=deadline,
                weight=weight,
            )
        specs.append(spec)
    return specs


def devices_only(servers: Servers) -> Servers:
    """The same servers, with nothing in them but devices."""
    return Servers(
        tuple(
            replace(
                group,
                configuration_set=structs.replace(group.configuration_set, sockets=_NOTHING, groups=(), memory_bytes=0),
            )
            for group in servers.groups
        )
    )
