"""The default job scheduler of every simulated job: asked when it is its job's turn, and answered at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ganger.scheduling.job_scheduler import DefaultScheduler, PlacementLease, Proposal

from ganger_master.core import answers
from ganger_master.core.commands import Command, RequestGang
from ganger_master.core.model import JobRecord
from ganger_master.core.placement_leases import ASIDE
from ganger_master.core.queue import GrantedLease as Lease
from ganger_master.core.state import State


class ModelledSchedulers:
    """`send` gives the core a command and returns its answer."""

    def __init__(self, state: State, send: Callable[[Command], object]) -> None:
        self._state = state
        self._send = send
        # What a scheduler learned while its job waits.
        self._schedulers: dict[int, DefaultScheduler] = {}
        # The view when something got free last, and how often others were looked at since, the last time when.
        self._freed = self._looks = 0
        self._looked_at = 0.0

    def take(self, turns: Iterable[int], now: float) -> None:
        for number in turns:
            lease = self._state.turns.get(number)
            if lease is not None:
                self._ask(lease, now)

    def wake_at(self, wake: float | None) -> float | None:
        """When time is to pass though nothing happens, if the core says so now: those beyond their users' quotas it
        asks by turns, second by second, but once all were asked nobody gets anything before something is free."""
        state = self._state
        if len(state.aside) <= ASIDE:
            return wake
        if state.view.freed != self._freed:
            self._freed, self._looked_at, self._looks = state.view.freed, state.aside_at, 0
            return state.wake_at
        if state.aside_at != self._looked_at:
            self._looked_at = state.aside_at
            self._looks += 1
        is_vain = not state.turns and self._looks > len(state.aside) // ASIDE + 1
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
        lease_seconds=lease.expires - now,
        rank=lease.rank,
        waited_seconds=now - job.pending_since,
        reserved_nodes=lease.reserved_nodes,
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
