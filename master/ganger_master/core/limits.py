"""Limits on the GPUs that jobs hold at once, and the sentences of refusals by them.

A limit belongs to an owner: a user, a team, a partition, or a user in a partition. A job counts for all of its owners,
and in a partition each job has a limit of its own.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple

from ganger.cluster.refusals import Reason, Refusal
from ganger.text import counted

from ganger_master.core.tenancy import ALL_OTHER_USERS, Partition, Team

# The user whose limit each user without one has, in quotas by user.
ANY_USER: Final = ""
_NO_TEAMS: Final[Mapping[str, Team]] = MappingProxyType({})
_NO_PARTITIONS: Final[Mapping[str, Partition]] = MappingProxyType({})


class Owner(NamedTuple):
    """Whose jobs hold GPUs under one limit. `user`: this user's; None: those of all users of the team or partition."""

    user: str | None = None
    team: str = ""
    partition: str = ""

    def __str__(self) -> str:
        """ "user 'ann'", "team 'vision'", "partition 'gpu'" or "user 'ann' in partition 'gpu'"."""
        whole = f"partition {self.partition!r}" if self.partition else f"team {self.team!r}"
        if self.user is None:
            return whole
        return f"user {self.user!r} in {whole}" if self.partition else f"user {self.user!r}"


class Limits:
    """The limits of a cluster. `by_owner`: devices; the user `ANY_USER` is each user without an entry. `per_job`: of
    each job in a partition, by its name."""

    def __init__(self, by_owner: Mapping[Owner, int], per_job: Mapping[str, int]) -> None:
        self.by_owner, self.per_job = dict(by_owner), dict(per_job)
        # Jobs of any team count for the limit of a partition.
        self.are_across_teams = any(owner.partition for owner in self.by_owner)

    def __bool__(self) -> bool:
        return bool(self.by_owner or self.per_job)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Limits) and (self.by_owner, self.per_job) == (other.by_owner, other.per_job)

    __hash__ = None  # type: ignore[assignment]  # equal by dictionaries

    def of(self, owner: Owner) -> int | None:
        """Return the devices that an owner may hold at once; None: any number."""
        found = self.by_owner.get(owner)
        if found is not None or owner.user is None:
            return found
        return self.by_owner.get(Owner(ANY_USER, partition=owner.partition))

    def of_job(self, partition: str) -> int | None:
        """Return the devices that each job in a partition may hold; None: any number."""
        return self.per_job.get(partition)

    def owners(self, user: str, team: str, partition: str = "") -> tuple[Owner, ...]:
        """Return the owners that a job of this user and team in a partition counts for, as far as they have limits; the
        user is always among them."""
        owners = [Owner(user)]
        if team and Owner(team=team) in self.by_owner:
            owners.append(Owner(team=team))
        if partition and Owner(partition=partition) in self.by_owner:
            owners.append(Owner(partition=partition))
        if partition and Owner(ANY_USER, partition=partition) in self.by_owner:
            owners.append(Owner(user, partition=partition))
        return tuple(owners)

    def less(self, owners: Sequence[Owner], devices: int) -> Limits:
        """Return what is left of the limits once jobs of these owners hold so many more devices."""
        known = {owner: limit for owner in owners if (limit := self.of(owner)) is not None}
        left = {owner: max(0, limit - devices) for owner, limit in known.items()}
        return Limits({**self.by_owner, **left}, self.per_job)


NO_LIMITS: Final = Limits({}, {})


def by_user(quotas: Mapping[str, int]) -> dict[str, int]:
    """Return quotas as operators write them ("*": each user without one) with `ANY_USER` in place of "*"."""
    return {ANY_USER if user == ALL_OTHER_USERS else user: gpus for user, gpus in quotas.items()}


