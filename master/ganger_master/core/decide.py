"""Commands to events: whether a command is accepted, and what happens then. Reads the state, changes nothing."""

from __future__ import annotations

from typing import Final, assert_never

from ganger.cluster.claims import resplit_cores
from ganger.cluster.resources import Claim, ConfigurationSet
from ganger.job_state import JobState
from msgspec import Struct
from msgspec.structs import replace

from ganger_master.core import arrays, commands, events, job_updates, quarantine, rollback
from ganger_master.core.answers import Answer, Done, JobAnswer, NodeAnswer, Refused, SessionAnswer
from ganger_master.core.approval import judge_change, level_of
from ganger_master.core.colocation import per_device
from ganger_master.core.commands import Command
from ganger_master.core.elastic import check_resize, check_size, place_resized, rests_without_devices
from ganger_master.core.events import Event
from ganger_master.core.gang_model import GangIntent
from ganger_master.core.job_model import SuspendLevel
from ganger_master.core.node_model import Node
from ganger_master.core.placement_leases import release_gang, request_gang
from ganger_master.core.plans import propose_plan
from ganger_master.core.preconditions import busy, check_move, check_suspend, find_job, not_running, unfinished
from ganger_master.core.state import State
from ganger_master.core.submission import check_share, check_submission
from ganger_master.core.user_usage import spec_bytes


class Decision(Struct, frozen=True, gc=False):
    """The events of a command and its answer once they are durable; a refusal has no events, or volatile ones."""

    events: tuple[Event, ...]
    answer: Answer


def decide(state: State, command: Command, now: float) -> Decision:
    if state.counters.restoring is not None and (refused := rollback.refused(state, command)) is not None:
        return Decision((), refused)
    if isinstance(command, commands.PlacementCommand):
        return _decide_placement(state, command, now)
    if isinstance(command, commands.NodeCommand):
        return _decide_node(state, command, now)
    if isinstance(command, commands.JobCommand):
        return _decide_job(state, command, now)
    if isinstance(command, commands.RestoreCommand):
        return _decide_restore(state, command, now)
    return _tick(state, command, now)


def _decide_placement(state: State, command: commands.PlacementCommand, now: float) -> Decision:
    match command:
        case commands.RequestGang():
            return Decision(*request_gang(state, command, now))
        case commands.ReleaseGang():
            return Decision(*release_gang(state, command, now))
        case commands.ProposePlan():
            return Decision(*propose_plan(state, command, now))
        case commands.ClaimTurns():
            return _claim_turns(state, command, now)
        case _:
            assert_never(command)


def _decide_job(state: State, command: commands.JobCommand, now: float) -> Decision:
    match command:
        case commands.SubmitJob():
            return _submit(state, command, now)
        case commands.CancelJob():
            return _cancel(state, command, now)
        case commands.UpdateJob():
            return Decision(*job_updates.update(state, command, now))
        case commands.SuspendJob():
            return _suspend(state, command, now)
        case commands.ResumeJob():
            return _resume(state, command, now)
        case commands.MoveJob():
            return _move(state, command, now)
        case commands.RetuneJob():
            return _retune(state, command, now)
        case commands.ResizeJob():
            return _resize(state, command, now)
        case commands.SubmitArray():
            return Decision(*arrays.submit(state, command, now))
        case commands.CancelArray():
            return Decision(*arrays.cancel(state, command, now))
        case commands.UpdateArray():
            return Decision(*job_updates.update_array(state, command, now))
        case commands.RecordMetric():
            return Decision(*arrays.record(state, command, now))
        case _:
            assert_never(command)


def _decide_node(state: State, command: commands.NodeCommand, now: float) -> Decision:
    match command:
        case commands.Observe():
            return _observe(state, command, now)
        case commands.Answer():
            return _answer(state, command, now)
        case commands.OpenSession():
            return _open_session(state, command, now)
        case commands.DrainNode() | commands.CordonNode() | commands.UncordonNode():
            return _mark(state, command, now)
        case commands.DeclareLost():
            return _declare_lost(state, command, now)
        case commands.RemoveNode():
            return _remove_node(state, command, now)
        case _:
            assert_never(command)


