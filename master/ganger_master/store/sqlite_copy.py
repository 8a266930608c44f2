"""Copies of a SQLite database: taken while a master writes, checked, and put in the database's place."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Final

from ganger.text import counted
from msgspec import Struct
from sqlalchemy import create_engine, func, select

from ganger_master.store.schema import schema_of
from ganger_master.store.sql import check_whole, explained, url_of
from ganger_master.store.tables import STATE, Problem, StoreError, events

_MAGIC: Final = b"SQLite format 3\0"
# Files of a database's log. They belong to it alone: beside another one SQLite would take their pages for its own.
_LOGS: Final = ("-wal", "-shm", "-journal")


class CopyError(Exception):
    """A copy that was not made; the message says why, and what to do."""


class DatabaseCopy(Struct, frozen=True):
    """What a checked copy holds: rows of jobs, entries of history, bytes."""

    jobs: int
    history: int
    size_bytes: int

    def __str__(self) -> str:
        rows = f"{counted(self.jobs, 'job')}, {counted(self.history, 'entry')} of history"
        return f"{rows}, {counted(self.size_bytes, 'byte')}, whole"


def back_up(database: Path, file: Path) -> DatabaseCopy:
    """Copy a database that a master may be writing. `file` has the copy once it is whole and checked, and keeps what it
    had until then.

    Raises CopyError if there is nothing to copy or `file` is something else than a database, StoreError if the database
    or the disk does not do what it should.
    """
    if not database.is_file():
        raise CopyError(f"there is no database {database}: name its master's --state-dir, or --config")
    if file.exists() and file.samefile(database):
        raise CopyError(f"{file} is the database itself: name another file")
    _check_place(file)
    with _copied(database, file) as (temporary, found):
        _put(temporary, file)
    return found


def restore(file: Path, database: Path) -> tuple[DatabaseCopy, Path | None]:
    """Put a copy in the place of a database that no master uses. Return what it holds, and where the former database is
    now; None if there was none.

    Raises CopyError if `file` is no copy of a master's database, StoreError as `back_up`.
    """
    if not file.is_file():
        raise CopyError(f"there is no file {file}: name a copy that `ganger master backup` made")
    if database.exists() and file.samefile(database):
        raise CopyError(f"{file} is the database itself: name a copy of it")
    try:
        with _copied(file, database) as (temporary, found):
            former = _move_aside(database)
            _put(temporary, database)
    except StoreError as error:
        if error.problem is Problem.DAMAGED:
            raise CopyError(f"{file} is damaged: name another copy") from error
        raise
    return found, former


def _check_place(file: Path) -> None:
    if file.is_dir():
        raise CopyError(f"{file} is a directory: name a file in it")
    if not file.parent.is_dir():
        raise CopyError(f"there is no directory {file.parent}: make it first")
    logs = [path for end in _LOGS if (path := _named(file, end)).exists()]
    if logs:
        raise CopyError(f"{logs[0]} belongs to a database in the place of {file}: name another file")
    if file.exists() and file.stat().st_size:
        with explained(url_of(file)), file.open("rb") as existing:
            if existing.read(len(_MAGIC)) != _MAGIC:
                raise CopyError(f"{file} exists and is no database: name another file")


@contextmanager
def _copied(source: Path, target: Path) -> Iterator[tuple[Path, DatabaseCopy]]:
    """Copy a database into a temporary file beside the target, and check it."""
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with explained(url_of(source)), closing(_open(source)) as read:
            # It contains environments of jobs.
            os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
            with closing(sqlite3.connect(temporary)) as written:
                # In one step: a commit between two steps would begin it anew. Of a log that is written ahead, as the
                # master's is, a reader stops no writer.
                read.backup(written)
                # One file, without a log of its own beside it.
                written.execute("PRAGMA journal_mode=DELETE").close()
            yield temporary, _checked(temporary, source)
    finally:
        temporary.unlink(missing_ok=True)


def _open(database: Path) -> sqlite3.Connection:
    if _named(database, "-wal").exists():
        return sqlite3.connect(database)
    # A copy may lie where nothing can be written.
    return sqlite3.connect(f"{database.absolute().as_uri()}?immutable=1", uri=True)


def _checked(file: Path, source: Path) -> DatabaseCopy:
    engine = create_engine("sqlite://", creator=lambda: sqlite3.connect(file))
    with engine.connect() as connection:
        if schema_of(connection) is None:
            raise CopyError(f"{source} is a database, but not one of a master")
        check_whole(connection)
        tables = (STATE["jobs"], events)
        jobs, history = [connection.scalar(select(func.count()).select_from(one)) or 0 for one in tables]
    engine.dispose()
    return DatabaseCopy(jobs, history, file.stat().st_size)


def _move_aside(database: Path) -> Path | None:
    """Rename a database, and the files of its log, also where these alone are left. Return its new path."""
    present = [end for end in (*_LOGS, "") if _named(database, end).exists()]
    if not present:
        return None
    number = 1
    while any(_named(database, f".replaced-{number}{end}").exists() for end in (*_LOGS, "")):
        number += 1
    aside = _named(database, f".replaced-{number}")
    for end in present:
        _named(database, end).rename(_named(aside, end))
    return aside if "" in present else None


def _put(temporary: Path, target: Path) -> None:
    _sync(temporary)
    temporary.replace(target)
    _sync(target.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _named(database: Path, end: str) -> Path:
    return database.with_name(database.name + end)
