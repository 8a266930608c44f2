"""Counterfactual decisions: what another policy would have decided at each instant of a recording.

Each decision is taken on the recorded state and discarded, so that recorded reports and requests stay meaningful. The
consequences of such decisions cannot be derived from a recording.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace

from ganger.cluster.capacity_index import CapacityIndex
from msgspec import Struct

from ganger_master.core import commands
from ganger_master.core.answers import Answer
from ganger_master.core.commands import Command
from ganger_master.core.decide import decide
from ganger_master.core.plan_changes import StartChange, SuspendChange
from ganger_master.core.state import State
from ganger_master.decision_log.job_history import VerdictReason, verdict_of
from ganger_master.decision_log.rerun import Begun, Decided, DecisionEntry, Drawn, RecordedCommand
from ganger_master.planner.context import context_of
from ganger_master.planner.job_table import LiveTable
from ganger_master.planner.order_stage import plan_by
from ganger_master.policies import live_policy_named
from ganger_master.policies.stages import ResizeByOptimus

# Minimum time between two passes, each of which reads all jobs and nodes.
_PASS_S = 1.0


class Difference(Struct, frozen=True):
    """A verdict that the other policy would have decided differently. `line`: of the recording."""

    line: int
    time: float
    job: int
    recorded: str
    otherwise: str
    recorded_why: tuple[VerdictReason, ...] = ()
    otherwise_why: tuple[VerdictReason, ...] = ()


class CounterfactualPlan(Struct, frozen=True):
    """A plan of the other policy: the nodes of the jobs that it starts, and the jobs that it preempts."""

    line: int
    time: float
    starts: dict[int, tuple[str, ...]]
    stops: tuple[int, ...]


class Counterfactual:
    """Compares a policy with the recorded decisions: call `record` with every entry of the replay.

    Raises KeyError for an unknown policy, ValueError for one that needs an oracle or measurements.
    """

    def __init__(self, policy: str) -> None:
        self.policy = live_policy_named(policy)
        if self.policy.has(ResizeByOptimus):
            raise ValueError(f"policy {policy!r} goes by measured losses and speeds, which no recording has")
        # Numbers of recorded verdicts that the other policy decided too, and of its passes.
        self.verdicts = self.passes = 0
        self.differences: list[Difference] = []
        self.planned: list[CounterfactualPlan] = []
        self._table = LiveTable()
        self._passed_at = float("-inf")
        self._answer: Answer | None = None

    def record(self, entry: DecisionEntry, state: State | None) -> None:
        if state is None:
            return
        match entry:
            case Begun():
                self._table = _table_of(state)
                self._passed_at = float("-inf")
            case Drawn(effects=effects):
                for number in effects.jobs:
                    job = state.jobs.get(number)
                    if job is not None:
                        self._table.put(job, state.gangs.get(job.epoch))
            case RecordedCommand(number, time, command):
                self._answer = None
                if not isinstance(command, commands.RequestGang | commands.ProposePlan):
                    return
                if not self.policy.is_planned:
                    self._answer = self._decide(state, command, time)
                elif time >= self._passed_at + _PASS_S:
                    self._passed_at = time
                    self._plan(state, number, time)
            case Decided(number, time, command, answer, _) if self._answer is not None:
                self._compare(number, time, command, answer, self._answer)
            case _:
                return

    def _decide(self, state: State, command: Command, now: float) -> Answer:
        twin = copy.copy(state)
        # The decision claims and releases resources, which changes the view.
        twin.view = state.view.copy()
        twin.settings, twin.policy = replace(state.settings, policy=self.policy.name), self.policy
        return decide(twin, command, now)[1]

    def _compare(self, line: int, time: float, command: Command, recorded: Answer, other: Answer) -> None:
        for number in _jobs_of(command):
            self.verdicts += 1
            (was, whys), (would_be, other_whys) = verdict_of(recorded, number), verdict_of(other, number)
            if was != would_be or [why.reason for why in whys] != [why.reason for why in other_whys]:
                self.differences.append(Difference(line, time, number, was, would_be, whys, other_whys))

    def _plan(self, state: State, line: int, time: float) -> None:
        view = state.view.copy()
        found = plan_by(context_of(self.policy, self._table, CapacityIndex(view), time))
        self.passes += 1
        starts = {
            change.number: tuple([claim.node for claim in change.claims])
            for change in found.changes
            if isinstance(change, StartChange)
        }
        stops = tuple(change.number for change in found.changes if isinstance(change, SuspendChange))
        planned = CounterfactualPlan(line, time, starts, stops)
        before = self.planned[-1] if self.planned else CounterfactualPlan(0, 0.0, {}, ())
        if (before.starts, before.stops) != (starts, stops):
            self.planned.append(planned)


def _jobs_of(command: Command) -> Iterator[int]:
    match command:
        case commands.RequestGang(number=number):
            yield number
        case commands.ProposePlan(changes=changes):
            for change in changes:
                yield change.number
        case _:
            return


def _table_of(state: State) -> LiveTable:
    table = LiveTable(quotas=state.settings.quota_devices)
    for job in state.jobs.values():
        table.put(job, state.gangs.get(job.epoch))
    return table