def _decide_restore(state: State, command: commands.RestoreCommand, now: float) -> Decision:
    match command:
        case commands.OpenStore():
            return Decision(*rollback.decide_open(state, command, now))
        case commands.NoteEnds():
            return _note_ends(state, command, now)
        case commands.GoOn():
            return Decision(*rollback.decide_go_on(state, command, now))
        case commands.EndQuarantined():
            return Decision(*quarantine.decide_end(state, command, now))
        case commands.AdoptQuarantined():
            return Decision(*quarantine.decide_adopt(state, command, now))
        case _:
            assert_never(command)


def _submit(state: State, command: commands.SubmitJob, now: float) -> Decision:
    number = state.jobs.requests.get((command.user, command.request_id)) if command.request_id else None
    if number is not None:
        job = state.jobs[number]
        if now - job.create_time <= state.settings.request_kept_s:
            if job.submitted_spec == command.spec:
                return Decision((), JobAnswer(number))
            text = f"request id {command.request_id} was used for {job.name} with another spec; use a new one"
            return Decision((), Refused("REQUEST_REUSED", text, {"job": job.name}))
    former = state.jobs.former.get((command.user, command.request_id))
    if former is not None and now - former.time <= state.settings.request_kept_s:
        name = f"jobs/{former.number}"
        text = f"request id {command.request_id} was accepted as {name}, which has ended and is no longer kept"
        return Decision((), Refused("REQUEST_REUSED", text, {"job": name}))
    refused = check_submission(state, command.spec, command.user)
    if refused is None and command.limited:
        refused = check_share(state, command.user, 1, spec_bytes(command.spec))
    if refused is not None:
        return Decision((), refused)
    number = state.counters.next_job
    event = events.JobSubmitted(
        now, _user(command.user), number, command.uid, command.user, command.request_id, command.spec
    )
    return Decision((event,), JobAnswer(number))


def _cancel(state: State, command: commands.CancelJob, now: float) -> Decision:
    job = find_job(state, command.number)
    if isinstance(job, Refused):
        return Decision((), job)
    if job.state is JobState.CANCELLED or job.ending is JobState.CANCELLED:
        return Decision((), JobAnswer(job.number))
    job = unfinished(state, command.number)
    if isinstance(job, Refused):
        return Decision((), job)
    event = events.JobCancelled(now, _user(command.user), job.number, command.reason)
    return Decision((event,), JobAnswer(job.number))


def _suspend(state: State, command: commands.SuspendJob, now: float) -> Decision:
    job = unfinished(state, command.number)
    if isinstance(job, Refused):
        return Decision((), job)
    level = check_suspend(state, job, command.level)
    if isinstance(level, Refused):
        return Decision((), level)
    if level is SuspendLevel.NONE:
        return Decision((), JobAnswer(job.number))
    return Decision((events.JobSuspended(now, _user(command.user), job.number, level),), JobAnswer(job.number))


def _resume(state: State, command: commands.ResumeJob, now: float) -> Decision:
    job = unfinished(state, command.number)
    if isinstance(job, Refused):
        return Decision((), job)
    if job.state is not JobState.SUSPENDED:
        return Decision((), JobAnswer(job.number))
    gang = state.gangs.get(job.epoch)
    if gang is not None and job.ending is None and gang.park_level is SuspendLevel.CHECKPOINT:
        return Decision((), busy(job, "its checkpoint is being written"))
    return Decision((events.JobResumed(now, _user(command.user), job.number),), JobAnswer(job.number))


