"""Modelled nodes: execute orders of the core after the modelled delays, and report as daemons do.

A gang changes on all of its nodes at the same time, so the model follows gangs; each node reports its own part. Reports
acknowledge no desired version, so a gang missing from a report counts as unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from ganger_master.core.commands import Command, Observe, ObservedGang, ObservedSlices
from ganger_master.core.gang_model import Gang, GangIntent, ObservedPhase, Outcome, OutcomeKind
from ganger_master.core.job_model import Capabilities, Checkpoint, JobRecord, SuspendLevel
from ganger_master.core.state import State
from ganger_master.simulator.inputs import SwitchCosts
from ganger_master.simulator.time_slices import Clock, SlicedPart, SliceGroup

# Of any gang that is launched.
_PIDS = (1,)
_OFFERED = Capabilities(pause=True, offload=True, checkpoint=True, known=True, resize=True)
_NONE = Outcome()
# Looking up an enumeration member costs Python 3.11 a call, and these are used in every step.
_RUN, _PREPARE, _PARK = GangIntent.RUN, GangIntent.PREPARE, GangIntent.PARK
_RUNNING, _PARKED = ObservedPhase.RUNNING, ObservedPhase.PARKED
_AT_REST = (_PARKED, ObservedPhase.READY)
_NO_LEVEL, _TO_STORAGE = SuspendLevel.NONE, SuspendLevel.CHECKPOINT


@dataclass(slots=True)
class _Followed:
    """A gang on its nodes. `turn` rises with every scheduled action and makes the earlier ones void."""

    gang: Gang
    job: JobRecord
    turn: int = 0
    is_training: bool = False
    # It did its last step and is saving its state.
    is_saving: bool = False
    # Time of its end, unless it is stopped before.
    finishes: float = math.inf
    is_stopping: bool = False
    # Start of holding its devices; NaN while it holds none.
    held_since: float = math.nan
    # Its parked phase, or the phase of a migration that it last reported.
    phase: ObservedPhase = ObservedPhase.NONE
    stop_step: int = 0
    # For a destination: when its processes are ready to fetch the state; infinite: not before the source is gone.
    there_s: float = -math.inf
    # Times of its last step before it parked, and of its first step since it trains.
    last_step: float = 0.0
    first_step: float = 0.0
    # Its time-slice group; 0: none.
    group: int = 0


class ModelledJobs(Protocol):
    """The jobs of a replay, which modelled nodes run. Calls have the job's number and its gang."""

    def send(self, command: Command) -> object: ...
    # Record the first step after a start or a restore; return the time of the job's end.
    def begins(self, number: int, gang: Gang, held_since: float) -> float: ...
    # Record that the gang continues with other cores, memory or company; return the new end; None: unchanged.
    def changes(self, number: int, gang: Gang) -> float | None: ...
    # Return when the job, which trains, comes to the end of an epoch; the present time if it is not stopped there only.
    def epoch_end(self, number: int) -> float: ...
    # Record its last step for now. It starts to save its state.
    def halts(self, number: int, gang: Gang) -> None: ...
    # Record that the gang released its devices. `finished`: the job is done.
    def ends(self, number: int, gang: Gang, held_since: float, finished: bool) -> None: ...
    # Record that the gang continues on other devices, or with another number of them.
    def moves(self, number: int, gang: Gang) -> None: ...
    # Record for how long a time-sliced gang held devices and trained, and how often it was parked. Return the seconds
    # of training until its end.
    def sliced(self, number: int, gang: Gang, held_s: float, trained_s: float, stops: int) -> float: ...
    # Record that the job has devices for a slice from this time on.
    def slice_starts(self, number: int, time: float) -> None: ...
    # Record that a gang trains in its first slice.
    def slice_begins(self, number: int, gang: Gang) -> None: ...
    # Return when a gang that ends at this time releases its devices.
    def release(self, time: float) -> float: ...
    # Return the measured memory per device; 0: no measurement.
    def peak_bytes(self, number: int) -> int: ...


