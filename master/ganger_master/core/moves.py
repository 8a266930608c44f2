"""Moves: the destination is prepared, the state handed over, and from the commit on only one gang may step."""

from __future__ import annotations

from typing import Final

from ganger.job_state import JobState
from ganger.text import format_duration
from msgspec.structs import replace

from ganger_master.core import ending, gang_orders
from ganger_master.core.events import MoveBegun
from ganger_master.core.gang_model import Gang, GangIntent, GangPhase, GangRole, ObservedPhase, OutcomeKind, Piece
from ganger_master.core.gang_orders import can_go_back
from ganger_master.core.job_model import JobRecord, SuspendLevel, starting_anew
from ganger_master.core.lifecycle import GangObservation, bad_outcome, observation_of
from ganger_master.core.node_faults import emptying_figures
from ganger_master.core.plan_changes import Goal
from ganger_master.core.state import State


def begin(state: State, event: MoveBegun) -> int:
    """Begin to move a job that runs or that a plan has parked; a running one runs until the destination is prepared.
    Return the epoch of the destination."""
    job, now, purpose = state.jobs[event.number], event.time, event.purpose
    job = replace(job, revision=job.revision + 1, trouble="")
    source = state.gangs[job.epoch]
    if source.phase is not GangPhase.PARKED:
        at_epoch_end = gang_orders.waits_for_epoch(job, event.cause)
        source = replace(source, phase=GangPhase.MOVING, stops_at_epoch_end=at_epoch_end)
        state.put_gang(source)
    epoch = gang_orders.go_on_elsewhere(state, job, source, event.claims, event.level, now)
    state.put_gang(replace(state.gangs[epoch], purpose=purpose))
    nodes = " ".join([claim.node for claim in event.claims])
    figures = emptying_figures(state, source, purpose)
    state.history(now, job, "move_begun", event.cause, epoch=epoch, nodes=nodes, **figures)
    return epoch


def give_up(state: State, number: int, now: float, cause: str) -> None:
    """Undo a move whose deadline has passed, whichever side it waited for. A drain waits no longer for the end of an
    epoch instead."""
    job = state.jobs[number]
    source, destination = state.gangs[job.epoch], state.gangs[job.next_epoch]
    if source.stops_at_epoch_end and destination.purpose.goal is Goal.DRAIN:
        source = replace(source, stops_at_epoch_end=False)
        is_ordered = source.intent is GangIntent.HAND_OVER
        state.put_gang(gang_orders.hand_over(source) if is_ordered else source)
        state.put_gang(replace(destination, since=now))
        note_epoch_wait_over(state, job, now, cause)
        return
    abort(state, job, destination, now, cause, _late_node(source, destination, _longest_s(state, job)))


def note_epoch_wait_over(state: State, job: JobRecord, now: float, cause: str) -> None:
    """Record that a job is stopped at its next step, as no epoch of it has ended in time."""
    within = f"no epoch of it has ended within {format_duration(state.settings.epoch_wait_s)} (epoch_wait)"
    state.history(now, job, "epoch_wait_over", cause, f"stops at its next step: {within}")


def _late_node(source: Gang, destination: Gang, within_s: float) -> str:
    """Return the node that a move waits for and why: the destination prepares, the source stops, its state arrives."""
    ready = ObservedPhase.READY
    late = _not_in(destination, ObservedPhase.PREPARED, ready)
    what = "was not ready"
    if late is None:
        waits = " at the end of an epoch" if source.stops_at_epoch_end else ""
        late, what = _not_in(source, ObservedPhase.PARKED), f"did not stop{waits}"
    if late is None:
        late, what = _not_in(destination, ready) or destination.pieces[0], "was not ready"
    seen = "" if late.phase is ObservedPhase.NONE else f" ({late.phase.value})"
    return f"nodes/{late.claim.node} {what} within {within_s:g} s{seen}"


def _not_in(gang: Gang, *phases: ObservedPhase) -> Piece | None:
    return next((piece for piece in gang.pieces if piece.phase not in phases), None)


def is_known(job: JobRecord) -> bool:
    """Return whether its ranks have reported what they offer, so that no agent may still report more."""
    return job.capabilities.known and not job.capabilities.presumed


