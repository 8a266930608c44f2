"""Commands to events: whether a command is accepted, and what happens then. Reads the state, changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from ganger.cluster.claims import resplit_cores
from ganger.cluster.resources import Claim, ConfigurationSet
from ganger.job_state import JobState
from msgspec.structs import replace

from ganger_master.core import (
    access_tokens,
    arrays,
    commands,
    events,
    job_updates,
    node_checkpoints,
    quarantine,
    reservations,
    rollback,
)
from ganger_master.core.answers import Done, JobAnswer, NodeAnswer, RefusedError, SessionAnswer
from ganger_master.core.approval import judge_change, level_of
from ganger_master.core.colocation import per_device
from ganger_master.core.commands import Command
from ganger_master.core.elastic import (
    check_resize,
    check_size,
    check_tasks,
    place_resized,
    rests_without_devices,
    tasks_text,
)
from ganger_master.core.events import Decision, Event
from ganger_master.core.gang_model import GangIntent
from ganger_master.core.job_model import JobRecord, SuspendLevel
from ganger_master.core.job_spec import Update
from ganger_master.core.node_model import Node
from ganger_master.core.placement_leases import release_gang, request_gang
from ganger_master.core.plan_changes import Goal, Purpose
from ganger_master.core.plans import propose_plan
from ganger_master.core.preconditions import busy, check_move, check_suspend, find_job, not_running, unfinished
from ganger_master.core.state import State
from ganger_master.core.state_indexes import spec_bytes
from ganger_master.core.submission import check_share, check_submission, repeated_request


def decide(state: State, command: Command, now: float) -> Decision:
    """Return the events of a command and its answer. A refusal has no events, or volatile ones."""
    try:
        rollback.check_may_decide(state, command)
        return _DECIDES[type(command)](state, command, now)
    except RefusedError as error:
        return (), error.refused


def _submit(state: State, command: commands.SubmitJob, now: float) -> Decision:
    known = repeated_request(state, command.user, command.request_id, now)
    if known is not None:
        if known.submitted_spec == command.spec:
            return (), JobAnswer(known.number)
        text = f"request id {command.request_id} was used for {known.name} with another spec; use a new one"
        raise RefusedError("REQUEST_REUSED", text, {"job": known.name})
    check_submission(state, command.spec, command.user)
    if command.limited:
        check_share(state, command.user, 1, spec_bytes(command.spec))
    number = state.counters.next_job
    event = events.JobSubmitted(
        now, _user(command), number, command.uid, command.user, command.request_id, command.spec
    )
    return (event,), JobAnswer(number)


def _cancel(state: State, command: commands.CancelJob, now: float) -> Decision:
    job = find_job(state, command.number)
    if job.state is JobState.CANCELLED or job.ending is JobState.CANCELLED:
        return (), JobAnswer(job.number)
    job = unfinished(state, command.number, "cancelled")
    return (events.JobCancelled(now, _user(command), job.number, command.reason),), JobAnswer(job.number)


def _suspend(state: State, command: commands.SuspendJob, now: float) -> Decision:
    job = unfinished(state, command.number, "suspended")
    level = check_suspend(state, job, command.level)
    if level is SuspendLevel.NONE:
        return (), JobAnswer(job.number)
    return (events.JobSuspended(now, _user(command), job.number, level),), JobAnswer(job.number)


def _resume(state: State, command: commands.ResumeJob, now: float) -> Decision:
    job = unfinished(state, command.number, "resumed")
    if job.state is not JobState.SUSPENDED:
        return (), JobAnswer(job.number)
    gang = state.gangs.get(job.epoch)
    if gang is not None and job.ending is None and gang.park_level is SuspendLevel.CHECKPOINT:
        raise busy(job, "its checkpoint is being written")
    return (events.JobResumed(now, _user(command), job.number),), JobAnswer(job.number)


def _move(state: State, command: commands.MoveJob, now: float) -> Decision:
    job = unfinished(state, command.number, "moved")
    claims = check_move(state, job, command.nodes)
    event = events.MoveBegun(now, _user(command), job.number, claims, level_of(state, claims))
    return (event,), JobAnswer(job.number)


def _retune(state: State, command: commands.RetuneJob, now: float) -> Decision:
    job = unfinished(state, command.number, "given other cores")
    gang = state.gangs.get(job.epoch)
    if job.next_epoch or job.ending is not None:
        raise busy(job, "it is being moved or ends")
    if gang is None or gang.intent is not GangIntent.RUN or job.state is not JobState.HOLDING:
        raise not_running(job, gang)
    if any(piece.gone for piece in gang.pieces):
        raise busy(job, "a part of it has ended")
    if gang.epoch in state.gangs.set_of and not command.repin:
        raise busy(job, "it is time-sliced with other jobs on its devices, and so do its cores")
    if command.repin:
        return (events.CoresChanged(now, _user(command), job.number, gang.claims, True),), JobAnswer(job.number)
    spec = job_updates.with_cores(job.spec, command.millicores)
    named = events.JobUpdated(now, _user(command), job.number, spec, Update(), "")
    happened: tuple[Event, ...] = () if spec == job.spec else (named,)
    if command.millicores:
        claims = tuple([_with_cores(state, claim, command.millicores * sum(claim.tasks)) for claim in gang.claims])
        refusals = judge_change(state, job, claims, holding=gang.claims, retune=True, arena=per_device(gang))
        if refusals:
            raise RefusedError("CORES_REFUSED", f"{job.name}: {refusals[0].message}", {"job": job.name})
        happened = (*happened, events.CoresChanged(now, _user(command), job.number, claims, False))
    elif not spec.gpus:
        text = f"{job.name} has no GPUs, so no cores are measured for it: give a number of cores"
        raise RefusedError("CORES_REFUSED", text, {"job": job.name})
    return happened, JobAnswer(job.number)


def _resize(state: State, command: commands.ResizeJob, now: float) -> Decision:
    job = unfinished(state, command.number, "resized")
    if command.tasks or job.spec.has_role_ranges:
        return _resize_roles(state, job, command, now)
    if rests_without_devices(state, job):
        check_size(job, command.gpus)
        return (events.SizeChosen(now, _user(command), job.number, command.gpus),), JobAnswer(job.number)
    claims = place_resized(state, job, check_resize(state, job, command.gpus), command.gpus)
    event = events.ResizeBegun(now, _user(command), job.number, claims, level_of(state, claims))
    return (event,), JobAnswer(job.number)


def _resize_roles(state: State, job: JobRecord, command: commands.ResizeJob, now: float) -> Decision:
    tasks, cause = check_tasks(state, job, command.tasks), _user(command)
    gpus = job.shape_for_tasks(tasks).gpus
    chosen = events.SizeChosen(now, cause, job.number, gpus, tasks)
    if not job.epoch:
        return (chosen,), JobAnswer(job.number)
    purpose = Purpose(Goal.RESIZE, detail=tasks_text(job.spec, tasks))
    stop = events.JobSuspended(now, cause, job.number, SuspendLevel.CHECKPOINT, by_plan=True, purpose=purpose)
    return (chosen, stop), JobAnswer(job.number)


def _open_session(state: State, command: commands.OpenSession, now: float) -> Decision:
    node = state.nodes.get(command.node)
    if node is not None and node.machine_uuid != command.machine_uuid and node.session and not node.lost:
        silent = now - state.nodes.last_answer.get(command.node, 0.0)
        if silent < state.settings.session_alive_s or state.gangs.places_on.get(command.node):
            text = (
                f"nodes/{node.name} belongs to another machine ({node.machine_uuid}) that answered {silent:.0f} s ago; "
                f"give this daemon another --node name, or, if it takes that one's place, `ganger lost {node.name}`"
            )
            raise RefusedError("NODE_NAME_TAKEN", text, {"node": f"nodes/{command.node}"})
    wanted = command.configuration_set
    known = state.nodes.configuration_sets.get(wanted.name)
    if known is not None and known != wanted:
        text = f"configuration set {wanted.name!r} is known with other hardware; choose another name"
        raise RefusedError("CONFIGURATION_SET_MISMATCH", text, {"configuration_set": wanted.name})
    if not _is_possible(wanted):
        text = f"configuration set {wanted.name!r}: at most {_DEVICES_LIMIT} devices, all groups of these, and a socket"
        raise RefusedError("CONFIGURATION_SET_MISMATCH", text, {"configuration_set": wanted.name})
    if node is not None and node.configuration_set != wanted.name:
        _check_hardware(state, node, command)
    token = state.counters.storage_token
    if command.storage_token and token and command.storage_token != token:
        text = "the storage directory belongs to another cluster; mount the right one or correct --storage"
        raise RefusedError("STORAGE_MISMATCH", text, {"node": f"nodes/{command.node}"})
    cause, why = f"daemon:{command.node}", rollback.found_by_daemon(state, command)
    happened: tuple[Event, ...] = ()
    number = state.counters.next_session
    if why:
        # Before the session: all those that there are are void.
        happened = (events.StoreOpened(now, cause, state.counters.store, why, command.seen),)
        number = max(number, command.seen.next_session)
    session = f"{command.node}-{number}"
    return (*happened, events.SessionOpened(now, cause, command, session)), SessionAnswer(command.node, session)


def _check_hardware(state: State, node: Node, command: commands.OpenSession) -> None:
    """Other hardware is that of a machine with nothing on it: claims name devices and sockets by their numbers."""
    if node.boot_id and command.boot_id and node.boot_id != command.boot_id:
        # Nothing outlives a boot.
        return
    there = state.gangs.living_on(node.name)
    if not there:
        return
    jobs = ", ".join(dict.fromkeys(f"jobs/{gang.job}" for gang in there))
    was, wanted = node.configuration_set, command.configuration_set.name
    text = (
        f"nodes/{node.name} has something of {jobs} and was {was!r}, now it says {wanted!r}: start its daemon as "
        f"before, boot the machine, or `ganger lost {node.name}`, and they go on elsewhere"
    )
    names = {"node": f"nodes/{node.name}", "job": f"jobs/{there[0].job}"}
    raise RefusedError("CONFIGURATION_SET_MISMATCH", text, names)


_DEVICES_LIMIT: Final = 64
_BYTES_LIMIT: Final = 1 << 50
_DIMENSIONS_LIMIT: Final = 16
_AMOUNT_LIMIT: Final = 1e12


def _is_possible(kind: ConfigurationSet) -> bool:
    """Return whether views can be made of a configuration set: its masks and sums must fit."""
    masks = [*(group.device_mask for group in kind.groups), *(socket.device_mask for socket in kind.sockets)]
    fits = kind.devices <= _DEVICES_LIMIT and max(kind.memory_bytes, kind.device_memory_bytes) <= _BYTES_LIMIT
    # NaN is in no range.
    are_amounts = all(0.0 <= amount <= _AMOUNT_LIMIT for amount in kind.dimensions.values())
    fits = fits and are_amounts and len(kind.dimensions) <= _DIMENSIONS_LIMIT
    return bool(kind.sockets) and fits and not any(mask >> kind.devices for mask in masks)


def _observe(state: State, command: commands.Observe, now: float) -> Decision:
    if command.observation < _node_in(state, command).observation:
        return (), Done()
    return (events.NodeObserved(now, f"daemon:{command.node}", command),), Done()


def _answer(state: State, command: commands.Answer, now: float) -> Decision:
    node = _node_in(state, command)
    if command.problem and node.unanswerable == command.problem:
        return (), Done()
    cause, version = f"daemon:{command.node}", command.desired_version
    return (events.NodeAnswered(now, cause, command.node, version, command.problem),), Done()


def _note_copies(state: State, command: commands.NoteCopies, now: float) -> Decision:
    node = _node_in(state, command)
    known = [(state.jobs.get(number), path) for number, path in command.copies]
    new = [(job.number, path) for job, path in known if job and node_checkpoints.is_new_copy(job, path, node.name)]
    if not new:
        return (), Done()
    return (events.CopiesNoted(now, f"daemon:{node.name}", node.name, tuple(new)),), Done()


def _node_in(state: State, command: commands.Observe | commands.Answer | commands.NoteCopies) -> Node:
    """Return the node of a session. Raises RefusedError for a session that is not the node's present one."""
    node, session = state.nodes.get(command.node), command.session
    if node is None or not session or node.session != session:
        text = f"session {session!r} of nodes/{command.node} is void; open a new one and keep what runs"
        raise RefusedError("SESSION_SUPERSEDED", text, {"node": f"nodes/{command.node}"})
    return node


