"""Changes of size in place: who gives devices back, who takes more once they are free, and what is remembered of both.

A world of another size follows the present one as the destination of a move (docs/design/007-elastic-worlds.md), so
nobody is stopped for it. What is given back is free once its daemons have seen it so; whoever is to have it starts, or
grows, in a later pass than the one that decided it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from ganger.cluster.fit import gang_level
from ganger.cluster.resized import beside, resized
from ganger.cluster.resources import Claim, LocalityLevel
from ganger.cluster.view import View
from msgspec.structs import replace

from ganger_master.core.colocation import has_arenas
from ganger_master.core.elastic import tasks_divide
from ganger_master.core.model import Gang, GangIntent, GangPhase, JobRecord, Piece
from ganger_master.planner.job_table import LiveTable

Claims: TypeAlias = tuple[Claim, ...]


@dataclass(frozen=True, slots=True)
class Resizing:
    """What was decided and is not done. Lost, it costs time and nothing else."""

    # GPUs that running jobs are to have, by number.
    wanted: Mapping[int, int] = field(default_factory=dict)
    # Who of them has been told.
    begun: frozenset[int] = frozenset()
    # Pieces on their way to others, by who gives them.
    giving: Mapping[int, Claims] = field(default_factory=dict)

    def followed(self, table: LiveTable) -> Resizing:
        """Without what is done, and what came to nothing."""
        wanted, giving = {}, {}
        for number, gpus in self.wanted.items():
            job, gang = table.get(number) or (None, None)
            if job is None or gang is None:
                continue
            waits_for_room = number not in self.begun and gang.intent is GangIntent.RUN and gang.devices < gpus
            if job.next_epoch or waits_for_room:
                wanted[number] = gpus
                if number in self.giving:
                    giving[number] = self.giving[number]
        return Resizing(wanted, self.begun & wanted.keys(), giving)

    def without(self, numbers: Iterable[int]) -> Resizing:
        """What was proposed for these was refused."""
        gone = set(numbers)
        wanted = {number: gpus for number, gpus in self.wanted.items() if number not in gone}
        giving = {number: claims for number, claims in self.giving.items() if number not in gone}
        return Resizing(wanted, self.begun - gone, giving)

    @property
    def waits_for_room(self) -> bool:
        """Whether anybody is to grow who has not been told so."""
        return bool(self.wanted.keys() - self.begun)

    def given(self, table: LiveTable) -> list[tuple[JobRecord, Gang]]:
        """Who gives something back, with what of that it still holds."""
        found = []
        for number, claims in self.giving.items():
            job, gang = table.get(number) or (None, None)
            if job is not None and gang is not None and (part := part_of(gang, claims)) is not None:
                found.append((job, part))
        return found

    def held_beside(self, table: LiveTable) -> int:
        """Devices that next worlds hold beside what the table counts of the present ones."""
        devices = 0
        for number, gpus in self.wanted.items():
            job, gang = table.get(number) or (None, None)
            if job is None or gang is None or not job.next_epoch:
                continue
            # An old world that has come to rest has left its devices to the next one, and to others.
            counted = 0 if gang.phase is GangPhase.PARKED else gang.devices
            devices += max(0, gpus - counted)
        return devices


NOTHING_UNDER_WAY = Resizing()


def can_change(job: JobRecord, gang: Gang) -> bool:
    """Whether it can go on with another number of devices from its state in memory."""
    can = job.spec.is_elastic and job.capabilities.resize and not job.next_epoch and job.ending is None
    settled = gang.phase is GangPhase.RUNNING and gang.intent is GangIntent.RUN and not gang.node_set
    return can and settled and has_arenas(gang) and not any(claim.shared_mask for claim in gang.claims)


def sizes_of(job: JobRecord, gang: Gang | None) -> Sequence[int] | None:
    """Tasks that it may have, ascending, its present number among them; None for any number that its spec accepts."""
    if not job.capabilities.resize_divides:
        return None
    spec = job.spec
    each = spec.roles[0].shape.gpus
    may = {gpus // each for gpus in range(spec.gpus_min, spec.gpus_max + 1, each) if tasks_divide(job, gpus)}
    return sorted(may if gang is None else {*may, gang.devices // each})


def claims_of(view: View, job: JobRecord, gang: Gang, gpus: int) -> Claims | None:
    """Its place with so many devices, its own pieces counted as free; None if there is none as close together as it
    wants, or no host memory for both of its worlds."""
    shape = job.spec.shape(job.arena_bytes_per_device, job.used_device_bytes, gpus)
    widest = shape.locality.widest
    claims = resized(view, shape, gang.claims, one_node_only=widest <= LocalityLevel.NODE)
    if claims is None or gang_level(view, claims) > widest:
        return None
    taken = taken_beside(gang, claims)
    has_memory = all(one.memory_bytes + one.arena_bytes <= view.memory[view.slots[one.node]] for one in taken)
    return claims if has_memory else None


def given_back(gang: Gang, claims: Claims) -> Claims:
    """What of a gang's devices is free when it goes on with these claims."""
    after = {claim.node: claim for claim in claims}
    rests = [_rest(own, after.get(own.node)) for own in gang.claims]
    return tuple([claim for claim in rests if claim is not None])


def taken_beside(gang: Gang, claims: Claims) -> Claims:
    """What it takes beside what it has when it goes on with these claims."""
    held = {claim.node: claim for claim in gang.claims}
    return tuple([beside(claim, held.get(claim.node)) for claim in claims])


def part_of(gang: Gang, claims: Claims) -> Gang | None:
    """The gang as if these pieces, as far as it holds them, were all of it; None if it holds none of them."""
    held = {piece.claim.node: piece.held.device_mask for piece in gang.pieces if piece.held is not None}
    there = [claim for claim in claims if held.get(claim.node, 0) & claim.device_mask == claim.device_mask]
    return replace(gang, pieces=tuple([Piece(claim, claim) for claim in there])) if there else None


def _rest(own: Claim, after: Claim | None) -> Claim | None:
    if after is None:
        return own
    cores = tuple([max(0, have - stay) for have, stay in zip(own.millicores, after.millicores, strict=True)])
    memory = max(0, own.memory_bytes - after.memory_bytes)
    arena = max(0, own.arena_bytes - after.arena_bytes)
    mask = own.device_mask & ~after.device_mask
    return Claim(own.node, mask, cores, memory, arena) if mask else None
