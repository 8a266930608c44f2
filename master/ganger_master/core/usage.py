"""The use of GPUs by users and teams: what running gangs add to it, and what is reported of it.

The rows of users are durable. How much each job adds follows from its gang, so a restart computes it anew.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from ganger.cluster.topology import bits
from ganger.node_test import TEST_USER
from msgspec import Struct
from msgspec.structs import replace

from ganger_master.core.accounting import DAY_S, Owner, UserUsage, decayed_at, gpu_s_since, used_until, with_gpus
from ganger_master.core.gang_model import Gang
from ganger_master.core.job_model import JobRecord
from ganger_master.core.state import State
from ganger_master.core.tenancy import ALL_OTHER_USERS, NO_TEAM, TeamIndex

_MILLION: Final = 1_000_000


def running_microgpus(state: State, job: JobRecord) -> int:
    """Return the GPUs that a job uses now, in millionths: from the first step of its gang, those that it holds until
    they are free. A time-sliced gang uses the part of them that is its part of the time; a device of several co-located
    gangs counts in equal parts."""
    gang = state.gangs.get(job.epoch)
    if gang is None or job.user == TEST_USER or not _is_charged(job, gang):
        return 0
    gpus = sum([_gpus_on(state, gang, place) for place in range(len(gang.pieces))])
    return round(_MILLION * gpus * _slice_share(state, gang))


def _is_charged(job: JobRecord, gang: Gang) -> bool:
    # Also while it stops, for which a script may take a long grace, and while it is paused: no other job can have its
    # GPUs meanwhile.
    return bool(job.running_since) or gang.stepped


def _gpus_on(state: State, gang: Gang, place: int) -> float:
    piece = gang.pieces[place]
    claim = piece.held
    if claim is None or piece.lost:
        return 0.0
    if not claim.shared_mask:
        return float(claim.device_mask.bit_count())
    beside = [
        held.device_mask
        for epoch, at in state.gangs.places_on.get(claim.node, {}).items()
        if epoch != gang.epoch and _runs(state, state.gangs[epoch]) and (held := state.gangs[epoch].pieces[at].held)
    ]
    return sum([1.0 / (1 + sum([mask >> device & 1 for mask in beside])) for device in bits(claim.device_mask)])


def _runs(state: State, gang: Gang) -> bool:
    job = state.jobs.get(gang.job)
    return job is not None and job.epoch == gang.epoch and _is_charged(job, gang)


def _slice_share(state: State, gang: Gang) -> float:
    group = state.gangs.sets.get(gang.node_set)
    slices = () if group is None else group.active.rows
    own = sum([gang.epoch in epochs for epochs in slices])
    # Until the matrix with the gang is the active one, it has its devices alone.
    return own / len(slices) if own else 1.0


def follow(state: State, now: float) -> None:
    """Bring the use of users up to date with the jobs that may have started to run or given up devices."""
    changed: dict[str, None] = {}
    for number in _with_company(state, state.dirty.usage):
        job = state.jobs.get(number)
        user = state.usage.user_of(number) if job is None else job.user
        if state.usage.put_running(number, user, 0 if job is None else running_microgpus(state, job)):
            changed[user] = None
            if state.settings.teams:
                # The planner of a cluster with teams follows their use.
                state.dirty.news[number] = None
    state.dirty.usage.clear()
    for user in changed:
        if user not in state.usage:
            _forget_empty(state, now)
        _put(state, user, now)


def _put(state: State, user: str, now: float) -> None:
    usage = state.usage.get(user) or UserUsage(user, now)
    state.put_usage(with_gpus(usage, state.usage.gpus_of(user), now, state.settings.usage_half_life_s))


def _forget_empty(state: State, now: float) -> None:
    """Forget the users of whose use nothing is left."""
    for usage in list(state.usage.values()):
        if used_until(usage, now, state.settings.usage_half_life_s).is_empty:
            state.forget_usage(usage.user)


def _with_company(state: State, numbers: Iterable[int]) -> list[int]:
    """Return the jobs with those that share devices or time slices with them, in order."""
    found = set(numbers)
    for number in list(found):
        job = state.jobs.get(number)
        for gang in state.gangs.of_job(number) if job is not None else ():
            for piece in gang.pieces:
                found.update(state.gangs.sharing_on(piece.claim.node))
            group = state.gangs.sets.get(gang.node_set)
            for epoch in () if group is None else group.active.epochs:
                if epoch in state.gangs:
                    found.add(state.gangs[epoch].job)
    return sorted(found)


def restore(state: State, now: float) -> None:
    """Find out anew what each running job uses, after a restart. Rows change only where they did not follow the jobs,
    as in a database of a version without them."""
    for number, job in state.jobs.items():
        state.usage.put_running(number, job.user, running_microgpus(state, job))
    for user in sorted({*state.usage, *state.usage.users_running}):
        usage = state.usage.get(user)
        if usage is None or usage.gpus != state.usage.gpus_of(user):
            _put(state, user, now)


def set_clock(state: State, set_by: float) -> None:
    """Continue after the clock was set forward by so many seconds."""
    for usage in list(state.usage.values()):
        state.put_usage(replace(usage, time=usage.time + set_by))


def standing(state: State, user: str, now: float) -> str:
    """Return what gives the jobs of a user their place beside those of other teams, in words: the part of all use that
    its team has, the team's share, and the user's part of the team's use. Empty without teams."""
    if not state.teams:
        return ""
    name = state.teams.of(user)
    team = next((one for one in report(state, state.usage.values(), now, now) if one.team == name), None)
    whose = "users of no team" if name == NO_TEAM else f"team {name!r}"
    if team is None:
        return f"{whose} have used nothing of late"
    used = next((one.used for one in team.users if one.user == user), 0.0)
    own = f", of which {used / team.used:.0%} is user {user!r}'s" if team.used and len(team.users) > 1 else ""
    have = "have" if name == NO_TEAM else "has"
    return f"{whose} {have} {team.used:.0%} of the use of late{own}, and a share of {team.share:.0%}"


