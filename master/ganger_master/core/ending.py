"""How an attempt ends, which budget pays for it, what its job becomes, and when it is tried again.

Finished jobs are kept within limits on their number and bytes. A repeated submission must be recognised for a while,
so the request id of a forgotten job is kept as long.

A job whose attempts fail by themselves is retried at once after the first failure, then after growing delays, so that
it spends its restarts neither in a minute nor on devices that others wait for. A level that failed once is withdrawn:
the next attempt would fail too, and end the job.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Final

from ganger.cluster.fit import demand
from ganger.job_state import JobState, deadline_outcome
from msgspec.structs import replace

from ganger_master.core import gang_orders
from ganger_master.core.array_model import LOSS, Membership
from ganger_master.core.gang_model import Gang, GangIntent, GangRole, Outcome, OutcomeKind
from ganger_master.core.job_model import (
    WHOLE_SHARE,
    Checkpoint,
    Failure,
    JobProgress,
    JobRecord,
    Request,
    SuspendLevel,
    members_of,
)
from ganger_master.core.lifecycle import bad_outcome
from ganger_master.core.node_faults import note_failed_launch, note_launched
from ganger_master.core.settings import CoreSettings
from ganger_master.core.state import State


def forget(state: State, now: float) -> None:
    """Forget the oldest finished jobs; one that holds something on a lost node stays until that is gone."""
    for number in _going(state):
        _forget_job(state, number, now)
    while state.jobs.former:
        oldest = next(iter(state.jobs.former.values()))
        if (
            now - oldest.time <= state.settings.request_kept_s
            and len(state.jobs.former) <= state.settings.former_requests_limit
        ):
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
    """Yield the numbers of ended jobs without gangs. Members of an array stay until all have ended. What other jobs
    depend on stays until that is settled."""
    unsettled = state.dirty.ended
    lives: dict[int, bool] = {}
    for number in state.jobs.finished:
        array = state.jobs[number].spec.array
        if number in state.gangs.epochs_of or number in unsettled or (array is not None and array.array in unsettled):
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
    if has_id and now - job.create_time <= state.settings.request_kept_s:
        state.put_request(Request(number, job.request_id, job.create_time, job.user))


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
        # Where it was moved from it continues at once.
        again_at=job.again_at if becomes is JobState.PENDING and source is None else 0.0,
        revision=job.revision + 1,
    )
    if source is not None:
        job = job.with_size_of(source.claims)
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
    """Handle a failed attempt. Its cause decides which budget pays; the job continues from its last checkpoint.

    The user's does not pay where a job ran out of memory with less than its share of it: it then gets the share."""
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
    if has_no_state(outcome) and job.checkpoint is not None and gang.restore.checkpoint_path:
        _rest_on_checkpoint(state, job, gang, job.checkpoint, outcome, now)
        return
    failure = _failure_of(gang, outcome)
    if outcome.kind is OutcomeKind.ESCALATED and gang.node_set:
        # The other gangs of its group waited until it was killed, and would wait again in every slice.
        job = replace(job, capabilities=job.capabilities.without_turns(_OUTSTAYED))
    is_ours = outcome.kind is OutcomeKind.OUT_OF_MEMORY and _had_less_than_its_share(state, job, gang)
    if is_ours:
        job = replace(job, working_set_bytes=WHOLE_SHARE)
    if _is_users(outcome) and not is_ours:
        if outcome.kind is not OutcomeKind.LAUNCH_FAILED:
            note_launched(state, gang)
            job = started(job, gang)
        job = note_failed_attempt(state.settings, replace(job, failures=job.failures + 1), now)
        state.put_job(job)
        if job.failures > job.spec.max_failures:
            end(state, job.number, JobState.FAILED, now, failure.message, failure)
            return
    else:
        failed = job.launch_failures + _is_failed_start(gang, outcome)
        job = replace(job, preemptions=job.preemptions + 1, launch_failures=failed)
        job = note_failed_launch(state, job, gang)
        state.put_job(job)
        if job.launch_failures > state.settings.launch_failures_allowed:
            end(state, job.number, JobState.FAILED, now, failure.message, failure)
            return
    requeue(state, job, now, failure.message)


def _had_less_than_its_share(state: State, job: JobRecord, gang: Gang) -> bool:
    """Return whether a gang held less host memory than its share: by what the job was measured to need, or as one of
    several that were to share its devices."""
    if job.working_set_bytes == WHOLE_SHARE:
        # It had it, or a start gave it less once more: no job starts for nothing again and again.
        return False
    whole = replace(job.shape, task_memory_bytes=0)
    return any(
        claim.memory_bytes < demand(state.view.topology(claim.node).configuration_set, whole, claim.tasks).memory_bytes
        for claim in gang.claims
        if claim.node in state.view.slots
    )


