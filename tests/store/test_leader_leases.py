"""Several masters on one PostgreSQL database: one has the lease, and no other one commits."""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
import sqlalchemy
from ganger_master.core.leader_lease import LeaderLease, LeaseCandidate
from ganger_master.store import schema
from ganger_master.store.lease_row import end_commits, read_lease, renew_lease, take_lease
from ganger_master.store.sql import SqlStore
from ganger_master.store.tables import Problem, StoreBatch, StoreError
from kit.waiting import eventually

SHORT_S = 0.3
LONG_S = 60.0

Make = Callable[[], SqlStore]


@pytest.fixture(params=["postgresql"])
def make() -> Iterator[Make]:
    """Makes stores of one database, each as that of another master."""
    url = os.environ.get("GANGER_TEST_POSTGRESQL")
    if not url:
        pytest.skip("GANGER_TEST_POSTGRESQL names no database: make postgresql")
    schema, made = f"test_{uuid.uuid4().hex}", []
    admin = sqlalchemy.create_engine(url)
    with admin.begin() as connection:
        connection.execute(sqlalchemy.schema.CreateSchema(schema))

    def make_one() -> SqlStore:
        made.append(SqlStore(f"{url}{'&' if '?' in url else '?'}options=-csearch_path%3D{schema}"))
        return made[-1]

    yield make_one
    for store in made:
        store.close()
    with admin.begin() as connection:
        connection.execute(sqlalchemy.schema.DropSchema(schema, cascade=True))
    admin.dispose()


def candidate(name: str, lease_s: float = LONG_S) -> LeaseCandidate:
    return LeaseCandidate(name, f"{name}:7070", lease_s)


def counter(value: int) -> StoreBatch:
    return StoreBatch({"counters": [("a", str(value))]})


def kept(store: SqlStore) -> list[str]:
    return [str(row.columns["body"]) for row in store.load()]


def takes(store: SqlStore, name: str = "m2") -> None:
    """Wait until the store's master has the lease, as a stand-by does."""
    eventually(lambda: store.open(candidate(name)) is None, what=f"{name} takes the lease", within_seconds=10)


def is_fenced(used: Callable[[], object]) -> bool:
    with pytest.raises(StoreError) as refused:
        used()
    return refused.value.problem is Problem.FENCED


def test_a_second_master_stands_by_and_is_told_which_one_leads(make: Make) -> None:
    first, second = make(), make()
    assert first.open(candidate("m1")) is None
    leader = second.open(candidate("m2"))
    assert isinstance(leader, LeaderLease)
    assert (leader.term, leader.holder, leader.address) == (1, "m1", "m1:7070")
    assert LONG_S - 10.0 < leader.left_s <= LONG_S
    first.commit(counter(1))
    first.check_owner()
    assert kept(first) == ["1"]


def test_a_leader_that_does_not_renew_is_replaced_and_commits_nothing_from_then_on(make: Make) -> None:
    first, second = make(), make()
    first.open(candidate("m1", SHORT_S))
    first.commit(counter(1))
    takes(second)
    prepared = first.prepare(counter(2))
    for used in (prepared, first.check_owner, lambda: first.compact(1e12, 10)):
        assert is_fenced(used)
    second.commit(counter(3))
    assert kept(second) == ["3"]


def test_a_leader_that_renews_keeps_its_lease(make: Make) -> None:
    first, second = make(), make()
    first.open(candidate("m1", SHORT_S))
    ended, refused = threading.Event(), []

    def renew() -> None:
        while not ended.wait(SHORT_S / 3):
            first.check_owner()

    renewing = threading.Thread(target=renew)
    renewing.start()
    try:
        for _ in range(12):
            refused.append(second.open(candidate("m2")))
            ended.wait(SHORT_S / 4)
    finally:
        ended.set()
        renewing.join()
    assert all(isinstance(leader, LeaderLease) and leader.holder == "m1" for leader in refused)


def test_a_leader_late_with_its_renewal_keeps_the_lease_that_no_other_master_took(make: Make) -> None:
    first = make()
    first.open(candidate("m1", SHORT_S))
    eventually(lambda: _left_s(first) < 0.0, what="the lease has expired", within_seconds=5)
    first.commit(counter(1))
    first.check_owner()
    assert _left_s(first) > 0.0


def _left_s(store: SqlStore) -> float:
    with store._engine.connect() as connection:
        lease = read_lease(connection)
    assert lease is not None
    return lease.left_s


def test_a_leader_that_stops_gives_its_lease_back(make: Make) -> None:
    first, second = make(), make()
    first.open(candidate("m1"))
    first.close()
    assert second.open(candidate("m2")) is None


def test_a_renewal_that_was_under_way_does_not_extend_a_lease_that_was_given_back(make: Make) -> None:
    first, second = make(), make()
    first.open(candidate("m1"))
    first.close()
    with first._renewals.begin() as connection:
        assert not renew_lease(connection, 1, LONG_S)
    assert second.open(candidate("m2")) is None


def test_a_renewal_does_not_wait_for_a_connection_that_readers_have(make: Make) -> None:
    first = make()
    first.open(candidate("m1"))
    with ExitStack() as readers:
        for _ in range(15):
            readers.enter_context(first._engine.connect())
        assert first._engine.pool.checkedout() == 15
        first.check_owner()


