"""Every store keeps the same promises."""

from __future__ import annotations

import json
import os
import tempfile
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import sqlalchemy
from ganger_master.store.sql import SqlStore
from ganger_master.store.tables import COLUMNS, HistoryEntry, Problem, Row, Store, StoreBatch, StoreError
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.memory_store import MemoryStore

POSTGRESQL = "GANGER_TEST_POSTGRESQL"

Opener = Callable[[], Store]


@pytest.fixture(params=["memory", "sqlite", "postgresql"])
def reopen(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Opener]:
    """Opens the store anew, as a restarted master does."""
    opened: list[Store] = []
    if request.param == "memory":
        memory = MemoryStore()

        def make() -> Store:
            return memory
    elif request.param == "sqlite":

        def make() -> Store:
            return SqlStore(f"sqlite:///{tmp_path / 'ganger.db'}")
    else:
        url = os.environ.get(POSTGRESQL)
        if not url:
            pytest.skip(f"{POSTGRESQL} names no database")
        schema = f"test_{uuid.uuid4().hex}"
        admin = sqlalchemy.create_engine(url)
        with admin.begin() as connection:
            connection.execute(sqlalchemy.schema.CreateSchema(schema))
        separator = "&" if "?" in url else "?"

        def make() -> Store:
            return SqlStore(f"{url}{separator}options=-csearch_path%3D{schema}")

    def open_one() -> Store:
        store = make()
        opened.append(store)
        store.open()
        return store

    yield open_one
    for store in opened:
        store.close()
    if request.param == "postgresql":
        _drop(admin, schema)


def _drop(admin: sqlalchemy.Engine, schema: str) -> None:
    with admin.begin() as connection:
        connection.execute(sqlalchemy.schema.DropSchema(schema, cascade=True))
    admin.dispose()


def counter(key: str, value: int) -> Row:
    return key, str(value)


def job(number: int, state: str = "PENDING", revision: int = 1, end_time: float | None = None) -> Row:
    return f"jobs/{number}", number, f"uid-{number}", "u", state, revision, 0, 1.5, end_time, '{"ä": "☃"}'


def jobs(*rows: Row, history: Sequence[HistoryEntry] = ()) -> StoreBatch:
    return StoreBatch({"jobs": rows}, history=history)


def happened(sequence: int, subject: str = "jobs/1", time: float | None = None) -> HistoryEntry:
    return HistoryEntry(sequence, float(sequence) if time is None else time, subject, "job_submitted", "user:u")


def columns_of(job: Row) -> dict[str, object]:
    return dict(zip(COLUMNS["jobs"], job[1:], strict=True))


def contents(store: Store) -> dict[tuple[str, str], dict[str, object]]:
    return {(row.table, row.key): dict(row.columns) for row in store.load()}


def test_new_store_is_empty(reopen: Opener) -> None:
    store = reopen()
    assert contents(store) == {}
    assert store.history("", 0, 10) == []
    assert store.oldest_sequence() == 0


def test_committed_batch_is_there_after_reopening_value_for_value(reopen: Opener) -> None:
    store = reopen()
    store.commit(
        StoreBatch(
            {"counters": [counter("next_job", 2**62)], "jobs": [job(1), job(2, end_time=0.25)]}, {}, [happened(1)]
        )
    )
    store.close()
    again = reopen()
    found = contents(again)
    assert found["counters", "next_job"] == {"body": str(2**62)}
    assert found["jobs", "jobs/1"] == columns_of(job(1))
    assert found["jobs", "jobs/2"] == columns_of(job(2, end_time=0.25))
    assert list(again.history("", 0, 10)) == [happened(1)]


TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)


