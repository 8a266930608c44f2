"""The scheduler of every job that brings none: Gandiva's Algorithm 1 with device type, tolerance and waiting time."""

from __future__ import annotations

from collections.abc import Sequence

from ganger.cluster.placement import PlacementAnswer, candidates
from ganger.cluster.refusals import Reason, Refusal, RefusalKind
from ganger.cluster.view import View
from ganger.scheduling.scheduler import JobScheduler, PlacementLease, Proposal

# A second candidate costs little and saves a round trip when the first was just taken.
_CANDIDATES = 4
# Nodes kept for others or closed to it are left alone for the rest of the turn, and in the next ones while there is any
# other place: the view does not show it.
_CLOSED = frozenset(
    {
        Reason.PROTECTED,
        Reason.RESERVED,
        Reason.STORAGE_NOT_SHARED,
        Reason.CANNOT_SWITCH_USER,
        Reason.NODE_UNAVAILABLE,
        Reason.LAUNCH_FAILED,
    }
)


class DefaultScheduler(JobScheduler):
    """Where the state is parked, then what is reserved, then by Algorithm 1."""

    def __init__(self) -> None:
        self._turn = 0
        self._avoid: set[str] = set()
        self._refused: tuple[Refusal, ...] = ()

    def propose(self, turn: PlacementLease, view: View) -> Proposal:
        placement = self._places(turn, view)
        if turn.turn != self._turn:
            self._turn, self._refused = turn.turn, ()
            if not placement.candidates and self._avoid:
                # What was kept for others in former turns may be free by now.
                self._avoid.clear()
                placement = self._places(turn, view)
        if placement.candidates:
            return Proposal(placement.candidates)
        # With nodes avoided because they are kept for others, those who keep them are the true blockers.
        return Proposal((), (*self._refused, *placement.refusals)[:_MOST_BLOCKERS])

    def _places(self, turn: PlacementLease, view: View) -> PlacementAnswer:
        return candidates(
            view,
            turn.shape,
            waited=turn.waited_seconds,
            parked=turn.parked,
            reserved_nodes=turn.reserved_nodes,
            avoid=self._avoid,
            limit=_CANDIDATES,
        )

    def on_rejected(self, turn: PlacementLease, view: View, refusals: Sequence[Refusal]) -> Proposal | None:
        kept = [refusal for refusal in refusals if refusal.reason in _CLOSED]
        nodes = {refusal.node for refusal in kept if refusal.node}
        conflict = {
            refusal.node for refusal in refusals if refusal.reason.kind is not RefusalKind.MISTAKE and refusal.node
        }
        if not conflict or (kept and not nodes - self._avoid):
            # A strict queue, a quota, a mistake: no other place would help.
            return Proposal((), tuple(refusals[:_MOST_BLOCKERS]))
        self._avoid |= nodes
        # Where it could not be launched it lacks nothing but a place elsewhere.
        keepers = [refusal for refusal in kept if refusal.reason is not Reason.LAUNCH_FAILED]
        self._refused = (*self._refused, *keepers)[:_MOST_BLOCKERS]
        return self.propose(turn, view)


_MOST_BLOCKERS = 16
