"""A commit to SQLite: a statement for each table that changes, whatever the number of its rows.

The driver lets the interpreter go for each statement, and beside a busy event loop it gets it back only a moment later,
so a statement for each row would wait as often as there are rows. (One statement for the whole batch, by a view and
triggers, waited but once, and SQLite took three times as long for it.)
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from functools import cache
from itertools import chain
from typing import Final, TypeAlias

from msgspec.structs import astuple
from sqlalchemy import Table
from sqlalchemy.dialects import sqlite

from ganger_master.store.contract import Cell, StoreBatch
from ganger_master.store.tables import STATE, events, writer

# Statements that the driver keeps: one for each table and number of rows it has seen.
STATEMENTS_KEPT: Final = 512
_MOST_ROWS: Final = 64

Statement: TypeAlias = tuple[str, list[Cell]]

_IS_OURS: Final = f"SELECT 1 FROM {writer.name} WHERE generation = ?"
_quote: Final = sqlite.dialect().identifier_preparer.quote


def statements(batch: StoreBatch) -> list[Statement]:
    """What is to be run for a batch, in this order: texts with their parameters."""
    found: list[Statement] = []
    for table, keys in batch.removes.items():
        _add(found, _removal, table, [(key,) for key in keys])
    for table, rows in batch.puts.items():
        _add(found, _put, table, rows)
    if batch.history:
        _add(found, _insertion, events.name, [astuple(entry) for entry in batch.history])
    return found


def commit(connection: sqlite3.Connection, generation: int, batch: Sequence[Statement]) -> bool:
    """Run a batch as one transaction, durable on return. Return False, with no change, for another generation.

    `connection` must not begin transactions by itself. Raises sqlite3.Error, with no change.
    """
    run = connection.execute
    # Take the write lock first, so that no other writer gets it between the check and the first change.
    run("BEGIN IMMEDIATE")
    try:
        is_ours = run(_IS_OURS, (generation,)).fetchone() is not None
        if is_ours:
            for text, parameters in batch:
                run(text, parameters)
            run("COMMIT")
        return is_ours
    finally:
        # Not ours, or an error; some end the transaction themselves.
        if connection.in_transaction:
            run("ROLLBACK")


def _add(
    found: list[Statement], text_of: Callable[[str, int], str], table: str, rows: Sequence[Sequence[Cell]]
) -> None:
    for start in range(0, len(rows), _MOST_ROWS):
        part = rows[start : start + _MOST_ROWS]
        found.append((text_of(table, len(part)), list(chain.from_iterable(part))))


@cache
def _put(name: str, rows: int) -> str:
    key, *others = _names(STATE[name])
    changes = ", ".join([f"{other} = excluded.{other}" for other in others])
    return f"{_insertion(name, rows)} ON CONFLICT ({key}) DO UPDATE SET {changes}"


@cache
def _insertion(name: str, rows: int) -> str:
    names = _names(events if name == events.name else STATE[name])
    row = f"({', '.join('?' * len(names))})"
    return f"INSERT INTO {name} ({', '.join(names)}) VALUES {', '.join([row] * rows)}"


@cache
def _removal(name: str, rows: int) -> str:
    return f"DELETE FROM {name} WHERE key IN ({', '.join('?' * rows)})"


def _names(table: Table) -> list[str]:
    return [_quote(column.name) for column in table.columns]
