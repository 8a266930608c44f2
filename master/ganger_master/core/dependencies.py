"""Dependencies between jobs: a job that starts only after others have ended, and that ends cancelled once it can never
start. As Slurm's afterok, afternotok, afterany and aftercorr.

`awaits` of a waiting job are those of its dependencies that are still open. Each end of a job settles those on it
before the job may be forgotten, so none is ever on a job that has been forgotten.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from ganger.job_state import JobState
from msgspec.structs import replace

from ganger_master.core import ending
from ganger_master.core.job_model import JobRecord, members_of
from ganger_master.core.job_spec import Condition, Dependency, JobSpec
from ganger_master.core.state import State
from ganger_master.core.state_indexes import JobIndex

# A job has at most a hundred dependencies: a sentence names the first ones.
_NAMED: Final = 3
# A member that the stop rule of its array has ended has done what it was for.
_GOOD: Final = (JobState.SUCCEEDED, JobState.STOPPED)
_VERBS: Final = {
    Condition.SUCCEEDED: "has succeeded",
    Condition.FAILED: "has failed",
    Condition.ENDED: "has ended",
    Condition.EACH: "has succeeded, member by member",
}


def violations_of(jobs: JobIndex, spec: JobSpec, indices: Sequence[int] = ()) -> Iterator[tuple[str, str]]:
    """Yield (path, what is wrong) for dependencies on jobs that are not known, and for those that can never be met.
    indices: those of the members, of an array."""
    for place, dependency in enumerate(spec.dependencies):
        path, number, condition = f"spec.dependencies[{place}]", dependency.number, dependency.condition
        subjects = _subjects(jobs, number)
        array = subjects[0].spec.array if number not in jobs and subjects else None
        if not subjects:
            yield path, f"no job or array {number} is known: there was none, or it ended long ago"
        elif array is not None and len(subjects) < array.size and condition is not Condition.ENDED:
            yield path, f"members of arrays/{number} ended long ago, and how is no longer known"
        elif condition is Condition.EACH:
            there = () if array is None else _by_index(subjects)
            if missing := sorted(set(indices).difference(there))[:1] if indices and there else [-1]:
                what = f"has no member with index {missing[0]}" if indices and there else "goes with two arrays"
                yield path, f"{number} {what}: `each` pairs members of the same index"
        elif _outcome(condition, subjects) is False:
            yield path, f"{_named(jobs, number)} has ended otherwise already, so the job would never start"


def with_open_dependencies(state: State, submitted: Sequence[JobRecord]) -> Iterator[JobRecord]:
    """Yield a submitted job, or the members of an array, with the dependencies that are not met yet.

    Those that can never be met are settled after the event: the partner of a member may have failed already."""
    jobs, given = state.jobs, submitted[0].spec.dependencies
    shared = [
        one
        for one in given
        if one.condition is not Condition.EACH and not _outcome(one.condition, _subjects(jobs, one.number))
    ]
    pairs = [_by_index(members_of(jobs, one.number)) for one in given if one.condition is Condition.EACH]
    for job in submitted:
        array = job.spec.array
        partners = [] if array is None else [by_index[array.index] for by_index in pairs]
        own = [Dependency(Condition.SUCCEEDED, one.number) for one in partners if one.state not in _GOOD]
        if awaits := tuple(dict.fromkeys([*shared, *own])):
            job = replace(job, awaits=awaits, held=True, pending_since=0.0)
            state.dirty.ended.update({one.number: None for one in partners if one.state.is_finished})
        yield job


def follow(state: State, now: float, cause: str) -> None:
    """Settle the dependencies on jobs and arrays of which any has ended. A job that is cancelled by this ends later."""
    ended, state.dirty.ended = state.dirty.ended, {}
    for number in ended:
        for dependency in [Dependency(condition, number) for condition in _VERBS]:
            if dependency not in state.jobs.dependents:
                continue
            outcome = _outcome(dependency.condition, _subjects(state.jobs, number))
            if outcome is not None:
                for dependent in sorted(state.jobs.dependents[dependency]):
                    _settle(state, state.jobs[dependent], dependency, outcome, now, cause)


def sentence(jobs: JobIndex, awaits: Sequence[Dependency]) -> str:
    """Return what a job waits for: "jobs/7 has succeeded"."""
    named = [f"{_named(jobs, one.number)} {_VERBS[one.condition]}" for one in awaits[:_NAMED]]
    return " and ".join([*named, *([f"{len(awaits) - _NAMED} more"] if len(awaits) > _NAMED else [])])


def _settle(state: State, job: JobRecord, dependency: Dependency, is_met: bool, now: float, cause: str) -> None:
    if not is_met:
        reason = f"it was to start after {sentence(state.jobs, [dependency])}, which cannot come any more"
        ending.end(state, job.number, JobState.CANCELLED, now, reason)
        return
    awaits = tuple([one for one in job.awaits if one != dependency])
    array = job.spec.array
    # Members beyond the limit of their array are released by it.
    held = bool(awaits) or (array is not None and array.at_once > 0)
    waits = not held and job.state is JobState.PENDING and job.ending is None
    job = replace(job, awaits=awaits, held=held, pending_since=now if waits else 0.0, revision=job.revision + 1)
    state.put_job(job)
    if not awaits:
        state.history(now, job, "dependencies_met", cause)


def _outcome(condition: Condition, subjects: Sequence[JobRecord]) -> bool | None:
    """Return whether a dependency on these jobs is met; False: it can never be; None: that is open."""
    is_over = all(job.state.is_finished for job in subjects)
    are_bad = any(job.state.is_finished and job.state not in _GOOD for job in subjects)
    match condition:
        case Condition.ENDED:
            return True if is_over else None
        case Condition.FAILED:
            return are_bad if is_over else None
        case _:
            return False if are_bad else True if is_over else None


def _subjects(jobs: JobIndex, number: int) -> list[JobRecord]:
    """Return the job, or the members of the array, with a number."""
    job = jobs.get(number)
    return members_of(jobs, number) if job is None else [job]


def _by_index(members: Sequence[JobRecord]) -> Mapping[int, JobRecord]:
    return {job.spec.array.index: job for job in members if job.spec.array is not None}


def _named(jobs: JobIndex, number: int) -> str:
    return f"jobs/{number}" if number in jobs else f"arrays/{number}"
