"""Host memory for jobs that resume from OFFLOAD: jobs behind them in the queue are suspended at CHECKPOINT.

A job suspended at OFFLOAD keeps less host memory than it claims, so jobs that start meanwhile may hold the rest. When
it is resumed, jobs behind it in the queue are suspended, the last one first, until it has the memory. So a resumed job
waits only for jobs before it in the queue, as any pending job does.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ganger_master.core.gang_model import Gang, GangIntent
from ganger_master.core.job_model import JobRecord, SuspendLevel
from ganger_master.core.plan_changes import Goal, PlanChange, Purpose
from ganger_master.planner.colocations import is_settled
from ganger_master.planner.migration_plans import park


@dataclass(frozen=True, slots=True)
class Shortage:
    """Host memory that `job` lacks on the nodes where it is parked: positive `missing_bytes` by node name."""

    job: JobRecord
    missing_bytes: Mapping[str, int]


def make_room(
    shortages: Iterable[Shortage],
    running: Sequence[tuple[JobRecord, Gang]],
    leaving: Iterable[tuple[JobRecord, Gang]],
    spared: Collection[int],
) -> list[PlanChange]:
    """Return the suspensions at CHECKPOINT that give jobs the host memory they lack.

    Args:
        shortages: Jobs that lack memory, in the order in which they are served.
        running: Running jobs with their gangs.
        leaving: Jobs that are giving back all they hold, which counts as free.
        spared: Numbers of jobs that are not to be suspended.

    Returns:
        Changes of jobs behind those that lack memory; none for a job that would lack it even so.
    """
    changes: list[PlanChange] = []
    taken = set(spared)
    left = _held(gang for _, gang in leaving)
    for shortage in shortages:
        missing = dict(shortage.missing_bytes)
        for node, needed in shortage.missing_bytes.items():
            covered = min(needed, left.get(node, 0))
            missing[node] = needed - covered
            left[node] = left.get(node, 0) - covered
        later = [pair for pair in running if pair[0].number not in taken and _can_yield(shortage.job, *pair)]
        for job, _ in _fewest(sorted(later, key=lambda pair: _queue_position(pair[0]), reverse=True), missing):
            purpose = Purpose(Goal.HOLE, shortage.job.number, detail="its host memory is for the other, which goes on")
            changes.append(park(job, purpose, SuspendLevel.CHECKPOINT))
            taken.add(job.number)
    return changes


def _fewest(pairs: Sequence[tuple[JobRecord, Gang]], missing: Mapping[str, int]) -> list[tuple[JobRecord, Gang]]:
    """Return the first of these jobs that together hold the missing memory, without superfluous ones.

    The list is empty if all of them hold less.
    """
    chosen: list[tuple[JobRecord, Gang]] = []
    for pair in pairs:
        if _covers(chosen, missing):
            break
        chosen.append(pair)
    if not _covers(chosen, missing):
        return []
    for pair in list(chosen):
        without = [one for one in chosen if one is not pair]
        if _covers(without, missing):
            chosen = without
    return chosen


def _covers(pairs: Iterable[tuple[JobRecord, Gang]], missing: Mapping[str, int]) -> bool:
    held = _held(gang for _, gang in pairs)
    return all(held.get(node, 0) >= needed for node, needed in missing.items())


def _held(gangs: Iterable[Gang]) -> dict[str, int]:
    """Return the host memory that these gangs hold, in bytes by node name."""
    found: dict[str, int] = {}
    for gang in gangs:
        for piece in gang.pieces:
            if piece.held is not None:
                node = piece.held.node
                found[node] = found.get(node, 0) + piece.held.memory_bytes + piece.held.arena_bytes
    return found


def _can_yield(helped: JobRecord, job: JobRecord, gang: Gang) -> bool:
    is_able = job.spec.preemptible and job.capabilities.checkpoint and job.ending is None
    return (
        is_able
        and _queue_position(job) > _queue_position(helped)
        and gang.intent is GangIntent.RUN
        and is_settled(job, gang)
    )


def _queue_position(job: JobRecord) -> tuple[int, int]:
    """Return a key that sorts jobs in the order in which they are served."""
    return -job.spec.priority, job.number
