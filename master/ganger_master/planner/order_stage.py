"""Who should run, by counts: the jobs in an order's line, and the first of them whose gangs fit together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import replace as replace_of
from numpy.typing import NDArray

from ganger_master.planner.job_table import LiveTable
from ganger_master.planner.refusal_backoff import NOTHING_KEPT_OUT, KeptOut
from ganger_master.policies.job_facts import Capacity, Facts, Flags, Floats, Integers
from ganger_master.policies.orders import JobOrder, next_change_s, ranked, ranks
from ganger_master.policies.selection import guarded, selected
from ganger_master.policies.sorting import behind, sorted_by

# So many who do not run are looked at one by one before all are ranked.
_FEW = 4


class Choice(Struct, frozen=True, eq=False, gc=False):
    """Who should run, by counts. `line`: positions of all who may, first job first; `told`: numbers of all who wait, in
    the same order. The rest is by position; `overdue` and `passing` as `selection.guarded` has them, `changes_at` as
    `Pass.next_change_s`."""

    rows: Integers
    facts: Facts
    line: Integers
    told: Integers
    # Could be started.
    waiting: Flags
    is_chosen: Flags
    overdue: Flags
    passing: Flags
    changes_at: float


class RankedQueue(Struct, frozen=True, eq=False, gc=False):
    """What a choice is made of. `ranks`: columns to sort the jobs by; `may`: by position, who runs, or may start;
    `units`: by position, as `LiveTable.units`, where those who share devices are chosen together or not at all; None:
    where they are not."""

    order: JobOrder
    gpus: int
    rows: Integers
    facts: Facts
    ranks: tuple[NDArray[Any], ...]
    waiting: Flags
    may: Flags | None
    told: Flags
    units: Integers | None
    changes_at: float

    @property
    def nobody_comes(self) -> bool:
        """Whether all who run are chosen, and nobody else: where few do not run, none of whom would fit if all who rank
        behind it were stopped. Else it may be so or not."""
        order, facts = self.order, self.facts
        comes = ~facts.is_running if self.may is None else self.may & ~facts.is_running
        newcomers = comes.nonzero()[0].tolist()
        if len(newcomers) > _FEW or order.is_strict:
            return False
        if order.overdue is not None and order.overdue(facts, self.gpus).any():
            return False
        # Those who share devices are as many, and hold them once: the first of them.
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
        """Numbers of all who wait, first job first."""
        waits = self.told.nonzero()[0]
        return self.facts.number[waits[sorted_by(*[column[waits] for column in self.ranks])]]


def asked(
    order: JobOrder,
    table: LiveTable,
    now: float,
    capacity: Capacity,
    remaining_s: Callable[[Integers], Floats] | None = None,
    kept_out: KeptOut = NOTHING_KEPT_OUT,
    as_one: bool = False,
) -> RankedQueue:
    """As `target.plan` is asked. `as_one`: those who share devices are chosen together, or not at all."""
    order, rows, facts = _known(order, table, now, remaining_s)
    columns = ranks(order, facts, now, capacity)
    told = waiting = table.is_waiting(rows)
    may = None
    if kept_out.not_stopped:
        may_stop = ~table.are_among(rows, kept_out.not_stopped)
        facts = replace_of(facts, is_preemptible=facts.is_preemptible & may_stop)
    if kept_out.not_started:
        waiting = waiting & ~table.are_among(rows, kept_out.not_started)
        may = waiting | facts.is_running
    units = None
    if as_one:
        units, facts = table.units(rows), replace_of(facts, gpus=table.with_unit_gpus(rows, facts.gpus))
    changes_at = next_change_s(order, facts, now)
    return RankedQueue(order, capacity.gpus, rows, facts, columns, waiting, may, told, units, changes_at)


def choose(of: RankedQueue) -> Choice:
    order, rows, facts, leader = of.order, of.rows, of.facts, None
    line = sorted_by(*of.ranks)
    told = facts.number[line[of.told[line]]]
    if of.may is not None:
        line = line[of.may[line]]
    if of.units is not None:
        facts, leader = _as_one(facts, line, of.units)
    guards = guarded(order, facts, of.gpus)
    is_chosen = np.zeros(len(rows), bool)
    is_chosen[selected(order, facts, line, of.gpus, guards)] = True
    if leader is not None:
        is_chosen = is_chosen[leader]
    return Choice(rows, facts, line, told, of.waiting, is_chosen, *guards, of.changes_at)


def within_quotas(
    order: JobOrder,
    table: LiveTable,
    now: float,
    capacity: Capacity,
    remaining_s: Callable[[Integers], Floats] | None = None,
    kept_out: KeptOut = NOTHING_KEPT_OUT,
) -> KeptOut:
    """With those, too, not to be started for whom their user's quota leaves nothing once those of its jobs have started
    that go before them: nobody is to be stopped for who could not start then."""
    quotas = table.quotas
    if quotas is None or not quotas.are_contested:
        return kept_out
    order, rows, facts = _known(order, table, now, remaining_s)
    line = ranked(order, facts, now, capacity)
    first = line[(table.is_waiting(rows) & ~table.are_among(rows, kept_out.not_started))[line]]
    jobs = [job for row in rows[first].tolist() if (job := table.jobs[row]) is not None]
    return kept_out.resting(quotas.beyond(jobs))


def _known(
    order: JobOrder, table: LiveTable, now: float, remaining_s: Callable[[Integers], Floats] | None
) -> tuple[JobOrder, Integers, Facts]:
    """The order as what is known now makes it, and the rows and facts of all who are live."""
    if order.with_history is not None:
        order = order.with_history(table.history)
    assert not order.knows_durations or remaining_s is not None, f"{order.name} asks an oracle, and there is none"
    rows, facts = table.facts(now, order.learns, remaining_s=remaining_s if order.knows_durations else None)
    return order, rows, facts


def _as_one(facts: Facts, line: Integers, units: Integers) -> tuple[Facts, Integers]:
    """The devices of those who share them are those of the first of them in line, and can be taken from all or none;
    and by position who that is: itself of everybody else. `units`: by position, as `LiveTable.units`."""
    leader = np.arange(len(facts))
    sharing = line[units[line] >= 0]
    unit = units[sharing]
    first = np.empty(unit.max(initial=-1) + 1, np.int64)
    # Of several the last one counts: the first in line.
    first[unit[::-1]] = sharing[::-1]
    leader[sharing] = first[unit]
    others = sharing[leader[sharing] != sharing]
    gpus, is_preemptible = facts.gpus.copy(), facts.is_preemptible.copy()
    gpus[others] = 0
    is_preemptible[leader[others[~is_preemptible[others]]]] = False
    return replace_of(facts, gpus=gpus, is_preemptible=is_preemptible[leader]), leader
