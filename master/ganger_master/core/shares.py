"""Who holds how many devices: what quotas are about. Kept as jobs come and go, for there are many of them."""

from __future__ import annotations

import heapq
from collections.abc import Mapping


def limit_of(quotas: Mapping[str, int], user: str) -> int | None:
    """Devices that a user may hold at once; None: any number. `quotas`: as `Settings.quota_devices`."""
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
