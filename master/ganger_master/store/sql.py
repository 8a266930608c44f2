"""The store on a SQL database: SQLite in WAL mode with synchronous=FULL by default, PostgreSQL by its SQLAlchemy URL.

On SQLite a master that opens the store takes it over. On PostgreSQL masters may stand by (`store.lease_row`).

A commit is one transaction, and a statement for each table that changes, whatever the number of its rows. The driver
lets the interpreter go for each statement, and beside a busy event loop it gets it back only a moment later, so a
statement for each row would wait as often as there are rows. (One statement for the whole batch, by a view and
triggers, waited but once, and SQLite took three times as long for it.) Statements are texts for the driver, made once:
at small batches, SQLAlchemy takes longer to build them than the disk to store them.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import Any, Final, TypeAlias

from ganger.text import os_reason
from msgspec.structs import astuple
from sqlalchemy import Connection, Dialect, Engine, create_engine, delete, event, func, insert, select, update
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError, SQLAlchemyError
from sqlalchemy.pool import NullPool

from ganger_master.core.leader_lease import LeaderLease, LeaseCandidate
from ganger_master.store.lease_row import (
    check_term,
    end_commits,
    give_back_lease,
    has_no_right,
    held_up_by,
    is_held_up,
    renew_lease,
    take_lease,
)
from ganger_master.store.schema import LEASE_SCHEMA, schema_of, upgrade
from ganger_master.store.tables import (
    COLUMNS,
    STATE,
    Cell,
    HistoryEntry,
    Problem,
    StoreBatch,
    StoredRow,
    StoreError,
    events,
    writer,
)


def check_whole(connection: Connection) -> None:
    """Read all pages of a SQLite database. Raises StoreError with the first one that is damaged."""
    finding = str(connection.exec_driver_sql("PRAGMA quick_check(1)").scalar())
    if finding != "ok":
        raise StoreError(Problem.DAMAGED, f"the database is damaged: {finding.splitlines()[-1]}")


# Statements that SQLite's driver keeps: one for each table and number of rows it has seen.
_STATEMENTS_KEPT: Final = 512
_MOST_ROWS: Final = 64

# A text for the driver, and its parameters.
Statement: TypeAlias = tuple[str, tuple[Cell, ...]]

_UPSERTS: Final = ("postgresql", "sqlite")
_GENERATION: Final = select(writer.c.generation)


def _statements(batch: StoreBatch, dialect: Dialect) -> list[Statement]:
    found: list[Statement] = []

    def add(verb: str, table: str, rows: Sequence[Sequence[Cell]]) -> None:
        for start in range(0, len(rows), _MOST_ROWS):
            part = rows[start : start + _MOST_ROWS]
            found.append((_text(verb, table, len(part), dialect), tuple(chain.from_iterable(part))))

    for table, keys in batch.removes.items():
        add("remove", table, [(key,) for key in keys])
    for table, rows in batch.puts.items():
        if dialect.name not in _UPSERTS:
            add("remove", table, [row[:1] for row in rows])
        add("put" if dialect.name in _UPSERTS else "append", table, rows)
    if batch.history:
        add("append", events.name, [astuple(entry) for entry in batch.history])
    return found


@cache
def _text(verb: str, name: str, rows: int, dialect: Dialect) -> str:
    table = events if name == events.name else STATE[name]
    key, *others = names = [dialect.identifier_preparer.quote(column.name) for column in table.columns]
    place = "?" if dialect.paramstyle == "qmark" else "%s"
    if verb == "remove":
        return f"DELETE FROM {name} WHERE {key} IN ({', '.join([place] * rows)})"
    row = f"({', '.join([place] * len(names))})"
    insertion = f"INSERT INTO {name} ({', '.join(names)}) VALUES {', '.join([row] * rows)}"
    changes = ", ".join([f"{other} = excluded.{other}" for other in others])
    return insertion if verb == "append" else f"{insertion} ON CONFLICT ({key}) DO UPDATE SET {changes}"


_ROWS_PER_FETCH: Final = 1_000
_BUSY_MS: Final = 5_000
# libpq: waits for a database server that does not answer, in seconds and milliseconds. The system would wait minutes.
_LIBPQ_WAITS: Final = {"connect_timeout": "5", "tcp_user_timeout": "5000"}
_DATABASES: Final = ("sqlite", "postgresql")
_SQLITE_ARGUMENTS: Final = {"timeout": _BUSY_MS / 1000, "cached_statements": _STATEMENTS_KEPT}


class SqlStore:
    """See `tables.Store`. `url` is a SQLAlchemy URL, or the path of a SQLite file, which is made with mode 0600."""

    def __init__(self, url: str | Path) -> None:
        self._url = url_of(url) if isinstance(url, Path) else url
        self._engine = _engine_for(self._url)
        # For renewals, which must not wait until readers give a connection back.
        self._renewals = _engine_for(self._url)
        self._connection: Connection | None = None
        self._generation = 0
        # Seconds of the lease; None without one.
        self._lease_s: float | None = None
        self.has_leases = self._engine.dialect.name == "postgresql"

    def open(self, candidate: LeaseCandidate | None = None) -> LeaderLease | None:
        with explained(self._url):
            if candidate is not None and self.has_leases:
                return self._open_by_lease(candidate)
            _create_file(self._url)
            if self._engine.dialect.name == "sqlite":
                with self._engine.connect() as connection:
                    check_whole(connection)
            upgrade(self._engine)
            connection = self._open_connection()
            with connection.begin():
                self._generation = _take_over(connection)
        return None

    def _open_by_lease(self, candidate: LeaseCandidate) -> LeaderLease | None:
        with self._engine.connect() as connection:
            # Raises for a newer schema. The schema of a running leader that is older stays until the lease is taken.
            schema = schema_of(connection)
        if schema is None or schema < LEASE_SCHEMA:
            upgrade(self._engine)
        taken = self._take_lease(candidate)
        if isinstance(taken, LeaderLease):
            return taken
        self._generation, self._lease_s = taken, candidate.lease_s
        return None

    def _take_lease(self, candidate: LeaseCandidate) -> int | LeaderLease:
        """Return the term, or the lease that another master has, or is about to have."""
        for is_last in (False, True):
            try:
                with self._engine.begin() as connection:
                    return take_lease(connection, candidate)
            except DBAPIError as error:
                if not is_held_up(error):
                    raise
            with self._engine.begin() as connection:
                other = held_up_by(connection) if is_last else self._end_commits(connection)
            if other is not None:
                return other
        raise AssertionError("the last attempt returns")

    def _end_commits(self, connection: Connection) -> LeaderLease | None:
        try:
            return end_commits(connection)
        except DBAPIError as error:
            if not has_no_right(error):
                raise
            text = "a commit of the former leader is under way, and the database user of this master may not end it"
            advice = "give all masters the same user"
            raise StoreError(Problem.SERVER, f"database {_shown(self._url)}: {text}: {advice}") from error

    def migrate(self) -> None:
        with explained(self._url):
            upgrade(self._engine)

    def load(self) -> Iterator[StoredRow]:
        with explained(self._url), self._engine.connect() as connection:
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
        return partial(self._run, _statements(batch, self._engine.dialect))

    def _run(self, statements: Sequence[Statement]) -> None:
        if not statements:
            return
        with explained(self._url):
            connection = self._open_connection()
            if connection.dialect.name == "sqlite":
                # SQLAlchemy would double the time that a small commit takes.
                if not _commit(connection.connection.driver_connection, self._generation, statements):
                    raise self._fenced()
                return
            try:
                with connection.begin():
                    self._check_generation(connection)
                    for text, parameters in statements:
                        connection.exec_driver_sql(text, parameters)
            except DBAPIError as error:
                if error.connection_invalidated:
                    self._connection = None
                raise

    def check_owner(self) -> None:
        # On its own connection: that of the commits may be in the middle of a transaction.
        with explained(self._url), self._renewals.begin() as connection:
            if self._lease_s is not None:
                is_ours = renew_lease(connection, self._generation, self._lease_s)
            else:
                is_ours = connection.execute(_GENERATION).scalar() == self._generation
            if not is_ours:
                raise self._fenced()

    def history(self, subject: str, after_sequence: int, limit: int) -> Sequence[HistoryEntry]:
        query = (
            select(*events.columns).where(events.c.sequence > after_sequence).order_by(events.c.sequence).limit(limit)
        )
        if subject:
            query = query.where(events.c.subject == subject)
        with explained(self._url), self._engine.connect() as connection:
            return [HistoryEntry(*row) for row in connection.execute(query)]

    def oldest_sequence(self) -> int:
        with explained(self._url), self._engine.connect() as connection:
            return connection.execute(select(func.min(events.c.sequence))).scalar() or 0

    def compact(self, before_time: float, limit: int) -> int:
        # History is forgotten from its old end only, so what is left has no holes.
        with explained(self._url):
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
        if self._lease_s is not None:
            # A stand-by that cannot be told so waits for its end.
            with suppress(SQLAlchemyError), self._engine.begin() as connection:
                give_back_lease(connection, self._generation)
            self._lease_s = None
        self._engine.dispose()
        self._renewals.dispose()

    def _open_connection(self) -> Connection:
        if self._connection is None:
            self._connection = self._engine.connect()
        return self._connection

    def _fenced(self) -> StoreError:
        return StoreError(Problem.FENCED, f"{_shown(self._url)} has a newer master")

    def _check_generation(self, connection: Connection) -> None:
        """Take the write lock, so that no other master begins to write before the transaction ends. Raises StoreError
        if one has."""
        if self.has_leases:
            if not check_term(connection, self._generation):
                raise self._fenced()
            return
        # Changing nothing would do, but an update also takes the row's lock where locks are rows'.
        text = f"UPDATE {writer.name} SET id = id WHERE generation = {self._generation}"
        if connection.exec_driver_sql(text).rowcount != 1:
            raise self._fenced()


def _commit(connection: Any, generation: int, statements: Sequence[Statement]) -> bool:
    """Run statements as one transaction of SQLite's driver. Return False, with no change, for another generation.

    `connection` must not begin transactions by itself. Raises sqlite3.Error, with no change."""
    run = connection.execute
    # Take the write lock first, so that no other writer gets it between the check and the first change.
    run("BEGIN IMMEDIATE")
    try:
        is_ours = run(f"SELECT 1 FROM {writer.name} WHERE generation = ?", (generation,)).fetchone() is not None
        if is_ours:
            for text, parameters in statements:
                run(text, parameters)
            run("COMMIT")
        return is_ours
    finally:
        # Not ours, or an error; some end the transaction themselves.
        if connection.in_transaction:
            run("ROLLBACK")


def _take_over(connection: Connection) -> int:
    """Raise the generation and return it, so that a former master's commits are refused from now on."""
    # Where commits only share the row's lock, an update alone would not wait for them. SQLite has no such lock.
    connection.execute(_GENERATION.with_for_update())
    if connection.execute(update(writer).values(generation=writer.c.generation + 1)).rowcount == 0:
        connection.execute(insert(writer).values(id=1, generation=1))
    return int(connection.execute(_GENERATION).scalar_one())


