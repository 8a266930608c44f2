"""Co-located running jobs. They are preempted and make room only together, as one unit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Final, TypeAlias

from ganger.cluster.fit import memory_beside
from ganger.cluster.view import View

from ganger_master.core.model import Claim, Gang, JobRecord

# By job number: the numbers of all jobs on its devices, its own among them, ascending. Jobs alone on their devices are
# left out.
Mates: TypeAlias = Mapping[int, tuple[int, ...]]
# One job with its gang, or all jobs that share devices.
Unit: TypeAlias = tuple[tuple[JobRecord, Gang], ...]

ALONE: Final[Mates] = MappingProxyType({})


def mates_of(sharing: Iterable[tuple[JobRecord, Gang]]) -> Mates:
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


def units(gangs: Iterable[tuple[JobRecord, Gang]], mates: Mates) -> list[Unit]:
    """Return the gangs as units. A unit of co-located jobs stands where the first of its jobs stood."""
    if not mates:
        return [(pair,) for pair in gangs]
    found: dict[int, list[tuple[JobRecord, Gang]]] = {}
    for job, gang in gangs:
        first = mates.get(job.number, (job.number,))[0]
        found.setdefault(first, []).append((job, gang))
    return list(map(tuple, found.values()))


def fits_beside(job: JobRecord, claims: Sequence[Claim], mates: Iterable[JobRecord], view: View) -> bool:
    """Return whether the job's device memory fits on these devices beside co-located jobs and parked gangs.

    Args:
        job: The job that is to be placed.
        claims: Its claims; their `parked_bytes` are the job's own.
        mates: Jobs that hold all of these devices.
        view: The cluster.
    """
    taken = sum([mate.shape.device_memory_bytes for mate in mates])
    for claim in claims:
        slot, mask = view.slots.get(claim.node), claim.device_mask
        if slot is None:
            return False
        held_bytes = (taken,) * view.topologies[slot].devices
        if mask and job.shape.device_memory_bytes > memory_beside(view, slot, mask, held_bytes, claim.parked_bytes):
            return False
    return True
