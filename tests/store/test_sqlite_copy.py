"""`ganger master backup` and `restore`: copies of a database that a master writes, and what is no copy of one."""

from __future__ import annotations

import json
import os
import sqlite3
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from ganger.injob.process_identity import start_ticks
from ganger_master.runtime.state_directory import StateDirectory
from ganger_master.store.sql import SqlStore
from ganger_master.store.tables import HistoryEntry, StoreBatch, StoreError
from kit.shell import Done, Shell


class Database:
    """The database of a master that runs. `state`: its state directory."""

    def __init__(self, state: Path) -> None:
        self.state, self.path = state, state / "ganger.db"
        self.store = SqlStore(self.path)
        self.store.open()
        self.held: StateDirectory | None = None
        self._written = 0

    def write(self, entries: int) -> None:
        for _ in range(entries):
            self._written += 1
            told = HistoryEntry(self._written, 1.5, "jobs/1", "job_submitted", "x" * 5_000)
            self.store.commit(StoreBatch(history=[told]))

    def command(self, name: str, *arguments: str) -> Done:
        return Shell("").try_("master", name, "--state-dir", str(self.state), *arguments)


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    made = Database(tmp_path / "state")
    made.write(40)
    yield made
    made.store.close()
    if made.held is not None:
        made.held.close()


def entries_of(path: Path) -> int:
    with sqlite3.connect(path) as connection:
        return int(connection.execute("SELECT count(*) FROM events").fetchone()[0])


def test_a_copy_has_all_that_was_committed_is_private_and_lies_alone(database: Database, tmp_path: Path) -> None:
    copy = tmp_path / "copies" / "ganger.db"
    copy.parent.mkdir()
    done = database.command("backup", str(copy))
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith(f"{copy}: 0 jobs, 40 entries of history, ")
    assert [path.name for path in copy.parent.iterdir()] == ["ganger.db"]
    assert copy.stat().st_mode & 0o077 == 0
    database.write(3)
    assert (entries_of(copy), entries_of(database.path)) == (40, 43)


def test_a_copy_ends_though_the_master_commits_all_the_time(database: Database, tmp_path: Path) -> None:
    database.write(800)
    is_copied = threading.Event()

    def commit() -> None:
        # The store of a master is used by one thread.
        while not is_copied.is_set():
            database.write(1)

    master = threading.Thread(target=commit)
    master.start()
    try:
        done = database.command("backup", str(tmp_path / "copy.db"))
    finally:
        is_copied.set()
        master.join()
    assert done.code == 0, done.err
    assert 840 <= entries_of(tmp_path / "copy.db") <= entries_of(database.path)


def test_a_log_that_a_lost_database_left_is_not_taken_for_that_of_the_restored_one(
    database: Database, tmp_path: Path
) -> None:
    copy = tmp_path / "copy.db"
    database.command("backup", str(copy))
    database.write(5)
    # Killed: its log is not in the database yet.
    log = database.path.with_name("ganger.db-wal").read_bytes()
    database.store.close()
    database.path.unlink()
    database.path.with_name("ganger.db-wal").write_bytes(log)
    assert database.command("restore", str(copy)).code == 0
    assert entries_of(database.path) == 40
    assert database.path.with_name("ganger.db.replaced-1-wal").read_bytes() == log


def test_a_copy_is_not_put_beside_the_log_of_another_database(database: Database, tmp_path: Path) -> None:
    (tmp_path / "copy.db-wal").write_bytes(b"")
    done = database.command("backup", str(tmp_path / "copy.db"))
    assert (done.code, "copy.db-wal belongs to a database" in done.err) == (4, True), done.err


def test_a_later_copy_replaces_an_earlier_one_and_options_may_stand_before_the_command(
    database: Database, tmp_path: Path
) -> None:
    copy = tmp_path / "ganger.db"
    for count in (40, 41):
        done = Shell("").try_("master", "--state-dir", str(database.state), "backup", str(copy))
        assert f", {count} entries of history" in done.out, done.err
        database.write(1)
    assert entries_of(copy) == 41


def test_a_restored_database_holds_the_copy_and_the_former_one_stays_beside_it(
    database: Database, tmp_path: Path
) -> None:
    copy = tmp_path / "copy.db"
    database.command("backup", str(copy))
    database.write(5)
    database.store.close()
    for number in (1, 2):
        done = database.command("restore", str(copy))
        assert done.code == 0, done.err
        former = database.path.with_name(f"ganger.db.replaced-{number}")
        assert f"the former database is {former}" in done.out
        assert entries_of(database.path) == 40
        assert entries_of(former) == (45 if number == 1 else 40)
    store = SqlStore(database.path)
    store.open()
    store.commit(StoreBatch(history=[HistoryEntry(41, 1.5, "jobs/1", "job_submitted", "")]))
    store.close()


