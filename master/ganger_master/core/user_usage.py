"""What each user holds: devices, for quotas, and pending jobs with the bytes of their specs.

The sums are kept up to date as jobs come and go, because there are many of them.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from ganger.job_state import JobState

from ganger_master.core.job_model import JobRecord, JobSpec, bytes_of

# Bytes of a job beside its command, environment and parameters.
_JOB_BYTES: Final = 1_024


def spec_bytes(spec: JobSpec) -> int:
    """Bytes that the spec of a job takes in memory and in the store."""
    return _own_bytes(spec) + bytes_of_all(spec.environment)


def _own_bytes(spec: JobSpec) -> int:
    parameters = {} if spec.array is None else spec.array.parameters
    return _JOB_BYTES + sum(map(bytes_of, spec.command)) + bytes_of_all(spec.labels) + bytes_of_all(parameters)


def bytes_of_all(texts: Mapping[str, str]) -> int:
    """Bytes of names and values together."""
    return bytes_of("".join([*texts, *texts.values()]))


@dataclass(slots=True)
class Holdings:
    """Counts that follow each change of a job. Jobs that have ended count as finished, not for their user."""

    pending: Counter[str] = field(default_factory=Counter)
    live_bytes: Counter[str] = field(default_factory=Counter)
    finished_bytes: int = 0
    _bytes: dict[int, int] = field(default_factory=dict)
    # The environment that was measured last: members of an array share one.
    _measured: tuple[Mapping[str, str] | None, int] = field(default=(None, 0), compare=False)

    def note(self, old: JobRecord | None, new: JobRecord) -> None:
        """Count a job as it is now. `old`: as it was counted before, None for a new one."""
        if old is None or old.spec is not new.spec:
            self._take(old)
            if self._measured[0] is not new.spec.environment:
                self._measured = new.spec.environment, bytes_of_all(new.spec.environment)
            self._bytes[new.number] = _own_bytes(new.spec) + self._measured[1]
            self._give(new)
        elif old.state is not new.state:
            self._take(old)
            self._give(new)

    def forget(self, job: JobRecord) -> None:
        """Count a job no more."""
        self._take(job)
        del self._bytes[job.number]

    def bytes_of(self, number: int) -> int:
        """Bytes of one job's spec, as in `spec_bytes`."""
        return self._bytes[number]

    def _give(self, job: JobRecord, sign: int = 1) -> None:
        size = sign * self._bytes[job.number]
        if job.state.is_finished:
            self.finished_bytes += size
        else:
            self.live_bytes[job.user] += size
        if job.state is JobState.PENDING:
            self.pending[job.user] += sign

    def _take(self, job: JobRecord | None) -> None:
        if job is None:
            return
        self._give(job, -1)
        for counts in (self.pending, self.live_bytes):
            if not counts[job.user]:
                del counts[job.user]


def limit_of(quotas: Mapping[str, int], user: str) -> int | None:
    """Return the devices that a user may hold at once; None: any number. `quotas`: `CoreSettings.quota_devices`."""
    return quotas.get(user, quotas.get(""))


class Shares:
    """Devices by user, of jobs that are charged for them."""

    def __init__(self) -> None:
        self.held: dict[str, int] = {}
        # By job: its user and how many it is charged for.
        self._charged: dict[int, tuple[str, int]] = {}
        self._jobs_of: dict[str, set[int]] = {}

    def charge(self, number: int, user: str, devices: int) -> None:
        """The job holds so many from now on; none takes it off the books."""
        was_user, was = self._charged.pop(number, (user, 0))
        self._add(was_user, -was)
        if was:
            self._jobs_of[was_user].remove(number)
            if not self._jobs_of[was_user]:
                del self._jobs_of[was_user]
        if devices:
            self._charged[number] = user, devices
            self._jobs_of.setdefault(user, set()).add(number)
            self._add(user, devices)

    def of(self, number: int) -> int:
        """What a job is charged for."""
        return self._charged.get(number, ("", 0))[1]

    def beside(self, number: int, user: str) -> int:
        """What the user's jobs hold, one left out."""
        owner, own = self._charged.get(number, ("", 0))
        return self.held.get(user, 0) - (own if owner == user else 0)

    def largest(self, user: str, most: int, beside: int = 0) -> list[tuple[int, int]]:
        """Return (number, devices) of the user's jobs that hold most, largest first. `beside`: a job to leave out."""
        numbers = self._jobs_of.get(user, set()) - {beside}
        return heapq.nsmallest(most, [(number, self.of(number)) for number in numbers], lambda one: (-one[1], one[0]))

    def jobs_of(self, user: str) -> int:
        """Return how many of the user's jobs hold devices."""
        return len(self._jobs_of.get(user, ()))

    def _add(self, user: str, devices: int) -> None:
        left = self.held.get(user, 0) + devices
        assert left >= 0, f"user {user!r} holds {left} devices"
        if left:
            self.held[user] = left
        else:
            self.held.pop(user, None)
