"""What commands share: options, the client of the chosen master, completion, and the jobs that a command is about:
numbers, lists and ranges, or a filter over the jobs that have not ended."""

from __future__ import annotations

import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.shell_completion import CompletionItem

from ganger.console import CommandError, ExitCode, print_json, report
from ganger.text import parse_duration

if TYPE_CHECKING:
    from ganger.client import Client
    from ganger.wire.errors import ApiError, Violation

Message = TypeVar("Message")
Named = TypeVar("Named")

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
yes_option = click.option("--yes", "-y", "is_sure", is_flag=True, help="Do not ask.")
# A longer range is more likely a typing error.
_LONGEST_RANGE = 10_000
_RANGE = re.compile(r"([0-9]{1,18})-([0-9]{1,18})")


def open_client() -> Client:
    """The client of the master chosen with --master. Close it, or use it in a with statement."""
    from ganger.client import Client

    return Client(click.get_current_context().find_root().obj)


def pairs(flag: str, texts: Sequence[str]) -> tuple[dict[str, str], list[Violation]]:
    """The pairs of NAME=VALUE, and what is wrong with them."""
    from ganger.wire.errors import Violation

    found: dict[str, str] = {}
    wrong = []
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            wrong.append(Violation(flag, f"{text!r}: write NAME=VALUE"))
        elif found.setdefault(name, value) != value:
            wrong.append(Violation(flag, f"{name} is given twice"))
    return found, wrong


class CompletedType(click.ParamType, ABC):  # type: ignore[type-arg]  # generic only in new clicks
    """A resource by its short name; `names` are offered for completion."""

    @abstractmethod
    def names(self, client: Client) -> Iterable[CompletionItem]:
        """Return the resources that there are."""

    def shell_complete(self, context: click.Context, parameter: click.Parameter, text: str) -> list[CompletionItem]:
        from ganger.client import Client

        begun = text.removeprefix(f"{self.name}s/")
        try:
            # Of the half-typed command line.
            with Client(context.find_root().params.get("master")) as client:
                return [item for item in self.names(client) if item.value.startswith(begun)]
        # A completion that fails must not write over what is being typed.
        except Exception:
            return []


class JobType(CompletedType):
    """ "7", "jobs/7", or "7_3", which the master is to find; completes from the queue."""

    name = "job"

    def convert(self, value: object, parameter: click.Parameter | None, context: click.Context | None) -> Any:
        from ganger.wire.resource_names import job_name_from_text, parse_member

        text = str(value)
        return text if parse_member(text) is not None else job_name_from_text(text)

    def names(self, client: Client) -> Iterable[CompletionItem]:
        return [CompletionItem(number(job.name), help=job.spec.display_name) for job in client.list_jobs(limit=200)]


class JobsType(JobType):
    """One word of a selection: "7", "1,2", "1-3", "7_3", "jobs/7" or "arrays/7"; converts to a tuple of names."""

    def convert(self, value: object, parameter: click.Parameter | None, context: click.Context | None) -> Any:
        from ganger.wire.resource_names import array_name_from_text

        if isinstance(value, tuple):
            return value
        convert = super().convert
        return tuple(
            array_name_from_text(part) if part.startswith("arrays/") else convert(part, parameter, context)
            for part in split(str(value))
        )


class NodeType(CompletedType):
    """ "n1" or "nodes/n1"; completes from the cluster."""

    name = "node"

    def convert(self, value: object, parameter: click.Parameter | None, context: click.Context | None) -> str:
        from ganger.wire.resource_names import node_name_from_text

        return node_name_from_text(str(value))

    def names(self, client: Client) -> Iterable[CompletionItem]:
        return [CompletionItem(number(node.name)) for node in client.list_nodes().nodes]


def array_of(name: str, error: ApiError) -> str:
    """The array of this number, where there is no such job because it is one; else the error stands."""
    array = error.metadata.get("array", "")
    if not array or array != f"arrays/{number(name)}":
        raise error
    return array


def confirm(question: str, is_confirmed: bool) -> None:
    """Ask on the terminal, unless `is_confirmed`. Raises click.Abort for a no, UsageError without a terminal."""
    if is_confirmed:
        return
    try:
        is_sure = click.confirm(question, err=True)
    except click.Abort:
        if sys.stdin.isatty():
            raise
        raise click.UsageError(f"{question} There is no terminal to answer on: give --yes") from None
    if not is_sure:
        raise click.Abort


