"""A whole commit as one statement of SQLite, for the sake of the interpreter's lock.

The driver lets the interpreter go for each statement, and in a master whose event loop is busy it gets it back only
milliseconds later; a commit of a dozen statements would wait a dozen times. So a batch goes in as one JSON text, and a
trigger takes it apart: SQLite does in C, beside the event loop, what would else be a row at a time in Python. View and
trigger are temporary and this connection's own; the schema knows nothing of them. One statement is atomic, and durable
when it returns.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec
from sqlalchemy import Table
from sqlalchemy.dialects import sqlite

from ganger_master.store.contract import Batch
from ganger_master.store.tables import COLUMNS, STATE, events, writer

FENCED: Final = "the generation is another one"

_encode: Final = msgspec.json.Encoder().encode
_quote: Final = sqlite.dialect().identifier_preparer.quote


def prepare(connection: sqlite3.Connection) -> None:
    """Makes the connection take batches; its tables must be there."""
    connection.execute("CREATE TEMP VIEW batches AS SELECT 0 AS generation, '' AS batch").close()
    statements = "\n".join(f"{statement};" for statement in _statements())
    connection.execute(f"CREATE TEMP TRIGGER take_batch INSTEAD OF INSERT ON batches BEGIN {statements} END").close()


def commit(connection: sqlite3.Connection, generation: int, batch: Batch) -> None:
    """Raises IntegrityError with FENCED as its text if the writer's generation is another."""
    text = _encode(batch).decode()
    connection.execute("INSERT INTO temp.batches VALUES (?, ?)", (generation, text)).close()


def _statements() -> Iterator[str]:
    yield (
        f"SELECT RAISE(ABORT, '{FENCED}') "
        f"WHERE NOT EXISTS (SELECT 1 FROM {writer.name} WHERE generation = NEW.generation)"
    )
    for table in STATE.values():
        removed = f"SELECT value FROM json_each(NEW.batch, '$.removes.{table.name}')"
        yield f"DELETE FROM {table.name} WHERE key IN ({removed})"
        columns = ("key", *COLUMNS[table.name])
        changes = ", ".join(f"{name} = excluded.{name}" for name in map(_quote, columns[1:]))
        # Without a WHERE the ON would be read as that of a join.
        yield f"{_insert(table, columns, f'puts.{table.name}')} WHERE true ON CONFLICT (key) DO UPDATE SET {changes}"
    yield _insert(events, [column.name for column in events.columns], "history")


def _insert(table: Table, columns: Sequence[str], path: str) -> str:
    """Rows are arrays with one value per column."""
    names = ", ".join(map(_quote, columns))
    values = ", ".join(f"json_extract(value, '$[{index}]')" for index in range(len(columns)))
    return f"INSERT INTO {table.name} ({names}) SELECT {values} FROM json_each(NEW.batch, '$.{path}')"
