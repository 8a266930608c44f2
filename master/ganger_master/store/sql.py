"""The store on a SQL database: SQLite in WAL mode with synchronous=FULL by default, any SQLAlchemy URL otherwise.

A commit is one transaction. Statements are built by SQLAlchemy once per table and then run as the driver's own text,
because at small batches building them costs more than the disk does. `open` brings the schema up to date.

A commit to SQLite is a statement for each table that changes, whatever the number of its rows. The driver lets the
interpreter go for each statement, and beside a busy event loop it gets it back only a moment later, so a statement for
each row would wait as often as there are rows. (One statement for the whole batch, by a view and triggers, waited but
once, and SQLite took three times as long for it.)
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import Any, Final, TypeAlias, cast

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from msgspec.structs import astuple
from sqlalchemy import Connection, Engine, Table, bindparam, create_engine, delete, event, func, insert, select, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError, SQLAlchemyError
from sqlalchemy.pool import NullPool
from sqlalchemy.sql import Executable

from ganger_master.store.contract import Cell, HistoryEntry, Problem, StoreBatch, StoredRow, StoreError
from ganger_master.store.tables import COLUMNS, STATE, events, writer

_MIGRATIONS = Path(__file__).with_name("migrations")


def upgrade(engine: Engine) -> None:
    """Update the schema, if need be, in one transaction where the database can. Raises StoreError."""
    scripts = ScriptDirectory.from_config(_config(None))
    known = {script.revision for script in scripts.walk_revisions()}
    with engine.begin() as connection:
        current = MigrationContext.configure(connection).get_current_revision()
        if current is not None and current not in known:
            newest = sorted(known)[-1]
            raise StoreError(Problem.NEWER, f"the database has schema {current}, this ganger supports {newest}")
        if current != scripts.get_current_head():
            command.upgrade(_config(connection), "head")


def downgrade(engine: Engine, revision: str) -> None:
    """Migrate back to an older schema; `base` drops everything."""
    with engine.begin() as connection:
        command.downgrade(_config(connection), revision)


def _config(connection: Connection | None) -> Config:
    config = Config()
    config.set_main_option("script_location", str(_MIGRATIONS).replace("%", "%%"))
    config.set_main_option("path_separator", "newline")
    config.attributes["connection"] = connection
    return config


# Statements that the driver keeps: one for each table and number of rows it has seen.
STATEMENTS_KEPT: Final = 512
_MOST_ROWS: Final = 64

Statement: TypeAlias = tuple[str, list[Cell]]

_IS_OURS: Final = f"SELECT 1 FROM {writer.name} WHERE generation = ?"
_quote: Final = sqlite.dialect().identifier_preparer.quote


def statements(batch: StoreBatch) -> list[Statement]:
    """Return what runs for a batch, in this order: texts with their parameters."""
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


_HISTORY_COLUMNS: Final = tuple(column.name for column in events.columns)
# Rows of one statement; keeps the driver's memory and the time of one lock bounded.
_ROWS_PER_STATEMENT: Final = 5_000
_ROWS_PER_FETCH: Final = 1_000
_BUSY_MS: Final = 5_000
_SQLITE_ARGUMENTS: Final = {"timeout": _BUSY_MS / 1000, "cached_statements": STATEMENTS_KEPT}


class SqlStore:
    """See `contract.Store`. `url` is a SQLAlchemy URL, or the path of a SQLite file, which is made with mode 0600.
    `row_by_row`: write to SQLite as to any other database, which takes longer."""

    def __init__(self, url: str | Path, row_by_row: bool = False) -> None:
        # A path with a question mark cannot be written as a URL.
        self._url = URL.create("sqlite", database=str(url)) if isinstance(url, Path) else url
        self._engine = _engine_for(self._url)
        self._takes_many_rows = self._engine.dialect.name == "sqlite" and not row_by_row
        self._connection: Connection | None = None
        self._generation = 0
        self._statements: dict[tuple[str, str], _Statement] = {}

    def open(self) -> None:
        with _explained(self._url):
            _create_file(self._url)
            upgrade(self._engine)
            connection = self._open_connection()
            with connection.begin():
                self._generation = _take_over(connection)

    def load(self) -> Iterator[StoredRow]:
        with _explained(self._url), self._engine.connect() as connection:
            for table in STATE.values():
                names = COLUMNS[table.name]
                rows = connection.execution_options(yield_per=_ROWS_PER_FETCH).execute(
                    select(table.c.key, *(table.c[name] for name in names))
                )
                for row in rows:
                    yield StoredRow(table.name, row[0], dict(zip(names, row[1:], strict=True)))

    def commit(self, batch: StoreBatch) -> None:
        self.prepare(batch)()

    def prepare(self, batch: StoreBatch) -> Callable[[], None]:
        if self._takes_many_rows:
            return partial(self._run_all, statements(batch))
        return partial(self._write_all, batch)

    def _run_all(self, statements: Sequence[Statement]) -> None:
        if not statements:
            return
        with _explained(self._url):
            if not commit(_driver_of(self._open_connection()), self._generation, statements):
                raise self._fenced()

    def _write_all(self, batch: StoreBatch) -> None:
        if batch.is_empty:
            return
        with _explained(self._url):
            connection = self._open_connection()
            try:
                with connection.begin():
                    self._check_generation(connection)
                    self._write(connection, batch)
            except DBAPIError as error:
                if error.connection_invalidated:
                    self._connection = None
                raise

    def check_owner(self) -> None:
        # On its own connection: that of the commits may be in the middle of a transaction.
        with _explained(self._url), self._engine.connect() as connection:
            if connection.execute(_GENERATION).scalar() != self._generation:
                raise self._fenced()

    def history(self, subject: str, after_sequence: int, limit: int) -> Sequence[HistoryEntry]:
        query = (
            select(*events.columns).where(events.c.sequence > after_sequence).order_by(events.c.sequence).limit(limit)
        )
        if subject:
            query = query.where(events.c.subject == subject)
        with _explained(self._url), self._engine.connect() as connection:
            return [HistoryEntry(*row) for row in connection.execute(query)]

    def oldest_sequence(self) -> int:
        with _explained(self._url), self._engine.connect() as connection:
            return connection.execute(select(func.min(events.c.sequence))).scalar() or 0

    def compact(self, before_time: float, limit: int) -> int:
        # History is forgotten from its old end only, so what is left has no holes.
        with _explained(self._url):
            connection = self._open_connection()
            with connection.begin():
                self._check_generation(connection)
                oldest = select(events.c.sequence, events.c.time).order_by(events.c.sequence).limit(limit)
                last = max((row.sequence for row in connection.execute(oldest) if row.time < before_time), default=None)
                if last is None:
                    return 0
                return connection.execute(delete(events).where(events.c.sequence <= last)).rowcount

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        self._engine.dispose()

    def _open_connection(self) -> Connection:
        if self._connection is None:
            self._connection = self._engine.connect()
        return self._connection

    def _fenced(self) -> StoreError:
        return StoreError(Problem.FENCED, f"{_shown(self._url)} has a newer master")

    def _check_generation(self, connection: Connection) -> None:
        statement = self._statement("fence", "writer")
        if statement.run(connection, [{"generation": self._generation}]) != 1:
            raise self._fenced()

    def _write(self, connection: Connection, batch: StoreBatch) -> None:
        for table, keys in batch.removes.items():
            self._run(connection, "remove", table, [{"key": key} for key in keys])
        for table, rows in batch.puts.items():
            names = ("key", *COLUMNS[table])
            self._run(connection, "put", table, [dict(zip(names, row, strict=True)) for row in rows])
        if batch.history:
            entries = [{name: getattr(entry, name) for name in _HISTORY_COLUMNS} for entry in batch.history]
            self._run(connection, "append", events.name, entries)

    def _run(self, connection: Connection, verb: str, table: str, rows: Sequence[Mapping[str, Cell]]) -> None:
        if verb == "put" and connection.dialect.name not in _UPSERTS:
            self._run(connection, "remove", table, [{"key": row["key"]} for row in rows])
            verb = "append"
        statement = self._statement(verb, table)
        for start in range(0, len(rows), _ROWS_PER_STATEMENT):
            statement.run(connection, rows[start : start + _ROWS_PER_STATEMENT])

    def _statement(self, verb: str, table: str) -> _Statement:
        """Return the statement for one row, which runs once for each row."""
        found = self._statements.get((verb, table))
        if found is None:
            found = _Statement.of(_built(verb, table, self._engine.dialect.name), self._engine)
            self._statements[verb, table] = found
        return found


@dataclass(frozen=True, slots=True)
class _Statement:
    """A statement as the driver's text, with the order of its parameters if the driver numbers them."""

    text: str
    order: tuple[str, ...] | None

    @classmethod
    def of(cls, statement: Executable, engine: Engine) -> _Statement:
        compiled = statement.compile(dialect=engine.dialect)  # type: ignore[attr-defined]
        order = tuple(compiled.positiontup) if compiled.positional else None
        return cls(str(compiled), order)

    def run(self, connection: Connection, rows: Sequence[Mapping[str, Cell]]) -> int:
        parameters: Any
        if self.order is None:
            parameters = [dict(row) for row in rows]
        else:
            parameters = [tuple(row[name] for name in self.order) for row in rows]
        return connection.exec_driver_sql(self.text, parameters if len(parameters) > 1 else parameters[0]).rowcount