def number(name: str) -> str:
    """Return the short form of a name, "7" for "jobs/7" and "n1" for "nodes/n1"."""
    return name.rpartition("/")[2]


def split(text: str) -> list[str]:
    """Return the parts of a list or range, "1,3-5" -> ["1", "3", "4", "5"]; other words stay as they are.

    Members of an array may be in brackets, as in Slurm: "8_[1-2]" -> ["8_1", "8_2"]. Raises click.BadParameter for a
    range that is backwards or longer than 10,000.
    """
    parts: list[str] = []
    for part in _in_brackets(text) if "[" in text else text.split(","):
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


def _in_brackets(text: str) -> Sequence[str]:
    from ganger.text import expand_names

    try:
        return expand_names(text)
    except ValueError:
        raise click.BadParameter(f"{text!r} is no list of jobs: write for example 8_[1-3,5]") from None


@dataclass(frozen=True, slots=True)
class Selection:
    """What the command line names.

    names: of jobs and arrays, in the order given. job_name (as given to --name), user: filters over the jobs that have
    not ended, "" for any; without names and filters all of them.
    """

    names: tuple[str, ...]
    job_name: str = ""
    user: str = ""

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

    def print_answers(self, answers: Sequence[Any]) -> None:
        """Print as JSON: one object for one job that was named, nothing if it was refused; else a list."""
        if len(self.names) != 1:
            print_json(list(answers))
        elif answers:
            print_json(answers[0])


def chooses_jobs(*, has_name: bool = True, has_all: bool = True) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command the argument JOBS and the filters --name, --user and --all, passed on as `selection`.

    has_name, has_all: whether --name and --all mean a filter in this command; some have those flags for other things.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def chosen(
            words: tuple[tuple[str, ...], ...], by_name: str = "", by_user: str = "", by_all: bool = False, **rest: Any
        ) -> Any:
            names = tuple(dict.fromkeys(name for word in words for name in word))
            given = (("--name", by_name), ("--user", by_user), ("--all", by_all))
            filters = " ".join(flag for flag, value in given if value)
            if names and filters:
                raise click.UsageError(f"give jobs or {filters}, not both")
            if not names and not filters:
                ways = ["--name TEXT"] * has_name + ["--user USER"] + ["--all"] * has_all
                raise click.UsageError(f"name the jobs: numbers (7, 1,2 or 3-5), or {' or '.join(ways)}")
            return function(selection=Selection(names, by_name, by_user), **rest)

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


def each_of(names: Iterable[Named], act: Callable[[Named], Message]) -> tuple[list[Message], ExitCode]:
    """Do `act` to each; report an error of one and continue with the next.

    Returns the answers, and the worst exit code. A master that cannot be reached ends it at once.
    """
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


def of_job_or_array(name: str, job: Callable[[str], Message], array: Callable[[str], Named]) -> Message | Named:
    """Return the answer of `job`, or of `array` for the name of an array: "arrays/7", or a number that no job has."""
    from ganger.wire.errors import JobNotFound

    if name.startswith("arrays/"):
        return array(name)
    try:
        return job(name)
    except JobNotFound as error:
        return array(array_of(name, error))


def members_of(client: Client, array: str) -> list[Any]:
    """Return the members of an array by number."""
    return sorted(client.list_jobs(array=array), key=lambda member: int(number(member.name)))


def _own_jobs_of(client: Client) -> str:
    """Return the user of the certificate or the access token, whose jobs --all selects; "" (all users) for operators
    and on one machine."""
    from ganger.wire.tls import identity_in_pem, read_files

    if not client.endpoint.tls:
        return ""
    if client.endpoint.token:
        return client.endpoint.token.rsplit(".", 2)[0]
    identity = identity_in_pem(read_files(Path(client.endpoint.tls)).certificate)
    return identity.name if identity.has_own_jobs_only else ""


def timeout_s(text: str) -> float:
    """Parse a --timeout. Raises click.UsageError."""
    try:
        return parse_duration(text)
    except ValueError as error:
        raise click.UsageError(f"--timeout: {error}") from error
