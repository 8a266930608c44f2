"""Which jobs that have ended are still kept, so that memory is bounded; of the others it is known that they were.

A submission that is repeated must be recognised for a while: of a job that goes, its request id stays as long.
"""

from __future__ import annotations

from collections.abc import Iterator

from ganger_master.core.memberships import members_of
from ganger_master.core.model import Request
from ganger_master.core.state import State


def forget(state: State, now: float) -> None:
    """Keeps the jobs that ended last; one that holds something on a lost node stays until that is gone."""
    for number in _going(state):
        _forget_job(state, number, now)
    while state.former:
        oldest = next(iter(state.former.values()))
        if _must_be_known(state, oldest.time, now) and len(state.former) <= state.settings.former_requests_limit:
            return
        state.forget_request(oldest.user, oldest.request_id)


def _going(state: State) -> list[int]:
    """Return the oldest jobs to forget, so that the rest are within the limits on jobs and on bytes."""
    excess = len(state.finished) - state.settings.finished_jobs_limit
    most = state.settings.finished_bytes_limit
    excess_bytes = 0 if most is None else state.holdings.finished_bytes - most
    going: list[int] = []
    if excess <= 0 and excess_bytes <= 0:
        return going
    for number in _may_go(state):
        if len(going) >= excess and excess_bytes <= 0:
            break
        going.append(number)
        excess_bytes -= state.holdings.bytes_of(number)
    return going


def _may_go(state: State) -> Iterator[int]:
    """Those that hold nothing any more; of an array, whose members are compared, once all have ended."""
    lives: dict[int, bool] = {}
    for number in state.finished:
        array = state.jobs[number].spec.array
        if number in state.gangs_of:
            continue
        if array is not None and array.array not in lives:
            lives[array.array] = any(not job.state.is_finished for job in members_of(state.jobs, array.array))
        if array is None or not lives[array.array]:
            yield number


def _forget_job(state: State, number: int, now: float) -> None:
    job = state.jobs[number]
    # After its day an id may be another's.
    has_id = state.requests.get((job.user, job.request_id)) == number
    state.forget_job(number)
    if has_id and _must_be_known(state, job.create_time, now):
        state.put_request(Request(number, job.request_id, job.create_time, job.user))


def _must_be_known(state: State, submitted: float, now: float) -> bool:
    return now - submitted <= state.settings.request_kept_seconds
