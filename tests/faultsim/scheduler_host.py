"""The process around job schedulers under virtual time: the production schedulers, asked and answered over the network.

What it knows and when it asks is what `ganger.scheduling.host` knows and does; it may die, and its answers get lost.
"""

from __future__ import annotations

from collections.abc import Callable

from faultsim.engine import Engine
from faultsim.faults import Network
from faultsim.master_process import SimMaster
from ganger.scheduling import DefaultScheduler, JobScheduler, Proposal
from ganger.scheduling import PlacementLease as Offer
from ganger_master.core.answers import Answer, Rejected
from ganger_master.core.commands import ClaimTurns, RequestGang
from ganger_master.core.queue import GrantedLease

# How soon a stream that broke with its master is open again.
_RECONNECT_S = 1.0


class SimHost:
    """With a `name` it is a user's own, which claims the jobs it is told to serve; without, the default host."""

    def __init__(
        self,
        engine: Engine,
        network: Network,
        master: SimMaster,
        make_scheduler: Callable[[], JobScheduler] = DefaultScheduler,
        name: str = "",
    ) -> None:
        self.engine = engine
        self.network = network
        self.master = master
        self.name = name
        self.is_up = True
        self._make_scheduler = make_scheduler
        self._schedulers: dict[int, JobScheduler] = {}
        self._jobs: list[int] = []
        # The master's incarnation that knows what is claimed.
        self._claimed_with = -1
        if name:
            self._stay_connected()

    def serve(self, number: int) -> None:
        self._jobs.append(number)
        self._claim()

    def crash(self, away_seconds: float) -> None:
        """Forgets what its schedulers learnt; its stream breaks, and is open again once it is back."""
        self.is_up = False
        self._schedulers.clear()
        self._claimed_with = -1
        if self.name:
            self.master.call(ClaimTurns(self.name, connected=False))
        self.engine.after(away_seconds, self._back)

    def take(self, turn: GrantedLease) -> None:
        """A turn that has come over the stream."""
        job = self.master.state.jobs.get(turn.number)
        if not self.is_up or not self.master.is_up or job is None or job.state.is_finished:
            return
        parked = self.master.state.gangs.get(job.epoch)
        offer = Offer(
            turn=turn.turn,
            job=job.name,
            revision=turn.revision,
            shape=job.shape,
            lease_s=turn.expires - self.master.now(),
            rank=turn.rank,
            waited_s=max(0.0, self.master.now() - (job.pending_since or self.master.now())),
            parked=parked.parked_claims if parked is not None else (),
            kept_nodes=turn.kept_nodes,
            suggested=turn.suggested,
        )
        scheduler = self._schedulers.setdefault(turn.number, self._make_scheduler())
        self._ask(turn.number, offer, scheduler, scheduler.propose(offer, self.master.state.view))

    def _ask(self, number: int, offer: Offer, scheduler: JobScheduler, proposal: Proposal) -> None:
        view = self.master.state.view
        command = RequestGang(
            number,
            offer.revision,
            proposal.candidates,
            offer.turn,
            blockers=proposal.blockers,
            scheduler=self.name,
            view_version=view.version,
        )

        def answered(answer: Answer) -> None:
            if not self.is_up or self._schedulers.get(number) is not scheduler:
                return
            if not isinstance(answer, Rejected):
                del self._schedulers[number]
            elif proposal.candidates:
                again = scheduler.on_rejected(offer, view, answer.refusals)
                if answer.turn_kept and again is not None and again.candidates:
                    self._ask(number, offer, scheduler, again)
                elif answer.turn_kept:
                    blockers = again.blockers if again is not None and again.blockers else answer.refusals
                    self._ask(number, offer, scheduler, Proposal((), blockers))

        self.network.send(lambda: self.master.call(command, lambda answer: self.network.send(lambda: answered(answer))))

    def _back(self) -> None:
        self.is_up = True
        if self.name:
            self._stay_connected()

    def _stay_connected(self) -> None:
        if self.is_up:
            if self.master.is_up and self._claimed_with != self.master.incarnation:
                self._claim()
            self.engine.after(_RECONNECT_S, self._stay_connected)

    def _claim(self) -> None:
        if self.is_up and self.master.is_up:
            self._claimed_with = self.master.incarnation
            self.master.call(ClaimTurns(self.name, tuple(self._jobs)))
