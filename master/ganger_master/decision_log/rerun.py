"""Replays of recordings: of a master's decisions, and of a planner's plans.

From the recorded state, at the recorded times, the same core decides the same; with another version of the program, the
first difference shows where its decisions change. A planner's loop reads no clock, so equal observations at equal times
bring equal plans.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import zip_longest
from typing import TypeAlias

from ganger.v1 import scheduling_pb2
from ganger.wire.errors import RequestInvalid
from google.protobuf.message import DecodeError
from msgspec import Struct
from msgspec.structs import replace

from ganger_master.core import machine
from ganger_master.core.answers import Answer, ChangeAnswer, Refused
from ganger_master.core.commands import Command
from ganger_master.core.events import Effects, Event, HistoryRow
from ganger_master.core.queue import GrantedLease
from ganger_master.core.state import State
from ganger_master.core.state_image import image_of, state_of
from ganger_master.decision_log.recording import (
    BatchLine,
    BrokenLine,
    ClusterLine,
    CommandLine,
    Element,
    End,
    Header,
    Line,
    LineError,
    LoopLine,
    PlanLine,
    PlannerLine,
    ProgressLine,
    StateLine,
    VerdictLine,
    answer_of,
    command_of,
    digest_of,
    failure_of,
    image_of_lines,
    pack,
    take_header,
    text_of,
    unpack,
)
from ganger_master.planner.context import ClusterChange, Plan, PlanVerdict, ProgressReports
from ganger_master.planner.loop import PlannerLoop, live_loop
from ganger_master.planner.memory import unpacked
from ganger_master.planner.rate_registry import RateRegistry
from ganger_master.planner_process.run import ClusterMirror, reports_from_wire
from ganger_master.policies import live_policy_named
from ganger_master.policies.trials import TrialPace


class _Entry(Struct, frozen=True):
    """What a replay yields of one line. `number`: of the line; `time`: of the recording."""

    number: int
    time: float


class Begun(_Entry, frozen=True):
    """A recorded state, from which the replay continues."""

    cause: str


class RecordedCommand(_Entry, frozen=True):
    """A command before its decision; the replay's `state` is the one that the decision reads."""

    command: Command


class Decided(_Entry, frozen=True):
    """A command after its decision."""

    command: Command
    answer: Answer
    events: tuple[Event, ...]


class Drawn(_Entry, frozen=True):
    """The effects of a batch."""

    effects: Effects
    turns: tuple[GrantedLease, ...]


class Broke(_Entry, frozen=True):
    """A failure of the core, the same as recorded."""

    error: str
    command: Command | None


class Differs(_Entry, frozen=True):
    """A decision that differs from the recorded one. Later decisions start from another state."""

    what: str
    recorded: str
    now: str


class Ended(_Entry, frozen=True):
    reason: str


DecisionEntry: TypeAlias = Begun | RecordedCommand | Decided | Drawn | Broke | Differs | Ended


