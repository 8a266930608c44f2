"""One pass of the planner: choose the jobs that should run, by counts, and make the plan that leads there.

Running jobs that stay chosen keep their devices. The others are placed in order: on free devices, then on devices of
jobs that were not chosen; else the pass preempts the smallest set of lower-ranked jobs that makes room.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
from ganger.cluster.resources import GangShape
from ganger.cluster.search import PlacementRequest
from ganger.cluster.view import View
from msgspec import Struct
from msgspec.structs import replace as replace_of
from numpy.typing import NDArray

from ganger_master.core.gang_model import Gang
from ganger_master.core.job_model import JobRecord
from ganger_master.planner.context import NOTHING_TO_DO, PlanContext, PlanDraft
from ganger_master.planner.device_groups import units
from ganger_master.planner.gang_fitting import ChosenJobs, GangFitting, PreemptionCandidates
from ganger_master.planner.job_table import NodeAdmission
from ganger_master.planner.plan_pace import NONE_EXCLUDED, ExcludedJobs
from ganger_master.policies.orders import (
    Facts,
    Flags,
    Integers,
    JobOrder,
    behind,
    guarded,
    next_change_s,
    ranked,
    ranks,
    selected,
    sorted_by,
)
from ganger_master.policies.partition_room import PartitionBounds

# Up to so many jobs that do not run, checking each of them is cheaper than ranking all jobs.
_FEW_NEWCOMERS = 4


class RankedQueue(Struct, frozen=True, eq=False, gc=False):
    """The input of a choice.

    ranks: columns to sort the jobs by.
    candidates: by position, jobs that run or may start; None: all.
    pending: by position, jobs that wait, with those that may not start.
    units: by position, as `LiveTable.units`, if jobs that share devices are chosen together or not at all; else None.
    bounds: None: there are no partitions.
    """

    order: JobOrder
    gpus: int
    rows: Integers
    facts: Facts
    ranks: tuple[NDArray[Any], ...]
    waiting: Flags
    candidates: Flags | None
    pending: Flags
    units: Integers | None
    changes_at: float
    bounds: PartitionBounds | None = None

    @property
    def is_unchanged(self) -> bool:
        """Whether exactly the running jobs are chosen. Found cheaply, where none of few other jobs would fit even if
        all jobs behind it were preempted; False leaves it open."""
        order, facts = self.order, self.facts
        comes = ~facts.is_running if self.candidates is None else self.candidates & ~facts.is_running
        newcomers = comes.nonzero()[0].tolist()
        if len(newcomers) > _FEW_NEWCOMERS or order.is_strict:
            return False
        if order.overdue is not None and order.overdue(facts, self.gpus).any():
            return False
        # Shared devices count once, for the first job of each unit.
        holds = (
            facts.is_running
            if self.units is None
            else facts.is_running & ((self.units < 0) | (self.units == self.rows))
        )
        held = np.where(holds, facts.gpus, 0)
        free = self.gpus - int(held.sum())
        may_leave = np.where(facts.is_preemptible, held, 0) if order.preempts else np.zeros_like(held)
        return free >= 0 and not any(
            facts.gpus[at] <= free + may_leave[behind(self.ranks, at)].sum() for at in newcomers
        )

    @property
    def line(self) -> Integers:
        """Return the numbers of all pending jobs, first job first."""
        waits = self.pending.nonzero()[0]
        return self.facts.number[waits[sorted_by(*[column[waits] for column in self.ranks])]]


def queue_of(context: PlanContext, as_one: bool = False) -> RankedQueue:
    """Return the input of a choice. `as_one`: jobs that share devices are chosen together or not at all."""
    table, excluded, capacity = context.jobs, context.excluded, context.capacity
    order, rows, facts = _known(context)
    columns = ranks(order, facts, context.now, capacity)
    pending = waiting = table.is_waiting(rows)
    candidates = None
    if excluded.not_stopped:
        may_stop = ~table.are_among(rows, excluded.not_stopped)
        facts = replace_of(facts, is_preemptible=facts.is_preemptible & may_stop)
    if excluded.not_started:
        waiting = waiting & ~table.are_among(rows, excluded.not_started)
        candidates = waiting | facts.is_running
    units = None
    if as_one:
        units, facts = table.groups.units[rows], replace_of(facts, gpus=table.groups.with_all_gpus(rows, facts.gpus))
    changes_at = next_change_s(order, facts, context.now)
    bounds = partition_bounds(table.admissions_at(rows), context.room.view) if table.is_partitioned else None
    gpus = capacity.gpus
    return RankedQueue(order, gpus, rows, facts, columns, waiting, candidates, pending, units, changes_at, bounds)


def partition_bounds(admissions: Sequence[NodeAdmission], view: View) -> PartitionBounds:
    """Return the bounds of partitions. Jobs of one partition to which other nodes are closed count as another one.
    admissions: that of each job, by position."""
    numbers = {admission: number for number, admission in enumerate(dict.fromkeys(admissions))}
    some_closed = frozenset[str]().union(*[closed for _, closed in numbers])
    inside: dict[tuple[str, ...], list[NodeAdmission]] = {}
    gpus: Counter[frozenset[int]] = Counter()
    for name, topology, is_available in zip(view.nodes, view.topologies, view.available, strict=True):
        if not is_available:
            continue
        there = inside.get(topology.partitions)
        if there is None:
            there = inside[topology.partitions] = [one for one in numbers if topology.is_in(one[0])]
        if name in some_closed:
            there = [one for one in there if name not in one[1]]
        gpus[frozenset([numbers[one] for one in there])] += topology.devices
    return PartitionBounds([numbers[one] for one in admissions], gpus)


def choose(queue: RankedQueue) -> ChosenJobs:
    """Return the jobs that should run."""
    order, rows, facts, leader = queue.order, queue.rows, queue.facts, None
    line = sorted_by(*queue.ranks)
    numbers = facts.number[line[queue.pending[line]]]
    if queue.candidates is not None:
        line = line[queue.candidates[line]]
    if queue.units is not None:
        facts, leader = _as_one(facts, line, queue.units)
    guards = guarded(order, facts, queue.gpus)
    is_chosen = np.zeros(len(rows), bool)
    is_chosen[selected(order, facts, line, queue.gpus, guards, queue.bounds)] = True
    if leader is not None:
        is_chosen = is_chosen[leader]
    return ChosenJobs(rows, facts, line, numbers, queue.waiting, is_chosen, *guards, queue.changes_at)


def within_quotas(context: PlanContext) -> ExcludedJobs:
    """Return the exclusions with the jobs that may not start because earlier jobs of their user use up its quota: no
    job is preempted for one that could not start then."""
    table, excluded = context.jobs, context.excluded
    quotas = table.quotas
    if quotas is None or not quotas.are_contested:
        return excluded
    order, rows, facts = _known(context)
    line = ranked(order, facts, context.now, context.capacity)
    first = line[(table.is_waiting(rows) & ~table.are_among(rows, excluded.not_started))[line]]
    jobs = [job for row in rows[first].tolist() if (job := table.jobs[row]) is not None]
    return excluded.resting(quotas.beyond(jobs))


def _known(context: PlanContext) -> tuple[JobOrder, Integers, Facts]:
    order, table = context.order, context.jobs
    if order.with_history is not None:
        order = order.with_history(table.history)
    assert not order.knows_durations or context.remaining_s, f"{order.name} needs an oracle of remaining times"
    rows, facts = table.facts(context.now, order.learns, remaining_s=context.remaining_s)
    return order, rows, facts


def _as_one(facts: Facts, line: Integers, units: Integers) -> tuple[Facts, Integers]:
    """Return facts in which each unit's devices belong to its first job in line, and can be taken from all of its jobs
    or none; and by position the first job of its unit, or itself. `units`: by position, as `LiveTable.units`."""
    leader = np.arange(len(facts))
    sharing = line[units[line] >= 0]
    unit = units[sharing]
    first = np.empty(unit.max(initial=-1) + 1, np.int64)
    # The last assignment counts: the first job in line.
    first[unit[::-1]] = sharing[::-1]
    leader[sharing] = first[unit]
    others = sharing[leader[sharing] != sharing]
    gpus, is_preemptible = facts.gpus.copy(), facts.is_preemptible.copy()
    gpus[others] = 0
    is_preemptible[leader[others[~is_preemptible[others]]]] = False
    return replace_of(facts, gpus=gpus, is_preemptible=is_preemptible[leader]), leader


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
    queue, choice = _ranked(context)
    if choice is None:
        return PlanDraft(next_change_s=queue.changes_at, line=queue.line)
    return carried_out(choice, context)


def _ranked(context: PlanContext) -> tuple[RankedQueue, ChosenJobs | None]:
    """Return the queue and the jobs that should run; None: exactly those that run. A plan may ask more than once."""
    excluded, as_one = context.excluded, bool(context.terms.co_located)
    key = context.capacity, frozenset(excluded.not_started), frozenset(excluded.not_stopped), as_one
    found: tuple[RankedQueue, ChosenJobs | None] | None = context.ranked.get(key)
    if found is None:
        queue = queue_of(context, as_one)
        found = context.ranked[key] = queue, None if queue.is_unchanged else choose(queue)
    return found


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


def may_start(context: PlanContext, resting: Collection[int]) -> bool:
    """Return whether a pending job, other than `resting` (numbers), may fit on free devices. If not, `plan` without
    preemption starts no job, whatever the order."""
    context.room.follow()
    vain: set[GangShape] = set()
    for job in context.jobs.waiting_at_most(context.room.free_devices):
        shape = context.terms.shape(job)
        if job.number in resting or (shape in vain and not job.epoch):
            continue
        # Where it is parked, or how long it has waited for its preferred locality, matters.
        if job.epoch or shape.locality.wish or context.policy.placement.place(context.room, PlacementRequest(shape)):
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
    if context.may_preempt:
        leaving = units(
            table.gangs_at(rows[line[(choice.facts.is_running & ~is_chosen)[line]]]), context.terms.co_located
        )
        staying = PreemptionCandidates(choice, context) if order.preempts else None
        left = fitting.make_way(unserved, leaving, going, staying)
        if left and not order.is_strict:
            # Jobs further back may use what these cannot.
            fitting.start(table.jobs_at(rows[line[(waiting & ~is_chosen)[line]]]), beside_others=True)
        unplaced = frozenset(job.number for job in left)
    fitting.undo()
    unplaced -= fitting.waited_for
    displaced = frozenset(fitting.displaced) if order.rests else frozenset[int]()
    return PlanDraft(fitting.changes, True, choice.changes_at, choice.queue, unplaced, displaced)
