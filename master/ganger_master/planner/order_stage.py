"""The stage that starts and preempts jobs, with the pass that its policy needs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace as replace_of

from ganger_master.core.job_model import JobRecord
from ganger_master.planner.context import PlanContext, PlanDraft, PlanOutcome, PlanStage
from ganger_master.planner.in_place_resize import Resizing
from ganger_master.planner.job_table import LiveTable
from ganger_master.planner.plan import may_start, plan, started, within_quotas
from ganger_master.planner.plan_pace import INSTANT_S, NONE_EXCLUDED
from ganger_master.policies import (
    Grow,
    Migrate,
    Policy,
    ResizeByOptimus,
    ShareByTimeSlices,
    StartByTetris,
    Tune,
)
from ganger_master.policies.orders import JobOrder

if TYPE_CHECKING:
    from ganger_master.planner.synergy_round import Packing
    from ganger_master.policies.tunings import Tuning


class OrderStage(PlanStage):
    """The stage, with its state: jobs that wait for the next plan that may preempt, and resizes under way."""

    def __init__(self, policy: Policy, order: JobOrder, resizing: Resizing | None) -> None:
        self.resizing = resizing
        tune, self._resizes = policy.stage(Tune), policy.has(ResizeByOptimus)
        # The tuning that packs rounds, if there is one.
        self._packer: Tuning | None = None
        if tune is not None and tune.packs_rounds:
            # Few policies pack rounds, and the import loads what only they use.
            from ganger_master.planner.synergy_round import remembering

            self._packer = remembering(tune.tuning)
        self._order = order
        is_plain = not policy.has(Tune, StartByTetris, ResizeByOptimus)
        # Plans concern pending jobs only, and running gangs keep what they have.
        self._is_plain = is_plain
        self._only_for_waiting = is_plain and not policy.has(Migrate, Grow, ShareByTimeSlices)
        # A plan only starts jobs, on any free GPUs, and its outcome does not depend on time.
        does_more = not self._only_for_waiting or order.preempts or order.learns
        changes = order.next_change is not None or order.with_history is not None
        self._only_starts = policy.placement.by_counts and not (does_more or changes)
        # Jobs that the last preempting plan preempted for others.
        self._displaced: frozenset[int] = frozenset()
        # When the last round began; its packing until all jobs that it places run.
        self._packed_at_s = -math.inf
        self._packing: Packing | None = None
        self._could_not_pack = False

    def plan(self, context: PlanContext) -> None:
        context.add(self.found(context))

    def resting(self, context: PlanContext) -> frozenset[int]:
        """Return the numbers of the jobs that only a plan that may preempt starts: the next newcomers come first."""
        return frozenset() if context.may_preempt else self._displaced

    def found(self, context: PlanContext) -> PlanDraft:
        """Return the changes of the pass."""
        packer = self._packer
        found = self._first_of_queue(context) if packer is None else self._packed_round(packer, context)
        if found is None:
            if packer is not None and not (context.now == self._packed_at_s and self._could_not_pack):
                context = replace_of(context, may_preempt=False)
            if resting := self.resting(context):
                context = replace_of(context, excluded=context.excluded.resting(resting))
            if self.resizing is not None:
                context = replace_of(context, resizing=self.resizing)
            found = plan_by(context)
        if packer is not None and (context.is_news or context.jobs.has_waiting):
            found = replace(found, next_change_s=min(found.next_change_s, self._packed_at_s + context.pace.round_s))
        self._displaced = found.displaced or self._displaced
        self.resizing = found.resizing or self.resizing
        if found.next_change_s < math.inf:
            # A plan that may not preempt hardly depends on the order. Sizes change as often as a plan may preempt.
            pace = context.pace
            next_s = pace.next_stop_s(context.now) if self._resizes else pace.stopped_at_s + pace.every_s
            found = replace(found, next_change_s=max(found.next_change_s, next_s))
        return found

    def _packed_round(self, tuning: Tuning, context: PlanContext) -> PlanDraft | None:
        """Return the changes of a round, where the tuning places jobs; None between rounds, or where it cannot.

        A round begins with a plan that may preempt. Until all jobs that it places run, plans start these only. Then
        others start where they fit, until the next round."""
        from ganger_master.planner.synergy_round import packing_of, plan_packed

        begins = context.may_preempt and context.now >= self._packed_at_s + context.pace.round_s - INSTANT_S
        if begins:
            self._packed_at_s = context.now
            self._packing = packing_of(tuning, replace_of(context, excluded=within_quotas(context)))
            self._could_not_pack = self._packing is None
        if self._packing is None:
            return None
        found = plan_packed(self._packing, replace_of(context, may_preempt=begins))
        if not found.unsettled:
            self._packing = None
        return found.draft if found.draft.changes or self._packing is not None else None

    def is_idle(self, context: PlanContext) -> bool:
        table = context.jobs
        if self._only_for_waiting and not table.has_waiting:
            return True
        if self._only_starts and table.is_by_arrival:
            return self.starts_no_job(table, context.free_devices)
        return not context.may_preempt and self._is_futile(context)

    def _is_futile(self, context: PlanContext) -> bool:
        """Return whether a plan that may not preempt would start no job and the next plan is already scheduled."""
        table, pace = context.jobs, context.pace
        is_scheduled = pace.due_s == pace.stopped_at_s + pace.every_s > context.now
        if not (is_scheduled and self._is_plain and table.has_waiting) or may_start(context, self.resting(context)):
            return False
        # Skipping the pass must not skip its effect on the job estimates, which depend on the times of passes.
        table.look(context.now, self._order)
        return True

    def starts_no_job(self, table: LiveTable, free: int) -> bool:
        """Return whether plans only start jobs, and none can start on so many free devices."""
        if not self._only_starts or not table.is_by_arrival:
            return False
        if not (self._order.is_strict and self._order.by_arrival):
            return not table.has_waiting or table.least_waiting_gpus > free
        first = next(table.queue(), None)
        return first is None or first.gpus > free

    def _first_of_queue(self, context: PlanContext) -> PlanDraft | None:
        """Return the result of the pass without a ranking, where an order by arrival starts jobs on any free GPUs."""
        table, starts = context.jobs, self._only_starts and self._order.by_arrival
        if not (starts and table.has_waiting and table.is_by_arrival):
            return None
        found: list[JobRecord] = []
        free, least = context.free_devices, table.least_waiting_gpus
        for job in table.queue():
            if free < least or (job.gpus > free and self._order.is_strict):
                break
            if job.gpus <= free:
                found.append(job)
                free -= job.gpus
        return started(found, replace_of(context, excluded=NONE_EXCLUDED)) if found else None

    def settle(self, outcome: PlanOutcome) -> None:
        if self.resizing is not None:
            self.resizing = self.resizing.without(outcome.refused)

    @property
    def memory(self) -> Mapping[str, Any]:
        return {} if self.resizing is None else {"resizing": self.resizing}


def plan_by(context: PlanContext) -> PlanDraft:
    """Return the changes to propose now, with the pass that the policy needs."""
    policy = context.policy
    if context.may_preempt and context.order.preempts and context.jobs.quotas is not None:
        context = replace_of(context, excluded=within_quotas(context))
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
