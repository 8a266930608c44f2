"""Elements as rows, and rows that another version wrote."""

from __future__ import annotations

import json
from collections.abc import Iterator

from core.drive import Drive, job_of
from ganger_master.store.tables import Codec, StoredRow
from kit.memory_store import MemoryStore
from msgspec.structs import replace

# Version 0.1 stored these two and never read them.
FORMER_FIELDS = {"jobs": {"suspend_wanted": 3}, "gangs": {"stop_reason": "moved away"}}


def with_former_fields(rows: Iterator[StoredRow]) -> Iterator[StoredRow]:
    for row in rows:
        body = json.loads(str(row.columns["body"])) | FORMER_FIELDS.get(row.table, {})
        yield replace(row, columns={**row.columns, "body": json.dumps(body)})


def test_bodies_with_fields_that_a_former_version_stored_are_read_without_them() -> None:
    drive, store = Drive(), MemoryStore()
    drive.start(drive.submit(job_of(1)))
    changes = drive.state.take_changes()
    store.commit(Codec().batch(changes.puts, changes.removes, ()))
    elements = Codec().elements(store.load())
    assert {"JobRecord", "Gang"} <= {type(element).__name__ for element in elements}
    assert Codec().elements(with_former_fields(store.load())) == elements
