"""Replay of a recording: repeats all decisions with the core at the recorded times and compares the results.

From the recorded state, the same program decides the same. With another version of the program, the first difference
shows where its decisions change.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeAlias

import msgspec
from msgspec import Struct

from ganger_master.core import machine
from ganger_master.core.answers import Answer
from ganger_master.core.commands import Command
from ganger_master.core.effects import Effects
from ganger_master.core.events import Event
from ganger_master.core.queue import GrantedLease
from ganger_master.core.state import State
from ganger_master.core.state_image import image_of, state_of
from ganger_master.decision_log import lines
from ganger_master.decision_log.lines import BatchLine, BrokenLine, CommandLine, Element, End, Header, Line, StateLine


class Begun(Struct, frozen=True):
    """A recorded state, from which the replay continues. `number`: of the line, as in all entries."""

    number: int
    time: float
    cause: str


class RecordedCommand(Struct, frozen=True):
    """A command before its decision; the replay's `state` is the one that the decision reads."""

    number: int
    time: float
    command: Command


class Decided(Struct, frozen=True):
    """A command after its decision."""

    number: int
    time: float
    command: Command
    answer: Answer
    events: tuple[Event, ...]


class Drawn(Struct, frozen=True):
    """The effects of a batch."""

    number: int
    time: float
    effects: Effects
    turns: tuple[GrantedLease, ...]


class Broke(Struct, frozen=True):
    """A failure of the core, the same as recorded."""

    number: int
    time: float
    error: str
    command: Command | None


class Differs(Struct, frozen=True):
    """A decision that differs from the recorded one. Later decisions start from another state."""

    number: int
    time: float
    what: str
    recorded: str
    now: str


class Ended(Struct, frozen=True):
    number: int
    time: float
    reason: str


Happening: TypeAlias = Begun | RecordedCommand | Decided | Drawn | Broke | Differs | Ended


class Rerun:
    """Replays recorded lines; iterate once. `state`: the state at the entry yielded last.

    Raises LineError for invalid or inconsistent lines.
    """

    def __init__(self, recorded: Iterable[Line]) -> None:
        self._lines = iter(recorded)
        self.header = self._header()
        self.state: State | None = None

    def __iter__(self) -> Iterator[Happening]:
        elements: list[Element] = []
        for number, line in enumerate(self._lines, 2):
            match line:
                case Header():
                    raise lines.LineError("a second header")
                case Element():
                    elements.append(line)
                case StateLine():
                    self.state = _state_of(elements, line)
                    elements = []
                    yield Begun(number, line.time, line.cause)
                case CommandLine():
                    command = lines.command_of(line)
                    yield RecordedCommand(number, line.time, command)
                    yield from self._decide(number, line, command)
                case BatchLine():
                    yield from self._draw(number, line)
                case BrokenLine():
                    yield from self._break(number, line)
                case End():
                    yield from self._end(number, line)

    def _header(self) -> Header:
        header = next(self._lines, None)
        if not isinstance(header, Header):
            raise lines.LineError("no header")
        return header

    def _known(self) -> State:
        if self.state is None:
            raise lines.LineError("decisions before there is a state")
        return self.state

    def _decide(self, number: int, line: CommandLine, command: Command) -> Iterator[Happening]:
        state = self._known()
        recorded = lines.answer_of(line)
        try:
            answer, happened = machine.advance(state, command, line.time)
        except Exception as error:
            yield Differs(number, line.time, line.kind, _text(recorded), _failed(error))
            return
        kinds = tuple([type(event).__name__ for event in happened])
        yield Decided(number, line.time, command, answer, happened)
        if answer != recorded:
            yield Differs(number, line.time, f"the answer to {line.kind}", _text(recorded), _text(answer))
        elif kinds != line.events:
            yield Differs(number, line.time, f"the events of {line.kind}", ", ".join(line.events), ", ".join(kinds))

    def _draw(self, number: int, line: BatchLine) -> Iterator[Happening]:
        state = self._known()
        try:
            effects = machine.finish(state, line.time)
        except Exception as error:
            yield Differs(number, line.time, "the end of a batch", _text(line.effects), _failed(error))
            return
        state.take_changes()
        turns = tuple([state.leases[turn] for turn in effects.turns if turn in state.leases])
        yield Drawn(number, line.time, effects, turns)
        for name in effects.__struct_fields__:
            recorded, now = getattr(line.effects, name), getattr(effects, name)
            if recorded != now:
                yield Differs(number, line.time, f"{name} of a batch", _text(recorded), _text(now))
        if turns != line.turns:
            yield Differs(number, line.time, "turns that were given", _text(line.turns), _text(turns))

    def _break(self, number: int, line: BrokenLine) -> Iterator[Happening]:
        command = lines.command_of(line) if line.kind else None
        if command is not None:
            yield RecordedCommand(number, line.time, command)
        state = self._known()
        try:
            if command is not None:
                machine.advance(state, command, line.time)
            else:
                machine.finish(state, line.time)
        except Exception as error:
            if _failed(error) == line.error:
                yield Broke(number, line.time, line.error, command)
            else:
                yield Differs(number, line.time, "how the core failed", line.error, _failed(error))
            return
        yield Differs(number, line.time, f"at {line.kind or 'the end of a batch'}", line.error, "the core did not fail")

    def _end(self, number: int, line: End) -> Iterator[Happening]:
        if line.digest and self.state is not None:
            found = lines.digest_of(image_of(self.state))
            if found != line.digest:
                yield Differs(number, line.time, "the state it ends in", line.digest, found)
        yield Ended(number, line.time, line.reason)


def _state_of(elements: Iterable[Element], line: StateLine) -> State:
    image = lines.image_of_lines(elements, line)
    try:
        return state_of(image)
    except (KeyError, ValueError, AssertionError, IndexError) as error:
        raise lines.LineError(f"the parts of the state do not go together: {_failed(error)}") from error


def _failed(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _text(value: object) -> str:
    kind = f"{type(value).__name__} " if isinstance(value, Struct) else ""
    return kind + msgspec.json.encode(value).decode()
