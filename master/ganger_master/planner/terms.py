"""The terms of a pass: shapes to place, holdings of gangs, and groups of jobs that share devices."""

from __future__ import annotations

from collections.abc import Callable

from ganger.cluster.resources import Claim, GangShape
from msgspec import Struct
from msgspec.structs import replace

from ganger_master.core.model import Gang, JobRecord
from ganger_master.planner.context import ALONE, Mates, Unit
from ganger_master.planner.job_table import LiveTable

Claims = tuple[Claim, ...]


def held_of(gang: Gang) -> Claims:
    """Return what a gang holds. Devices of a time-sliced gang count as shared: others of its group hold them too."""
    held = tuple([piece.held for piece in gang.pieces if piece.held is not None])
    return tuple([replace(claim, shared_mask=claim.device_mask) for claim in held]) if gang.node_set else held


def held_by_all(table: LiveTable, held: Callable[[Gang], Claims] = held_of) -> list[Claims]:
    """Return the claims of all running gangs, by `held`, and of all that are being returned."""
    return [*[held(gang) for _, gang in table.running], *[held_of(gang) for _, gang in table.going]]


class PassTerms(Struct, frozen=True):
    """What a pass plans with.

    shape: the shape that a pending job is placed with.
    held: what a running gang holds.
    mates_now: the present groups of jobs that share devices.
    """

    shape: Callable[[JobRecord], GangShape] = lambda job: job.shape
    held: Callable[[Gang], Claims] = held_of
    mates_now: Callable[[], Mates] = lambda: ALONE

    @property
    def mates(self) -> Mates:
        return self.mates_now()

    def held_by(self, unit: Unit) -> Claims:
        """Return what all gangs of a unit hold."""
        return tuple([claim for _, gang in unit for claim in self.held(gang)])


AS_ASKED = PassTerms()