def reason_against(job: JobRecord) -> str:
    """Return why a job can continue in no other process: by its agent, else the reasons against each mechanism."""
    offered = job.capabilities
    refused = "; ".join([f"{one.mechanism.name.lower()}: {one.reason}" for one in offered.refused_mechanisms])
    otherwise = offered.missing.get("OFFLOAD", "the job offers no level that captures its state")
    return offered.missing.get("MOVE") or refused or otherwise


def due_at(state: State, number: int) -> float:
    """Return when the move of a job is given up, by the master's clock."""
    job = state.jobs[number]
    return state.gangs[job.next_epoch].since + _longest_s(state, job)


def _longest_s(state: State, job: JobRecord) -> float:
    grace_s = job.spec.stop_grace_s if job.saves_itself else 0.0
    longest_s = state.settings.move_deadline_s + grace_s
    source = state.gangs.get(job.epoch)
    waits_for_epoch = source is not None and source.stops_at_epoch_end
    return max(longest_s, state.settings.epoch_wait_s) if waits_for_epoch else longest_s


def let_hand_over(state: State, job: JobRecord, now: float) -> bool:
    """Order the source to stop for its prepared destination; return False when it has that order already.

    A time-sliced source gives its devices up as it stops, because other gangs of its group wait for them, and leaves
    the group; while it is parked for another slice it is not woken."""
    source = state.gangs[job.epoch]
    if source.intent is not GangIntent.RUN:
        return False
    if source.node_set:
        parked = gang_orders.park(source, SuspendLevel.OFFLOAD, now, by_plan=True)
        state.put_gang(replace(parked, phase=GangPhase.MOVING))
    else:
        state.put_gang(gang_orders.hand_over(source))
    return True


def _are_ready(source: Gang, destination: Gang) -> bool:
    """Return whether the source is parked and its state restored; of a script that saves itself, whether it has."""
    if not destination.restore.parked_epoch:
        has_left = source.intent is GangIntent.HAND_OVER and observation_of(source) is GangObservation.YIELDED
        return has_left and observation_of(destination) is GangObservation.PREPARED
    is_parked = source.intent in (GangIntent.HAND_OVER, GangIntent.PARK)
    is_parked = is_parked and observation_of(source) is GangObservation.PARKED
    return is_parked and observation_of(destination) is GangObservation.READY


def commit(state: State, job: JobRecord, now: float, cause: str) -> bool:
    """Commit a move whose sides are ready at the same boundary: from then on only the new epoch may step.

    A destination with the state of another boundary is given up. Returns whether anything changed."""
    source, destination = state.gangs.get(job.epoch), state.gangs.get(job.next_epoch)
    if source is None or destination is None or not _are_ready(source, destination):
        return False
    step = source.pieces[0].stop_step
    for piece in destination.pieces:
        if piece.stop_step == step or not destination.restore.parked_epoch:
            continue
        if piece.stop_step:
            where = f"nodes/{piece.claim.node} has the state of step {piece.stop_step}"
            abort(state, job, destination, now, cause, f"{where}, not that of step {step}, where the source stopped")
            return True
        # It has not reported yet which state it has.
        return False
    state.put_gang(replace(source, role=GangRole.SOURCE, phase=GangPhase.PARKED, stop_step=step))
    state.put_gang(gang_orders.run(destination, now))
    if not destination.restore.parked_epoch:
        # Its script begins anew there, from what it has saved itself.
        job = starting_anew(job)
    state.put_job(
        replace(
            ending.clock_stopped(job, now).with_size_of(destination.claims),
            epoch=destination.epoch,
            next_epoch=0,
            moved_from=source.epoch,
            checkpoint=job.checkpoint if destination.restore.parked_epoch else None,
            checkpoint_before=job.checkpoint_before if destination.restore.parked_epoch else None,
            revision=job.revision + 1,
        )
    )
    kind = "resize_committed" if destination.resizes else "move_committed"
    state.history(now, job, kind, cause, epoch=destination.epoch, source=source.epoch, step=step)
    return True


