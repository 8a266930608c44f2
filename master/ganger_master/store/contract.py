"""What the master's writer asks of a store, and in which ways a store may fail.

A store keeps *elements*, each one row of a state table (the truth), and the *history* of what happened. It promises
that a batch is durable and whole when `commit` returns, and that nothing of it is there when `commit` raises. It does
not know what elements mean: `codec` turns the core's values into rows and back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Protocol

from msgspec import Struct, field

Cell = int | float | str | None
Row = tuple[Cell, ...]


class Problem(Enum):
    """How a store fails; the value says what an operator can do."""

    URL = "correct the database URL"
    DRIVER = "install its driver; for PostgreSQL pip install 'ganger[postgresql]'"
    LOCKED = "another program holds it: stop that program"
    FULL = "the disk is full: free some space; nothing accepted was lost"
    NEWER = "a newer ganger wrote it: start that version, or restore the backup made before its upgrade"
    UNREADABLE = "it cannot be read or written: check its path, its permissions and its disk"
    FENCED = "another master has taken it over: this one ends; let one master run on a database"
    DAMAGED = "it holds what no ganger writes: restore a backup"


class StoreError(Exception):
    """A store that did not do what was asked; nothing of the batch was kept."""

    def __init__(self, problem: Problem, detail: str) -> None:
        super().__init__(f"{detail}; {problem.value}")
        self.problem = problem


class HistoryEntry(Struct, frozen=True, gc=False, array_like=True):
    """One thing that happened. Sequences are unique and rise; time is Unix seconds."""

    sequence: int
    time: float
    subject: str
    kind: str
    cause: str
    message: str = ""
    figures: str = "{}"


class StoreBatch(Struct, frozen=True, gc=False):
    """What one commit makes durable, as one; by table, and at most one change for each key."""

    # Inserted or replaced: the key, then the values in the order of `tables.COLUMNS`.
    puts: Mapping[str, Sequence[Row]] = field(default_factory=dict)
    # Keys.
    removes: Mapping[str, Sequence[str]] = field(default_factory=dict)
    history: Sequence[HistoryEntry] = ()

    @property
    def is_empty(self) -> bool:
        return not (self.puts or self.removes or self.history)


class StoredRow(Struct, frozen=True, gc=False):
    table: str
    key: str
    columns: Mapping[str, Cell] = field(default_factory=dict)


class Store(Protocol):
    """Called from one thread at a time, except `history`, `check_owner` and `prepare`: those may run beside the
    others."""

    def open(self) -> None:
        """Brings the schema up to date and takes the store over from any former master. Raises StoreError."""

    def load(self) -> Iterator[StoredRow]:
        """Every element, table by table in the order of `tables.STATE`, in no order within one. Raises StoreError."""

    def commit(self, batch: StoreBatch) -> None:
        """Durable and whole when it returns; nothing kept when it raises StoreError."""

    def prepare(self, batch: StoreBatch) -> Callable[[], None]:
        """Does of `commit` what needs no disk; what is left of it, to be called in the order of the batches."""

    def check_owner(self) -> None:
        """Return if no other master has taken the store over since `open`. Reads one row. Raises StoreError."""

    def history(self, subject: str, after_sequence: int, limit: int) -> Sequence[HistoryEntry]:
        """Oldest first; subject "" means all. Raises StoreError."""

    def oldest_sequence(self) -> int:
        """Sequence of the oldest entry of history still kept, zero if there is none."""

    def compact(self, before_time: float, limit: int) -> int:
        """Forgets at most `limit` entries of history older than a time; returns how many went."""

    def close(self) -> None: ...
