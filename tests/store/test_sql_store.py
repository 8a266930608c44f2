"""What only a database can get wrong: schemas of other versions, locks, full disks, foreign files."""

from __future__ import annotations

import sqlite3
import sys
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from ganger_master.store import schema
from ganger_master.store.sql import SqlStore, explained
from ganger_master.store.tables import HistoryEntry, Problem, StoreBatch, StoreError, metadata
from msgspec.structs import astuple
from sqlalchemy import Engine, create_engine
from sqlalchemy.exc import OperationalError


def url_of(path: Path) -> str:
    return f"sqlite:///{path}"


def migrate_to(engine: Engine, revision: str) -> None:
    with engine.begin() as connection:
        schema.migrate(connection, revision)


def test_schema_equals_the_sum_of_all_migrations(tmp_path: Path) -> None:
    engine = create_engine(url_of(tmp_path / "ganger.db"))
    schema.upgrade(engine)
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True, "compare_server_default": True})
        assert compare_metadata(context, metadata) == []
    engine.dispose()


@pytest.mark.parametrize("first", ["0001", "0002", "0003", "0004"])
def test_each_earlier_schema_is_brought_up_to_date_once(tmp_path: Path, first: str) -> None:
    engine = create_engine(url_of(tmp_path / "ganger.db"))
    migrate_to(engine, first)
    schema.upgrade(engine)
    schema.upgrade(engine)
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True, "compare_server_default": True})
        assert compare_metadata(context, metadata) == []
    engine.dispose()


def test_what_was_written_under_the_first_schema_is_kept_by_this_one(tmp_path: Path) -> None:
    told = HistoryEntry(1, 1.5, "jobs/1", "job_submitted", "user:u")
    engine = create_engine(url_of(tmp_path / "ganger.db"))
    migrate_to(engine, "0001")
    with engine.begin() as connection:
        connection.execute(
            metadata.tables["jobs"].insert().values(["1", 1, "uid", "u", "PENDING", 1, 0, 1.5, None, "{}"])
        )
        connection.execute(metadata.tables["events"].insert().values(list(astuple(told))))
    engine.dispose()
    store = SqlStore(url_of(tmp_path / "ganger.db"))
    store.open()
    assert [(row.table, row.key, row.columns["uid"]) for row in store.load()] == [("jobs", "1", "uid")]
    assert list(store.history("", 0, 10)) == [told]
    store.close()


def test_database_file_is_readable_by_its_owner_only(tmp_path: Path) -> None:
    store = SqlStore(url_of(tmp_path / "state" / "ganger.db"))
    store.open()
    store.commit(StoreBatch({"counters": [("a", "1")]}))
    store.close()
    assert all(path.stat().st_mode & 0o077 == 0 for path in (tmp_path / "state").iterdir())


def test_database_lies_in_its_directory_whatever_that_is_called(tmp_path: Path) -> None:
    path = tmp_path / "odd: dir #1? 100%&a=b" / "ganger.db"
    store = SqlStore(path)
    store.open()
    store.close()
    assert path.read_bytes()[:6] == b"SQLite"
    assert [entry.name for entry in tmp_path.iterdir()] == [path.parent.name]


def test_database_of_a_newer_ganger_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "ganger.db"
    store = SqlStore(url_of(path))
    store.open()
    store.close()
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
    connection.close()
    with pytest.raises(StoreError, match="schema 9999") as refused:
        SqlStore(url_of(path)).open()
    assert refused.value.problem is Problem.NEWER


def test_file_that_is_no_database_is_named_as_such(tmp_path: Path) -> None:
    path = tmp_path / "ganger.db"
    path.write_bytes(b"something else entirely, " * 100)
    with pytest.raises(StoreError) as refused:
        SqlStore(url_of(path)).open()
    assert refused.value.problem is Problem.DAMAGED
    assert path.read_bytes().startswith(b"something else")


def test_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError) as refused:
        SqlStore(url_of(tmp_path / "file" / "ganger.db")).open()
    assert refused.value.problem is Problem.UNREADABLE
    assert str(tmp_path) in str(refused.value)


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("nonsense", "database URL 'nonsense' cannot be used: "),
        ("u:secret@h", "database URL (unreadable) cannot be used: "),
        ("http://h/x", "database URL http://h/x names no database that Ganger can use; "),
        ("mysql://u:secret@h/x", "database URL mysql://u:***@h/x names no database that Ganger can use; "),
        ("postgresql+psycopg://u:secret@h:port/x", "database URL (unreadable) cannot be used: "),
    ],
)
def test_a_database_url_that_cannot_be_used_is_answered_with_one_that_can(url: str, told: str) -> None:
    with pytest.raises(StoreError) as refused:
        SqlStore(url)
    assert str(refused.value).startswith(told)
    assert str(refused.value).endswith("as in sqlite:////path/ganger.db or postgresql+psycopg://user@host/ganger")


def test_a_database_server_that_refuses_is_no_matter_of_paths_and_disks() -> None:
    refusal = OperationalError("SELECT 1", {}, Exception("connection refused"))
    with pytest.raises(StoreError) as told, explained("postgresql+psycopg://u:secret@h/x"):
        raise refusal
    assert told.value.problem is Problem.SERVER
    assert str(told.value) == (
        "database postgresql+psycopg://u:***@h/x: connection refused;"
        " check the database URL, and that its server runs and admits this user"
    )


@pytest.mark.parametrize(
    "url", ["nosuchdatabase://user:secret@host/name", "postgresql+psycopg://user:secret@host:port/name"]
)
def test_unusable_database_url_is_an_error_without_its_password(url: str) -> None:
    with pytest.raises(StoreError) as refused:
        SqlStore(url)
    assert refused.value.problem is Problem.URL
    assert "secret" not in str(refused.value)


def test_a_driver_that_is_not_installed_is_told_with_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(StoreError, match=r"pip install 'ganger\[postgresql\]'") as refused:
        SqlStore("postgresql+psycopg://user:secret@host/name")
    assert "secret" not in str(refused.value)


def test_locked_database_refuses_the_batch_and_takes_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ganger_master.store.sql._BUSY_MS", 20)
    path = tmp_path / "ganger.db"
    store = SqlStore(url_of(path))
    store.open()
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreError) as refused:
        store.commit(StoreBatch({"counters": [("a", "1")]}))
    assert refused.value.problem is Problem.LOCKED
    other.execute("ROLLBACK")
    other.close()
    store.commit(StoreBatch({"counters": [("a", "2")]}))
    assert [row.columns for row in store.load()] == [{"body": "2"}]
    store.close()


def test_full_disk_refuses_the_batch_keeps_the_rest_and_recovers(tmp_path: Path) -> None:
    path = tmp_path / "ganger.db"
    store = SqlStore(url_of(path))
    store.open()
    store.commit(StoreBatch({"counters": [("kept", "1")]}))
    connection = store._open_connection()  # the page limit of SQLite stands in for a full disk
    pages = connection.exec_driver_sql("PRAGMA page_count").scalar_one()
    connection.exec_driver_sql(f"PRAGMA max_page_count={pages}")
    connection.commit()
    with pytest.raises(StoreError) as refused:
        store.commit(StoreBatch({"job_specs": [("jobs/1", "x" * 1_000_000)]}))
    assert refused.value.problem is Problem.FULL
    connection.exec_driver_sql("PRAGMA max_page_count=1000000")
    connection.commit()
    store.commit(StoreBatch({"job_specs": [("jobs/1", "x" * 1_000_000)]}))
    assert {row.key for row in store.load()} == {"kept", "jobs/1"}
    store.close()
