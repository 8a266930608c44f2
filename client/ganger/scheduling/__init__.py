"""What the scheduler of one job decides: which gangs to request while the job has a placement lease.

Write your own by deriving from `JobScheduler`; see docs/how-to/job-schedulers.md. Decisions are pure: a lease and a
view in, a proposal out. The host around them (`host`) sends and receives, and keeps the view fresh. Jobs without a
scheduler of their own have Gandiva's Algorithm 1 with device type, tolerance and waiting time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from ganger.cluster.placement import PlacementAnswer, candidates
from ganger.cluster.refusals import Reason, Refusal, RefusalKind
from ganger.cluster.resources import Claim, GangShape
from ganger.cluster.view import View

# Candidates the master looks at in one request.
MOST_CANDIDATES = 16


@dataclass(frozen=True, slots=True)
class PlacementLease:
    """The right to request a gang for a time. Seconds throughout; `job` is a name ("jobs/7"), nodes are bare ("n1")."""

    turn: int
    job: str
    revision: int
    shape: GangShape
    lease_s: float
    rank: int = 0
    waited_s: float = 0.0
    # Where the job's state is parked: placed there again it resumes at once.
    parked: tuple[Claim, ...] = ()
    # Nodes of which pieces are kept for this job.
    kept_nodes: tuple[str, ...] = ()
    # Where the planner would start the job, with the cores and the number of devices that it chose.
    suggested: tuple[Claim, ...] = ()
    # Of the view for which it is granted, which may be newer than the scheduler's.
    view_version: int = 0


@dataclass(frozen=True, slots=True)
class Proposal:
    """Candidates in order of preference, at most 16; without any the lease is passed on because of `blockers`."""

    candidates: tuple[tuple[Claim, ...], ...] = ()
    blockers: tuple[Refusal, ...] = ()


class JobScheduler(ABC):
    """Base class of a job's own scheduler: subclass it, and return the gang to request.

    One instance serves one job for as long as it is pending. It must not block: its lease expires meanwhile, and after
    three lost leases the default scheduler replaces it.
    """

    @abstractmethod
    def propose(self, lease: PlacementLease, view: View) -> Proposal:
        """Return the request for a gang. The view is the newest received; do not change it, work on `view.copy()`."""

    def on_rejected(self, lease: PlacementLease, view: View, refusals: Sequence[Refusal]) -> Proposal | None:
        """Return another request; None returns the placement lease. The view has the node states of the rejection.

        Called after every rejection, so that a scheduler can adapt. The result counts only while the lease lasts.
        """
        return self.propose(lease, view)


# A second candidate costs little and saves a round trip when the first was just taken.
_CANDIDATES = 4
_MOST_BLOCKERS = 16


class DefaultScheduler(JobScheduler):
    """The planner's suggestion, then where the state is parked, then the kept place, then by Algorithm 1."""

    def __init__(self) -> None:
        self._turn = 0
        self._avoid: set[str] = set()
        self._refused: tuple[Refusal, ...] = ()

    def propose(self, lease: PlacementLease, view: View) -> Proposal:
        is_new = lease.turn != self._turn
        if is_new:
            self._turn, self._refused = lease.turn, ()
            if lease.suggested:
                # The planner has looked at where the job is parked, and has plans for other places.
                return Proposal((lease.suggested,))
        placement = self._places(lease, view)
        if is_new and not placement.candidates and self._avoid:
            # What was kept for others in former turns may be free by now.
            self._avoid.clear()
            placement = self._places(lease, view)
        if placement.candidates:
            return Proposal(placement.candidates)
        # With nodes avoided because they are kept for others, the kept places are the true blockers.
        return Proposal((), (*self._refused, *placement.refusals)[:_MOST_BLOCKERS])

    def _places(self, lease: PlacementLease, view: View) -> PlacementAnswer:
        return candidates(
            view,
            lease.shape,
            waited_s=lease.waited_s,
            parked=lease.parked,
            kept_nodes=lease.kept_nodes,
            avoid=self._avoid,
            limit=_CANDIDATES,
        )

    def on_rejected(self, lease: PlacementLease, view: View, refusals: Sequence[Refusal]) -> Proposal | None:
        kept = [refusal for refusal in refusals if refusal.reason.excludes_node]
        nodes = {refusal.node for refusal in kept if refusal.node}
        conflict = any(one.node and one.reason.kind is not RefusalKind.MISTAKE for one in refusals)
        if not conflict or (kept and not nodes - self._avoid):
            # A strict queue, a quota, a mistake: no other place would help.
            return Proposal((), tuple(refusals[:_MOST_BLOCKERS]))
        self._avoid |= nodes
        # Where it could not be launched it lacks nothing but a place elsewhere.
        keepers = [refusal for refusal in kept if refusal.reason is not Reason.LAUNCH_FAILED]
        self._refused = (*self._refused, *keepers)[:_MOST_BLOCKERS]
        return self.propose(lease, view)


__all__ = ["JobScheduler", "PlacementLease", "Proposal"]