def _move(state: State, command: commands.MoveJob, now: float) -> Decision:
    job = unfinished(state, command.number)
    if isinstance(job, Refused):
        return Decision((), job)
    claims = check_move(state, job, command.nodes)
    if isinstance(claims, Refused):
        return Decision((), claims)
    event = events.MoveBegun(now, _user(command.user), job.number, claims, level_of(state, claims))
    return Decision((event,), JobAnswer(job.number))


def _retune(state: State, command: commands.RetuneJob, now: float) -> Decision:
    job = unfinished(state, command.number)
    if isinstance(job, Refused):
        return Decision((), job)
    gang = state.gangs.get(job.epoch)
    if job.next_epoch or job.ending is not None:
        return Decision((), busy(job, "it is being moved or ends"))
    if gang is None or gang.intent is not GangIntent.RUN or job.state is not JobState.HOLDING:
        return Decision((), not_running(job, gang))
    if any(piece.gone for piece in gang.pieces):
        return Decision((), busy(job, "a part of it has ended"))
    if gang.epoch in state.gangs.set_of and not command.repin:
        return Decision((), busy(job, "it takes turns with others on its devices, and so do its cores"))
    claims = gang.claims
    if not command.repin:
        claims = tuple(_with_cores(state, claim, command.millicores * sum(claim.tasks)) for claim in gang.claims)
        refusals = judge_change(state, job, claims, holding=gang.claims, retune=True, arena=per_device(gang))
        if command.millicores <= 0 or refusals:
            text = refusals[0].message if refusals else "cores per task must be more than zero"
            return Decision((), Refused("CORES_REFUSED", f"{job.name}: {text}", {"job": job.name}))
    event = events.CoresChanged(now, _user(command.user), job.number, claims, command.repin)
    return Decision((event,), JobAnswer(job.number))


def _resize(state: State, command: commands.ResizeJob, now: float) -> Decision:
    job = unfinished(state, command.number)
    if isinstance(job, Refused):
        return Decision((), job)
    if rests_without_devices(state, job):
        refused = check_size(job, command.gpus)
        if refused is not None:
            return Decision((), refused)
        chosen = events.SizeChosen(now, _user(command.user), job.number, command.gpus)
        return Decision((chosen,), JobAnswer(job.number))
    gang = check_resize(state, job, command.gpus)
    if isinstance(gang, Refused):
        return Decision((), gang)
    claims = place_resized(state, job, gang, command.gpus)
    if isinstance(claims, Refused):
        return Decision((), claims)
    event = events.ResizeBegun(now, _user(command.user), job.number, claims, level_of(state, claims))
    return Decision((event,), JobAnswer(job.number))


def _open_session(state: State, command: commands.OpenSession, now: float) -> Decision:
    node = state.nodes.get(command.node)
    if node is not None and node.machine_uuid != command.machine_uuid and node.session and not node.lost:
        silent = now - state.nodes.last_answer.get(command.node, 0.0)
        if silent < state.settings.session_alive_s or state.gangs.places_on.get(command.node):
            text = (
                f"nodes/{node.name} belongs to another machine ({node.machine_uuid}) that answered {silent:.0f} s ago; "
                f"give this daemon another --node name, or, if it takes that one's place, `ganger lost {node.name}`"
            )
            return Decision((), Refused("NODE_NAME_TAKEN", text, {"node": f"nodes/{command.node}"}))
    wanted = command.configuration_set
    known = state.nodes.configuration_sets.get(wanted.name)
    if known is not None and known != wanted:
        text = f"configuration set {wanted.name!r} is known with other hardware; choose another name"
        return Decision((), Refused("CONFIGURATION_SET_MISMATCH", text, {"configuration_set": wanted.name}))
    if not _is_possible(wanted):
        text = f"configuration set {wanted.name!r}: at most {_DEVICES_LIMIT} devices, all groups of these, and a socket"
        return Decision((), Refused("CONFIGURATION_SET_MISMATCH", text, {"configuration_set": wanted.name}))
    if node is not None and node.configuration_set != wanted.name:
        refused = _check_hardware(state, node, command)
        if refused is not None:
            return Decision((), refused)
    token = state.counters.storage_token
    if command.storage_token and token and command.storage_token != token:
        text = "the storage directory belongs to another cluster; mount the right one or correct --storage"
        return Decision((), Refused("STORAGE_MISMATCH", text, {"node": f"nodes/{command.node}"}))
    cause, why = f"daemon:{command.node}", rollback.found_by_daemon(state, command)
    if why:
        store = events.StoreOpened(now, cause, state.counters.store, why, command.seen)
        # Before the session: all those that there are are void.
        session = f"{command.node}-{max(state.counters.next_session, command.seen.next_session)}"
        opened = events.SessionOpened(now, cause, command, session)
        return Decision((store, opened), SessionAnswer(command.node, session))
    session = f"{command.node}-{state.counters.next_session}"
    event = events.SessionOpened(now, cause, command, session)
    return Decision((event,), SessionAnswer(command.node, session))


