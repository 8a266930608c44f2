"""Orders to jobs that take a moment: when they can be given, when they are carried out, and what is printed of them."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from ganger.cli.job_table import called, cores, devices_in, job_sentence, place, state_text
from ganger.cli.options import number, timeout_s
from ganger.console import CommandError, print_json, print_line
from ganger.job import FINISHED
from ganger.text import format_duration
from ganger.v1.job_pb2 import (
    MECHANISM_IMAGE,
    MECHANISM_SIGNAL,
    SUSPEND_LEVEL_CHECKPOINT,
    SUSPEND_LEVEL_PAUSE,
    Gang,
    Job,
    SuspendLevel,
)
from ganger.wire import times
from ganger.wire.errors import DeadlineExceeded, JobBusy, NotReady, NotRunning, Unreachable

if TYPE_CHECKING:
    from ganger.client import Client

_CORES_S = 3.0
_CALLED_OFF = ("move_aborted", "resize_aborted")
_POLL_S = 0.05
# How often a wait checks whether the order reaches the job at all.
_LOOK_S = 0.5
# A script may import for so long before its agent reports; from one that is silent for longer nothing else is expected.
_SILENT_S = 60.0
# A wait is explained after so long, and again each time it has lasted twice as long.
_EXPLAIN_S = 1.0


class _Explained:
    """Prints on stderr what a command waits for, once that lasts."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._next_s = _EXPLAIN_S

    def report(self, job: Job) -> None:
        """Print the obstacle if the wait has lasted for long enough since it was printed last."""
        waited = time.monotonic() - self._began
        if waited >= self._next_s:
            self._next_s = 2.0 * waited
            print_line(f"ganger: after {waited:.0f} s: {obstacle(job)}", sys.stderr)


def obstacle(job: Job, now: float | None = None) -> str:
    """Return what an order to this job waits for, as a sentence. now: Unix time in seconds, default the clock."""
    name, phase = f"job {called(job)}", job.gang.phase
    if phase in (Gang.PHASE_MOVING, Gang.PHASE_RESIZING):
        return f"{name} is {state_text(job)}: the order waits until that is done"
    if phase == Gang.PHASE_STARTING and job.HasField("capabilities") and not job.capabilities.is_presumed:
        return f"{name} is {state_text(job)}: it has not reached its first boundary yet"
    if job.state == job.STATE_HOLDING and (phase == Gang.PHASE_STARTING or job.capabilities.is_presumed):
        return f"{name} is {state_text(job)}: its script has not reported yet what it can save"
    if phase == Gang.PHASE_RUNNING and job.capabilities.can_offload and not _has_arena(job):
        return f"{name} is {state_text(job)}: no host memory is reserved so far for what it has on its GPUs"
    if phase != Gang.PHASE_STOPPING:
        return f"{name} is {state_text(job)}"
    if job.gang.stop_step:
        return f"{name} is stopped at step {job.gang.stop_step}: its state is being saved"
    progress = job.progress
    if job.capabilities.mechanism == MECHANISM_SIGNAL and job.gang.parked_level == SUSPEND_LEVEL_CHECKPOINT:
        grace = format_duration(times.seconds(job.spec.stop_grace))
        return f"{name} is stopping: its script saves itself since SIG{job.spec.stop_signal}, for at most {grace}"
    if not progress.step:
        return f"{name} is stopping: its ranks have not reached a boundary yet"
    text = f"{name} is stopping at its next boundary; step {progress.step}"
    if job.capabilities.mechanism == MECHANISM_IMAGE and job.gang.parked_level == SUSPEND_LEVEL_CHECKPOINT:
        text = f"{name} is stopping at its next boundary, where an image of it is written; step {progress.step}"
    if progress.HasField("step_time"):
        ago = max(0.0, (time.time() if now is None else now) - times.unix_s(progress.step_time))
        text += f" was done {ago:.0f} s ago"
    if progress.steps_per_s > 0.0:
        text += f", a step takes about {1.0 / progress.steps_per_s:.2g} s"
    return text


def hang_note(job: Job) -> str:
    """Return what an order to stop does to a job that makes no step, as a sentence; empty for any other job."""
    stalled = job.progress.stall_reason
    if not stalled.startswith("no step"):
        return ""
    saved = f"its checkpoint of step {job.checkpoint.step}" if job.HasField("checkpoint") else "the beginning"
    fate = f"its processes are killed, and it continues from {saved} once it is resumed"
    return f"job {called(job)} hangs ({stalled}): if it reaches no boundary, {fate}"


