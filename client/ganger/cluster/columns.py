"""The changes of a view in their order, and the NumPy columns that scans read, which follow those changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

# Changes that are kept, beside a few for each node.
_MOST_NOTED = 1024


class Journal:
    """Slots in the order in which they changed.

    `changed_at`: by slot, how many changes there were with its last one; only the view writes it. No two changes have
    one number, which versions may have: node states bring those of another view."""

    __slots__ = ("changed_at", "forgotten", "full_at", "slots")

    def __init__(self, changed_at: list[int] | None = None, slots: Sequence[int] = ()) -> None:
        self.changed_at = changed_at or []
        self.slots = list(slots)
        # Changes before the first that is kept, and how many there are when `forget` is due.
        self.forgotten = 0
        self.full_at = _MOST_NOTED

    @property
    def changes(self) -> int:
        """Number of changes of nodes so far."""
        return self.forgotten + len(self.slots)

    def since(self, changes: int) -> Sequence[int] | None:
        """Return the slots that changed since there were so many changes, some several times; None if forgotten."""
        if changes < self.forgotten:
            return None
        return self.slots[changes - self.forgotten :]

    def note(self, slot: int) -> None:
        self.slots.append(slot)
        self.changed_at[slot] = noted = self.changes
        if noted >= self.full_at:
            self.forget()

    def forget(self) -> None:
        """Keep no more than some changes, and a few for each node."""
        if len(self.slots) > _MOST_NOTED + 4 * len(self.changed_at):
            self.forgotten += len(self.slots)
            self.slots.clear()
        self.full_at = self.forgotten + _MOST_NOTED + 4 * len(self.changed_at) + 1


@dataclass(slots=True)
class Columns:
    """Capacity of nodes, by slot. Slots without a node are never available."""

    free: NDArray[np.uint64]
    available: NDArray[np.bool_]
    millicores: NDArray[np.int64]
    memory: NDArray[np.int64]
    sets: NDArray[np.int32]
    racks: NDArray[np.int32]
    fabrics: NDArray[np.int32]

    @classmethod
    def empty(cls, size: int) -> Columns:
        """Return columns for `size` slots without nodes."""
        kinds: tuple[type[Any], ...] = (np.uint64, np.bool_, np.int64, np.int64, np.int32, np.int32, np.int32)
        made: list[Any] = [np.zeros(size, kind) for kind in kinds]
        return cls(*made)

    def copy(self) -> Columns:
        return Columns(*[getattr(self, name).copy() for name in Columns.__slots__])


# Writes the entries of some slots, which are those of the slice.
Fill: TypeAlias = Callable[[Columns, slice, Sequence[int]], None]


class ColumnTable:
    """The columns of one view, brought up to date when they are read."""

    def __init__(self) -> None:
        self._columns: Columns | None = None
        # How many changes there were when the columns were last brought up to date.
        self._at = 0

    def current(self, journal: Journal, fill: Fill) -> Columns:
        """Return the columns with all changes of the journal."""
        size = len(journal.changed_at)
        columns = self._columns
        if columns is None or len(columns.free) < size:
            columns = self._columns = Columns.empty(max(16, size * 5 // 4))
            changed = None
        else:
            changed = journal.since(self._at)
        slots = range(size) if changed is None else set(changed)
        if len(slots) * 4 > size:
            fill(columns, slice(0, size), range(size))
        else:
            for slot in slots:
                fill(columns, slice(slot, slot + 1), (slot,))
        self._at = journal.changes
        return columns

    def copied(self, journal: Journal) -> tuple[ColumnTable, Journal]:
        """Return table and journal of a copy of the view: the first changes are those that the columns do not show."""
        twin = ColumnTable()
        unseen = None if self._columns is None else journal.since(self._at)
        if unseen is not None and self._columns is not None:
            twin._columns = self._columns.copy()
        return twin, Journal([0] * len(journal.changed_at), unseen or ())
