"""Commands that change a running or waiting job: suspend, resume, move, resize, retune, repin, cancel, wait."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, cast

import click

from ganger.cli.failures import CommandError, Exit
from ganger.cli.options import JobOrArrayType, JobType, NodeType, array_of, json_option, number, open_client

if TYPE_CHECKING:
    from ganger.client import Client
    from ganger.v1.array_pb2 import Array
    from ganger.v1.job_pb2 import Job

wait_option = click.option("--wait/--no-wait", "is_waiting", default=True, help="Wait until it is done [wait].")


def _checked(context: click.Context, parameter: click.Parameter, text: str | None) -> str | None:
    """The text as it was given, which is a duration: what cannot be read must not be found out after the order."""
    if text is not None:
        _seconds(text)
    return text


timeout_option = click.option(
    "--timeout",
    metavar="TIME",
    default="2m",
    show_default=True,
    callback=_checked,
    help="How long to wait; the order stands after it.",
)
_POLL_SECONDS = 0.05
_CORES_SECONDS = 3.0
# How often who waits asks whether an order reaches its job at all.
_LOOK_SECONDS = 0.5
# A script may import for so long before its agent speaks up; of one that is silent for longer nothing else is expected.
_SILENT_SECONDS = 60.0


@click.command()
@click.argument("job", type=JobType())
@click.option(
    "--level",
    type=click.Choice(("pause", "offload", "checkpoint"), case_sensitive=False),
    help="What to keep: pause keeps device memory, offload host memory, checkpoint storage only."
    " Default: offload, else checkpoint, else pause.",
)
@wait_option
@timeout_option
@json_option
def suspend(job: str, level: str | None, is_waiting: bool, timeout: str, as_json: bool) -> None:
    """Stop a job between two mini-batches, keeping its state."""
    from ganger.v1.job_pb2 import Gang, Job

    def is_settled(now: Job) -> bool:
        stopped = now.state != Job.STATE_SUSPENDED or now.suspended_level != 0
        return stopped and (not now.HasField("gang") or now.gang.phase != Gang.PHASE_STOPPING)

    with open_client() as client:
        if not is_waiting:
            message = client.suspend_job(job, level)
        else:
            # Before it has said what it can, no suspend would be accepted.
            order = partial(client.suspend_job, job, level)
            _, message = _ordered(client, job, timeout, lambda now: _can_rest(now, level), order)
            message = _until(client, message, is_settled, timeout, "at rest")
            _check_suspended(message, level)
    _tell(message, as_json)


@click.command()
@click.argument("job", type=JobType())
@wait_option
@timeout_option
@json_option
def resume(job: str, is_waiting: bool, timeout: str, as_json: bool) -> None:
    """Let a suspended job go on. Does not wait for devices if there are none free: see `ganger why`."""
    from ganger.v1.job_pb2 import Gang, Job

    def goes_on(now: Job) -> bool:
        waits = now.state == Job.STATE_PENDING and bool(now.blockers)
        return waits or (now.state == Job.STATE_HOLDING and now.gang.phase == Gang.PHASE_RUNNING)

    with open_client() as client:
        message = client.resume_job(job)
        if is_waiting:
            message = _until(client, message, goes_on, timeout, "running")
    _tell(message, as_json)


@click.command()
@click.argument("job", type=JobType())
@click.option("--to", "nodes", multiple=True, type=NodeType(), help="Where to; repeat for several nodes.")
@wait_option
@timeout_option
@json_option
def move(job: str, nodes: tuple[str, ...], is_waiting: bool, timeout: str, as_json: bool) -> None:
    """Move a running job to other nodes without losing a step."""
    from ganger.v1.job_pb2 import Gang, Job

    with open_client() as client:
        if not is_waiting:
            message = client.move_job(job, nodes)
        else:
            before, message = _ordered(client, job, timeout, _can_move, partial(client.move_job, job, nodes))

            def is_settled(now: Job) -> bool:
                return now.state != Job.STATE_HOLDING or now.gang.phase == Gang.PHASE_RUNNING

            message = _until(client, message, is_settled, timeout, "running at its new place")
            _check_went_on(before, message, "where it was: the move")
    _tell(message, as_json)


@click.command()
@click.argument("job", type=JobType())
@click.argument("gpus", type=click.IntRange(1, 65_536))
@wait_option
@timeout_option
@json_option
def resize(job: str, gpus: int, is_waiting: bool, timeout: str, as_json: bool) -> None:
    """Let a running elastic job go on with another number of GPUs, without losing a step or a sample."""
    from ganger.v1.job_pb2 import Gang, Job

    with open_client() as client:
        if not is_waiting:
            message = client.resize_job(job, gpus)
        else:
            before, message = _ordered(client, job, timeout, _can_move, partial(client.resize_job, job, gpus))

            def is_settled(now: Job) -> bool:
                return now.state != Job.STATE_HOLDING or now.gang.phase == Gang.PHASE_RUNNING

            message = _until(client, message, is_settled, timeout, f"running on {gpus} GPUs")
            _check_went_on(before, message, "with as many GPUs as before: the change")
    _tell(message, as_json)


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
@click.argument("jobs", type=JobOrArrayType(), nargs=-1, required=True)
@click.option("--reason", default="", help="For the history.")
@json_option
def cancel(jobs: tuple[str, ...], reason: str, as_json: bool) -> int:
    """End jobs for good; of an array every member that has not ended."""
    from ganger.console.plain import print_json
    from ganger.wire.errors import ApiError

    worst = Exit.OK
    cancelled: list[Job | Array] = []
    with open_client() as client:
        for job in jobs:
            try:
                cancelled.append(_cancel(client, job, reason))
            except ApiError as error:
                # One that has ended already must not keep the others alive.
                from ganger.cli.failures import report

                worst = max(worst, Exit(report(error)))
                if worst >= Exit.UNREACHABLE:
                    break
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
    from ganger.console.visible import print_line
    from ganger.job import FINISHED

    _tell(job, False)
    if job.state not in FINISHED and (silence := _silence(client, job)):
        print_line(f"  but {silence}")


def _tell_array(array: Array) -> None:
    from ganger.cli.array_lines import states

    print(f"array {number(array.name)}: {states(array)}", flush=True)


@click.command()
@click.argument("jobs", type=JobOrArrayType(), nargs=-1, required=True)
@click.option("--timeout", metavar="TIME", callback=_checked, help="Give up after so long.")
@json_option
def wait(jobs: tuple[str, ...], timeout: str | None, as_json: bool) -> int:
    """Wait until jobs, or all members of arrays, have ended.

    Exit code 1 if one neither succeeded nor was stopped by the rule of its array."""
    from ganger.cli.job_lines import sentence
    from ganger.console.plain import print_json
    from ganger.job import Job as Handle
    from ganger.job import JobState

    deadline = None if timeout is None else time.monotonic() + _seconds(timeout)
    messages: list[Job] = []
    is_good = True
    with open_client() as client:
        for job in [member for name in jobs for member in _members(client, name)]:
            handle = Handle(client, client.get_job(job))
            try:
                remaining = None if deadline is None else max(0.0, deadline - time.monotonic())
                is_good &= handle.wait(remaining, check=False) in (JobState.SUCCEEDED, JobState.STOPPED)
            except TimeoutError as error:
                raise CommandError(f"{sentence(handle.message)}, not over, after {timeout}") from error
            messages.append(handle.message)
    if as_json:
        print_json(messages)
    else:
        for message in messages:
            _tell(message, False)
    return Exit.OK if is_good else Exit.JOB_FAILED


def _members(client: Client, name: str) -> list[str]:
    """The jobs that a name means: itself, or the members of an array."""
    from ganger.wire.errors import JobNotFound

    array = name
    if not name.startswith("arrays/"):
        try:
            return [client.get_job(name).name]
        except JobNotFound as error:
            array = array_of(name, error)
    return sorted((member.name for member in client.list_jobs(array=array)), key=lambda name: int(number(name)))


def _until(client: Client, message: Job, is_done: Callable[[Job], bool], timeout: str, goal: str) -> Job:
    """The job once `is_done`. Polls: the interesting changes of a gang come every few milliseconds or not at all."""
    from ganger.cli.job_lines import state_text
    from ganger.job import FINISHED
    from ganger.wire.errors import DeadlineExceeded, NotReady, Unreachable

    now = time.monotonic()
    deadline, look_at = now + _seconds(timeout), now + _LOOK_SECONDS
    while not is_done(message) and message.state not in FINISHED:
        now = time.monotonic()
        if now > deadline:
            raise CommandError(
                f"job {number(message.name)} is {state_text(message)}, not {goal}, after {timeout}; the order stands:"
                f" `ganger show {number(message.name)}`"
            )
        time.sleep(_POLL_SECONDS)
        # The order is durable: a master that goes away meanwhile carries it out when it is back.
        with contextlib.suppress(Unreachable, NotReady, DeadlineExceeded):
            message = client.get_job(message.name)
            if now >= look_at and not is_done(message):
                look_at = now + _LOOK_SECONDS
                if silence := _silence(client, message):
                    told = f"job {number(message.name)} is {state_text(message)}, not {goal}"
                    raise CommandError(f"{told}; the order stands, but {silence}")
    return message


def _silence(client: Client, job: Job) -> str:
    """Which of its nodes is silent, and what becomes of the job; empty while an order can reach it."""
    told = [blocker.message for blocker in client.explain_job(job.name).blockers if blocker.reason == "NODE_SILENT"]
    return "; ".join(told)


def _ordered(
    client: Client, job: str, timeout: str, is_ready: Callable[[Job], bool], order: Callable[[], Job]
) -> tuple[Job, Job]:
    """The job as it was looked at before the order, and after it; once it can be carried out. What begins between look
    and order (the planner moves it) is waited for as well; what lasts is the order's to say."""
    from ganger.wire.errors import JobBusy, NotRunning

    deadline = time.monotonic() + _seconds(timeout)
    while True:
        before = _let_settle(client, job, deadline, is_ready)
        try:
            return before, order()
        except (JobBusy, NotRunning):
            if time.monotonic() > deadline or client.get_job(job).revision == before.revision:
                raise