def _mark(
    state: State, command: commands.DrainNode | commands.CordonNode | commands.UncordonNode, now: float
) -> Decision:
    node = _node_named(state, command.node)
    mark, reason = "UNCORDON", ""
    if not isinstance(command, commands.UncordonNode):
        mark = "DRAIN" if isinstance(command, commands.DrainNode) else "CORDON"
        reason = command.reason.strip()
        if not reason:
            text = f"say why nodes/{command.node} goes out of service (--reason)"
            raise RefusedError("REASON_MISSING", text, {"node": f"nodes/{command.node}"})
    elif command.tested:
        mark = "TEST"
    present = (node.draining, node.cordoned, node.state_reason)
    is_news = mark in ("UNCORDON", "TEST") and bool(node.launch_failures or node.slow)
    if mark == "TEST":
        is_news = is_news or node.test is None or bool(node.test.failure)
    elif mark == "UNCORDON":
        is_news = is_news or node.test is not None
    if present == (mark == "DRAIN", mark in ("DRAIN", "CORDON"), reason) and not is_news:
        return (), NodeAnswer(node.name)
    return (events.NodeMarked(now, _user(command), node.name, mark, reason),), NodeAnswer(node.name)


def _note_slow(state: State, command: commands.NoteSlowNode, now: float) -> Decision:
    node = state.nodes.get(command.node)
    # Other figures of a node that is slow already are no news.
    if node is None or bool(node.slow) == bool(command.reason):
        return (), Done()
    return (events.SlowNodeNoted(now, "health", node.name, command.reason),), Done()


