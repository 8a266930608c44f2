"""The tables, and the core's elements as their rows: state, which is the truth, and history, which is kept for a while.

Every state table has `key`, real columns for what people query, and where there is more `body`, the element as JSON.
Every index is one more page to write for each row, so there is none but what is looked up by.

Cells repeat what people query; the body alone is what is read back. A job's spec hardly ever changes and is by far its
largest part, so it has a row of its own that is written once, and again when the job is updated.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec
from ganger.cluster.resources import ConfigurationSet
from msgspec.structs import replace
from sqlalchemy import BigInteger, Column, Double, Index, Integer, MetaData, String, Table, Text

from ganger_master.core.effects import HistoryRow
from ganger_master.core.gang_model import Gang, TimesliceGroup
from ganger_master.core.job_model import JobRecord, JobSpec, Request
from ganger_master.core.node_model import Counters, Element, Node
from ganger_master.store.contract import HistoryEntry, Problem, Row, StoreBatch, StoredRow, StoreError

metadata = MetaData(
    naming_convention={
        "pk": "pk_%(table_name)s",
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    }
)

_KEY_LENGTH: Final = 255

# One row: which master may write. A commit under an older generation is refused.
writer = Table(
    "writer", metadata, Column("id", Integer, primary_key=True), Column("generation", BigInteger, nullable=False)
)


def _integer(name: str) -> Column[Any]:
    return Column(name, BigInteger, nullable=False)


def _text(name: str, length: int = _KEY_LENGTH) -> Column[Any]:
    return Column(name, String(length), nullable=False)


def _state_table(name: str, *columns: Column[Any] | Index) -> Table:
    key, body = Column("key", String(_KEY_LENGTH), primary_key=True), Column("body", Text, nullable=False)
    indexes = [one for one in columns if isinstance(one, Index)]
    return Table(name, metadata, key, *[one for one in columns if isinstance(one, Column)], body, *indexes)


# In the order in which they are loaded: an element only names elements of tables before its own.
_STATE_TABLES: Final = (
    # One row: what is never given twice.
    _state_table("counters"),
    _state_table("configuration_sets"),
    _state_table("nodes", _text("configuration_set", 63), _text("rack"), _text("state", 16)),
    # Never changes after submission, and is by far the largest part of a job.
    _state_table("job_specs"),
    _state_table(
        "jobs",
        _integer("number"),
        _text("uid", 36),
        _text("user"),
        _text("state", 16),
        _integer("revision"),
        _integer("epoch"),
        Column("create_time", Double, nullable=False),
        Column("end_time", Double),
        Index(None, "state", "number"),
    ),
    # Under which ids jobs were submitted that are no longer kept.
    _state_table("requests", Column("time", Double, nullable=False)),
    _state_table("gangs", _integer("epoch"), _integer("job"), _text("role", 16), _text("phase", 16)),
    # Nodes on which gangs are time-sliced, with their matrices.
    _state_table("node_sets"),
)

events = Table(
    "events",
    metadata,
    # SQLite finds a row by an INTEGER, which is as long there, without an index.
    Column("sequence", BigInteger().with_variant(Integer, "sqlite"), primary_key=True, autoincrement=False),
    Column("time", Double, nullable=False),
    _text("subject"),
    _text("kind", 63),
    _text("cause"),
    Column("message", Text, nullable=False),
    Column("figures", Text, nullable=False),
    Index(None, "subject", "sequence"),
)

STATE: Final = {table.name: table for table in _STATE_TABLES}
# Of each state table, `key` left out.
COLUMNS: Final = {
    name: tuple(column.name for column in table.columns if column.name != "key") for name, table in STATE.items()
}


# Kind of an element, as the core names it, to the table that keeps it.
TABLE_OF_KIND: Final = {
    "job": "jobs",
    "request": "requests",
    "gang": "gangs",
    "node": "nodes",
    "node_set": "node_sets",
    "configuration_set": "configuration_sets",
    "counters": "counters",
}
_TYPE_OF_TABLE: Final[Mapping[str, type]] = {
    "jobs": JobRecord,
    "job_specs": JobSpec,
    "requests": Request,
    "gangs": Gang,
    "nodes": Node,
    "node_sets": TimesliceGroup,
    "configuration_sets": ConfigurationSet,
    "counters": Counters,
}
_NO_SPEC: Final = JobSpec((), ())
_COUNTERS_KEY: Final = "counters"
_encode: Final = msgspec.json.Encoder().encode
_DECODERS: Final[Mapping[str, msgspec.json.Decoder[Any]]] = {
    table: msgspec.json.Decoder(kind) for table, kind in _TYPE_OF_TABLE.items()
}


class Codec:
    """Turns changes into a batch. Remembers which specs are stored, so use a new one after a reload."""

    def __init__(self) -> None:
        self._stored_specs: dict[str, JobSpec] = {}

    def batch(
        self, puts: Mapping[tuple[str, str], Element], removes: Iterable[tuple[str, str]], history: Iterable[HistoryRow]
    ) -> StoreBatch:
        removed: dict[str, list[str]] = {}
        for kind, key in removes:
            removed.setdefault(TABLE_OF_KIND[kind], []).append(key)
            if kind == "job":
                removed.setdefault("job_specs", []).append(key)
                self._stored_specs.pop(key, None)
        rows: dict[str, list[Row]] = {}
        for (kind, key), element in puts.items():
            table = TABLE_OF_KIND[kind]
            body = replace(element, spec=_NO_SPEC) if isinstance(element, JobRecord) else element
            name = _COUNTERS_KEY if isinstance(element, Counters) else key
            rows.setdefault(table, []).append((name, *_columns_of(element), _body(body)))
            if isinstance(element, JobRecord) and self._stored_specs.get(key) is not element.spec:
                rows.setdefault("job_specs", []).append((key, _body(element.spec)))
                self._stored_specs[key] = element.spec
        return StoreBatch(rows, removed, [_entry(each) for each in history])

    def elements(self, rows: Iterable[StoredRow]) -> list[Element]:
        """Everything a store holds, as the core's values; numbers in their order. StoreError if a row is not ours."""
        specs: dict[str, JobSpec] = {}
        found: list[Element] = []
        for row in rows:
            value = _value_of(row)
            if isinstance(value, JobSpec):
                specs[row.key] = value
                self._stored_specs[row.key] = value
            elif isinstance(value, JobRecord):
                spec = specs.get(row.key)
                if spec is None:
                    raise StoreError(Problem.DAMAGED, f"job {row.key} has no spec")
                found.append(replace(value, spec=spec))
            else:
                found.append(value)
        return sorted(found, key=_order)


