"""A store in memory with leases, for several masters in one process. Its clock, the database's, is the test's."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from queue import SimpleQueue

from ganger_master.core.leader_lease import LeaderLease, LeaseCandidate, may_take
from ganger_master.store.tables import Problem, StoreBatch, StoreError
from kit.memory_store import MemoryStore


class LeasedDatabase:
    """What the stores of all masters share. `now`: the database's clock, in seconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self.term = 0
        self.holder = self.address = ""
        self.expiry = 0.0
        self.content = MemoryStore()

    def store(self) -> LeasedStore:
        """Return the store of one more master."""
        return LeasedStore(self)

    def expire(self) -> None:
        """Let the lease end now."""
        self.now = max(self.now, self.expiry)


class LeasedStore(MemoryStore):
    has_leases = True

    def __init__(self, database: LeasedDatabase) -> None:
        super().__init__()
        self._database = database
        self._rows, self._history = database.content._rows, database.content._history
        self._term = 0
        self._lease_s = 0.0
        # One is put there for each renewal.
        self.renewals: SimpleQueue[None] = SimpleQueue()
        # Raised by renewals instead, as by a database that is not reached.
        self.trouble: StoreError | None = None

    def open(self, candidate: LeaseCandidate | None = None) -> LeaderLease | None:
        database = self._database
        present = LeaderLease(database.term, database.holder, database.address, database.expiry - database.now)
        assert candidate is not None, "masters of this store have leases"
        if not may_take(present):
            return present
        database.term += 1
        database.holder, database.address = candidate.holder, candidate.address
        self._term, self._lease_s = database.term, candidate.lease_s
        database.expiry = database.now + candidate.lease_s
        return None

    def check_owner(self) -> None:
        if self.trouble is not None:
            raise self.trouble
        self._check_term()
        self._database.expiry = self._database.now + self._lease_s
        self.renewals.put(None)

    def commit(self, batch: StoreBatch) -> None:
        self._check_term()
        super().commit(batch)

    def prepare(self, batch: StoreBatch) -> Callable[[], None]:
        return partial(self.commit, batch)

    def close(self) -> None:
        if self._term == self._database.term:
            self._database.expiry = self._database.now

    def _check_term(self) -> None:
        if self._term != self._database.term:
            raise StoreError(Problem.FENCED, "the database has a newer master")
