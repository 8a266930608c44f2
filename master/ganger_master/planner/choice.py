"""Who should run, by counts: the jobs in an order's line, and the first of them whose gangs fit together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from msgspec.structs import replace as replace_of

from ganger_master.planner.refused import NOBODY, KeptOut
from ganger_master.planner.table import LiveTable
from ganger_master.policies.facts import Capacity, Facts, Flags, Floats, Integers
from ganger_master.policies.order import Order, next_change_s, ranked
from ganger_master.policies.selection import guarded, selected


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
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


def choose(
    order: Order,
    table: LiveTable,
    now: float,
    capacity: Capacity,
    remaining_s: Callable[[Integers], Floats] | None = None,
    kept_out: KeptOut = NOBODY,
    as_one: bool = False,
) -> Choice:
    """As `target.plan` is asked. `as_one`: those who share devices are chosen together, or not at all."""
    order, rows, facts, line = _lined_up(order, table, now, capacity, remaining_s)
    waiting = table.is_waiting(rows)
    told = facts.number[line[waiting[line]]]
    if kept_out.not_stopped:
        may = ~table.are_among(rows, kept_out.not_stopped)
        facts = replace_of(facts, is_preemptible=facts.is_preemptible & may)
    if kept_out.not_started:
        waiting &= ~table.are_among(rows, kept_out.not_started)
        line = line[(waiting | facts.is_running)[line]]
    changes_at = next_change_s(order, facts, now)
    leader = None
    if as_one:
        facts, leader = _as_one(facts, line, table.units(rows))
    guards = guarded(order, facts, capacity.gpus)
    is_chosen = np.zeros(len(rows), bool)
    is_chosen[selected(order, facts, line, capacity.gpus, guards)] = True
    if leader is not None:
        is_chosen = is_chosen[leader]
    return Choice(rows, facts, line, told, waiting, is_chosen, *guards, changes_at)


def within_quotas(
    order: Order,
    table: LiveTable,
    now: float,
    capacity: Capacity,
    remaining_s: Callable[[Integers], Floats] | None = None,
    kept_out: KeptOut = NOBODY,
) -> KeptOut:
    """With those, too, not to be started for whom their user's quota leaves nothing once those of its jobs have started
    that go before them: nobody is to be stopped for who could not start then."""
    quotas = table.quotas
    if quotas is None or not quotas.are_contested:
        return kept_out
    _, rows, _, line = _lined_up(order, table, now, capacity, remaining_s)
    first = line[(table.is_waiting(rows) & ~table.are_among(rows, kept_out.not_started))[line]]
    jobs = [job for row in rows[first].tolist() if (job := table.jobs[row]) is not None]
    return kept_out.resting(quotas.beyond(jobs))


def _lined_up(
    order: Order,
    table: LiveTable,
    now: float,
    capacity: Capacity,
    remaining_s: Callable[[Integers], Floats] | None,
) -> tuple[Order, Integers, Facts, Integers]:
    """The order as what is known now makes it, the rows and facts of all who are live, and their positions, first job
    first."""
    if order.with_history is not None:
        order = order.with_history(table.history)
    assert not order.knows_durations or remaining_s is not None, f"{order.name} asks an oracle, and there is none"
    rows, facts = table.facts(now, order.learns, remaining_s=remaining_s if order.knows_durations else None)
    return order, rows, facts, ranked(order, facts, now, capacity)


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
