"""What the scheduler of one job decides: which gangs to ask for when it is the job's turn.

Decisions are pure: a turn and a view in, a proposal out. The host around them does all talking and keeps the view
fresh.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from ganger.cluster.refusals import Refusal
from ganger.cluster.resources import Claim, GangShape
from ganger.cluster.view import View

# Candidates the master looks at in one request.
MOST_CANDIDATES = 16


@dataclass(frozen=True, slots=True)
class PlacementLease:
    """A lease to ask for a gang. Seconds throughout; `job` is a name ("jobs/7"), nodes are bare ("n1")."""

    turn: int
    job: str
    revision: int
    shape: GangShape
    lease_seconds: float
    rank: int = 0
    waited_seconds: float = 0.0
    # Where the job's state is parked: placed there again it goes on at once.
    parked: tuple[Claim, ...] = ()
    # Nodes of which pieces are kept for this job.
    reserved_nodes: tuple[str, ...] = ()
    may_preempt: bool = False


@dataclass(frozen=True, slots=True)
class Proposal:
    """Candidates in order of preference, at most 16; without any the turn is passed on because of `blockers`."""

    candidates: tuple[tuple[Claim, ...], ...] = ()
    blockers: tuple[Refusal, ...] = ()


class JobScheduler(ABC):
    """Derive from it and say what your job should ask for.

    One instance serves one job for as long as it waits. It must not block: while it thinks, its lease runs, and after
    three lost leases the default scheduler takes over.
    """

    @abstractmethod
    def propose(self, turn: PlacementLease, view: View) -> Proposal:
        """What to ask for. The view is the newest known; do not change it, work on `view.copy()`."""

    def on_rejected(self, turn: PlacementLease, view: View, refusals: Sequence[Refusal]) -> Proposal | None:
        """What to ask for instead; None passes the turn on. The view has the fresh rows already.

        Asked after every rejection, so that a scheduler can learn; the answer counts only while the turn lasts.
        """
        return self.propose(turn, view)
