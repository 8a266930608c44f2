"""What a batch has changed, and what the shell owes for it once that is durable.

The order of obligations: commit `state.take_changes()` and every `HistoryRow` in one transaction, then let the rest
out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import msgspec
from ganger.cluster.resources import ConfigurationSet
from msgspec import Struct
from msgspec.structs import replace

from ganger_master.core.gang_model import Gang, TimesliceGroup
from ganger_master.core.job_model import JobRecord, Request
from ganger_master.core.node_model import Counters, Element, Node


class HistoryRow(Struct, frozen=True, gc=False):
    """One row of history, not truth. `subject` is "jobs/7" or "nodes/n1"; `kind` is lower_snake."""

    sequence: int
    time: float
    subject: str
    kind: str
    cause: str
    message: str = ""
    figures: Mapping[str, str] = msgspec.field(default_factory=dict)


class Effects(Struct, frozen=True, gc=False):
    """The effects of one batch; empty when nothing happened."""

    history: tuple[HistoryRow, ...] = ()
    # Jobs that changed in a way their watchers see.
    jobs: tuple[int, ...] = ()
    # Nodes whose wanted set changed: answer their held Reconcile with `state.desired.of(node)`.
    nodes: tuple[str, ...] = ()
    # Nodes whose rows in the view changed.
    rows: tuple[str, ...] = ()
    # Turns that were given: send them (`state.leases`) to the stream of their scheduler.
    turns: tuple[int, ...] = ()
    # Send `Tick` at this time, if nothing wakes the core before; replaces any earlier one. None: unchanged.
    wake_at: float | None = None


# Characters of a text that is shown to people.
TEXT_MOST: Final = 1_000


def cut(text: str, most: int = TEXT_MOST) -> str:
    """Return the text, or its beginning with a mark that there was more."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


ELEMENT_TYPES: Final[Mapping[str, type[Element]]] = {
    "configuration_set": ConfigurationSet,
    "node": Node,
    "job": JobRecord,
    "request": Request,
    "gang": Gang,
    "node_set": TimesliceGroup,
    "counters": Counters,
}


class StoredChanges(Struct, frozen=True, gc=False):
    """Elements to insert or replace, and keys to remove: (kind, key)."""

    puts: Mapping[tuple[str, str], Element]
    removes: tuple[tuple[str, str], ...]

    def __bool__(self) -> bool:
        return bool(self.puts or self.removes)


class Unstored:
    """Elements and history that a store does not have yet. is_kept: False where only the decisions matter."""

    def __init__(self, is_kept: bool) -> None:
        self.is_kept = is_kept
        # In the order in which they happened.
        self.history: list[HistoryRow] = []
        self._puts: dict[tuple[str, str], Element] = {}
        self._removes: dict[tuple[str, str], None] = {}
        self._counters_taken: Counters | None = None

    def put(self, key: tuple[str, str], element: Element) -> None:
        if self.is_kept:
            self._puts[key] = element
            self._removes.pop(key, None)

    def remove(self, key: tuple[str, str]) -> None:
        if self.is_kept:
            self._puts.pop(key, None)
            self._removes[key] = None

    def note(self, row: HistoryRow) -> None:
        self.history.append(row)

    def take_history(self) -> tuple[HistoryRow, ...]:
        history, self.history = tuple(self.history), []
        return history

    def take(self, counters: Counters) -> StoredChanges:
        """Return what became different since the last call. The caller stores it before any effect leaves."""
        if counters != self._counters_taken:
            self._counters_taken = replace(counters)
            self.put(("counters", ""), self._counters_taken)
        changes = StoredChanges(self._puts, tuple(self._removes))
        self._puts, self._removes = {}, {}
        return changes


@dataclass(slots=True)
class Dirty:
    """Elements touched: `jobs`, `rows`, `arenas`, `sets`, `arrays` by the present event, others by the whole batch."""

    jobs: dict[int, None] = field(default_factory=dict)
    rows: dict[str, None] = field(default_factory=dict)
    arenas: dict[int, None] = field(default_factory=dict)
    sets: dict[int, None] = field(default_factory=dict)
    # Numbers of arrays of which a member may have ended.
    arrays: dict[int, None] = field(default_factory=dict)
    # By node: new gangs and which of their pieces is there, if nothing else has changed there, else empty.
    wants: dict[str, list[tuple[Gang, int]]] = field(default_factory=dict)
    news: dict[int, None] = field(default_factory=dict)
    # Nodes whose rows differ from before.
    shown: dict[str, None] = field(default_factory=dict)
