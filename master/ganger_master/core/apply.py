"""Events to state: the only place that changes it. Deterministic, without clock or IO.

Every event ends with `settle`: the next request is judged by the view, so that must follow each event.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from ganger.job_state import JobState
from msgspec.structs import replace

from ganger_master.core import (
    arrays,
    attempts,
    colocation,
    draining,
    elastic,
    ending,
    events,
    gang_orders,
    heartbeats,
    job_updates,
    moves,
    observation,
    placement_leases,
    quarantine,
    restore_settlement,
    retry,
    rollback,
    timeslice_groups,
)
from ganger_master.core.events import Event
from ganger_master.core.job_model import JobRecord
from ganger_master.core.node_model import Node
from ganger_master.core.state import State


def apply(state: State, event: Event) -> None:
    """Apply an event to the state; its effects come with `machine.finish`."""
    _HANDLERS[type(event)](state, event)
    settle(state, event.time, event.cause)


def _job_submitted(state: State, event: events.JobSubmitted) -> None:
    job = JobRecord(
        number=event.number,
        uid=event.uid,
        user=event.user,
        spec=event.spec,
        create_time=event.time,
        request_id=event.request_id,
        pending_since=event.time,
    )
    _put_submitted(state, job, event.cause)


def _put_submitted(state: State, job: JobRecord, cause: str) -> None:
    state.counters.next_job = max(state.counters.next_job, job.number + 1)
    state.put_job(job)
    # Nothing follows from a job that has nothing yet.
    state.dirty.jobs.pop(job.number, None)
    state.history(job.create_time, job, "job_submitted", cause, gpus=job.spec.gpus, tasks=job.spec.tasks)


def _array_submitted(state: State, event: events.ArraySubmitted) -> None:
    for job in arrays.members_submitted(event):
        _put_submitted(state, job, event.cause)
    arrays.note_submitted(state, event)


def _rung_reached(state: State, event: events.RungReached) -> None:
    arrays.climb(state, event.number, event.value, event.at, event.time)


def _job_cancelled(state: State, event: events.JobCancelled) -> None:
    job = state.jobs[event.number]
    state.history(event.time, job, "cancel_ordered", event.cause, event.reason)
    ending.end(state, event.number, JobState.CANCELLED, event.time, event.reason or "cancelled")


def _job_updated(state: State, event: events.JobUpdated) -> None:
    job_updates.carry_out(state, event.number, event.spec, event.update, event.request_id, event.time, event.cause)


def _job_suspended(state: State, event: events.JobSuspended) -> None:
    attempts.suspend(state, event.number, event.level, event.time, event.cause, event.by_plan, event.purpose)


def _job_resumed(state: State, event: events.JobResumed) -> None:
    attempts.resume(state, event.number, event.time, event.cause, event.purpose)


def _gang_approved(state: State, event: events.GangApproved) -> None:
    placement_leases.note_approved(state, event.number)
    epoch = attempts.start(state, event.number, event.claims, event.level, event.time, event.cause)
    if any(claim.shared_mask for claim in event.claims):
        colocation.join(state, epoch, event.time, event.cause)
    state.counters.approved += 1


def _start_offered(state: State, event: events.StartOffered) -> None:
    state.queue.suggest(event.number, event.claims)


def _gang_released(state: State, event: events.GangReleased) -> None:
    ending.end(state, event.number, JobState.PENDING, event.time, "released by its scheduler", checkpoint_first=True)


def _move_begun(state: State, event: events.MoveBegun) -> None:
    epoch = moves.begin(state, event.number, event.claims, event.level, event.time, event.cause, event.purpose)
    colocation.join(state, epoch, event.time, event.cause)


def _size_chosen(state: State, event: events.SizeChosen) -> None:
    elastic.choose_size(state, event.number, event.gpus, event.time, event.cause)


def _resize_begun(state: State, event: events.ResizeBegun) -> None:
    elastic.begin_resize(
        state, event.number, event.claims, event.level, event.time, event.cause, event.reason, event.purpose
    )


def _cores_changed(state: State, event: events.CoresChanged) -> None:
    job = state.jobs[event.number]
    gang = state.gangs[job.epoch]
    state.put_gang(gang_orders.retune(gang, event.claims, event.repin))
    state.put_job(replace(job, revision=job.revision + 1))
    cores = sum(sum(claim.millicores) for claim in event.claims)
    repin = int(event.repin)
    state.history(event.time, job, "cores_changed", event.cause, event.reason, millicores=cores, repin=repin)


def _session_opened(state: State, event: events.SessionOpened) -> None:
    request = event.request
    old = state.nodes.get(request.node)
    if request.configuration_set.name not in state.nodes.configuration_sets:
        state.put_configuration_set(request.configuration_set)
    if old is not None and old.configuration_set != request.configuration_set.name:
        observation.change_hardware(state, old.name, request.configuration_set.name, event.time, event.cause)
        # They name devices it had.
        old = replace(old, device_faults={}, strays=())
    base = old or Node(request.node, request.machine_uuid, request.configuration_set.name, create_time=event.time)
    node = replace(
        base,
        machine_uuid=request.machine_uuid,
        configuration_set=request.configuration_set.name,
        rack=request.rack,
        fabric=request.fabric,
        peer_address=request.peer_address,
        stream_address=request.stream_address,
        capabilities=dict(sorted(request.capabilities.items())),
        version=request.version,
        boot_id=request.boot_id,
        session=event.session,
        heard=False,
        silent=False,
        unanswerable="",
        lost=False,
        observation=0,
        applied_version=0,
        launch_failures=0,
        launch_failure="",
        storage_proved=bool(request.storage_token) and request.storage_token == state.counters.storage_token,
    )
    if not node.draining and not node.cordoned:
        node = replace(node, state_reason="")
    state.counters.next_session += 1
    heartbeats.note_call(state, node.name, event.time)
    state.put_node(node)
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


def _node_answered(state: State, event: events.NodeAnswered) -> None:
    if event.problem:
        heartbeats.note_unanswerable(state, event.node, event.problem, event.time, event.cause)
    else:
        heartbeats.end(state, event.node, event.time, event.cause)


def _node_marked(state: State, event: events.NodeMarked) -> None:
    node = state.nodes[event.node]
    drain, cordon = event.mark == "DRAIN", event.mark in ("DRAIN", "CORDON")
    if event.mark == "UNCORDON":
        node = replace(node, launch_failures=0, launch_failure="")
    state.put_node(replace(node, draining=drain, cordoned=cordon, state_reason=event.reason))
    state.history(event.time, f"nodes/{node.name}", f"node_{_MARKED[event.mark]}", event.cause, event.reason)


_MARKED: Final = {"DRAIN": "draining", "CORDON": "cordoned", "UNCORDON": "uncordoned"}


def _node_lost(state: State, event: events.NodeLost) -> None:
    observation.lose(state, event.node, event.time, event.cause, event.reason)


def _node_removed(state: State, event: events.NodeRemoved) -> None:
    observation.give_up(state, event.node)
    state.forget_node(event.node)
    state.history(event.time, f"nodes/{event.node}", "node_removed", event.cause)


def _turns_claimed(state: State, event: events.TurnsClaimed) -> None:
    placement_leases.note_stream(state, event.claim, event.time)


def _jobs_ranked(state: State, event: events.JobsRanked) -> None:
    state.queue.rank(event.line.numbers, event.line.policy)


def _places_promised(state: State, event: events.PlacesPromised) -> None:
    promised = {one.number: one.claims for one in event.promises if one.number in state.jobs}
    waiting = {number: claims for number, claims in promised.items() if state.jobs[number].is_waiting}
    state.queue.promise(waiting, event.time)


def _cores_measured(state: State, event: events.CoresMeasured) -> None:
    state.cores_curves.update({curve.number: curve for curve in event.curves if curve.number in state.jobs})


def _change_judged(state: State, event: events.ChangeJudged) -> None:
    found = event.finding
    figures = {"goal": found.goal.value, "gain": f"{found.gain:.3f}", "gain_deviation": f"{found.deviation:.3f}"}
    if found.detail:
        figures["detail"] = found.detail
    kind = "change_kept" if found.kept else "change_undone"
    state.history(event.time, f"jobs/{found.number}", kind, event.cause, **figures)


def _time_passed(state: State, event: events.TimePassed) -> None:
    now = event.time
    # The requested wake-up has come: the next one is requested anew, even if it is the same instant.
    state.wake_at = None
    if state.counters.restoring is not None:
        _settle_if_complete(state, now, event.cause)
        return
    if event.set_by or event.stood_still:
        heartbeats.forgive(state, now, event.set_by)
    if event.looks_again:
        state.dirty.sets.update(dict.fromkeys(state.gangs.sets))
    retry.let_go_on(state, now)
    for number in list(state.jobs.running_limited):
        job = state.jobs[number]
        ends = retry.ends_at(state, job)
        if ends is not None and now >= ends:
            failure = retry.failure_of(job)
            # A gang that has not stepped has nothing to save, and would reach no boundary.
            saves = state.gangs[job.epoch].stepped
            ending.end(state, number, JobState.FAILED, now, failure.message, failure, checkpoint_first=saves)
    for number in list(state.jobs.moving):
        if now >= moves.due_at(state, number):
            moves.give_up(state, number, now, event.cause)
    if state.queue.promised and now >= state.queue.promised_at + state.settings.move_deadline_s:
        # A planner that still keeps them repeats it more often.
        state.queue.promise({})
    heartbeats.follow(state, now, event.cause)
    placement_leases.expire(state, now, event.told)
    ending.forget(state, now)


_HANDLERS: Final[dict[type, Callable[[State, Any], None]]] = {
    events.JobSubmitted: _job_submitted,
    events.ArraySubmitted: _array_submitted,
    events.ArrayCancelled: arrays.end_all,
    events.RungReached: _rung_reached,
    events.JobCancelled: _job_cancelled,
    events.JobUpdated: _job_updated,
    events.ArrayUpdated: job_updates.carry_out_array,
    events.JobSuspended: _job_suspended,
    events.JobResumed: _job_resumed,
    events.GangApproved: _gang_approved,
    events.GangRefused: placement_leases.note_refused,
    events.StartOffered: _start_offered,
    events.GangReleased: _gang_released,
    events.MoveBegun: _move_begun,
    events.ResizeBegun: _resize_begun,
    events.SizeChosen: _size_chosen,
    events.CoresChanged: _cores_changed,
    events.RowsChanged: timeslice_groups.change,
    events.SessionOpened: _session_opened,
    events.NodeObserved: _node_observed,
    events.NodeAnswered: _node_answered,
    events.NodeMarked: _node_marked,
    events.NodeLost: _node_lost,
    events.NodeRemoved: _node_removed,
    events.StoreOpened: rollback.open_store,
    events.EndsNoted: _ends_noted,
    events.RestoreSettled: restore_settlement.settle,
    events.QuarantineEnded: quarantine.end,
    events.QuarantineAdopted: quarantine.adopt,
    events.TurnsClaimed: _turns_claimed,
    events.JobsRanked: _jobs_ranked,
    events.PlacesPromised: _places_promised,
    events.CoresMeasured: _cores_measured,
    events.ChangeJudged: _change_judged,
    events.TimePassed: _time_passed,
}


# A drain takes one round per gang of its nodes; what needs many more feeds itself.
_ROUNDS_LIMIT = 20_000


def settle(state: State, now: float, cause: str) -> None:
    """Draw every consequence of an event and bring the view up to date."""
    dirty = state.dirty
    for _ in range(_ROUNDS_LIMIT):
        # Most events leave nothing of the one or the other.
        if dirty.jobs:
            _review_jobs(state, now, cause)
        if dirty.sets:
            timeslice_groups.follow(state, now, cause)
        if dirty.rows:
            _refresh_rows(state)
        if dirty.arenas:
            colocation.follow(state)
        if dirty.arrays:
            arrays.follow(state, now)
        if state.nodes.draining and state.counters.restoring is None:
            draining.follow(state, now)
        if not (dirty.jobs or dirty.rows or dirty.sets):
            return
    raise AssertionError("the state does not come to rest")


def _review_jobs(state: State, now: float, cause: str) -> None:
    dirty = state.dirty.jobs
    while dirty:
        number = next(iter(dirty))
        del dirty[number]
        if number in state.jobs:
            attempts.review(state, number, now, cause)
            # Nothing follows for it any more, whatever it changed of itself meanwhile.
            dirty.pop(number, None)


def _refresh_rows(state: State) -> None:
    for name in state.dirty.rows:
        if name in state.nodes and state.refresh_row(name):
            state.dirty.shown[name] = None
    state.dirty.rows.clear()
