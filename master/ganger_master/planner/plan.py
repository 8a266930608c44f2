"""One pass of the planner: choose the jobs that should run, and make the plan that leads there.

The policy's order ranks the jobs, and they are chosen by counts of devices. Running jobs that stay chosen keep their
devices. The others are placed in order: on free devices, then on devices of jobs that were not chosen, which are
preempted only where they are in the way. If both fail, the pass preempts the smallest set of lower-ranked jobs that
makes room; else fragments would keep a large gang pending for ever. Under an order that regroups, jobs of any rank are
moved first, if they fit elsewhere. Jobs that move or wait for devices to be returned start in a later pass, and no
lower-ranked job takes those devices meanwhile. Devices that an overdue job could use go only to preemptible jobs.
The pass keeps no state.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from ganger.cluster.resources import GangShape
from ganger.cluster.search import PlacementRequest

from ganger_master.core.gang_model import Gang
from ganger_master.core.job_model import JobRecord
from ganger_master.planner.context import NOTHING_TO_DO, PlanContext, PlanDraft
from ganger_master.planner.device_groups import units
from ganger_master.planner.gang_fitting import GangFitting, PreemptionCandidates
from ganger_master.planner.plan_pace import NONE_EXCLUDED
from ganger_master.planner.ranked_queue import ChosenJobs, choose, queue_of
from ganger_master.policies.job_facts import Integers

# Up to so many pending jobs, trying to place them all is cheaper than ranking all live jobs.
_FEW = 8


def plan(context: PlanContext) -> PlanDraft:
    """Return the changes to propose now. A plan that may not preempt only starts jobs that fit on free devices."""
    table = context.jobs
    if not table.has_waiting:
        return NOTHING_TO_DO
    few = table.waiting_jobs(_FEW) if context.excluded is NONE_EXCLUDED else []
    if few and sum([job.gpus for job in few]) <= _free_devices(context):
        # If all pending jobs fit, their order makes no difference.
        found = started(few, context)
        if found is not None:
            return found
    queue = queue_of(context, as_one=bool(context.terms.mates))
    if queue.is_unchanged:
        return PlanDraft(next_change_s=queue.changes_at, line=queue.line)
    return carried_out(choose(queue), context)


def started(jobs: Sequence[JobRecord], context: PlanContext) -> PlanDraft | None:
    """Return the plan that starts exactly these pending jobs, in this order; None if one of them does not fit."""
    fitting = GangFitting(context)
    if fitting.starts_all(jobs):
        return PlanDraft(fitting.changes, line=np.array([job.number for job in jobs], np.int64))
    fitting.undo()
    return None


def _free_devices(context: PlanContext) -> int:
    room, placement = context.room, context.policy.placement
    if placement.counts is not None:
        return placement.counts(room.view).count
    room.follow()
    return room.free_devices


def may_start(context: PlanContext, resting: Collection[int] = ()) -> bool:
    """Return whether a pending job, other than `resting` (numbers), may fit on free devices. If not, `plan` without
    preemption starts no job, whatever the order."""
    room = context.room
    room.follow()
    vain: set[GangShape] = set()
    for job in context.jobs.waiting_at_most(room.free_devices):
        if job.number in resting:
            continue
        shape = context.terms.shape(job)
        if job.epoch or shape.locality.wish:
            # Where it is parked, or how long it has waited for its preferred locality, matters.
            return True
        if shape not in vain:
            if context.policy.placement.place(room, PlacementRequest(shape)) is not None:
                return True
            vain.add(shape)
    return False


def carried_out(
    choice: ChosenJobs,
    context: PlanContext,
    resized: Sequence[tuple[JobRecord, Gang]] = (),
    placing: Integers | None = None,
    going: Sequence[tuple[JobRecord, Gang]] | None = None,
) -> PlanDraft:
    """Return the changes that lead to a choice of jobs, made by the order or in its place.

    resized: running jobs that stop to start with another size; they count as neither running nor chosen.
    placing: positions of the chosen pending jobs in the order of placement; None: that of the line.
    going: jobs that return devices, with gangs of what they return; None: those of the table.
    """
    table, order = context.jobs, context.order
    rows, line, waiting, is_chosen = choice.rows, choice.line, choice.waiting, choice.is_chosen
    first = line[(is_chosen & waiting)[line]] if placing is None else placing
    if not (len(first) or resized):
        return PlanDraft(next_change_s=choice.changes_at, line=choice.queue)
    fitting = GangFitting(context)
    fitting.stop(resized)
    if np.count_nonzero(choice.overdue):
        numbers = choice.facts.number
        fitting.keep_for(set(numbers[choice.overdue & waiting].tolist()), set(numbers[choice.passing].tolist()))
    if going is None:
        going = table.going
    going = [*going, *resized]
    unserved = fitting.start(table.jobs_at(rows[first]), going=going)
    if not unserved:
        return PlanDraft(fitting.changes, next_change_s=choice.changes_at, line=choice.queue)
    unplaced = frozenset(job.number for job in unserved if job.number in context.excluded.unplaced)
    follow: tuple[int, ...] = ()
    if context.may_preempt:
        leaving = units(table.gangs_at(rows[line[(choice.facts.is_running & ~is_chosen)[line]]]), context.terms.mates)
        staying = PreemptionCandidates(choice, context) if order.preempts else None
        left = fitting.make_way(unserved, leaving, going, staying)
        if left and not order.is_strict:
            # Jobs further back may use what these cannot.
            fitting.start(table.jobs_at(rows[line[(waiting & ~is_chosen)[line]]]), beside_others=True)
        unplaced = frozenset(job.number for job in left)
        follow = tuple([job.number for job in unserved if job.number not in unplaced])
    fitting.undo()
    unplaced -= fitting.waited_for
    displaced = frozenset(fitting.displaced) if order.rests else frozenset[int]()
    return PlanDraft(fitting.changes, True, choice.changes_at, choice.queue, unplaced, follow, displaced)