class NodeModel:
    """All modelled nodes of a replay."""

    def __init__(self, clock: Clock, state: State, costs: SwitchCosts, replay: ModelledJobs) -> None:
        self._clock = clock
        self._state = state
        self._costs = costs
        self._replay = replay
        self._followed: dict[int, _Followed] = {}
        # By node and epoch.
        self._unreported: dict[str, dict[int, ObservedGang]] = {}
        self._groups: dict[int, SliceGroup] = {}
        # Groups with changes, the number of looks at each, and what nodes are to report of them.
        self._touched: dict[int, None] = {}
        self._looks: dict[int, int] = {}
        self._rows: dict[str, ObservedSlices] = {}

    @property
    def longest_stop_s(self) -> float:
        """Seconds from a stop order until the gang is gone, at most."""
        return self._costs.suspend_s

    @property
    def switch_s(self) -> float:
        """Seconds from the order that stops one gang until the next one trains in its place."""
        return self._costs.offload_s + self._costs.restore_s

    def follow(self, number: int) -> None:
        """Apply the current desired state of the job's gangs."""
        for epoch in self._state.gangs.epochs_of.get(number, ()):
            gang = self._state.gangs[epoch]
            followed = self._followed.get(epoch)
            if (gang.node_set and gang.intent is _RUN) or (followed is not None and followed.group):
                self._follow_slices(gang, followed)
            elif followed is None:
                if gang.intent is _RUN:
                    self._start(gang, self._state.jobs[number])
                elif gang.intent is _PREPARE:
                    self._prepare(gang, self._state.jobs[number])
            elif gang.master_sequence != followed.gang.master_sequence:
                followed.gang = gang
                self._obey(followed)
            elif gang.intent is _PREPARE:
                self._fetch(followed)

    def follow_groups(self) -> None:
        """Apply the current matrices of the time-slice groups whose gangs or matrices have changed."""
        sets, known = self._state.gangs.set_on, self._groups
        for node in self._state.dirty.wants:
            # The core makes a new matrix also where no gang of the group changes, such as after one has left it.
            number = sets.get(node, 0)
            if number in known and self._state.gangs.sets[number].newest.version not in known[number].matrices:
                self._touched[number] = None
        while self._touched:
            number = next(iter(self._touched))
            del self._touched[number]
            group, node_set = self._groups[number], self._state.gangs.sets.get(number)
            if node_set is None or not group.parts:
                self._looks[number] += 1
                if not group.parts:
                    del self._groups[number]
                continue
            group.desire(node_set.active)
            group.desire(node_set.newest)
            self._look(group)

    def sync_groups(self) -> None:
        """Credit all time-sliced gangs with what they have received by now."""
        for group in self._groups.values():
            group.sync(self._clock.now)

    def retimed(self, number: int) -> None:
        """Update its end after a change of the jobs co-located with it."""
        followed = self._followed[self._state.jobs[number].epoch]
        finishes = self._replay.changes(number, followed.gang)
        if finishes is not None and followed.is_training:
            followed.finishes = finishes
            self._train_on(followed)

    # -- time slices -------------------------------------------------------------------------------------------------

    def _follow_slices(self, gang: Gang, followed: _Followed | None) -> None:
        if followed is None:
            followed = self._followed[gang.epoch] = _Followed(gang, self._state.jobs[gang.job])
        followed.gang = gang
        if not (gang.node_set and gang.intent is _RUN):
            self._leave_group(followed)
            return
        group = self._groups.get(gang.node_set)
        if group is None:
            costs, now = self._costs, self._clock.now
            group = self._groups[gang.node_set] = SliceGroup(
                gang.node_set, now, costs.offload_s, costs.offload_s + costs.restore_s
            )
            self._looks[gang.node_set] = 0
        if not followed.group:
            self._join_group(followed, group)
        self._touched[group.number] = None

    def _join_group(self, followed: _Followed, group: SliceGroup) -> None:
        number, gang, now = followed.job.number, followed.gang, self._clock.now
        trained = followed.is_training
        if trained:
            self._replay.halts(number, gang)
        if not math.isnan(followed.held_since):
            self._replay.slice_starts(number, followed.held_since)
            self._replay.sliced(number, gang, now - followed.held_since, 0.0, 0)
        if followed.phase is ObservedPhase.READY:
            self._replay.moves(number, gang)
        part = SlicedPart(
            self._costs.start_s + (self._costs.resume_s if gang.restore.checkpoint_path else 0.0),
            trained or followed.phase in _AT_REST,
            lambda held, trained, stops: self._replay.sliced(number, followed.gang, held, trained, stops),
            lambda time: self._starts_slices(followed, time),
            lambda: self._begins_slices(followed),
            self._replay.release,
            has_begun=trained,
        )
        part.left_s = self._replay.sliced(number, gang, 0.0, 0.0, 0)
        group.sync(now)
        group.parts[gang.epoch] = part
        if trained:
            group.on.add(gang.epoch)
            self._replay.slice_begins(number, gang)
        followed.group, followed.phase = group.number, ObservedPhase.NONE
        followed.is_training = followed.is_saving = followed.is_stopping = False
        followed.held_since, followed.finishes = math.nan, math.inf
        followed.turn += 1

    def _starts_slices(self, followed: _Followed, time: float) -> None:
        self._replay.slice_starts(followed.job.number, time)
        if followed.gang.restore.parked_epoch and not followed.first_step:
            # Only from now on the move costs it something: until then it would have been parked anyhow.
            self._report(followed, ObservedPhase.STARTING)

    def _begins_slices(self, followed: _Followed) -> None:
        followed.first_step = self._clock.now
        self._replay.slice_begins(followed.job.number, followed.gang)
        self._report(followed, ObservedPhase.RUNNING)

    def _take_out(self, followed: _Followed) -> SlicedPart:
        """Take a gang out of its group; it holds its devices if its slice is active."""
        group, epoch = self._groups[followed.group], followed.gang.epoch
        group.sync(self._clock.now)
        self._touched[group.number] = None
        part = group.parts.pop(epoch)
        followed.group = 0
        if epoch in group.on:
            group.on.discard(epoch)
            followed.held_since, followed.is_training = self._clock.now, part.has_begun
        elif part.has_run:
            followed.phase, followed.stop_step = _PARKED, followed.gang.stop_sequence
            followed.last_step = self._clock.now
        return part

    def _leave_group(self, followed: _Followed) -> None:
        part = self._take_out(followed)
        if followed.gang.intent is not _RUN:
            self._obey(followed)
        elif followed.is_training:
            self._trains(followed)
        elif followed.phase in _AT_REST:
            self._go_on(followed)
        else:
            followed.held_since = self._clock.now
            self._later(part.start_s, followed, self._trains)

    def _look(self, group: SliceGroup) -> None:
        """Let a group switch slices as far as it is time, and end the gangs that are done."""
        now, version = self._clock.now, group.position.version
        again_at = group.review(now)
        done = group.finished(now)
        for epoch in done:
            followed = self._followed[epoch]
            self._take_out(followed)
            followed.held_since = now
            self._gone(followed, OutcomeKind.DONE)
        node_set = self._state.gangs.sets.get(group.number)
        if node_set is not None and group.position.version != version:
            position = group.position
            for node in node_set.nodes:
                self._rows[node] = ObservedSlices(
                    group.number, position.version, max(group.matrices), max(0, position.row), group.switch_s
                )
        self._looks[group.number] += 1
        if again_at < math.inf and not done:
            look = self._looks[group.number]
            self._clock.at(again_at, lambda: self._look(group), lambda: self._looks[group.number] != look)

    # -- orders ------------------------------------------------------------------------------------------------------

    def _start(self, gang: Gang, job: JobRecord) -> None:
        followed = self._followed[gang.epoch] = _Followed(gang, job, held_since=self._clock.now)
        takes = self._costs.start_s + (self._costs.resume_s if gang.restore.checkpoint_path else 0.0)
        self._later(takes, followed, self._trains)

    def _trains(self, followed: _Followed) -> None:
        followed.is_training, followed.is_saving = True, False
        followed.first_step = self._clock.now
        self._report(followed, ObservedPhase.RUNNING)
        followed.finishes = self._replay.begins(followed.job.number, followed.gang, followed.held_since)
        self._train_on(followed)

    def _train_on(self, followed: _Followed) -> None:
        """Let it train to its end, or to the end of the epoch at which it is to stop."""
        if followed.gang.stops_at_epoch_end and followed.gang.intent is not _RUN:
            epoch_ends = self._replay.epoch_end(followed.job.number)
            if epoch_ends < followed.finishes:
                self._at(epoch_ends, followed, self._stop)
                return
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
        elif not followed.is_stopping:
            self._stop(followed)

    def _retune(self, followed: _Followed) -> None:
        """Apply changed cores or memory at once, and cancel a stop that is not complete."""
        was_stopping, followed.is_stopping = followed.is_stopping, False
        if followed.is_training:
            finishes = self._replay.changes(followed.job.number, followed.gang)
            if finishes is not None:
                followed.finishes = finishes
            self._train_on(followed)
            self._report(followed, ObservedPhase.RUNNING)
        elif was_stopping:
            self._later(0.0 if followed.is_saving else self._costs.start_s, followed, self._trains)

    def _finished(self, followed: _Followed) -> None:
        self._gone(followed, OutcomeKind.DONE)

    def _stop(self, followed: _Followed) -> None:
        """Stop at the next boundary, which is now, or at the end of its epoch. The gang holds its devices until its
        state is saved."""
        if followed.is_training and followed.finishes <= self._clock.now:
            # It finishes before it stops.
            return
        gang = followed.gang
        waits = followed.is_training and gang.stops_at_epoch_end
        if waits and self._replay.epoch_end(followed.job.number) > self._clock.now:
            self._train_on(followed)
            return
        followed.is_stopping = True
        parks = gang.intent is _PARK
        rests = gang.park_level < _TO_STORAGE if parks else gang.intent is GangIntent.HAND_OVER
        keeps = parks or gang.checkpoint_first
        takes = self._costs.offload_s if rests else self._costs.suspend_s if keeps else 0.0
        if followed.is_training:
            followed.is_training, followed.is_saving, followed.finishes = False, True, math.inf
            followed.last_step = self._clock.now
            self._replay.halts(followed.job.number, gang)
        else:
            takes = 0.0
        self._later(takes, followed, self._rests if rests else self._stopped)

    def _rests(self, followed: _Followed) -> None:
        """Park: the state is in host memory, for this gang to resume or for another one to fetch."""
        followed.is_stopping = followed.is_saving = False
        followed.phase = ObservedPhase.PARKED
        followed.stop_step = followed.gang.stop_sequence
        self._leaves(followed)
        self._rest_deeper(followed)

    def _rest_deeper(self, followed: _Followed) -> None:
        """Apply orders that arrived while it parked or later: stop, or move its state to storage."""
        gang = followed.gang
        if gang.intent is GangIntent.STOP or gang.park_level is _TO_STORAGE:
            self._later(0.0 if gang.intent is GangIntent.STOP else self._costs.suspend_s, followed, self._stopped)
        else:
            self._report(followed, followed.phase)

    def _go_on(self, followed: _Followed) -> None:
        """Resume from host memory; the duration of a migration is already spent."""
        moved = followed.phase is ObservedPhase.READY
        followed.phase = ObservedPhase.NONE
        if math.isnan(followed.held_since):
            followed.held_since = self._clock.now
        if moved:
            self._replay.moves(followed.job.number, followed.gang)
        self._later(0.0 if moved else self._costs.restore_s, followed, self._trains)

    def _prepare(self, gang: Gang, job: JobRecord) -> None:
        """Prepare a destination while the source trains or parks; it may need the devices for itself alone."""
        followed = self._followed[gang.epoch] = _Followed(gang, job)
        source = self._followed.get(gang.restore.parked_epoch)
        if source is not None and source.phase is ObservedPhase.PARKED:
            # The cost of a migration includes the start of the destination.
            self._fetch(followed, self._clock.now)
        elif gang.restore.alone:
            followed.there_s = math.inf
        else:
            followed.there_s = self._clock.now + self._costs.start_s
            self._at(followed.there_s, followed, self._prepared)

    def _prepared(self, followed: _Followed) -> None:
        self._report(followed, ObservedPhase.PREPARED)

    def _fetch(self, followed: _Followed, begun: float = -math.inf) -> None:
        """Fetch the state once the source is parked. The migration's duration counts from the source's last step."""
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
            self._replay.ends(followed.job.number, followed.gang, followed.held_since, finished)
            followed.held_since = math.nan

    def _report(self, followed: _Followed, phase: ObservedPhase, outcome: Outcome = _NONE) -> None:
        gang, job = followed.gang, followed.job
        runs, parked, checkpoint = phase is _RUNNING, phase is _PARKED, None
        if outcome.kind is OutcomeKind.YIELDED:
            checkpoint = Checkpoint(gang.epoch, gang.epoch, f"{job.uid}/{gang.epoch}")
        for piece in gang.pieces:
            node = piece.claim.node
            self._unreported.setdefault(node, {})[gang.epoch] = ObservedGang(
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
                peak_device_bytes=self._replay.peak_bytes(job.number) if runs else 0,
                capabilities=_OFFERED,
                device_mask=piece.claim.device_mask,
                last_step_time=followed.last_step if parked else 0.0,
                first_step_time=followed.first_step if runs else 0.0,
                pids=_PIDS if gang.node_set and (runs or phase is ObservedPhase.STARTING) else (),
            )

    def report(self) -> bool:
        """Send the reports of all nodes with changes. Return whether there were any."""
        if not (self._unreported or self._rows):
            return False
        reports, self._unreported = self._unreported, {}
        rows, self._rows = self._rows, {}
        for node, observed in reports.items():
            self.report_of(node, tuple(observed.values()))
            # A gang that has left its group makes another matrix.
            number = self._state.gangs.set_on.get(node)
            if number in self._groups:
                self._touched[number] = None
        for node, seen in rows.items():
            self.report_of(node, (), (seen,))
        return True

    def report_of(
        self, node: str, observed: tuple[ObservedGang, ...] = (), rows: tuple[ObservedSlices, ...] = ()
    ) -> None:
        session = self._state.nodes[node].session
        # Reports cannot overtake each other here, so all have the same number.
        self._replay.send(Observe(node, session, 1, 0, observed, storage_proved=True, rows=rows))

    def _later(self, seconds: float, followed: _Followed, act: Callable[[_Followed], None]) -> None:
        if seconds:
            self._at(self._clock.now + seconds, followed, act)
            return
        # An action without delay takes effect before any other component can read the state.
        followed.turn += 1
        act(followed)

    def _at(self, time: float, followed: _Followed, act: Callable[[_Followed], None]) -> None:
        followed.turn += 1
        turn = followed.turn
        self._clock.at(time, lambda: act(followed), lambda: followed.turn != turn)
