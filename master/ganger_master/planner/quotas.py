"""Pending jobs that their users' quotas keep out, updated with every change of a job.

A job that would exceed its user's quota waits for other jobs of that user, not for devices. Jobs count as the master
counts them (`core.approval`), which decides.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from ganger_master.core.gang_model import Gang
from ganger_master.core.job_model import JobRecord
from ganger_master.core.user_usage import Shares, limit_of

# More GPUs than any cluster has.
_ANY_NUMBER: Final = 1 << 60


class QuotaUse:
    """Quota use by user. `limits`: as `core.settings.Settings.quota_devices`."""

    def __init__(self, limits: Mapping[str, int]) -> None:
        self._limits = limits
        self._shares = Shares()
        # GPUs of pending jobs, by user and job number.
        self._asked: dict[str, dict[int, int]] = {}
        # Numbers of pending jobs that would exceed their user's quota.
        self.kept_out: set[int] = set()

    def put(self, job: JobRecord, gang: Gang | None, waits: bool) -> list[int]:
        """Record a job as it is now. Return the numbers of its user's jobs that are kept out or let in by that; its own
        one if it is kept out."""
        number, user = job.number, job.user
        asked, before = self._asked.setdefault(user, {}), self._free(user)
        self._shares.charge(number, user, 0 if gang is None else job.gpus)
        self.kept_out.discard(number)
        if waits:
            asked[number] = job.gpus
        else:
            asked.pop(number, None)
        look = asked if self._free(user) != before else [number] if waits else []
        changed = [one for one in look if (asked[one] > self._left(one, user)) != (one in self.kept_out)]
        self.kept_out.symmetric_difference_update(changed)
        return changed

    def left(self, job: JobRecord) -> int:
        """Return the GPUs that its user's quota leaves to a job, including those that it has."""
        return self._left(job.number, job.user)

    @property
    def are_contested(self) -> bool:
        """Return whether for some user each of several pending jobs could start, but not all of them."""
        return any(
            sum([gpus for number, gpus in asked.items() if number not in self.kept_out]) > self._free(user)
            for user, asked in self._asked.items()
        )

    def beyond(self, line: Iterable[JobRecord]) -> frozenset[int]:
        """Return the numbers of the jobs in `line` (pending, first job first) that would exceed their user's quota once
        the jobs before them have started."""
        free: dict[str, int] = {}
        found = []
        for job in line:
            left = free.setdefault(job.user, self._free(job.user))
            # The devices where it is parked count already.
            more = job.gpus - self._shares.of(job.number)
            if more > left:
                found.append(job.number)
            else:
                free[job.user] = left - more
        return frozenset(found)

    def _free(self, user: str) -> int:
        limit = limit_of(self._limits, user)
        return _ANY_NUMBER if limit is None else limit - self._shares.held.get(user, 0)

    def _left(self, number: int, user: str) -> int:
        return self._free(user) + self._shares.of(number)
