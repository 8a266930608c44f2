"""Dependencies between jobs: a job that starts only after others have ended, and that ends cancelled once it can never
start. As Slurm's afterok, afternotok, afterany and aftercorr.

`awaits` of a waiting job are those of its dependencies that are still open. Each end of a job settles those on it, so
none is ever on a job that has been forgotten.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from ganger.job_state import JobState
from msgspec.structs import replace

from ganger_master.core import ending
from ganger_master.core.job_model import JobRecord, members_of
from ganger_master.core.job_spec import Condition, Dependency, JobSpec
from ganger_master.core.state import State
from ganger_master.core.state_indexes import JobIndex

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
        path, number = f"spec.dependencies[{place}]", dependency.number
        if not _subjects(jobs, number):
            yield path, f"no job or array {number} is known: there was none, or it ended long ago"
        elif dependency.condition is Condition.EACH:
            there = {member.spec.array.index for member in members_of(jobs, number) if member.spec.array is not None}
            if missing := sorted(set(indices) - there)[:1] if indices and there else [-1]:
                what = f"has no member with index {missing[0]}" if indices and there else "goes with two arrays"
                yield path, f"{number} {what}: `each` pairs members of the same index"
        elif _outcome(jobs, dependency) is False:
            yield path, f"{_named(jobs, number)} has ended otherwise already, so the job would never start"


def open_ones(jobs: JobIndex, spec: JobSpec) -> tuple[Dependency, ...]:
    """Return what a job that is submitted now waits for."""
    return tuple([one for one in _resolved(jobs, spec) if _outcome(jobs, one) is None])


def follow(state: State, now: float, cause: str) -> None:
    """Settle the dependencies on jobs that have ended. A job that is cancelled by this settles others."""
    ended = state.dirty.ended
    while ended:
        number = next(iter(ended))
        del ended[number]
        job = state.jobs.get(number)
        array = None if job is None else job.spec.array
        for subject in (number,) if array is None else (number, array.array):
            for dependent in sorted(state.jobs.dependents.get(subject, ())):
                _settle(state, state.jobs[dependent], now, cause)


def sentence(jobs: JobIndex, awaits: Sequence[Dependency]) -> str:
    """Return what a job waits for: "jobs/7 has succeeded"."""
    return " and ".join([f"{_named(jobs, one.number)} {_VERBS[one.condition]}" for one in awaits])


def _settle(state: State, job: JobRecord, now: float, cause: str) -> None:
    jobs, left = state.jobs, list[Dependency]()
    if job.ending is not None:
        return
    for dependency in job.awaits:
        outcome = _outcome(jobs, dependency)
        if outcome is False:
            reason = f"it was to start after {sentence(jobs, [dependency])}, which cannot come any more"
            ending.end(state, job.number, JobState.CANCELLED, now, reason)
            return
        if outcome is None:
            left.append(dependency)
    if len(left) == len(job.awaits):
        return
    array = job.spec.array
    # Members beyond the limit of their array are released by it.
    held = bool(left) or (array is not None and array.at_once > 0)
    since = 0.0 if held else now
    job = replace(job, awaits=tuple(left), held=held, pending_since=since, revision=job.revision + 1)
    state.put_job(job)
    if not left:
        state.history(now, job, "dependencies_met", cause)


def _resolved(jobs: JobIndex, spec: JobSpec) -> Iterator[Dependency]:
    """Yield the dependencies, those member by member as the one on the member of the same index."""
    for dependency in spec.dependencies:
        if dependency.condition is not Condition.EACH or spec.array is None:
            yield dependency
            continue
        for member in members_of(jobs, dependency.number):
            if member.spec.array is not None and member.spec.array.index == spec.array.index:
                yield Dependency(Condition.SUCCEEDED, member.number)


def _outcome(jobs: JobIndex, dependency: Dependency) -> bool | None:
    """Return whether it is met; False: it can never be; None: that is open."""
    subjects = _subjects(jobs, dependency.number)
    is_over = all(job.state.is_finished for job in subjects)
    are_bad = any(job.state.is_finished and job.state not in _GOOD for job in subjects)
    match dependency.condition:
        case Condition.ENDED:
            return True if is_over else None
        case Condition.FAILED:
            return are_bad if is_over else None
        case _:
            return False if are_bad or not subjects else True if is_over else None


def _subjects(jobs: JobIndex, number: int) -> list[JobRecord]:
    """Return the job, or the members of the array, with a number."""
    job = jobs.get(number)
    return members_of(jobs, number) if job is None else [job]


def _named(jobs: JobIndex, number: int) -> str:
    return f"jobs/{number}" if number in jobs else f"arrays/{number}"
