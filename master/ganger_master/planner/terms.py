"""What a pass goes by: with which shape a job is placed, what a gang counts as holding, and who shares devices."""

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
    """What everybody holds who runs, which counts as `held`, or is giving it back."""
    return [*[held(gang) for _, gang in table.running], *[held_of(gang) for _, gang in table.going]]


class PassTerms(Struct, frozen=True):
    """What a pass goes by: the shape that a waiting job is placed with, what a gang counts as holding, and who shares
    devices."""

    shape: Callable[[JobRecord], GangShape] = lambda job: job.shape
    held: Callable[[Gang], Claims] = held_of
    mates_now: Callable[[], Mates] = lambda: ALONE

    @property
    def mates(self) -> Mates:
        return self.mates_now()

    def held_by(self, unit: Unit) -> Claims:
        """What all of them hold."""
        return tuple([claim for _, gang in unit for claim in self.held(gang)])


AS_ASKED = PassTerms()
