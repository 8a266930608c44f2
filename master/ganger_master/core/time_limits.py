"""When the time is up that a job was given: running time, or so much of one start before its first step."""

from __future__ import annotations

from ganger_master.core.model import Failure, Gang, GangIntent, JobRecord
from ganger_master.core.state import State


def ends_at(state: State, job: JobRecord) -> float | None:
    """None while nothing is counted: it has no limit, or neither runs nor starts."""
    limit = job.spec.time_limit_seconds
    if limit is None:
        return None
    if job.running_since:
        return job.running_since + limit - job.run_seconds
    gang = state.gangs.get(job.epoch)
    starts = _starts_at(gang) if gang is not None else 0.0
    # Else a job that hangs before its first step would keep its devices for ever.
    return starts + limit - job.run_seconds if starts else None


def counted_s(state: State, job: JobRecord, now: float) -> float:
    """Return the seconds that count against the job's time limit by now."""
    if job.running_since:
        return job.run_seconds + max(0.0, now - job.running_since)
    gang = state.gangs.get(job.epoch)
    starts = _starts_at(gang) if gang is not None else 0.0
    return job.run_seconds + (max(0.0, now - starts) if starts else 0.0)


def failure_of(job: JobRecord) -> Failure:
    done = "ran for" if job.running_since else "did not come to a step within"
    return Failure("TIME_LIMIT", f"{done} its time limit of {job.spec.time_limit_seconds:g} s", epoch=job.epoch)


def _starts_at(gang: Gang) -> float:
    """Since when all its processes are there for the present start; zero while they are not, or it rests."""
    if gang.intent is not GangIntent.RUN or not all(piece.launch_time for piece in gang.pieces):
        return 0.0
    return max(gang.since, *[piece.launch_time for piece in gang.pieces])