class Rerun:
    """Replays recorded lines; iterate once. `state`: the state at the entry yielded last.

    Raises LineError for invalid or inconsistent lines.
    """

    def __init__(self, recorded: Iterable[Line]) -> None:
        self._lines = iter(recorded)
        self.header = take_header(self._lines)
        self.state: State | None = None

    def __iter__(self) -> Iterator[DecisionEntry]:
        elements: list[Element] = []
        for number, line in enumerate(self._lines, 2):
            match line:
                case Header():
                    raise LineError("a second header")
                case Element():
                    elements.append(line)
                case StateLine():
                    self.state = _state_of(elements, line)
                    elements = []
                    yield Begun(number, line.time, line.cause)
                case CommandLine():
                    command = command_of(line)
                    yield RecordedCommand(number, line.time, command)
                    yield from self._decide(number, line, command)
                case BatchLine():
                    yield from self._draw(number, line)
                case BrokenLine():
                    yield from self._break(number, line)
                case End():
                    yield from self._end(number, line)

    def _known(self) -> State:
        if self.state is None:
            raise LineError("decisions before there is a state")
        return self.state

    def _decide(self, number: int, line: CommandLine, command: Command) -> Iterator[DecisionEntry]:
        state = self._known()
        recorded = answer_of(line)
        try:
            answer, happened = machine.advance(state, command, line.time)
        except Exception as error:
            yield Differs(number, line.time, line.kind, text_of(recorded), failure_of(error))
            return
        kinds = tuple([type(event).__name__ for event in happened])
        yield Decided(number, line.time, command, answer, happened)
        if _without_sentence(answer) != _without_sentence(recorded):
            yield Differs(number, line.time, f"the answer to {line.kind}", text_of(recorded), text_of(answer))
        elif kinds != line.events:
            yield Differs(number, line.time, f"the events of {line.kind}", ", ".join(line.events), ", ".join(kinds))

    def _draw(self, number: int, line: BatchLine) -> Iterator[DecisionEntry]:
        state = self._known()
        try:
            effects = machine.finish(state, line.time)
        except Exception as error:
            yield Differs(number, line.time, "the end of a batch", text_of(line.effects), failure_of(error))
            return
        state.take_changes()
        turns = tuple([state.leases[turn] for turn in effects.turns if turn in state.leases])
        yield Drawn(number, line.time, effects, turns)
        for name in effects.__struct_fields__:
            recorded, now = getattr(line.effects, name), getattr(effects, name)
            # Sentences for people may be put in other words in a later version.
            is_same = recorded == now or (name == "history" and _without_words(recorded) == _without_words(now))
            if not is_same:
                yield Differs(number, line.time, f"{name} of a batch", text_of(recorded), text_of(now))
        if turns != line.turns:
            yield Differs(number, line.time, "leases that were granted", text_of(line.turns), text_of(turns))

    def _break(self, number: int, line: BrokenLine) -> Iterator[DecisionEntry]:
        command = command_of(line) if line.kind else None
        if command is not None:
            yield RecordedCommand(number, line.time, command)
        state = self._known()
        try:
            if command is not None:
                machine.advance(state, command, line.time)
            else:
                machine.finish(state, line.time)
        except Exception as error:
            if failure_of(error) == line.error:
                yield Broke(number, line.time, line.error, command)
            else:
                yield Differs(number, line.time, "how the core failed", line.error, failure_of(error))
            return
        yield Differs(number, line.time, f"at {line.kind or 'the end of a batch'}", line.error, "the core did not fail")

    def _end(self, number: int, line: End) -> Iterator[DecisionEntry]:
        if line.digest and self.state is not None:
            found = digest_of(image_of(self.state))
            if found != line.digest:
                yield Differs(number, line.time, "the state it ends in", line.digest, found)
        yield Ended(number, line.time, line.reason)


def _state_of(elements: Iterable[Element], line: StateLine) -> State:
    image = image_of_lines(elements, line)
    try:
        return state_of(image)
    except (KeyError, ValueError, AssertionError, IndexError) as error:
        raise LineError(f"the parts of the state do not go together: {failure_of(error)}") from error


# -- plans -----------------------------------------------------------------------------------------------------------


class Made(_Entry, frozen=True):
    """A plan that is as recorded."""

    plan: Plan


class JudgedPlan(_Entry, frozen=True):
    """The recorded verdict on the last plan."""

    plan: Plan
    answers: tuple[ChangeAnswer, ...]


Entry: TypeAlias = Made | JudgedPlan | Broke | Differs | Ended