_UPSERTS: Final = ("postgresql",)
_GENERATION: Final = select(writer.c.generation)


def _built(verb: str, table_name: str, dialect: str) -> Executable:
    if verb == "fence":
        # Changing nothing would do, but an update also takes the row's lock where locks are rows'.
        return update(writer).where(writer.c.generation == bindparam("generation")).values(id=writer.c.id)
    table = events if table_name == events.name else STATE[table_name]
    names = [column.name for column in table.columns]
    if verb == "remove":
        return delete(table).where(table.c.key == bindparam("key"))
    values = {name: bindparam(name, type_=table.c[name].type) for name in names}
    if verb == "append":
        return insert(table).values(values)
    assert dialect == "postgresql"
    into = postgresql.insert(table).values(values)
    others = [name for name in names if name != "key"]
    return into.on_conflict_do_update(index_elements=["key"], set_={name: into.excluded[name] for name in others})


def _driver_of(connection: Connection) -> sqlite3.Connection:
    return cast(sqlite3.Connection, connection.connection.driver_connection)


def _take_over(connection: Connection) -> int:
    """Raise the generation and return it, so that a former master's commits are refused from now on."""
    if connection.execute(update(writer).values(generation=writer.c.generation + 1)).rowcount == 0:
        connection.execute(insert(writer).values(id=1, generation=1))
    return int(connection.execute(_GENERATION).scalar_one())


