"""The pass that a policy needs: the same for a live planner, a simulated trace and a replayed decision log."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING

from ganger.cluster.capacity_index import CapacityIndex

from ganger_master.planner.job_table import LiveTable
from ganger_master.planner.order_stage import within_quotas
from ganger_master.planner.plan import PlanDraft, plan
from ganger_master.planner.refusal_backoff import NONE_EXCLUDED, ExcludedJobs
from ganger_master.planner.terms import PassTerms
from ganger_master.policies import Policy
from ganger_master.policies.job_facts import Capacity, Floats, Integers
from ganger_master.policies.optimus_sizes import Believed, nothing_believed
from ganger_master.policies.orders import JobOrder

if TYPE_CHECKING:
    # Modules of special passes load only for their policies: the import takes longer than many passes.
    from ganger.cluster.resources import GangShape

    from ganger_master.core.model import JobRecord
    from ganger_master.planner.in_place_resize import Resizing
    from ganger_master.policies.tunings.demand import Known


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
    if policy.resizes:
        # Its models need SciPy, which other policies do not load.
        from ganger_master.planner.in_place_resize import NOTHING_UNDER_WAY
        from ganger_master.planner.optimus_stage import plan_optimus

        under_way = resizing or NOTHING_UNDER_WAY
        return plan_optimus(
            order, policy.placement, table, now, capacity, room, believed, may_stop, resize_s, kept_out, under_way
        )
    if policy.tetris is not None:
        from ganger_master.planner.tetris_stage import plan_tetris

        oracle = remaining_s if policy.order.knows_durations else None
        return plan_tetris(policy.tetris, order, table, now, capacity, room, oracle, kept_out)
    if policy.tuning is not None:
        from ganger_master.planner.tuned import plan_tuned
        from ganger_master.policies.tunings.demand import NOTHING

        return plan_tuned(
            policy.tuning,
            order,
            policy.placement,
            table,
            now,
            capacity,
            room,
            may_stop,
            remaining_s,
            kept_out,
            known or NOTHING,
            trials,
        )
    terms = terms_of(policy, table)
    return plan(order, policy.placement, table, now, capacity, room, may_stop, remaining_s, kept_out, terms)


def terms_of(policy: Policy, table: LiveTable) -> PassTerms:
    """Jobs on the same devices go together: another policy may have time-sliced or co-located them. Under a policy that
    co-locates, a job leaves memory for another one."""
    if not policy.packs:
        return PassTerms(mates_now=lambda: table.mates)
    return PassTerms(shape=_shape_for_two(), mates_now=lambda: table.mates)


@cache
def _shape_for_two() -> Callable[[JobRecord], GangShape]:
    from ganger_master.planner.colocation_stage import shape_for_two

    return shape_for_two
