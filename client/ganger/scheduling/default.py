"""The job scheduler of every job that brings none of its own."""

from __future__ import annotations

from ganger.placement.candidates import candidates
from ganger.resources.view import View
from ganger.scheduling.base import JobScheduler, Proposal, Turn


class DefaultScheduler(JobScheduler):
    """Gandiva's Algorithm 1 (Xiao et al., OSDI 2018) on bitmaps, with device type, locality tolerance and waiting time;
    first where the job's state is parked, then on what is reserved for it. Spreads or packs as the view says."""

    def propose(self, turn: Turn, view: View) -> Proposal:
        found = candidates(
            view,
            turn.shape,
            waited=turn.waited_seconds,
            parked=turn.parked,
            reserved_nodes=turn.reserved_nodes,
        )
        return Proposal(found.candidates, found.refusals)
