"""Teams: their users, weights and limits, as operators write them; and limits on the GPUs that jobs hold.

A limit belongs to an owner: a user by its name, a team by `team_owner`, a partition and a user in one by
`partition_owner`. A job counts for all of its owners.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from ganger_master.core.partitions import MOST_GPUS, Partition

ALL_OTHER_USERS: Final = "*"
# The owner whose limit each user without one has, in `CoreSettings.quota_devices`.
ANY_USER: Final = ""
# No user's name has a colon, and none of a team or partition has a space.
_TEAM: Final = "team:"
_PARTITION: Final = "partition:"
_USER_IN: Final = " user:"
_EACH_JOB_IN: Final = " job"
_NO_LIMITS: Final[Mapping[str, int]] = MappingProxyType({})
_NO_PARTITIONS: Final[Mapping[str, Partition]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Team:
    """`users`: their names; "*": all users that no team names. `weight`: the team's share to that of a team of weight
    1. `gpus`: most GPUs that its users hold at once; None: any number."""

    users: tuple[str, ...] = ()
    weight: float = 1.0
    gpus: int | None = None


# Users of no team are one team without a name.
NO_TEAM: Final = ""
_ANONYMOUS: Final = Team((ALL_OTHER_USERS,))


class TeamIndex:
    """The teams by name, and the team of each user. Without teams all users are in `NO_TEAM`.

    limits: as `CoreSettings.quota_devices`, of which those of partitions count."""

    def __init__(self, teams: Mapping[str, Team], limits: Mapping[str, int] = _NO_LIMITS) -> None:
        self._teams = dict(teams)
        self._limits = frozenset([owner for owner in limits if owner.startswith(_PARTITION)])
        self._team_of = {user: name for name, team in teams.items() for user in team.users}
        self._others = self._team_of.pop(ALL_OTHER_USERS, NO_TEAM)
        self._limited = frozenset([name for name, team in teams.items() if team.gpus is not None])

    def __bool__(self) -> bool:
        return bool(self._teams)

    def __iter__(self) -> Iterator[str]:
        return iter(self._teams)

    def __getitem__(self, name: str) -> Team:
        return _ANONYMOUS if name == NO_TEAM else self._teams[name]

    def __contains__(self, name: object) -> bool:
        return name in self._teams

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TeamIndex) and self._teams == other._teams

    __hash__ = None  # type: ignore[assignment]  # equal by a dictionary

    def of(self, user: str) -> str:
        """Return the name of a user's team."""
        return self._team_of.get(user, self._others)

    def owners(self, user: str, partition: str = "") -> tuple[str, ...]:
        """Return the owners of limits that a job of this user in a partition counts for."""
        team = self.of(user)
        owners = (user, team_owner(team)) if team in self._limited else (user,)
        if not self._limits or not partition:
            return owners
        # The limit of each user in a partition stands under no user's name.
        inside = ((partition_owner(partition),) * 2, (partition_owner(partition, user), partition_owner(partition, "")))
        return (*owners, *[owner for owner, limited in inside if limited in self._limits])

    def with_limits(self, limits: Mapping[str, int]) -> TeamIndex:
        """Return the same teams with these limits."""
        return TeamIndex(self._teams, limits)

    @property
    def limits_partitions(self) -> bool:
        """Return whether the jobs of a partition have a limit together, whatever their teams."""
        return bool(self._limits)


NO_TEAMS: Final = TeamIndex({})


def team_owner(team: str) -> str:
    """Return the owner of a team's limit."""
    return f"{_TEAM}{team}"


def partition_owner(partition: str, user: str | None = None) -> str:
    """Return the owner of a partition's limit; with `user`, of the limit of that user there ("": of any user)."""
    return f"{_PARTITION}{partition}" if user is None else f"{_PARTITION}{partition}{_USER_IN}{user}"


def is_of_partition(owner: str) -> bool:
    return owner.startswith(_PARTITION)


def most_per_job(limits: Mapping[str, int], partition: str) -> int | None:
    """Return the devices that a job in this partition may hold; None: any number."""
    return limits.get(f"{_PARTITION}{partition}{_EACH_JOB_IN}") if partition else None


