"""The states of a job, as the master keeps them and as users see them."""

from __future__ import annotations

from enum import StrEnum


class JobState(StrEnum):
    """PENDING waits for a gang, HOLDING has one, SUSPENDED was asked for by a user; the others are final.

    STOPPED: by the stop rule of its array, and what the job had reached stands. See docs/reference/cli.md.
    """

    PENDING = "PENDING"
    HOLDING = "HOLDING"
    SUSPENDED = "SUSPENDED"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"
    STOPPED = "STOPPED"

    @property
    def is_finished(self) -> bool:
        return self in _FINISHED


_FINISHED = (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED, JobState.STOPPED)
