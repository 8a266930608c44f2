"""Replay of a planner's recording: a loop observes all that the recorded one observed, and makes every plan again.

The loop is the one of `planner.loop`, which the simulator runs, too. It reads no clock, so equal observations at equal
times bring equal plans.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import zip_longest
from typing import TypeAlias

from ganger.v1 import scheduling_pb2
from ganger.wire.errors import RequestInvalid
from google.protobuf.message import DecodeError
from msgspec import Struct

from ganger_master.core.answers import ChangeAnswer
from ganger_master.decision_log.recording import (
    Broke,
    BrokenLine,
    ClusterLine,
    Differs,
    End,
    Ended,
    Line,
    LineError,
    LoopLine,
    PlanLine,
    ProgressLine,
    VerdictLine,
    decoded,
    failure_of,
    take_header,
    text_of,
)
from ganger_master.planner.context import Plan, PlanVerdict
from ganger_master.planner.loop import PlannerLoop, live_loop
from ganger_master.planner.measurements import Measurements
from ganger_master.planner.memory import unpacked
from ganger_master.planner_process.cluster_mirror import ClusterMirror, reports_from_wire
from ganger_master.policies import live_policy_named
from ganger_master.policies.trials import TrialPace


class Made(Struct, frozen=True):
    """A plan that is as recorded. `number`: of the line, as in all entries."""

    number: int
    time: float
    plan: Plan


class JudgedPlan(Struct, frozen=True):
    """The recorded verdict on the last plan."""

    number: int
    time: float
    plan: Plan
    answers: tuple[ChangeAnswer, ...]


Entry: TypeAlias = Made | JudgedPlan | Broke | Differs | Ended


class PlanRerun:
    """Replays the lines of a planner's recording; iterate once. It ends at the first plan that differs: the recorded
    verdict on the plan is none on another one.

    Raises LineError for invalid or inconsistent lines.
    """

    def __init__(self, recorded: Iterable[Line]) -> None:
        self._lines = iter(recorded)
        self.header = take_header(self._lines)
        # Changes of the cluster and batches of reports so far.
        self.observations = 0
        self._mirror = ClusterMirror(lambda: 0.0)
        self._rates: Measurements | None = None
        self._loop: PlannerLoop | None = None
        self._plan: Plan | None = None

    def __iter__(self) -> Iterator[Entry]:
        entry: Entry | None
        for number, line in enumerate(self._lines, 2):
            match line:
                case PlanLine() | BrokenLine():
                    entry = self._step(number, line)
                case VerdictLine():
                    entry = self._settle(number, line)
                case End():
                    entry = Ended(number, line.time, line.reason)
                case LoopLine() | ClusterLine() | ProgressLine():
                    entry = self._observe(number, line)
                case _:
                    raise LineError(f"no line of a planner: {type(line).__name__}")
            if entry is not None:
                yield entry
            if isinstance(entry, Differs):
                return

    def _known(self) -> PlannerLoop:
        if self._loop is None:
            raise LineError("observations before there is a loop")
        return self._loop

    def _observe(self, number: int, line: LoopLine | ClusterLine | ProgressLine) -> Differs | None:
        try:
            match line:
                case LoopLine():
                    self._begin(line)
                case ClusterLine(time, deltas):
                    changes = [self._mirror.apply(scheduling_pb2.ClusterDelta.FromString(delta)) for delta in deltas]
                    if not changes or changes[-1] is None:
                        raise LineError("a change of the cluster is not whole")
                    self._known().observe(changes[-1], time)
                    self.observations += 1
                case ProgressLine(time, batch):
                    reports = reports_from_wire(scheduling_pb2.ProgressBatch.FromString(batch))
                    self._known().observe(reports, time)
                    self.observations += 1
        except (LineError, DecodeError, RequestInvalid) as error:
            raise LineError(str(error)) from error
        except Exception as error:
            return Differs(number, line.time, "an observation", "the planner goes on", failure_of(error))
        return None

    def _begin(self, line: LoopLine) -> None:
        if self._rates is None:
            self._rates = Measurements(decoded(line.pace, TrialPace))
        memory = None if self._loop is None else self._loop.memory
        try:
            policy = live_policy_named(line.policy)
            if line.memory:
                memory = unpacked(line.memory)
                self._rates.recall(memory.measured)
        except (KeyError, ValueError) as error:
            raise LineError(str(error.args[0])) from error
        self._mirror, self._plan = ClusterMirror(lambda: 0.0), None
        self._loop = live_loop(policy, line.plan_every_s, self._rates, memory)

    def _step(self, number: int, line: PlanLine | BrokenLine) -> Made | Broke | Differs:
        loop = self._known()
        if self._plan is not None:
            raise LineError("a plan before the verdict on the last one")
        recorded = decoded(line.plan, Plan) if isinstance(line, PlanLine) else line.error
        found: Plan | str | None
        try:
            found, _ = loop.step(line.time)
        except Exception as error:
            found = failure_of(error)
        if found != recorded:
            return Differs(number, line.time, *difference_of(recorded, found))
        if not isinstance(found, Plan):
            return Broke(number, line.time, str(found), None)
        self._plan = found
        return Made(number, line.time, found)

    def _settle(self, number: int, line: VerdictLine) -> JudgedPlan:
        plan, self._plan = self._plan, None
        if plan is None or len(plan.changes) != len(line.answers):
            raise LineError("a verdict that is on no plan")
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
    for name in ("findings", "line", "reservations"):
        if getattr(recorded, name) != getattr(found, name):
            return f"{name} of the plan", text_of(getattr(recorded, name)), text_of(getattr(found, name))
    raise AssertionError("equal plans")
