"""Who should hold GPUs now, by counts: the first in order whose gangs fit together."""

from __future__ import annotations

import numpy as np

from ganger_master.policies.job_facts import Facts, Flags, Integers
from ganger_master.policies.orders import JobOrder


def selected(
    order: JobOrder, facts: Facts, line: Integers, free: int, guards: tuple[Flags, Flags] | None = None
) -> Integers:
    """Positions of who should hold GPUs now, of `line` as `order` ranked it and `free` GPUs in all, held ones among
    them. Who runs and may not be stopped stays. While an overdue gang does not fit, only those who can be stopped for
    it again start past it. `guards`: as `guarded` says, where whoever asks has asked that, too."""
    may_stop = facts.is_preemptible if order.preempts else np.zeros(len(facts), bool)
    stays = facts.is_running & ~may_stop
    overdue, passing = guards or guarded(order, facts, free)
    if not overdue.any():
        return chosen(line, facts.gpus, free, order.is_strict, stays)
    return chosen(line, facts.gpus, free, order.is_strict, stays, overdue, passing)


def guarded(order: JobOrder, facts: Facts, free: int) -> tuple[Flags, Flags]:
    """By position: who is overdue, with `free` GPUs in all, and who may start past such a one all the same, because it
    can be stopped for it again. While nobody is overdue, nobody and nobody."""
    nobody = np.zeros(len(facts), bool)
    if order.overdue is None:
        return nobody, nobody
    # What fits into no empty cluster is waited for by nobody.
    overdue = order.overdue(facts, free) & (facts.gpus <= free)
    if not overdue.any():
        return nobody, nobody
    return overdue, (facts.is_preemptible if order.preempts else nobody) & ~overdue


def chosen(
    ranked: Integers,
    gpus: Integers,
    free: int,
    is_strict: bool = False,
    kept: Flags | None = None,
    guarded: Flags | None = None,
    passing: Flags | None = None,
) -> Integers:
    """Positions of the jobs that fit into `free` GPUs, in order: `ranked` are positions, first job first; `gpus` is by
    position. Who does not fit is passed over, or ends the pass if that `is_strict`. `kept` (by position) hold theirs
    whatever comes, and are chosen before all others. Once one of the `guarded` does not fit only the `passing` go on.
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


# To look at a stretch takes as long as to look at so many jobs.
_FEW = 128


def one_by_one(
    ranked: Integers, gpus: Integers, free: int, is_strict: bool, guarded: Flags | None, passing: Flags | None
) -> Integers:
    """As `chosen`, none of whom is kept."""
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
    """The same, taken in whole stretches of the order: each look takes the longest one that fits and drops all that can
    no longer fit, so there are about as many looks as there are sizes of gangs."""
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
        goes_on = sizes <= free
        if guarded is not None and passing is not None:
            stuck = np.flatnonzero(guarded[ranked] & ~goes_on)
            if len(stuck):
                goes_on[stuck[0] :] &= passing[ranked[stuck[0] :]]
        ranked = ranked[goes_on]
    return np.concatenate(taken) if taken else ranked[:0]
