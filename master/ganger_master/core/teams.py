"""Teams: their users, weights and limits, as operators write them. `core.limits` decides what follows from limits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from ganger_master.core.named_tables import NamedTable, tables_of

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