def test_a_former_leader_that_stops_leaves_the_lease_of_the_present_one(make: Make) -> None:
    first, second, third = make(), make(), make()
    first.open(candidate("m1", SHORT_S))
    takes(second)
    first.close()
    leader = third.open(candidate("m3"))
    assert leader is not None
    assert leader.holder == "m2"


def test_a_leader_that_stands_still_within_a_commit_holds_no_stand_by_up_and_does_not_finish_it(make: Make) -> None:
    first, second = make(), make()
    first.open(candidate("m1", SHORT_S))
    connection = first._open_connection()
    held = connection.begin()
    first._check_generation(connection)
    connection.exec_driver_sql("INSERT INTO counters (key, body) VALUES ('a', 'former')")
    takes(second)
    with pytest.raises(sqlalchemy.exc.OperationalError):
        held.commit()
    assert kept(second) == []


def test_a_leader_that_renews_while_a_stand_by_waits_keeps_its_transaction(make: Make) -> None:
    first, second = make(), make()
    first.open(candidate("m1"))
    connection = first._open_connection()
    with connection.begin():
        first._check_generation(connection)
        with second._engine.begin() as other:
            leader = end_commits(other)
        connection.exec_driver_sql("INSERT INTO counters (key, body) VALUES ('a', '1')")
    assert leader is not None
    assert leader.holder == "m1"
    assert kept(first) == ["1"]


def test_a_stand_by_that_may_not_end_a_commit_of_the_former_leader_names_the_remedy(make: Make) -> None:
    first = make()
    first.open(candidate("m1", SHORT_S))
    role, schema = f"role_{uuid.uuid4().hex}", f"{first._url}".rpartition("%3D")[2]
    with first._engine.begin() as admin:
        admin.exec_driver_sql(f"CREATE ROLE {role} LOGIN")
        admin.exec_driver_sql(f"GRANT ALL ON SCHEMA {schema} TO {role}")
        admin.exec_driver_sql(f"GRANT ALL ON ALL TABLES IN SCHEMA {schema} TO {role}")
    second = SqlStore(sqlalchemy.make_url(str(first._url)).set(username=role).render_as_string(hide_password=False))
    connection = first._open_connection()
    eventually(lambda: _left_s(first) < 0.0, what="the lease has expired", within_seconds=5)
    try:
        with connection.begin():
            first._check_generation(connection)
            with pytest.raises(StoreError, match="give all masters the same user"):
                second.open(candidate("m2"))
    finally:
        second.close()
        with first._engine.begin() as admin:
            admin.exec_driver_sql(f"DROP OWNED BY {role}")
            admin.exec_driver_sql(f"DROP ROLE {role}")


def test_a_master_stands_by_while_another_one_takes_the_first_lease(make: Make) -> None:
    first, second = make(), make()
    schema.upgrade(first._engine)
    with first._engine.begin() as connection:
        assert take_lease(connection, candidate("m1")) == 1
        found = second.open(candidate("m2"))
        assert isinstance(found, LeaderLease)
        assert found.left_s <= 0.0
    found = second.open(candidate("m2"))
    assert isinstance(found, LeaderLease)
    assert found.holder == "m1"


def test_a_renewal_waits_for_no_commit(make: Make) -> None:
    first = make()
    first.open(candidate("m1"))
    connection = first._open_connection()
    with connection.begin():
        first._check_generation(connection)
        first.check_owner()


def test_of_masters_that_start_together_on_an_empty_database_one_leads(make: Make) -> None:
    stores = [make() for _ in range(4)]
    found: list[object] = []

    def open_one(store: SqlStore, name: str) -> None:
        try:
            found.append(store.open(candidate(name)))
        except StoreError as error:
            found.append(error)

    threads = [threading.Thread(target=open_one, args=(store, f"m{n}")) for n, store in enumerate(stores)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(type(one).__name__ for one in found) == ["LeaderLease"] * 3 + ["NoneType"]


def test_a_database_of_an_earlier_schema_is_taken_over_at_once(make: Make) -> None:
    first, second = make(), make()
    first.open()
    first.commit(counter(1))
    with first._engine.begin() as connection:
        for change in (
            *("DROP TABLE user_usages", "DROP TABLE reservations", "ALTER TABLE writer DROP COLUMN holder"),
            *("ALTER TABLE writer DROP COLUMN address", "ALTER TABLE writer DROP COLUMN expiry"),
            "UPDATE alembic_version SET version_num = '0004'",
        ):
            connection.exec_driver_sql(change)
    assert second.open(candidate("m2")) is None
    assert kept(second) == ["1"]
    assert is_fenced(lambda: first.commit(counter(2)))


def test_a_stand_by_of_an_earlier_version_is_refused_by_a_newer_schema(make: Make) -> None:
    first, second = make(), make()
    first.open(candidate("m1"))
    with first._engine.begin() as connection:
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = '9999'")
    with pytest.raises(StoreError, match="schema 9999") as refused:
        second.open(candidate("m2"))
    assert refused.value.problem is Problem.NEWER
