"""Nodes whose daemons do not call. Who has been silent for longer than a daemon is that has nothing to tell takes no
gangs until it calls: nobody knows whether what is ordered there would ever be heard. Who has been for so long that its
ranks no longer step is lost, and its jobs go on elsewhere.

When all nodes fall silent at once, the master is more likely cut off than all nodes dead. Then the clock declares none
of them lost: no node could take their jobs, and their processes are only paused.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Final

from msgspec.structs import replace

from ganger_master.core import observation
from ganger_master.core.state import State

_TICK_SECONDS: Final = 0.001
# Of one node that is silent there is nothing to compare with.
_AT_LEAST: Final = 2
ALL_AT_ONCE: Final = "all nodes fell silent at once: the master may be cut off"


def follow(state: State, now: float, cause: str) -> None:
    """Looks through all nodes, but only when one of them can have turned silent or be lost."""
    if state.next_silence_check is None or now < state.next_silence_check:
        return
    silent_after = math.inf if state.silent_after is None else state.silent_after
    lost_after = math.inf if state.lost_after is None else state.lost_after
    silent, lost, later = [], [], math.inf
    cut_off = fallen_at_once(state, now)
    for name, answered in state.last_answer.items():
        node = state.nodes[name]
        if node.lost:
            continue
        if name in cut_off:
            # Its clock starts again when one of them calls.
            if node.heard and not node.silent:
                silent.append(name)
            continue
        if now > answered + lost_after:
            lost.append(name)
            continue
        later = min(later, answered + lost_after)
        # Who has not told what it has takes no gangs in any case.
        if node.heard and not node.silent:
            if now > answered + silent_after:
                silent.append(name)
            else:
                later = min(later, answered + silent_after)
    # The same instant is not yet late: look again just after it.
    state.next_silence_check = max(later, now) + _TICK_SECONDS if later < math.inf else None
    for name in sorted(silent):
        state.put_node(replace(state.nodes[name], silent=True))
        why = f"; {ALL_AT_ONCE}" if name in cut_off else ""
        state.history(now, f"nodes/{name}", "node_silent", cause, f"it has not called for {silent_after:.0f} s{why}")
    for name in sorted(lost):
        observation.lose(state, name, now, cause, "it has not called for longer than lost_after")


def fallen_at_once(state: State, now: float) -> Collection[str]:
    """Return the nodes that the clock must not declare lost, because the master itself may be cut off.

    While no node calls, those are the nodes that fell silent within one heartbeat window of the last one, if at least
    two nodes did. Empty while a node calls. A node that an operator has declared lost counts among the two."""
    window = state.silent_after
    if window is None or any(now <= answered + window for answered in state.last_answer.values()):
        return ()
    newest = max(state.last_answer.values(), default=0.0)
    if any(node.unanswerable for node in state.nodes.values() if not node.lost):
        return ()
    together = [name for name, answered in state.last_answer.items() if answered >= newest - window]
    if len(together) < _AT_LEAST:
        return ()
    return {name for name in together if not state.nodes[name].lost}


def note_call(state: State, name: str, now: float) -> None:
    """Start the clock of a node whose daemon has called; if all nodes were silent, those of the others start again."""
    window, before = state.silent_after, state.last_answer.get(name)
    if window is not None and (before is None or now > before + window):
        for other in fallen_at_once(state, now):
            state.note_answer(other, now)
    state.note_answer(name, now)


def end(state: State, name: str, now: float, cause: str) -> None:
    """The node's daemon has called and is answered."""
    note_call(state, name, now)
    node = state.nodes[name]
    if node.silent or node.unanswerable:
        message = "it calls again" if node.silent else "its calls are answered again"
        state.put_node(replace(node, silent=False, unanswerable=""))
        state.history(now, f"nodes/{name}", "node_ready", cause, message)


def note_unanswerable(state: State, name: str, problem: str, now: float, cause: str) -> None:
    """The node's daemon has called, and what it is to do cannot be sent: it takes no gangs, and the time since its last
    answer goes on, for its ranks stop after that time as well."""
    state.put_node(replace(state.nodes[name], unanswerable=problem))
    state.history(now, f"nodes/{name}", "node_silent", cause, problem)
