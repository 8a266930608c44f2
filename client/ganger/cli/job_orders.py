"""Commands that change a running or waiting job: suspend, resume, move, resize, retune, repin, cancel, wait."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, cast

import click

from ganger.cli.options import (
    JobType,
    NodeType,
    Selection,
    chooses_jobs,
    each_of,
    json_option,
    members_of,
    number,
    of_job_or_array,
    open_client,
    timeout_s,
)
from ganger.console import CommandError, ExitCode, print_json, print_line
from ganger.text import counted

if TYPE_CHECKING:
    from ganger.client import Client
    from ganger.v1.array_pb2 import Array
    from ganger.v1.job_pb2 import Job

wait_option = click.option("--wait/--no-wait", "is_waiting", default=True, help="Wait until it is done [wait].")


def _checked(context: click.Context, parameter: click.Parameter, text: str | None) -> str | None:
    """The text as it was given, which is a duration: what cannot be read must not be found out after the order."""
    if text is not None:
        timeout_s(text)
    return text


timeout_option = click.option(
    "--timeout",
    metavar="TIME",
    default="2m",
    show_default=True,
    callback=_checked,
    help="How long to wait; the order stands after it.",
)


@click.command()
@chooses_jobs()
@click.option(
    "--level",
    type=click.Choice(("pause", "offload", "checkpoint"), case_sensitive=False),
    help="What to keep: pause keeps device memory, offload host memory, checkpoint storage only."
    " Default: offload, else checkpoint, else pause.",
)
@wait_option
@timeout_option
@json_option
def suspend(selection: Selection, level: str | None, is_waiting: bool, timeout: str, as_json: bool) -> int:
    """Stop jobs between two mini-batches, keeping their state."""
    from ganger.cli import order_wait

    with open_client() as client:

        def order(job: str) -> Job:
            suspend_now = partial(client.suspend_job, job, level)
            if is_waiting:
                # Until the job has reported its capabilities, the master refuses to suspend it.
                _, found = order_wait.ordered(
                    client, job, timeout, lambda now: order_wait.can_rest(now, level), suspend_now
                )
            else:
                found = suspend_now()
            if note := order_wait.hang_note(found):
                print_line(f"ganger: {note}", sys.stderr)
            return found

        def finish(begun: Job) -> Job:
            message = order_wait.until(client, begun, order_wait.is_at_rest, timeout, "at rest")
            order_wait.check_suspended(message, level)
            return message

        return _command_each(client, selection, order, finish if is_waiting else None, as_json, order_wait.kept_devices)


@click.command()
@chooses_jobs()
@wait_option
@timeout_option
@json_option
def resume(selection: Selection, is_waiting: bool, timeout: str, as_json: bool) -> int:
    """Let suspended jobs continue. Does not wait for devices if there are none free: see `ganger why`."""
    from ganger.cli import order_wait

    with open_client() as client:

        def order(job: str) -> Job:
            if not is_waiting:
                return client.resume_job(job)
            return order_wait.ordered_once_stopped(client, job, timeout, partial(client.resume_job, job))

        def finish(begun: Job) -> Job:
            return order_wait.until(client, begun, order_wait.goes_on, timeout, "running")

        return _command_each(client, selection, order, finish if is_waiting else None, as_json, order_wait.waiting_note)


@click.command()
@chooses_jobs()
@click.option("--to", "nodes", multiple=True, type=NodeType(), help="Where to; repeat for several nodes.")
@wait_option
@timeout_option
@json_option
def move(selection: Selection, nodes: tuple[str, ...], is_waiting: bool, timeout: str, as_json: bool) -> int:
    """Move running jobs to other nodes without losing a step."""
    from ganger.cli import order_wait

    with open_client() as client:
        for node in nodes:
            # One that does not exist is refused before the job has reported what it can.
            client.get_node(node)
        befores: dict[str, Job] = {}

        def order(job: str) -> Job:
            move_now = partial(client.move_job, job, nodes)
            if not is_waiting:
                return move_now()
            before, message = order_wait.ordered(client, job, timeout, order_wait.can_move, move_now)
            befores[message.name] = before
            return message

        def finish(begun: Job) -> Job:
            goal = "running at its new place"
            message = order_wait.until(client, begun, order_wait.runs_or_holds_nothing, timeout, goal)
            order_wait.check_went_on(client, befores[message.name], message, "where it was: the move")
            return message

        return _command_each(client, selection, order, finish if is_waiting else None, as_json)


def _command_each(
    client: Client,
    selection: Selection,
    order: Callable[[str], Job],
    finish: Callable[[Job], Job] | None,
    as_json: bool,
    note: Callable[[Job], str] = lambda job: "",
) -> int:
    """Give the order to every job, then wait for each with `finish` (None: do not wait); return the exit code.

    note: the end of the line that is printed of a job."""
    from ganger.cli.order_wait import print_job

    begun, worst = each_of(selection.named(client), order)

    def done(job: str) -> Job:
        message = by_name[job] if finish is None else finish(by_name[job])
        if not as_json:
            print_job(message, False, note(message))
        return message

    by_name = {message.name: message for message in begun}
    messages, late = each_of(by_name, done)
    if as_json:
        selection.print_answers(messages)
    return max(worst, late)


@click.command()
@click.argument("job", type=JobType())
@click.argument("sizes", nargs=-1, required=True, metavar="GPUS | ROLE=TASKS...")
@wait_option
@timeout_option
@json_option
def resize(job: str, sizes: tuple[str, ...], is_waiting: bool, timeout: str, as_json: bool) -> None:
    """Let an elastic job continue with another number of GPUs, or of tasks of its roles, without losing a step or a
    sample.

    One that holds no GPUs (it waits for its start, or is suspended on storage) starts with that number."""
    from ganger.cli.order_wait import (
        can_move,
        check_resized,
        check_went_on,
        is_resized,
        ordered,
        print_job,
        runs_or_holds_nothing,
        until,
    )

    gpus, tasks = _sizes(sizes)
    goal = " ".join(sizes) if tasks else counted(gpus, "GPU")
    with open_client() as client:
        resize_now = partial(client.resize_job, job, gpus, tasks)
        if not is_waiting:
            message = resize_now()
        else:
            before, message = ordered(client, job, timeout, can_move, resize_now)
            if before.gang.claims:
                is_done = partial(is_resized, tasks) if tasks else runs_or_holds_nothing
                message = until(client, message, is_done, timeout, f"running with {goal}")
                if tasks:
                    check_resized(message, tasks)
                else:
                    check_went_on(client, before, message, "with as many GPUs as before: the change")
    print_job(message, as_json)
    if not as_json and not message.gang.claims and message.state in (message.STATE_PENDING, message.STATE_SUSPENDED):
        print(f"  it starts with {goal}", flush=True)


def _sizes(words: tuple[str, ...]) -> tuple[int, dict[str, int]]:
    """Return the number of GPUs, or 0 and numbers of tasks by role. Raises click.UsageError."""
    from ganger.role_spec import MOST_TASKS
    from ganger.spec_values import whole_number

    try:
        if len(words) == 1 and "=" not in words[0]:
            return whole_number(1, 65_536)(words[0]), {}
        pairs = [word.partition("=") for word in words]
        tasks = {name: whole_number(1, MOST_TASKS)(text) for name, equals, text in pairs if name and equals}
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    if len(tasks) < len(words):
        raise click.UsageError("give a number of GPUs, or ROLE=TASKS once for each role: worker=4 ps=2")
    return 0, tasks


@click.command()
@click.argument("job", type=JobType())
@click.option(
    "--cores", required=True, metavar="N|auto", help="Cores of each task, e.g. 4 or 0.5; auto measures again."
)
@json_option
def retune(job: str, cores: str, as_json: bool) -> None:
    """Give a running job other numbers of cores, live. Its thread counts follow.

    The job keeps them, as if it had been submitted with them, until `--cores auto` leaves them to the scheduler."""
    from ganger.spec_values import parse_cores_or_auto

    try:
        millicores = parse_cores_or_auto(cores)
    except ValueError as error:
        raise click.UsageError(f"--cores: {error}") from error
    _change_cores(job, lambda client: client.retune_job(job, millicores / 1_000), as_json)


@click.command()
@click.argument("job", type=JobType())
@json_option
def repin(job: str, as_json: bool) -> None:
    """Move a running job to other cores of the same number, live. Changes no bit of its results."""
    _change_cores(job, lambda client: client.repin_job(job), as_json)


def _change_cores(job: str, change: Callable[[Client], Job], as_json: bool) -> None:
    from ganger.cli.order_wait import print_cores

    with open_client() as client:
        before = client.get_job(job)
        print_cores(client, before, change(client), as_json)


@click.command()
@chooses_jobs()
@click.option("--reason", default="", help="For the history.")
@json_option
def cancel(selection: Selection, reason: str, as_json: bool) -> int:
    """End jobs for good; of an array every member that has not ended."""
    from ganger.cli.job_table import states
    from ganger.cli.order_wait import print_cancelled

    with open_client() as client:

        def cancel_one(name: str) -> Job | Array:
            return of_job_or_array(
                name, lambda job: client.cancel_job(job, reason), lambda array: client.cancel_array(array, reason)
            )

        cancelled, worst = each_of(selection.named(client), cancel_one)
        if as_json:
            print_json(cancelled)
            return worst
        for message in cancelled:
            if message.DESCRIPTOR.name == "Array":
                print(f"array {number(message.name)}: {states(cast('Array', message))}", flush=True)
            else:
                print_cancelled(client, cast("Job", message))
    return worst


@click.command()
@chooses_jobs()
@click.option("--timeout", metavar="TIME", callback=_checked, help="Give up after so long.")
@json_option
def wait(selection: Selection, timeout: str | None, as_json: bool) -> int:
    """Wait until jobs, or all members of arrays, have ended.

    Exit code 1 if one neither succeeded nor was stopped by the rule of its array."""
    from ganger.cli.job_table import job_sentence
    from ganger.cli.order_wait import print_job
    from ganger.job import Job as Handle
    from ganger.job import JobState

    deadline = None if timeout is None else time.monotonic() + timeout_s(timeout)
    messages: list[Job] = []
    is_good = True
    with open_client() as client:

        def of_array(array: str) -> list[Job]:
            return members_of(client, array)

        names = selection.named(client)
        waited_for = [of_job_or_array(name, lambda job: [client.get_job(job)], of_array) for name in names]
        for job in [member.name for members in waited_for for member in members]:
            handle = Handle(client, client.get_job(job))
            try:
                remaining = None if deadline is None else max(0.0, deadline - time.monotonic())
                is_good &= handle.wait(remaining, check=False) in (JobState.SUCCEEDED, JobState.STOPPED)
            except TimeoutError as error:
                raise CommandError(f"{job_sentence(handle.message)}, not over, after {timeout}") from error
            messages.append(handle.message)
    if as_json:
        print_json(messages)
    else:
        for message in messages:
            print_job(message, False)
    return ExitCode.OK if is_good else ExitCode.JOB_FAILED