def _rest_on_checkpoint(
    state: State, job: JobRecord, gang: Gang, checkpoint: Checkpoint, outcome: Outcome, now: float
) -> None:
    """Keep a job suspended whose ranks could read a checkpoint and not come back to it: another try reads the same, and
    a failed job could not use the checkpoint any more."""
    note_launched(state, gang)
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
    # What the daemon found on its own disk is not all there is: the one before may lie on another node's.
    on_disks = [one for one in (job.checkpoint_before,) if one is not None and one.nodes]
    reported = [one for one in outcome.checkpoints if one.path not in [known.path for known in on_disks]]
    left = usable((*on_disks, *reported), gang.epoch, passed_over)
    before = left[0] if left else job.checkpoint_before
    figures = {"step": newest.step, "goes_on_from": before.step if before else "nowhere"}
    state.history(now, job, "checkpoint_unreadable", cause, outcome.message, epoch=gang.epoch, **figures)
    if before is None:
        text = f"{trouble}; there is no older checkpoint, and nothing was deleted"
        end(state, job.number, JobState.FAILED, now, text, Failure("NO_CHECKPOINT", text, epoch=gang.epoch))
        return
    second = left[1] if len(left) > 1 else None
    state.put_job(replace(job, checkpoint=before, checkpoint_before=second, unreadable=passed_over, trouble=trouble))
    if is_newer(before, newest):
        state.history(now, job, "checkpoint_complete", f"epoch:{gang.epoch}", step=before.step)
    requeue(state, job, now, f"{trouble}; it goes on from step {before.step}")


def _catch_up(state: State, job: JobRecord, gang: Gang, outcome: Outcome, now: float) -> bool:
    """Requeue a job from a newer checkpoint that its cut-off node wrote. Return whether the outcome reports one."""
    left = usable(outcome.checkpoints, gang.epoch, job.unreadable)
    if not left or not is_newer(left[0], job.checkpoint):
        return False
    job = record(state, job, left[0], now, f"epoch:{gang.epoch}", left[1] if len(left) > 1 else None)
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
    if outcome := deadline_outcome(job.state, job.spec.deadline, now, is_over=True):
        figures["deadline"] = outcome.value
    if job.state is JobState.SUCCEEDED and (unreported := _unreported(job)):
        state.history(now, job, "rule_unused", cause, f"no {unreported} was reported", metric=unreported)
    state.history(now, job, f"job_{job.state.value.lower()}", cause, job.reason, **figures)
    if job.spec.array is not None:
        note_ended(state, job, job.spec.array, now, cause)
    forget(state, now)


def clock_stopped(job: JobRecord, now: float) -> JobRecord:
    if not job.running_since:
        return job
    # To the nanosecond, as messages have it: the rest is rounding of floats, and a planner would order jobs by it.
    return replace(job, run_s=round(job.ran_s(now), 9), running_since=0.0)


def started(job: JobRecord, gang: Gang) -> JobRecord:
    """Return the job with a start time: when its gang got its place, if that ended before a step was reported."""
    return job if job.start_time else replace(job, start_time=gang.create_time)


def _is_users(outcome: Outcome) -> bool:
    if outcome.kind is OutcomeKind.LAUNCH_FAILED:
        # A command that cannot be executed has an exit code; a node that cannot launch has none.
        return outcome.exit_code != 0
    return outcome.kind in (OutcomeKind.FAILED, OutcomeKind.OUT_OF_MEMORY)


def _is_failed_start(gang: Gang, outcome: Outcome) -> bool:
    """Return whether an end counts as a failed start: else the job would be started for ever. A lost node does not."""
    if outcome.kind in (OutcomeKind.LAUNCH_FAILED, OutcomeKind.STATE_OUTDATED):
        # A node whose prolog has failed is cordoned: the job starts on another one.
        return not outcome.node_fault
    is_explained = outcome.kind not in (OutcomeKind.UNKNOWN, OutcomeKind.FENCED)
    return not is_explained and not gang.stepped and not any(piece.lost for piece in gang.pieces)


def _failure_of(gang: Gang, outcome: Outcome) -> Failure:
    reason = "EXIT" if outcome.kind is OutcomeKind.FAILED else outcome.kind.value
    message = outcome.message or f"rank {outcome.rank} ended with exit code {outcome.exit_code}"
    return Failure(reason, message, outcome.exit_code, outcome.rank, gang.epoch)


def _unreported(job: JobRecord) -> str:
    """Return the metric of its array's stop rule that an ended job has never reported; "" if it has, or has none."""
    rule, progress = job.spec.array.rule if job.spec.array is not None else None, job.progress
    if rule is None or job.rungs:
        return ""
    names = [] if progress is None else [metric.name for metric in progress.metrics]
    if progress is not None and progress.loss is not None:
        names.append(LOSS)
    return "" if rule.metric in names else rule.metric


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


