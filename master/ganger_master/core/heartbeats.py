"""Heartbeats of nodes: silent and lost nodes, the condition for extending a node's lease, and jumps of the clock.

A daemon counts its lease from the sending of the call that was answered. A newer master waits for lost_after and a
margin from the moment at which it took the store over. So an answer is safe if the store was still this master's at,
or shortly before, the time at which it received the call: the lease then ends within the newer master's margin.

A node that is silent for longer than any daemon without news takes no gangs until it calls: an order may not reach it.
A node that has been silent for so long that its ranks no longer step is lost, and its jobs go on elsewhere. When at
least half of the nodes fall silent at once, the master or its network is more likely to blame than the nodes. Then they
are lost after twice the time, and never while no node calls at all: no node could take their jobs, and their processes
are only paused.

When the clock was set, or the master stood still and answered no call, the silence is the master's own: no node is
lost for it, and no lease counts as unused. Durations are counted on as before.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from msgspec.structs import replace

from ganger_master.core import observation
from ganger_master.core.commands import Tick
from ganger_master.core.events import NodeAnswered, NodeLost
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
    state.nodes.check_silence_at(max(later, now) + _TICK_S if later < math.inf else None)
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
    state.nodes.check_silence_at(None)
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
        state.put_job(
            replace(
                job,
                pending_since=moved(job.pending_since),
                running_since=moved(job.running_since),
                again_at=moved(job.again_at),
            )
        )
    for gang in list(state.gangs.values()):
        state.put_gang(replace(gang, since=moved(gang.since), refused_at=moved(gang.refused_at)))
