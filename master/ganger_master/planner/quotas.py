"""Whom its user's quota lets start, of those who wait: kept as jobs come and go.

Who would take its user beyond it waits for other jobs of its user, not for devices. Jobs count as they do for the
master (`core.approval.rules`), which decides.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from ganger_master.core.model import Gang, JobRecord
from ganger_master.core.user_usage import Shares, limit_of

# More GPUs than there are anywhere.
_ANY_NUMBER: Final = 1 << 60


class QuotaUse:
    """`limits`: as `core.settings.Settings.quota_devices`."""

    def __init__(self, limits: Mapping[str, int]) -> None:
        self._limits = limits
        self._shares = Shares()
        # GPUs that those ask for who wait, by user and number.
        self._asked: dict[str, dict[int, int]] = {}
        # Numbers of those of them who would take their user beyond its quota.
        self.kept_out: set[int] = set()

    def put(self, job: JobRecord, gang: Gang | None, waits: bool) -> list[int]:
        """The job as it is now. Numbers of those of its user for whom it has changed by that whether they are kept out,
        its own among them if it is."""
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
        """GPUs that its user's quota leaves to a job, those included that it has."""
        return self._left(job.number, job.user)

    @property
    def are_contested(self) -> bool:
        """Whether some who wait could start, each by itself, but not all of them."""
        return any(
            sum([gpus for number, gpus in asked.items() if number not in self.kept_out]) > self._free(user)
            for user, asked in self._asked.items()
        )

    def beyond(self, line: Iterable[JobRecord]) -> frozenset[int]:
        """Numbers of those who would take their user beyond its quota once those before them in the line have started;
        of those who wait, first job first."""
        free: dict[str, int] = {}
        found = []
        for job in line:
            left = free.setdefault(job.user, self._free(job.user))
            # What it rests on counts already.
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
