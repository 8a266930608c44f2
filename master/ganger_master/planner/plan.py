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

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from ganger.cluster.capacity_index import CapacityIndex
from ganger.cluster.resources import GangShape
from ganger.cluster.search import PlacementRequest

from ganger_master.core.gang_model import Gang
from ganger_master.core.job_model import JobRecord
from ganger_master.core.plan_changes import PlanChange, StartChange
from ganger_master.planner.device_groups import units
from ganger_master.planner.gang_fitting import GangFitting, PreemptionCandidates
from ganger_master.planner.in_place_resize import Resizing
from ganger_master.planner.job_table import LiveTable
from ganger_master.planner.pass_terms import AS_ASKED, PassTerms
from ganger_master.planner.ranked_queue import ChosenJobs, asked, choose
from ganger_master.planner.refusal_backoff import NONE_EXCLUDED, ExcludedJobs
from ganger_master.policies.job_facts import Capacity, Floats, Integers
from ganger_master.policies.orders import JobOrder
from ganger_master.policies.placements import PlacementPreference


@dataclass(frozen=True, slots=True)
class PlanDraft:
    """The changes of one pass, and what the planner needs for the next one.

    waits: a chosen job has no place yet, so a later pass may find one without any event.
    next_change_s: when the order may change by itself, in Unix seconds; infinite if it changes only with events.
    line: numbers of all pending jobs in the order of the policy, with those that start now.
    unplaced: numbers of chosen jobs that fit nowhere, whatever is preempted. A pass that may not preempt lists those
        that an earlier pass found to be such.
    follow: numbers of jobs that start once the preempted ones have left, in order.
    displaced: numbers of preempted jobs that fit nowhere else, under an order that parks them for that.
    resizing: the resizes under way if the plan is proposed; None: as before.
    """

    changes: tuple[PlanChange, ...] = ()
    waits: bool = False
    next_change_s: float = math.inf
    line: Integers = field(default_factory=lambda: np.zeros(0, np.int64))
    unplaced: frozenset[int] = frozenset()
    follow: tuple[int, ...] = ()
    displaced: frozenset[int] = frozenset()
    resizing: Resizing | None = None

    @property
    def leaves_waiting(self) -> bool:
        """Return whether a pending job, chosen or not, does not start in this plan."""
        return self.waits or len(self.line) > sum(isinstance(change, StartChange) for change in self.changes)

    def followed_by(self, later: PlanDraft) -> PlanDraft:
        """Return a later stage's draft after these changes, without its changes of the same jobs and without the atomic
        groups of such changes."""
        if not self.changes and self.next_change_s == math.inf:
            return later
        numbers = {change.number for change in self.changes}
        groups = {change.together for change in later.changes if change.together and change.number in numbers}
        others = [one for one in later.changes if one.number not in numbers and one.together not in groups]
        next_s = min(self.next_change_s, later.next_change_s)
        return replace(later, changes=(*self.changes, *others), next_change_s=next_s)


NOTHING_TO_DO = PlanDraft()

# Up to so many pending jobs, trying to place them all is cheaper than ranking all live jobs.
_FEW = 8


def plan(
    order: JobOrder,
    placement: PlacementPreference,
    table: LiveTable,
    now: float,
    capacity: Capacity,
    room: CapacityIndex,
    may_stop: bool = True,
    remaining_s: Callable[[Integers], Floats] | None = None,
    kept_out: ExcludedJobs = NONE_EXCLUDED,
    terms: PassTerms = AS_ASKED,
) -> PlanDraft:
    """Return the changes to propose now. `room` is left unchanged.

    may_stop: jobs may be preempted; else only jobs that fit on free devices start.
    remaining_s: an oracle's remaining seconds by job number, for orders that need them.
    kept_out: jobs and nodes that recent refusals exclude.
    terms: the shapes and holdings to plan with.
    """
    if not table.has_waiting:
        return NOTHING_TO_DO
    few = table.waiting_jobs(_FEW) if kept_out is NONE_EXCLUDED else []
    if few and sum([job.gpus for job in few]) <= _free_devices(placement, room):
        # If all pending jobs fit, their order makes no difference.
        found = started(few, placement, table, now, room, kept_out, terms)
        if found is not None:
            return found
    of = asked(order, table, now, capacity, remaining_s, kept_out, bool(terms.mates))
    if of.is_unchanged:
        return PlanDraft(next_change_s=of.changes_at, line=of.line)
    return carried_out(choose(of), order, placement, table, now, room, may_stop, kept_out, terms)


