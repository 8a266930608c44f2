"""The use of GPUs by users and teams in the planner, as columns of live jobs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from ganger_master.core.teams import Team, TeamIndex
from ganger_master.core.usage_model import UserUsage, decayed_at, mean_gpus
from ganger_master.policies.orders import Floats, Integers
from ganger_master.policies.team_shares import TeamShares


class TeamUse:
    """Teams, with the use of each user as the master last reported it.

    teams, half_life_s: as `CoreSettings.teams` and `usage_half_life_s`."""

    def __init__(self, teams: Mapping[str, Team], half_life_s: float) -> None:
        self.index = TeamIndex(teams)
        self._half_life_s = half_life_s
        self._usage: dict[str, UserUsage] = {}
        # Numbers of teams, and of each user's team by the number of the user.
        self._team_numbers: dict[str, int] = {}
        self._team_of: list[int] = []
        self._users: list[str] = []

    def put(self, usages: Iterable[UserUsage]) -> None:
        """Record the use of users as it is now."""
        for usage in usages:
            self._usage[usage.user] = usage
            self._number(usage.user)

    def name(self, user: str, number: int) -> None:
        """Record the number of a user; numbers are given in their order, from zero on."""
        if number == len(self._users):
            self._users.append(user)
            self._team_of.append(self._number(user))

    def shares(self, users: Integers, now: float) -> TeamShares:
        """Return the columns of jobs. users: numbers of their users."""
        gpus_of = {
            user: mean_gpus(decayed_at(usage, now, self._half_life_s), self._half_life_s)
            for user, usage in self._usage.items()
        }
        team_gpus = np.zeros(len(self._team_numbers))
        for user, gpus in gpus_of.items():
            team_gpus[self._number(user)] += gpus
        weights: Floats = np.array([self.index[name].weight for name in self._team_numbers], float)
        user_gpus = np.array([gpus_of.get(user, 0.0) for user in self._users], float)
        team = np.array(self._team_of, np.int64)[users]
        return TeamShares(team, weights[team], team_gpus[team], user_gpus[users])

    def _number(self, user: str) -> int:
        return self._team_numbers.setdefault(self.index.of(user), len(self._team_numbers))