def _let_settle(client: Client, job: str, deadline: float, is_ready: Callable[[Job], bool]) -> Job:
    """Waits while a job has its gang and has not stepped, or its agent has not spoken up, unless it is ready before;
    and while it is on its way to other places or another size. What cannot be the order says."""
    from ganger.v1.job_pb2 import Gang, Job

    while True:
        now = client.get_job(job)
        is_on_its_way = now.gang.phase in (Gang.PHASE_MOVING, Gang.PHASE_RESIZING)
        starts = now.gang.phase == Gang.PHASE_STARTING or _is_young(now)
        waits = now.state == Job.STATE_HOLDING and (is_on_its_way or (starts and not is_ready(now)))
        if not waits or time.monotonic() > deadline:
            return now
        time.sleep(_POLL_SECONDS)


def _can_rest(job: Job, level: str | None) -> bool:
    """Whether it has said what it can; what is presumed is good for PAUSE, if that is wanted."""
    can = job.capabilities
    is_known = job.HasField("capabilities") and (not can.presumed or level == "pause")
    # Host memory is reserved for its state once it has told how much that is.
    has_room = level != "offload" or not can.offload or all(claim.arena_bytes for claim in job.gang.claims)
    return is_known and has_room


def _can_move(job: Job) -> bool:
    from ganger.v1.job_pb2 import Gang

    return job.gang.phase != Gang.PHASE_STARTING and not job.capabilities.presumed


