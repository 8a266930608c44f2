"""Accounting: the GPUs that jobs of an owner hold at once, under limits, and the GPU-seconds that a user has used.

**Limits.** A limit belongs to an owner: a user, a team, a partition, or a user in a partition. A job counts for all of
its owners, and in a partition each job has a limit of its own.

**Use.** GPU-seconds by day, and their sum with a weight that halves with every half-life. A gang counts from its first
step until its GPUs are free. While their number stays the same, both sums follow from it and the time, so a row changes
only when a gang makes its first step or gives GPUs up. With g GPUs from time a on, the decayed sum U grows as
dU/dt = g - U / tau, tau = half-life / ln 2 (Slurm's priority plug-in decays the sum in steps instead).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple

from ganger.cluster.refusals import Reason, Refusal
from ganger.text import counted
from msgspec import Struct
from msgspec.structs import replace

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


# -- use of GPUs -------------------------------------------------------------------------------------------------------

DAY_S: Final = 86_400
# Days of which the use is kept, the present one included.
DAYS_KEPT: Final = 92


class UserUsage(Struct, frozen=True, gc=False, omit_defaults=True):
    """A user's GPU-seconds up to `time`, Unix seconds.

    gpus: GPUs that gangs use from then on; of a time-sliced or co-located gang only its part of them.
    decayed_gpu_s: GPU-seconds, each weighted by its age. first_day: the first day of `days`, in days since 1970 (UTC).
    days: GPU-seconds by day.
    """

    user: str
    time: float
    gpus: float = 0.0
    decayed_gpu_s: float = 0.0
    first_day: int = 0
    days: tuple[float, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Return whether nothing of it is left to know."""
        return not (self.gpus or self.days) and self.decayed_gpu_s < _NOTHING_GPU_S


# Decayed GPU-seconds that make no difference any more.
_NOTHING_GPU_S: Final = 1e-3


def used_until(usage: UserUsage, now: float, half_life_s: float) -> UserUsage:
    """Return the use at `now`. A clock that was set back adds nothing."""
    passed_s = now - usage.time
    if passed_s <= 0.0:
        return usage
    days = _with_days(usage, now)
    first = int(now // DAY_S) - DAYS_KEPT + 1
    kept = {day: gpu_s for day, gpu_s in days.items() if day >= first and gpu_s > 0.0}
    first_day, last_day = min(kept, default=0), max(kept, default=-1)
    by_day = tuple([round(kept.get(day, 0.0), 3) for day in range(first_day, last_day + 1)])
    return UserUsage(usage.user, now, usage.gpus, decayed_at(usage, now, half_life_s), first_day, by_day)


def decayed_at(usage: UserUsage, now: float, half_life_s: float) -> float:
    """Return the decayed GPU-seconds at `now`."""
    tau_s = half_life_s / math.log(2.0)
    left = math.exp(-max(0.0, now - usage.time) / tau_s)
    return usage.decayed_gpu_s * left + usage.gpus * tau_s * (1.0 - left)


def mean_gpus(decayed_gpu_s: float, half_life_s: float) -> float:
    """Return the GPUs that were in use on average: those that, in use for ever, have this decayed sum."""
    return decayed_gpu_s * math.log(2.0) / half_life_s


def gpu_s_since(usage: UserUsage, day: int) -> float:
    """Return the GPU-seconds of a day, in days since 1970, and of all days after it, up to the usage's time."""
    return math.fsum(gpu_s for at, gpu_s in enumerate(usage.days, usage.first_day) if at >= day)


def with_gpus(usage: UserUsage, gpus: float, now: float, half_life_s: float) -> UserUsage:
    """Return the use with another number of running GPUs from `now` on."""
    return replace(used_until(usage, now, half_life_s), gpus=gpus)


def _with_days(usage: UserUsage, now: float) -> dict[int, float]:
    days = dict(enumerate(usage.days, usage.first_day))
    for day, seconds in _by_day(usage.time, now) if usage.gpus else ():
        days[day] = days.get(day, 0.0) + usage.gpus * seconds
    return days


def _by_day(begin: float, end: float) -> Iterator[tuple[int, float]]:
    """Yield each day of a time, with its seconds; only the last ones, if they are more than are kept."""
    last = int(end // DAY_S)
    for day in range(max(int(begin // DAY_S), last - DAYS_KEPT + 1), last + 1):
        yield day, min(end, (day + 1.0) * DAY_S) - max(begin, float(day * DAY_S))
