"""Who should run, by counts: the jobs in an order's line, and the first of them whose gangs fit together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from msgspec.structs import replace as replace_of

from ganger_master.planner.mates import ALONE, Mates
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
    mates: Mates = ALONE,
) -> Choice:
    """As `target.plan` is asked. `mates`: those are chosen, or not, as one."""
    order, rows, facts, line = _lined_up(order, table, now, capacity, remaining_s)
    waiting = table.is_waiting(rows)
    told = facts.number[line[waiting[line]]]
    if kept_out.not_stopped:
        may = ~np.isin(facts.number, list(kept_out.not_stopped))
        facts = replace_of(facts, is_preemptible=facts.is_preemptible & may)
    if kept_out.not_started:
        waiting &= ~np.isin(facts.number, list(kept_out.not_started))
        line = line[(waiting | facts.is_running)[line]]
    changes_at = next_change_s(order, facts, now)
    facts, leader = _as_one(facts, line, mates, table.is_sharing(rows))
    is_chosen = np.zeros(len(rows), bool)
    is_chosen[selected(order, facts, line, capacity.gpus)] = True
    is_chosen = is_chosen[leader]
    return Choice(rows, facts, line, told, waiting, is_chosen, *guarded(order, facts, capacity.gpus), changes_at)


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
    _, rows, facts, line = _lined_up(order, table, now, capacity, remaining_s)
    first = line[(table.is_waiting(rows) & ~np.isin(facts.number, list(kept_out.not_started)))[line]]
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


def _as_one(facts: Facts, line: Integers, mates: Mates, shares: Flags) -> tuple[Facts, Integers]:
    """The devices of those who share them are those of the first of them in line, and can be taken from all or none;
    and by position who that is: itself of everybody else. `shares`: by position, whether there may be mates of it."""
    leader = np.arange(len(facts))
    if not mates:
        return facts, leader
    gpus, is_preemptible = facts.gpus.copy(), facts.is_preemptible.copy()
    first: dict[int, int] = {}
    sharing = line[shares[line]]
    for position, number in zip(sharing.tolist(), facts.number[sharing].tolist(), strict=True):
        if number not in mates:
            continue
        unit = mates[number][0]
        at = leader[position] = first.setdefault(unit, position)
        if at != position:
            gpus[position] = 0
            is_preemptible[at] &= is_preemptible[position]
    is_preemptible = is_preemptible[leader]
    return replace_of(facts, gpus=gpus, is_preemptible=is_preemptible), leader
