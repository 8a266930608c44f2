"""Nodes whose daemons do not call. Who has been silent for longer than a daemon is that has nothing to tell takes no
gangs until it calls: nobody knows whether what is ordered there would ever be heard. Who has been for so long that its
ranks no longer step is lost, and its jobs go on elsewhere.
"""

from __future__ import annotations

import math
from typing import Final

from msgspec.structs import replace

from ganger_master.core import observation
from ganger_master.core.state import State

_TICK_SECONDS: Final = 0.001


def follow(state: State, now: float, cause: str) -> None:
    """Looks through all nodes, but only when one of them can have turned silent or be lost."""
    if state.next_silence_check is None or now < state.next_silence_check:
        return
    silent_after = math.inf if state.silent_after is None else state.silent_after
    lost_after = math.inf if state.lost_after is None else state.lost_after
    silent, lost, later = [], [], math.inf
    for name, answered in state.last_answer.items():
        node = state.nodes[name]
        if node.lost:
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
        state.history(now, f"nodes/{name}", "node_silent", cause, f"it has not called for {silent_after:.0f} s")
    for name in sorted(lost):
        observation.lose(state, name, now, cause, "it has not called for longer than lost_after")


def end(state: State, name: str, now: float, cause: str) -> None:
    """The node's daemon has called and is answered."""
    state.note_answer(name, now)
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
