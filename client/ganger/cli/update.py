"""`ganger update`: changes what was asked for of jobs and arrays that are there already."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from ganger.cli.failures import CommandError, ExitCode
from ganger.cli.job_selection import Selection, chooses_jobs, each_of
from ganger.cli.options import array_of, json_option, number, open_client

if TYPE_CHECKING:
    from ganger.client import Client
    from ganger.v1.job_pb2 import Job
    from ganger.v1.job_service_pb2 import JobUpdate, UpdateArrayResponse

# Of members that are as before so many are named.
_NAMED = 3


# Values are texts here, as in `submit`.
@click.command()
# --name is what the jobs are to be called.
@chooses_jobs(has_name=False)
@click.option("--priority", metavar="N", help="-1000 to 1000; higher goes first.")
@click.option("--time", "-t", metavar="TIME|never", help="Stop it after running so long in all, e.g. 2h30m.")
@click.option("--name", "-n", metavar="TEXT", help="A label; need not be unique.")
@click.option("--gpu-type", metavar="TYPE", help="Take only this device type; '' for any.")
@click.option("--locality", metavar="LEVEL", help="How close together its GPUs should be, as in `submit`.")
@click.option("--tolerance", metavar="LEVEL", help="How far apart they may be. These three are given anew together.")
@click.option("--patience", metavar="TIME", help="How long to wait for --locality before taking --tolerance [10m].")
@click.option("--memory", metavar="SIZE", help="Host memory of each task; 0 for a share.")
@click.option("--cpus-per-gpu", metavar="N|auto", help="Cores beside each GPU.")
@click.option("--request-id", metavar="ID", help="Repeat it to update at most once.")
@click.option("--yes", "-y", is_flag=True, help="Do not ask, also where it ends a job at once.")
@json_option
def update(selection: Selection, request_id: str | None, yes: bool, as_json: bool, **flags: str | None) -> int:
    """Change what was asked for: `ganger update 7 --priority 5 --time 4h`.

    Priority, time and name of any job that has not ended, the rest of one that has never started; of an array, of every
    member that has not ended. All of it or nothing. A job that has run for longer than its new time is ended, after
    you have confirmed it.
    """
    from ganger.cli.failures import report
    from ganger.console.json_output import print_json
    from ganger.updates import make_update

    given = {key: value for key, value in flags.items() if value is not None}
    if not given:
        raise click.UsageError("say what to change, for example --priority 5")
    wanted = make_update(given, {key: f"--{key.replace('_', '-')}" for key in given})
    with open_client() as client:

        def change(name: str) -> Job | UpdateArrayResponse:
            message = _confirmed(client, name, wanted, request_id, yes)
            if not as_json:
                _tell(message, given)
            return message

        updated, worst = each_of(selection.named(client), change)
    for message in updated:
        if refused := _refused(message):
            worst = max(worst, ExitCode(report(CommandError(refused))))
    if as_json:
        print_json(updated)
    return worst


def _confirmed(
    client: Client, name: str, wanted: JobUpdate, request_id: str | None, yes: bool
) -> Job | UpdateArrayResponse:
    """Update it; where that ends a job at once, ask first. Without a terminal the refusal is reported as it is."""
    from ganger.wire.errors import UpdateEndsJob

    try:
        return _update(client, name, wanted, request_id, yes)
    except UpdateEndsJob as error:
        if not sys.stdin.isatty():
            raise
        effect = error.message.partition(";")[0]
        if not click.confirm(f"{effect}. End it?", err=True):
            raise CommandError(f"{name} is as it was") from None
        return _update(client, name, wanted, request_id, True)


def _update(
    client: Client, name: str, wanted: JobUpdate, request_id: str | None, may_end: bool
) -> Job | UpdateArrayResponse:
    from ganger.wire.errors import JobNotFound

    if name.startswith("arrays/"):
        return client.update_array(name, wanted, request_id=request_id, may_end=may_end)
    try:
        return client.update_job(name, wanted, request_id=request_id, may_end=may_end)
    except JobNotFound as error:
        return client.update_array(array_of(name, error), wanted, request_id=request_id, may_end=may_end)


def _tell(message: Job | UpdateArrayResponse, given: dict[str, str]) -> None:
    from ganger.cli.job_lines import sentence
    from ganger.console.safe_text import print_line
    from ganger.v1.job_pb2 import Job

    what = "".join(f", {key.replace('_', ' ')} {value}" for key, value in given.items())
    if isinstance(message, Job):
        place = f", place {message.queue_rank} in the queue" if message.queue_rank else ""
        print_line(f"{sentence(message)}{place}{what}")
        return
    print_line(f"array {number(message.array.name)}: {_jobs(message.updated)} updated{what}")


def _refused(message: Job | UpdateArrayResponse) -> str:
    """Which members are as before, and why; empty if none is."""
    from ganger.v1.job_pb2 import Job

    if isinstance(message, Job) or not message.refused:
        return ""
    lines = [f"  {one.reason}: {one.message}" for one in message.refused[:_NAMED]]
    if len(message.refused) > _NAMED:
        lines.append(f"  and {len(message.refused) - _NAMED} more")
    told = f"{_jobs(len(message.refused))} of array {number(message.array.name)} refused"
    return "\n".join([f"{told}:", *lines])


def _jobs(count: int) -> str:
    return f"{count} job" if count == 1 else f"{count} jobs"
