"""Commands that change a running or waiting job: suspend, resume, move, resize, retune, repin, cancel, wait."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, cast

import click

from ganger.cli.failures import CommandError, ExitCode
from ganger.cli.job_selection import Selection, chooses_jobs, each_of, members, print_answers
from ganger.cli.options import JobType, NodeType, array_of, json_option, number, open_client
from ganger.cli.order_wait import POLL_S, ordered, ordered_once_stopped, seconds, silence, until

if TYPE_CHECKING:
    from ganger.client import Client
    from ganger.v1.array_pb2 import Array
    from ganger.v1.job_pb2 import Job

wait_option = click.option("--wait/--no-wait", "is_waiting", default=True, help="Wait until it is done [wait].")


def _checked(context: click.Context, parameter: click.Parameter, text: str | None) -> str | None:
    """The text as it was given, which is a duration: what cannot be read must not be found out after the order."""
    if text is not None:
        seconds(text)
    return text


timeout_option = click.option(
    "--timeout",
    metavar="TIME",
    default="2m",
    show_default=True,
    callback=_checked,
    help="How long to wait; the order stands after it.",
)
_CORES_S = 3.0
_CALLED_OFF = ("move_aborted", "resize_aborted")


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
    from ganger.v1.job_pb2 import Gang, Job

    def is_settled(now: Job) -> bool:
        stopped = now.state != Job.STATE_SUSPENDED or now.suspended_level != 0
        return stopped and (not now.HasField("gang") or now.gang.phase != Gang.PHASE_STOPPING)

    with open_client() as client:

        def order(job: str) -> Job:
            if not is_waiting:
                return client.suspend_job(job, level)
            # Until the job has reported its capabilities, the master refuses to suspend it.
            suspend_now = partial(client.suspend_job, job, level)
            return ordered(client, job, timeout, lambda now: _can_rest(now, level), suspend_now)[1]

        def finish(begun: Job) -> Job:
            message = until(client, begun, is_settled, timeout, "at rest")
            _check_suspended(message, level)
            return message

        return _command_each(client, selection, order, finish if is_waiting else None, as_json, _kept_devices)


@click.command()
@chooses_jobs()
@wait_option
@timeout_option
@json_option
def resume(selection: Selection, is_waiting: bool, timeout: str, as_json: bool) -> int:
    """Let suspended jobs go on. Does not wait for devices if there are none free: see `ganger why`."""
    from ganger.v1.job_pb2 import Gang, Job

    def goes_on(now: Job) -> bool:
        waits = now.state == Job.STATE_PENDING and bool(now.blockers)
        return waits or (now.state == Job.STATE_HOLDING and now.gang.phase == Gang.PHASE_RUNNING)

    with open_client() as client:

        def order(job: str) -> Job:
            if not is_waiting:
                return client.resume_job(job)
            return ordered_once_stopped(client, job, timeout, partial(client.resume_job, job))

        def finish(begun: Job) -> Job:
            return until(client, begun, goes_on, timeout, "running")

        return _command_each(client, selection, order, finish if is_waiting else None, as_json)


@click.command()
@chooses_jobs()
@click.option("--to", "nodes", multiple=True, type=NodeType(), help="Where to; repeat for several nodes.")
@wait_option
@timeout_option
@json_option
def move(selection: Selection, nodes: tuple[str, ...], is_waiting: bool, timeout: str, as_json: bool) -> int:
    """Move running jobs to other nodes without losing a step."""
    with open_client() as client:
        for node in nodes:
            # One that does not exist is refused before the job has reported what it can.
            client.get_node(node)
        befores: dict[str, Job] = {}

        def order(job: str) -> Job:
            if not is_waiting:
                return client.move_job(job, nodes)
            before, message = ordered(client, job, timeout, _can_move, partial(client.move_job, job, nodes))
            befores[message.name] = before
            return message

        def finish(begun: Job) -> Job:
            message = until(client, begun, _runs_or_holds_nothing, timeout, "running at its new place")
            _check_went_on(client, befores[message.name], message, "where it was: the move")
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
    begun, worst = each_of(selection.named(client), order)

    def done(job: str) -> Job:
        message = by_name[job] if finish is None else finish(by_name[job])
        if not as_json:
            _tell(message, False, note(message))
        return message

    by_name = {message.name: message for message in begun}
    messages, late = each_of(by_name, done)
    if as_json:
        print_answers(messages, selection)
    return max(worst, late)


def _kept_devices(job: Job) -> str:
    """Return the hint that a job suspended at PAUSE keeps its GPUs; empty for other jobs."""
    from ganger.v1.job_pb2 import SUSPEND_LEVEL_PAUSE, Gang

    held = sum(claim.device_mask.bit_count() for claim in job.gang.claims)
    rests = job.state == job.STATE_SUSPENDED and job.gang.phase == Gang.PHASE_PARKED
    if not rests or not held or job.gang.parked_level != SUSPEND_LEVEL_PAUSE:
        return ""
    gpus = "its GPU" if held == 1 else f"its {held} GPUs"
    freeing = next((level for level in ("offload", "checkpoint") if getattr(job.capabilities, f"can_{level}")), None)
    if freeing is None:
        return f", and keeps {gpus}"
    them = "it" if held == 1 else "them"
    return f", and keeps {gpus}: `ganger suspend {number(job.name)} --level {freeing}` frees {them}"


@click.command()
@click.argument("job", type=JobType())
@click.argument("gpus", type=click.IntRange(1, 65_536))
@wait_option
@timeout_option
@json_option
def resize(job: str, gpus: int, is_waiting: bool, timeout: str, as_json: bool) -> None:
    """Let an elastic job go on with another number of GPUs, without losing a step or a sample.

    One that holds no GPUs (it waits for its start, or is suspended on storage) starts with that number."""
    with open_client() as client:
        if not is_waiting:
            message = client.resize_job(job, gpus)
        else:
            before, message = ordered(client, job, timeout, _can_move, partial(client.resize_job, job, gpus))
            if before.gang.claims:
                message = until(client, message, _runs_or_holds_nothing, timeout, f"running on {gpus} GPUs")
                _check_went_on(client, before, message, "with as many GPUs as before: the change")
    _tell(message, as_json)
    if not as_json and not message.gang.claims and message.state in (message.STATE_PENDING, message.STATE_SUSPENDED):
        print(f"  it starts with {gpus} GPUs", flush=True)


@click.command()
@click.argument("job", type=JobType())
@click.option("--cores", required=True, metavar="N", help="Cores of each task, e.g. 4 or 0.5.")
@json_option
def retune(job: str, cores: str, as_json: bool) -> None:
    """Give a running job other numbers of cores, live. Its thread counts follow."""
    from ganger.units import parse_cores

    try:
        millicores = parse_cores(cores)
    except ValueError as error:
        raise click.UsageError(f"--cores: {error}") from error
    with open_client() as client:
        before = client.get_job(job)
        _tell_cores(client, before, client.retune_job(job, millicores / 1_000), as_json)


@click.command()
@click.argument("job", type=JobType())
@json_option
def repin(job: str, as_json: bool) -> None:
    """Move a running job to other cores of the same number, live. Changes no bit of its results."""
    with open_client() as client:
        before = client.get_job(job)
        _tell_cores(client, before, client.repin_job(job), as_json)


@click.command()
@chooses_jobs()
@click.option("--reason", default="", help="For the history.")
@json_option
def cancel(selection: Selection, reason: str, as_json: bool) -> int:
    """End jobs for good; of an array every member that has not ended."""
    from ganger.console import print_json

    with open_client() as client:
        cancelled, worst = each_of(selection.named(client), lambda name: _cancel(client, name, reason))
        if as_json:
            print_json(cancelled)
            return worst
        for message in cancelled:
            if message.DESCRIPTOR.name == "Array":
                _tell_array(cast("Array", message))
            else:
                _tell_cancelled(client, cast("Job", message))
    return worst


def _cancel(client: Client, name: str, reason: str) -> Job | Array:
    from ganger.wire.errors import JobNotFound

    if name.startswith("arrays/"):
        return client.cancel_array(name, reason)
    try:
        return client.cancel_job(name, reason)
    except JobNotFound as error:
        return client.cancel_array(array_of(name, error), reason)


def _tell_cancelled(client: Client, job: Job) -> None:
    from ganger.console import print_line
    from ganger.job import FINISHED

    _tell(job, False)
    if job.state not in FINISHED and (unreachable := silence(client, job)):
        print_line(f"  but {unreachable}")


def _tell_array(array: Array) -> None:
    from ganger.cli.job_table import states

    print(f"array {number(array.name)}: {states(array)}", flush=True)


@click.command()
@chooses_jobs()
@click.option("--timeout", metavar="TIME", callback=_checked, help="Give up after so long.")
@json_option
def wait(selection: Selection, timeout: str | None, as_json: bool) -> int:
    """Wait until jobs, or all members of arrays, have ended.

    Exit code 1 if one neither succeeded nor was stopped by the rule of its array."""
    from ganger.cli.job_table import job_sentence
    from ganger.console import print_json
    from ganger.job import Job as Handle
    from ganger.job import JobState

    deadline = None if timeout is None else time.monotonic() + seconds(timeout)
    messages: list[Job] = []
    is_good = True
    with open_client() as client:
        for job in [member for name in selection.named(client) for member in members(client, name)]:
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
            _tell(message, False)
    return ExitCode.OK if is_good else ExitCode.JOB_FAILED


def _can_rest(job: Job, level: str | None) -> bool:
    """Return whether the master can accept a suspend: the job has reported its capabilities and has an arena if it
    needs one. Presumed capabilities suffice for level "pause"."""
    can = job.capabilities
    is_known = job.HasField("capabilities") and (not can.is_presumed or level == "pause")
    # Host memory is reserved for its state once the job has reported its size.
    has_room = level != "offload" or not can.can_offload or all(claim.arena_bytes for claim in job.gang.claims)
    return is_known and has_room


def _can_move(job: Job) -> bool:
    from ganger.v1.job_pb2 import Gang

    return job.gang.phase != Gang.PHASE_STARTING and not job.capabilities.is_presumed


def _runs_or_holds_nothing(job: Job) -> bool:
    from ganger.v1.job_pb2 import Gang

    return job.state != job.STATE_HOLDING or job.gang.phase == Gang.PHASE_RUNNING


def _check_suspended(now: Job, level: str | None) -> None:
    """A suspend that was given up, or undone by another command meanwhile, is no success."""
    from ganger.cli.job_table import state_text
    from ganger.job import FINISHED
    from ganger.v1.job_pb2 import SuspendLevel

    wanted = SuspendLevel.Value(f"SUSPEND_LEVEL_{level.upper()}") if level else 0
    rests = now.state == now.STATE_SUSPENDED and now.suspended_level >= wanted
    if rests or now.state in FINISHED:
        return
    why = now.trouble or "it was resumed meanwhile"
    raise CommandError(f"job {number(now.name)} could not be suspended and is {state_text(now)}: {why}")


def _check_went_on(client: Client, before: Job, after: Job, how: str) -> None:
    """Raise CommandError unless the job runs in a newer epoch than before. `how`: text that
    names how the job still runs and the order that was called off."""
    from ganger.job import FINISHED

    if after.state in FINISHED or after.gang.epoch > before.gang.epoch:
        return
    called_off = [event.message for event in client.list_events(after.name) if event.kind in _CALLED_OFF]
    why = f": {called_off[-1]}" if called_off else f"; `ganger history {number(after.name)}` shows why"
    raise CommandError(f"job {number(after.name)} runs {how} was called off, nothing is lost{why}")


def _tell_cores(client: Client, before: Job, message: Job, as_json: bool) -> None:
    """Print the job with its cores, once its daemon reports new ones or after `_CORES_S` seconds."""
    from ganger.cli.job_table import cores

    deadline = time.monotonic() + _CORES_S
    while list(message.gang.cores) == list(before.gang.cores) and time.monotonic() < deadline:
        time.sleep(POLL_S)
        message = client.get_job(message.name)
    text = cores(message)
    _tell(message, as_json, f", cores {' | '.join(text)}" if text else "")


def _tell(message: Job, as_json: bool, what: str = "") -> None:
    from ganger.cli import job_table
    from ganger.console import print_json, print_line
    from ganger.job import FINISHED

    if as_json:
        print_json(message)
        return
    at = (
        f" at step {message.gang.stop_step}"
        if message.gang.stop_step and message.state == message.STATE_SUSPENDED
        else ""
    )
    place = job_table.place(message)
    where = f" on {place}" if place and message.state not in FINISHED else ""
    print_line(f"{job_table.job_sentence(message)}{at}{where}{what}")
