"""What a shell owes the core after a batch, once the state that caused it is durable.

The order of obligations: commit `state.take_changes()` and every `History` row in one transaction, then let the rest
out.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct, field


class HistoryRow(Struct, frozen=True, gc=False):
    """One row of history, not truth. `subject` is "jobs/7" or "nodes/n1"; `kind` is lower_snake."""

    sequence: int
    time: float
    subject: str
    kind: str
    cause: str
    message: str = ""
    figures: Mapping[str, str] = field(default_factory=dict)


class Effects(Struct, frozen=True, gc=False):
    """All that is owed for one batch; empty when nothing happened."""

    history: tuple[HistoryRow, ...] = ()
    # Jobs that changed in a way their watchers see.
    jobs: tuple[int, ...] = ()
    # Nodes whose wanted set changed: answer their held Reconcile with `desired.desired_of(state, node)`.
    nodes: tuple[str, ...] = ()
    # Nodes whose rows in the view changed.
    rows: tuple[str, ...] = ()
    # Turns that were given: send them (`state.turns`) to the stream of their scheduler.
    turns: tuple[int, ...] = ()
    # Send `Tick` at this time, if nothing wakes the core before; replaces any earlier one. None: as said before.
    wake_at: float | None = None
