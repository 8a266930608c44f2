"""Host memory for jobs that go on where they rest: jobs after them in line give theirs up, and wait on storage.

A job suspended at OFFLOAD keeps less host memory than it claims, so jobs that start meanwhile may hold the rest.
Once it is resumed, jobs after it in line are suspended at CHECKPOINT, the last one first, until it has the memory. A
resumed job thus waits only for jobs before it in line, as any pending job does.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ganger_master.core.change_reason import Goal, Purpose
from ganger_master.core.commands import Change
from ganger_master.core.model import Gang, GangIntent, JobRecord, SuspendLevel
from ganger_master.planner.migration_plans import park
from ganger_master.planner.packs import is_settled


@dataclass(frozen=True, slots=True)
class Shortage:
    """The host memory that `job` lacks where it rests: `missing_bytes` by the name of the node, each positive."""

    job: JobRecord
    missing_bytes: Mapping[str, int]


def make_room(
    shortages: Iterable[Shortage],
    running: Sequence[tuple[JobRecord, Gang]],
    leaving: Iterable[tuple[JobRecord, Gang]],
    spared: Collection[int],
) -> list[Change]:
    """Suspends, at CHECKPOINT, of jobs after those that lack memory; none for a job that would lack it even so.

    `running`: jobs with the gangs that they run as. `leaving`: the same of jobs that are giving back all they hold,
    which counts as free. `spared`: numbers of jobs that are not to be suspended.
    """
    changes: list[Change] = []
    taken = set(spared)
    left = _held(gang for _, gang in leaving)
    for shortage in shortages:
        missing = dict(shortage.missing_bytes)
        for node, needed in shortage.missing_bytes.items():
            covered = min(needed, left.get(node, 0))
            missing[node] = needed - covered
            left[node] = left.get(node, 0) - covered
        later = [pair for pair in running if pair[0].number not in taken and _may_give(shortage.job, *pair)]
        for job, _ in _fewest(sorted(later, key=lambda pair: _turn(pair[0]), reverse=True), missing):
            purpose = Purpose(Goal.HOLE, shortage.job.number, detail="its host memory is for the other, which goes on")
            changes.append(park(job, purpose, SuspendLevel.CHECKPOINT))
            taken.add(job.number)
    return changes


def _fewest(pairs: Sequence[tuple[JobRecord, Gang]], missing: Mapping[str, int]) -> list[tuple[JobRecord, Gang]]:
    """The first of these jobs that hold together what is missing, without any that is not needed; none if all hold
    less."""
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
    """Host memory in bytes that these gangs hold, by the name of the node."""
    found: dict[str, int] = {}
    for gang in gangs:
        for piece in gang.pieces:
            if piece.held is not None:
                node = piece.held.node
                found[node] = found.get(node, 0) + piece.held.memory_bytes + piece.held.arena_bytes
    return found


def _may_give(helped: JobRecord, job: JobRecord, gang: Gang) -> bool:
    is_able = job.spec.preemptible and job.capabilities.checkpoint and job.ending is None
    return is_able and _turn(job) > _turn(helped) and gang.intent is GangIntent.RUN and is_settled(job, gang)


def _turn(job: JobRecord) -> tuple[int, int]:
    """The order in which jobs are served."""
    return -job.spec.priority, job.number
