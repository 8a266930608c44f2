"""The jobs, with what follows from them."""

from __future__ import annotations

from ganger.job_state import JobState

from ganger_master.core.job_model import JobRecord, Request
from ganger_master.core.user_usage import Holdings, Shares

# To look up a member of an enumeration takes Python 3.11 as long as a call, and this one is compared all the time.
_PENDING = JobState.PENDING


class JobIndex(dict[int, JobRecord]):
    """The jobs by number, and indexes of them.

    requests: number by user and request id. former: the same of forgotten jobs, those forgotten first at the front.
    finished: in the order in which they ended. live: all others. running_limited: jobs with a time limit that have a
    gang. moving: jobs with a destination. backing_off: failed jobs that are tried again later. shares: devices that
    count towards quotas; empty without quotas. holdings: jobs and bytes by user. left_by: by node the job that last
    gave devices back there, and when; for the history of the job that gets them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.requests: dict[tuple[str, str], int] = {}
        self.former: dict[tuple[str, str], Request] = {}
        self.finished: dict[int, None] = {}
        self.live: dict[int, None] = {}
        self.running_limited: dict[int, None] = {}
        self.moving: dict[int, None] = {}
        self.backing_off: dict[int, None] = {}
        self.shares = Shares()
        self.holdings = Holdings()
        self.left_by: dict[str, tuple[int, float]] = {}

    def put(self, old: JobRecord | None, job: JobRecord) -> bool:
        """Replace a job that was `old`, None for a new one. Return whether its places in indexes may have changed."""
        number = job.number
        self[number] = job
        self.holdings.note(old, job)
        if old is not None and _is_indexed_alike(old, job):
            return False
        if old is None and job.request_id:
            self.requests[job.user, job.request_id] = number
        if job.state.is_finished:
            self.live.pop(number, None)
            self.finished[number] = None
        else:
            self.live[number] = None
        # Most of these sets are empty most of the time.
        if job.again_at or self.backing_off:
            list_if(self.backing_off, number, job.again_at and job.state is _PENDING)
        if job.spec.time_limit_seconds is not None or self.running_limited:
            is_limited = job.spec.time_limit_seconds is not None and job.state is JobState.HOLDING
            list_if(self.running_limited, number, is_limited)
        if job.next_epoch or self.moving:
            list_if(self.moving, number, job.next_epoch)
        return True

    def forget(self, number: int) -> None:
        """Remove a job that has ended."""
        job = self.pop(number)
        self.holdings.forget(job)
        del self.finished[number]
        if self.requests.get((job.user, job.request_id)) == number:
            del self.requests[job.user, job.request_id]

    def put_request(self, request: Request) -> None:
        self.former[request.user, request.request_id] = request

    def forget_request(self, user: str, request_id: str) -> Request | None:
        return self.former.pop((user, request_id), None)

    def note_left(self, node: str, number: int, now: float) -> None:
        self.left_by[node] = (number, now)

    def forget_node(self, name: str) -> None:
        self.left_by.pop(name, None)

    def order_finished(self) -> None:
        """Order the finished jobs by the time of their end."""
        self.finished = dict.fromkeys(sorted(self.finished, key=lambda number: self[number].end_time))


def list_if(listed: dict[int, None], number: int, belongs: object) -> None:
    """Add a number to an ordered set, or remove it."""
    if belongs:
        listed[number] = None
    else:
        listed.pop(number, None)


def _is_indexed_alike(old: JobRecord, job: JobRecord) -> bool:
    """Return whether a change keeps the places of a job in all indexes, as most changes do."""
    return (
        old.state is job.state
        and old.ending is job.ending
        and old.epoch == job.epoch
        and old.next_epoch == job.next_epoch
        and old.again_at == job.again_at
        and old.spec is job.spec
        and old.held is job.held
    )
