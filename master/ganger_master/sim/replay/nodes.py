"""Modelled nodes: they start, stop and end gangs after the time that takes, and report as daemons do.

A gang starts and stops on all of its nodes at once, so it is followed as one; each of its nodes reports its own part,
in a complete observed set.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from ganger_master.core.commands import Command, Observe, ObservedGang
from ganger_master.core.model import (
    Capabilities,
    Checkpoint,
    Gang,
    Intent,
    Job,
    ObservedPhase,
    Outcome,
    OutcomeKind,
)
from ganger_master.core.state import State
from ganger_master.sim.replay.clock import Clock
from ganger_master.sim.replay.options import SwitchCosts

_OFFERED = Capabilities(checkpoint=True, known=True, resize=True)
_NONE = Outcome()


@dataclass(slots=True)
class _Followed:
    """A gang on its nodes. `turn` rises with every order, so that what was begun for an older one comes to nothing."""

    gang: Gang
    job: Job
    turn: int = 0
    is_training: bool = False
    # When it will have finished, if nobody stops it.
    finishes: float = math.inf
    is_told_to_stop: bool = False


class Nodes:
    """`send` gives the core a command. `begins(job number, gang)` is called when a gang's first step is done and
    returns when it will have finished; `changes(job number, gang)` when it trains on with other cores or memory, and
    returns the same, None if it makes no difference; `ends(job number, gang, finished)` when it is gone."""

    def __init__(
        self,
        clock: Clock,
        state: State,
        costs: SwitchCosts,
        send: Callable[[Command], object],
        begins: Callable[[int, Gang], float],
        ends: Callable[[int, Gang, bool], None],
        changes: Callable[[int, Gang], float | None],
    ) -> None:
        self._clock = clock
        self._state = state
        self._costs = costs
        self._send = send
        self._begins = begins
        self._ends = ends
        self._changes = changes
        self._followed: dict[int, _Followed] = {}
        self._observed: dict[str, dict[int, ObservedGang]] = {}
        self._observation: dict[str, int] = {}
        self._unsaid: dict[str, None] = {}

    @property
    def longest_stop_s(self) -> float:
        """Seconds after which a gang that was told to stop is gone."""
        return self._costs.suspend_s

    def follow(self, number: int) -> None:
        """The job changed: its gangs do what is wanted of them now."""
        for epoch in self._state.gangs_of.get(number, ()):
            gang = self._state.gangs[epoch]
            followed = self._followed.get(epoch)
            if followed is None:
                if gang.intent is Intent.RUN:
                    self._start(gang, self._state.jobs[number])
            elif gang.intent is not Intent.RUN:
                if not followed.is_told_to_stop:
                    followed.gang = gang
                    self._stop(followed)
            elif gang.master_sequence != followed.gang.master_sequence:
                self._obey(followed, gang)

    def _start(self, gang: Gang, job: Job) -> None:
        followed = self._followed[gang.epoch] = _Followed(gang, job)
        takes = self._costs.start_s + (self._costs.resume_s if gang.restore.checkpoint_path else 0.0)
        self._later(takes, followed, self._trains)

    def _trains(self, followed: _Followed) -> None:
        followed.is_training = True
        self._report(followed, ObservedPhase.RUNNING)
        followed.finishes = self._begins(followed.job.number, followed.gang)
        self._at(followed.finishes, followed, self._finished)

    def _obey(self, followed: _Followed, gang: Gang) -> None:
        """Other cores, or more or less memory, are there at once."""
        followed.gang = gang
        if followed.is_training:
            finishes = self._changes(followed.job.number, gang)
            if finishes is not None:
                followed.finishes = finishes
                self._at(finishes, followed, self._finished)
            self._report(followed, ObservedPhase.RUNNING)

    def _finished(self, followed: _Followed) -> None:
        self._gone(followed, OutcomeKind.DONE)

    def _stop(self, followed: _Followed) -> None:
        followed.is_told_to_stop = True
        keeps = followed.gang.intent is Intent.PARK or followed.gang.checkpoint_first
        takes = self._costs.suspend_s if keeps and followed.is_training else 0.0
        if followed.finishes > self._clock.now + takes:
            self._later(takes, followed, self._stopped)
        # Else it has finished before it has stopped.

    def _stopped(self, followed: _Followed) -> None:
        yields = followed.gang.intent is Intent.PARK
        self._gone(followed, OutcomeKind.YIELDED if yields else OutcomeKind.STOPPED)

    def _gone(self, followed: _Followed, kind: OutcomeKind) -> None:
        del self._followed[followed.gang.epoch]
        self._ends(followed.job.number, followed.gang, kind is OutcomeKind.DONE)
        self._report(followed, ObservedPhase.ENDED, Outcome(kind))

    def _report(self, followed: _Followed, phase: ObservedPhase, outcome: Outcome = _NONE) -> None:
        gang, job = followed.gang, followed.job
        checkpoint = None
        if outcome.kind is OutcomeKind.YIELDED:
            checkpoint = Checkpoint(gang.epoch, gang.epoch, f"{job.uid}/{gang.epoch}")
        for piece in gang.pieces:
            node = piece.claim.node
            self._unsaid[node] = None
            self._observed.setdefault(node, {})[gang.epoch] = ObservedGang(
                job=job.number,
                uid=job.uid,
                epoch=gang.epoch,
                phase=phase,
                master_sequence=gang.master_sequence,
                stop_sequence=gang.stop_sequence,
                outcome=outcome,
                checkpoint=checkpoint,
                capabilities=_OFFERED,
                device_mask=piece.claim.device_mask,
            )

    def report(self) -> bool:
        """Every node with news tells its complete observed set; whether any had."""
        if not self._unsaid:
            return False
        said, self._unsaid = self._unsaid, {}
        for node in said:
            observed = self._observed.get(node, {})
            self.report_of(node, tuple(observed.values()))
            # What has ended is told once.
            for epoch in [gang.epoch for gang in observed.values() if gang.phase is ObservedPhase.ENDED]:
                del observed[epoch]
        return True

    def report_of(self, node: str, observed: tuple[ObservedGang, ...] = ()) -> None:
        self._observation[node] = observation = self._observation.get(node, 0) + 1
        session = self._state.nodes[node].session
        self._send(Observe(node, session, observation, 0, observed, storage_proved=True))

    def _later(self, seconds: float, followed: _Followed, act: Callable[[_Followed], None]) -> None:
        self._at(self._clock.now + seconds, followed, act)

    def _at(self, time: float, followed: _Followed, act: Callable[[_Followed], None]) -> None:
        followed.turn += 1
        turn = followed.turn
        self._clock.at(time, lambda: act(followed), lambda: followed.turn != turn)