def _engine_for(url: str | URL) -> Engine:
    try:
        parsed = make_url(url)
        if parsed.get_backend_name() not in _DATABASES:
            raise StoreError(Problem.URL, f"database URL {_shown(url)} names no database that Ganger can use")
        if parsed.get_backend_name() != "sqlite":
            waits = _LIBPQ_WAITS if parsed.get_driver_name().startswith("psycopg") else {}
            arguments = {name: value for name, value in waits.items() if name not in parsed.query}
            return create_engine(parsed, pool_pre_ping=True, connect_args=arguments)
        # One file handle per use: a pool would keep handles of a file that was replaced.
        engine = create_engine(parsed, poolclass=NullPool, connect_args=_SQLITE_ARGUMENTS)
    except ImportError as error:
        raise StoreError(Problem.DRIVER, f"database URL {_shown(url)} cannot be used: {error}") from error
    except (ArgumentError, NoSuchModuleError, ValueError) as error:
        # A ValueError: a port that is no number.
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


def url_of(file: Path) -> URL:
    """Return the URL of a SQLite file. A path with a question mark cannot be written as one."""
    return URL.create("sqlite", database=str(file))


def _create_file(url: str | URL) -> None:
    """Create the database file readable by its owner alone, because it contains environments of jobs."""
    parsed = make_url(url)
    if parsed.get_backend_name() == "sqlite" and parsed.database and parsed.database != ":memory:":
        path = Path(parsed.database)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))


@contextmanager
def explained(url: str | URL) -> Iterator[None]:
    """Turn what drivers raise into a StoreError that states what to do."""
    try:
        yield
    except (SQLAlchemyError, sqlite3.Error, OSError) as error:
        raise StoreError(_problem_of(error, url), f"database {_shown(url)}: {_cause_of(error)}") from error


def _problem_of(error: BaseException, url: str | URL) -> Problem:
    text = str(error).lower()
    if "locked" in text or "busy" in text:
        return Problem.LOCKED
    if "full" in text or "no space left" in text:
        return Problem.FULL
    if "not a database" in text or "malformed" in text:
        return Problem.DAMAGED
    return Problem.UNREADABLE if make_url(url).get_backend_name() == "sqlite" else Problem.SERVER


def _cause_of(error: BaseException) -> str:
    if isinstance(error, DBAPIError) and error.orig is not None:
        return str(error.orig).strip()
    if isinstance(error, OSError):
        return os_reason(error)
    return str(error).strip()


def _shown(url: str | URL) -> str:
    try:
        return make_url(url).render_as_string(hide_password=True)
    except (ArgumentError, ValueError):
        # One that holds a password is not shown.
        return "(unreadable)" if "@" in str(url) else repr(str(url))
