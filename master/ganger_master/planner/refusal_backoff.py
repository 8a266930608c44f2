"""Refusals of the master, noted so that the next plans do not repeat them at once.

A note on a job stands until the job changes, or for some seconds. Losing the notes costs one more request.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from ganger.cluster.refusals import Reason, Refusal, RefusalKind

from ganger_master.core.plan_changes import CoresChange, PlanChange, ResizeChange, SuspendChange

# Changes of other jobs may end the cause without an event for this job.
NOTED_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class ExcludedJobs:
    """Jobs by number: not to be started, not to be preempted, not to be placed on these nodes. `unplaced`: jobs for
    which the last plan that might preempt found no place."""

    not_started: Collection[int] = ()
    not_stopped: Collection[int] = ()
    nodes: Mapping[int, frozenset[str]] = field(default_factory=dict)
    unplaced: Collection[int] = ()

    def resting(self, numbers: Collection[int]) -> ExcludedJobs:
        """Return the exclusions with these jobs, too, not to be started."""
        return replace(self, not_started=frozenset((*self.not_started, *numbers))) if numbers else self


NONE_EXCLUDED: Final = ExcludedJobs()


class RefusalBackoff:
    """Notes by job. The master refuses at most one change of a job at a time, so there are no more notes than jobs."""

    def __init__(self) -> None:
        self._not_started: dict[int, float] = {}
        self._not_stopped: dict[int, float] = {}
        self._closed: dict[int, tuple[float, frozenset[str]]] = {}
        self._unplaced: frozenset[int] = frozenset()

    def note(self, change: PlanChange, refusals: Collection[Refusal], now: float) -> None:
        """Note the first refusal of a change, unless a fresh view removes its cause."""
        refusal = next(iter(refusals), None)
        if refusal is None or refusal.reason.kind is RefusalKind.RACE or refusal.reason is Reason.QUANTUM:
            return
        if isinstance(change, CoresChange):
            # A job whose cores cannot change keeps them, and another request costs no job anything.
            return
        number = change.number
        if isinstance(change, SuspendChange | ResizeChange):
            self._not_stopped[number] = now + NOTED_S
        elif refusal.reason.excluded_s:
            nodes = frozenset(one.node for one in refusals if one.reason.excluded_s and one.node)
            known = self._closed.get(number, (0.0, frozenset[str]()))[1]
            self._closed[number] = now + refusal.reason.excluded_s, known | nodes
        else:
            self._not_started[number] = now + NOTED_S

    def note_unplaced(self, numbers: frozenset[int], may_stop: bool, until_s: float) -> None:
        """Leave out jobs that fit nowhere, whatever is preempted, until this time. `may_stop`: the plan might preempt,
        so `numbers` are all of them."""
        if may_stop:
            self._unplaced = numbers
        self._not_started.update(dict.fromkeys(numbers, until_s))

    def forget(self, number: int) -> None:
        """Drop the notes on a job that has changed."""
        for notes in (self._not_started, self._not_stopped, self._closed):
            notes.pop(number, None)

    def at(self, now: float) -> ExcludedJobs:
        """Return the exclusions at `now`, and drop expired notes."""
        if not (self._not_started or self._not_stopped or self._closed or self._unplaced):
            return NONE_EXCLUDED
        for ends in (self._not_started, self._not_stopped):
            for number in [number for number, end in ends.items() if end <= now]:
                del ends[number]
        for number in [number for number, (end, _) in self._closed.items() if end <= now]:
            del self._closed[number]
        if not (self._not_started or self._not_stopped or self._closed or self._unplaced):
            return NONE_EXCLUDED
        nodes = {number: nodes for number, (_, nodes) in self._closed.items()}
        return ExcludedJobs(frozenset(self._not_started), frozenset(self._not_stopped), nodes, self._unplaced)

    @property
    def has_notes(self) -> bool:
        """Return whether any job has a note that expires."""
        return bool(self._not_started or self._not_stopped or self._closed)

    @property
    def next_s(self) -> float:
        """When the first note expires, in Unix seconds; infinite without notes."""
        if not self.has_notes:
            return float("inf")
        ends = [*self._not_started.values(), *self._not_stopped.values(), *(end for end, _ in self._closed.values())]
        return min(ends, default=float("inf"))
