"""Advice on a deadline: whether a job can meet it under the order `edf`, beside the deadlines of other jobs.

The expected run time of a job is the median estimate from similar jobs (`estimators.run_time`), bounded by its time
limit. Without either, the advice makes no prediction.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
from ganger.cluster.view import View
from ganger.job_state import JobState
from msgspec.structs import replace

from ganger_master.core.gang_model import Gang
from ganger_master.core.job_model import JobRecord
from ganger_master.planner.job_table import LiveTable
from ganger_master.planner.terms import capacity_of
from ganger_master.policies.deadlines import DeadlineVerdict, Newcomer, advice
from ganger_master.policies.job_facts import Floats, Integers

_NAMED = 5


def deadline_advice(jobs: Iterable[tuple[JobRecord, Gang | None]], number: int, view: View, now: float) -> str:
    """Return the advice for job `number`, which has a deadline; empty if it is no longer live."""
    table = LiveTable()
    for job, gang in jobs:
        if job.state.is_finished:
            # Its run time is a sample for similar jobs.
            table.put(replace(job, state=JobState.PENDING), None)
        table.put(job, gang)
    rows, facts = table.facts(now, expects=True)
    found = np.flatnonzero(facts.number == number)
    if not len(found):
        return ""
    mine = int(found[0])
    left = np.fmin(facts.expected_remaining_s, _limits(table, rows, now))
    others = facts.number != number
    deadline_s = float(facts.deadline_s[mine])
    if math.isnan(left[mine]):
        return "unknown whether it can be met, because how long the job takes is not known: give it a time limit"
    newcomer = Newcomer(int(facts.gpus[mine]), float(left[mine]), deadline_s, int(facts.priority[mine]))
    told = advice(newcomer, facts.take(others), left[others], now, capacity_of(view, table))
    match told.verdict:
        case DeadlineVerdict.MET:
            return f"can be met: it would end {_ago(deadline_s - told.end_s)} before it"
        case DeadlineVerdict.DELAYS_OTHERS:
            return f"can be met, and makes {_names(told.delayed)} late for theirs"
        case DeadlineVerdict.TOO_LATE if math.isinf(told.end_s):
            return "cannot be met: its gang never finds room beside those with earlier deadlines"
        case DeadlineVerdict.TOO_LATE:
            return f"cannot be met: it would end {_ago(told.end_s - deadline_s)} after it"
        case _:
            return f"unknown whether it can be met, because how long {_names(told.unknown)} takes is not known"


def _limits(table: LiveTable, rows: Integers, now: float) -> Floats:
    """Seconds until jobs are stopped by their limits; NaN without one."""
    left = np.full(len(rows), np.nan)
    for at, row in enumerate(rows.tolist()):
        job = table.jobs[row]
        limit = None if job is None else job.spec.time_limit_seconds
        if job is not None and limit is not None:
            ran = job.run_seconds + (max(0.0, now - job.running_since) if job.running_since else 0.0)
            left[at] = max(0.0, limit - ran)
    return left


def _names(numbers: tuple[int, ...]) -> str:
    named = ", ".join([f"jobs/{number}" for number in numbers[:_NAMED]])
    return f"{named} and {len(numbers) - _NAMED} more" if len(numbers) > _NAMED else named


def _ago(seconds: float) -> str:
    whole = round(seconds)
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if whole >= 2 * size:
            return f"{round(whole / size)} {unit}"
    return f"{whole} s"