def until(client: Client, message: Job, is_done: Callable[[Job], bool], timeout: str, goal: str) -> Job:
    """Return the job once `is_done`, or once it has ended. `goal`: what it is to be then, for the error.

    Polls: the interesting changes of a gang come every few milliseconds or not at all. Raises CommandError after
    `timeout`, and at once when the order cannot reach the job's nodes."""
    now = time.monotonic()
    deadline, look_at = now + timeout_s(timeout), now + _LOOK_S
    explained = _Explained()
    while not is_done(message) and message.state not in FINISHED:
        now = time.monotonic()
        if now > deadline:
            raise CommandError(
                f"job {number(message.name)} is {state_text(message)}, not {goal}, after {timeout}; the order stands:"
                f" `ganger show {number(message.name)}`"
            )
        time.sleep(_POLL_S)
        # The order is durable: a master that goes away meanwhile carries it out when it is back.
        with contextlib.suppress(Unreachable, NotReady, DeadlineExceeded):
            message = client.get_job(message.name)
            if not is_done(message):
                explained.report(message)
            if now >= look_at and not is_done(message):
                look_at = now + _LOOK_S
                if unreachable := silence(client, message):
                    state = f"job {number(message.name)} is {state_text(message)}, not {goal}"
                    raise CommandError(f"{state}; the order stands, but {unreachable}")
    return message


def silence(client: Client, job: Job) -> str:
    """Return which of its nodes is silent, and what becomes of the job; empty while an order can reach it."""
    silent = [blocker.message for blocker in client.explain_job(job.name).blockers if blocker.reason == "NODE_SILENT"]
    return "; ".join(silent)


def ordered(
    client: Client, job: str, timeout: str, is_ready: Callable[[Job], bool], order: Callable[[], Job]
) -> tuple[Job, Job]:
    """Give an order once it can be carried out; return the job before and after it.

    A change that begins between the look at the job and the order (the planner moves it) is waited for as well. Raises
    what the order raises, if that lasts."""
    deadline = time.monotonic() + timeout_s(timeout)
    while True:
        before = _let_settle(client, job, deadline, is_ready)
        try:
            return before, order()
        except (JobBusy, NotRunning):
            if time.monotonic() > deadline or client.get_job(job).revision == before.revision:
                raise


def _let_settle(client: Client, job: str, deadline: float, is_ready: Callable[[Job], bool]) -> Job:
    """Wait while a job starts, until it is ready or its agent has reported, and while it is moved or resized.

    Return the job then, or at the deadline: a job that cannot do what is ordered rejects the order itself."""
    explained = _Explained()
    while True:
        now = client.get_job(job)
        is_on_its_way = now.gang.phase in (Gang.PHASE_MOVING, Gang.PHASE_RESIZING)
        starts = now.gang.phase == Gang.PHASE_STARTING or _is_young(now)
        waits = now.state == Job.STATE_HOLDING and (is_on_its_way or (starts and not is_ready(now)))
        if not waits or time.monotonic() > deadline:
            return now
        explained.report(now)
        time.sleep(_POLL_S)


def ordered_once_stopped(client: Client, job: str, timeout: str, order: Callable[[], Job]) -> Job:
    """Give an order that the master refuses with JOB_BUSY for as long as the job is stopping; wait for that.

    Raises JobBusy if the job is busy with something else, or still stopping after `timeout`."""
    deadline = time.monotonic() + timeout_s(timeout)
    explained, was_stopping = _Explained(), True
    while True:
        try:
            return order()
        except JobBusy:
            now = client.get_job(job)
            is_stopping = now.gang.phase == Gang.PHASE_STOPPING
            # It may have stopped between the refusal and the look: then the order is given once more.
            if time.monotonic() > deadline or not (is_stopping or was_stopping):
                raise
            was_stopping = is_stopping
            explained.report(now)
        time.sleep(_POLL_S)


def _is_young(job: Job) -> bool:
    return job.HasField("start_time") and time.time() - times.unix_s(job.start_time) < _SILENT_S


def is_at_rest(job: Job) -> bool:
    stopped = job.state != Job.STATE_SUSPENDED or job.suspended_level != 0
    return stopped and (not job.HasField("gang") or job.gang.phase != Gang.PHASE_STOPPING)


def goes_on(job: Job) -> bool:
    waits = job.state == Job.STATE_PENDING and bool(job.blockers)
    return waits or (job.state == Job.STATE_HOLDING and job.gang.phase == Gang.PHASE_RUNNING)


def can_rest(job: Job, level: str | None) -> bool:
    """Return whether the master can accept a suspend: the job has reported its capabilities and has an arena if it
    needs one. Presumed capabilities suffice for level "pause"."""
    can = job.capabilities
    is_known = job.HasField("capabilities") and (not can.is_presumed or level == "pause")
    # Host memory is reserved for its state once the job has reported its size.
    return is_known and (level != "offload" or not can.can_offload or _has_arena(job))