def _check_hardware(state: State, node: Node, command: commands.OpenSession) -> Refused | None:
    """Other hardware is that of a machine with nothing on it: claims name devices and sockets by their numbers."""
    if node.boot_id and command.boot_id and node.boot_id != command.boot_id:
        # Nothing outlives a boot.
        return None
    there = state.gangs.living_on(node.name)
    if not there:
        return None
    jobs = ", ".join(dict.fromkeys(f"jobs/{gang.job}" for gang in there))
    was, wanted = node.configuration_set, command.configuration_set.name
    text = (
        f"nodes/{node.name} has something of {jobs} and was {was!r}, now it says {wanted!r}: start its daemon as "
        f"before, boot the machine, or `ganger lost {node.name}`, and they go on elsewhere"
    )
    return Refused("CONFIGURATION_SET_MISMATCH", text, {"node": f"nodes/{node.name}", "job": f"jobs/{there[0].job}"})


_DEVICES_LIMIT: Final = 64
_BYTES_LIMIT: Final = 1 << 50


def _is_possible(kind: ConfigurationSet) -> bool:
    """Return whether views can be made of a configuration set: its masks and sums must fit."""
    masks = [*(group.device_mask for group in kind.groups), *(socket.device_mask for socket in kind.sockets)]
    fits = kind.devices <= _DEVICES_LIMIT and max(kind.memory_bytes, kind.device_memory_bytes) <= _BYTES_LIMIT
    return bool(kind.sockets) and fits and not any(mask >> kind.devices for mask in masks)


def _observe(state: State, command: commands.Observe, now: float) -> Decision:
    refused = _check_session(state, command.node, command.session)
    if refused is not None:
        return Decision((), refused)
    node = state.nodes[command.node]
    if command.observation < node.observation:
        return Decision((), Done())
    return Decision((events.NodeObserved(now, f"daemon:{command.node}", command),), Done())


def _answer(state: State, command: commands.Answer, now: float) -> Decision:
    refused = _check_session(state, command.node, command.session)
    if refused is not None:
        return Decision((), refused)
    if command.problem and state.nodes[command.node].unanswerable == command.problem:
        return Decision((), Done())
    cause, version = f"daemon:{command.node}", command.desired_version
    event = events.NodeAnswered(now, cause, command.node, version, command.problem)
    return Decision((event,), Done())


def _check_session(state: State, name: str, session: str) -> Refused | None:
    node = state.nodes.get(name)
    if node is None or not session or node.session != session:
        text = f"session {session!r} of nodes/{name} is void; open a new one and keep what runs"
        return Refused("SESSION_SUPERSEDED", text, {"node": f"nodes/{name}"})
    return None


