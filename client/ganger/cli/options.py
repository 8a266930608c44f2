"""What commands share: the --json option, the client of the chosen master, completion of jobs and nodes."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click
from click.shell_completion import CompletionItem

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ganger.client import Client
    from ganger.wire.errors import ApiError, Violation

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


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


class JobType(click.ParamType):  # type: ignore[type-arg]  # generic only in new clicks
    """ "7", "jobs/7", or "7_3", which the master is to find; completes from the queue."""

    name = "job"

    def convert(self, value: object, parameter: click.Parameter | None, context: click.Context | None) -> str:
        from ganger.wire.resource_names import job_name_from_text, parse_member

        text = str(value)
        return text if parse_member(text) is not None else job_name_from_text(text)

    def shell_complete(self, context: click.Context, parameter: click.Parameter, text: str) -> list[CompletionItem]:
        try:
            with completing_client(context) as client:
                return [
                    CompletionItem(number, help=job.spec.display_name)
                    for job in client.list_jobs(limit=200)
                    if (number := job.name.removeprefix("jobs/")).startswith(text.removeprefix("jobs/"))
                ]
        # A completion that fails must not write over what is being typed.
        except Exception:
            return []


class JobOrArrayType(JobType):
    """The same, or "arrays/7": a number may be that of an array too."""

    def convert(self, value: object, parameter: click.Parameter | None, context: click.Context | None) -> str:
        from ganger.wire.resource_names import array_name, parse_array_name

        text = str(value)
        if text.startswith("arrays/"):
            return array_name(parse_array_name(text))
        return super().convert(value, parameter, context)


def array_of(name: str, error: ApiError) -> str:
    """The array of this number, where there is no such job because it is one; else the error stands."""
    array = error.metadata.get("array", "")
    if not array or array != f"arrays/{number(name)}":
        raise error
    return array


class NodeType(click.ParamType):  # type: ignore[type-arg]  # as above
    """ "n1" or "nodes/n1"; completes from the cluster."""

    name = "node"

    def convert(self, value: object, parameter: click.Parameter | None, context: click.Context | None) -> str:
        from ganger.wire.resource_names import node_name_from_text

        return node_name_from_text(str(value))

    def shell_complete(self, context: click.Context, parameter: click.Parameter, text: str) -> list[CompletionItem]:
        try:
            with completing_client(context) as client:
                nodes = [node.name.removeprefix("nodes/") for node in client.list_nodes().nodes]
                return [CompletionItem(node) for node in nodes if node.startswith(text)]
        # As above.
        except Exception:
            return []


def completing_client(context: click.Context) -> Client:
    """Return a client of the master that the half-typed command line names."""
    from ganger.client import Client

    return Client(context.find_root().params.get("master"))


def confirm(question: str, is_confirmed: bool) -> None:
    """Ask on the terminal, unless `is_confirmed` (--yes). Raises click.Abort for a no, click.UsageError where there is
    no terminal."""
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
