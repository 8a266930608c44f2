"""Choose the jobs that should run by counts: the first ones of the order's line whose gangs fit together."""

from __future__ import annotations

from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import replace as replace_of
from numpy.typing import NDArray

from ganger_master.planner.context import PlanContext
from ganger_master.planner.plan_pace import ExcludedJobs
from ganger_master.policies.job_facts import Facts, Flags, Integers, behind, sorted_by
from ganger_master.policies.orders import JobOrder, guarded, next_change_s, ranked, ranks, selected

# Up to so many jobs that do not run, checking each of them is cheaper than ranking all jobs.
_FEW = 4


class ChosenJobs(Struct, frozen=True, eq=False, gc=False):
    """The jobs that should run, by counts.

    line: positions of all candidates, first job first.
    queue: numbers of all pending jobs, in the same order.
    overdue, passing: as in `orders.guarded`.
    changes_at: as `PlanDraft.next_change_s`.
    All else is by position.
    """

    rows: Integers
    facts: Facts
    line: Integers
    queue: Integers
    # Jobs that could start.
    waiting: Flags
    is_chosen: Flags
    overdue: Flags
    passing: Flags
    changes_at: float


class RankedQueue(Struct, frozen=True, eq=False, gc=False):
    """The input of a choice.

    ranks: columns to sort the jobs by.
    candidates: by position, jobs that run or may start; None: all.
    pending: by position, jobs that wait, with those that may not start.
    units: by position, as `LiveTable.units`, if jobs that share devices are chosen together or not at all; else None.
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

    @property
    def is_unchanged(self) -> bool:
        """Whether exactly the running jobs are chosen. Found cheaply, where none of few other jobs would fit even if
        all jobs behind it were preempted; False leaves it open."""
        order, facts = self.order, self.facts
        comes = ~facts.is_running if self.candidates is None else self.candidates & ~facts.is_running
        newcomers = comes.nonzero()[0].tolist()
        if len(newcomers) > _FEW or order.is_strict:
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
    return RankedQueue(order, capacity.gpus, rows, facts, columns, waiting, candidates, pending, units, changes_at)


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
    is_chosen[selected(order, facts, line, queue.gpus, guards)] = True
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
    """Return the order with the history of the table, and the rows and facts of all live jobs."""
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