def owner_in_words(owner: str) -> str:
    """Return "user 'ann'", "team 'vision'", "partition 'gpu'" or "user 'ann' in partition 'gpu'"."""
    if owner.startswith(_PARTITION):
        partition, inside, user = owner.removeprefix(_PARTITION).partition(_USER_IN)
        return f"user {user!r} in partition {partition!r}" if inside else f"partition {partition!r}"
    return f"team {owner.removeprefix(_TEAM)!r}" if owner.startswith(_TEAM) else f"user {owner!r}"


def limit_of(limits: Mapping[str, int], owner: str) -> int | None:
    """Return the devices that an owner may hold at once; None: any number. `limits`: `CoreSettings.quota_devices`."""
    found = limits.get(owner)
    if found is not None or owner.startswith(_TEAM):
        return found
    if owner.startswith(_PARTITION):
        partition, inside, _ = owner.partition(_USER_IN)
        return limits.get(f"{partition}{_USER_IN}") if inside else None
    return limits.get(ANY_USER)


def limits_of(
    quotas: Mapping[str, int], teams: Mapping[str, Team], partitions: Mapping[str, Partition] = _NO_PARTITIONS
) -> dict[str, int]:
    """Return quotas of users ("*": each user without one) and limits of teams and partitions as
    `CoreSettings.quota_devices`."""
    found = {ANY_USER if user == ALL_OTHER_USERS else user: gpus for user, gpus in quotas.items()}
    found.update({team_owner(name): team.gpus for name, team in teams.items() if team.gpus is not None})
    for name, one in partitions.items():
        whole = partition_owner(name)
        limits = {whole: one.gpus, partition_owner(name, ""): one.gpus_per_user, whole + _EACH_JOB_IN: one.gpus_per_job}
        found.update({owner: gpus for owner, gpus in limits.items() if gpus is not None})
    return found


def teams_of(value: object) -> dict[str, Team]:
    """Return teams by name from a table, or from its TOML. Raises ValueError with all mistakes."""
    if isinstance(value, str):
        try:
            value = tomllib.loads(value)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"teams: {error}") from None
    if not isinstance(value, Mapping):
        raise ValueError(f"teams: {value!r} is no table of teams")
    wrong: list[str] = []
    found = {name: _team_of(name, table, wrong) for name, table in value.items()}
    named: dict[str, str] = {}
    for name, team in found.items():
        twice = [user for user in team.users if named.setdefault(user, name) != name]
        wrong += [f"{user!r} is in {named[user]!r} and in {name!r}: a user has one team" for user in twice]
    if wrong:
        raise ValueError("teams: " + "; ".join(wrong))
    return found


_KEYS: Final = ("users", "weight", "gpus")
# Shares that differ by more are as good as a limit of zero, and their quotients overflow.
_LEAST_WEIGHT: Final = 1e-6
_MOST_WEIGHT: Final = 1e6


def _team_of(name: str, table: object, wrong: list[str]) -> Team:
    """Return a team, or one without content where the table has mistakes, which are added to `wrong`."""
    if not name or not all(sign.isalnum() or sign in "._-" for sign in name):
        wrong.append(f"{name!r} is no name of a team: use letters, digits, '.', '_' and '-'")
    if not isinstance(table, Mapping):
        wrong.append(f"{name!r} is no table with users")
        return Team()
    unknown = sorted(table.keys() - set(_KEYS))
    if unknown:
        wrong.append(f"{name!r} has {', '.join(map(repr, unknown))}: a team has {', '.join(_KEYS)}")
    users, weight, gpus = [table.get(key) for key in _KEYS]
    if not isinstance(users, list | tuple) or not users or not all(isinstance(user, str) and user for user in users):
        wrong.append(f'{name!r} needs users, as in users = ["ann", "bob"]')
        users = []
    if weight is None:
        weight = 1.0
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not _LEAST_WEIGHT <= weight <= _MOST_WEIGHT:
        wrong.append(f"{name!r} has the weight {weight!r}: write a number from {_LEAST_WEIGHT:g} to {_MOST_WEIGHT:g}")
        weight = 1.0
    if gpus is not None and (isinstance(gpus, bool) or not isinstance(gpus, int) or not 0 <= gpus <= MOST_GPUS):
        wrong.append(f"{name!r} has gpus = {gpus!r}: write a number from 0 to {MOST_GPUS}")
        gpus = None
    return Team(tuple(dict.fromkeys(users)), float(weight), gpus)