@settings(max_examples=5)
@given(st.lists(st.tuples(st.floats(1e9, 1e10), TEXTS), min_size=1, max_size=40))
def test_times_and_texts_come_back_as_they_were(told: list[tuple[float, str]]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        store = SqlStore(f"sqlite:///{directory}/ganger.db")
        store.open()
        written = [
            HistoryEntry(number, time, "jobs/1", "told", "user:u", text, json.dumps({"said": text}))
            for number, (time, text) in enumerate(told, 1)
        ]
        store.commit(StoreBatch({"counters": [("said", told[0][1])]}, history=written))
        assert list(store.history("", 0, 100)) == written
        assert contents(store) == {("counters", "said"): {"body": told[0][1]}}
        store.close()


def test_put_replaces_and_remove_takes_away(reopen: Opener) -> None:
    store = reopen()
    store.commit(jobs(job(1), job(2)))
    store.commit(StoreBatch({"jobs": [job(1, "HOLDING", 2)]}, {"jobs": ["jobs/2", "jobs/9"]}))
    assert contents(store) == {("jobs", "jobs/1"): columns_of(job(1, "HOLDING", 2))}


def test_empty_batch_changes_nothing(reopen: Opener) -> None:
    store = reopen()
    store.commit(StoreBatch())
    assert contents(store) == {}


def test_large_batch_is_kept_whole(reopen: Opener) -> None:
    store = reopen()
    store.commit(jobs(*map(job, range(12_000)), history=[happened(n) for n in range(1, 12_001)]))
    assert len(contents(store)) == 12_000
    assert len(store.history("", 0, 20_000)) == 12_000


def test_history_is_read_in_order_by_subject_and_page(reopen: Opener) -> None:
    store = reopen()
    store.commit(StoreBatch(history=[happened(n, f"jobs/{n % 2}") for n in range(1, 9)]))
    assert [e.sequence for e in store.history("", 2, 3)] == [3, 4, 5]
    assert [e.sequence for e in store.history("jobs/1", 1, 2)] == [3, 5]
    assert store.history("jobs/7", 0, 9) == []


def test_compaction_forgets_the_old_end_of_history_in_bounded_steps(reopen: Opener) -> None:
    store = reopen()
    store.commit(jobs(job(1), history=[happened(n) for n in range(1, 11)]))
    assert store.compact(before_time=6.0, limit=2) == 2
    assert store.oldest_sequence() == 3
    assert store.compact(before_time=6.0, limit=100) == 3
    assert store.compact(before_time=6.0, limit=100) == 0
    assert [e.sequence for e in store.history("", 0, 100)] == [6, 7, 8, 9, 10]
    assert ("jobs", "jobs/1") in contents(store)


@pytest.mark.parametrize("more", [1, 300])
def test_batch_that_fails_in_the_middle_leaves_nothing(reopen: Opener, more: int) -> None:
    store = reopen()
    if isinstance(store, MemoryStore):
        pytest.skip("memory does not fail")
    store.commit(jobs(job(1), history=[happened(1)]))
    with pytest.raises(StoreError):
        # The history's sequence is taken, which only shows after the jobs were written.
        store.commit(jobs(job(1, "HOLDING", 2), *map(job, range(2, 2 + more)), history=[happened(1)]))
    assert contents(store) == {("jobs", "jobs/1"): columns_of(job(1))}
    store.commit(jobs(job(2), history=[happened(2)]))
    assert len(contents(store)) == 2


def test_former_master_is_fenced_off(reopen: Opener) -> None:
    former = reopen()
    if isinstance(former, MemoryStore):
        pytest.skip("memory has one master")
    former.commit(StoreBatch({"counters": [counter("a", 1)]}))
    former.check_owner()
    newer = reopen()
    for used in (former.check_owner, lambda: former.commit(StoreBatch({"counters": [counter("a", 2)]}))):
        with pytest.raises(StoreError) as refused:
            used()
        assert refused.value.problem is Problem.FENCED
    newer.check_owner()
    assert contents(newer) == {("counters", "a"): {"body": "1"}}
    newer.commit(StoreBatch({"counters": [counter("a", 3)]}))