class UserReport(Struct, frozen=True, gc=False):
    """The use of one user. gpu_s: GPU-seconds since the first day of the report. used: part of the decayed use of all
    users. running: GPUs of running gangs. limit: most GPUs held at once; None: any number."""

    user: str
    gpu_s: float
    used: float
    running: float
    limit: int | None


class TeamReport(Struct, frozen=True, gc=False):
    """The use of one team; the name of those without a team is empty. share: its part of the
    weights of all teams. Else as `UserReport`."""

    team: str
    weight: float
    share: float
    used: float
    limit: int | None
    users: tuple[UserReport, ...]


class TeamStanding(Struct, frozen=True, gc=False):
    """The use and the share of one team; the name of those without a team is empty. used: its part of the decayed use
    of all users, to be compared with share, its part of the weights of all teams. running: GPUs of running gangs."""

    team: str
    used: float
    share: float
    running: float


def standings(
    teams: TeamIndex, usages: Iterable[UserUsage], half_life_s: float, now: float
) -> tuple[TeamStanding, ...]:
    """Return the use and the share of all teams, in the order of the settings, then of those without a team, if they
    have used anything. `usages`: the rows of users; `half_life_s`: as in the settings; `now`: Unix seconds."""
    used: dict[str, float] = dict.fromkeys(teams, 0.0)
    running: dict[str, float] = dict.fromkeys(teams, 0.0)
    for usage in usages:
        name = teams.of(usage.user)
        used[name] = used.get(name, 0.0) + decayed_at(usage, now, half_life_s)
        running[name] = running.get(name, 0.0) + usage.gpus
    whole, weights = sum(used.values()), sum([teams[name].weight for name in used])
    return tuple(
        [
            TeamStanding(name, amount / whole if whole else 0.0, teams[name].weight / weights, running[name])
            for name, amount in used.items()
        ]
    )


def report(state: State, usages: Iterable[UserUsage], since: float, now: float) -> tuple[TeamReport, ...]:
    """Return the use of all teams since the beginning of a day; teams first in the order of the settings.

    `usages`: the rows of users. `since`: Unix seconds in that day (UTC)."""
    half_life_s, teams, limits = state.settings.usage_half_life_s, state.teams, state.limits
    known = {usage.user: usage for usage in usages}
    whole = sum([decayed_at(usage, now, half_life_s) for usage in known.values()])
    standing_of = {one.team: one for one in standings(teams, known.values(), half_life_s, now)}
    named = [user for name in teams for user in teams[name].users if user != ALL_OTHER_USERS]
    by_team: dict[str, list[str]] = {name: [] for name in teams}
    for user in sorted({*known, *named}):
        by_team.setdefault(teams.of(user), []).append(user)
    day = int(since // DAY_S)

    def user_report(user: str) -> UserReport:
        usage = known.get(user) or UserUsage(user, now)
        gpu_s = gpu_s_since(used_until(usage, now, half_life_s), day)
        part = decayed_at(usage, now, half_life_s) / whole if whole else 0.0
        return UserReport(user, gpu_s, part, usage.gpus, limits.of(Owner(user)))

    found = []
    for name, users in by_team.items():
        reports = tuple([user_report(user) for user in users])
        limit, own = None if name == NO_TEAM else limits.of(Owner(team=name)), standing_of[name]
        found.append(TeamReport(name, teams[name].weight, own.share, own.used, limit, reports))
    return tuple(found)
