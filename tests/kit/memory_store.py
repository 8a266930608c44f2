"""The store in plain memory: the contract without a database, for tests."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from ganger_master.core.leader_lease import LeaderLease, LeaseCandidate
from ganger_master.store.tables import COLUMNS, STATE, HistoryEntry, StoreBatch, StoredRow


class MemoryStore:
    """See `tables.Store`. What was committed stays for as long as the object lives, across `close` and `open`."""

    def __init__(self) -> None:
        self._rows: dict[str, dict[str, StoredRow]] = {name: {} for name in STATE}
        self._history: list[HistoryEntry] = []

    has_leases = False

    def open(self, candidate: LeaseCandidate | None = None) -> LeaderLease | None:
        return None

    def migrate(self) -> None:
        return None

    def load(self) -> Iterator[StoredRow]:
        for rows in self._rows.values():
            yield from list(rows.values())

    def commit(self, batch: StoreBatch) -> None:
        for table, keys in batch.removes.items():
            for key in keys:
                self._rows[table].pop(key, None)
        for table, rows in batch.puts.items():
            for row in rows:
                key = str(row[0])
                self._rows[table][key] = StoredRow(table, key, dict(zip(COLUMNS[table], row[1:], strict=True)))
        self._history.extend(batch.history)

    def prepare(self, batch: StoreBatch) -> Callable[[], None]:
        return partial(self.commit, batch)

    def check_owner(self) -> None:
        return None

    def history(self, subject: str, after_sequence: int, limit: int) -> Sequence[HistoryEntry]:
        start = bisect_right(self._history, after_sequence, key=lambda entry: entry.sequence)
        found = (entry for entry in self._history[start:] if not subject or entry.subject == subject)
        return [entry for entry, _ in zip(found, range(limit), strict=False)]

    def oldest_sequence(self) -> int:
        return self._history[0].sequence if self._history else 0

    def compact(self, before_time: float, limit: int) -> int:
        old = [entry.sequence for entry in self._history[:limit] if entry.time < before_time]
        gone = bisect_right(self._history, old[-1], key=lambda entry: entry.sequence) if old else 0
        del self._history[:gone]
        return gone

    def close(self) -> None:
        return None
