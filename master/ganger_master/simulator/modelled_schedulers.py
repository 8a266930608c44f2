"""The default job scheduler of every simulated job: proposes as soon as its job gets a placement lease."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ganger.scheduling.job_scheduler import DefaultScheduler, PlacementLease, Proposal

from ganger_master.core import answers
from ganger_master.core.commands import Command, RequestGang
from ganger_master.core.job_model import JobRecord
from ganger_master.core.placement_leases import ASIDE
from ganger_master.core.queue import GrantedLease as Lease
from ganger_master.core.state import State


class ModelledSchedulers:
    """Runs one `DefaultScheduler` per pending job. `send` passes a command to the core and returns its answer."""

    def __init__(self, state: State, send: Callable[[Command], object]) -> None:
        self._state = state
        self._send = send
        # By job number; a scheduler keeps its delay-scheduling state while its job is pending.
        self._schedulers: dict[int, DefaultScheduler] = {}
        # `view.freed` at the last release of resources; batches of jobs over quota since, and when the last one began.
        self._freed = self._looks = 0
        self._looked_at = 0.0

    def take(self, turns: Iterable[int], now: float) -> None:
        for number in turns:
            lease = self._state.leases.get(number)
            if lease is not None:
                self._ask(lease, now)

    def wake_at(self, wake: float | None) -> float | None:
        """Return when the core next needs a tick, given its own wish `wake`.

        The core offers leases to jobs over quota in batches, one per second. Once every such job was offered one,
        further batches are futile until resources are released, so no tick is needed.
        """
        state = self._state
        if len(state.queue.aside) <= ASIDE:
            return wake
        if state.view.freed != self._freed:
            self._freed, self._looked_at, self._looks = state.view.freed, state.queue.aside_at, 0
            return state.wake_at
        if state.queue.aside_at != self._looked_at:
            self._looked_at = state.queue.aside_at
            self._looks += 1
        is_vain = not state.leases and self._looks > len(state.queue.aside) // ASIDE + 1
        return None if is_vain else wake

    def _ask(self, lease: Lease, now: float) -> None:
        state, number = self._state, lease.number
        job = state.jobs[number]
        scheduler = self._schedulers.get(number)
        if scheduler is None:
            scheduler = self._schedulers[number] = DefaultScheduler()
        turn = _turn_of(lease, job, now)
        proposal: Proposal | None = scheduler.propose(turn, state.view)
        while proposal is not None:
            answer = self._send(_request(lease, proposal, state.view.version))
            if isinstance(answer, answers.Approved):
                del self._schedulers[number]
                return
            assert isinstance(answer, answers.Rejected)
            if not answer.turn_kept:
                return
            proposal = scheduler.on_rejected(turn, state.view, answer.refusals)


def _turn_of(lease: Lease, job: JobRecord, now: float) -> PlacementLease:
    return PlacementLease(
        turn=lease.turn,
        job=job.name,
        revision=lease.revision,
        shape=job.shape,
        lease_s=lease.expires - now,
        rank=lease.rank,
        waited_s=now - job.pending_since,
        reserved_nodes=lease.reserved_nodes,
        suggested=lease.suggested,
    )


def _request(lease: Lease, proposal: Proposal, view_version: int) -> RequestGang:
    return RequestGang(
        lease.number,
        lease.revision,
        proposal.candidates,
        lease.turn,
        blockers=proposal.blockers,
        view_version=view_version,
    )
