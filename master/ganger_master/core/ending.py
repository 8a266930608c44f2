"""How an attempt ends, which budget pays for it, and what its job becomes: done, failed, pending or suspended.

Finished jobs are kept within limits on their number and bytes. A repeated submission must be recognised for a while,
so the request id of a forgotten job is kept as long.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from ganger.job_state import JobState
from msgspec.structs import replace

from ganger_master.core import gang_orders, retry
from ganger_master.core.array_model import LOSS, Membership
from ganger_master.core.gang_model import Gang, GangRole, Outcome, OutcomeKind
from ganger_master.core.job_model import Checkpoint, Failure, JobRecord, Request, SuspendLevel, members_of
from ganger_master.core.lifecycle import bad_outcome
from ganger_master.core.state import State


def forget(state: State, now: float) -> None:
    """Forget the oldest finished jobs; one that holds something on a lost node stays until that is gone."""
    for number in _going(state):
        _forget_job(state, number, now)
    while state.jobs.former:
        oldest = next(iter(state.jobs.former.values()))
        if _is_remembered(state, oldest.time, now) and len(state.jobs.former) <= state.settings.former_requests_limit:
            return
        state.forget_request(oldest.user, oldest.request_id)


def _going(state: State) -> list[int]:
    """Return the oldest jobs to forget, so that the rest are within the limits on jobs and on bytes."""
    excess = len(state.jobs.finished) - state.settings.finished_jobs_limit
    most = state.settings.finished_bytes_limit
    excess_bytes = 0 if most is None else state.jobs.holdings.finished_bytes - most
    going: list[int] = []
    if excess <= 0 and excess_bytes <= 0:
        return going
    for number in _may_go(state):
        if len(going) >= excess and excess_bytes <= 0:
            break
        going.append(number)
        excess_bytes -= state.jobs.holdings.bytes_of(number)
    return going


def _may_go(state: State) -> Iterator[int]:
    """Yield the numbers of ended jobs without gangs. Members of an array are compared, so they stay until all have
    ended."""
    lives: dict[int, bool] = {}
    for number in state.jobs.finished:
        array = state.jobs[number].spec.array
        if number in state.gangs.epochs_of:
            continue
        if array is not None and array.array not in lives:
            lives[array.array] = any(not job.state.is_finished for job in members_of(state.jobs, array.array))
        if array is None or not lives[array.array]:
            yield number


def _forget_job(state: State, number: int, now: float) -> None:
    job = state.jobs[number]
    # After its day an id may be another's.
    has_id = state.jobs.requests.get((job.user, job.request_id)) == number
    state.forget_job(number)
    if has_id and _is_remembered(state, job.create_time, now):
        state.put_request(Request(number, job.request_id, job.create_time, job.user))


def _is_remembered(state: State, submitted: float, now: float) -> bool:
    return now - submitted <= state.settings.request_kept_s


_OUTSTAYED: Final = "it did not stop at the end of its time slice, and was killed"


def end(
    state: State,
    number: int,
    becomes: JobState,
    now: float,
    reason: str,
    failure: Failure | None = None,
    checkpoint_first: bool = False,
    preempted: bool = False,
) -> None:
    """Stop every gang of a job; once all are over, it becomes `becomes`. A final end is not replaced by another.

    preempted: count it as a preemption."""
    job = state.jobs[number]
    if job.ending is not None and job.ending.is_finished:
        return
    for gang in state.gangs.of_job(number):
        if not gang_orders.is_over(gang):
            state.put_gang(gang_orders.stop(gang, now, checkpoint_first))
    state.put_job(to_end(job, becomes, now, reason, failure, preempted))


def to_end(
    job: JobRecord, becomes: JobState, now: float, reason: str, failure: Failure | None = None, preempted: bool = False
) -> JobRecord:
    """Return the job with its attempt ending: it becomes that state once all of its gangs are gone."""
    return replace(
        clock_stopped(job, now),
        ending=becomes,
        failure=failure,
        reason=reason,
        next_epoch=0,
        # Where it rested is among what is stopped.
        suspended_level=SuspendLevel.NONE,
        pending_since=0.0,
        preemptions=job.preemptions + preempted,
        revision=job.revision + 1,
    )


def complete(state: State, job: JobRecord, gangs: Sequence[Gang], now: float, cause: str) -> None:
    """Give a job the state that was decided for it, once no gang of it can step any more."""
    becomes = job.ending
    assert becomes is not None
    source = next((gang for gang in gangs if gang.role is GangRole.SOURCE), None)
    if source is not None and (becomes.is_finished or not gang_orders.is_usable(source)):
        state.put_gang(gang_orders.stop(source, now))
        return
    job = replace(
        job,
        ending=None,
        state=becomes,
        epoch=source.epoch if source else 0,
        next_epoch=0,
        # Where it was moved from it goes on at once.
        again_at=job.again_at if becomes is JobState.PENDING and source is None else 0.0,
        revision=job.revision + 1,
    )
    if source is not None:
        job = replace(job, gpus_given=0 if source.devices == job.spec.gpus else source.devices)
        state.put_gang(replace(source, role=GangRole.ACTIVE))
    if becomes.is_finished:
        _finish(state, job, now, cause)
    elif becomes is JobState.SUSPENDED:
        _rest_after_failure(state, job, source, now)
    elif source is not None and gang_orders.holds_devices(source):
        state.put_job(job)
        gang_orders.go_back(state, job, state.gangs[source.epoch], now, cause)
    else:
        state.put_job(replace(job, pending_since=now))
        state.history(now, job, "job_pending", cause, job.reason)


def fail(state: State, job: JobRecord, gang: Gang, now: float, cause: str) -> None:
    """Handle a failed attempt. Its cause decides which budget pays; the job continues from its last checkpoint."""
    outcome = bad_outcome(gang)
    state.history(
        now, job, "attempt_failed", cause, outcome.message, epoch=gang.epoch, outcome=outcome.kind,
        exit_code=outcome.exit_code, rank=outcome.rank,
    )  # fmt: skip
    if outcome.kind is OutcomeKind.STATE_UNREADABLE and job.checkpoint is not None:
        _fall_back(state, job, gang, job.checkpoint, outcome, now, cause)
        return
    if outcome.kind is OutcomeKind.STATE_OUTDATED and _catch_up(state, job, gang, outcome, now):
        return
    if retry.has_no_state(outcome) and job.checkpoint is not None and gang.restore.checkpoint_path:
        _rest_on_checkpoint(state, job, gang, job.checkpoint, outcome, now)
        return
    failure = _failure_of(gang, outcome)
    if outcome.kind is OutcomeKind.ESCALATED and gang.node_set:
        # The other gangs of its group waited until it was killed, and would wait again in every slice.
        job = replace(job, capabilities=job.capabilities.without_turns(_OUTSTAYED))
    if _is_users(outcome):
        if outcome.kind is not OutcomeKind.LAUNCH_FAILED:
            retry.note_launched(state, gang)
            job = started(job, gang)
        job = retry.note_failed_attempt(state.settings, replace(job, failures=job.failures + 1), now)
        state.put_job(job)
        if job.failures > job.spec.max_failures:
            end(state, job.number, JobState.FAILED, now, failure.message, failure)
            return
    else:
        failed = job.launch_failures + _is_failed_start(gang, outcome)
        job = replace(job, preemptions=job.preemptions + 1, launch_failures=failed)
        job = retry.note_failed_launch(state, job, gang)
        state.put_job(job)
        if job.launch_failures > state.settings.launch_failures_allowed:
            end(state, job.number, JobState.FAILED, now, failure.message, failure)
            return
    requeue(state, job, now, failure.message)


def _rest_on_checkpoint(
    state: State, job: JobRecord, gang: Gang, checkpoint: Checkpoint, outcome: Outcome, now: float
) -> None:
    """Keep a job suspended whose ranks could read a checkpoint and not come back to it: another try reads the same, and
    a failed job could not use the checkpoint any more."""
    retry.note_launched(state, gang)
    state.put_job(started(job, gang))
    text = f"{outcome.message}; its log has the reason, and its checkpoint of step {checkpoint.step} is kept"
    end(state, job.number, JobState.SUSPENDED, now, text)


def _fall_back(
    state: State, job: JobRecord, gang: Gang, newest: Checkpoint, outcome: Outcome, now: float, cause: str
) -> None:
    """Continue from an older checkpoint, because the newest one is damaged or gone: from the newest other one on
    storage, else from the one recorded before it; never from the beginning."""
    if gang.restore.checkpoint_path != newest.path:
        # A newer one is there by now.
        requeue(state, job, now, outcome.message)
        return
    # Of two damaged ones both are named.
    earlier = [job.trouble] if job.trouble.startswith(f"{OutcomeKind.STATE_UNREADABLE}:") else []
    trouble = "; ".join([*earlier, f"{OutcomeKind.STATE_UNREADABLE}: {outcome.message}"])
    passed_over = (*job.unreadable, newest.path)
    left = retry.usable(outcome.checkpoints, gang.epoch, passed_over)
    before = left[0] if left else job.checkpoint_before
    figures = {"step": newest.step, "goes_on_from": before.step if before else "nowhere"}
    state.history(now, job, "checkpoint_unreadable", cause, outcome.message, epoch=gang.epoch, **figures)
    if before is None:
        text = f"{trouble}; there is no older checkpoint, and nothing was deleted"
        end(state, job.number, JobState.FAILED, now, text, Failure("NO_CHECKPOINT", text, epoch=gang.epoch))
        return
    second = left[1] if len(left) > 1 else None
    state.put_job(replace(job, checkpoint=before, checkpoint_before=second, unreadable=passed_over, trouble=trouble))
    if retry.is_newer(before, newest):
        state.history(now, job, "checkpoint_complete", f"epoch:{gang.epoch}", step=before.step)
    requeue(state, job, now, f"{trouble}; it goes on from step {before.step}")


def _catch_up(state: State, job: JobRecord, gang: Gang, outcome: Outcome, now: float) -> bool:
    """Requeue a job from a newer checkpoint on storage, written while its node was cut off. Return whether the outcome
    reports one."""
    left = retry.usable(outcome.checkpoints, gang.epoch, job.unreadable)
    if not left or not retry.is_newer(left[0], job.checkpoint):
        return False
    job = retry.record(state, job, left[0], now, f"epoch:{gang.epoch}", left[1] if len(left) > 1 else None)
    requeue(state, job, now, outcome.message)
    return True


def requeue(state: State, job: JobRecord, now: float, reason: str) -> None:
    """Stop all gangs but a parked source; then the job waits again, or stays suspended if its user wanted that."""
    sources = [gang for gang in state.gangs.of_job(job.number) if gang_orders.is_usable(gang)]
    becomes = JobState.SUSPENDED if job.state is JobState.SUSPENDED else JobState.PENDING
    end(state, job.number, becomes, now, reason)
    for source in sources:
        state.put_gang(source)


def _rest_after_failure(state: State, job: JobRecord, source: Gang | None, now: float) -> None:
    """Keep a failed job suspended: on the parked source of its failed move, else on storage."""
    level = SuspendLevel.CHECKPOINT if source is None else SuspendLevel.OFFLOAD
    if source is not None:
        state.put_gang(gang_orders.park(state.gangs[source.epoch], level, now, by_plan=False))
    rests = SuspendLevel.NONE if source is not None else level
    state.put_job(replace(job, suspended_level=rests))


def _finish(state: State, job: JobRecord, now: float, cause: str) -> None:
    state.put_job(replace(job, end_time=now, epoch=0, capabilities=job.capabilities))
    figures = {"failure": job.failure.reason} if job.failure else {}
    state.history(now, job, f"job_{job.state.value.lower()}", cause, job.reason, **figures)
    if job.spec.array is not None:
        note_ended(state, job, job.spec.array, now, cause)
    forget(state, now)


def clock_stopped(job: JobRecord, now: float) -> JobRecord:
    if not job.running_since:
        return job
    # To the nanosecond, as messages have it: the rest is rounding of floats, and a planner would order jobs by it.
    run_s = round(job.run_s + max(0.0, now - job.running_since), 9)
    return replace(job, run_s=run_s, running_since=0.0)


def started(job: JobRecord, gang: Gang) -> JobRecord:
    """Return the job with a start time: when its gang got its place, if that ended before a step was reported."""
    return job if job.start_time else replace(job, start_time=gang.create_time)


def _is_users(outcome: Outcome) -> bool:
    if outcome.kind is OutcomeKind.LAUNCH_FAILED:
        # A command that cannot be executed has an exit code; a node that cannot launch has none.
        return outcome.exit_code != 0
    return outcome.kind in (OutcomeKind.FAILED, OutcomeKind.OUT_OF_MEMORY)


def _is_failed_start(gang: Gang, outcome: Outcome) -> bool:
    """Return whether an end counts as a failed start: a job that always ends so would be started for ever. A lost node
    does not count."""
    if outcome.kind in (OutcomeKind.LAUNCH_FAILED, OutcomeKind.STATE_OUTDATED):
        return True
    is_explained = outcome.kind not in (OutcomeKind.UNKNOWN, OutcomeKind.FENCED)
    return not is_explained and not gang.stepped and not any(piece.lost for piece in gang.pieces)


def _failure_of(gang: Gang, outcome: Outcome) -> Failure:
    reason = "EXIT" if outcome.kind is OutcomeKind.FAILED else outcome.kind.value
    message = outcome.message or f"rank {outcome.rank} ended with exit code {outcome.exit_code}"
    return Failure(reason, message, outcome.exit_code, outcome.rank, gang.epoch)


def note_ended(state: State, job: JobRecord, array: Membership, now: float, cause: str) -> None:
    """Record in the history of an array that this member has ended, and perhaps all of it."""
    progress = job.progress
    figures: dict[str, object] = {f"parameter_{name}": text for name, text in array.parameters.items()}
    if progress is not None:
        values = {LOSS: progress.loss, **{metric.name: metric.value for metric in progress.metrics}}
        figures.update({name: f"{value:.6g}" for name, value in values.items() if value is not None})
    subject, became = f"arrays/{array.array}", job.state.value.lower()
    figures.update(member=array.name, job=job.name, state=became)
    if job.start_time:
        figures["run_s"] = f"{job.run_s:.1f}"
    state.history(now, subject, "member_ended", cause, job.reason, **figures)
    if not _has_live(state.jobs, array):
        counts = Counter(member.state.value.lower() for member in members_of(state.jobs, array.array))
        state.history(now, subject, "array_ended", cause, "", **dict(sorted(counts.items())))


def _has_live(jobs: Mapping[int, JobRecord], array: Membership) -> bool:
    """Return whether a member has not ended. The last one comes first, because members usually end in their order."""
    members = (jobs.get(number) for number in range(array.array + array.size, array.array, -1))
    return any(member is not None and not member.state.is_finished for member in members)
