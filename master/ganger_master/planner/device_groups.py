"""Co-located running jobs, which are preempted and make room only together, as one unit; and places of gangs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Final, TypeAlias

import numpy as np
from ganger.cluster.fit import memory_beside
from ganger.cluster.resources import Claim, GangShape, exceeds
from ganger.cluster.topology import bits
from ganger.cluster.view import View
from msgspec.structs import replace

from ganger_master.core.gang_model import Gang, GangIntent, GangPhase
from ganger_master.core.job_model import JobRecord, SuspendLevel
from ganger_master.policies.fairness import Seat
from ganger_master.policies.orders import Integers

# By job number: all jobs on its devices, ascending, itself among them. Jobs alone on their devices are left out.
CoLocatedJobs: TypeAlias = Mapping[int, tuple[int, ...]]
# A job with its gang.
Holder: TypeAlias = tuple[JobRecord, Gang]
# One job with its gang, or all jobs that share devices.
Unit: TypeAlias = tuple[Holder, ...]

Claims: TypeAlias = tuple[Claim, ...]

# Python 3.11 takes as long for the lookup of an enumeration member as for a call; a job table does it for every event.
_PARK, _STOP, _PARKED = GangIntent.PARK, GangIntent.STOP, GangPhase.PARKED
# Gangs that are time-sliced on one device at most: each keeps its state and its processes in host memory.
MOST_ROWS: Final = 4
# Gangs on one device among which its host memory is divided where they name none.
_RESIDENTS: Final = 2
ALONE: Final[CoLocatedJobs] = MappingProxyType({})


def co_located_jobs(sharing: Iterable[tuple[JobRecord, Gang]]) -> CoLocatedJobs:
    """Return the co-located jobs among these, the jobs that may share devices with others."""
    groups: dict[int, set[int]] = {}
    occupied: dict[str, list[tuple[int, int]]] = {}
    for job, gang in sharing:
        group = groups[job.number] = {job.number}
        for piece in gang.pieces:
            mask, there = piece.claim.device_mask, occupied.setdefault(piece.claim.node, [])
            for taken, number in there:
                if mask & taken and (other := groups[number]) is not group:
                    group |= other
                    groups.update(dict.fromkeys(other, group))
            there.append((mask, job.number))
    return {number: tuple(sorted(group)) for number, group in groups.items() if len(group) > 1}


class DeviceGroups:
    """The groups of jobs that share devices, by the rows of a job table. `sharing`: the jobs that may share devices;
    `row_of`: row of each live job, by number; `room`: number of rows of the table."""

    def __init__(self, sharing: Sequence[tuple[JobRecord, Gang]], row_of: Mapping[int, int], room: int) -> None:
        gangs = {job.number: gang for job, gang in sharing}
        self.co_located = co_located_jobs(sharing)
        # By row: the first row of its group; -1: its devices are its own.
        self.units = np.full(room, -1)
        # By row of a job that shares devices: the GPUs that it and its co-located jobs hold together.
        self.gpus: dict[int, int] = {}
        # The GPUs that jobs hold beyond the first one of each device.
        self.doubly_held_gpus = 0
        for number, co_located in self.co_located.items():
            self.units[row_of[number]] = row_of[co_located[0]]
            if number == co_located[0]:
                held = devices_of([gangs[one] for one in co_located])
                self.gpus.update({row_of[one]: len(held) for one in co_located})
                self.doubly_held_gpus += sum([gangs[one].devices for one in co_located]) - len(held)

    def with_all_gpus(self, rows: Integers, gpus: Integers) -> Integers:
        """Return `gpus`, the GPUs of these rows, where a job that shares devices counts all of its group."""
        found = gpus.copy()
        for at in np.flatnonzero(self.units[rows] >= 0).tolist():
            found[at] = self.gpus[int(rows[at])]
        return found


def units(gangs: Iterable[tuple[JobRecord, Gang]], co_located: CoLocatedJobs) -> list[Unit]:
    """Return the gangs as units. A unit of co-located jobs stands where the first of its jobs stood."""
    if not co_located:
        return [(pair,) for pair in gangs]
    found: dict[int, list[tuple[JobRecord, Gang]]] = {}
    for job, gang in gangs:
        first = co_located.get(job.number, (job.number,))[0]
        found.setdefault(first, []).append((job, gang))
    return list(map(tuple, found.values()))


def fits_beside(job: JobRecord, claims: Sequence[Claim], co_located: Iterable[JobRecord], view: View) -> bool:
    """Return whether the job's device memory fits on these devices beside parked gangs and the `co_located` jobs, which
    hold all of these devices; `parked_bytes` of the claims are the job's own."""
    taken = sum([one.shape.device_memory_bytes for one in co_located])
    for claim in claims:
        slot, mask = view.slots.get(claim.node), claim.device_mask
        if slot is None:
            return False
        held_bytes = (taken,) * view.topologies[slot].devices
        if mask and job.shape.device_memory_bytes > memory_beside(view, slot, mask, held_bytes, claim.parked_bytes):
            return False
    return True


