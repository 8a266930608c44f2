"""Plans that need no pass: those that would certainly change nothing, and those whose jobs are known without ranking.

Virtual time is full of events after which no plan would do anything. A plan that reports the order of pending jobs is
never vain, for every event changes that order.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from ganger.job_state import JobState

from ganger_master.core.job_model import JobRecord
from ganger_master.core.plan_changes import StartChange, SuspendChange
from ganger_master.planner.context import ClusterChange, PlanContext
from ganger_master.planner.job_table import LiveTable
from ganger_master.planner.plan import PlanDraft, may_start, started
from ganger_master.planner.terms import terms_of
from ganger_master.policies import Policy
from ganger_master.policies.orders import JobOrder
from ganger_master.policies.stages import (
    Grow,
    Migrate,
    ResizeByOptimus,
    ShareByTimeSlices,
    StartByTetris,
    Tune,
)


@dataclass(frozen=True, slots=True)
class PlannedJobs:
    """The last plan: the jobs that it started and stopped (together `jobs`), and the jobs to start once the stopped
    ones have released their devices, in order."""

    at_s: float = -math.inf
    started: frozenset[int] = frozenset()
    stopped: frozenset[int] = frozenset()
    follow: tuple[int, ...] = ()
    jobs: frozenset[int] = frozenset()


NOTHING_PLANNED: Final = PlannedJobs()


class VainPlans:
    """Short cuts of one loop."""

    def __init__(self, policy: Policy, order: JobOrder) -> None:
        self._policy, self._order = policy, order
        # Running gangs keep their devices, cores and memory.
        self._is_plain = not policy.has(Tune, StartByTetris, ResizeByOptimus)
        # Plans concern pending jobs only.
        self._only_for_waiting = self._is_plain and not policy.has(Migrate, Grow, ShareByTimeSlices)
        # A plan only starts jobs, on any free GPUs, and its outcome does not depend on time.
        does_more = not self._only_for_waiting or order.preempts or order.learns
        changes = order.next_change is not None or order.with_history is not None
        self._only_starts = policy.placement.by_counts and not (does_more or changes)
        # Kept while nothing but this plan has happened at its instant and its effects do not change the ranking.
        self._planned = NOTHING_PLANNED

    def follow(self, change: ClusterChange) -> None:
        """Note what has changed."""
        planned = self._planned.jobs
        if planned and not (
            planned.issuperset([job.number for job, _, _ in change.jobs]) and planned.issuperset(change.forgotten)
        ):
            self._planned = NOTHING_PLANNED

    def is_vain(self, context: PlanContext, resting: Collection[int]) -> bool:
        """Return whether a plan would certainly change nothing. `resting`: numbers of jobs that wait for a plan that
        may preempt."""
        table = context.jobs
        planned = self._carried_out(table, context.now)
        if planned.started and not planned.follow:
            # All chosen jobs have started; another pass would choose the same ones.
            return True
        if self._only_for_waiting and not table.has_waiting:
            self._planned = NOTHING_PLANNED
            return True
        if self._only_starts and table.quotas is None:
            return self._starts_no_job(table, context.free_devices)
        return not context.may_preempt and self._is_futile(context, resting)

    def starts_no_job(self, table: LiveTable, free: int) -> bool:
        """Return whether plans only start jobs, and none can start on so many free devices."""
        return self._only_starts and table.quotas is None and self._starts_no_job(table, free)

    def shortcut(self, context: PlanContext) -> PlanDraft | None:
        """Return the result of the pass if the chosen jobs are known without ranking all jobs; else None."""
        table, now = context.jobs, context.now
        found = [table.get(number) for number in self._carried_out(table, now).follow]
        jobs = [one[0] for one in found if one is not None]
        if not jobs and self._only_starts and table.quotas is None and self._order.by_arrival and table.has_waiting:
            jobs = self._first_of_queue(table, context.free_devices)
        if not jobs:
            return None
        return started(jobs, self._policy.placement, table, now, context.room, terms=terms_of(self._policy, table))

    def note(self, found: PlanDraft, table: LiveTable, now: float) -> None:
        """Note a plan, if the next pass of its instant would choose the same jobs."""
        self._planned = self._repeatable(found, table, now)

    def _repeatable(self, found: PlanDraft, table: LiveTable, now: float) -> PlannedJobs:
        is_steady = self._order.is_steady and self._order.next_change is None
        if not is_steady or not self._only_for_waiting or table.quotas is not None:
            return NOTHING_PLANNED
        if found.waits and not (found.follow and not found.unplaced and self._policy.placement.by_counts):
            return NOTHING_PLANNED
        started = frozenset([change.number for change in found.changes if isinstance(change, StartChange)])
        stopped = frozenset([change.number for change in found.changes if isinstance(change, SuspendChange)])
        return PlannedJobs(now, started, stopped, found.follow, started | stopped)

    def _carried_out(self, table: LiveTable, now: float) -> PlannedJobs:
        """Return the last plan of this instant if all of its changes have taken effect, else `NOTHING_PLANNED`."""
        planned = self._planned
        if planned.at_s != now:
            return NOTHING_PLANNED
        runs = [(found := table.get(number)) and found[0].state is JobState.HOLDING for number in planned.started]
        left = [(found := table.get(number)) is None or not found[0].epoch for number in planned.stopped]
        return planned if all(runs) and all(left) else NOTHING_PLANNED

    def _first_of_queue(self, table: LiveTable, free: int) -> list[JobRecord]:
        """Return the jobs that an order by arrival starts on the free GPUs."""
        found: list[JobRecord] = []
        least = table.least_waiting_gpus
        for job in table.queue():
            if free < least:
                break
            if job.gpus <= free:
                found.append(job)
                free -= job.gpus
            elif self._order.is_strict:
                break
        return found

    def _starts_no_job(self, table: LiveTable, free: int) -> bool:
        """Return whether too few GPUs are free in all for a plan that can only start jobs."""
        if not (self._order.is_strict and self._order.by_arrival):
            return not table.has_waiting or table.least_waiting_gpus > free
        first = next(table.queue(), None)
        return first is None or first.gpus > free

    def _is_futile(self, context: PlanContext, resting: Collection[int]) -> bool:
        """Return whether a plan that may not preempt would start no job and the next plan is already scheduled."""
        table, pace = context.jobs, context.pace
        is_scheduled = pace.due_s == pace.stopped_at_s + pace.every_s > context.now
        if not is_scheduled or not self._is_plain or not table.has_waiting:
            return False
        if may_start(self._policy.placement, table, context.room, terms_of(self._policy, table), resting):
            return False
        # Skipping the pass must not skip its effect on the job estimates, which depend on the times of passes.
        table.look(context.now, self._order)
        return True
