"""When the planner makes its next plan, whether that plan may preempt running jobs, and which refusals of the master it
must not provoke again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import floor, inf
from typing import Final, assert_never

from ganger.cluster.refusals import Reason, Refusal, RefusalKind
from msgspec import Struct
from msgspec.structs import replace

from ganger_master.core.job_model import SuspendLevel
from ganger_master.core.plan_changes import (
    CoresChange,
    Goal,
    MoveChange,
    PlanChange,
    ResizeChange,
    ResumeChange,
    SliceChange,
    StartChange,
    SuspendChange,
)

# Rest after a plan, as a multiple of the time it took: plans take a quarter of a core at most.
_REST: Final = 3.0
_LEAST_REST_S: Final = 0.005
# Seconds between two plans without events, however soon the order may change.
_LEAST_ALONE_S: Final = 0.5
# Seconds of rest after so many plans in a row with a refused change.
_BACKOFF_S: Final = (0.1, 0.3, 1.0, 3.0, 10.0)


def is_stop(change: PlanChange, resizes: bool) -> bool:
    """Return whether an approved change counts as a preemption. `resizes`: the policy sizes jobs, so a resize counts
    too. Parking in host memory costs a job only a moment, and the end of a co-location delays no pending job."""
    match change:
        case ResizeChange():
            return resizes
        case SuspendChange():
            return change.level is SuspendLevel.CHECKPOINT and change.purpose.goal is not Goal.UNPACK
        case StartChange() | MoveChange() | CoresChange() | ResumeChange() | SliceChange():
            return False
        case _:
            assert_never(change)


class AnsweredPlan(Struct, frozen=True, gc=False):
    """What the pace reads of a plan that the master has answered.

    preempts: it preempted a job; is_refused: one of its changes was refused; waits: pending jobs do not start in it.
    due_s: when the order of jobs may have changed; again_s: when postponed work is due.
    took_s: seconds that planning took; judged_s: seconds that the answer took, in which the planner rested.
    """

    preempts: bool = False
    is_refused: bool = False
    waits: bool = False
    due_s: float = inf
    again_s: float = inf
    took_s: float = 0.0
    judged_s: float = 0.0


class PlanPace(Struct, frozen=True, gc=False):
    """Times in Unix seconds. `every_s`: minimum time between two plans that preempt running jobs."""

    every_s: float
    least_rest_s: float = _LEAST_REST_S
    least_alone_s: float = _LEAST_ALONE_S
    stopped_at_s: float = -inf
    # Plans in a row with a refused change.
    failures: int = 0
    # The next plan comes at `ready_s` at the earliest, and at `alone_s` without any event.
    ready_s: float = -inf
    alone_s: float = inf
    # When the order of jobs is due to be planned again without any event.
    due_s: float = inf

    @property
    def round_s(self) -> float:
        """Return the seconds between two rounds that pack all jobs anew."""
        return self.every_s

    def begun(self, stopped_at_s: float) -> PlanPace:
        """Return the pace where a job was preempted at `stopped_at_s` before the first plan."""
        return replace(self, stopped_at_s=max(self.stopped_at_s, stopped_at_s))

    def may_stop(self, now: float, is_news: bool = True) -> bool:
        """Return whether a plan may preempt: at the same instant as the one before, if that one might."""
        return now == self.stopped_at_s or now >= self.stopped_at_s + self.every_s

    def round_began_s(self, now: float) -> float:
        """Return the time since which new jobs wait for the next round; infinite without rounds."""
        return inf

    def next_stop_s(self, now: float) -> float:
        """Return when the next plan may preempt, if this one does not; if this one may, when the one after it may."""
        return (now if self.may_stop(now) else self.stopped_at_s) + self.every_s

    def wait_s(self, now: float, is_news: bool) -> float:
        """Return the seconds until the next plan; infinite to wait for an event."""
        return max(0.0, self.ready_s - now, 0.0 if is_news else self.alone_s - now)

    def passed_over(self, now: float) -> PlanPace:
        """Return the pace where a plan was due now, and would have changed nothing."""
        return self if self.alone_s > now else replace(self, alone_s=self.due_s if self.due_s > now else inf)

    def after(self, now: float, plan: AnsweredPlan) -> PlanPace:
        """Return the pace after a plan was answered."""
        stopped_at_s = now if plan.preempts else self.stopped_at_s
        failures = self.failures + 1 if plan.is_refused else 0
        rest_s = max(self.least_rest_s, _REST * plan.took_s - plan.judged_s)
        due_s = plan.due_s
        if plan.waits:
            # Orders that change all the time are planned again whenever jobs may be preempted for them.
            due_s = min(due_s, replace(self, stopped_at_s=stopped_at_s).next_stop_s(now))
        alone_s = max(min(plan.again_s, due_s), now + self.least_alone_s)
        if plan.is_refused:
            rest_s = max(rest_s, _BACKOFF_S[min(failures, len(_BACKOFF_S)) - 1])
            alone_s = min(alone_s, now + rest_s)
        return replace(
            self, stopped_at_s=stopped_at_s, failures=failures, ready_s=now + rest_s, alone_s=alone_s, due_s=due_s
        )


class EventPace(PlanPace, frozen=True, gc=False):
    """Plan on events only, each of which may preempt; without one when a stage has postponed work."""

    def may_stop(self, now: float, is_news: bool = True) -> bool:
        return is_news

    def after(self, now: float, plan: AnsweredPlan) -> PlanPace:
        return self if plan.again_s == self.alone_s else replace(self, alone_s=plan.again_s)


# Times closer than this are the same instant: sums of decimals are seldom exact.
INSTANT_S: Final = 1e-6


def rounds_until(time: float, since_s: float, step_s: float) -> float:
    """Return the number of rounds of `step_s` seconds from `since_s` to a time; whole at the beginning of a round."""
    rounds = (time - since_s) / step_s
    nearest = round(rounds)
    return nearest if abs(rounds - nearest) * step_s < INSTANT_S else rounds


class RoundPace(EventPace, frozen=True, gc=False):
    """Preempt only at the beginning of a round of `step_s` seconds; the first one began at `since_s`. Jobs start until
    `settles_s` later, once preempted ones have returned their devices."""

    step_s: float = 300.0
    since_s: float = 0.0
    settles_s: float = 0.0
    planned_s: float = -inf

    @property
    def round_s(self) -> float:
        return self.step_s

    def rounds(self, time: float) -> float:
        return rounds_until(time, self.since_s, self.step_s)

    def start_s(self, number: float) -> float:
        """Return when a round begins."""
        return round(self.since_s + self.step_s * number, 6)

    def may_stop(self, now: float, is_news: bool = True) -> bool:
        rounds = self.rounds(now)
        return rounds == floor(rounds)

    def round_began_s(self, now: float) -> float:
        return self.start_s(floor(self.rounds(now)))

    def wait_s(self, now: float, is_news: bool) -> float:
        rounds = self.rounds(now)
        whole = floor(rounds)
        is_first = rounds == whole and self.planned_s != now
        may_start = rounds == whole or (rounds - whole) * self.step_s <= self.settles_s + INSTANT_S
        if is_first or (is_news and may_start):
            return 0.0
        return max(0.0, min(self.alone_s, self.start_s(whole + 1)) - now)

    def passed_over(self, now: float) -> PlanPace:
        return replace(self, planned_s=now)

    def after(self, now: float, plan: AnsweredPlan) -> PlanPace:
        return replace(self, alone_s=plan.again_s, planned_s=now)


# Changes of other jobs may end the cause without an event for this job.
NOTED_S: Final = 5.0


class ExcludedJobs(Struct, frozen=True, gc=False):
    """Jobs by number: not to be started, not to be preempted. `unplaced`: jobs for which the last plan that might
    preempt found no place."""

    not_started: Collection[int] = ()
    not_stopped: Collection[int] = ()
    unplaced: Collection[int] = ()

    def resting(self, numbers: Collection[int]) -> ExcludedJobs:
        """Return the exclusions with these jobs, too, not to be started."""
        return replace(self, not_started=frozenset((*self.not_started, *numbers))) if numbers else self


NONE_EXCLUDED: Final = ExcludedJobs()


class RefusalBackoff:
    """Notes by job. The master refuses at most one change of a job at a time, so there are no more notes than jobs."""

    def __init__(self) -> None:
        # By number, until when a job is not to be started, not to be preempted, and not to be placed on `_nodes`.
        self._not_started: dict[int, float] = {}
        self._not_stopped: dict[int, float] = {}
        self._closed: dict[int, float] = {}
        self._nodes: dict[int, frozenset[str]] = {}
        self._notes = (self._not_started, self._not_stopped, self._closed)
        self._unplaced: frozenset[int] = frozenset()

    def note(self, change: PlanChange, refusals: Collection[Refusal], now: float) -> None:
        """Note the first refusal of a change, unless a fresh view removes its cause."""
        refusal = next(iter(refusals), None)
        if refusal is None or refusal.reason.kind is RefusalKind.RACE or refusal.reason is Reason.QUANTUM:
            return
        if isinstance(change, CoresChange):
            # A job whose cores cannot change keeps them, and another request costs no job anything.
            return
        # A change that makes room for a job which may not have it is refused for the sake of that job.
        is_for = isinstance(change, MoveChange | SuspendChange | ResizeChange) and change.purpose.job
        is_in_vain = bool(is_for) and refusal.job == f"jobs/{is_for}"
        number = is_for if is_in_vain else change.number
        if isinstance(change, SuspendChange | ResizeChange) and not is_in_vain:
            self._not_stopped[number] = now + NOTED_S
        elif refusal.reason.excluded_s:
            nodes = frozenset(one.node for one in refusals if one.reason.excluded_s and one.node)
            self._nodes[number] = nodes | (self._nodes[number] if number in self._closed else frozenset())
            self._closed[number] = now + refusal.reason.excluded_s
        else:
            self._not_started[number] = now + NOTED_S

    def note_unplaced(self, numbers: frozenset[int], may_stop: bool, until_s: float) -> None:
        """Leave out jobs that fit nowhere until this time. `may_stop`: the plan might preempt, so `numbers` are all."""
        if may_stop:
            self._unplaced = numbers
        self._not_started.update(dict.fromkeys(numbers, until_s))

    def forget(self, number: int) -> None:
        """Drop the notes on a job that has changed."""
        for notes in (*self._notes, self._nodes):
            notes.pop(number, None)

    def at(self, now: float) -> ExcludedJobs:
        """Return the exclusions at `now`, and drop expired notes."""
        if not (self.has_notes or self._nodes or self._unplaced):
            return NONE_EXCLUDED
        for ends in self._notes:
            for number in [number for number, end in ends.items() if end <= now]:
                del ends[number]
        self._nodes = {number: nodes for number, nodes in self._nodes.items() if number in self._closed}
        if not (self._not_started or self._not_stopped or self._unplaced):
            return NONE_EXCLUDED
        return ExcludedJobs(frozenset(self._not_started), frozenset(self._not_stopped), self._unplaced)

    @property
    def closed_nodes(self) -> Mapping[int, frozenset[str]]:
        """Return the nodes where a job is not to be placed, by its number, as of the last `at`."""
        return self._nodes

    @property
    def has_notes(self) -> bool:
        """Return whether any job has a note that expires."""
        return any(self._notes)

    @property
    def next_s(self) -> float:
        """When the first note expires, in Unix seconds; infinite without notes."""
        return min([end for ends in self._notes for end in ends.values()], default=inf)
