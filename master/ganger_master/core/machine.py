"""State machine of the master: decide a command, apply its events, return the answer. The writer and the simulator call
it.

A shell that commits several commands at once calls `advance` for each and `finish` once for all of them; `step` is both
for one. The caller's obligations, in order: (1) make `state.take_changes()` and all history durable in one
transaction; (2) only then send the answers and release the other effects; (3) if that fails, reject every caller of the
batch and continue from `state_image.restored`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from ganger.cluster.view import LoadMode
from ganger.job_state import JobState
from msgspec import Struct
from msgspec.structs import replace

from ganger_master.core import (
    access_tokens,
    answers,
    arrays,
    attempts,
    availability,
    colocation,
    dependencies,
    elastic,
    ending,
    events,
    gang_orders,
    idle_gpus,
    job_updates,
    moves,
    node_faults,
    node_tests,
    observation,
    placement_leases,
    plans,
    quarantine,
    reservations,
    restore_settlement,
    rollback,
    timeslice_groups,
    usage,
)
from ganger_master.core.answers import Answer
from ganger_master.core.commands import Command
from ganger_master.core.decide import decide
from ganger_master.core.events import Effects, Event
from ganger_master.core.job_model import JobRecord
from ganger_master.core.node_model import Node, NodeTest
from ganger_master.core.state import State

_NONE: Final = Effects()
_TICK_S: Final = 0.001


class MachineStep(Struct, frozen=True, gc=False):
    answer: Answer
    events: tuple[Event, ...] = ()
    effects: Effects = _NONE


def step(state: State, command: Command, now: float) -> MachineStep:
    """Carry out one command as a batch of its own. Without events there are no effects."""
    answer, happened = advance(state, command, now)
    return MachineStep(answer, happened, finish(state, now) if happened else _NONE)


def advance(state: State, command: Command, now: float) -> tuple[Answer, tuple[Event, ...]]:
    """Carry out one command of a batch; return its answer and events. Its effects come with `finish`."""
    happened, answer = decide(state, command, now)
    for event in happened:
        apply(state, event)
    return _complete(state, answer), happened


def judged(state: State, command: Command, now: float) -> Answer:
    """Return what would be answered to a command, without carrying it out."""
    _, answer = decide(state, command, now)
    return answer


def finish(state: State, now: float) -> Effects:
    """Return the effects of all events since the last call; call it before `state.take_changes`."""
    _note_mode(state, now)
    nodes = tuple(gang_orders.project_touched(state))
    turns = placement_leases.hand_out(state, now) if state.counters.restoring is None else ()
    wake = next_wake(state, now)
    if wake is not None:
        # At least a millisecond later, so that a missed condition cannot loop.
        wake = max(wake, now + _TICK_S)
    wake_at = None if wake == state.wake_at else wake
    state.wake_at, dirty = wake, state.dirty
    history = state.unstored.take_history()
    effects = Effects(history, tuple(dirty.news), nodes, tuple(dirty.shown), turns, wake_at)
    dirty.news.clear()
    dirty.shown.clear()
    return effects


def next_wake(state: State, now: float) -> float | None:
    """Return the earliest time at which something happens without a command; None if nothing will."""
    if state.counters.restoring is not None:
        return rollback.next_time(state, now)
    times = [placement_leases.next_time(state, now), state.nodes.next_silence_check]
    times += [state.reservation_at] if state.reservations else []
    times += [ending.ends_at(state, state.jobs[number]) for number in state.jobs.running_limited]
    times += [state.jobs[number].again_at for number in state.jobs.backing_off]
    times += [moves.due_at(state, number) for number in state.jobs.moving]
    times += attempts.epoch_wait_ends(state)
    times += idle_gpus.park_times(state)
    if state.queue.kept_by_plan:
        times.append(state.queue.kept_by_plan_at + state.settings.move_deadline_s)
    return min([time for time in times if time is not None], default=None)


def _note_mode(state: State, now: float) -> None:
    """Record a change between pack mode and spread mode, for operators and for a restart."""
    packs = state.view.mode is LoadMode.PACK
    if packs == state.counters.packs:
        return
    state.counters.packs = packs
    devices = state.nodes.devices
    held = devices - state.nodes.free_devices
    text = "gangs are packed, to keep holes for large ones" if packs else "gangs are spread apart"
    state.history(
        now, "cluster", "mode_changed", "load", text, mode=state.view.mode.name, held=held, of=state.nodes.devices
    )


def _complete(state: State, answer: Answer) -> Answer:
    """Complete an answer with what the events have decided: epoch, revision, version."""
    match answer:
        case answers.Approved():
            job = state.jobs[answer.number]
            epoch = job.next_epoch or job.epoch
            return answers.Approved(job.number, epoch, job.revision, state.view.version, answer.candidate)
        case answers.PlanAnswer():
            verdicts = tuple(
                [
                    replace(verdict, revision=state.jobs[verdict.number].revision)
                    if verdict.number in state.jobs
                    else verdict
                    for verdict in answer.verdicts
                ]
            )
            return replace(answer, verdicts=verdicts, view_version=state.view.version)
        case _:
            return answer


def apply(state: State, event: Event) -> None:
    """Apply an event to the state; its effects come with `machine.finish`."""
    _HANDLERS[type(event)](state, event)
    settle(state, event.time, event.cause)


def _job_submitted(state: State, event: events.JobSubmitted) -> None:
    number, uid, user, spec, now = event.number, event.uid, event.user, event.spec, event.time
    job = JobRecord(number, uid, user, spec, now, event.request_id, pending_since=now)
    _put_submitted(state, [job], event.cause)


def _put_submitted(state: State, submitted: Sequence[JobRecord], cause: str) -> None:
    for job in dependencies.with_open_dependencies(state, submitted):
        state.counters.next_job = max(state.counters.next_job, job.number + 1)
        state.put_job(job)
        # A job without a gang needs no review.
        state.dirty.jobs.pop(job.number, None)
        state.history(job.create_time, job, "job_submitted", cause, gpus=job.spec.gpus, tasks=job.spec.tasks)


def _array_submitted(state: State, event: events.ArraySubmitted) -> None:
    _put_submitted(state, list(arrays.members_submitted(event)), event.cause)
    arrays.note_submitted(state, event)


def _job_cancelled(state: State, event: events.JobCancelled) -> None:
    state.history(event.time, state.jobs[event.number], "cancel_ordered", event.cause, event.reason)
    ending.end(state, event.number, JobState.CANCELLED, event.time, event.reason or "cancelled")


def _gang_approved(state: State, event: events.GangApproved) -> None:
    epoch = attempts.start(state, event)
    if any(claim.shared_mask for claim in event.claims):
        colocation.join(state, epoch, event.time, event.cause)


def _start_offered(state: State, event: events.StartOffered) -> None:
    state.queue.suggested[event.number] = event.claims


def _gang_released(state: State, event: events.GangReleased) -> None:
    ending.end(state, event.number, JobState.PENDING, event.time, "released by its scheduler", checkpoint_first=True)


def _move_begun(state: State, event: events.MoveBegun) -> None:
    colocation.join(state, moves.begin(state, event), event.time, event.cause)


def _cores_changed(state: State, event: events.CoresChanged) -> None:
    job = state.jobs[event.number]
    gang = state.gangs[job.epoch]
    state.put_gang(gang_orders.retune(gang, event.claims, event.repin))
    state.put_job(replace(job, revision=job.revision + 1))
    cores = sum(sum(claim.millicores) for claim in event.claims)
    repin = int(event.repin)
    state.history(event.time, job, "cores_changed", event.cause, event.reason, millicores=cores, repin=repin)


# Fields of a node that the request sets, and fields that a new session resets.
_OF_SESSION: Final = ("machine_uuid", "rack", "fabric", "peer_address", "stream_address", "version", "boot_id")
_NEW_SESSION: Final[dict[str, Any]] = {
    **dict.fromkeys(("heard", "silent", "lost"), False),
    **dict.fromkeys(("observation", "applied_version", "launch_failures"), 0),
    **dict.fromkeys(("unanswerable", "launch_failure"), ""),
    "started_elsewhere": (),
}


def _session_opened(state: State, event: events.SessionOpened) -> None:
    request = event.request
    old = state.nodes.get(request.node)
    if request.configuration_set.name not in state.nodes.configuration_sets:
        state.put_configuration_set(request.configuration_set)
    if old is not None and old.configuration_set != request.configuration_set.name:
        observation.change_hardware(state, old.name, request.configuration_set.name, event.time, event.cause)
        # They refer to devices of the former hardware.
        old = replace(old, device_faults={}, device_warnings={}, strays=())
    base = old or Node(request.node, request.machine_uuid, request.configuration_set.name, create_time=event.time)
    node = replace(
        base,
        **{name: getattr(request, name) for name in _OF_SESSION},
        configuration_set=request.configuration_set.name,
        capabilities=dict(sorted(request.capabilities.items())),
        session=event.session,
        **_NEW_SESSION,
        storage_proved=bool(request.storage_token) and request.storage_token == state.counters.storage_token,
    )
    if not node.draining and not node.cordoned:
        node = replace(node, state_reason="")
    state.counters.next_session += 1
    availability.note_call(state, node.name, event.time)
    state.put_node(node)
    reservations.note_node(state, node.name, event.time, event.cause)
    quarantine.note_ids(state, request.seen.next_epoch, request.seen.next_job)
    state.reports.pop(node.name, None)
    state.history(event.time, f"nodes/{node.name}", "session_opened", event.cause, peer=node.peer_address)


def _node_observed(state: State, event: events.NodeObserved) -> None:
    if state.counters.restoring is not None:
        rollback.note_report(state, event.report, event.time)
        _settle_if_complete(state, event.time, event.cause)
        return
    rollback.note_reported_ids(state, event.report)
    observation.observe(state, event.report, event.time, event.cause)
    if state.nodes.strays_of:
        restore_settlement.follow_ended_strays(state, event.report.node, event.time, event.cause)


def _ends_noted(state: State, event: events.EndsNoted) -> None:
    state.ends = event.ends
    _settle_if_complete(state, event.time, event.cause)


def _settle_if_complete(state: State, now: float, cause: str) -> None:
    if rollback.is_complete(state, now):
        restore_settlement.settle(state, events.RestoreSettled(now, cause))


def _node_marked(state: State, event: events.NodeMarked) -> None:
    node = state.nodes[event.node]
    kind, drain, cordon = _MARKS[event.mark]
    if not cordon:
        node_tests.withdraw(state, node, event.time)
        test = NodeTest("an operator ordered it") if event.mark == "TEST" else None
        node = replace(node, launch_failures=0, launch_failure="", started_elsewhere=(), slow="", test=test)
    state.put_node(replace(node, draining=drain, cordoned=cordon, state_reason=event.reason))
    state.history(event.time, f"nodes/{node.name}", kind, event.cause, event.reason)


_MARKS: Final = {
    "DRAIN": ("node_draining", True, True),
    "CORDON": ("node_cordoned", False, True),
    "UNCORDON": ("node_uncordoned", False, False),
    "TEST": ("node_test_ordered", False, False),
}


def _node_removed(state: State, event: events.NodeRemoved) -> None:
    observation.give_up(state, event.node)
    state.forget_node(event.node)
    state.history(event.time, f"nodes/{event.node}", "node_removed", event.cause)


def _jobs_ranked(state: State, event: events.JobsRanked) -> None:
    state.queue.ranks = {number: rank for rank, number in enumerate(event.line.numbers, 1)}
    state.queue.ranked_by = event.line.policy


def _places_kept(state: State, event: events.PlacesKept) -> None:
    state.queue.kept_by_plan = plans.kept_claims(state, event.kept_places)
    state.queue.kept_by_plan_at = event.time


def _cores_measured(state: State, event: events.CoresMeasured) -> None:
    for curve in event.curves:
        job, before = state.jobs.get(curve.number), state.cores_curves.get(curve.number)
        if job is None:
            continue
        state.cores_curves[curve.number] = curve
        gang = state.gangs.get(job.epoch)
        if gang is not None and curve.trial_memory_bytes != (before.trial_memory_bytes if before else 0):
            # The daemons of its nodes begin or end the trial of memory.
            state.desired.forget_gang(gang.epoch)
            state.dirty.wants.update(dict.fromkeys(gang.nodes))


def _change_judged(state: State, event: events.ChangeJudged) -> None:
    found = event.finding
    figures = {"goal": found.goal.value, "gain": f"{found.gain:.3f}", "gain_deviation": f"{found.deviation:.3f}"}
    if found.detail:
        figures["detail"] = found.detail
    kind = "change_kept" if found.kept else "change_undone"
    state.history(event.time, f"jobs/{found.number}", kind, event.cause, **figures)


def _time_passed(state: State, event: events.TimePassed) -> None:
    now = event.time
    # This wake-up is over, so the next one is requested, even for the same time.
    state.wake_at = None
    if state.counters.restoring is not None:
        _settle_if_complete(state, now, event.cause)
        return
    if event.set_by or event.stood_still:
        availability.forgive(state, now, event.set_by)
    if event.looks_again:
        state.dirty.sets.update(dict.fromkeys(state.gangs.sets))
    ending.let_go_on(state, now)
    if event.set_by:
        state.reservation_at = 0.0
    if state.reservations and now >= state.reservation_at:
        reservations.follow(state, now, event.cause)
    for number in list(state.jobs.running_limited):
        job = state.jobs[number]
        ends = ending.ends_at(state, job)
        if ends is not None and now >= ends:
            failure = ending.failure_of(job)
            # A gang that has not stepped has nothing to save, and would reach no boundary.
            saves = state.gangs[job.epoch].stepped
            ending.end(state, number, JobState.FAILED, now, failure.message, failure, checkpoint_first=saves)
    for number in list(state.jobs.moving):
        if now >= moves.due_at(state, number):
            moves.give_up(state, number, now, event.cause)
    attempts.end_epoch_waits(state, now, event.cause)
    if state.queue.kept_by_plan and now >= state.queue.kept_by_plan_at + state.settings.move_deadline_s:
        # A live planner repeats the places that it keeps within this time.
        state.queue.kept_by_plan = {}
    idle_gpus.follow(state, now)
    availability.follow(state, now, event.cause)
    placement_leases.expire(state, now, event.newest_sent)
    ending.forget(state, now)


_HANDLERS: Final[dict[type, Callable[[State, Any], None]]] = {
    events.JobSubmitted: _job_submitted,
    events.ArraySubmitted: _array_submitted,
    events.ArrayCancelled: arrays.end_all,
    events.RungReached: arrays.climb,
    events.JobCancelled: _job_cancelled,
    events.JobUpdated: job_updates.carry_out,
    events.ArrayUpdated: job_updates.carry_out_array,
    events.JobSuspended: attempts.suspend,
    events.JobResumed: attempts.resume,
    events.GangApproved: _gang_approved,
    events.GangRefused: placement_leases.note_refused,
    events.StartOffered: _start_offered,
    events.GangReleased: _gang_released,
    events.MoveBegun: _move_begun,
    events.ResizeBegun: elastic.begin_resize,
    events.SizeChosen: elastic.choose_size,
    events.CoresChanged: _cores_changed,
    events.RowsChanged: timeslice_groups.change,
    events.SessionOpened: _session_opened,
    events.NodeObserved: _node_observed,
    events.NodeAnswered: availability.note_answer,
    events.NodeMarked: _node_marked,
    events.CopiesNoted: observation.note_copies,
    events.SlowNodeNoted: node_faults.note_slow,
    events.NodeLost: observation.lose,
    events.NodeRemoved: _node_removed,
    events.NodesReserved: reservations.begin,
    events.ReservationDeleted: reservations.end,
    events.TokenChanged: access_tokens.change,
    events.StoreOpened: rollback.open_store,
    events.EndsNoted: _ends_noted,
    events.RestoreSettled: restore_settlement.settle,
    events.QuarantineEnded: quarantine.end,
    events.QuarantineAdopted: quarantine.adopt,
    events.TurnsClaimed: placement_leases.note_stream,
    events.JobsRanked: _jobs_ranked,
    events.PlacesKept: _places_kept,
    events.CoresMeasured: _cores_measured,
    events.ChangeJudged: _change_judged,
    events.TimePassed: _time_passed,
}


# A drain takes one round per gang of its nodes; many more rounds mean an endless cycle.
_ROUNDS_LIMIT = 20_000


def settle(state: State, now: float, cause: str) -> None:
    """Review all that an event marked as changed, and update the view, until nothing is marked."""
    dirty = state.dirty
    for _ in range(_ROUNDS_LIMIT):
        # A chain of jobs that depend on each other has any length.
        while dirty.jobs or dirty.ended:
            _review_jobs(state, now, cause)
            dependencies.follow(state, now, cause)
        if dirty.sets:
            timeslice_groups.follow(state, now, cause)
        if dirty.rows:
            for name in dirty.rows:
                if name in state.nodes and state.refresh_row(name):
                    dirty.shown[name] = None
            dirty.rows.clear()
        if dirty.arenas:
            colocation.follow(state)
        if dirty.arrays:
            arrays.follow(state, now)
        leaves = state.nodes.draining or state.nodes.reserved or state.nodes.faulty
        if leaves and state.counters.restoring is None:
            availability.follow_drains(state, now)
        if state.nodes.tested and state.counters.restoring is None:
            node_tests.follow(state, now)
        if not (dirty.jobs or dirty.rows or dirty.sets):
            if dirty.usage:
                usage.follow(state, now)
            return
    raise AssertionError("the state does not come to rest")


def _review_jobs(state: State, now: float, cause: str) -> None:
    dirty = state.dirty.jobs
    while dirty:
        number = next(iter(dirty))
        del dirty[number]
        if number in state.jobs:
            attempts.review(state, number, now, cause)
            # It was reviewed just now: drop marks that the review itself set.
            dirty.pop(number, None)