def _reserve(state: State, command: commands.ReserveNodes, now: float) -> Decision:
    known = state.reservations.get(command.reservation.name)
    reservation = replace(command.reservation, user=command.user)
    if known == reservation:
        return (), Done()
    reservations.check(state, reservation, now)
    return (events.NodesReserved(now, _user(command), reservation),), Done()


def _update_reservation(state: State, command: commands.UpdateReservation, now: float) -> Decision:
    known = reservations.named(state, command.name)
    reservation = reservations.updated(known, command)
    if known == reservation:
        return (), Done()
    reservations.check(state, reservation, now, known)
    return (events.NodesReserved(now, _user(command), reservation),), Done()


def _delete_reservation(state: State, command: commands.DeleteReservation, now: float) -> Decision:
    reservations.named(state, command.name)
    return (events.ReservationDeleted(now, _user(command), command.name),), Done()


def _create_token(state: State, command: commands.CreateToken, now: float) -> Decision:
    return (events.TokenChanged(now, _user(command), access_tokens.made(state, command, now)),), Done()


def _revoke_token(state: State, command: commands.RevokeToken, now: float) -> Decision:
    token = access_tokens.revoked(state, command.name, now)
    if token == state.tokens[command.name]:
        return (), Done()
    return (events.TokenChanged(now, _user(command), token),), Done()


