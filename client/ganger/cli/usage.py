"""`ganger usage`: GPU-hours by team and user, their parts of all use, and their shares."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click

from ganger.cli.options import json_option, open_client
from ganger.console import CommandError, ExitCode, print_json, print_table
from ganger.text import format_duration, parse_duration, visible

if TYPE_CHECKING:
    from ganger.v1.usage_pb2 import TeamUsage, Usage, UserUsage

_HEADINGS = ("TEAM", "USER", "GPU-HOURS", "USED", "SHARE", "WEIGHT", "RUNNING", "LIMIT")
_SPARE = ("WEIGHT", "LIMIT", "RUNNING")
# In place of the name of the team of users without one.
_NO_TEAM = "-"


@click.command()
@click.option("--team", default=None, metavar="TEAM", help="Only this team; - for users of no team.")
@click.option("--user", default=None, metavar="USER", help="Only this user.")
@click.option("--since", default="30d", metavar="TIME", help="A date or a duration; whole days (UTC); default: 30d.")
@json_option
def usage(team: str | None, user: str | None, since: str, as_json: bool) -> None:
    """Show what users and teams have used, and their shares.

    A job counts from its first step until its GPUs are free: not while it waits, starts, or is suspended without them.
    """
    begin = _since(since)
    with open_client() as client:
        found = client.get_usage(begin)
    _choose_teams(found, team, user)
    if as_json:
        print_json(found)
        return
    rows = [row for one in found.teams for row in _team_rows(one)]
    print_table(_HEADINGS, rows, "no user has used a GPU", _SPARE)
    if rows:
        day = found.since_time.ToDatetime().date().isoformat()
        half_life = format_duration(found.half_life.seconds)
        print(f"GPU-hours since {day}; USED is the part of all use, halved in weight every {half_life}")


def _since(text: str) -> float:
    """Return a time in Unix seconds from a date ("2026-11-01", UTC) or a duration before now. Raises UsageError."""
    try:
        begin = datetime.strptime(text, "%Y-%m-%d").replace(tzinfo=UTC).timestamp()
    except ValueError:
        pass
    else:
        if begin > time.time():
            raise click.UsageError(f"--since: {text} has not come yet (days are of UTC)")
        return begin
    try:
        return time.time() - parse_duration(text)
    except ValueError as error:
        raise click.UsageError(f"--since: {text!r} is no date (2026-11-01) and no duration (7d)") from error


def _choose_teams(found: Usage, team: str | None, user: str | None) -> None:
    """Leave the teams and users that the options name. Raises CommandError if there are none."""
    names = [one.team or _NO_TEAM for one in found.teams]
    if team is not None and team not in names:
        is_one_named = any(one.team for one in found.teams)
        there = f"there are {', '.join(names)}" if is_one_named else "the cluster has no teams"
        raise CommandError(f"there is no team {team!r}: {there}", ExitCode.NOT_FOUND)
    for at in reversed(range(len(names))):
        one = found.teams[at]
        for place in reversed(range(len(one.users))):
            if user is not None and one.users[place].user != user:
                del one.users[place]
        if (team is not None and names[at] != team) or (user is not None and not one.users):
            del found.teams[at]
    if user is not None and not found.teams:
        raise CommandError(f"there is no use of user {user!r}: see `ganger usage`", ExitCode.NOT_FOUND)


def _team_rows(team: TeamUsage) -> list[tuple[str, ...]]:
    name = visible(team.team) or _NO_TEAM
    gpu_seconds = sum(user.gpu_seconds for user in team.users)
    running = sum(user.running_gpus for user in team.users)
    share, weight = f"{team.share:.0%}", f"{team.weight:g}"
    whole = (name, "", _hours(gpu_seconds), f"{team.used_share:.0%}", share, weight, f"{running:g}", _limit(team))
    return [whole, *[_user_row(name, user) for user in team.users]]


def _user_row(team: str, user: UserUsage) -> tuple[str, ...]:
    used = f"{user.used_share:.0%}"
    return (team, visible(user.user), _hours(user.gpu_seconds), used, "", "", f"{user.running_gpus:g}", _limit(user))


def _hours(gpu_seconds: float) -> str:
    return f"{gpu_seconds / 3600:.2f}"


def _limit(one: TeamUsage | UserUsage) -> str:
    return str(one.gpus_limit) if one.HasField("gpus_limit") else ""
