"""Precedence of teams and users below their share, before the order of any policy.

Of the jobs of one priority the next place goes to the team with the least GPUs by weight, where GPUs are those that it
has used on average, with the half-life of its use, and those of its jobs that are ahead already; in the team to the
user with the least. So teams that request enough have GPUs by their weights, and one that has used less than its share
gets more until it is even. Slurm's fair tree (`priority/multifactor`) compares teams first and then users, too, by past
use alone: there one team goes before all jobs of another, and preemption would exchange all of them at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from ganger_master.core.tenancy import Team, TeamIndex
from ganger_master.core.usage_model import UserUsage, decayed_at, mean_gpus
from ganger_master.policies.fairness import filled, levels
from ganger_master.policies.orders import Facts, Floats, Integers, JobOrder, sorted_by

# Part of the cluster by which the GPUs that a team or user has count less than those that it would get: without it, two
# that are even would preempt each other's last job in every plan.
_MARGIN: Final = 0.02


class TeamShares(Struct, frozen=True, eq=False, gc=False):
    """One entry per live job.

    team: the same number for the jobs of one team. weight: of the team. team_gpus, user_gpus: GPUs in use on average by
    its team, and by its user."""

    team: Integers
    weight: Floats
    team_gpus: Floats
    user_gpus: Floats

    def take(self, jobs: NDArray[Any]) -> TeamShares:
        """Return the jobs at these positions, or where this mask is true."""
        return TeamShares(self.team[jobs], self.weight[jobs], self.team_gpus[jobs], self.user_gpus[jobs])

    def places(self, order: JobOrder, facts: Facts, line: Integers, gpus: int) -> Integers:
        """Return the place of each job in the queue; jobs of one user that fit keep the order of `line` (positions by
        priority and policy). Overdue jobs of a priority go first, and jobs that cannot be preempted count as served.

        gpus: GPUs of the cluster."""
        stays = facts.is_running & ~facts.is_preemptible if order.preempts else facts.is_running
        is_overdue = np.zeros(len(facts), bool) if order.overdue is None else order.overdue(facts, gpus)
        rank = np.empty(len(facts), np.int64)
        rank[line] = np.arange(len(facts))
        line = sorted_by(~stays, -facts.priority, ~is_overdue, rank)
        level = levels(~stays[line], -facts.priority[line], ~is_overdue[line])
        whole = float(max(gpus, 1))
        one = np.ones(len(facts))
        inside = line.copy()
        for team in np.unique(self.team).tolist():
            there = np.flatnonzero(self.team[line] == team)
            inside[there] = _merged(facts, line[there], level[there], facts.user, one, self.user_gpus, whole)
        merged = _merged(facts, inside, level, self.team, self.weight, self.team_gpus, whole)
        found = np.empty(len(facts), np.int64)
        found[merged] = np.arange(len(facts))
        return found


def _merged(
    facts: Facts, line: Integers, level: Integers, owner: Integers, weight: Floats, mean_gpus: Floats, whole: float
) -> Integers:
    """Return the jobs of a line (positions), the next one always of the owner with the least GPUs by weight. A level is
    served before the next one."""
    owners = owner[line]
    if len(line) == 0 or (owners == owners[0]).all():
        return line
    gpus = facts.gpus[line].astype(float)
    held = np.bincount(owners, np.where(facts.is_running[line], gpus, 0.0))[owners] / whole
    visits, _ = filled(
        gpus[None],
        np.array((whole,)),
        owners,
        weight[line],
        level,
        base=mean_gpus[line] / whole,
        held=held,
        margin=_MARGIN,
    )
    # Gangs that do not fit any more are behind all levels.
    visits = visits[np.argsort(level[visits], kind="stable")]
    return line[visits]


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