def _declare_lost(state: State, command: commands.DeclareLost, now: float) -> Decision:
    node = _node_named(state, command.node)
    if node.lost:
        return (), NodeAnswer(node.name)
    _check_silent(state, node, now)
    event = events.NodeLost(now, _user(command), node.name, "declared lost by an operator")
    return (event,), NodeAnswer(node.name)


def _remove_node(state: State, command: commands.RemoveNode, now: float) -> Decision:
    node = _node_named(state, command.node)
    if not node.lost:
        _check_silent(state, node, now)
    there = state.gangs.living_on(node.name)
    if there:
        text = (
            f"jobs/{there[0].job} has a gang on nodes/{node.name}: drain the node and wait, or declare it lost if it "
            "does not come back"
        )
        raise RefusedError("NODE_BUSY", text, {"node": f"nodes/{node.name}", "job": f"jobs/{there[0].job}"})
    return (events.NodeRemoved(now, _user(command), node.name),), Done()


def _check_silent(state: State, node: Node, now: float) -> None:
    silent, enough = now - state.nodes.last_answer.get(node.name, 0.0), state.settings.session_alive_s
    if node.session and silent < enough:
        remedy = f"stop its daemon, and try again when it has been silent for {enough:g} s"
        text = f"nodes/{node.name} answered {silent:.1f} s ago: {remedy}"
        raise RefusedError("NODE_ALIVE", text, {"node": f"nodes/{node.name}"})


