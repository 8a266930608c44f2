"""Modelled nodes: they start, stop and end gangs after the time that takes, and report as daemons do.

A gang starts and stops on all of its nodes at once, so it is followed as one; each of its nodes reports its own part.
What a report leaves out is as it was: it speaks of no desired version, so that absence means nothing.
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
    GangIntent,
    JobRecord,
    ObservedPhase,
    Outcome,
    OutcomeKind,
    SuspendLevel,
)
from ganger_master.core.state import State
from ganger_master.simulator.inputs import SwitchCosts
from ganger_master.simulator.replay import Clock

_OFFERED = Capabilities(pause=True, offload=True, checkpoint=True, known=True, resize=True)
_NONE = Outcome()
# To look up a member of an enumeration takes Python 3.11 as long as a call, and these are asked for all the time.
_RUN, _PREPARE, _PARK = GangIntent.RUN, GangIntent.PREPARE, GangIntent.PARK
_RUNNING, _PARKED = ObservedPhase.RUNNING, ObservedPhase.PARKED
_AT_REST = (_PARKED, ObservedPhase.READY)
_NO_LEVEL, _TO_STORAGE = SuspendLevel.NONE, SuspendLevel.CHECKPOINT


@dataclass(slots=True)
class _Followed:
    """A gang on its nodes. `turn` rises with every order, so that what was begun for an older one comes to nothing."""

    gang: Gang
    job: JobRecord
    turn: int = 0
    is_training: bool = False
    # It did its last step, and its state is on its way to where it rests.
    is_saving: bool = False
    # When it will have finished, if nobody stops it.
    finishes: float = math.inf
    is_told_to_stop: bool = False
    # Since when it holds its devices; NaN while it holds none.
    held_since: float = math.nan
    # Where it rests, or what of a move it has told.
    phase: ObservedPhase = ObservedPhase.NONE
    stop_step: int = 0
    # Of a destination: when its processes are there to take the state over; never before the source is gone.
    there_s: float = -math.inf
    # Of its last step before it came to rest, and of its first one since it trains.
    last_step: float = 0.0
    first_step: float = 0.0


class NodeModel:
    """`send` gives the core a command. `begins(job number, gang, held since)` is called when a gang's first step is
    done, and when it goes on, and returns when it will have finished; `changes(job number, gang)` when it trains on
    with other cores or memory, and returns the same, None if it makes no difference; `halts(job number, gang)` when it
    has done its last step for now and has yet to save its state; `ends(job number, gang, held since, finished)` when it
    is gone, and when it has given its devices back but may go on; `moved(job number, gang)` when it goes on elsewhere,
    or with another number of devices.

    `peak_bytes(job number)`: what daemons measure of each of its devices; 0: they measure nothing."""

    def __init__(
        self,
        clock: Clock,
        state: State,
        costs: SwitchCosts,
        send: Callable[[Command], object],
        begins: Callable[[int, Gang, float], float],
        halts: Callable[[int, Gang], None],
        ends: Callable[[int, Gang, float, bool], None],
        changes: Callable[[int, Gang], float | None],
        moved: Callable[[int, Gang], None],
        peak_bytes: Callable[[int], int] = lambda number: 0,
    ) -> None:
        self._clock = clock
        self._state = state
        self._costs = costs
        self._send = send
        self._begins = begins
        self._halts = halts
        self._ends = ends
        self._changes = changes
        self._moved = moved
        self._peak_bytes = peak_bytes
        self._followed: dict[int, _Followed] = {}
        # By node and epoch.
        self._unsaid: dict[str, dict[int, ObservedGang]] = {}

    @property
    def longest_stop_s(self) -> float:
        """Seconds after which a gang that was told to stop is gone."""
        return self._costs.suspend_s

    @property
    def switch_s(self) -> float:
        """Seconds from the order to one gang until the next trains in its place."""
        costs = self._costs
        if any(made.device_memory_bytes for made in self._state.configuration_sets.values()):
            return costs.offload_s + costs.restore_s
        # Of whose memory nothing is known, no arena is reserved: everybody is parked on storage.
        return costs.suspend_s + costs.start_s + costs.resume_s

    def follow(self, number: int) -> None:
        """The job changed: its gangs do what is wanted of them now."""
        for epoch in self._state.gangs_of.get(number, ()):
            gang = self._state.gangs[epoch]
            followed = self._followed.get(epoch)
            if followed is None:
                if gang.intent is _RUN:
                    self._start(gang, self._state.jobs[number])
                elif gang.intent is _PREPARE:
                    self._prepare(gang, self._state.jobs[number])
            elif gang.master_sequence != followed.gang.master_sequence:
                followed.gang = gang
                self._obey(followed)
            elif gang.intent is _PREPARE:
                self._fetch(followed)

    def retimed(self, number: int) -> None:
        """Somebody came to its devices, or left: it goes on at another rate."""
        followed = self._followed[self._state.jobs[number].epoch]
        finishes = self._changes(number, followed.gang)
        if finishes is not None and followed.is_training:
            followed.finishes = finishes
            self._at(finishes, followed, self._finished)

    def _start(self, gang: Gang, job: JobRecord) -> None:
        followed = self._followed[gang.epoch] = _Followed(gang, job, held_since=self._clock.now)
        takes = self._costs.start_s + (self._costs.resume_s if gang.restore.checkpoint_path else 0.0)
        self._later(takes, followed, self._trains)

    def _trains(self, followed: _Followed) -> None:
        followed.is_training, followed.is_saving = True, False
        followed.first_step = self._clock.now
        self._report(followed, ObservedPhase.RUNNING)
        followed.finishes = self._begins(followed.job.number, followed.gang, followed.held_since)
        self._at(followed.finishes, followed, self._finished)

    def _obey(self, followed: _Followed) -> None:
        intent, rests = followed.gang.intent, followed.phase in _AT_REST
        if intent is _RUN and rests:
            self._go_on(followed)
        elif intent is _RUN:
            self._retune(followed)
        elif intent is _PREPARE:
            self._fetch(followed)
        elif rests:
            self._rest_deeper(followed)
        elif not followed.is_told_to_stop:
            self._stop(followed)

    def _retune(self, followed: _Followed) -> None:
        """Other cores, or more or less memory, are there at once, and a stop that is not done yet is called off."""
        was_stopping, followed.is_told_to_stop = followed.is_told_to_stop, False
        if followed.is_training:
            finishes = self._changes(followed.job.number, followed.gang)
            if finishes is not None:
                followed.finishes = finishes
            self._at(followed.finishes, followed, self._finished)
            self._report(followed, ObservedPhase.RUNNING)
        elif was_stopping:
            self._later(0.0 if followed.is_saving else self._costs.start_s, followed, self._trains)

    def _finished(self, followed: _Followed) -> None:
        self._gone(followed, OutcomeKind.DONE)

    def _stop(self, followed: _Followed) -> None:
        """At its next boundary, which is at once. Then it does no step, but has its devices until its state is kept."""
        if followed.is_training and followed.finishes <= self._clock.now:
            # It has finished before it has stopped.
            return
        followed.is_told_to_stop = True
        gang = followed.gang
        parks = gang.intent is _PARK
        rests = gang.park_level < _TO_STORAGE if parks else gang.intent is GangIntent.HAND_OVER
        keeps = parks or gang.checkpoint_first
        takes = self._costs.offload_s if rests else self._costs.suspend_s if keeps else 0.0
        if followed.is_training:
            followed.is_training, followed.is_saving, followed.finishes = False, True, math.inf
            followed.last_step = self._clock.now
            self._halts(followed.job.number, gang)
        else:
            takes = 0.0
        self._later(takes, followed, self._rests if rests else self._stopped)

    def _rests(self, followed: _Followed) -> None:
        """Its state is in host memory, for the same gang to go on from, or for another one."""
        followed.is_told_to_stop = followed.is_saving = False
        followed.phase = ObservedPhase.PARKED
        followed.stop_step = followed.gang.stop_sequence
        self._leaves(followed)
        self._rest_deeper(followed)

    def _rest_deeper(self, followed: _Followed) -> None:
        """It has been told more while it came to rest, or is told so now."""
        gang = followed.gang
        if gang.intent is GangIntent.STOP or gang.park_level is _TO_STORAGE:
            self._later(0.0 if gang.intent is GangIntent.STOP else self._costs.suspend_s, followed, self._stopped)
        else:
            self._report(followed, followed.phase)

    def _go_on(self, followed: _Followed) -> None:
        """From host memory: its own, or what was moved here, whose time has been counted."""
        moved = followed.phase is ObservedPhase.READY
        followed.phase = ObservedPhase.NONE
        if math.isnan(followed.held_since):
            followed.held_since = self._clock.now
        if moved:
            self._moved(followed.job.number, followed.gang)
        self._later(0.0 if moved else self._costs.restore_s, followed, self._trains)

    def _prepare(self, gang: Gang, job: JobRecord) -> None:
        """Everything is made ready while the source trains on, or comes to rest: it may need the devices for itself
        alone."""
        followed = self._followed[gang.epoch] = _Followed(gang, job)
        source = self._followed.get(gang.restore.parked_epoch)
        if source is not None and source.phase is ObservedPhase.PARKED:
            # What that takes, a start included, is the cost of a move.
            self._fetch(followed, self._clock.now)
        elif gang.restore.alone:
            followed.there_s = math.inf
        else:
            followed.there_s = self._clock.now + self._costs.start_s
            self._at(followed.there_s, followed, self._prepared)

    def _prepared(self, followed: _Followed) -> None:
        self._report(followed, ObservedPhase.PREPARED)

    def _fetch(self, followed: _Followed, begun: float = -math.inf) -> None:
        """The state is fetched once the source rests; the move's time counts from its last step, if not from later."""
        source = self._followed.get(followed.gang.restore.parked_epoch)
        if source is not None and source.phase is ObservedPhase.PARKED and math.isnan(followed.held_since):
            followed.held_since = self._clock.now
            followed.stop_step = source.stop_step
            there_s = followed.there_s
            if math.isinf(there_s) and there_s > 0.0:
                there_s = self._clock.now + self._costs.start_s
            begun = max(begun, there_s, source.last_step)
            self._at(max(self._clock.now, begun + self._costs.move_s), followed, self._ready)

    def _ready(self, followed: _Followed) -> None:
        followed.phase = ObservedPhase.READY
        self._report(followed, ObservedPhase.READY)

    def _stopped(self, followed: _Followed) -> None:
        yields = followed.gang.intent is _PARK
        self._gone(followed, OutcomeKind.YIELDED if yields else OutcomeKind.STOPPED)

    def _gone(self, followed: _Followed, kind: OutcomeKind) -> None:
        del self._followed[followed.gang.epoch]
        self._leaves(followed, kind is OutcomeKind.DONE)
        self._report(followed, ObservedPhase.ENDED, Outcome(kind))

    def _leaves(self, followed: _Followed, finished: bool = False) -> None:
        if not math.isnan(followed.held_since):
            self._ends(followed.job.number, followed.gang, followed.held_since, finished)
            followed.held_since = math.nan

    def _report(self, followed: _Followed, phase: ObservedPhase, outcome: Outcome = _NONE) -> None:
        gang, job = followed.gang, followed.job
        runs, parked, checkpoint = phase is _RUNNING, phase is _PARKED, None
        if outcome.kind is OutcomeKind.YIELDED:
            checkpoint = Checkpoint(gang.epoch, gang.epoch, f"{job.uid}/{gang.epoch}")
        for piece in gang.pieces:
            node = piece.claim.node
            self._unsaid.setdefault(node, {})[gang.epoch] = ObservedGang(
                job=job.number,
                uid=job.uid,
                epoch=gang.epoch,
                phase=phase,
                master_sequence=gang.master_sequence,
                level=gang.park_level if parked else _NO_LEVEL,
                stop_sequence=gang.stop_sequence,
                stop_step=followed.stop_step,
                outcome=outcome,
                checkpoint=checkpoint,
                peak_device_bytes=self._peak_bytes(job.number) if runs else 0,
                capabilities=_OFFERED,
                device_mask=piece.claim.device_mask,
                last_step_time=followed.last_step if parked else 0.0,
                first_step_time=followed.first_step if runs else 0.0,
            )

    def report(self) -> bool:
        """Every node with news tells it; whether any had."""
        if not self._unsaid:
            return False
        said, self._unsaid = self._unsaid, {}
        for node, observed in said.items():
            self.report_of(node, tuple(observed.values()))
        return True

    def report_of(self, node: str, observed: tuple[ObservedGang, ...] = ()) -> None:
        session = self._state.nodes[node].session
        # No report overtakes another one here, so they need no numbers.
        self._send(Observe(node, session, 1, 0, observed, storage_proved=True))

    def _later(self, seconds: float, followed: _Followed, act: Callable[[_Followed], None]) -> None:
        if seconds:
            self._at(self._clock.now + seconds, followed, act)
            return
        # What takes no time has happened before anybody could look.
        followed.turn += 1
        act(followed)

    def _at(self, time: float, followed: _Followed, act: Callable[[_Followed], None]) -> None:
        followed.turn += 1
        turn = followed.turn
        self._clock.at(time, lambda: act(followed), lambda: followed.turn != turn)