def _engine_for(url: str | URL) -> Engine:
    try:
        parsed = make_url(url)
        if parsed.get_backend_name() != "sqlite":
            return create_engine(parsed, pool_pre_ping=True)
        # One file handle per use: a pool would keep handles of a file that was replaced.
        engine = create_engine(parsed, poolclass=NullPool, connect_args=_SQLITE_ARGUMENTS)
    except ImportError as error:
        raise StoreError(Problem.DRIVER, f"database URL {_shown(url)} cannot be used: {error}") from error
    except (ArgumentError, NoSuchModuleError) as error:
        raise StoreError(Problem.URL, f"database URL {_shown(url)} cannot be used: {error}") from error

    @event.listens_for(engine, "connect")
    def prepare(connection: sqlite3.Connection, _record: object) -> None:
        # Transactions are begun by the listener below, the driver would begin them too late.
        connection.isolation_level = None
        for pragma in (
            f"busy_timeout={_BUSY_MS}",
            "journal_mode=WAL",
            "synchronous=FULL",
            "foreign_keys=ON",
            "temp_store=MEMORY",
            "journal_size_limit=67108864",
        ):
            connection.execute(f"PRAGMA {pragma}").close()

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        connection.exec_driver_sql("BEGIN")

    return engine


def _create_file(url: str | URL) -> None:
    """Create the database file readable by its owner alone, because it contains environments of jobs."""
    parsed = make_url(url)
    if parsed.get_backend_name() == "sqlite" and parsed.database and parsed.database != ":memory:":
        path = Path(parsed.database)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))


class _explained:  # noqa: N801 - reads as a phrase: with _explained(url)
    """Turn what drivers raise into a StoreError that states what to do."""

    def __init__(self, url: str | URL) -> None:
        self._url = url

    def __enter__(self) -> None:
        return None

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        match error:
            case StoreError() | None:
                return
            case SQLAlchemyError() | sqlite3.Error() | OSError():
                raise StoreError(_problem_of(error), f"database {_shown(self._url)}: {_cause_of(error)}") from error


def _problem_of(error: BaseException) -> Problem:
    text = str(error).lower()
    if "locked" in text or "busy" in text:
        return Problem.LOCKED
    if "full" in text or "no space left" in text:
        return Problem.FULL
    if "not a database" in text or "malformed" in text:
        return Problem.DAMAGED
    return Problem.UNREADABLE


def _cause_of(error: BaseException) -> str:
    if isinstance(error, DBAPIError) and error.orig is not None:
        return str(error.orig).strip()
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return str(error).strip()


def _shown(url: str | URL) -> str:
    try:
        return make_url(url).render_as_string(hide_password=True)
    except ArgumentError:
        return "(unreadable)"
