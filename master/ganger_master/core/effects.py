"""What a shell owes the core after an event, once the state that caused it is durable.

The order of obligations: commit `state.take_changes()` and every `History` row in one transaction, then let the other
effects out, in the order given.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from msgspec import Struct, field


class NodeNews(Struct, frozen=True):
    """What is wanted on a node changed: answer its held Reconcile with `desired.desired_of(state, node)`."""

    node: str


class JobNews(Struct, frozen=True):
    """A job changed in a way its watchers see."""

    number: int


class TurnsNews(Struct, frozen=True):
    """Turns were given: send these turn numbers (`state.turns`) to the stream of their scheduler."""

    turns: tuple[int, ...]


class ViewNews(Struct, frozen=True):
    """Rows of these nodes changed in the view."""

    nodes: tuple[str, ...]


class History(Struct, frozen=True):
    """One row of history, not truth. `subject` is "jobs/7" or "nodes/n1"; `kind` is lower_snake."""

    sequence: int
    time: float
    subject: str
    kind: str
    cause: str
    message: str = ""
    figures: Mapping[str, str] = field(default_factory=dict)


class WakeAt(Struct, frozen=True):
    """Send `Tick` at this time, if nothing wakes the core before; replaces any earlier one."""

    time: float


Effect: TypeAlias = NodeNews | JobNews | TurnsNews | ViewNews | History | WakeAt