def test_a_copy_is_restored_from_where_nothing_can_be_written_into_an_empty_state_directory(
    database: Database, tmp_path: Path
) -> None:
    copy = tmp_path / "copies" / "copy.db"
    copy.parent.mkdir()
    with sqlite3.connect(database.path) as read, sqlite3.connect(copy) as written:
        # Of another tool: it still says that there is a log beside it.
        read.backup(written)
    copy.chmod(0o400)
    before = sorted(copy.parent.iterdir())
    restore = ("master", "restore", "--state-dir", str(tmp_path / "fresh"), str(copy))
    missing = Shell("").try_(*restore)
    assert (missing.code, "fresh: name the master's state directory" in missing.err) == (4, True)
    (tmp_path / "fresh").mkdir()
    done = Shell("").try_(*restore)
    assert done.code == 0, done.err
    assert "former" not in done.out
    assert entries_of(tmp_path / "fresh" / "ganger.db") == 40
    assert sorted(copy.parent.iterdir()) == before


def _of_a_running_master(database: Database, copy: Path) -> None:
    database.held = StateDirectory(database.state)


def _of_a_running_cluster(database: Database, copy: Path) -> None:
    own = {"name": "up", "pid": os.getpid(), "start_ticks": start_ticks(os.getpid())}
    (database.state / "up.json").write_text(json.dumps({"ready": True, "processes": [own]}))


def _damage(database: Database, copy: Path) -> None:
    with copy.open("r+b") as file:
        file.seek(5 * 4096)
        file.write(b"\xff" * 4096 * 3)


def _cut(database: Database, copy: Path) -> None:
    os.truncate(copy, copy.stat().st_size // 2)


def _as_text(database: Database, copy: Path) -> None:
    copy.write_text("not a database, but a text of some length\n" * 100)


def _of_another_program(database: Database, copy: Path) -> None:
    copy.unlink()
    with sqlite3.connect(copy) as connection:
        connection.execute("CREATE TABLE notes (text)")


def _newer(database: Database, copy: Path) -> None:
    with sqlite3.connect(copy) as connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (_of_a_running_master, "another master"),
        (_of_a_running_cluster, "runs a cluster"),
        (_damage, "damaged"),
        (_cut, "damaged"),
        (_as_text, "damaged"),
        (_of_another_program, "not one of a master"),
        (_newer, "schema 9999"),
        (lambda database, copy: copy.unlink(), "there is no file"),
    ],
)
def test_what_is_no_whole_copy_is_refused_with_its_reason_and_the_database_stays(
    database: Database, tmp_path: Path, spoil: Callable[[Database, Path], None], reason: str
) -> None:
    copy = tmp_path / "copy.db"
    database.command("backup", str(copy))
    database.write(1)
    database.store.close()
    spoil(database, copy)
    done = database.command("restore", str(copy))
    assert done.code == 4, done.out
    assert reason in done.err
    assert "ganger master restore`)" not in done.err
    assert "Traceback" not in done.err
    assert entries_of(database.path) == 41
    assert [path.name for path in database.state.iterdir() if "replaced" in path.name or path.name[0] == "."] == []


@pytest.mark.parametrize(
    ("file", "reason"),
    [
        ("", "is a directory"),
        ("none/copy.db", "there is no directory"),
        ("notes.txt", "is no database"),
        ("state/ganger.db", "is the database itself"),
    ],
)
def test_a_backup_goes_over_nothing_but_an_earlier_one(
    database: Database, tmp_path: Path, file: str, reason: str
) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    done = database.command("backup", str(tmp_path / file))
    assert (done.code, reason in done.err) == (4, True), done.err
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_backup_of_no_database_or_of_another_kind_is_refused(tmp_path: Path) -> None:
    missing = Shell("").try_("master", "backup", "--state-dir", str(tmp_path), str(tmp_path / "copy.db"))
    assert (missing.code, "there is no database" in missing.err) == (4, True)
    url = "postgresql+psycopg://ganger@host/ganger"
    other = Shell("").try_(
        "master", "backup", "--state-dir", str(tmp_path), "--database-url", url, str(tmp_path / "copy.db")
    )
    assert (other.code, "pg_dump" in other.err) == (4, True)


def test_a_damaged_database_is_named_when_it_is_opened(database: Database) -> None:
    database.store.close()
    with sqlite3.connect(database.path) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").close()
    _damage(database, database.path)
    with pytest.raises(StoreError, match=r"damaged.*ganger master restore"):
        SqlStore(database.path).open()