def note_failed_attempt(settings: CoreSettings, job: JobRecord, now: float) -> JobRecord:
    """Record a failed attempt; one that ran for long begins the count anew."""
    ran = now - job.running_since if job.running_since else 0.0
    in_row = 1 if ran >= settings.restart_reset_s else job.failed_in_row + 1
    delay = delay_after(settings, in_row)
    return replace(job, failed_in_row=in_row, again_at=now + delay if delay else 0.0)


def delay_after(settings: CoreSettings, failed_in_row: int) -> float:
    """Return the backoff in seconds after that many failures in a row."""
    if failed_in_row < 2:
        return 0.0
    # No more doublings than any limit has.
    return min(settings.restart_delay_most_s, settings.restart_delay_s * 2.0 ** min(failed_in_row - 2, 30))


def let_go_on(state: State, now: float) -> None:
    """Requeue jobs whose backoff is over."""
    for number in list(state.jobs.backing_off):
        job = state.jobs[number]
        # A clock that was set back must not prolong it.
        is_beyond = job.again_at - now > state.settings.restart_delay_most_s
        if now >= job.again_at or is_beyond:
            state.put_job(replace(job, again_at=0.0, pending_since=now, revision=job.revision + 1))


def is_backing_off(job: JobRecord) -> bool:
    return bool(job.again_at) and job.state is JobState.PENDING and job.ending is None


def ends_at(state: State, job: JobRecord) -> float | None:
    """Return when a job's time limit ends it; None if it has none, or neither runs nor starts."""
    limit = job.time_limit_s
    since = 0.0 if limit is None else runs_since(job, state.gangs.get(job.epoch))
    return None if limit is None or not since else since + limit - job.run_s


def counted_s(state: State, job: JobRecord, now: float) -> float:
    """Return the seconds that count against the job's time limit by now."""
    return job.ran_s(now, runs_since(job, state.gangs.get(job.epoch)))


def failure_of(job: JobRecord) -> Failure:
    done = "ran for" if job.running_since else "did not come to a step within"
    return Failure("TIME_LIMIT", f"{done} its time limit of {job.time_limit_s:g} s", epoch=job.epoch)


def runs_since(job: JobRecord, gang: Gang | None) -> float:
    """Return since when a job runs, or since when all processes of its present start exist: one that hangs before its
    first step must not keep its devices for ever. Zero while they do not, or it is parked."""
    if job.running_since or gang is None or gang.intent is not GangIntent.RUN:
        return job.running_since
    launches = [piece.launch_time for piece in gang.pieces]
    return max(gang.since, *launches) if all(launches) else 0.0


# A rank's exit code where it could not bring back the state that it was given.
_NO_STATE = 77


def has_no_state(outcome: Outcome) -> bool:
    """Return whether a rank ended because it could not bring back the state that it was given."""
    return outcome.kind is OutcomeKind.FAILED and outcome.exit_code == _NO_STATE


# After so many unreadable checkpoints in a row, a job is given no other one.
UNREADABLE_MOST: Final = 16


def is_newer(one: Checkpoint | JobProgress, other: Checkpoint | JobProgress | None) -> bool:
    """Return whether a checkpoint, or progress, is newer than `other`. The later epoch counts first, then the step: an
    attempt may have had to start from before a damaged checkpoint."""
    return other is None or (one.epoch, one.step) > (other.epoch, other.step)


def record(
    state: State, job: JobRecord, checkpoint: Checkpoint, now: float, cause: str, before: Checkpoint | None = None
) -> JobRecord:
    """Record a complete checkpoint that is newer than the known one. `before`: the one to fall back to; by default the
    known one. Return the changed job."""
    unreadable = () if checkpoint.epoch == job.epoch else job.unreadable
    job = replace(
        job, checkpoint=checkpoint, checkpoint_before=before or job.checkpoint, unreadable=unreadable, trouble=""
    )
    state.put_job(job)
    state.history(now, job, "checkpoint_complete", cause, step=checkpoint.step)
    return job


def usable(found: Iterable[Checkpoint], epoch: int, unreadable: Collection[str]) -> list[Checkpoint]:
    """Return the checkpoints that an attempt of this epoch may start from, the newest first.

    `found`: those that a daemon found on storage. `unreadable`: paths that are known to be unreadable."""
    if len(unreadable) >= UNREADABLE_MOST:
        return []
    earlier = [one for one in found if one.epoch < epoch and one.path not in unreadable]
    return sorted(earlier, key=lambda one: (one.epoch, one.step), reverse=True)
