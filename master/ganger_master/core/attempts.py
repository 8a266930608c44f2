"""The attempts of one job: start, park, resume. Level-triggered: `review` compares desired with observed state."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ganger.cluster.resources import Claim
from ganger.job_state import JobState
from ganger.protocol.gang_orders import Mechanism
from msgspec.structs import replace

from ganger_master.core import colocation, ending, gang_orders, moves, node_checkpoints, node_faults
from ganger_master.core.elastic import begin_with, devices_of, share_pieces
from ganger_master.core.events import GangApproved, JobResumed, JobSuspended
from ganger_master.core.gang_model import Gang, GangIntent, GangPhase, GangRole, Restore
from ganger_master.core.job_model import Failure, JobRecord, SuspendLevel, starting_anew
from ganger_master.core.lifecycle import Act, act_of, is_refused
from ganger_master.core.node_faults import emptying_figures
from ganger_master.core.plan_changes import Goal
from ganger_master.core.state import State

# More consequences than gangs and orders one job can have mean a rule that feeds itself.
_ROUNDS_LIMIT = 64
# Jobs that the history names as having made room.
_NAMED = 10
# To look up a member of an enumeration takes Python 3.11 as long as a call, and these are compared in every review.
_FORGET, _WAIT, _STEPPED, _REST = Act.FORGET, Act.WAIT, Act.STEPPED, Act.REST
# Why a job rests that was suspended for it, once its gang has gone.
_NOT_USED = "it was suspended because it did not use its GPUs"
_LEAVING, _SOURCE = GangRole.LEAVING, GangRole.SOURCE


def review(state: State, number: int, now: float, cause: str) -> None:
    """Draw every consequence for a job."""
    for _ in range(_ROUNDS_LIMIT):
        if not _review_once(state, number, now, cause):
            return
    raise AssertionError(f"jobs/{number} does not come to rest")


def start(state: State, event: GangApproved) -> int:
    """Start a PENDING job: in place from its parked gang, by a move from that, or afresh. Return its epoch."""
    number, claims, level, now, cause = event.number, event.claims, event.level, event.time, event.cause
    job = state.jobs[number]
    state.leases.drop(number)
    state.leases.lost_turns.pop(number, None)
    state.counters.approved += 1
    # While the job still waits, and only where its history is read.
    waited, why = _waited(state, job, claims, now) if state.unstored.is_kept else ({}, "")
    parked = state.gangs.get(job.epoch)
    epoch, gpus = job.epoch, devices_of(claims)
    job = replace(job, state=JobState.HOLDING, revision=job.revision + 1, pending_since=0.0, again_at=0.0)
    if parked is None:
        job = _without_removed_checkpoints(state, job, now, cause)
        restore = Restore()
        if job.checkpoint is not None:
            restore = Restore(checkpoint_path=job.checkpoint.path, step=job.checkpoint.step)
        gang = gang_orders.new_gang(state, number, claims, level, now, GangRole.ACTIVE, restore)
        epoch = gang.epoch
        if job.checkpoint is None or job.capabilities.mechanism is not Mechanism.IMAGE:
            # Processes from an image keep the environment, and so the number, of their first start.
            job = starting_anew(job)
        state.put_gang(replace(gang, attempt=job.attempt))
        state.put_job(replace(job.with_size_of(claims), epoch=epoch))
        # No report about the new gang can exist yet.
        state.dirty.jobs.pop(number, None)
    elif gang_orders.same_place(parked.claims, claims) and not gang_orders.is_superseded(state, parked):
        state.put_gang(gang_orders.run(gang_orders.holding(parked, claims), now))
        state.put_job(job)
    elif gpus != parked.devices:
        epoch = begin_with(state, job, parked, claims, level, now)
    else:
        state.put_job(job)
        epoch = gang_orders.go_on_elsewhere(state, job, parked, claims, level, now)
    if state.unstored.is_kept:
        nodes = " ".join([c.node for c in claims])
        state.history(now, job, "gang_approved", cause, why, epoch=epoch, nodes=nodes, **waited)
    return epoch


def suspend(state: State, event: JobSuspended) -> None:
    """Suspend a job at a boundary, at this level; a PENDING job stays where it is."""
    level, by_plan, now, job = event.level, event.by_plan, event.time, state.jobs[event.number]
    gang = state.gangs.get(job.epoch)
    if job.ending is JobState.PENDING:
        # Its attempt is ending anyhow: it will rest instead of waiting again.
        state.put_job(replace(job, state=JobState.SUSPENDED, ending=JobState.SUSPENDED))
        return
    if not by_plan:
        job = replace(job, state=JobState.SUSPENDED, suspended_level=SuspendLevel.NONE)
    job = replace(ending.clock_stopped(job, now), revision=job.revision + 1, pending_since=0.0, trouble="")
    if gang is None:
        state.put_job(replace(job, suspended_level=SuspendLevel.CHECKPOINT))
    elif gang.phase is GangPhase.PARKED and gang.park_level >= level:
        state.put_job(replace(job, suspended_level=gang.park_level))
    else:
        # A waiting job waits again once it is parked deeper, or cannot be: no plan parked it.
        waits = job.state is JobState.PENDING
        # A drain suspends only what could not be moved in time.
        may_wait = by_plan and event.purpose.goal is not Goal.DRAIN
        at_epoch_end = may_wait and gang_orders.waits_for_epoch(job, event.cause)
        parked = gang_orders.park(gang, level, now, by_plan and not waits, at_epoch_end)
        # One that rests because it did not use its GPUs does so at a deeper level, too.
        idle = gang.idle if gang.intent is GangIntent.PARK and job.state is JobState.SUSPENDED else None
        state.put_gang(replace(parked, purpose=event.purpose, idle=idle))
        state.put_job(replace(job, state=JobState.HOLDING) if waits else job)
    if state.unstored.is_kept:
        figures = event.purpose.figures if gang is None else emptying_figures(state, gang, event.purpose)
        state.history(now, job, "suspend_ordered", event.cause, level=level.name, **figures)


def epoch_wait_ends(state: State) -> Iterator[float]:
    """Yield until when gangs that plans park may go on to the end of their epochs, in Unix seconds."""
    for epoch in state.gangs.at_epoch_ends:
        yield state.gangs[epoch].since + state.settings.epoch_wait_s


def end_epoch_waits(state: State, now: float, cause: str) -> None:
    """Let gangs that plans park stop at their next step where no epoch has ended in time. now: Unix seconds."""
    for epoch in list(state.gangs.at_epoch_ends):
        gang = state.gangs[epoch]
        if now >= gang.since + state.settings.epoch_wait_s:
            state.put_gang(gang_orders.park(gang, gang.park_level, now, gang.parked_by_plan))
            moves.note_epoch_wait_over(state, state.jobs[gang.job], now, cause)


def resume(state: State, event: JobResumed) -> None:
    """Resume a job: at once if it still holds its devices, else it waits for a gang."""
    job, now, cause = state.jobs[event.number], event.time, event.cause
    gang = state.gangs.get(job.epoch)
    if job.ending is JobState.SUSPENDED:
        # On its way to storage: it waits again once it is there.
        state.put_job(replace(job, state=JobState.HOLDING, ending=JobState.PENDING))
        return
    trouble = "" if job.trouble == _NOT_USED else job.trouble
    job = replace(job, revision=job.revision + 1, suspended_level=SuspendLevel.NONE, again_at=0.0, trouble=trouble)
    if gang is not None and gang.parked_by_plan and job.state is JobState.HOLDING:
        # Until it is parked nothing is judged: another gang may hold the devices of a part that has ended.
        back = gang_orders.holding(gang, gang.claims) if gang_orders.has_given_up(gang) else gang
        moves.run_after_all(state, back, now)
        state.put_job(job)
    elif gang is not None and gang_orders.is_superseded(state, gang) and gang_orders.holds_devices(gang):
        gang_orders.go_back(state, job, gang, now, cause)
    elif gang is not None and not gang_orders.is_superseded(state, gang) and _may_run_on(gang):
        moves.run_after_all(state, gang, now)
        state.put_job(replace(job, state=JobState.HOLDING))
    else:
        if gang is not None and gang.phase is not GangPhase.PARKED:
            # It goes from one level to another, or is the source of a move: its order stands.
            level = gang.rested_level or SuspendLevel.PAUSE
            state.put_gang(gang_orders.rested(gang_orders.park(gang, level, now, by_plan=False), now))
        state.put_job(replace(job, state=JobState.PENDING, pending_since=now))
    state.history(now, job, "resume_ordered", cause, **event.purpose.figures)


def _review_once(state: State, number: int, now: float, cause: str) -> bool:
    job = state.jobs.get(number)
    if job is None:
        return False
    gangs = state.gangs.of_job(number)
    if len(gangs) > 1 and share_pieces(state, job, gangs):
        return True
    # The acts stand until something changes, and then all of them are computed again.
    acts = list(map(act_of, gangs))
    if _FORGET in acts or job.ending is not None:
        for gang, act in zip(gangs, acts, strict=True):
            if _is_done_with(job, gang, act):
                _forget(state, gang, now)
                if job.ending is not None and len(gangs) == 1:
                    # It was the last one, and of nothing nothing follows.
                    ending.complete(state, job, (), now, cause)
                    return False
                if job.epoch == gang.epoch:
                    state.put_job(replace(job, epoch=0))
                return True
    if job.ending is not None:
        if all(gang.is_gone or gang.role is _SOURCE for gang in gangs):
            ending.complete(state, job, gangs, now, cause)
            # Of nothing nothing follows.
            return bool(gangs)
        return False
    for gang, act in zip(gangs, acts, strict=True):
        if act is not _WAIT and gang.role is not _LEAVING and _follow(state, job, gang, act, now, cause):
            return True
    return False


def _follow(state: State, job: JobRecord, gang: Gang, act: Act, now: float, cause: str) -> bool:
    """Carry out the act that the table gives for one gang; return False when nothing changed."""
    if gang.role is _SOURCE:
        # Committed elsewhere: its loss costs nothing unless the new gang fails too.
        if act in (Act.FAIL, Act.SUCCEED):
            state.put_gang(gang_orders.stop(gang, now))
            return True
        return False
    if act is _STEPPED:
        if job.spec.is_move_required and not job.is_move_confirmed and moves.is_known(job):
            _confirm_move(state, job, gang, now)
            return True
        return gang.role is GangRole.ACTIVE and _stepped(state, job, gang, now, cause)
    if act is _REST:
        return _rest(state, job, gang, now, cause)
    match act:
        case Act.HAND_OVER:
            return moves.let_hand_over(state, job, now)
        case Act.COMMIT:
            # The source may have no order yet, if the destination was never reported as PREPARED.
            return moves.commit(state, job, now, cause) or moves.let_hand_over(state, job, now)
        case Act.ABORT:
            moves.abort(state, node_faults.note_failed_launch(state, job, gang), gang, now, cause)
            return True
        case Act.STAY:
            _stay(state, job, gang, now, cause)
            return True
        case Act.SUCCEED:
            state.history(now, job, "gang_done", cause, epoch=gang.epoch)
            node_faults.note_launched(state, gang)
            job = ending.started(job, gang)
            return _end(state, job, gang, JobState.SUCCEEDED, "every rank has finished", now, cause, preempted=False)
        case Act.FAIL:
            ending.fail(state, job, gang, now, cause)
            return True
        case _:
            return False


def _confirm_move(state: State, job: JobRecord, gang: Gang, now: float) -> None:
    """Record that a job that must be movable is; end one that is not."""
    if job.capabilities.can_move:
        state.put_job(replace(job, is_move_confirmed=True))
        return
    why = moves.reason_against(job)
    text = f"it cannot be moved, and was submitted with --must-move: {why}"
    ending.end(state, job.number, JobState.FAILED, now, text, Failure("CANNOT_MOVE", text, epoch=gang.epoch))


def _stepped(state: State, job: JobRecord, gang: Gang, now: float, cause: str) -> bool:
    if gang.phase is GangPhase.STARTING:
        state.put_gang(replace(gang, phase=GangPhase.RUNNING, stepped=True, since=now))
        state.history(now, job, "gang_running", cause, epoch=gang.epoch)
        pause = 0.0 if gang.stepped else moves.pause(state, gang, now)
        if pause:
            figures = {"pause_ms": f"{1000 * pause:.1f}", **gang.purpose.figures}
            kind = "resize_done" if gang.resizes else "move_done"
            state.history(now, job, kind, cause, epoch=gang.epoch, **figures)
        node_faults.note_started_elsewhere(state, job, gang, now, cause)
        state.put_job(
            replace(
                job,
                move_pause_s=pause or job.move_pause_s,
                start_time=job.start_time or now,
                running_since=job.running_since or now,
                launch_failures=0,
                launch_failed_on=(),
                moves_aborted=0,
            )
        )
        node_faults.note_launched(state, gang)
        # What it came from may go now.
        return len(state.gangs.epochs_of[job.number]) > 1
    return gang_orders.reap(state, job, now)


def _without_removed_checkpoints(state: State, job: JobRecord, now: float, cause: str) -> JobRecord:
    """Return a job without checkpoints that went with nodes that were removed; its history says so."""
    left = node_checkpoints.without_removed(state.nodes, job)
    if left.checkpoint is not job.checkpoint and job.checkpoint is not None:
        text = f"it lay on {' and '.join(job.checkpoint.nodes)}, which is no part of the cluster any more"
        step = left.checkpoint.step if left.checkpoint is not None else "the beginning"
        state.history(now, job, "checkpoint_unreadable", cause, text, step=job.checkpoint.step, goes_on_from=step)
    return left


def _rest(state: State, job: JobRecord, gang: Gang, now: float, cause: str) -> bool:
    if gang.phase is GangPhase.PARKED:
        # At rest already; a destination prepared from it may be ready by now.
        return moves.commit(state, job, now, cause)
    gang_orders.reap(state, job, now)
    level = gang.park_level
    if state.unstored.is_kept:
        step = max([piece.stop_step for piece in gang.pieces])
        how = next((piece.outcome.message for piece in gang.pieces if piece.outcome.message), "")
        state.history(now, job, "gang_parked", cause, how, epoch=gang.epoch, level=level.name, step=step)
    if level is SuspendLevel.CHECKPOINT:
        by_user = job.state is JobState.SUSPENDED
        becomes = JobState.SUSPENDED if by_user else JobState.PENDING
        if job.saves_itself and all(piece.gone for piece in gang.pieces):
            # What the agent may have saved before is older than the files of the script.
            job = replace(job, checkpoint=None, checkpoint_before=None)
        if by_user and gang.idle is not None:
            job = replace(job, trouble=_NOT_USED)
        preempted = not by_user and gang.purpose.goal is not Goal.RESIZE
        return _end(state, job, gang, becomes, "rests on storage", now, cause, preempted=preempted)
    state.put_gang(gang_orders.rested(gang, now))
    if level is SuspendLevel.OFFLOAD:
        _note_left(state, gang, now)
    if job.state is JobState.SUSPENDED:
        state.put_job(replace(job, suspended_level=level, revision=job.revision + 1))
    return True


def _end(
    state: State, job: JobRecord, gang: Gang, becomes: JobState, reason: str, now: float, cause: str, preempted: bool
) -> bool:
    """An attempt whose present gang has come to its end by itself; whether anything may follow from what else the job
    has somewhere. Of nothing nothing follows, so that it becomes that at once."""
    if gang_orders.is_over(gang) and state.gangs.epochs_of[job.number] == [gang.epoch]:
        _forget(state, gang, now)
        ending.complete(state, ending.to_end(job, becomes, now, reason, preempted=preempted), (), now, cause)
        return False
    state.put_job(job)
    ending.end(state, job.number, becomes, now, reason, preempted=preempted)
    return True


def _stay(state: State, job: JobRecord, gang: Gang, now: float, cause: str) -> None:
    """Handle a level that is not available: the gang stays parked at its old level, or runs on. No work is lost."""
    trouble = next(piece.trouble for piece in gang.pieces if is_refused(gang, piece))
    if job.next_epoch:
        # An old world that was to make room for another, and cannot: both stay as they were.
        moves.abort(state, job, gang, now, cause, trouble)
        return
    figures = {"level": gang.park_level.name}
    state.history(now, job, "suspend_refused", cause, trouble, epoch=gang.epoch, **figures)
    # What was moved away may never step again, so it stands where it is.
    back = gang.rested_level or (SuspendLevel.PAUSE if gang_orders.is_superseded(state, gang) else SuspendLevel.NONE)
    gang = replace(gang, refused_at=now)
    job = replace(job, revision=job.revision + 1, trouble=trouble)
    if job.spec.has_role_ranges:
        # It keeps the size that it has, also if its user has suspended it while it was stopped to be resized.
        job = replace(job, gpus_chosen=job.gpus_given, tasks_chosen=job.tasks_given)
    if trouble.startswith(moves.UNSAVEABLE):
        failed = {gang.park_level.name: f"it failed once: {trouble}"}
        job = replace(job, capabilities=job.capabilities.without(failed))
    if back is not SuspendLevel.NONE and job.state is JobState.HOLDING and not gang.parked_by_plan:
        # It waited where it is parked.
        state.put_gang(gang_orders.rested(gang_orders.park(gang, back, now, by_plan=False), now))
        state.put_job(replace(job, state=JobState.PENDING, pending_since=now))
    elif back is not SuspendLevel.NONE:
        state.put_gang(gang_orders.park(gang, back, now, gang.parked_by_plan))
        state.put_job(job)
    else:
        moves.run_after_all(state, gang, now)
        state.put_job(replace(job, state=JobState.HOLDING))


def _waited(state: State, job: JobRecord, claims: Sequence[Claim], now: float) -> tuple[dict[str, str], str]:
    """Return for the history how long a job waited, which jobs left its nodes meanwhile, and its last refusal."""
    if not job.pending_since:
        return {}, ""
    figures = {"waited_s": f"{now - job.pending_since:.3f}"}
    refusals = state.blockers_of(job.number)
    left = [state.jobs.left_by[claim.node] for claim in claims if claim.node in state.jobs.left_by]
    after = sorted({number for number, time in left if time >= job.pending_since and number != job.number})
    if after:
        figures["after"] = " ".join([f"jobs/{number}" for number in after[:_NAMED]])
    return figures, refusals[0].message if refusals else ""


def _note_left(state: State, gang: Gang, now: float) -> None:
    for piece in gang.pieces:
        if piece.claim.device_mask:
            state.jobs.left_by[piece.claim.node] = (gang.job, now)


def _is_done_with(job: JobRecord, gang: Gang, act: Act) -> bool:
    """Return whether a stopped gang has given all back, or its job ends and it need not be stopped."""
    return gang_orders.holds_nothing(gang) if act is _FORGET else job.ending is not None and gang_orders.is_over(gang)


def _forget(state: State, gang: Gang, now: float) -> None:
    _note_left(state, gang, now)
    state.forget_gang(gang.epoch)
    colocation.leave(state, gang)


def _may_run_on(gang: Gang) -> bool:
    """Return whether a gang that was to stop can run on: it is not parked, or still holds its devices."""
    is_at_rest = gang.phase is GangPhase.PARKED or gang_orders.has_given_up(gang)
    return not is_at_rest or gang_orders.holds_devices(gang)
