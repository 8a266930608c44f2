"""A whole commit as one statement of SQLite, for the sake of the interpreter's lock.

The driver lets the interpreter go for each statement, and in a master whose event loop is busy it gets it back only
milliseconds later; a commit of a dozen statements would wait a dozen times. So all rows of a batch, of whatever table,
go into one view, and a trigger for each table puts them where they belong: SQLite does in C, beside the event loop,
what would else be a row at a time in Python. View and triggers are temporary and this connection's own; the schema
knows nothing of them. One statement is atomic, and durable when it returns; many rows take several, in a transaction.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import chain
from typing import Final

from msgspec.structs import astuple
from sqlalchemy import Table
from sqlalchemy.dialects import sqlite

from ganger_master.store.contract import Batch, Cell
from ganger_master.store.tables import STATE, events, writer

FENCED: Final = "the generation is another one"

# The driver keeps a statement for each number of rows it has seen.
_MOST_ROWS: Final = 100
_WIDTH: Final = max(len(table.columns) for table in (*STATE.values(), events))
# What fills a row up to the width of the view, by what it has.
_PADDING: Final = [(None,) * (_WIDTH - width) for width in range(_WIDTH + 1)]
# What is to become of a row. Numbers, because SQLite compares them for every row and trigger.
_FENCE, _APPEND = 0, 1
_PUT: Final = {name: 2 + 2 * index for index, name in enumerate(STATE)}
_REMOVE: Final = {name: put + 1 for name, put in _PUT.items()}
_quote: Final = sqlite.dialect().identifier_preparer.quote


def prepare(connection: sqlite3.Connection) -> None:
    """Makes the connection take batches; its tables must be there."""
    cells = ", ".join(f"NULL AS c{index}" for index in range(_WIDTH))
    connection.execute(f"CREATE TEMP VIEW batches AS SELECT 0 AS what, {cells}").close()
    for what, statement in _statements():
        when = f"INSTEAD OF INSERT ON batches WHEN NEW.what = {what}"
        connection.execute(f"CREATE TEMP TRIGGER take_{what} {when} BEGIN {statement}; END").close()


def commit(connection: sqlite3.Connection, generation: int, batch: Batch) -> None:
    """Raises IntegrityError with FENCED as its text if the writer's generation is another."""
    rows: list[tuple[Cell, ...]] = [(_FENCE, generation, *_PADDING[1])]
    for table, keys in batch.removes.items():
        rows += [(_REMOVE[table], key, *_PADDING[1]) for key in keys]
    for table, puts in batch.puts.items():
        what, padding = _PUT[table], _PADDING[len(STATE[table].columns)]
        rows += [(what, *row, *padding) for row in puts]
    padding = _PADDING[len(events.columns)]
    rows += [(_APPEND, *astuple(entry), *padding) for entry in batch.history]
    if len(rows) <= _MOST_ROWS:
        _insert(connection, rows)
        return
    connection.execute("BEGIN").close()
    try:
        for start in range(0, len(rows), _MOST_ROWS):
            _insert(connection, rows[start : start + _MOST_ROWS])
        connection.execute("COMMIT").close()
    finally:
        # Of an error; some end the transaction themselves.
        if connection.in_transaction:
            connection.execute("ROLLBACK").close()


def _insert(connection: sqlite3.Connection, rows: Sequence[tuple[Cell, ...]]) -> None:
    connection.execute(_insertion(len(rows)), list(chain.from_iterable(rows))).close()


@cache
def _insertion(rows: int) -> str:
    row = f"({', '.join('?' * (1 + _WIDTH))})"
    return f"INSERT INTO temp.batches VALUES {', '.join([row] * rows)}"


def _statements() -> Iterator[tuple[int, str]]:
    """What is done with a row, by the number that asks for it."""
    is_ours = f"EXISTS (SELECT 1 FROM {writer.name} WHERE generation = NEW.c0)"
    yield _FENCE, f"SELECT RAISE(ABORT, '{FENCED}') WHERE NOT {is_ours}"
    yield _APPEND, _inserted(events)
    for table in STATE.values():
        changes = ", ".join(f"{name} = excluded.{name}" for name in _names(table)[1:])
        yield _PUT[table.name], f"{_inserted(table)} ON CONFLICT (key) DO UPDATE SET {changes}"
        yield _REMOVE[table.name], f"DELETE FROM {table.name} WHERE key = NEW.c0"


def _inserted(table: Table) -> str:
    names = _names(table)
    cells = ", ".join(f"NEW.c{index}" for index in range(len(names)))
    return f"INSERT INTO {table.name} ({', '.join(names)}) VALUES ({cells})"


def _names(table: Table) -> list[str]:
    return [_quote(column.name) for column in table.columns]