def _columns_of(element: Element) -> Row:
    """Return what people query of an element, in the order of its table's columns."""
    match element:
        case JobRecord() as job:
            state, end = job.state.value, job.end_time or None
            return job.number, job.uid, job.user, state, job.revision, job.epoch, job.create_time, end
        case Request():
            return (element.time,)
        case Gang():
            return element.epoch, element.job, element.role.value, element.phase.value
        case Node():
            return element.configuration_set, element.rack, element.state.value
        case _:
            return ()


def _body(value: Element | JobSpec) -> str:
    return _encode(value).decode()


def _value_of(row: StoredRow) -> Element | JobSpec:
    try:
        value: Element | JobSpec = _DECODERS[row.table].decode(str(row.columns["body"]))
    except msgspec.MsgspecError as error:
        raise StoreError(Problem.DAMAGED, f"row {row.key!r} of {row.table} cannot be read: {error}") from error
    return value


def _order(element: Element) -> tuple[int, int, str]:
    match element:
        case Counters():
            return 0, 0, ""
        case ConfigurationSet():
            return 1, 0, element.name
        case Node():
            return 2, 0, element.name
        case JobRecord() | Request():
            return 3, element.number, ""
        case Gang():
            return 4, element.epoch, ""
        case TimesliceGroup():
            return 5, element.number, ""


def _entry(history: HistoryRow) -> HistoryEntry:
    return HistoryEntry(
        history.sequence,
        history.time,
        history.subject,
        history.kind,
        history.cause,
        # No database keeps a NUL in a text.
        history.message.replace("\0", "\N{REPLACEMENT CHARACTER}"),
        _encode(dict(history.figures)).decode() if history.figures else "{}",
    )