def abort(state: State, job: JobRecord, gang: Gang, now: float, cause: str, why: str = "") -> None:
    """Give a move up before its commit: the destination stops; the source runs on, or stays parked as its job waits."""
    source, destination = state.gangs[job.epoch], state.gangs[job.next_epoch]
    trouble = why or next((piece.trouble for piece in gang.pieces if piece.trouble), "") or bad_outcome(gang).message
    state.put_gang(gang_orders.stop(destination, now))
    job = replace(
        job,
        next_epoch=0,
        moves_aborted=job.moves_aborted + 1,
        revision=job.revision + 1,
        trouble=f"its {'resize' if destination.resizes else 'move'} was given up: {trouble}",
    )
    job = _without_failed(job, gang, trouble)
    if can_go_back(source) and not gang_orders.is_superseded(state, source):
        phase = GangPhase.RUNNING if source.stepped else GangPhase.STARTING
        if source.intent is GangIntent.RUN:
            state.put_gang(replace(source, phase=phase))
        else:
            run_after_all(state, source, now)
        state.put_job(job)
    elif job.moves_aborted > state.settings.moves_aborted_allowed and job.checkpoint is not None:
        # The parked copy cannot be brought back anywhere: better to lose steps than to try for ever.
        state.put_job(job)
        ending.requeue(state, job, now, f"parked copy could not be used: {trouble}")
    else:
        state.put_job(replace(ending.clock_stopped(job, now), state=JobState.PENDING, pending_since=now))
    kind = "resize_aborted" if destination.resizes else "move_aborted"
    state.history(now, job, kind, cause, trouble, epoch=destination.epoch)


# How a daemon's trouble begins where the job's state, and not a disk or a node, is what failed (`Error` of the page).
UNSAVEABLE: Final = "STATE_UNSAVEABLE:"
_UNREADABLE: Final = "STATE_UNREADABLE:"


def _without_failed(job: JobRecord, gang: Gang, trouble: str) -> JobRecord:
    """Return the job without the levels that this failure rules out. `gang`: the side that failed, before the commit.

    A destination whose program ended, or could not read the state, would do so after a checkpoint too."""
    if gang.role is GangRole.DESTINATION:
        outcome = bad_outcome(gang)
        # Another number of ranks may run where this one did not: of a resize only the state counts.
        has_ended = outcome.kind is OutcomeKind.FAILED and (not gang.resizes or ending.has_no_state(outcome))
        has_failed = trouble.startswith(_UNREADABLE) or has_ended
        names: tuple[str, ...] = ("RESIZE",) if gang.resizes else ("MOVE", "CHECKPOINT", "RESIZE")
    else:
        has_failed = trouble.startswith(UNSAVEABLE)
        names = ("MOVE",)
    why = f"{'a resize' if gang.resizes else 'a move'} failed at it once: {trouble}"
    failed = dict.fromkeys(names, why) if has_failed else {}
    return replace(job, capabilities=job.capabilities.without(failed)) if failed else job


def pause(state: State, gang: Gang, now: float) -> float:
    """Return the seconds from the last step of the source to the first one of the destination, of the slowest ranks.

    Zero if the gang did not move or the times were not reported. The clocks of nodes differ a little. For a time-sliced
    gang the pause begins with its launch, in its first slice: until then it would have been parked anyhow."""
    source = state.gangs.get(gang.restore.parked_epoch)
    if source is None or source.role is not GangRole.SOURCE:
        return 0.0
    launched = max(piece.launch_time for piece in gang.pieces)
    if gang.node_set and launched:
        return max(0.001, now - launched)
    last = max(piece.last_step_time for piece in source.pieces)
    first = max(piece.first_step_time for piece in gang.pieces)
    return max(0.001, first - last) if last and first else 0.0


def run_after_all(state: State, gang: Gang, now: float) -> None:
    state.put_gang(gang_orders.run(gang, now))
    node_set = state.gangs.sets.get(state.gangs.set_of.get(gang.epoch, 0))
    if node_set is None or len(gang.pieces) == 1 or gang.epoch not in node_set.newest.epochs:
        return
    newest = node_set.newest
    state.put_set(replace(node_set, coming=replace(newest, version=newest.version + 1)))
