"""The master under virtual time: the production core, a slow store, crashes that forget what was not stored."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
from faultsim.checkers import RuleBrokenError
from faultsim.engine import Engine
from faultsim.faults import Faults
from faultsim.restored_state import differences
from faultsim.state_invariants import violations
from ganger_master.core import machine
from ganger_master.core.answers import Answer
from ganger_master.core.availability import ClockReading, covers, noticed
from ganger_master.core.commands import Answer as PollAnswer
from ganger_master.core.commands import Command, Marks, NoteEnds, OpenStore, RecordedEnd, Tick
from ganger_master.core.desired_projection import DesiredSet
from ganger_master.core.events import ELEMENT_TYPES, Effects, Event, HistoryRow, StoredChanges
from ganger_master.core.job_model import JobRecord
from ganger_master.core.node_model import Counters
from ganger_master.core.queue import GrantedLease
from ganger_master.core.settings import CoreSettings
from ganger_master.core.state import State
from ganger_master.core.state_image import restored


@dataclass(slots=True, eq=False)
class Released:
    """Effects of one command, with what they speak of as it was then."""

    changes: StoredChanges
    answer: Answer
    reply: Callable[[Answer], None] | None
    history: list[HistoryRow] = field(default_factory=list)
    desired: dict[str, DesiredSet] = field(default_factory=dict)
    turns: list[GrantedLease] = field(default_factory=list)
    wake_at: float | None = None


@dataclass(slots=True)
class SimStore:
    """Stored elements, and the generation of the master that may write."""

    elements: dict[tuple[str, str], bytes] = field(default_factory=dict)
    generation: int = 0


class CommandRecorder(Protocol):
    """The recorder of decisions (`decision_log.recorder`)."""

    def start_over(self, state: State, now: float, cause: str) -> None: ...

    def command(self, now: float, command: Command, answer: Answer, happened: Sequence[Event]) -> None: ...

    def batch(self, now: float, effects: Effects, turns: Iterable[GrantedLease]) -> None: ...


class SimMaster:
    """`on_news(node, desired set)`, `on_turns(turns)` and `on_history(row)` are called once what caused them is
    durable."""

    def __init__(
        self,
        engine: Engine,
        settings: CoreSettings,
        faults: Faults,
        on_news: Callable[[str, DesiredSet], None],
        on_turns: Callable[[list[GrantedLease]], None],
        on_history: Callable[[HistoryRow], None] = lambda row: None,
        store: SimStore | None = None,
    ) -> None:
        self.engine = engine
        self.settings = settings
        self.faults = faults
        self.on_news = on_news
        self.on_turns = on_turns
        self.on_history = on_history
        self.state = State(settings, engine.now)
        self.state.counters.store = "simulated"
        # Files beside the database, not part of a copy of it: its next ids, and how jobs ended.
        self.marks = Marks()
        self.ended: dict[str, RecordedEnd] = {}
        self._notes_ends = False
        self.store = store or SimStore()
        self.store.generation += 1
        self.durable = self.store.elements
        self._generation = self.store.generation
        self._verified_at = -math.inf
        self.history: list[HistoryRow] = []
        self.is_up = True
        self.incarnation = 0
        self.clock_offset = 0.0
        self._looked = self._look()
        # What nodes may be told: committed desired sets only.
        self.committed: dict[str, DesiredSet] = {}
        self.recorder: CommandRecorder | None = None
        # When the newest commit begins, and when it ends.
        self._next_commit = self._last_commit = engine.now
        # Decided, and not durable yet.
        self._in_flight: list[Released] = []
        # The newest turn that was let out.
        self._newest_sent = 0
        # When the alarm that is set is due, by the engine.
        self._due: float | None = None

    def now(self) -> float:
        return self.engine.now + self.clock_offset

    def call(self, command: Command, reply: Callable[[Answer], None] | None = None) -> None:
        """Decides and applies at once, answers once durable; a master that is down answers nothing."""
        if not self.is_up:
            return
        self._note_clock()
        now = self.now()
        step = machine.step(self.state, command, now)
        # Without events nothing is other than it was.
        found = violations(self.state) if step.events else []
        if found:
            raise RuleBrokenError(f"after {type(command).__name__}: {'; '.join(found)}")
        released = self._released(step.answer, step.effects, reply)
        if self.recorder is not None:
            self.recorder.command(now, command, step.answer, step.events)
            if step.events:
                self.recorder.batch(now, step.effects, released.turns)
        self._commit(released)
        self._note_ends()

    def _note_ends(self) -> None:
        """Read the files beside the database, if a restore needs them."""
        if self.state.counters.restoring is None or self.state.ends is not None or self._notes_ends:
            return
        self._notes_ends = True
        incarnation = self.incarnation

        def note() -> None:
            if incarnation == self.incarnation:
                self._notes_ends = False
                self.call(NoteEnds(dict(self.ended)))

        self.engine.after(self.engine.between(0.1, 2.0), note)

    def answer_poll(self, command: PollAnswer, received_at: float, reply: Callable[[Answer], None]) -> None:
        """Extend a node's lease, if the store is known to be this master's."""
        if not covers(self.settings, self._verified_at, received_at):
            if self.store.generation != self._generation:
                self._end_fenced()
                return
            self._verified_at = self.engine.now
        self.call(command, reply)

    def take_over(self) -> None:
        """Start on what a former master has stored; that one may still run, unaware of this one."""
        self._go_on(self._restore(self.durable), "the master was started", Tick())

    def _end_fenced(self) -> None:
        self._in_flight.clear()
        self.is_up = False
        self.incarnation += 1

    def set_clock(self) -> None:
        """While it runs; it looks at its clock every few seconds, and before whatever it is told."""
        self._jump()
        self.engine.after(self.engine.between(0.0, 5.0), self._note_clock)

    def _jump(self) -> None:
        jump = self.faults.clock_jump_seconds
        self.clock_offset += self.engine.between(-jump, jump)

    def _look(self) -> ClockReading:
        return ClockReading(self.now(), self.engine.now)

    def _note_clock(self) -> None:
        before, self._looked = self._looked, self._look()
        # As if it had looked all the while: here it never stands still.
        passed = self._looked.steady - before.steady
        tick = noticed(ClockReading(before.wall + passed, self._looked.steady), self._looked)
        if tick is not None and self.is_up:
            self.call(tick)

    def crash(self, away_seconds: float) -> None:
        """Forgets everything that is not durable and comes back, its clock perhaps elsewhere."""
        if not self.is_up:
            return
        self.check_restorable()
        self._in_flight.clear()
        self.is_up = False
        self.incarnation += 1
        incarnation = self.incarnation

        def restart() -> None:
            # An operator may have started it on a restored database meanwhile.
            if incarnation == self.incarnation:
                self._restart()

        self.engine.after(away_seconds, restart)

    def restore(self, copy: Mapping[tuple[str, str], bytes], opened: OpenStore) -> None:
        """Stop, and start on an older copy of the database. `opened`: what it finds beside it."""
        self._in_flight.clear()
        self.incarnation += 1
        self.durable = self.store.elements = dict(copy)
        self._go_on(self._restore(self.durable), "the database was restored", opened)

    def _restart(self) -> None:
        self._jump()
        self._looked = self._look()
        state = self._restore(self.durable)
        opened = OpenStore("", marks=self.marks) if state.counters.restoring is not None else Tick()
        self._go_on(state, "the master was started again", opened)

    def _go_on(self, state: State, cause: str, first: Command) -> None:
        self.state = state
        self._notes_ends = False
        self.committed = dict(self.state.desired)
        self.is_up = True
        self._next_commit = self._last_commit = self.engine.now
        self._due = None
        self._newest_sent = 0
        found = violations(self.state)
        if found:
            raise RuleBrokenError(f"after a restart: {'; '.join(found)}")
        if self.recorder is not None:
            self.recorder.start_over(self.state, self.now(), cause)
        self.call(first)

    def _lose_commits(self) -> None:
        """The store refused the batches in flight, and their callers with them."""
        self._in_flight.clear()
        self.incarnation += 1
        state = self._restore(self.durable, self.state)
        self._go_on(state, "the state was read from the store", Tick(looks_again=True))

    def check_restorable(self) -> None:
        """A master that found everything stored, what is in flight included, would be where this one is."""
        stored = dict(self.durable)
        for released in self._in_flight:
            _store(stored, released.changes)
        found = differences(self.state, self._restore(stored))
        if found:
            raise RuleBrokenError(f"not restored: {'; '.join(found)}")

    def _restore(self, stored: Mapping[tuple[str, str], bytes], former: State | None = None) -> State:
        elements = [msgspec.json.decode(data, type=ELEMENT_TYPES[kind]) for (kind, _), data in sorted(stored.items())]
        return restored(self.settings, elements, self.now(), former)

    def _released(self, answer: Answer, effects: Effects, reply: Callable[[Answer], None] | None) -> Released:
        released = Released(self.state.take_changes(), answer, reply)
        released.desired.update((node, self.state.desired.of(node)) for node in effects.nodes)
        released.turns.extend(self.state.leases[turn] for turn in effects.turns if turn in self.state.leases)
        released.history.extend(effects.history)
        released.wake_at = effects.wake_at
        return released

    def _commit(self, released: Released) -> None:
        """One after another; a slow one holds up those behind it, each for itself or all together."""
        now, faults = self.engine.now, self.faults
        slow = self.engine.chance(faults.slow_commit)
        takes = self.engine.between(0.0, faults.slow_commit_seconds if slow else faults.commit_s)
        if not (faults.together and now < self._next_commit):
            self._next_commit = max(self._last_commit, now)
            self._last_commit = self._next_commit + takes
        incarnation = self.incarnation
        self._in_flight.append(released)
        self.engine.after(self._last_commit - now, lambda: self._committed(released, incarnation))

    def _committed(self, released: Released, incarnation: int) -> None:
        if incarnation != self.incarnation:
            return
        if self.store.generation != self._generation and (released.changes.puts or released.changes.removes):
            self._end_fenced()
            return
        if self.faults.failed_commit and released.changes.puts and self.engine.chance(self.faults.failed_commit):
            self._lose_commits()
            return
        self._in_flight.remove(released)
        _store(self.durable, released.changes)
        self._mark(released.changes)
        self.history.extend(released.history)
        for row in released.history:
            self.on_history(row)
        self.committed.update(released.desired)
        if released.reply is not None:
            released.reply(released.answer)
        for node, desired in released.desired.items():
            self.on_news(node, desired)
        if released.turns:
            self._give(released.turns)
        if released.wake_at is not None:
            self._set_alarm(released.wake_at)

    def _mark(self, changes: StoredChanges) -> None:
        for element in changes.puts.values():
            if isinstance(element, Counters):
                self.marks = Marks.of(element)
            elif isinstance(element, JobRecord) and element.state.is_finished:
                self.ended[element.uid] = RecordedEnd(element.state, element.end_time)

    def _give(self, turns: Sequence[GrantedLease]) -> None:
        """Their leases begin now."""
        if turns[0].is_sent_late(self.now()):
            self.call(Tick(newest_sent=self._newest_sent))
        self._newest_sent = turns[-1].turn
        self.on_turns([self.state.leases[turn.turn] for turn in turns if turn.turn in self.state.leases])

    def _set_alarm(self, time: float) -> None:
        """Replaces the one before, unless that is due and late."""
        if self._due is not None and self._due <= self.engine.now:
            return
        self._due = due = self.engine.now + max(0.0, time - self.now())
        late = self.faults.late_alarm and self.engine.chance(self.faults.late_alarm)
        incarnation = self.incarnation

        def tick() -> None:
            if incarnation == self.incarnation and self._due == due:
                self._due = None
                self.call(Tick(newest_sent=self._newest_sent))

        self.engine.after(
            due - self.engine.now + (self.engine.between(0.0, self.faults.late_alarm_seconds) if late else 0.0), tick
        )


def _store(stored: dict[tuple[str, str], bytes], changes: StoredChanges) -> None:
    for key, element in changes.puts.items():
        stored[key] = msgspec.json.encode(element)
    for key in changes.removes:
        stored.pop(key, None)