def _mark(
    state: State, command: commands.DrainNode | commands.CordonNode | commands.UncordonNode, now: float
) -> Decision:
    node = state.nodes.get(command.node)
    if node is None:
        return Decision((), _no_node(command.node))
    mark, reason = "UNCORDON", ""
    if not isinstance(command, commands.UncordonNode):
        mark = "DRAIN" if isinstance(command, commands.DrainNode) else "CORDON"
        reason = command.reason.strip()
        if not reason:
            text = f"say why nodes/{command.node} goes out of service (--reason)"
            return Decision((), Refused("REASON_MISSING", text, {"node": f"nodes/{command.node}"}))
    present = (node.draining, node.cordoned, node.state_reason)
    is_news = mark == "UNCORDON" and node.launch_failures > 0
    if present == (mark == "DRAIN", mark != "UNCORDON", reason) and not is_news:
        return Decision((), NodeAnswer(node.name))
    event = events.NodeMarked(now, _user(command.user), node.name, mark, reason)
    return Decision((event,), NodeAnswer(node.name))


def _declare_lost(state: State, command: commands.DeclareLost, now: float) -> Decision:
    node = state.nodes.get(command.node)
    if node is None:
        return Decision((), _no_node(command.node))
    if node.lost:
        return Decision((), NodeAnswer(node.name))
    refused = _check_silent(state, node, now)
    if refused is not None:
        return Decision((), refused)
    event = events.NodeLost(now, _user(command.user), node.name, "declared lost by an operator")
    return Decision((event,), NodeAnswer(node.name))


def _remove_node(state: State, command: commands.RemoveNode, now: float) -> Decision:
    node = state.nodes.get(command.node)
    if node is None:
        return Decision((), _no_node(command.node))
    refused = None if node.lost else _check_silent(state, node, now)
    if refused is not None:
        return Decision((), refused)
    there = state.gangs.living_on(node.name)
    if there:
        text = (
            f"jobs/{there[0].job} has a gang on nodes/{node.name}: drain the node and wait, or declare it lost if it "
            "does not come back"
        )
        return Decision((), Refused("NODE_BUSY", text, {"node": f"nodes/{node.name}", "job": f"jobs/{there[0].job}"}))
    return Decision((events.NodeRemoved(now, _user(command.user), node.name),), Done())


def _check_silent(state: State, node: Node, now: float) -> Refused | None:
    silent, enough = now - state.nodes.last_answer.get(node.name, 0.0), state.settings.session_alive_s
    if not node.session or silent >= enough:
        return None
    remedy = f"stop its daemon, and try again when it has been silent for {enough:g} s"
    text = f"nodes/{node.name} answered {silent:.1f} s ago: {remedy}"
    return Refused("NODE_ALIVE", text, {"node": f"nodes/{node.name}"})


def _claim_turns(state: State, command: commands.ClaimTurns, now: float) -> Decision:
    for number in command.jobs:
        job = find_job(state, number)
        if isinstance(job, Refused):
            return Decision((), job)
    return Decision((events.TurnsClaimed(now, f"scheduler:{command.scheduler}", command),), Done())


def _note_ends(state: State, command: commands.NoteEnds, now: float) -> Decision:
    if state.counters.restoring is None:
        return Decision((), Done())
    return Decision((events.EndsNoted(now, "master", command.ends),), Done())


def _tick(state: State, command: commands.Tick, now: float) -> Decision:
    passed = events.TimePassed(
        now, set_by=command.set_by, stood_still=command.stood_still, looks_again=command.looks_again, told=command.told
    )
    return Decision((passed,), Done())


def _with_cores(state: State, claim: Claim, millicores: int) -> Claim:
    row = state.view.row(claim.node)
    return replace(claim, millicores=resplit_cores(claim.millicores, row.free_millicores, millicores))


def _no_node(name: str) -> Refused:
    return Refused("NODE_NOT_FOUND", f"there is no nodes/{name}: `ganger nodes` lists them", {"node": f"nodes/{name}"})


def _user(user: str) -> str:
    return f"user:{user}"
