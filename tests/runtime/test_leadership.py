"""A leader renews its lease by a thread of its own, whatever its event loop does."""

from __future__ import annotations

import asyncio
from queue import Empty

import pytest
from ganger.wire.errors import NotLeader
from ganger_master.core.leader_lease import LeaseCandidate
from ganger_master.core.settings import CoreSettings
from ganger_master.runtime.writer import Writer
from ganger_master.store.tables import Problem, StoreError
from kit.leased_store import LeasedDatabase, LeasedStore

LEASE_S = 0.3
FIRST, SECOND = (LeaseCandidate(name, f"{name}:7070", LEASE_S) for name in ("m1", "m2"))


class Clock:
    """A clock of the test."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def writer_of(store: LeasedStore, clock: Clock) -> Writer:
    return Writer(store, CoreSettings(), clock, steady=clock)


def wait_for_a_renewal(store: LeasedStore) -> None:
    """Block until a renewal has begun and ended from now on."""
    while not store.renewals.empty():
        store.renewals.get()
    for _ in range(2):
        store.renewals.get(timeout=10.0)


def test_a_leader_whose_event_loop_is_blocked_keeps_its_lease() -> None:
    async def story() -> None:
        store, clock = LeasedDatabase().store(), Clock()
        writer = writer_of(store, clock)
        assert await writer.open(FIRST) is None
        await writer.start()
        for _ in range(3):
            clock.now += LEASE_S
            assert isinstance(writer.ownership.refusal(), NotLeader)
            # Not awaited: the event loop does nothing else meanwhile.
            wait_for_a_renewal(store)
            assert writer.ownership.refusal() is None
        await writer.close()

    asyncio.run(story())


def test_a_leader_renews_its_lease_while_it_updates_the_schema() -> None:
    class OldStore(LeasedStore):
        def migrate(self) -> None:
            wait_for_a_renewal(self)

    async def story() -> None:
        writer = writer_of(OldStore(LeasedDatabase()), Clock())
        assert await writer.open(FIRST) is None
        await writer.close()

    asyncio.run(story())


def test_a_master_that_cannot_update_the_schema_lets_its_lease_expire() -> None:
    class BrokenStore(LeasedStore):
        def migrate(self) -> None:
            raise StoreError(Problem.UNREADABLE, "the network is cut")

    async def story() -> None:
        database = LeasedDatabase()
        store = BrokenStore(database)
        writer = writer_of(store, Clock())
        with pytest.raises(StoreError):
            await writer.open(FIRST)
        # The last one; it comes after what the thread was told before.
        await writer.ownership.check()
        while not store.renewals.empty():
            store.renewals.get()
        with pytest.raises(Empty):
            store.renewals.get(timeout=LEASE_S)
        database.expire()
        assert database.store().open(SECOND) is None
        await writer.close()

    asyncio.run(story())


def test_a_leader_whose_thread_finds_another_master_ends() -> None:
    async def story() -> None:
        database, clock = LeasedDatabase(), Clock()
        writer = writer_of(database.store(), clock)
        await writer.open(FIRST)
        await writer.start()
        database.term += 1
        await asyncio.wait_for(writer.stopped.wait(), 10.0)
        assert isinstance(writer.ownership.refusal(), NotLeader)
        await writer.close()

    asyncio.run(story())
