"""Early feedback under an order: a job that has never run gets time slices beside running jobs.

Gandiva (OSDI 2018, section 3.1) time-slices pending jobs at once, since many fail or are ended by their users within
minutes. Under an order a newcomer that has waited for a quantum joins running jobs in time slices, where no device is
free for it. After two slices of its own it is suspended, and waits in the queue like any preempted job. Until then its
hosts run at part of their speed. A host loses its devices only where the newcomer cannot be suspended.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from ganger_master.core.gang_model import Gang, GangIntent
from ganger_master.core.job_model import JobRecord, SuspendLevel
from ganger_master.core.plan_changes import Goal, PlanChange, Purpose, SuspendChange
from ganger_master.planner.colocations import is_settled
from ganger_master.planner.context import PlanContext, PlanOutcome
from ganger_master.planner.device_groups import devices_of
from ganger_master.planner.job_table import LiveTable
from ganger_master.planner.matrices import SliceMatrices, SliceQuantum, least_memory

# Gangs on one device: a host loses half of its time at most.
_MOST_ROWS: Final = 2
# For how many quanta a newcomer runs in slices: it has two of its own, and its host as many.
_STAY_QUANTA: Final = 4
# Searches for places in a quantum, at most.
_SEARCHES: Final = 4


@dataclass(frozen=True, slots=True)
class _Guest:
    """A newcomer in time slices, with the jobs on its devices, the oldest gang first."""

    job: JobRecord
    gang: Gang
    beside: tuple[tuple[JobRecord, Gang], ...]

    def leaves_s(self, quantum_s: float) -> float:
        """Return when it has had its slices, in Unix seconds; infinite while it starts or stops."""
        if not is_settled(self.job, self.gang):
            return math.inf
        return max(self.gang.create_time, self.job.start_time) + _STAY_QUANTA * quantum_s


class NewcomerStage:
    """The stage, with its state. It plans where no earlier stage has changes."""

    def __init__(self) -> None:
        self._quantum = SliceQuantum()
        # When places were searched last without success, and when a plan is due that it has asked for.
        self._searched_s, self._again_s = -math.inf, math.inf

    def plan(self, context: PlanContext) -> None:
        quantum_s = self._quantum.at(context.cluster.quantum_s, context.now)
        if quantum_s is None:
            return
        if not context.draft.changes and not context.is_giving:
            changes = _leaving(context, quantum_s) or self._joining(context, quantum_s)
            context.draft = replace(context.draft, changes=tuple(changes))
        self._again_s = max(self._due_s(context.jobs, quantum_s), context.now + quantum_s / _SEARCHES)
        context.come_back(self._again_s)

    def _joining(self, context: PlanContext, quantum_s: float) -> list[PlanChange]:
        """Return the slice matrices with which newcomers join running jobs."""
        table, now = context.jobs, context.now
        if now < self._searched_s + quantum_s / _SEARCHES:
            return []
        rows, since_s = table.newcomers
        barred = {*context.excluded.not_started, *context.migrating}
        newcomers = [job for job in table.jobs_at(rows[since_s + quantum_s <= now]) if job.number not in barred]
        if not newcomers:
            return []
        newcomers.sort(key=lambda job: (-job.spec.priority, job.number))
        view, running = context.room.view, table.running
        # A job that has just started has its first slice to itself.
        new = [job.number for job, gang in running if now < gang.create_time + quantum_s]
        apart = frozenset([*context.excluded.not_stopped, *context.on_trial, *context.migrating, *new])
        # The matrix of a group names all of its jobs, also those that take no newcomer.
        excluded = replace(context.excluded, not_stopped=apart)
        # Free devices are the order's: it may keep them for a job that needs more of them.
        joining = SliceMatrices(
            view, running, excluded, least_memory(view), Counter(), most_rows=_MOST_ROWS, takes_free=False
        )
        joining.join([(job, None) for job in newcomers])
        changes = joining.changes(quantum_s, context.cluster.changing)
        self._searched_s = -math.inf if changes else now
        return changes

    def _due_s(self, table: LiveTable, quantum_s: float) -> float:
        """Return when the next newcomer has waited for a quantum or has had its slices, in Unix seconds."""
        leaving = [guest.leaves_s(quantum_s) for guest in _guests(table)]
        _, since_s = table.newcomers
        return min([float(since_s.min(initial=math.inf)) + quantum_s, *leaving])

    def is_idle(self, context: PlanContext) -> bool:
        quantum_s = self._quantum.at(context.cluster.quantum_s, context.now)
        if quantum_s is None:
            return True
        due_s = self._due_s(context.jobs, quantum_s)
        return due_s == math.inf or context.now < self._again_s <= max(due_s, self._searched_s + quantum_s / _SEARCHES)

    def settle(self, outcome: PlanOutcome) -> None:
        self._quantum.settle(outcome)

    @property
    def on_trial(self) -> frozenset[int]:
        return frozenset()

    @property
    def memory(self) -> Mapping[str, Any]:
        return {}


def _guests(table: LiveTable) -> list[_Guest]:
    """Return the time-sliced jobs that came to the devices of others, by number."""
    if not table.has_sharing:
        return []
    found = []
    for numbers in dict.fromkeys(table.groups.mates.values()):
        known = [one for number in numbers if (one := table.get(number)) is not None]
        pairs = [(job, gang) for job, gang in known if gang is not None and gang.node_set]
        pairs.sort(key=lambda pair: (pair[1].create_time, pair[0].number))
        devices = [devices_of([gang]) for _, gang in pairs]
        for at, (job, gang) in enumerate(pairs):
            beside = [other for other in range(len(pairs)) if other != at and devices[at] & devices[other]]
            if beside and beside[0] < at:
                found.append(_Guest(job, gang, tuple([pairs[other] for other in beside])))
    return sorted(found, key=lambda guest: guest.job.number)


def _leaving(context: PlanContext, quantum_s: float) -> list[PlanChange]:
    """Return the suspensions of the newcomers that have had their slices. Where one cannot be suspended, the jobs that
    share its devices are."""
    changes = dict[int, PlanChange]()
    for guest in _guests(context.jobs):
        if context.now < guest.leaves_s(quantum_s):
            continue
        for going in (((guest.job, guest.gang),), guest.beside):
            if all(_may_leave(context, *pair) for pair in going):
                changes.update({one.number: _suspension(one) for one, _ in going})
                break
    return list(changes.values())


def _may_leave(context: PlanContext, job: JobRecord, gang: Gang) -> bool:
    if gang.node_set in context.cluster.changing or job.number in context.excluded.not_stopped:
        return False
    can = job.spec.preemptible and job.capabilities.checkpoint
    return can and is_settled(job, gang) and gang.intent is GangIntent.RUN


def _suspension(job: JobRecord) -> PlanChange:
    purpose = Purpose(Goal.UNPACK, detail="its first time slices are over")
    return SuspendChange(job.number, job.revision, level=SuspendLevel.CHECKPOINT, purpose=purpose)
