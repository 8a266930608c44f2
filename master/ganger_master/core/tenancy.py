"""Tenancy: teams of users and partitions of nodes, as operators write them: `[teams.NAME]` and `[partitions.NAME]`.

Both are a table of tables, or its TOML. All mistakes are reported at once, each with the name of its table, the value
and what to write. `core.accounting` decides what follows from the limits of both.

Without partitions a job may be on every node. With them each job is in exactly one: that which it names, or the
default. What follows for the job from the settings (`PartitionTerms`) is put into its record when it is submitted, and
renewed when a master starts with other settings.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Collection, Container, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, TypeVar

from ganger.cluster.refusals import Reason, Refusal
from ganger.text import counted, expand_names, format_duration, parse_duration
from msgspec import Struct

# More GPUs than any cluster has; counts of GPUs are 64-bit on the wire.
MOST_GPUS: Final = 10**9
# Most letters of a name that an operator gives.
NAME_LIMIT: Final = 63
_Made = TypeVar("_Made")


def is_plain_name(text: str) -> bool:
    """Return whether a text can name what an operator makes: letters, digits, '.', '_' and '-', at most 63."""
    return 0 < len(text) <= NAME_LIMIT and all(sign.isalnum() or sign in "._-" for sign in text)


class NamedTable:
    """One table. Values that are wrong read as their default, and add a sentence to `wrong`."""

    def __init__(self, name: str, values: Mapping[str, object], wrong: list[str]) -> None:
        self.name, self._values, self._wrong = name, values, wrong

    def get(self, key: str) -> object:
        return self._values.get(key)

    def refuse(self, sentence: str) -> None:
        """Add a mistake: what follows the name of the table in a sentence."""
        self._wrong.append(f"{self.name!r} {sentence}")

    def number(self, key: str, least: float, most: float, default: Any, kinds: type | tuple[type, ...] = int) -> Any:
        """Return a number of these types, from `least` to `most`."""
        value = self._values.get(key)
        # Tested positively, because NaN is neither more nor less.
        if value is None or (not isinstance(value, bool) and isinstance(value, kinds) and least <= value <= most):  # type: ignore[operator]
            return default if value is None else value
        bounds = " to ".join([str(bound) if isinstance(bound, int) else f"{bound:g}" for bound in (least, most)])
        self.refuse(f"has {key} = {value!r}: write a number from {bounds}")
        return default

    def gpus(self, key: str = "gpus") -> int | None:
        """Return a limit on GPUs; None: any number."""
        found: int | None = self.number(key, 0, MOST_GPUS, None)
        return found

    def flag(self, key: str, default: bool) -> bool:
        value = self._values.get(key, default)
        if type(value) is bool:
            return value
        self.refuse(f"has {key} = {value!r}: write true or false")
        return default

    def names(self, key: str) -> tuple[str, ...]:
        """Return a list of names, each once; empty if there is none."""
        value = self._values.get(key, ())
        if isinstance(value, list | tuple) and all(isinstance(one, str) and one for one in value):
            return tuple(dict.fromkeys(value))
        self.refuse(f'has {key} = {value!r}: write a list of names, ["ann", "bob"]')
        return ()


def tables_of(
    value: object, noun: str, keys: tuple[str, ...], make: Callable[[NamedTable], _Made]
) -> tuple[dict[str, _Made], list[str]]:
    """Return what `make` makes of each table, by name, and all mistakes. noun: what one table describes ("team")."""
    if isinstance(value, str):
        try:
            value = tomllib.loads(value)
        except (ValueError, RecursionError) as error:
            return {}, [str(error)]
    if not isinstance(value, Mapping):
        return {}, [f"{value!r} is no table of {noun}s"]
    wrong: list[str] = []
    found = {}
    for name, values in value.items():
        if not is_plain_name(name):
            wrong.append(f"{name!r} is no name of a {noun}: use letters, digits, '.', '_' and '-'")
        table = NamedTable(name, values if isinstance(values, Mapping) else {}, wrong)
        if not isinstance(values, Mapping):
            table.refuse(f"is no table with {keys[0]}")
            continue
        if unknown := sorted(values.keys() - set(keys)):
            table.refuse(f"has {', '.join(map(repr, unknown))}: a {noun} has {', '.join(keys)}")
        found[name] = make(table)
    return found, wrong


# -- teams -------------------------------------------------------------------------------------------------------------

ALL_OTHER_USERS: Final = "*"


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
    """The teams by name, and the team of each user. Without teams all users are in `NO_TEAM`."""

    def __init__(self, teams: Mapping[str, Team]) -> None:
        self._teams = dict(teams)
        self._team_of = {user: name for name, team in teams.items() for user in team.users}
        self._others = self._team_of.pop(ALL_OTHER_USERS, NO_TEAM)

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


NO_TEAMS: Final = TeamIndex({})


def teams_of(value: object) -> dict[str, Team]:
    """Return teams by name from a table, or from its TOML. Raises ValueError with all mistakes."""
    found, wrong = tables_of(value, "team", ("users", "weight", "gpus"), _team_of)
    named: dict[str, str] = {}
    for name, team in found.items():
        twice = [user for user in team.users if named.setdefault(user, name) != name]
        wrong += [f"{user!r} is in {named[user]!r} and in {name!r}: a user has one team" for user in twice]
    if wrong:
        raise ValueError("teams: " + "; ".join(wrong))
    return found


# Shares that differ by more are as good as a limit of zero, and their quotients overflow.
_LEAST_WEIGHT: Final = 1e-6
_MOST_WEIGHT: Final = 1e6


def _team_of(table: NamedTable) -> Team:
    weight = float(table.number("weight", _LEAST_WEIGHT, _MOST_WEIGHT, 1.0, (int, float)))
    users = table.names("users")
    if not table.get("users"):
        table.refuse('needs users, as in users = ["ann", "bob"]')
    return Team(users, weight, table.gpus())


# -- partitions --------------------------------------------------------------------------------------------------------

# More than the priorities of two users' jobs can differ by: the priority of the partition decides first.
TIER: Final = 2_001
PRIORITY_LIMIT: Final = 1_000
# Daemons look once a second whether devices are in use.
LEAST_IDLE_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class Partition:
    """`nodes`, `gpu_types`: names of its nodes, and GPU types of further ones; neither: all nodes. `users`, `teams`:
    those that may use it; neither: all users. `time_s`: longest time limit of a job, and the limit of a job that names
    none. `gpus`, `gpus_per_user`, `gpus_per_job`: most GPUs that its jobs, those of one user, and one job hold at once.
    None: any. `priority`: goes before the priority of jobs. `preemptible`: plans may suspend its jobs; they may move
    them in any case. `default`: jobs that name no partition are in this one. `idle_warning_s`, `idle_park_s`: in place
    of the cluster's, zero for never; None: the cluster's."""

    nodes: tuple[str, ...] = ()
    gpu_types: tuple[str, ...] = ()
    users: tuple[str, ...] = ()
    teams: tuple[str, ...] = ()
    time_s: float | None = None
    gpus: int | None = None
    gpus_per_user: int | None = None
    gpus_per_job: int | None = None
    priority: int = 0
    preemptible: bool = True
    default: bool = False
    idle_warning_s: float | None = None
    idle_park_s: float | None = None


class PartitionTerms(Struct, frozen=True, gc=False, omit_defaults=True):
    """What follows for a job from its partition; empty `name`: the cluster has no partitions. `time_limit_s`: of a job
    that names none. `preemptible`: see `Partition`."""

    name: str = ""
    priority: int = 0
    preemptible: bool = True
    time_limit_s: float | None = None


NO_TERMS: Final = PartitionTerms()


class PartitionIndex:
    """The partitions by name, in the order of the settings, and the partitions of each node."""

    def __init__(self, partitions: Mapping[str, Partition]) -> None:
        self._partitions = dict(partitions)
        self.default = next((name for name, one in partitions.items() if one.default), next(iter(partitions), ""))
        self._nodes = {name: frozenset(one.nodes) for name, one in partitions.items()}
        self._terms = {
            name: PartitionTerms(name, one.priority, one.preemptible, one.time_s) for name, one in partitions.items()
        }

    def __bool__(self) -> bool:
        return bool(self._partitions)

    def __iter__(self) -> Iterator[str]:
        return iter(self._partitions)

    def __getitem__(self, name: str) -> Partition:
        return self._partitions[name]

    def __contains__(self, name: object) -> bool:
        return name in self._partitions

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PartitionIndex) and self._partitions == other._partitions

    __hash__ = None  # type: ignore[assignment]  # equal by a dictionary

    def of_node(self, node: str, gpu_type: str) -> tuple[str, ...]:
        """Return the partitions that a node is in, sorted."""
        found = []
        for name, partition in self._partitions.items():
            names_none = not partition.nodes and not partition.gpu_types
            if names_none or node in self._nodes[name] or (gpu_type and gpu_type in partition.gpu_types):
                found.append(name)
        return tuple(sorted(found))

    def absent(self, name: str, known: Container[str]) -> list[str]:
        """Return the nodes that the settings of a partition name and that are not known, in their order."""
        return [node for node in self._partitions[name].nodes if node not in known]

    def terms_of(self, named: str) -> PartitionTerms:
        """Return what follows for a job that names this partition; empty: the default. A partition that is not there
        any more has no nodes, and keeps the job waiting."""
        if not self._partitions:
            return NO_TERMS
        return self._terms.get(named or self.default) or PartitionTerms(named)

    def refusal(self, name: str, user: str, team: str, gpus: int, time_limit_s: float | None) -> Refusal | None:
        """Return why a job may not be in a partition, whatever runs there; None if it may.

        name: of the partition. gpus: what the job needs. time_limit_s: of the job; None: it names none."""
        partition = self._partitions.get(name)
        if partition is None:
            there = f"there are {', '.join(self._partitions)}" if self._partitions else "the cluster has no partitions"
            return Refusal(Reason.NO_SUCH_PARTITION, detail=f"there is no partition {name!r}: {there}")
        if not _admits(partition, user, team):
            allowed = [*map(repr, partition.users), *[f"team {one!r}" for one in partition.teams]]
            detail = f"user {user!r} may not use partition {name!r}: it is for {', '.join(allowed[:_SHOWN])}"
            return Refusal(Reason.PARTITION_CLOSED, detail=detail + (", ..." if len(allowed) > _SHOWN else ""))
        longest = partition.time_s
        if longest is not None and time_limit_s is not None and time_limit_s > longest:
            detail = (
                f"its time limit is {format_duration(time_limit_s)}, and partition {name!r} allows "
                f"{format_duration(longest)}"
            )
            return Refusal(Reason.PARTITION_TIME, {"limit_seconds": int(longest)}, detail=detail)
        for limit, whose in (
            (partition.gpus_per_job, "a job"),
            (partition.gpus_per_user, "a user"),
            (partition.gpus, "all its jobs together"),
        ):
            if limit is not None and gpus > limit:
                detail = f"partition {name!r} allows {whose} {counted(limit, 'GPU')}"
                return Refusal(Reason.PARTITION_LIMIT, {"needed": gpus, "limit": limit}, detail=detail)
        return None


# Names of users and teams that a refusal shows.
_SHOWN: Final = 5
NO_PARTITIONS: Final = PartitionIndex({})


def _admits(partition: Partition, user: str, team: str) -> bool:
    if not partition.users and not partition.teams:
        return True
    return user in partition.users or (bool(team) and team in partition.teams)


def partitions_of(value: object) -> dict[str, Partition]:
    """Return partitions by name from a table, or from its TOML. Raises ValueError with all mistakes."""
    found, wrong = tables_of(value, "partition", _KEYS, _partition_of)
    defaults = [name for name, one in found.items() if one.default]
    if len(defaults) > 1:
        wrong.append(f"{' and '.join(map(repr, defaults))} are the default: only one can be")
    if wrong:
        raise ValueError("partitions: " + "; ".join(wrong))
    return found


def unknown_teams(partitions: Mapping[str, Partition], teams: Collection[str]) -> str:
    """Return what is wrong where partitions are for teams that there are not; empty if nothing is."""
    return "; ".join(
        [
            f"{name!r} is for team {team!r}, which [teams] does not have"
            for name, one in partitions.items()
            for team in one.teams
            if team not in teams
        ]
    )


_KEYS: Final = (
    *("nodes", "gpu_types", "users", "teams", "time", "gpus", "gpus_per_user", "gpus_per_job"),
    *("priority", "preemptible", "default", "idle_warning", "idle_park"),
)


def _partition_of(table: NamedTable) -> Partition:
    return Partition(
        nodes=_nodes_of(table),
        gpu_types=table.names("gpu_types"),
        users=table.names("users"),
        teams=table.names("teams"),
        time_s=_time_of(table),
        gpus=table.gpus(),
        gpus_per_user=table.gpus("gpus_per_user"),
        gpus_per_job=table.gpus("gpus_per_job"),
        priority=table.number("priority", 0, PRIORITY_LIMIT, 0),
        preemptible=table.flag("preemptible", default=True),
        default=table.flag("default", default=False),
        idle_warning_s=_idle_time_of(table, "idle_warning"),
        idle_park_s=_idle_time_of(table, "idle_park"),
    )


def _nodes_of(table: NamedTable) -> tuple[str, ...]:
    found: dict[str, None] = {}
    value = table.get("nodes")
    for text in [value] if isinstance(value, str) else table.names("nodes"):
        if "*" in text:
            advice = "patterns are not read: write gpu[01-08], or leave nodes and gpu_types out for all nodes"
            table.refuse(f"has nodes = {text!r}: {advice}")
            continue
        try:
            found.update(dict.fromkeys(_names_in(text)))
        except ValueError as error:
            table.refuse(f"has nodes = {text!r}: {error}")
    return tuple(found)


_names_in = lru_cache(64)(expand_names)


def _time_of(table: NamedTable) -> float | None:
    seconds = _duration_of(table, "time")
    if seconds is not None and seconds <= 0:
        table.refuse(f"has time = {table.get('time')!r}: write more than zero")
    return seconds


def _idle_time_of(table: NamedTable, key: str) -> float | None:
    if table.get(key) == "never":
        return 0.0
    seconds = _duration_of(table, key)
    if seconds is not None and seconds < LEAST_IDLE_S:
        table.refuse(f"has {key} = {table.get(key)!r}: write at least {LEAST_IDLE_S:g}s, or never")
    return seconds


def _duration_of(table: NamedTable, key: str) -> float | None:
    value = table.get(key)
    if value is None:
        return None
    try:
        return parse_duration(value)
    except ValueError as error:
        table.refuse(f"has {key} = {value!r}: {error}")
        return None
