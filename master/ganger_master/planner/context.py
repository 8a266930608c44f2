"""Who shares devices with whom, of those who run: one makes no room, and is not stopped, without the others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Final, TypeAlias

from ganger.cluster.fit import memory_beside
from ganger.cluster.view import View

from ganger_master.core.model import Claim, Gang, JobRecord

# By number: all on its devices, itself among them, in order; nobody who has them to itself.
Mates: TypeAlias = Mapping[int, tuple[int, ...]]
# A gang, or all who share devices.
Unit: TypeAlias = tuple[tuple[JobRecord, Gang], ...]

ALONE: Final[Mates] = MappingProxyType({})


def mates_of(sharing: Iterable[tuple[JobRecord, Gang]]) -> Mates:
    """Of those who may share devices."""
    together: dict[int, set[int]] = {}
    on: dict[str, list[tuple[int, int]]] = {}
    for job, gang in sharing:
        group = together[job.number] = {job.number}
        for piece in gang.pieces:
            mask, there = piece.claim.device_mask, on.setdefault(piece.claim.node, [])
            for taken, number in there:
                if mask & taken and (other := together[number]) is not group:
                    group |= other
                    together.update(dict.fromkeys(other, group))
            there.append((mask, job.number))
    return {number: tuple(sorted(group)) for number, group in together.items() if len(group) > 1}


def units(gangs: Iterable[tuple[JobRecord, Gang]], mates: Mates) -> list[Unit]:
    """All these, who shares devices beside each other, where the first of them stands."""
    if not mates:
        return [(pair,) for pair in gangs]
    found: dict[int, list[tuple[JobRecord, Gang]]] = {}
    for job, gang in gangs:
        first = mates.get(job.number, (job.number,))[0]
        found.setdefault(first, []).append((job, gang))
    return list(map(tuple, found.values()))


def fits_beside(job: JobRecord, claims: Sequence[Claim], mates: Iterable[JobRecord], view: View) -> bool:
    """Whether the memory of these devices has room for it beside its mates, who hold all of them, and what parked gangs
    keep there. `parked_bytes` of a claim are its own."""
    taken = sum([mate.shape.device_memory_bytes for mate in mates])
    for claim in claims:
        slot, mask = view.slots.get(claim.node), claim.device_mask
        if slot is None:
            return False
        company = (taken,) * view.topologies[slot].devices
        if mask and job.shape.device_memory_bytes > memory_beside(view, slot, mask, company, claim.parked_bytes):
            return False
    return True
