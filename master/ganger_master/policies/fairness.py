"""Fairness: dominant resource fairness, quotas of users, fair time slices between jobs, and precedence of teams.

**Dominant resource fairness** with gangs as units (Ghodsi et al., NSDI 2011, section 4: progressive filling). A gang
that does not fit any more counts for no user. **Time slices** are max-min fair by weight. Where jobs do not divide
evenly among devices, a neighbour of the job that is furthest behind its share moves to the job that is furthest ahead;
Gandiva (OSDI 2018, section 3.3) moves once, to balance load.

**Teams** and users below their share have precedence before the order of any policy. Of the jobs of one priority the
next place goes to the team with the least GPUs by weight, where GPUs are those that it has used on average, with the
half-life of its use, and those of its jobs that are ahead already; in the team to the user with the least. So teams
that request enough have GPUs by their weights, and one that has used less than its share gets more until it is even.
Slurm's fair tree (`priority/multifactor`) compares teams first and then users, too, by past use alone: there one team
goes before all jobs of another, and preemption would exchange all of them at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
from ganger.protocol.slice_rotation import SWITCHES_PER_QUANTUM
from msgspec import Struct
from numpy.typing import NDArray

from ganger_master.core.accounting import Charges, Limits, Owner, UserUsage, decayed_at, mean_gpus
from ganger_master.core.gang_model import Gang
from ganger_master.core.job_model import JobRecord
from ganger_master.core.tenancy import NO_TEAMS, Team, TeamIndex
from ganger_master.policies.orders import Capacity, Facts, Floats, Integers, JobOrder, sorted_by

# Shares are rounded to this many decimals, so that rounding errors of sums decide no tie.
_DECIMALS = 9
# Gangs sorted in the first batch: most clusters are full, or nearly so, after this many.
_FIRST_BATCH = 1_024


def drf_keys(facts: Facts, now: float, capacity: Capacity) -> tuple[NDArray[Any], ...]:
    """Dominant resource fairness, weighted: the user with the smallest dominant share gets the next gang."""
    is_kept = facts.is_running & ~facts.is_preemptible
    line = sorted_by(-facts.priority, facts.arrival_s, facts.number)
    line = np.concatenate((line[is_kept[line]], line[~is_kept[line]]))
    visits, _ = filled(
        np.array((facts.gpus, facts.cores, facts.memory_bytes), float).take(line, axis=1),
        np.array((capacity.gpus, capacity.cores, capacity.memory_bytes), float),
        facts.user[line],
        facts.weight[line],
        levels(is_kept[line], facts.priority[line]),
    )
    position = np.empty(len(facts), np.int64)
    position[line[visits]] = np.arange(len(facts))
    return (position,)


def filled(
    demands: Floats,
    capacity: Floats,
    user: Integers,
    weight: Floats,
    level: Integers | None = None,
    base: Floats | None = None,
    held: Floats | None = None,
    margin: float = 0.0,
) -> tuple[Integers, int]:
    """Return the gangs in the sequence of their visits, skipped ones last, and the number of gangs served.

    `demands` (resources, gangs): in the order in which each user wants gangs served, which also breaks ties.
    `capacity` (resources,): 0 means that the resource is not shared. `user`, `weight` (gangs,): a user has the weight,
    above 0, of their first gang. `level` (gangs,), ascending: all gangs of a level are visited before the next level.
    `base` (gangs,): the share that the gang's user has from the beginning. `held` (gangs,): the share that it has at
    present; up to there its share counts by `margin` less.
    """
    count = len(user)
    level = np.zeros(count, np.int64) if level is None else level
    is_shared = capacity > 0
    demands, capacity = demands[is_shared], capacity[is_shared, None]
    users = _Users(user, weight, demands / capacity, base, held, margin)
    free = capacity.copy()
    served: list[Integers] = []
    is_left = np.ones(count, bool)
    fitting = np.flatnonzero((demands <= free).all(axis=0))
    batch = _FIRST_BATCH
    while len(fitting):
        line = _first(batch, fitting, level, users.shares(fitting))
        fits = (np.cumsum(demands.take(line, axis=1), axis=1) <= free).all(axis=0)
        # The first gang fits, so every iteration serves at least one.
        stretch = line if fits.all() else line[: int(np.argmin(fits))]
        batch = 4 * batch if len(stretch) == len(line) else _FIRST_BATCH
        served.append(stretch)
        users.give(stretch)
        free = free - demands.take(stretch, axis=1).sum(axis=1, keepdims=True)
        is_left[stretch] = False
        fitting = np.flatnonzero(is_left & (demands <= free).all(axis=0))
    sequence = np.concatenate((*served, np.empty(0, np.int64)))
    return np.concatenate((sequence, np.flatnonzero(is_left))), len(sequence)


def _first(count: int, gangs: Integers, level: Integers, shares: Floats) -> Integers:
    """Return about the first `count` gangs in the sequence of their visits, and all that are tied with them."""
    if len(gangs) > count:
        # Whole levels, and the smallest shares of the last level that is reached.
        reached = level[gangs[count - 1]]
        is_last = level[gangs] == reached
        before = int(np.argmax(is_last))
        most = np.partition(shares[is_last], count - 1 - before)[count - 1 - before]
        is_near = (level[gangs] < reached) | (is_last & (shares <= most))
        gangs, shares = gangs[is_near], shares[is_near]
    return gangs[sorted_by(level[gangs], shares)]


class _Users:
    def __init__(
        self,
        user: Integers,
        weight: Floats,
        wanted: Floats,
        base: Floats | None = None,
        held: Floats | None = None,
        margin: float = 0.0,
    ) -> None:
        """`wanted` (resources, gangs): shares of the cluster. Else as in `filled`."""
        names, self._position = np.unique(user, return_inverse=True)
        self._of_gang = wanted
        # A small integer type makes NumPy use a radix sort.
        self._line = np.argsort(self._position.astype(np.min_scalar_type(len(names))), kind="stable")
        # Arrays over the concatenated lines of all users.
        self._user = self._position[self._line]
        self._wanted = wanted.take(self._line, axis=1)
        self._begins = np.flatnonzero(np.diff(self._user, prepend=-1))
        self._weight = weight[self._line[self._begins]][self._user]
        self._held = np.zeros((len(wanted), len(names)))
        self._base = None if base is None else base[self._line]
        self._present, self._margin = None if held is None else held[self._line], margin

    def give(self, gangs: Integers) -> None:
        """Add these gangs to the shares of their users."""
        for held, wanted in zip(self._held, self._of_gang, strict=True):
            held += np.bincount(self._position[gangs], wanted[gangs], len(held))

    def shares(self, gangs: Integers) -> Floats:
        """Return the weighted dominant share at which each of these gangs is visited. It counts what the user holds and
        the gangs before this one in the user's line. It never falls along a user's line, so sorting by it merges the
        lines."""
        is_counted = np.zeros(len(self._user), bool)
        is_counted[gangs] = True
        wanted = self._wanted * is_counted[self._line]
        before = np.cumsum(wanted, axis=1) - wanted
        before += (self._held - before[:, self._begins]).take(self._user, axis=1)
        dominant = before.max(axis=0, initial=0.0)
        if self._present is not None:
            # Never falls along a user's line either.
            dominant = dominant - np.where(dominant < self._present, self._margin, 0.0)
        if self._base is not None:
            dominant = dominant + self._base
        shares = np.empty(len(self._user))
        shares[self._line] = np.round(dominant / self._weight, _DECIMALS)
        return np.asarray(shares[gangs], float)


def levels(*columns: NDArray[Any]) -> Integers:
    """Return numbers that rise wherever a column changes along the line."""
    differs = np.logical_or.reduce([column[1:] != column[:-1] for column in columns])
    return np.concatenate((np.zeros(min(1, len(columns[0])), np.int64), np.cumsum(differs)))


DRF = JobOrder("drf", drf_keys)


# Node and mask of its devices, by node.
Seat: TypeAlias = tuple[tuple[str, int], ...]

QUANTUM_S: Final = 60.0

# Minimum time between two migrations of a job, in pauses (which then cost two per cent) and in quanta.
_PAUSES_BETWEEN: Final = 50.0
_QUANTA_BETWEEN: Final = 2.0


@dataclass(frozen=True, slots=True)
class ServiceBalance:
    """A running gang, alone or time-sliced. `kind`: gangs of one kind can use each other's devices. `behind_s`: seconds
    it lacks of its share. `settled_s`: seconds since it moved or came. `pause_s`: cost of its migration. `may_share`:
    it may be time-sliced. `may_move`: it may migrate for that."""

    number: int
    kind: tuple[object, ...]
    seat: Seat
    behind_s: float
    settled_s: float
    pause_s: float
    may_share: bool = True
    may_move: bool = True


@dataclass(frozen=True, slots=True)
class Going:
    """Job `number` moves to the devices of `host` from those of `helped`, which is `gap_s` seconds behind the host."""

    number: int
    host: int
    helped: int
    gap_s: float


class SliceShare(Struct, frozen=True, gc=False):
    """A gang that shares devices, by its number."""

    number: int
    gpus: int
    weight: float = 1.0


def quantum_s(switch_s: float, wanted_s: float = QUANTUM_S) -> float:
    """Return the seconds of a slice: as wanted, and at least fifty times the measured switch."""
    return max(wanted_s, SWITCHES_PER_QUANTUM * switch_s)


def shares(sharers: Sequence[SliceShare], gpus: float) -> dict[int, float]:
    """Return the share of the time that each gang is entitled to on so many devices, by number: in proportion to
    weights, at most 1 (water-filling)."""
    found: dict[int, float] = {}
    rest, left = list(sharers), gpus
    while rest:
        level = left / sum([one.weight * one.gpus for one in rest])
        full = [one for one in rest if level * one.weight >= 1.0]
        if not full:
            found.update({one.number: level * one.weight for one in rest})
            break
        found.update(dict.fromkeys([one.number for one in full], 1.0))
        left -= sum([one.gpus for one in full])
        rest = [one for one in rest if level * one.weight < 1.0]
    return found


def balanced(standings: Sequence[ServiceBalance], quantum_s: float) -> list[Going]:
    """Return the migrations to make now: only where the gap exceeds a quantum, and each device at most once."""
    crowds, least_s = Counter([one.seat for one in standings]), _QUANTA_BETWEEN * quantum_s
    found: list[Going] = []
    touched: set[tuple[str, int]] = set()
    sharing = sorted([one for one in standings if one.may_share], key=lambda one: (one.behind_s, one.number))
    for one in sorted(sharing, key=lambda one: (-one.behind_s, one.number)):
        beside = [other for other in sharing if other.seat == one.seat and other.number != one.number]
        guest = next(
            (
                other
                for other in beside
                if other.may_move and other.settled_s >= max(least_s, _PAUSES_BETWEEN * other.pause_s)
            ),
            None,
        )
        if guest is None:
            continue
        for host in sharing:
            gap = one.behind_s - host.behind_s
            if gap <= quantum_s:
                break
            busy = touched.intersection((*one.seat, *host.seat))
            if host.kind == one.kind and crowds[host.seat] < crowds[one.seat] and not busy and _is_apart(one, host):
                found.append(Going(guest.number, host.number, one.number, gap))
                touched.update((*one.seat, *host.seat))
                break
    return found


def _is_apart(one: ServiceBalance, host: ServiceBalance) -> bool:
    own = dict(one.seat)
    return not any(own.get(name, 0) & mask for name, mask in host.seat)


# More GPUs than any cluster has.
_ANY_NUMBER: Final = 1 << 60
# In place of an owner whose jobs share a limit.
_ALL_TOGETHER: Final = Owner()


class QuotaUse:
    """Use of the limits of users, teams and partitions."""

    def __init__(self, limits: Limits, teams: TeamIndex = NO_TEAMS) -> None:
        self._limits = limits
        self._teams = teams
        self._charges = Charges()
        # GPUs of pending jobs by job number, with the owners of their limits: of all that share a limit together.
        self._requests: dict[Owner, dict[int, tuple[int, tuple[Owner, ...]]]] = {}
        # Numbers of pending jobs that would exceed a limit.
        self.kept_out: set[int] = set()

    def put(self, job: JobRecord, gang: Gang | None, waits: bool) -> list[int]:
        """Record a job as it is now. Return the numbers of the jobs that are kept out or let in by that; its own one if
        it is kept out."""
        number, owners = job.number, self._owners(job)
        # A team's limit concerns the jobs of all its users, and a partition's those of all teams.
        sharing = _ALL_TOGETHER if self._limits.are_across_teams else owners[-1]
        requests, before = self._requests.setdefault(sharing, {}), self._free(owners)
        self._charges.charge(number, owners, 0 if gang is None else job.gpus)
        self.kept_out.discard(number)
        if waits:
            requests[number] = job.gpus, owners
        else:
            requests.pop(number, None)
        look = requests if self._free(owners) != before else [number] if waits else []
        changed = [one for one in look if self._is_beyond(one, *requests[one]) != (one in self.kept_out)]
        self.kept_out.symmetric_difference_update(changed)
        return changed

    def left(self, job: JobRecord) -> int:
        """Return the GPUs that its limits leave to a job, including those that it has."""
        left = min(self._free(self._owners(job))) + self._charges.of(job.number)
        most = self._limits.of_job(job.partition.name)
        return left if most is None else min(left, most)

    @property
    def are_contested(self) -> bool:
        """Return whether under some limit each of several pending jobs could start, but not all of them."""
        for requests in self._requests.values():
            wanted: dict[Owner, int] = {}
            for number, (gpus, owners) in requests.items():
                for owner in owners if number not in self.kept_out else ():
                    wanted[owner] = wanted.get(owner, 0) + gpus
            if any(gpus > self._free_of(owner) for owner, gpus in wanted.items()):
                return True
        return False

    def beyond(self, line: Iterable[JobRecord]) -> frozenset[int]:
        """Return the numbers of the pending jobs in `line` that would exceed a limit once those before have started."""
        free: dict[Owner, int] = {}
        found = []
        for job in line:
            owners = self._owners(job)
            left = {owner: free.setdefault(owner, self._free_of(owner)) for owner in owners}
            # The devices where it is parked count already.
            more = job.gpus - self._charges.of(job.number)
            if more > min(left.values()):
                found.append(job.number)
            else:
                free.update({owner: gpus - more for owner, gpus in left.items()})
        return frozenset(found)

    def _owners(self, job: JobRecord) -> tuple[Owner, ...]:
        return self._limits.owners(job.user, self._teams.of(job.user), job.partition.name)

    def _is_beyond(self, number: int, gpus: int, owners: tuple[Owner, ...]) -> bool:
        return gpus > min(self._free(owners)) + self._charges.of(number)

    def _free(self, owners: tuple[Owner, ...]) -> tuple[int, ...]:
        return tuple([self._free_of(owner) for owner in owners])

    def _free_of(self, owner: Owner) -> int:
        limit = self._limits.of(owner)
        return _ANY_NUMBER if limit is None else limit - self._charges.held.get(owner, 0)


# -- teams and users below their share ---------------------------------------------------------------------------------

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