def _has_arena(job: Job) -> bool:
    return all(claim.arena_bytes for claim in job.gang.claims)


def can_move(job: Job) -> bool:
    return job.gang.phase != Gang.PHASE_STARTING and not job.capabilities.is_presumed


def runs_or_holds_nothing(job: Job) -> bool:
    return job.state != job.STATE_HOLDING or job.gang.phase == Gang.PHASE_RUNNING


def is_resized(tasks: Mapping[str, int], job: Job) -> bool:
    """Return whether a job runs with these numbers of tasks by role, was kept from that, or was suspended meanwhile."""
    runs = job.state == job.STATE_HOLDING and job.gang.phase == Gang.PHASE_RUNNING
    is_so = all(role.tasks == tasks.get(role.name, role.tasks) for role in job.spec.roles)
    return job.state == job.STATE_SUSPENDED or (runs and (is_so or bool(job.trouble)))


def check_resized(now: Job, tasks: Mapping[str, int]) -> None:
    """Raise CommandError unless the job has these numbers of tasks by role."""
    if now.state not in FINISHED and any(role.tasks != tasks.get(role.name, role.tasks) for role in now.spec.roles):
        raise CommandError(f"job {number(now.name)} is {state_text(now)} and was not resized: {now.trouble}")


def check_suspended(now: Job, level: str | None) -> None:
    """A suspend that was given up, or undone by another command meanwhile, is no success."""
    wanted = SuspendLevel.Value(f"SUSPEND_LEVEL_{level.upper()}") if level else 0
    rests = now.state == now.STATE_SUSPENDED and now.suspended_level >= wanted
    if rests or now.state in FINISHED:
        return
    why = now.trouble or "it was resumed meanwhile"
    raise CommandError(f"job {number(now.name)} could not be suspended and is {state_text(now)}: {why}")


def check_went_on(client: Client, before: Job, after: Job, how: str) -> None:
    """Raise CommandError unless the job runs in a newer epoch than before. `how`: text that
    names how the job still runs and the order that was called off."""
    if after.state in FINISHED or after.gang.epoch > before.gang.epoch:
        return
    called_off = [event.message for event in client.list_events(after.name) if event.kind in _CALLED_OFF]
    why = f": {called_off[-1]}" if called_off else f"; `ganger history {number(after.name)}` shows why"
    raise CommandError(f"job {number(after.name)} runs {how} was called off, nothing is lost{why}")


def print_cores(client: Client, before: Job, message: Job, as_json: bool) -> None:
    """Print the job with its cores, once its daemon reports new ones or after `_CORES_S` seconds."""
    deadline = time.monotonic() + _CORES_S
    while list(message.gang.cores) == list(before.gang.cores) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        message = client.get_job(message.name)
    text = cores(message)
    as_before = ", as before" if list(message.gang.cores) == list(before.gang.cores) else ""
    print_job(message, as_json, f", cores {' | '.join(text)}{as_before}" if text else "")


def kept_devices(job: Job) -> str:
    """Return the hint that a job suspended at PAUSE keeps its GPUs; empty for other jobs."""
    held = devices_in(job.gang.claims)
    rests = job.state == job.STATE_SUSPENDED and job.gang.phase == Gang.PHASE_PARKED
    if not rests or not held or job.gang.parked_level != SUSPEND_LEVEL_PAUSE:
        return ""
    gpus = "its GPU" if held == 1 else f"its {held} GPUs"
    freeing = next((level for level in ("offload", "checkpoint") if getattr(job.capabilities, f"can_{level}")), None)
    if freeing is None:
        return f", and keeps {gpus}"
    them = "it" if held == 1 else "them"
    return f", and keeps {gpus}: `ganger suspend {number(job.name)} --level {freeing}` frees {them}"


def waiting_note(job: Job) -> str:
    """Return the end of the line about a job that was resumed and is pending; empty for other jobs."""
    return f"; `ganger why {number(job.name)}` prints what it waits for" if job.state == job.STATE_PENDING else ""


def print_cancelled(client: Client, job: Job) -> None:
    print_job(job, False)
    if job.state not in FINISHED and (unreachable := silence(client, job)):
        print_line(f"  but {unreachable}")


def print_job(message: Job, as_json: bool, what: str = "") -> None:
    if as_json:
        print_json(message)
        return
    step = message.gang.stop_step if message.state == message.STATE_SUSPENDED else 0
    at = f" at step {step}" if step else ""
    there = place(message)
    where = f" on {there}" if there and message.state not in FINISHED else ""
    print_line(f"{job_sentence(message)}{at}{where}{what}")
