"""How the attempts of one job go on: start, rest, move, fail, end. Level-triggered: `review` looks at what is there.

Whatever happened, `review` draws the consequences for one job until nothing follows any more; asked twice it does
nothing the second time.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from ganger_master.core import finished, memberships, orders, sharing
from ganger_master.core.lifecycle import Act, Seen, act_of, bad_outcome, is_refused, seen_of
from ganger_master.core.model import (
    Checkpoint,
    Claim,
    Failure,
    Gang,
    GangPhase,
    GangRole,
    Intent,
    Job,
    JobState,
    Level,
    Outcome,
    OutcomeKind,
    Restore,
    SuspendLevel,
)
from ganger_master.core.purpose import NO_PURPOSE, Purpose
from ganger_master.core.sizes import devices_of
from ganger_master.core.state import State
from ganger_master.core.worlds import begin_with, can_go_back, share_pieces

# More consequences than gangs and orders one job can have mean a rule that feeds itself.
_ROUNDS_LIMIT = 64
# Of those who made room.
_NAMED = 10


def review(state: State, number: int, now: float, cause: str) -> None:
    """Draws every consequence for a job."""
    for _ in range(_ROUNDS_LIMIT):
        if not _review_once(state, number, now, cause):
            return
    raise AssertionError(f"jobs/{number} does not come to rest")


def start(state: State, number: int, claims: Sequence[Claim], level: Level, now: float, cause: str) -> int:
    """A PENDING job got a gang: in place from its parked pieces, by a move from them, or afresh. Its epoch."""
    job = state.jobs[number]
    waited, why = _waited(state, job, claims, now)
    parked = state.gangs.get(job.epoch)
    epoch = job.epoch if parked is not None else state.take_epoch()
    job = replace(job, state=JobState.HOLDING, revision=job.revision + 1, pending_since=0.0, epoch=epoch)
    if parked is None:
        gpus = devices_of(claims)
        job = replace(job, gpus_given=0 if gpus == job.spec.gpus else gpus)
        version = state.next_desired_version
        state.put_gang(orders.new_gang(epoch, number, claims, level, now, GangRole.ACTIVE, _restore(job), version))
        state.put_job(job)
        # Nothing follows from a gang that nobody has heard of.
        state.dirty.jobs.pop(number, None)
    elif orders.same_place(parked.claims, claims) and not _is_superseded(state, parked):
        state.put_gang(orders.run(orders.holding(parked, claims), now))
        state.put_job(job)
    elif devices_of(claims) != parked.devices:
        epoch = begin_with(state, job, parked, claims, level, now)
    else:
        state.put_job(job)
        epoch = _begin_move(state, job, parked, claims, level, now)
    nodes = " ".join([c.node for c in claims])
    state.history(now, job.name, "gang_approved", cause, why, epoch=epoch, nodes=nodes, **waited)
    return epoch


def begin_move(
    state: State,
    number: int,
    claims: Sequence[Claim],
    level: Level,
    now: float,
    cause: str,
    purpose: Purpose = NO_PURPOSE,
) -> int:
    """A running job, or one that a plan has parked, is to go on elsewhere; who runs, runs until the destination is
    prepared."""
    job = replace(state.jobs[number], revision=state.jobs[number].revision + 1, trouble="")
    source = state.gangs[job.epoch]
    if source.phase is not GangPhase.PARKED:
        state.put_gang(replace(source, phase=GangPhase.MOVING))
    epoch = _begin_move(state, job, source, claims, level, now, purpose)
    nodes = " ".join(c.node for c in claims)
    state.history(now, job.name, "move_begun", cause, epoch=epoch, nodes=nodes, **purpose.figures)
    return epoch


def suspend(
    state: State,
    number: int,
    level: SuspendLevel,
    now: float,
    cause: str,
    by_plan: bool,
    purpose: Purpose = NO_PURPOSE,
) -> None:
    """Stops at a boundary, at this level; a PENDING job just rests where it is."""
    job = state.jobs[number]
    gang = state.gangs.get(job.epoch)
    if job.ending is JobState.PENDING:
        # Its attempt is ending anyhow: it will rest instead of waiting again.
        state.put_job(replace(job, state=JobState.SUSPENDED, ending=JobState.SUSPENDED, suspend_wanted=level))
        return
    if not by_plan:
        job = replace(job, state=JobState.SUSPENDED, suspend_wanted=level, suspended_level=SuspendLevel.NONE)
    job = replace(_clock_stopped(job, now), revision=job.revision + 1, pending_since=0.0, trouble="")
    if gang is None:
        state.put_job(replace(job, suspend_wanted=SuspendLevel.CHECKPOINT, suspended_level=SuspendLevel.CHECKPOINT))
    elif gang.phase is GangPhase.PARKED and gang.park_level >= level:
        state.put_job(replace(job, suspend_wanted=gang.park_level, suspended_level=gang.park_level))
    else:
        # Who waits where it rests waits again once it rests deeper, or cannot: it rests for no plan.
        waits = job.state is JobState.PENDING
        state.put_gang(replace(orders.park(gang, level, now, by_plan and not waits), purpose=purpose))
        state.put_job(replace(job, state=JobState.HOLDING) if waits else job)
    state.history(now, job.name, "suspend_ordered", cause, level=level.name, **purpose.figures)


def resume(state: State, number: int, now: float, cause: str, purpose: Purpose = NO_PURPOSE) -> None:
    """Runs at once if it still holds its devices, else waits for a gang."""
    job = state.jobs[number]
    gang = state.gangs.get(job.epoch)
    if job.ending is JobState.SUSPENDED:
        # On its way to storage: it waits again once it is there.
        state.put_job(replace(job, state=JobState.HOLDING, ending=JobState.PENDING, suspend_wanted=SuspendLevel.NONE))
        return
    job = replace(job, revision=job.revision + 1, suspend_wanted=SuspendLevel.NONE, suspended_level=SuspendLevel.NONE)
    if gang is not None and gang.parked_by_plan and job.state is JobState.HOLDING:
        state.put_gang(orders.run(orders.holding(gang, gang.claims), now))
        state.put_job(job)
    elif gang is not None and _is_superseded(state, gang) and orders.holds_devices(gang):
        _go_back(state, job, gang, now, cause)
    elif gang is not None and not _is_superseded(state, gang) and _may_run_on(gang):
        state.put_gang(orders.run(gang, now))
        state.put_job(replace(job, state=JobState.HOLDING))
    else:
        if gang is not None and gang.phase is not GangPhase.PARKED:
            # A copy that was moved away from, on its way to a higher level: it rests where it stands.
            state.put_gang(orders.rested(orders.park(gang, SuspendLevel.PAUSE, now, by_plan=False), now))
        state.put_job(replace(job, state=JobState.PENDING, pending_since=now))
    state.history(now, job.name, "resume_ordered", cause, **purpose.figures)


def end(
    state: State,
    number: int,
    becomes: JobState,
    now: float,
    reason: str,
    failure: Failure | None = None,
    checkpoint_first: bool = False,
) -> None:
    """Stops every gang of the job; once all are gone it becomes that. A final end stands against any other."""
    job = state.jobs[number]
    if job.ending is not None and job.ending.is_final:
        return
    for gang in state.gangs_of_job(number):
        state.put_gang(orders.stop(gang, reason, now, checkpoint_first))
    job = replace(_clock_stopped(job, now), ending=becomes, failure=failure, reason=reason, next_epoch=0)
    # Where it rested is among what is stopped.
    job = replace(job, suspended_level=SuspendLevel.NONE)
    state.put_job(replace(job, revision=job.revision + 1, pending_since=0.0))


def give_up_move(state: State, number: int, now: float, cause: str) -> None:
    """The destination took too long."""
    job = state.jobs[number]
    _abort(state, job, state.gangs[job.next_epoch], now, cause, "the destination was not ready in time")


def can_hand_over(job: Job) -> bool:
    """Whether its state can be captured at all, to be carried elsewhere, and brought back in another process."""
    offered = job.capabilities
    return (offered.offload or offered.checkpoint) and "MOVE" not in offered.missing


# -- consequences ------------------------------------------------------------------------------------------------------


def _review_once(state: State, number: int, now: float, cause: str) -> bool:
    job = state.jobs.get(number)
    if job is None:
        return False
    gangs = state.gangs_of_job(number)
    if share_pieces(state, job, gangs):
        return True
    # They stand until something changes, and then all is looked at again.
    acts = [act_of(gang) for gang in gangs]
    for gang, act in zip(gangs, acts, strict=True):
        if act is Act.FORGET and all(piece.held is None for piece in gang.pieces):
            _forget(state, job, gang, now)
            return True
    if job.ending is not None:
        if all(gang.is_gone or gang.role is GangRole.SOURCE for gang in gangs):
            _complete(state, job, gangs, now, cause)
            return True
        return False
    for gang, act in zip(gangs, acts, strict=True):
        if act is not Act.WAIT and gang.role is not GangRole.LEAVING and _follow(state, job, gang, act, now, cause):
            return True
    return False


def _follow(state: State, job: Job, gang: Gang, act: Act, now: float, cause: str) -> bool:
    """Carries out what the table says of one gang; False when nothing changed."""
    if gang.role is GangRole.SOURCE:
        # Committed elsewhere: its loss costs nothing unless the new gang fails too.
        if act in (Act.FAIL, Act.SUCCEED):
            state.put_gang(orders.stop(gang, "source lost", now))
            return True
        return False
    match act:
        case Act.STEPPED:
            return gang.role is GangRole.ACTIVE and _stepped(state, job, gang, now, cause)
        case Act.HAND_OVER:
            return _let_hand_over(state, job)
        case Act.COMMIT:
            return _commit(state, job, now, cause)
        case Act.ABORT:
            _abort(state, job, gang, now, cause)
            return True
        case Act.REST:
            return _rest(state, job, gang, now, cause)
        case Act.STAY:
            _stay(state, job, gang, now, cause)
            return True
        case Act.SUCCEED:
            state.history(now, job.name, "gang_done", cause, epoch=gang.epoch)
            state.put_job(_started(job, gang))
            end(state, job.number, JobState.SUCCEEDED, now, "every rank has finished")
            return True
        case Act.FAIL:
            _fail(state, job, gang, now, cause)
            return True
        case _:
            return False


def _stepped(state: State, job: Job, gang: Gang, now: float, cause: str) -> bool:
    if gang.phase is GangPhase.STARTING:
        state.put_gang(replace(gang, phase=GangPhase.RUNNING, stepped=True, since=now))
        state.history(now, job.name, "gang_running", cause, epoch=gang.epoch)
        pause = 0.0 if gang.stepped else _pause_of_move(state, gang)
        if pause:
            figures = {"pause_ms": f"{1000 * pause:.1f}", **gang.purpose.figures}
            kind = "resize_done" if gang.resizes else "move_done"
            state.history(now, job.name, kind, cause, epoch=gang.epoch, **figures)
        state.put_job(
            replace(
                job,
                move_pause_seconds=pause or job.move_pause_seconds,
                start_time=job.start_time or now,
                running_since=job.running_since or now,
                launch_failures=0,
                moves_aborted=0,
            )
        )
        return True
    return _reap_sources(state, job, now)


def _pause_of_move(state: State, gang: Gang) -> float:
    """Seconds from the last step where it came from to the first one here, of the slowest ranks; zero if it did not
    move, or nobody said. Clocks of nodes differ a little."""
    source = state.gangs.get(gang.restore.parked_epoch)
    if source is None or source.role is not GangRole.SOURCE:
        return 0.0
    last = max(piece.last_step_time for piece in source.pieces)
    first = max(piece.first_step_time for piece in gang.pieces)
    return max(0.001, first - last) if last and first else 0.0


def _reap_sources(state: State, job: Job, now: float) -> bool:
    """The new gang has the state and used it: the copies it came from may go."""
    sources = [other for other in state.gangs_of_job(job.number) if other.role is GangRole.SOURCE]
    for source in sources:
        state.put_gang(orders.stop(source, "moved away", now))
    return bool(sources)


def _let_hand_over(state: State, job: Job) -> bool:
    source = state.gangs[job.epoch]
    if source.intent is not Intent.RUN:
        return False
    state.put_gang(orders.hand_over(source))
    return True


def _commit(state: State, job: Job, now: float, cause: str) -> bool:
    """Both sides are ready at the same boundary: from here on only the new epoch may step. A destination that is ready
    with the state of another one is given up."""
    source, destination = state.gangs.get(job.epoch), state.gangs.get(job.next_epoch)
    if source is None or destination is None or seen_of(destination) is not Seen.READY:
        return False
    if seen_of(source) is not Seen.PARKED or source.intent not in (Intent.HAND_OVER, Intent.PARK):
        return False
    step = source.pieces[0].stop_step
    for piece in destination.pieces:
        if piece.stop_step == step:
            continue
        if piece.stop_step:
            where = f"nodes/{piece.claim.node} has the state of step {piece.stop_step}"
            _abort(state, job, destination, now, cause, f"{where}, not that of step {step}, where the source stopped")
            return True
        # It has not said yet which state it has.
        return False
    state.put_gang(replace(source, role=GangRole.SOURCE, phase=GangPhase.PARKED, stop_step=step))
    state.put_gang(orders.run(destination, now))
    gpus = destination.devices
    state.put_job(
        replace(
            _clock_stopped(job, now),
            gpus_given=0 if gpus == job.spec.gpus else gpus,
            epoch=destination.epoch,
            next_epoch=0,
            moved_from=source.epoch,
            revision=job.revision + 1,
        )
    )
    kind = "resize_committed" if destination.resizes else "move_committed"
    state.history(now, job.name, kind, cause, epoch=destination.epoch, source=source.epoch, step=step)
    return True


def _abort(state: State, job: Job, gang: Gang, now: float, cause: str, why: str = "") -> None:
    """Before the commit: the destination goes, the source runs on, or stays parked while its job waits again."""
    source, destination = state.gangs[job.epoch], state.gangs[job.next_epoch]
    trouble = why or next((piece.trouble for piece in gang.pieces if piece.trouble), "") or bad_outcome(gang).message
    state.put_gang(orders.stop(destination, f"move given up: {trouble}", now))
    job = replace(job, next_epoch=0, moves_aborted=job.moves_aborted + 1, revision=job.revision + 1)
    if can_go_back(source) and not _is_superseded(state, source):
        phase = GangPhase.RUNNING if source.stepped else GangPhase.STARTING
        state.put_gang(replace(source, phase=phase) if source.intent is Intent.RUN else orders.run(source, now))
        state.put_job(job)
    elif job.moves_aborted > state.settings.moves_aborted_allowed and job.checkpoint is not None:
        # The parked copy cannot be brought back anywhere: better to lose steps than to try for ever.
        state.put_job(job)
        _requeue(state, job, now, f"parked copy could not be used: {trouble}")
    else:
        state.put_job(replace(_clock_stopped(job, now), state=JobState.PENDING, pending_since=now))
    kind = "resize_aborted" if destination.resizes else "move_aborted"
    state.history(now, job.name, kind, cause, trouble, epoch=destination.epoch)


def _rest(state: State, job: Job, gang: Gang, now: float, cause: str) -> bool:
    if gang.phase is GangPhase.PARKED:
        # At rest already; a destination prepared from it may be ready by now.
        return _commit(state, job, now, cause)
    _reap_sources(state, job, now)
    level = gang.park_level
    step = max(piece.stop_step for piece in gang.pieces)
    if level is SuspendLevel.CHECKPOINT:
        by_user = job.state is JobState.SUSPENDED
        if not by_user:
            state.put_job(replace(job, preemptions=job.preemptions + 1))
        end(state, job.number, JobState.SUSPENDED if by_user else JobState.PENDING, now, "rests on storage")
    else:
        state.put_gang(orders.rested(gang, now))
        if level is SuspendLevel.OFFLOAD:
            _note_left(state, gang, now)
        if job.state is JobState.SUSPENDED:
            state.put_job(replace(job, suspended_level=level, revision=job.revision + 1))
    state.history(now, job.name, "gang_parked", cause, epoch=gang.epoch, level=level.name, step=step)
    return True


def _stay(state: State, job: Job, gang: Gang, now: float, cause: str) -> None:
    """The level wanted cannot be had: it rests where it rested before, else it goes on. Nothing is lost."""
    trouble = next(piece.trouble for piece in gang.pieces if is_refused(gang, piece))
    if job.next_epoch:
        # An old world that was to make room for another, and cannot: both stay as they were.
        _abort(state, job, gang, now, cause, trouble)
        return
    figures = {"level": gang.park_level.name}
    state.history(now, job.name, "suspend_refused", cause, trouble, epoch=gang.epoch, **figures)
    # What was moved away may never step again, so it stands where it is.
    back = gang.rested_level or (SuspendLevel.PAUSE if _is_superseded(state, gang) else SuspendLevel.NONE)
    gang = replace(gang, refused_at=now)
    job = replace(job, revision=job.revision + 1, trouble=trouble)
    if back is not SuspendLevel.NONE and job.state is JobState.HOLDING and not gang.parked_by_plan:
        # It waited where it rests.
        state.put_gang(orders.rested(orders.park(gang, back, now, by_plan=False), now))
        state.put_job(replace(job, state=JobState.PENDING, pending_since=now))
    elif back is not SuspendLevel.NONE:
        state.put_gang(orders.park(gang, back, now, gang.parked_by_plan))
        state.put_job(replace(job, suspend_wanted=back) if job.state is JobState.SUSPENDED else job)
    else:
        state.put_gang(orders.run(gang, now))
        state.put_job(replace(job, state=JobState.HOLDING, suspend_wanted=SuspendLevel.NONE))


def _fail(state: State, job: Job, gang: Gang, now: float, cause: str) -> None:
    """The attempt has failed. Who is to blame decides which budget pays; the job goes on from its last checkpoint."""
    outcome = bad_outcome(gang)
    state.history(
        now, job.name, "attempt_failed", cause, outcome.message, epoch=gang.epoch, outcome=outcome.kind,
        exit_code=outcome.exit_code, rank=outcome.rank,
    )  # fmt: skip
    if outcome.kind is OutcomeKind.STATE_UNREADABLE and job.checkpoint is not None:
        _fall_back(state, job, gang, job.checkpoint, outcome, now, cause)
        return
    failure = _failure_of(gang, outcome)
    if _is_users(outcome):
        began = job if outcome.kind is OutcomeKind.LAUNCH_FAILED else _started(job, gang)
        job = replace(began, failures=job.failures + 1)
        state.put_job(job)
        if job.failures > job.spec.max_failures:
            end(state, job.number, JobState.FAILED, now, failure.message, failure)
            return
    else:
        launches = job.launch_failures + (outcome.kind is OutcomeKind.LAUNCH_FAILED)
        job = replace(job, preemptions=job.preemptions + 1, launch_failures=launches)
        state.put_job(job)
        if launches > state.settings.launch_failures_allowed:
            end(state, job.number, JobState.FAILED, now, failure.message, failure)
            return
    _requeue(state, job, now, failure.message)


def _fall_back(
    state: State, job: Job, gang: Gang, newest: Checkpoint, outcome: Outcome, now: float, cause: str
) -> None:
    """A checkpoint is damaged or gone: on from the complete one before it, steps back but never from the beginning."""
    if gang.restore.checkpoint_path != newest.path:
        # A newer one is there by now.
        _requeue(state, job, now, outcome.message)
        return
    # Of two damaged ones both are named.
    earlier = [job.trouble] if job.trouble.startswith(f"{OutcomeKind.STATE_UNREADABLE}:") else []
    trouble = "; ".join([*earlier, f"{OutcomeKind.STATE_UNREADABLE}: {outcome.message}"])
    before = job.checkpoint_before
    figures = {"step": newest.step, "goes_on_from": before.step if before else "nowhere"}
    state.history(now, job.name, "checkpoint_unreadable", cause, outcome.message, epoch=gang.epoch, **figures)
    if before is None:
        text = f"{trouble}; there is no older checkpoint, and nothing was deleted"
        end(state, job.number, JobState.FAILED, now, text, Failure("NO_CHECKPOINT", text, epoch=gang.epoch))
        return
    passed_over = (*job.unreadable, newest.path)
    state.put_job(replace(job, checkpoint=before, checkpoint_before=None, unreadable=passed_over, trouble=trouble))
    _requeue(state, job, now, f"{trouble}; it goes on from step {before.step}")


def _requeue(state: State, job: Job, now: float, reason: str) -> None:
    """All gangs but a parked source go; then the job waits again, or rests if its user wanted that."""
    sources = [gang for gang in state.gangs_of_job(job.number) if _is_usable_source(gang)]
    becomes = JobState.SUSPENDED if job.state is JobState.SUSPENDED else JobState.PENDING
    end(state, job.number, becomes, now, reason)
    for source in sources:
        state.put_gang(source)


def _is_usable_source(gang: Gang) -> bool:
    return gang.role is GangRole.SOURCE and gang.phase is GangPhase.PARKED and seen_of(gang) is Seen.PARKED


def _complete(state: State, job: Job, gangs: Sequence[Gang], now: float, cause: str) -> None:
    """Every gang that could step is gone: the job becomes what was decided."""
    becomes = job.ending
    assert becomes is not None
    source = next((gang for gang in gangs if gang.role is GangRole.SOURCE), None)
    if source is not None and (becomes.is_final or not _is_usable_source(source)):
        state.put_gang(orders.stop(source, "not needed any more", now))
        return
    job = replace(
        job,
        ending=None,
        state=becomes,
        epoch=source.epoch if source else 0,
        next_epoch=0,
        revision=job.revision + 1,
    )
    if source is not None:
        job = replace(job, gpus_given=0 if source.devices == job.spec.gpus else source.devices)
        state.put_gang(replace(source, role=GangRole.ACTIVE))
    if becomes.is_final:
        _finish(state, job, now, cause)
    elif becomes is JobState.SUSPENDED:
        _rest_after_failure(state, job, source, now)
    elif source is not None and orders.holds_devices(source):
        state.put_job(job)
        _go_back(state, job, state.gangs[source.epoch], now, cause)
    else:
        state.put_job(replace(job, pending_since=now))
        state.history(now, job.name, "job_pending", cause, job.reason)


def _rest_after_failure(state: State, job: Job, source: Gang | None, now: float) -> None:
    """The user wants it to rest: on the parked copy a failed move left, else on storage."""
    level = SuspendLevel.CHECKPOINT if source is None else SuspendLevel.OFFLOAD
    if source is not None:
        state.put_gang(orders.park(state.gangs[source.epoch], level, now, by_plan=False))
    rests = SuspendLevel.NONE if source is not None else level
    state.put_job(replace(job, suspended_level=rests, suspend_wanted=level))


def _finish(state: State, job: Job, now: float, cause: str) -> None:
    state.put_job(replace(job, end_time=now, epoch=0, capabilities=job.capabilities))
    figures = {"failure": job.failure.reason} if job.failure else {}
    state.history(now, job.name, f"job_{job.state.value.lower()}", cause, job.reason, **figures)
    if job.spec.array is not None:
        memberships.note_ended(state, job, job.spec.array, now, cause)
    finished.forget(state, now)


def _go_back(state: State, job: Job, source: Gang, now: float, cause: str) -> None:
    """A move failed after its commit and its destination is dead: the parked source runs again, as a newer epoch."""
    job = replace(job, state=JobState.HOLDING)
    state.put_gang(orders.holding_nothing(source))
    source = state.gangs[source.epoch]
    epoch = _begin_move(state, job, source, source.claims, source.level, now)
    state.history(now, job.name, "move_back", cause, epoch=epoch, source=source.epoch)


def _begin_move(
    state: State,
    job: Job,
    source: Gang,
    claims: Sequence[Claim],
    level: Level,
    now: float,
    purpose: Purpose = NO_PURPOSE,
) -> int:
    epoch = state.take_epoch()
    restore = Restore(parked_epoch=source.epoch, step=source.stop_step)
    version = state.next_desired_version
    destination = orders.new_gang(epoch, job.number, claims, level, now, GangRole.DESTINATION, restore, version)
    state.put_gang(replace(destination, purpose=purpose))
    state.put_job(replace(job, next_epoch=epoch))
    return epoch


def _waited(state: State, job: Job, claims: Sequence[Claim], now: float) -> tuple[dict[str, str], str]:
    """How long it waited, who left its nodes meanwhile, and why it was last refused: for its history."""
    if not job.pending_since:
        return {}, ""
    figures = {"waited_s": f"{now - job.pending_since:.3f}"}
    refusals = state.blockers_of(job.number)
    left = [state.left_by[claim.node] for claim in claims if claim.node in state.left_by]
    after = sorted({number for number, time in left if time >= job.pending_since and number != job.number})
    if after:
        figures["after"] = " ".join([f"jobs/{number}" for number in after[:_NAMED]])
    return figures, refusals[0].message if refusals else ""


def _note_left(state: State, gang: Gang, now: float) -> None:
    for piece in gang.pieces:
        if piece.claim.device_mask:
            state.left_by[piece.claim.node] = (gang.job, now)


def _forget(state: State, job: Job, gang: Gang, now: float) -> None:
    _note_left(state, gang, now)
    state.forget_gang(gang.epoch)
    sharing.leave(state, gang)
    if job.epoch == gang.epoch:
        state.put_job(replace(job, epoch=0))


def _is_superseded(state: State, gang: Gang) -> bool:
    """A newer epoch of the job was committed after it: it may be read, never run."""
    return state.jobs[gang.job].moved_from >= gang.epoch


def _may_run_on(gang: Gang) -> bool:
    """What is not at rest yet has given nothing up, but for parts that have ended."""
    return gang.phase is not GangPhase.PARKED or orders.holds_devices(gang)


def _restore(job: Job) -> Restore:
    if job.checkpoint is None:
        return Restore()
    return Restore(checkpoint_path=job.checkpoint.path, step=job.checkpoint.step)


def _clock_stopped(job: Job, now: float) -> Job:
    if not job.running_since:
        return job
    return replace(job, run_seconds=job.run_seconds + max(0.0, now - job.running_since), running_since=0.0)


def _started(job: Job, gang: Gang) -> Job:
    """A gang that was over before anybody saw it step ran all the same: at the earliest since it had its place."""
    return job if job.start_time else replace(job, start_time=gang.create_time)


def _is_users(outcome: Outcome) -> bool:
    if outcome.kind is OutcomeKind.LAUNCH_FAILED:
        # A command that cannot be executed has an exit code; a node that cannot launch has none.
        return outcome.exit_code != 0
    return outcome.kind in (OutcomeKind.FAILED, OutcomeKind.OUT_OF_MEMORY)


def _failure_of(gang: Gang, outcome: Outcome) -> Failure:
    reason = "EXIT" if outcome.kind is OutcomeKind.FAILED else outcome.kind.value
    message = outcome.message or f"rank {outcome.rank} ended with exit code {outcome.exit_code}"
    return Failure(reason, message, outcome.exit_code, outcome.rank, gang.epoch)
