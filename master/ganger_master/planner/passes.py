"""The stage that starts and preempts jobs, with the pass that its policy needs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from ganger.cluster.capacity_index import CapacityIndex

from ganger_master.planner.context import PlanContext, PlanOutcome
from ganger_master.planner.job_table import LiveTable
from ganger_master.planner.order_stage import within_quotas
from ganger_master.planner.plan import PlanDraft, plan
from ganger_master.planner.plan_pace import RoundPace
from ganger_master.planner.refusal_backoff import NONE_EXCLUDED, ExcludedJobs
from ganger_master.planner.terms import capacity_of, terms_of
from ganger_master.planner.vain_plans import VainPlans
from ganger_master.policies import Policy
from ganger_master.policies.job_facts import Capacity, Floats, Integers
from ganger_master.policies.optimus_sizes import Believed, nothing_believed
from ganger_master.policies.orders import JobOrder
from ganger_master.policies.stages import ResizeByOptimus, StartByTetris, Tune

if TYPE_CHECKING:
    # Modules of special passes load only for their policies: the import takes longer than many passes.

    from ganger_master.planner.in_place_resize import Resizing
    from ganger_master.policies.tunings import Known


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
        context.add(self.found(context, context.excluded, context.may_preempt))

    def found(self, context: PlanContext, kept_out: ExcludedJobs, may_stop: bool) -> PlanDraft:
        """Return the changes of the pass."""
        found = self.vain.shortcut(context) or self._packed_round(context, kept_out, may_stop)
        if found is None:
            found = self._pass(context, kept_out if may_stop else kept_out.resting(self._displaced), may_stop)
        self._displaced = found.displaced or self._displaced
        self.resizing = found.resizing or self.resizing
        self.vain.note(found, context.jobs, context.now)
        if found.next_change_s < math.inf:
            # A plan that may not preempt hardly depends on the order. Sizes change as often as a plan may preempt.
            pace = context.pace
            next_s = pace.next_stop_s(context.now) if self._resizes else pace.stopped_at_s + pace.every_s
            found = replace(found, next_change_s=max(found.next_change_s, next_s))
        return found

    def _packed_round(self, context: PlanContext, kept_out: ExcludedJobs, may_stop: bool) -> PlanDraft | None:
        """Return the changes that pack a round, where the tuning places jobs; None where it does not, or cannot."""
        tune, now = self._tune, context.now
        if tune is None or not (tune.packs_rounds and may_stop and isinstance(context.pace, RoundPace)):
            return None
        from ganger_master.planner.synergy_round import plan_packed
        from ganger_master.policies.tunings import NOTHING

        # A job that a round preempted may rank before others now, but a round preempts only once.
        may_stop, self._packed_at_s = self._packed_at_s != now, now
        oracle, capacity, table = context.settings.oracle, context.capacity, context.jobs
        return plan_packed(
            tune.tuning,
            context.order,
            table,
            now,
            capacity,
            context.room.view,
            may_stop,
            oracle,
            within_quotas(context.order, table, now, capacity, oracle, kept_out),
            known=(None if context.rates is None else context.rates.known) or NOTHING,
        )

    def _pass(self, context: PlanContext, kept_out: ExcludedJobs, may_stop: bool) -> PlanDraft:
        policy, settings, rates = context.policy, context.settings, context.rates
        capacity = self._capacity(context)
        return plan_by(
            policy,
            context.order,
            context.jobs,
            context.now,
            capacity,
            context.room,
            may_stop,
            remaining_s=settings.oracle,
            kept_out=kept_out,
            known=None if rates is None else rates.known,
            trials=_NO_TRIALS if rates is None else rates.trials,
            believed=nothing_believed if rates is None else rates.believed(capacity.gpus_per_node),
            resize_s=settings.resize_s,
            resizing=self.resizing,
        )

    def is_idle(self, context: PlanContext) -> bool:
        return self.vain.is_vain(context, self._displaced)

    def _capacity(self, context: PlanContext) -> Capacity:
        """Return the capacity with what resizes under way hold."""
        if self.resizing is None or context.settings.capacity is not None:
            return context.capacity
        return capacity_of(context.room.view, context.jobs, self.resizing)

    def settle(self, outcome: PlanOutcome) -> None:
        if self.resizing is not None:
            self.resizing = self.resizing.without(outcome.refused)

    @property
    def on_trial(self) -> frozenset[int]:
        return frozenset()

    @property
    def memory(self) -> Mapping[str, Any]:
        return {} if self.resizing is None else {"resizing": self.resizing}


_NO_TRIALS: Final[Mapping[int, int]] = MappingProxyType({})


def plan_by(
    policy: Policy,
    order: JobOrder,
    table: LiveTable,
    now: float,
    capacity: Capacity,
    room: CapacityIndex,
    may_stop: bool = True,
    *,
    remaining_s: Callable[[Integers], Floats] | None = None,
    kept_out: ExcludedJobs = NONE_EXCLUDED,
    known: Known | None = None,
    trials: Mapping[int, int] = MappingProxyType({}),
    believed: Believed = nothing_believed,
    resize_s: float = 0.0,
    resizing: Resizing | None = None,
) -> PlanDraft:
    """Return the changes to propose now, as `plan` does.

    order: the policy's order, or one derived from it.
    remaining_s: an oracle's remaining seconds, for orders that need one.
    known, trials: for policies that tune.
    believed, resize_s, resizing: for a policy that resizes.
    """
    if may_stop and order.preempts and table.quotas is not None:
        kept_out = within_quotas(order, table, now, capacity, remaining_s, kept_out)
    starter, tune, terms = policy.starter, policy.stage(Tune), terms_of(policy, table)
    given = order, policy.placement, table, now, capacity, room
    if isinstance(starter, ResizeByOptimus):
        # Its models need SciPy, which other policies do not load.
        from ganger_master.planner.in_place_resize import NOTHING_UNDER_WAY
        from ganger_master.planner.optimus_stage import plan_optimus

        under_way = resizing or NOTHING_UNDER_WAY
        return plan_optimus(*given, believed, may_stop, resize_s, kept_out, under_way, terms)
    if isinstance(starter, StartByTetris):
        from ganger_master.planner.tetris_stage import plan_tetris

        oracle = remaining_s if policy.order.knows_durations else None
        return plan_tetris(starter.knobs, order, table, now, capacity, room, oracle, kept_out)
    if tune is not None:
        from ganger_master.planner.tune_stage import plan_tuned
        from ganger_master.policies.tunings import NOTHING

        return plan_tuned(tune.tuning, *given, may_stop, remaining_s, kept_out, known or NOTHING, trials, terms)
    return plan(*given, may_stop, remaining_s, kept_out, terms)
