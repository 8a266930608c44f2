"""The stage that starts and preempts jobs, with the pass that its policy needs.

Virtual time is full of events after which no plan would do anything: short cuts find the plans that would certainly
change nothing, and those whose jobs are known without ranking. A plan that reports the order of pending jobs is never
vain, for every event changes that order.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from ganger.job_state import JobState

from ganger_master.core.job_model import JobRecord
from ganger_master.core.plan_changes import StartChange, SuspendChange
from ganger_master.planner.context import ClusterChange, PlanContext, PlanDraft, PlanOutcome
from ganger_master.planner.in_place_resize import Resizing
from ganger_master.planner.job_table import LiveTable
from ganger_master.planner.plan import may_start, plan, started
from ganger_master.planner.plan_pace import NONE_EXCLUDED, RoundPace
from ganger_master.planner.ranked_queue import within_quotas
from ganger_master.policies import Policy
from ganger_master.policies.orders import JobOrder
from ganger_master.policies.stages import Grow, Migrate, ResizeByOptimus, ShareByTimeSlices, StartByTetris, Tune


class OrderStage:
    """The stage, with its state: jobs that wait for the next plan that may preempt, and resizes under way."""

    def __init__(self, policy: Policy, order: JobOrder, resizing: Resizing | None = None) -> None:
        self.resizing = resizing
        self._tune, self._resizes = policy.stage(Tune), policy.has(ResizeByOptimus)
        self.vain = VainPlans(policy, order)
        # Jobs that the last preempting plan preempted for others.
        self._displaced: frozenset[int] = frozenset()
        self._packed_at_s = -math.inf

    def plan(self, context: PlanContext) -> None:
        context.add(self.found(context))

    def resting(self, context: PlanContext) -> frozenset[int]:
        """Return the numbers of the jobs that only a plan that may preempt starts: the next newcomers come first."""
        return frozenset() if context.may_preempt else self._displaced

    def found(self, context: PlanContext) -> PlanDraft:
        """Return the changes of the pass."""
        found = self.vain.shortcut(context) or self._packed_round(context)
        if found is None:
            context = replace(context, excluded=context.excluded.resting(self.resting(context)))
            if self.resizing is not None:
                context = replace(context, resizing=self.resizing)
            found = plan_by(context)
        self._displaced = found.displaced or self._displaced
        self.resizing = found.resizing or self.resizing
        self.vain.note(found, context.jobs, context.now)
        if found.next_change_s < math.inf:
            # A plan that may not preempt hardly depends on the order. Sizes change as often as a plan may preempt.
            pace = context.pace
            next_s = pace.next_stop_s(context.now) if self._resizes else pace.stopped_at_s + pace.every_s
            found = replace(found, next_change_s=max(found.next_change_s, next_s))
        return found

    def _packed_round(self, context: PlanContext) -> PlanDraft | None:
        """Return the changes that pack a round, where the tuning places jobs; None where it does not, or cannot."""
        tune, now = self._tune, context.now
        if tune is None or not (tune.packs_rounds and context.may_preempt and isinstance(context.pace, RoundPace)):
            return None
        from ganger_master.planner.synergy_round import plan_packed

        # A job that a round preempted may rank before others now, but a round preempts only once.
        may_preempt, self._packed_at_s = self._packed_at_s != now, now
        return plan_packed(tune.tuning, replace(context, may_preempt=may_preempt, excluded=within_quotas(context)))

    def is_idle(self, context: PlanContext) -> bool:
        return self.vain.is_vain(context, self._displaced)

    def settle(self, outcome: PlanOutcome) -> None:
        if self.resizing is not None:
            self.resizing = self.resizing.without(outcome.refused)

    @property
    def on_trial(self) -> frozenset[int]:
        return frozenset()

    @property
    def memory(self) -> Mapping[str, Any]:
        return {} if self.resizing is None else {"resizing": self.resizing}


def plan_by(context: PlanContext) -> PlanDraft:
    """Return the changes to propose now, with the pass that the policy needs."""
    policy = context.policy
    if context.may_preempt and context.order.preempts and context.jobs.quotas is not None:
        context = replace(context, excluded=within_quotas(context))
    starter, tune = policy.starter, policy.stage(Tune)
    if isinstance(starter, ResizeByOptimus):
        # Its models need SciPy, which other policies do not load.
        from ganger_master.planner.optimus_stage import plan_optimus

        return plan_optimus(context)
    if isinstance(starter, StartByTetris):
        from ganger_master.planner.tetris_stage import plan_tetris

        return plan_tetris(starter.knobs, context)
    if tune is not None:
        from ganger_master.planner.tune_stage import plan_tuned

        return plan_tuned(tune.tuning, context)
    return plan(context)


# -- short cuts -----------------------------------------------------------------------------------------------------


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
        return started(jobs, replace(context, excluded=NONE_EXCLUDED))

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
        if may_start(context, resting):
            return False
        # Skipping the pass must not skip its effect on the job estimates, which depend on the times of passes.
        table.look(context.now, self._order)
        return True
