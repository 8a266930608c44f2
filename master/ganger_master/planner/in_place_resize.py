"""Resizes in place: jobs that give devices back, jobs that grow once devices are free, and the state of both.

A world of another size follows the present one as the destination of a migration (docs/design/007-elastic-worlds.md).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from ganger.cluster.fit import gang_level
from ganger.cluster.placement import beside, resized
from ganger.cluster.resources import Claim, LocalityLevel
from ganger.cluster.view import View
from msgspec.structs import replace

from ganger_master.core.colocation import has_arenas
from ganger_master.core.elastic import tasks_divide
from ganger_master.core.gang_model import Gang, GangIntent, GangPhase, Piece
from ganger_master.core.job_model import JobRecord
from ganger_master.planner.job_table import LiveTable

Claims: TypeAlias = tuple[Claim, ...]


@dataclass(frozen=True, slots=True)
class Resizing:
    """Resizes that are decided and not done. Losing them costs only time."""

    # GPUs that running jobs are to have, by number.
    wanted: Mapping[int, int] = field(default_factory=dict)
    # Those of them whose resize the master has approved.
    begun: frozenset[int] = frozenset()
    # Claims that jobs return, by number.
    giving: Mapping[int, Claims] = field(default_factory=dict)

    def followed(self, table: LiveTable) -> Resizing:
        """Return the state without resizes that are done or have failed."""
        wanted, giving = {}, {}
        for number, gpus in self.wanted.items():
            found = table.pair(number)
            if found is None:
                continue
            job, gang = found
            waits_for_room = number not in self.begun and gang.intent is GangIntent.RUN and gang.devices < gpus
            if job.next_epoch or waits_for_room:
                wanted[number] = gpus
                if number in self.giving:
                    giving[number] = self.giving[number]
        return Resizing(wanted, self.begun & wanted.keys(), giving)

    def without(self, numbers: Iterable[int]) -> Resizing:
        """Return the state after the master refused changes of these jobs."""
        gone = set(numbers)
        wanted = {number: gpus for number, gpus in self.wanted.items() if number not in gone}
        giving = {number: claims for number, claims in self.giving.items() if number not in gone}
        return Resizing(wanted, self.begun - gone, giving)

    @property
    def waits_for_room(self) -> bool:
        """Return whether a job is to grow whose resize has not begun."""
        return bool(self.wanted.keys() - self.begun)

    def given(self, table: LiveTable) -> list[tuple[JobRecord, Gang]]:
        """Return the jobs that return claims, each with a gang of those that it still holds."""
        found = []
        for number, claims in self.giving.items():
            pair = table.pair(number)
            if pair is not None and (part := part_of(pair[1], claims)) is not None:
                found.append((pair[0], part))
        return found

    def held_beside(self, table: LiveTable) -> int:
        """Return the number of devices that next worlds hold beyond the table's count of present ones."""
        devices = 0
        for number, gpus in self.wanted.items():
            found = table.pair(number)
            if found is not None and found[0].next_epoch:
                # A parked old world has left its devices to the next one, or to other jobs.
                counted = 0 if found[1].phase is GangPhase.PARKED else found[1].devices
                devices += max(0, gpus - counted)
        return devices


NOTHING_UNDER_WAY = Resizing()


def can_change(job: JobRecord, gang: Gang) -> bool:
    """Return whether the job can continue with another number of devices from its state in memory."""
    can = job.spec.is_elastic and job.capabilities.resize and not job.next_epoch and job.ending is None
    settled = gang.phase is GangPhase.RUNNING and gang.intent is GangIntent.RUN and not gang.node_set
    return can and settled and has_arenas(gang) and not any(claim.shared_mask for claim in gang.claims)


def sizes_of(job: JobRecord, gang: Gang | None) -> Sequence[int] | None:
    """Return the numbers of tasks that it may have, ascending, with its present one; None: only its spec limits it."""
    if not job.capabilities.resize_divides:
        return None
    spec = job.spec
    each = spec.roles[0].shape.gpus
    may = {gpus // each for gpus in range(spec.gpus_min, spec.gpus_max + 1, each) if tasks_divide(job, gpus)}
    return sorted(may if gang is None else {*may, gang.devices // each})


def claims_of(view: View, job: JobRecord, gang: Gang, gpus: int) -> Claims | None:
    """Return its place with that many devices, its own claims counted as free; None if none is close enough, or if host
    memory does not hold both worlds."""
    shape = job.shape_for(gpus)
    widest = shape.locality.widest
    claims = resized(view, shape, gang.claims, one_node_only=widest <= LocalityLevel.NODE)
    if claims is None or gang_level(view, claims) > widest:
        return None
    taken = taken_beside(gang, claims)
    has_memory = all(one.memory_bytes + one.arena_bytes <= view.memory[view.slots[one.node]] for one in taken)
    return claims if has_memory else None


def given_back(gang: Gang, claims: Claims) -> Claims:
    """Return the part of a gang's claims that is free when it continues with `claims`."""
    after = {claim.node: claim for claim in claims}
    rests = [beside(own, after.get(own.node)) for own in gang.claims]
    return tuple([rest for rest in rests if rest.device_mask])


def taken_beside(gang: Gang, claims: Claims) -> Claims:
    """Return what it takes in addition to its present claims when it continues with `claims`."""
    held = {claim.node: claim for claim in gang.claims}
    return tuple([beside(claim, held.get(claim.node)) for claim in claims])


def part_of(gang: Gang, claims: Claims) -> Gang | None:
    """Return a gang of only these claims, as far as it holds them; None if it holds none."""
    held = {claim.node: claim.device_mask for claim in gang.held}
    there = [claim for claim in claims if held.get(claim.node, 0) & claim.device_mask == claim.device_mask]
    return replace(gang, pieces=tuple([Piece(claim, claim) for claim in there])) if there else None