def limits_of(
    quotas: Mapping[str, int],
    teams: Mapping[str, Team] = _NO_TEAMS,
    partitions: Mapping[str, Partition] = _NO_PARTITIONS,
) -> Limits:
    """Return the limits of a cluster. quotas: devices by user, as of `by_user`; teams, partitions: by name."""
    found: dict[Owner, int | None] = {Owner(user): gpus for user, gpus in quotas.items()}
    found.update({Owner(team=name): team.gpus for name, team in teams.items()})
    for name, one in partitions.items():
        found[Owner(partition=name)] = one.gpus
        found[Owner(ANY_USER, partition=name)] = one.gpus_per_user
    per_job = {name: one.gpus_per_job for name, one in partitions.items() if one.gpus_per_job is not None}
    return Limits({owner: gpus for owner, gpus in found.items() if gpus is not None}, per_job)


class Charges:
    """Devices that jobs hold, by the owners of limits: each job is charged to all of its owners."""

    def __init__(self) -> None:
        self.held: dict[Owner, int] = {}
        # By job: its owners and how many it is charged for.
        self._charged: dict[int, tuple[tuple[Owner, ...], int]] = {}
        self._jobs_of: dict[Owner, set[int]] = {}

    def charge(self, number: int, owners: tuple[Owner, ...], devices: int) -> None:
        """Charge a job of these owners for so many devices from now on, in place of those before; zero: for none."""
        former, was = self._charged.pop(number, ((), 0))
        for owner in former:
            self._add(owner, -was)
            self._jobs_of[owner].remove(number)
            if not self._jobs_of[owner]:
                del self._jobs_of[owner]
        if devices:
            self._charged[number] = owners, devices
            for owner in owners:
                self._jobs_of.setdefault(owner, set()).add(number)
                self._add(owner, devices)

    def of(self, number: int) -> int:
        """Return the devices that a job is charged for."""
        return self._charged.get(number, ((), 0))[1]

    def beside(self, number: int, owner: Owner) -> int:
        """Return the devices that the owner's jobs hold, without those of one job."""
        owners, own = self._charged.get(number, ((), 0))
        return self.held.get(owner, 0) - (own if owner in owners else 0)

    def largest(self, owner: Owner, most: int, beside: int = 0) -> list[tuple[int, int]]:
        """Return (number, devices) of the owner's jobs that hold most, largest first. `beside`: a job to leave out."""
        numbers = self._jobs_of.get(owner, set()) - {beside}
        return heapq.nsmallest(most, [(number, self.of(number)) for number in numbers], lambda one: (-one[1], one[0]))

    def jobs_of(self, owner: Owner) -> int:
        """Return how many of the owner's jobs hold devices."""
        return len(self._jobs_of.get(owner, ()))

    def _add(self, owner: Owner, devices: int) -> None:
        left = self.held.get(owner, 0) + devices
        assert left >= 0, f"{owner} holds {left} devices"
        if left:
            self.held[owner] = left
        else:
            self.held.pop(owner, None)


# -- refusals ----------------------------------------------------------------------------------------------------------


def beyond(limits: Limits, owners: Sequence[Owner], gpus: int) -> tuple[Owner, Refusal] | None:
    """Return the first owner that may never hold so many GPUs, with the refusal of a job that needs them; None if all
    may."""
    for owner in owners:
        limit = limits.of(owner)
        if limit is not None and gpus > limit:
            most = f"the {_kind(owner)} of {owner} is {limit}" if limit else f"{owner} may hold none"
            detail = f"the job needs {counted(gpus, 'GPU')} and {most}"
            return owner, Refusal(_reason(owner), {"needed": gpus, "limit": limit}, detail=detail)
    return None


def full(owner: Owner, gpus: int, held: int, limit: int, holders: str) -> Refusal:
    """Return the refusal of a job that needs `gpus` while other jobs of an owner hold `held` of its limit. holders:
    these jobs, as text."""
    detail = f"{owner} holds {held} of the {counted(limit, 'GPU')} of its {_kind(owner)}: {holders}"
    return Refusal(_reason(owner), {"needed": gpus, "held": held, "limit": limit}, detail=detail)


def _kind(owner: Owner) -> str:
    return "limit" if owner.partition else "quota"


def _reason(owner: Owner) -> Reason:
    return Reason.PARTITION_LIMIT if owner.partition else Reason.QUOTA
