"""Selection of the jobs that should hold GPUs now, by counts: the first in order whose gangs fit together."""

from __future__ import annotations

import numpy as np

from ganger_master.policies.job_facts import Facts, Flags, Integers
from ganger_master.policies.orders import JobOrder


def selected(
    order: JobOrder, facts: Facts, line: Integers, free: int, guards: tuple[Flags, Flags] | None = None
) -> Integers:
    """Return the positions of the jobs that should hold GPUs now.

    `line`: positions as `order` ranked them. `free`: GPUs in all, held ones included. `guards`: the result of `guarded`
    where the caller has it. Running jobs that may not be preempted keep their GPUs. While an overdue gang does not fit,
    only jobs that can be preempted for it start before it.
    """
    may_stop = facts.is_preemptible if order.preempts else np.zeros(len(facts), bool)
    stays = facts.is_running & ~may_stop
    overdue, passing = guards or guarded(order, facts, free)
    if not overdue.any():
        return chosen(line, facts.gpus, free, order.is_strict, stays)
    return chosen(line, facts.gpus, free, order.is_strict, stays, overdue, passing)


def guarded(order: JobOrder, facts: Facts, free: int) -> tuple[Flags, Flags]:
    """Return by position which jobs are overdue, with `free` GPUs in all, and which may start before them nevertheless.

    The latter can be preempted for an overdue job again. While no job is overdue, both are empty.
    """
    none = np.zeros(len(facts), bool)
    if order.overdue is None:
        return none, none
    # No job waits for a gang that would not fit an empty cluster.
    overdue = order.overdue(facts, free) & (facts.gpus <= free)
    if not overdue.any():
        return none, none
    return overdue, (facts.is_preemptible if order.preempts else none) & ~overdue


def chosen(
    ranked: Integers,
    gpus: Integers,
    free: int,
    is_strict: bool = False,
    kept: Flags | None = None,
    guarded: Flags | None = None,
    passing: Flags | None = None,
) -> Integers:
    """Return the positions of the jobs that fit into `free` GPUs, in order.

    `ranked`: positions, first job first. `gpus`, `kept`, `guarded`, `passing`: by position. A job that does not fit is
    skipped, or ends the pass if it `is_strict`. The `kept` jobs are chosen before all others. Once one of the `guarded`
    does not fit, only `passing` jobs are considered.
    """
    staying = ranked[:0]
    if kept is not None:
        is_kept = kept[ranked]
        if np.count_nonzero(is_kept):
            staying, ranked = ranked[is_kept], ranked[~is_kept]
            free -= int(gpus[staying].sum())
    choose = one_by_one if len(ranked) <= _FEW else by_stretches
    taken = choose(ranked, gpus, free, is_strict, guarded, passing)
    return np.concatenate((staying, taken)) if len(staying) else taken


# One iteration of `by_stretches` takes as long as this many jobs in `one_by_one`.
_FEW = 128


def one_by_one(
    ranked: Integers, gpus: Integers, free: int, is_strict: bool, guarded: Flags | None, passing: Flags | None
) -> Integers:
    """Choose as `chosen` without kept jobs, one job at a time."""
    taken: list[int] = []
    is_guarded = False
    sizes = gpus[ranked].tolist()
    least = min(sizes, default=0)
    for job, size in zip(ranked.tolist(), sizes, strict=True):
        if free < least:
            break
        if is_guarded and passing is not None and not passing[job]:
            continue
        if size <= free:
            taken.append(job)
            free -= size
        elif is_strict:
            break
        elif guarded is not None and guarded[job]:
            is_guarded = True
    return np.array(taken, np.int64)


def by_stretches(
    ranked: Integers, gpus: Integers, free: int, is_strict: bool, guarded: Flags | None, passing: Flags | None
) -> Integers:
    """Choose the same jobs in whole stretches of the order.

    Each iteration takes the longest stretch that fits and drops the jobs that can no longer fit, so there are about as
    many iterations as sizes of gangs.
    """
    taken: list[Integers] = []
    while len(ranked):
        sizes = gpus[ranked]
        together = np.cumsum(sizes)
        fitting = int(np.searchsorted(together, free, side="right"))
        if fitting:
            taken.append(ranked[:fitting])
            free -= int(together[fitting - 1])
        if is_strict:
            break
        ranked, sizes = ranked[fitting:], sizes[fitting:]
        can_fit = sizes <= free
        if guarded is not None and passing is not None:
            stuck = np.flatnonzero(guarded[ranked] & ~can_fit)
            if len(stuck):
                can_fit[stuck[0] :] &= passing[ranked[stuck[0] :]]
        ranked = ranked[can_fit]
    return np.concatenate(taken) if taken else ranked[:0]
