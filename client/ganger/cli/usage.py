"""`ganger usage`: GPU-hours by team and user, and their shares; `ganger report`: how jobs fared, by user."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from ganger.cli.options import json_option, open_client
from ganger.console import CommandError, ExitCode, print_json, print_line, print_table
from ganger.text import counted, format_duration, parse_duration, visible

if TYPE_CHECKING:
    from google.protobuf.timestamp_pb2 import Timestamp

    from ganger.client import Client
    from ganger.history import HistoryEvent
    from ganger.usage_report import ReportedJob, UserFigures
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


def _since(text: str, flag: str = "--since") -> float:
    """Return a time in Unix seconds from a date ("2026-11-01", UTC) or a duration before now. Raises UsageError."""
    try:
        begin = datetime.strptime(text, "%Y-%m-%d").replace(tzinfo=UTC).timestamp()
    except ValueError:
        pass
    else:
        if begin > time.time():
            raise click.UsageError(f"{flag}: {text} has not come yet (days are of UTC)")
        return begin
    try:
        return time.time() - parse_duration(text)
    except ValueError as error:
        raise click.UsageError(f"{flag}: {text!r} is no date (2026-11-01) and no duration (7d)") from error


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


# -- report

_REPORT_HEADINGS = (
    *("USER", "ENDED", "LIVE", "GPU-HOURS", "HELD", "IDLE"),
    *("WAIT MEAN", "P50", "P95", "JCT MEAN", "P50", "P95", "DEADLINES", "PREEMPTED"),
)


@click.command()
@click.option("--user", default="", metavar="USER", help="Only this user.")
@click.option("--since", default="7d", metavar="TIME", show_default=True, help="A date (UTC) or a duration before now.")
@click.option("--until", default="", metavar="TIME", help="The same; default: now.")
@json_option
def report(user: str, since: str, until: str, as_json: bool) -> None:
    """Show how jobs fared: by user, of the jobs that ended or lived in a time.

    GPU-HOURS: of running jobs; HELD: of their gangs; IDLE: held by jobs that started, moved or were paused. WAIT and
    JCT (from submission to success) are of jobs that ended in the time. DEADLINES: met, missed, at risk by the
    planner's forecast, or open.
    """
    from ganger.usage_report import report_of

    now = time.time()
    begin, end = _since(since), _since(until, "--until") if until else now
    if begin >= end:
        raise click.UsageError(f"--until {until} is not after --since {since}")
    with open_client() as client:
        found = report_of(_reported_jobs(client, user, begin, end, now), begin, end)
    if as_json:
        period = {"since": _instant(begin), "until": _instant(end)}
        print_json({**period, "users": [_report_figures(one) for one in found]})
        return
    print_table(_REPORT_HEADINGS, list(map(_report_row, found)), "no job ended or lived in that time", ("DEADLINES",))
    if missing := found[0].without_history if found else 0:
        text = "counts with its run time only" if missing == 1 else "count with their run time only"
        print_line(f"{counted(missing, 'job')} without a history here {text}")


def _instant(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).isoformat(timespec="seconds")


def _reported_jobs(client: Client, user: str, begin: float, end: float, now: float) -> list[ReportedJob]:
    """Return the jobs of [begin, end), each with its states, from one reading of all events."""
    from ganger.cli.job_table import gpus, plain_event
    from ganger.history import spans_of
    from ganger.job import state_of
    from ganger.usage_report import ReportedJob
    from ganger.wire import times

    def instant(of: Timestamp, is_set: bool) -> float:
        return times.unix_s(of) if is_set else 0.0

    jobs = {
        job.name: job
        for job in client.list_jobs(user=user)
        if times.unix_s(job.create_time) < end and (instant(job.end_time, job.HasField("end_time")) or end) >= begin
    }
    events: dict[str, list[HistoryEvent]] = {name: [] for name in jobs}
    for event in client.list_events() if jobs else ():
        if event.subject in events:
            events[event.subject].append(plain_event(event))
    found = []
    for name, job in jobs.items():
        run_s = times.seconds(job.run_duration)
        if job.HasField("running_since_time") and job.HasField("start_time"):
            run_s += max(0.0, now - times.unix_s(job.running_since_time))
        deadline = instant(job.spec.deadline, job.spec.HasField("deadline"))
        is_open = deadline > now and not job.HasField("end_time")
        found.append(
            ReportedJob(
                user=job.user,
                state=state_of(job),
                create_time=times.unix_s(job.create_time),
                start_time=instant(job.start_time, job.HasField("start_time")),
                end_time=instant(job.end_time, job.HasField("end_time")),
                gpus=gpus(job.spec),
                run_s=run_s,
                preemptions=job.preemptions,
                deadline=deadline,
                advice=client.explain_job(name).deadline_advice if is_open else "",
                spans=spans_of(events[name], now),
            )
        )
    return found


def _report_row(one: UserFigures) -> tuple[str, ...]:
    from ganger.usage_report import spread

    times_of = [
        "" if value != value else format_duration(value)
        for of in (spread(one.waiting_s), spread(one.jct_s))
        for value in (of.mean, of.p50, of.p95)
    ]
    deadlines = ", ".join(f"{one.deadlines[key]} {key.replace('_', ' ')}" for key in _DEADLINES if one.deadlines[key])
    return (
        visible(one.user) or "all",
        ", ".join(f"{count} {state}" for state, count in sorted(one.states.items())) or "0",
        str(one.live),
        *(_hours(amount) for amount in (one.stepped_gpu_s, one.held_gpu_s, one.idle_gpu_s)),
        *times_of,
        deadlines,
        str(one.preemptions),
    )


_DEADLINES = ("met", "missed", "at_risk", "open")


def _report_figures(one: UserFigures) -> dict[str, Any]:
    from ganger.usage_report import spread

    def figures(values: list[float]) -> dict[str, float | int | None]:
        of = spread(values)
        rounded = {name: round(getattr(of, name), 3) if of.count else None for name in ("mean", "p50", "p95")}
        return {**rounded, "count": of.count}

    return {
        "user": one.user or None,
        "ended": dict(one.states),
        "live": one.live,
        "gpu_hours": {
            "stepped": round(one.stepped_gpu_s / 3600, 4),
            "held": round(one.held_gpu_s / 3600, 4),
            "idle": round(one.idle_gpu_s / 3600, 4),
        },
        "waiting_s": figures(one.waiting_s),
        "jct_s": figures(one.jct_s),
        "deadlines": {key: one.deadlines[key] for key in _DEADLINES},
        "preemptions": one.preemptions,
        "jobs_without_history": one.without_history,
    }
