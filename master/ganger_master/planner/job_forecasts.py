"""Forecasts for users, from which nothing is decided: whether a new job meets its deadline under the order `edf`, and
when a waiting job may start. Run times are medians of similar jobs (`estimators.run_time`), bounded by time limits.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final, TypeAlias

import numpy as np
from ganger.cluster.view import View
from ganger.text import counted
from msgspec.structs import replace

from ganger_master.core.explain import StartEstimate
from ganger_master.core.gang_model import Gang
from ganger_master.core.job_model import JobRecord
from ganger_master.planner.context import capacity_of
from ganger_master.planner.job_table import LiveTable
from ganger_master.policies.order_registry import AHEAD, deadline_groups
from ganger_master.policies.orders import SLACK_S, Capacity, Facts, Flags, Floats, Integers


class DeadlineVerdict(Enum):
    """Forecast of a deadline. DELAYS_OTHERS: met, but another job that would be in time would not. UNKNOWN: the
    remaining time of a job ahead is unknown."""

    MET = "met"
    TOO_LATE = "too late"
    DELAYS_OTHERS = "delays others"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Newcomer:
    """A new job. `duration_s`: its running time with the whole gang."""

    gpus: int
    duration_s: float
    deadline_s: float
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Advice:
    """Forecast for a new job. `end_s`: when it would end, infinite for never, NaN for unknown; `delayed`: numbers of
    the jobs it would make late; `unknown`: numbers of the jobs ahead whose remaining time is unknown."""

    verdict: DeadlineVerdict
    end_s: float
    delayed: tuple[int, ...] = ()
    unknown: tuple[int, ...] = ()


def advice(newcomer: Newcomer, facts: Facts, remaining_s: Floats, now: float, capacity: Capacity) -> Advice:
    """Return the forecast for `newcomer`. `remaining_s`: by position of the live jobs, at the rates of their whole
    gangs, estimated or given by users; NaN where unknown."""
    line, counts = _line(newcomer, facts, now)
    remaining = np.append(remaining_s, newcomer.duration_s)[line]
    number = np.append(facts.number, -1)[line]
    unknown = number[:counts][np.isnan(remaining[:counts])]
    if len(unknown):
        return Advice(DeadlineVerdict.UNKNOWN, np.nan, unknown=tuple(sorted(unknown.tolist())))
    gpus = np.append(facts.gpus, newcomer.gpus)[line]
    deadline = np.append(facts.deadline_s, newcomer.deadline_s)[line]
    is_new = number == -1
    beside = spans(gpus[:counts], remaining[:counts], capacity.gpus, now)[1]
    end_s = float(beside[is_new[:counts]][0])
    if end_s > newcomer.deadline_s + SLACK_S:
        return Advice(DeadlineVerdict.TOO_LATE, end_s)
    others = np.flatnonzero(~is_new[:counts])
    without = spans(gpus[others], remaining[others], capacity.gpus, now)[1]
    due = deadline[others] + SLACK_S
    late = (beside[others] > due) & (without <= due)
    delayed = tuple(sorted(number[others][late].tolist()))
    return Advice(DeadlineVerdict.DELAYS_OTHERS if delayed else DeadlineVerdict.MET, end_s, delayed)


def spans(gpus: Integers, remaining_s: Floats, free: int, now: float) -> tuple[Floats, Floats]:
    """Return when each gang starts and ends if it runs whenever earlier ones leave room; infinite for never."""
    # Pieces of time: when each begins, and the GPUs left in it; the last never ends.
    begins, left = np.array([now]), np.array([free])
    starts, ends = np.full(len(gpus), np.inf), np.full(len(gpus), np.inf)
    for job, (size, work) in enumerate(zip(gpus.tolist(), remaining_s.tolist(), strict=True)):
        has_room = left >= size
        if not has_room[-1]:
            continue
        length = np.append(np.diff(begins), np.inf)
        served = np.cumsum(np.where(has_room, length, 0.0))
        last = int(np.searchsorted(served, work))
        end = float(begins[last] + work - (served[last - 1] if last else 0.0))
        starts[job], ends[job] = begins[np.argmax(served > 0.0)], end
        begins, left = np.insert(begins, last + 1, end), np.insert(left, last + 1, left[last])
        left[: last + 1] -= np.where(has_room[: last + 1], size, 0)
    return starts, ends


def _line(newcomer: Newcomer, facts: Facts, now: float) -> tuple[Integers, int]:
    """Return positions as `edf` serves them, the newcomer's being the largest, and how many of them count: all up to
    the last whose deadline can still be met."""
    is_kept = np.append(facts.is_running & ~facts.is_preemptible, False)
    priority = np.append(facts.priority, newcomer.priority)
    deadline = np.append(facts.deadline_s, newcomer.deadline_s)
    group = deadline_groups(deadline, now)
    number = np.append(facts.number, np.iinfo(np.int64).max)
    line = np.lexsort((number, np.append(facts.arrival_s, now), deadline, group, -priority, ~is_kept))
    # The newcomer counts even if its deadline has passed.
    counting = (group == AHEAD) | (number == number[-1]) | is_kept
    return line, int(np.flatnonzero(counting[line])[-1]) + 1


_NAMED = 5


def deadline_advice(
    jobs: Iterable[tuple[JobRecord, Gang | None]], number: int, view: View, now: float, rivals: Collection[int] = ()
) -> str:
    """Return the advice for job `number`, which has a deadline; empty if it is no longer live. rivals: numbers of
    pending jobs that may get other nodes: it counts as certain what holds with them and without."""
    table = LiveTable()
    for job, gang in jobs:
        table.put(job, gang)
    rows, facts = table.facts(now, expects=True)
    found = np.flatnonzero(facts.number == number)
    if not len(found):
        return ""
    mine = int(found[0])
    left = np.fmin(facts.expected_remaining_s, until_limits(table, rows, now))
    others = facts.number != number
    deadline_s = float(facts.deadline_s[mine])
    if math.isnan(left[mine]):
        return "unknown whether it can be met, because how long the job takes is not known: give it a time limit"
    newcomer = Newcomer(int(facts.gpus[mine]), float(left[mine]), deadline_s, int(facts.priority[mine]))
    capacity = capacity_of(view, table)
    advised = advice(newcomer, facts.take(others), left[others], now, capacity)
    if len(rivals) and advised.verdict in (DeadlineVerdict.TOO_LATE, DeadlineVerdict.UNKNOWN):
        own = others & ~np.isin(facts.number, list(rivals))
        advised = advice(newcomer, facts.take(own), left[own], now, capacity)
        if advised.verdict in (DeadlineVerdict.MET, DeadlineVerdict.DELAYS_OTHERS):
            return "unknown whether it can be met: that depends on which nodes jobs of other partitions get"
    match advised.verdict:
        case DeadlineVerdict.MET:
            return f"can be met: it would end {_ago(deadline_s - advised.end_s)} before it"
        case DeadlineVerdict.DELAYS_OTHERS:
            return f"can be met, and makes {_names(advised.delayed)} late for theirs"
        case DeadlineVerdict.TOO_LATE if math.isinf(advised.end_s):
            return "cannot be met: its gang never finds room beside those with earlier deadlines"
        case DeadlineVerdict.TOO_LATE:
            return f"cannot be met: it would end {_ago(advised.end_s - deadline_s)} after it"
        case _:
            return f"unknown whether it can be met, because how long {_names(advised.unknown)} takes is not known"


def until_limits(table: LiveTable, rows: Integers, now: float) -> Floats:
    """Seconds until jobs are stopped by their limits; NaN without one."""
    left = np.full(len(rows), np.nan)
    for at, row in enumerate(rows.tolist()):
        job = table.jobs[row]
        limit = None if job is None else job.time_limit_s
        if job is not None and limit is not None:
            left[at] = max(0.0, limit - job.ran_s(now))
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


_LEAST_S: Final = 300.0
_SPREAD: Final = 2.0
# With more jobs before it the forecast would take seconds, and be worth nothing.
_AHEAD_MOST: Final = 1_000


# Jobs that are kept, with their gangs.
Pairs: TypeAlias = Sequence[tuple[JobRecord, Gang | None]]


@dataclass(frozen=True, slots=True)
class PartitionPart:
    """What a forecast for a job of a partition follows from: ended jobs, and the jobs and free devices of its nodes.

    rivals: numbers of pending jobs of other partitions that may get some of its nodes, or others."""

    pairs: Pairs
    view: View
    rivals: frozenset[int]


def inside_partition(pairs: Pairs, view: View, partition: str) -> PartitionPart:
    """Return the part of the cluster that a partition has. A gang that is partly outside counts with its devices
    inside."""
    found = [(name, topology.partitions) for name, topology in zip(view.nodes, view.topologies, strict=True) if name]
    inside = {name for name, partitions in found if partition in partitions}
    beside = frozenset[str]().union(*[partitions for _, partitions in found if partition in partitions])
    own: list[tuple[JobRecord, Gang | None]] = []
    rivals = set[int]()
    for job, gang in pairs:
        is_here = gang is not None and not inside.isdisjoint(gang.nodes)
        if job.state.is_finished or job.partition.name == partition or is_here:
            own.append((_within(job, gang, inside) if is_here and gang is not None else job, gang))
        elif job.is_waiting and job.partition.name in beside:
            own.append((job, gang))
            rivals.add(job.number)
    there = view.copy()
    for name, partitions in found:
        if partition not in partitions:
            there.set_available(name, False)
    return PartitionPart(own, there, frozenset(rivals))


def _within(job: JobRecord, gang: Gang, nodes: Collection[str]) -> JobRecord:
    """Return a job with the devices that its gang has on these nodes."""
    here = sum([claim.device_mask.bit_count() for claim in gang.claims if claim.node in nodes])
    return replace(job, gpus_given=here) if 0 < here < gang.devices else job


def start_forecast(
    jobs: Iterable[tuple[JobRecord, Gang | None]],
    number: int,
    ranks: Mapping[int, int],
    view: View,
    now: float,
    *,
    preempts: bool,
    limit: int | None = None,
    rivals: Collection[int] = (),
) -> StartEstimate:
    """Return when job `number` may start. Without an assumption the job waits no longer.

    jobs: all that are kept, with their gangs, the ended ones too.
    ranks: place in the planner's order, by number.
    preempts: running jobs may be stopped for it, so it may start at any time.
    limit: most GPUs that these jobs may hold, where that is what it waits for.
    rivals: numbers of pending jobs that may get other nodes: they delay the latest start only.
    """
    table = LiveTable()
    for job, gang in jobs:
        table.put(job, gang)
    rows, facts = table.facts(now, expects=True)
    line = _before(facts, number, ranks, table.is_waiting(rows))
    if not len(line):
        return StartEstimate(0.0, 0.0, "")
    if len(line) > _AHEAD_MOST:
        return StartEstimate(0.0, 0.0, f"unknown, because {counted(len(line) - 1, 'job')} run or go first")
    expected = facts.expected_remaining_s
    is_learned = not np.isnan(expected).all()
    expected = np.where(np.isnan(expected), np.maximum(facts.attained_s, _LEAST_S), expected)
    limits = until_limits(table, rows, now)
    free = capacity_of(view, table).gpus if limit is None else limit
    own = line[~np.isin(facts.number[line], list(rivals))] if rivals else line
    soon, late = (
        float(spans(facts.gpus[some], np.fmin(expected * factor, limits)[some], free, now)[0][-1]) - now
        for factor, some in ((1.0 / _SPREAD, own), (_SPREAD, line))
    )
    if math.isinf(late):
        return StartEstimate(0.0, 0.0, "unknown, because it would not fit even if all running jobs ended")
    long = "similar jobs did" if is_learned else "they have run so far"
    rests_on = f"if the jobs before it take half to twice as long as {long}, and later ones do not go first"
    if limit is not None:
        rests_on += ", and there is room then"
    if len(own) < len(line):
        rests_on += ", whichever nodes jobs of other partitions get"
    return StartEstimate(0.0 if preempts else max(0.0, soon), max(1.0, late), rests_on)


def _before(facts: Facts, number: int, ranks: Mapping[int, int], is_waiting: Flags) -> Integers:
    """Return the positions of jobs that run, of those before job `number`, and, last, its own; none if it has ended."""
    mine = facts.number == number
    if not mine.any():
        return np.flatnonzero(mine)
    last = len(ranks) + 1
    rank = np.array([ranks.get(one, last) for one in facts.number.tolist()], np.int64)
    is_before = (rank < rank[mine][0]) | ((rank == rank[mine][0]) & (facts.number < number))
    counting = np.flatnonzero((facts.is_running | (is_waiting & is_before)) & ~mine)
    found = counting[np.lexsort((facts.number[counting], rank[counting], ~facts.is_running[counting]))]
    return np.append(found, np.flatnonzero(mine))
