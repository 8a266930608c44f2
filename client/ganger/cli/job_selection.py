"""The jobs that a command is about: numbers, lists and ranges, or a filter over the jobs that have not ended."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ganger.cli.failures import CommandError, ExitCode
from ganger.cli.options import JobOrArrayType, array_of, number

if TYPE_CHECKING:
    from ganger.client import Client

Message = TypeVar("Message")
Named = TypeVar("Named")

# A longer range is more likely a typing error.
_LONGEST_RANGE = 10_000
_RANGE = re.compile(r"([0-9]{1,18})-([0-9]{1,18})")


class JobsType(JobOrArrayType):
    """One word of a selection: "7", "1,2", "1-3", "7_3", "jobs/7" or "arrays/7"; converts to a tuple of names."""

    def convert(self, value: object, parameter: click.Parameter | None, context: click.Context | None) -> Any:
        if isinstance(value, tuple):
            return value
        convert = super().convert
        return tuple(convert(part, parameter, context) for part in split(str(value)))


def split(text: str) -> list[str]:
    """Return the parts of a list or range, "1,3-5" -> ["1", "3", "4", "5"]; other words stay as they are.

    Raises click.BadParameter for a range that is backwards or longer than 10,000.
    """
    parts: list[str] = []
    for part in text.split(","):
        matched = _RANGE.fullmatch(part)
        if matched is None:
            parts.append(part)
            continue
        first, last = int(matched[1]), int(matched[2])
        if not 1 <= first <= last < first + _LONGEST_RANGE:
            raise click.BadParameter(
                f"{part!r} is no range of at most {_LONGEST_RANGE} jobs: write FIRST-LAST, for example 3-7"
            )
        parts += map(str, range(first, last + 1))
    return parts


@dataclass(frozen=True, slots=True)
class Selection:
    """What the command line names.

    names: of jobs and arrays, in the order given. job_name (as given to --name), user: filters over the jobs that have
    not ended, "" for any. everything: all of them. is_single: one job was named, so that the answer is one object and
    not a list.
    """

    names: tuple[str, ...]
    job_name: str = ""
    user: str = ""
    everything: bool = False
    is_single: bool = False

    def named(self, client: Client, *, ended: bool = False) -> list[str]:
        """Return the names of jobs and arrays; those of a filter are jobs only.

        ended: whether a filter by name finds jobs that have ended, too. Raises CommandError if a filter finds none.
        """
        if self.names:
            return list(self.names)
        from ganger.v1.job_pb2 import Job

        states = [] if ended and self.job_name else [Job.STATE_PENDING, Job.STATE_HOLDING, Job.STATE_SUSPENDED]
        user = self.user or _own_jobs_of(client)
        found = [job.name for job in client.list_jobs(states, user, name=self.job_name)]
        if not found:
            wanted = [f"the name {self.job_name!r}"] if self.job_name else []
            wanted += [f"the user {user!r}"] if user else []
            which = f" with {' and '.join(wanted)}" if wanted else ""
            kind = "" if not states else " that has not ended"
            raise CommandError(f"there is no job{which}{kind}: see `ganger queue --all`", ExitCode.NOT_FOUND)
        return sorted(found, key=lambda name: int(number(name)))


def chooses_jobs(*, has_name: bool = True, has_all: bool = True) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command the argument JOBS and the filters --name, --user and --all, passed on as `selection`.

    has_name, has_all: whether --name and --all mean a filter in this command; some have those flags for other things.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        from functools import wraps

        @wraps(function)
        def chosen(
            words: tuple[tuple[str, ...], ...], by_name: str = "", by_user: str = "", by_all: bool = False, **rest: Any
        ) -> Any:
            return function(selection=_selection(words, by_name, by_user, by_all, has_name, has_all), **rest)

        filtered = filter_options(chosen, has_name=has_name, has_all=has_all)
        return click.argument("words", metavar="[JOBS]...", type=JobsType(), nargs=-1)(filtered)

    return decorate


def filter_options(function: Callable[..., Any], *, has_name: bool = True, has_all: bool = True) -> Callable[..., Any]:
    """Give a command the filters --name, --user and --all as `by_name`, `by_user` and `by_all`."""
    function = click.option("--user", "by_user", default="", metavar="USER", help="All jobs of this user.")(function)
    if has_name:
        text = "All jobs submitted with this --name."
        function = click.option("--name", "by_name", default="", metavar="TEXT", help=text)(function)
    if has_all:
        text = "All of your jobs that have not ended; as an operator, of all users."
        function = click.option("--all", "-a", "by_all", is_flag=True, help=text)(function)
    return function


def _selection(
    words: tuple[tuple[str, ...], ...], by_name: str, by_user: str, by_all: bool, has_name: bool, has_all: bool
) -> Selection:
    """Check what the command line has. Raises click.UsageError unless it names either jobs or a filter."""
    names = tuple(dict.fromkeys(name for word in words for name in word))
    given = (("--name", by_name), ("--user", by_user), ("--all", by_all))
    filters = " ".join(flag for flag, value in given if value)
    if names and filters:
        raise click.UsageError(f"give jobs or {filters}, not both")
    if not names and not filters:
        ways = ["--name TEXT"] * has_name + ["--user USER"] + ["--all"] * has_all
        raise click.UsageError(f"name the jobs: numbers (7, 1,2 or 3-5), or {' or '.join(ways)}")
    return Selection(names, by_name, by_user, by_all, is_single=len(names) == 1)


def each_of(names: Iterable[Named], act: Callable[[Named], Message]) -> tuple[list[Message], ExitCode]:
    """Do `act` to each; report an error of one and go on with the next.

    Returns the answers, and the worst exit code. A master that cannot be reached ends it at once.
    """
    from ganger.cli.failures import report
    from ganger.wire.errors import ApiError

    worst, answers = ExitCode.OK, []
    for name in names:
        try:
            answers.append(act(name))
        except (ApiError, CommandError) as error:
            worst = max(worst, ExitCode(report(error)))
            if worst >= ExitCode.UNREACHABLE:
                break
    return answers, worst


def members(client: Client, name: str) -> list[str]:
    """Return the jobs that a name stands for: the job itself, or the members of an array."""
    from ganger.wire.errors import JobNotFound

    array = name
    if not name.startswith("arrays/"):
        try:
            return [client.get_job(name).name]
        except JobNotFound as error:
            array = array_of(name, error)
    return sorted((member.name for member in client.list_jobs(array=array)), key=lambda name: int(number(name)))


def print_answers(answers: Sequence[Any], selection: Selection) -> None:
    """Print as JSON: one object for one job that was named, nothing if it was refused; else a list."""
    from ganger.console import print_json

    if not selection.is_single:
        print_json(list(answers))
    elif answers:
        print_json(answers[0])


def _own_jobs_of(client: Client) -> str:
    """Return the user of the certificate, whose jobs --all selects; "" (all users) for operators and on one machine."""
    from pathlib import Path

    from ganger.wire.tls import identity_in_pem, read_files

    if not client.endpoint.tls:
        return ""
    identity = identity_in_pem(read_files(Path(client.endpoint.tls)).certificate)
    return identity.name if identity.has_own_jobs_only else ""