def _is_young(job: Job) -> bool:
    from ganger.wire import times

    return job.HasField("start_time") and time.time() - times.unix_seconds(job.start_time) < _SILENT_SECONDS


def _check_suspended(now: Job, level: str | None) -> None:
    """A suspend that was given up, or undone by somebody else meanwhile, is no success."""
    from ganger.cli.job_lines import state_text
    from ganger.job import FINISHED
    from ganger.v1.job_pb2 import SuspendLevel

    wanted = SuspendLevel.Value(f"SUSPEND_LEVEL_{level.upper()}") if level else 0
    rests = now.state == now.STATE_SUSPENDED and now.suspended_level >= wanted
    if rests or now.state in FINISHED:
        return
    why = now.trouble or "somebody resumed it"
    raise CommandError(f"job {number(now.name)} could not be suspended and is {state_text(now)}: {why}")


def _check_went_on(before: Job, after: Job, how: str) -> None:
    """That it runs as another attempt than before; `how` it runs otherwise, and what was called off."""
    from ganger.job import FINISHED

    if after.state in FINISHED:
        return
    if after.gang.epoch <= before.gang.epoch:
        raise CommandError(
            f"job {number(after.name)} runs {how} was called off, nothing is lost;"
            f" `ganger history {after.name}` says why"
        )


def _tell_cores(client: Client, before: Job, message: Job, as_json: bool) -> None:
    """On which cores it runs now; its daemon tells when it has carried the order out, or there are no others."""
    from ganger.cli.job_lines import cores

    deadline = time.monotonic() + _CORES_SECONDS
    while list(message.gang.cores) == list(before.gang.cores) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
        message = client.get_job(message.name)
    text = cores(message)
    _tell(message, as_json, f", cores {' | '.join(text)}" if text else "")


def _tell(message: Job, as_json: bool, what: str = "") -> None:
    from ganger.cli import job_lines
    from ganger.console.plain import print_json
    from ganger.console.visible import print_line
    from ganger.job import FINISHED

    if as_json:
        print_json(message)
        return
    at = (
        f" at step {message.gang.stop_step}"
        if message.gang.stop_step and message.state == message.STATE_SUSPENDED
        else ""
    )
    place = job_lines.place(message)
    where = f" on {place}" if place and message.state not in FINISHED else ""
    print_line(f"{job_lines.sentence(message)}{at}{where}{what}")


def _seconds(text: str) -> float:
    from ganger.units import parse_duration

    try:
        return parse_duration(text)
    except ValueError as error:
        raise click.UsageError(f"--timeout: {error}") from error
