"""Availability of nodes: heartbeats, silent and lost nodes, the condition for extending a node's lease, jumps of the
clock, and drains.

A daemon counts its lease from the sending of the call that was answered. A newer master waits for lost_after and a
margin from the moment at which it took the store over. So an answer is safe if the store was still this master's at,
or shortly before, the time at which it received the call: the lease then ends within the newer master's margin.

A node that is silent for longer than any daemon without news takes no gangs until it calls: an order may not reach it.
A node that has been silent for so long that its ranks no longer step is lost, and its jobs continue elsewhere. When at
least half of the nodes fall silent at once, the master or its network is more likely to blame than the nodes. Then they
are lost after twice the time, and never while no node calls at all: no node could take their jobs, and their processes
are only paused. When the clock was set, or the master stood still and answered no call, the silence is the master's
own: no node is lost for it, and no lease counts as unused. Durations are counted on as before.

Each job on a draining node is moved, or parked to storage where no place or no way is found, and so is each job on a
device with a fault.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from ganger.cluster.refusals import Reason, Refusal
from ganger.cluster.resources import Claim, LocalityLevel
from ganger.job_state import JobState
from msgspec.structs import replace

from ganger_master.core import approval, attempts, moves, observation, reservations, usage
from ganger_master.core.colocation import has_arenas
from ganger_master.core.commands import Tick
from ganger_master.core.events import JobSuspended, MoveBegun, NodeAnswered, NodeLost
from ganger_master.core.gang_model import Gang, GangIntent, GangPhase
from ganger_master.core.job_model import JobRecord, SuspendLevel
from ganger_master.core.node_faults import LeaveCause, LeaveReason, leave_cause
from ganger_master.core.node_model import Node
from ganger_master.core.plan_changes import Goal, Purpose
from ganger_master.core.settings import CoreSettings
from ganger_master.core.state import State

# The share of the margin by which the last check may precede the call; the rest is for clocks that drift.
_SHARE_OF_MARGIN: Final = 1.0 / 30.0


def covers(settings: CoreSettings, verified_at: float, received_at: float) -> bool:
    """Return whether a check of the store that began at `verified_at` permits an answer to a call of `received_at`.

    Both are seconds of one clock that is never set and that counts the time the machine sleeps."""
    return received_at <= verified_at + settings.lost_margin_s * _SHARE_OF_MARGIN


_TICK_S: Final = 0.001
# Silent nodes that it takes to suspect the master: one alone is compared with nothing.
_AT_LEAST: Final = 2
# The share of the nodes that it takes; and by how much lost_after is multiplied for them.
_LARGE_SHARE: Final = 0.5
_PATIENCE: Final = 2.0


def follow(state: State, now: float, cause: str) -> None:
    """Review all nodes, but only when one of them can have turned silent or be lost."""
    if state.nodes.next_silence_check is None or now < state.nodes.next_silence_check:
        return
    silent_after = math.inf if state.silent_after is None else state.silent_after
    lost_after = math.inf if state.lost_after is None else state.lost_after
    silent, lost, later = [], [], math.inf
    cut_off = fallen_at_once(state, now)
    for name, answered in state.nodes.last_answer.items():
        node = state.nodes[name]
        if node.lost:
            continue
        # While no node calls there is no such time: the clock starts again when one does.
        lost_at = cut_off.get(name, answered + lost_after)
        if now > lost_at:
            lost.append(name)
            continue
        later = min(later, lost_at)
        # A node that has not reported its gangs takes none in any case.
        if node.heard and not node.silent:
            if now > answered + silent_after:
                silent.append(name)
            else:
                later = min(later, answered + silent_after)
    # The same instant is not yet late: look again just after it.
    state.nodes.next_silence_check = max(later, now) + _TICK_S if later < math.inf else None
    for name in sorted(silent):
        state.put_node(replace(state.nodes[name], silent=True))
        why = f"; {suspicion(cut_off[name])}" if name in cut_off else ""
        state.history(now, f"nodes/{name}", "node_silent", cause, f"it has not called for {silent_after:.0f} s{why}")
    for name in sorted(lost):
        observation.lose(state, NodeLost(now, cause, name, "it has not called for longer than lost_after"))


def fallen_at_once(state: State, now: float) -> Mapping[str, float]:
    """Return the silent nodes whose silence may be the master's own, each with the time at which it is lost even so.

    Those are nodes that fell silent within one heartbeat window of each other, at least two and at least half of all. A
    node that an operator has declared lost meanwhile counts, too. The time is infinite while no node calls."""
    window = state.silent_after
    if window is None:
        return {}
    nodes = state.nodes
    fallen = {
        name: answered
        for name, answered in state.nodes.last_answer.items()
        if now > answered + window and not nodes[name].unanswerable
    }
    known = sum([not nodes[name].lost for name in state.nodes.last_answer])
    calling = known - sum([not nodes[name].lost for name in fallen])
    if len(fallen) < max(_AT_LEAST, calling):
        return {}
    lost_after = math.inf if state.lost_after is None or not calling else _PATIENCE * state.lost_after
    times = sorted(fallen.values())
    lost_times = sorted([answered for name, answered in fallen.items() if nodes[name].lost])
    found = {}
    for name, answered in fallen.items():
        together = _within(times, answered, window)
        if together < _AT_LEAST or together < _LARGE_SHARE * (known + _within(lost_times, answered, window)):
            continue
        if not nodes[name].lost:
            found[name] = answered + lost_after
    return found


def _within(times: list[float], middle: float, window: float) -> int:
    return bisect_right(times, middle + window) - bisect_left(times, middle - window)


def suspicion(lost_at: float) -> str:
    """Return the text for a node of `fallen_at_once`. `lost_at`: its time there."""
    which = "all nodes" if lost_at == math.inf else "half of the nodes or more"
    return f"{which} fell silent at once: the master may be cut off"


def note_call(state: State, name: str, now: float) -> None:
    """Start the clock of a node whose daemon has called. If it fell silent with half of the nodes or more, or no node
    called, the clocks of the others start again."""
    window, before = state.silent_after, state.nodes.last_answer.get(name)
    if window is not None and (before is None or now > before + window):
        for other in fallen_at_once(state, now):
            state.note_answer(other, now)
    state.note_answer(name, now)


def note_answer(state: State, event: NodeAnswered) -> None:
    """Record that a node's daemon has called, and is answered or cannot be. In that case the node takes no gangs, and
    the time since its last answer runs on, because its ranks stop after that time as well."""
    name, node, text = f"nodes/{event.node}", state.nodes[event.node], event.problem
    if text:
        state.put_node(replace(node, unanswerable=text))
        state.history(event.time, name, "node_silent", event.cause, text)
        return
    note_call(state, node.name, event.time)
    if node.silent or node.unanswerable:
        text = "it calls again" if node.silent else "its calls are answered again"
        state.put_node(replace(node, silent=False, unanswerable=""))
        state.history(event.time, name, "node_ready", event.cause, text)


# A smaller difference is drift, which the margin beyond lost_after covers.
_SET_S: Final = 5.0
_STILL_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class ClockReading:
    """Two clocks read at once, in seconds: the wall clock, which can be set, and a monotonic one."""

    wall: float
    steady: float


def noticed(before: ClockReading, now: ClockReading) -> Tick | None:
    """Return the tick to apply before all else if the clock was set or the master stood still; None otherwise.

    before: a reading of only seconds ago, unless the master stood still."""
    passed = now.steady - before.steady
    set_by = now.wall - before.wall - passed
    is_set, stood_still = abs(set_by) >= _SET_S, passed >= _STILL_S
    return Tick(set_by if is_set else 0.0, stood_still) if is_set or stood_still else None


def forgive(state: State, now: float, set_by: float) -> None:
    """Continue as if every node had been answered now; silent nodes stay silent until they call.

    set_by: seconds by which the clock was set forward; negative: back."""
    state.nodes.next_silence_check = None
    for node in state.nodes.values():
        if not node.lost:
            state.note_answer(node.name, now)
    state.leases.drop_all()
    if set_by:
        _move_times(state, set_by)


def _move_times(state: State, set_by: float) -> None:
    def moved(time: float) -> float:
        return time + set_by if time else 0.0

    state.queue.set_clock(moved)
    state.leases.set_clock(moved)
    for number in list(state.jobs.live):
        job = state.jobs[number]
        names = ("pending_since", "running_since", "again_at")
        state.put_job(replace(job, **{name: moved(getattr(job, name)) for name in names}))
    usage.set_clock(state, set_by)
    for gang in list(state.gangs.values()):
        pieces = tuple([replace(piece, idle_since=moved(piece.idle_since)) for piece in gang.pieces])
        idle = gang.idle and replace(gang.idle, since=moved(gang.idle.since), park_time=moved(gang.idle.park_time))
        times = {"since": moved(gang.since), "refused_at": moved(gang.refused_at)}
        state.put_gang(replace(gang, pieces=pieces, idle=idle, **times))


# A job whose storage was full is not stopped again sooner: each try costs it a pause.
_REFUSED_S = 60.0


def follow_drains(state: State, now: float) -> None:
    """Begin to move the next job off a draining node, off one that is reserved for other users, or off a device with a
    fault; one at a time, because each changes the free places."""
    reserved = [name for name in state.nodes.reserved if name not in state.nodes.draining]
    for name in (*state.nodes.draining, *reserved, *sorted(state.nodes.faulty)):
        for epoch in list(state.gangs.places_on.get(name, ())):
            gang = state.gangs.get(epoch)
            if gang is not None and _what_it_leaves(state, gang, [name]) is not None:
                _empty(state, state.jobs[gang.job], gang, now, state.nodes[name])
            if state.dirty.jobs:
                return


def _what_it_leaves(state: State, gang: Gang, names: Iterable[str]) -> LeaveCause | None:
    """Return why a gang has to leave the first of these nodes that it has to leave; None if it may stay on all."""
    for name in names:
        node = state.nodes.get(name)
        cause = None if node is None else leave_cause(node, gang)
        if cause is None:
            continue
        if cause.reason is LeaveReason.RESERVED and reservations.may_stay(state, state.jobs[gang.job], cause.detail):
            continue
        return cause
    return None


def held_up(state: State, job: JobRecord, now: float) -> tuple[Refusal, ...]:
    """Return why a job is still on a draining node, or on a device with a fault: what it waits for, then what it lacks
    elsewhere.

    Empty for a job that is moving away, and for one that is on neither."""
    gang = state.gangs.get(job.epoch)
    cause = None if gang is None else _what_it_leaves(state, gang, gang.nodes)
    if gang is None or cause is None or job.next_epoch or job.ending is not None:
        return ()

    def waits(text: str) -> Refusal:
        return Refusal(Reason.NODE_UNAVAILABLE, detail=f"{cause.text}: {text}")

    if gang.park_level is SuspendLevel.CHECKPOINT or (
        gang.intent is GangIntent.PARK and gang.phase is GangPhase.STOPPING
    ):
        return ()
    if gang.refused_at and now - gang.refused_at < _REFUSED_S:
        return (waits(f"saving it failed ({job.trouble}), and is tried again after a minute"),)
    if not job.capabilities.known or (gang.intent is GangIntent.RUN and gang.phase is GangPhase.STARTING):
        return (waits("it goes once it steps"),)
    if gang.intent is not GangIntent.RUN:
        if state.policy.migrates and gang.parked_by_plan:
            return (waits("it goes on elsewhere once there is room"),)
        return (waits("it rests there and cannot be saved: resume it, or end it"),)
    if not _can_move(state, job, gang) and job.capabilities.presumed:
        return (waits("it stays until it ends, unless its agent speaks up, which it has not so far"),)
    if not _can_move(state, job, gang):
        return (waits("it stays until it ends, for it can neither be moved nor saved"),)
    is_saved = state.policy.migrates and job.preemptible and job.capabilities.checkpoint
    meanwhile = "is saved on storage if no job can make room" if is_saved else "runs on until then"
    if not any(other.takes_gangs for other in state.nodes.values()):
        return (waits(f"it goes once another node takes jobs, and {meanwhile}"),)
    lacks = [
        one for one in approval.lacks(state, job, _draining_nodes(state)) if one.reason is not Reason.NODE_UNAVAILABLE
    ]
    return (waits(f"it goes once there is room elsewhere, and {meanwhile}"), *lacks)


def _empty(state: State, job: JobRecord, gang: Gang, now: float, node: Node) -> None:
    cause = f"drain:{node.name}"
    if job.epoch != gang.epoch or job.next_epoch or job.ending is not None or not job.capabilities.known:
        return
    if gang.intent is GangIntent.PARK:
        # A planner that migrates moves it off a node that is emptied, but not off one that is reserved for some users.
        if state.policy.migrates and gang.parked_by_plan and not node.reserved_for:
            return
        _to_storage(state, job, gang, now, cause)
        return
    if gang.intent is not GangIntent.RUN or gang.phase is not GangPhase.RUNNING:
        return
    if _can_move(state, job, gang):
        found = _place_for(state, job, gang, now)
        if found is not None:
            claims, level = found
            moves.begin(state, MoveBegun(now, cause, job.number, claims, level, Purpose(Goal.DRAIN)))
            return
        if state.policy.migrates and node.is_emptied:
            # The planner may make room for it elsewhere. It receives which nodes are emptied, and no faults of devices.
            return
    _to_storage(state, job, gang, now, cause)


def _place_for(state: State, job: JobRecord, gang: Gang, now: float) -> tuple[tuple[Claim, ...], LocalityLevel] | None:
    """Return claims outside draining nodes and their locality level, or None. A search that failed is repeated only
    after devices were freed or `_LOOKED_S` passed."""
    freed, looked = state.nodes.drained_in_vain.get(gang.epoch, (-1, 0.0))
    if freed == state.view.freed and 0.0 <= now - looked < _LOOKED_S:
        return None
    found = approval.find_place(state, job, avoid=_draining_nodes(state))
    if found is None:
        state.nodes.drained_in_vain[gang.epoch] = (state.view.freed, now)
    return found


# To look for a place takes as long as many verdicts, and as many events come in a second.
_LOOKED_S = 5.0


def _can_move(state: State, job: JobRecord, gang: Gang) -> bool:
    can_leave = not gang.node_set or has_arenas(gang)
    return can_leave and job.capabilities.can_move and job.moves_aborted <= state.settings.moves_aborted_allowed


def _to_storage(state: State, job: JobRecord, gang: Gang, now: float, cause: str) -> None:
    """Park a job to storage, if it can be saved; otherwise it stays until it ends, because a drain loses no work."""
    if not job.capabilities.checkpoint or gang.park_level is SuspendLevel.CHECKPOINT:
        return
    if gang.refused_at and now - gang.refused_at < _REFUSED_S:
        return
    by_plan = job.state is not JobState.SUSPENDED
    purpose = Purpose(Goal.DRAIN)
    attempts.suspend(state, JobSuspended(now, cause, job.number, SuspendLevel.CHECKPOINT, by_plan, purpose))


def _draining_nodes(state: State) -> frozenset[str]:
    return frozenset(state.nodes.draining)