def started(
    jobs: Sequence[JobRecord],
    placement: PlacementPreference,
    table: LiveTable,
    now: float,
    room: CapacityIndex,
    kept_out: ExcludedJobs = NONE_EXCLUDED,
    terms: PassTerms = AS_ASKED,
) -> PlanDraft | None:
    """Return the plan that starts exactly these pending jobs, in this order; None if one of them does not fit."""
    fitting = GangFitting(placement, room, table, now, kept_out, terms)
    if fitting.starts_all(jobs):
        return PlanDraft(fitting.changes, line=np.array([job.number for job in jobs], np.int64))
    fitting.undo()
    return None


def _free_devices(placement: PlacementPreference, room: CapacityIndex) -> int:
    if placement.counts is not None:
        return placement.counts(room.view).count
    room.follow()
    return room.free_devices


def may_start(
    placement: PlacementPreference,
    table: LiveTable,
    room: CapacityIndex,
    terms: PassTerms = AS_ASKED,
    resting: Collection[int] = (),
) -> bool:
    """Return whether a pending job, other than `resting` (numbers), may fit on free devices. If not, `plan` without
    `may_stop` starts no job, whatever the order."""
    room.follow()
    vain: set[GangShape] = set()
    for job in table.waiting_at_most(room.free_devices):
        if job.number in resting:
            continue
        shape = terms.shape(job)
        if job.epoch or shape.locality.wish:
            # Where it is parked, or how long it has waited for its preferred locality, matters.
            return True
        if shape not in vain:
            if placement.place(room, PlacementRequest(shape)) is not None:
                return True
            vain.add(shape)
    return False


def carried_out(
    choice: ChosenJobs,
    order: JobOrder,
    placement: PlacementPreference,
    table: LiveTable,
    now: float,
    room: CapacityIndex,
    may_stop: bool,
    kept_out: ExcludedJobs = NONE_EXCLUDED,
    terms: PassTerms = AS_ASKED,
    resized: Sequence[tuple[JobRecord, Gang]] = (),
    placing: Integers | None = None,
    going: Sequence[tuple[JobRecord, Gang]] | None = None,
) -> PlanDraft:
    """Return the changes that lead to a choice of jobs, made by `order` or in its place.

    resized: running jobs that stop to start with another size; they count as neither running nor chosen.
    placing: positions of the chosen pending jobs in the order of placement; None: that of the line.
    going: jobs that return devices, with gangs of what they return; None: those of the table.
    """
    rows, line, waiting, is_chosen = choice.rows, choice.line, choice.waiting, choice.is_chosen
    first = line[(is_chosen & waiting)[line]] if placing is None else placing
    if not (len(first) or resized):
        return PlanDraft(next_change_s=choice.changes_at, line=choice.queue)
    fitting = GangFitting(placement, room, table, now, kept_out, terms)
    fitting.stop(resized)
    if np.count_nonzero(choice.overdue):
        numbers = choice.facts.number
        fitting.keep_for(set(numbers[choice.overdue & waiting].tolist()), set(numbers[choice.passing].tolist()))
    if going is None:
        going = table.going
    going = [*going, *resized]
    crowded = fitting.start(table.jobs_at(rows[first]), going=going)
    if not crowded:
        return PlanDraft(fitting.changes, next_change_s=choice.changes_at, line=choice.queue)
    unplaced = frozenset(job.number for job in crowded if job.number in kept_out.unplaced)
    follow: tuple[int, ...] = ()
    if may_stop:
        leaving = units(table.gangs_at(rows[line[(choice.facts.is_running & ~is_chosen)[line]]]), terms.mates)
        staying = PreemptionCandidates(order, table, choice, terms, room) if order.preempts else None
        left = fitting.make_way(crowded, leaving, going, staying)
        if left and not order.is_strict:
            # Jobs further back may use what these cannot.
            fitting.start(table.jobs_at(rows[line[(waiting & ~is_chosen)[line]]]), beside_others=True)
        unplaced = frozenset(job.number for job in left)
        follow = tuple([job.number for job in crowded if job.number not in unplaced])
    fitting.undo()
    unplaced -= fitting.waited_for
    displaced = frozenset(fitting.displaced) if order.rests else frozenset[int]()
    return PlanDraft(fitting.changes, True, choice.changes_at, choice.queue, unplaced, follow, displaced)