class PlanRerun:
    """Replays the lines of a planner's recording; iterate once. It ends at the first plan that differs: the recorded
    verdict on the plan is none on another one.

    `until_s`: stop before the first line that is later than this, in seconds from the beginning; None: at the end.
    Raises LineError for invalid or inconsistent lines.
    """

    def __init__(self, recorded: Iterable[Line], until_s: float | None = None) -> None:
        self._lines = iter(recorded)
        self.header = take_header(self._lines)
        # Changes of the cluster and batches of reports so far.
        self.observations = 0
        self._until_s = until_s
        self._mirror = ClusterMirror(lambda: 0.0)
        self._rates: RateRegistry | None = None
        self._loop: PlannerLoop | None = None
        self._plan: Plan | None = None
        # The last observation made the loop fail. It is a difference unless the next line has the same failure.
        self._failed: Differs | None = None

    def __iter__(self) -> Iterator[Entry]:
        number, last_s = 1, self.header.began
        for line in self._lines:
            if not isinstance(line, PlannerLine | BrokenLine | End):
                raise LineError(f"no line of a planner: {type(line).__name__}")
            if self._until_s is not None and line.time > self.header.began + self._until_s:
                yield self._failed or Ended(number, last_s, f"as far as {self._until_s:g} s")
                return
            number, last_s = number + 1, line.time
            entry = self._entry_of(number, line)
            if entry is not None:
                yield entry
            if isinstance(entry, Differs):
                return

    def _entry_of(self, number: int, line: PlannerLine | BrokenLine | End) -> Entry | None:
        if self._failed is not None:
            return self._fail(number, line, self._failed)
        match line:
            case PlanLine() | BrokenLine():
                return self._step(number, line)
            case VerdictLine():
                return self._settle(number, line)
            case End():
                return Ended(number, line.time, line.reason)
            case LoopLine():
                self._begin(number, line)
            case ClusterLine() | ProgressLine():
                self._observe(number, line)
        return None

    def _known(self) -> PlannerLoop:
        if self._loop is None:
            raise LineError("observations before there is a loop")
        return self._loop

    @contextmanager
    def _failures(self, number: int, line: PlannerLine) -> Iterator[None]:
        """Keep the failure of the loop in the block until the next line."""
        try:
            yield
        except LineError:
            raise
        except Exception as error:
            self._failed = Differs(number, line.time, "an observation", "the planner goes on", failure_of(error))

    def _fail(self, number: int, line: PlannerLine | BrokenLine | End, failed: Differs) -> Broke | Differs:
        if not isinstance(line, BrokenLine):
            return failed
        if line.error != failed.now:
            return replace(failed, what="how the planner failed", recorded=line.error)
        self._failed = None
        return Broke(number, line.time, line.error, None)

    def _observe(self, number: int, line: ClusterLine | ProgressLine) -> None:
        with self._failures(number, line):
            self._known().observe(self._observed(line), line.time)
        self.observations += 1

    def _observed(self, line: ClusterLine | ProgressLine) -> ClusterChange | ProgressReports:
        try:
            if isinstance(line, ProgressLine):
                return reports_from_wire(scheduling_pb2.ProgressBatch.FromString(line.batch))
            changes = [self._mirror.apply(scheduling_pb2.ClusterDelta.FromString(delta)) for delta in line.deltas]
        except (DecodeError, RequestInvalid) as error:
            raise LineError(str(error)) from error
        if not changes or changes[-1] is None:
            raise LineError("a change of the cluster is not whole")
        return changes[-1]

    def _begin(self, number: int, line: LoopLine) -> None:
        if self._rates is None:
            self._rates = RateRegistry(unpack(line.pace, TrialPace))
        memory = None if self._loop is None else self._loop.memory
        try:
            # Some policies have a planner only where there are teams.
            policy = live_policy_named(line.policy).planned
            if line.memory:
                memory = unpacked(line.memory)
                self._rates.recall(memory.rates)
        except (KeyError, ValueError) as error:
            raise LineError(str(error.args[0])) from error
        self._mirror, self._plan = ClusterMirror(lambda: 0.0), None
        with self._failures(number, line):
            self._loop = live_loop(policy, line.plan_every_s, self._rates, memory)

    def _step(self, number: int, line: PlanLine | BrokenLine) -> Made | Broke | Differs:
        loop = self._known()
        if self._plan is not None:
            if isinstance(line, BrokenLine):
                # No plan was due: the recorded loop failed at the last observation.
                return Differs(number, line.time, "an observation", line.error, "the planner goes on")
            raise LineError("a plan before the verdict on the last one")
        recorded = unpack(line.plan, Plan) if isinstance(line, PlanLine) else line.error
        found: Plan | str | None
        try:
            found, _ = loop.step(line.time)
        except Exception as error:
            found = failure_of(error)
        # No float that is no number equals itself, but its bytes do.
        if found != recorded and pack(found) != pack(recorded):
            return Differs(number, line.time, *difference_of(recorded, found))
        if not isinstance(found, Plan):
            return Broke(number, line.time, str(found), None)
        self._plan = found
        return Made(number, line.time, found)

    def _settle(self, number: int, line: VerdictLine) -> JudgedPlan:
        plan, self._plan = self._plan, None
        if plan is None or len(plan.changes) != len(line.answers):
            raise LineError("a verdict that is on no plan")
        with self._failures(number, line):
            self._known().observe(PlanVerdict(line.answers, line.planning_s), line.time)
        return JudgedPlan(number, line.time, plan, line.answers)


def difference_of(recorded: Plan | str, found: Plan | str | None) -> tuple[str, str, str]:
    """Return what differs first between two plans, or failures to plan, and the text of both."""
    if not (isinstance(recorded, Plan) and isinstance(found, Plan)):
        recorded_text, text = [one if isinstance(one, str) else text_of(one) for one in (recorded, found)]
        return "the plan", recorded_text, "none is due" if found is None else text
    for number, (one, other) in enumerate(zip_longest(recorded.changes, found.changes), 1):
        if one != other:
            return f"change {number} of the plan", text_of(one), text_of(other)
    for name in ("findings", "line", "kept_places", "curves"):
        if getattr(recorded, name) != getattr(found, name):
            return f"{name} of the plan", text_of(getattr(recorded, name)), text_of(getattr(found, name))
    raise AssertionError("equal plans")


def _without_words(history: Iterable[HistoryRow]) -> list[HistoryRow]:
    return [replace(row, message="") for row in history]


def _without_sentence(answer: Answer) -> Answer:
    return replace(answer, message="") if isinstance(answer, Refused) else answer
