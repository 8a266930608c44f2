"""When a waiting job may start where the planner ranks: a forecast for its user, from which nothing is decided.

Jobs are taken to run in the planner's present order, each whenever those before it leave enough GPUs. How long a job
runs yet is the median of similar jobs (`estimators.run_time`), and at most its time limit. Before any job has ended it
is as long as the job has run, by Lindy's law, and five minutes at least. About half of all jobs run between half and
twice their median, so the forecast is made with both.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Final

import numpy as np
from ganger.cluster.view import View

from ganger_master.core.explain import StartEstimate
from ganger_master.core.gang_model import Gang
from ganger_master.core.job_model import JobRecord
from ganger_master.planner.context import capacity_of
from ganger_master.planner.deadline_advice import spans, until_limits
from ganger_master.planner.job_table import LiveTable
from ganger_master.policies.job_facts import Facts, Flags, Integers

_LEAST_S: Final = 300.0
_SPREAD: Final = 2.0
# With more jobs before it the forecast would take seconds, and be worth nothing.
_AHEAD_MOST: Final = 1_000


def start_forecast(
    jobs: Iterable[tuple[JobRecord, Gang | None]],
    number: int,
    ranks: Mapping[int, int],
    view: View,
    now: float,
    *,
    preempts: bool,
) -> StartEstimate:
    """Return when job `number` may start. `jobs`: all that are kept, with their gangs, the ended ones too; `ranks`:
    place in the planner's order, by number; `preempts`: running jobs may be stopped for it, so it may start at any
    time. Without an assumption the job waits no longer."""
    table = LiveTable()
    for job, gang in jobs:
        table.put(job, gang)
    rows, facts = table.facts(now, expects=True)
    line = _line(facts, number, ranks, table.is_waiting(rows))
    if not len(line):
        return StartEstimate(0.0, 0.0, "")
    if len(line) > _AHEAD_MOST:
        return StartEstimate(0.0, 0.0, f"unknown, because {len(line) - 1} jobs run or go first")
    expected = facts.expected_remaining_s
    is_learned = not np.isnan(expected).all()
    expected = np.where(np.isnan(expected), np.maximum(facts.attained_s, _LEAST_S), expected)
    limits = until_limits(table, rows, now)
    gpus, free = facts.gpus[line], capacity_of(view, table).gpus
    soon, late = (
        float(spans(gpus, np.fmin(expected * factor, limits)[line], free, now)[0][-1]) - now
        for factor in (1.0 / _SPREAD, _SPREAD)
    )
    if math.isinf(late):
        return StartEstimate(0.0, 0.0, "unknown, because it would not fit even if all running jobs ended")
    long = "similar jobs did" if is_learned else "they have run so far"
    rests_on = f"if the jobs before it take half to twice as long as {long}, and later ones do not go first"
    return StartEstimate(0.0 if preempts else max(0.0, soon), max(1.0, late), rests_on)


def _line(facts: Facts, number: int, ranks: Mapping[int, int], is_waiting: Flags) -> Integers:
    """Return the positions of the jobs that run, of those before job `number`, and of itself, which is the last; none
    if it has ended."""
    mine = facts.number == number
    if not mine.any():
        return np.flatnonzero(mine)
    last = len(ranks) + 1
    rank = np.array([ranks.get(one, last) for one in facts.number.tolist()], np.int64)
    is_before = (rank < rank[mine][0]) | ((rank == rank[mine][0]) & (facts.number < number))
    counting = np.flatnonzero((facts.is_running | (is_waiting & is_before)) & ~mine)
    found = counting[np.lexsort((facts.number[counting], rank[counting], ~facts.is_running[counting]))]
    return np.append(found, np.flatnonzero(mine))