def seat_of(claims: Claims) -> Seat:
    return tuple([(claim.node, claim.device_mask) for claim in claims if claim.device_mask])


def takes_turns(job: JobRecord) -> bool:
    """Return whether the job may be time-sliced at all (`core.timeslice_admission`), whatever it does now."""
    return may_be_slower(job) and not job.no_time_slices


def may_be_slower(job: JobRecord) -> bool:
    """Return whether it may be co-located without time slices: it is preemptible, and has no time limit that a lower
    rate would make it exceed."""
    return job.preemptible and len(job.spec.roles) == 1 and job.time_limit_s is None


def shape_for_two(job: JobRecord) -> GangShape:
    """Return the shape with which a job is placed: half a share of memory if it may be co-located and names none."""
    return replace(job.shape, residents=_RESIDENTS) if may_be_slower(job) else job.shape


def shares_all(claims: Claims) -> bool:
    """Return whether all of its devices may be shared."""
    return all(claim.device_mask == claim.shared_mask for claim in claims)


@lru_cache(4096)
def thin(shape: GangShape, memory_bytes: int) -> GangShape:
    """Return the shape with `memory_bytes` for each GPU where it names no memory and was not measured to need some.
    Else none is left to others."""
    if not memory_bytes or shape.task_memory_bytes:
        return shape
    roles = []
    for role in shape.roles:
        task = role.shape
        if task.gpus and not task.memory_bytes:
            task = replace(task, memory_bytes=memory_bytes * task.gpus)
        roles.append(replace(role, shape=task))
    return replace(shape, roles=tuple(roles))


def as_held(shape: GangShape, gang: Gang) -> GangShape:
    """Return the shape of a gang of one role with the host memory that each of its tasks has now."""
    role = shape.roles[0]
    each = max([claim.memory_bytes // max(1, sum(claim.tasks)) for claim in gang.claims], default=0)
    task = replace(role.shape, memory_bytes=max(role.shape.memory_bytes, each))
    return replace(shape, roles=(replace(role, shape=task),))


def is_shared(gang: Gang) -> bool:
    """Return whether other gangs may be on its devices at the same time."""
    return any(piece.claim.shared_mask for piece in gang.pieces)


def shares_devices(gang: Gang) -> bool:
    """Return whether other gangs may hold its devices: in time slices, or at the same time."""
    return bool(gang.node_set) or is_shared(gang)


def devices_of(gangs: Iterable[Gang]) -> set[tuple[str, int]]:
    """Return all devices of these gangs, as node and number."""
    return {(claim.node, device) for gang in gangs for claim in gang.claims for device in bits(claim.device_mask)}


def returns_devices(gang: Gang) -> bool:
    """Return whether the gang ends, or is about to be parked where it leaves its devices."""
    if gang.intent is _PARK:
        return gang.park_level is not SuspendLevel.PAUSE and gang.phase is not _PARKED
    return gang.intent is _STOP


def is_free(view: View, claims: Claims) -> bool:
    """Return whether all of these claims are free, on available nodes."""
    for claim in claims:
        slot = view.slots.get(claim.node)
        if slot is None or not view.available[slot] or claim.device_mask & ~view.free[slot]:
            return False
        if any(want > have for want, have in zip(claim.millicores, view.millicores[slot], strict=True)):
            return False
        if claim.memory_bytes + claim.arena_bytes > view.memory[slot]:
            return False
        if exceeds(claim.bandwidth, view.bandwidth.get(slot, ())):
            return False
    return True
