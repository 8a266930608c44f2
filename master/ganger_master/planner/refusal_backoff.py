"""What the master refused of a plan, so that the next ones do not ask for it again at once.

Whoever plans need not remember it: without it a plan asks once more. What is noted of a job stands until the job
changes, or for some seconds.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from ganger.cluster.refusals import Reason, Refusal, RefusalKind

from ganger_master.core.commands import Change

# What other jobs do may end it, and nobody says so.
_NOTED_SECONDS: Final = 5.0
# Nodes closed to a job, and for how long they probably are: where users and storage are concerned an operator has to do
# something; any other job may show that a node launches again.
_CLOSED_SECONDS: Final = {
    Reason.STORAGE_NOT_SHARED: 900.0,
    Reason.CANNOT_SWITCH_USER: 900.0,
    Reason.LAUNCH_FAILED: 30.0,
}


@dataclass(frozen=True, slots=True)
class ExcludedJobs:
    """Jobs by number: not to be started, not to be stopped, not to be placed on these nodes. `unplaced`: those for whom
    the last plan that might stop others found no place even so."""

    not_started: Collection[int] = ()
    not_stopped: Collection[int] = ()
    nodes: Mapping[int, frozenset[str]] = field(default_factory=dict)
    unplaced: Collection[int] = ()

    def resting(self, numbers: Collection[int]) -> ExcludedJobs:
        """With these, too, not to be started."""
        return replace(self, not_started=frozenset((*self.not_started, *numbers))) if numbers else self


NONE_EXCLUDED: Final = ExcludedJobs()


class RefusalBackoff:
    """Notes by job; at most one change of each is refused at a time, so there are no more than jobs."""

    def __init__(self) -> None:
        self._not_started: dict[int, float] = {}
        self._not_stopped: dict[int, float] = {}
        self._closed: dict[int, tuple[float, frozenset[str]]] = {}
        self._unplaced: frozenset[int] = frozenset()

    def note(self, change: Change, refusals: Collection[Refusal], now: float) -> None:
        """The first refusal is what counts. One that a fresh view cures is not noted."""
        refusal = next(iter(refusals), None)
        if refusal is None or refusal.reason.kind is RefusalKind.RACE or change.kind == "CORES":
            # Whose cores cannot be changed keeps them, and asking again costs nobody anything.
            return
        number = change.number
        if change.kind in ("SUSPEND", "RESIZE"):
            self._not_stopped[number] = now + _NOTED_SECONDS
        elif refusal.reason in _CLOSED_SECONDS:
            nodes = frozenset(one.node for one in refusals if one.reason in _CLOSED_SECONDS and one.node)
            known = self._closed.get(number, (0.0, frozenset[str]()))[1]
            self._closed[number] = now + _CLOSED_SECONDS[refusal.reason], known | nodes
        else:
            self._not_started[number] = now + _NOTED_SECONDS

    def note_unplaced(self, numbers: frozenset[int], may_stop: bool, now: float) -> None:
        """For whom no place was found, whoever might be stopped for them: others are served without them for a while.
        `may_stop`: the plan was one that might stop others, so these are all."""
        if may_stop:
            self._unplaced = numbers
        self._not_started.update(dict.fromkeys(numbers, now + _NOTED_SECONDS))

    def forget(self, number: int) -> None:
        """The job is another one now."""
        for notes in (self._not_started, self._not_stopped, self._closed):
            notes.pop(number, None)

    def at(self, now: float) -> ExcludedJobs:
        """What stands now; the rest is forgotten."""
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
    def next_s(self) -> float:
        """When the first note is over; infinite without any."""
        ends = [*self._not_started.values(), *self._not_stopped.values(), *(end for end, _ in self._closed.values())]
        return min(ends, default=float("inf"))
