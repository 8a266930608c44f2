"""What a job scheduler is asked and what it answers: plain values, no clock, no wire."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ganger.resources.reasons import Refusal
from ganger.resources.values import Claim, GangShape
from ganger.resources.view import View


@dataclass(frozen=True, slots=True)
class Turn:
    """A lease to request a gang for one job.

    `rank`: position in the policy's order, from 1. `waited_seconds`: since the job became PENDING. `parked`: where its
    state rests, the place to try first. `reserved_nodes`: nodes whose free pieces are reserved for it.
    """

    turn: int
    job: str
    revision: int
    shape: GangShape
    rank: int = 1
    lease_seconds: float = 0.5
    waited_seconds: float = 0.0
    parked: tuple[Claim, ...] = ()
    reserved_nodes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Proposal:
    """Candidate gangs in order of preference (at most 16), or what stands in the way. Without candidates the turn
    passes on and `ganger why` shows the blockers."""

    candidates: tuple[tuple[Claim, ...], ...] = ()
    blockers: tuple[Refusal, ...] = ()


class JobScheduler:
    """Decides where a job would like to run. Subclass it and override `propose`.

    One instance may serve many jobs. Its methods run in the scheduler's own process, must not keep `view` (it is
    updated in place), and have to answer within the lease of the turn; a scheduler that does not, three times, loses
    the job to the default one.
    """

    def propose(self, turn: Turn, view: View) -> Proposal:
        """The gangs to request in this turn, in order of preference."""
        raise TypeError(f"{type(self).__name__} must override propose(turn, view)")

    def on_rejected(self, turn: Turn, view: View, refusals: Sequence[Refusal]) -> Proposal | None:
        """Asked while the turn is kept after a rejection; `view` has fresh rows of the conflicting nodes. None gives
        the turn up. By default proposes again."""
        return self.propose(turn, view)