def _claim_turns(state: State, command: commands.ClaimTurns, now: float) -> Decision:
    for number in command.jobs:
        find_job(state, number)
    return (events.TurnsClaimed(now, f"scheduler:{command.scheduler}", command),), Done()


def _note_ends(state: State, command: commands.NoteEnds, now: float) -> Decision:
    if state.counters.restoring is None:
        return (), Done()
    return (events.EndsNoted(now, "master", command.ends),), Done()


def _tick(state: State, command: commands.Tick, now: float) -> Decision:
    passed = events.TimePassed(
        now,
        set_by=command.set_by,
        stood_still=command.stood_still,
        looks_again=command.looks_again,
        newest_sent=command.newest_sent,
    )
    return (passed,), Done()


_DECIDES: Final[dict[type, Callable[[State, Any, float], Decision]]] = {
    commands.SubmitJob: _submit,
    commands.CancelJob: _cancel,
    commands.UpdateJob: job_updates.update,
    commands.SuspendJob: _suspend,
    commands.ResumeJob: _resume,
    commands.MoveJob: _move,
    commands.RetuneJob: _retune,
    commands.ResizeJob: _resize,
    commands.SubmitArray: arrays.submit,
    commands.CancelArray: arrays.cancel,
    commands.UpdateArray: job_updates.update_array,
    commands.RecordMetric: arrays.record,
    commands.RequestGang: request_gang,
    commands.ReleaseGang: release_gang,
    commands.ProposePlan: propose_plan,
    commands.ClaimTurns: _claim_turns,
    commands.Observe: _observe,
    commands.Answer: _answer,
    commands.OpenSession: _open_session,
    commands.DrainNode: _mark,
    commands.CordonNode: _mark,
    commands.UncordonNode: _mark,
    commands.DeclareLost: _declare_lost,
    commands.RemoveNode: _remove_node,
    commands.NoteCopies: _note_copies,
    commands.NoteSlowNode: _note_slow,
    commands.ReserveNodes: _reserve,
    commands.UpdateReservation: _update_reservation,
    commands.DeleteReservation: _delete_reservation,
    commands.CreateToken: _create_token,
    commands.RevokeToken: _revoke_token,
    commands.OpenStore: rollback.decide_open,
    commands.NoteEnds: _note_ends,
    commands.GoOn: rollback.decide_go_on,
    commands.EndQuarantined: quarantine.decide_end,
    commands.AdoptQuarantined: quarantine.decide_adopt,
    commands.Tick: _tick,
}


def _with_cores(state: State, claim: Claim, millicores: int) -> Claim:
    row = state.view.row(claim.node)
    return replace(claim, millicores=resplit_cores(claim.millicores, row.free_millicores, millicores))


def _node_named(state: State, name: str) -> Node:
    if name not in state.nodes:
        text = f"there is no nodes/{name}: `ganger nodes` lists them"
        raise RefusedError("NODE_NOT_FOUND", text, {"node": f"nodes/{name}"})
    return state.nodes[name]


def _user(
    command: commands.JobCommand | commands.NodeCommand | commands.ReservationCommand | commands.TokenCommand,
) -> str:
    return f"user:{command.user}"
