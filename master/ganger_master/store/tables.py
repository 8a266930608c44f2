"""The tables, and the core's elements as their rows: state, which is the truth, and history, which is kept for a while.

Every state table has `key`, real columns for what people query, and where there is more `body`, the element as JSON.
Every index is one more page to write for each row, so there is none but what is looked up by.

Cells repeat what people query; the body alone is what is read back. A job's spec hardly ever changes and is by far its
largest part, so it has a row of its own that is written once, and again when the job is updated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import msgspec
from ganger.cluster.resources import ConfigurationSet
from msgspec.structs import replace
from sqlalchemy import BigInteger, Column, Double, Index, Integer, MetaData, String, Table, Text

from ganger_master.core.effects import HistoryRow
from ganger_master.core.gang_model import Gang, NodeSet
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

# One row: what is never given twice.
counters = Table(
    "counters", metadata, Column("key", String(_KEY_LENGTH), primary_key=True), Column("body", Text, nullable=False)
)

configuration_sets = Table(
    "configuration_sets",
    metadata,
    Column("key", String(_KEY_LENGTH), primary_key=True),
    Column("body", Text, nullable=False),
)

nodes = Table(
    "nodes",
    metadata,
    Column("key", String(_KEY_LENGTH), primary_key=True),
    Column("configuration_set", String(63), nullable=False),
    Column("rack", String(_KEY_LENGTH), nullable=False),
    Column("state", String(16), nullable=False),
    Column("body", Text, nullable=False),
)

jobs = Table(
    "jobs",
    metadata,
    Column("key", String(_KEY_LENGTH), primary_key=True),
    Column("number", BigInteger, nullable=False),
    Column("uid", String(36), nullable=False),
    Column("user", String(_KEY_LENGTH), nullable=False),
    Column("state", String(16), nullable=False),
    Column("revision", BigInteger, nullable=False),
    Column("epoch", BigInteger, nullable=False),
    Column("create_time", Double, nullable=False),
    Column("end_time", Double),
    Column("body", Text, nullable=False),
    Index(None, "state", "number"),
)

# Never changes after submission, and is by far the largest part of a job.
job_specs = Table(
    "job_specs", metadata, Column("key", String(_KEY_LENGTH), primary_key=True), Column("body", Text, nullable=False)
)

# Under which ids jobs were submitted that are no longer kept.
requests = Table(
    "requests",
    metadata,
    Column("key", String(_KEY_LENGTH), primary_key=True),
    Column("time", Double, nullable=False),
    Column("body", Text, nullable=False),
)

gangs = Table(
    "gangs",
    metadata,
    Column("key", String(_KEY_LENGTH), primary_key=True),
    Column("epoch", BigInteger, nullable=False),
    Column("job", BigInteger, nullable=False),
    Column("role", String(16), nullable=False),
    Column("phase", String(16), nullable=False),
    Column("body", Text, nullable=False),
)

# Nodes on which gangs take turns, with their matrices.
node_sets = Table(
    "node_sets", metadata, Column("key", String(_KEY_LENGTH), primary_key=True), Column("body", Text, nullable=False)
)

events = Table(
    "events",
    metadata,
    # SQLite finds a row by an INTEGER, which is as long there, without an index.
    Column("sequence", BigInteger().with_variant(Integer, "sqlite"), primary_key=True, autoincrement=False),
    Column("time", Double, nullable=False),
    Column("subject", String(_KEY_LENGTH), nullable=False),
    Column("kind", String(63), nullable=False),
    Column("cause", String(_KEY_LENGTH), nullable=False),
    Column("message", Text, nullable=False),
    Column("figures", Text, nullable=False),
    Index(None, "subject", "sequence"),
)

# In the order in which they are loaded: an element only names elements of tables before its own.
STATE: Final = {
    table.name: table for table in (counters, configuration_sets, nodes, job_specs, jobs, requests, gangs, node_sets)
}
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
    "node_sets": NodeSet,
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
            rows.setdefault(table, []).append(_ROW_OF[table](key, element))
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


def _row_of_job(key: str, job: JobRecord) -> Row:
    return (
        key,
        job.number,
        job.uid,
        job.user,
        job.state.value,
        job.revision,
        job.epoch,
        job.create_time,
        job.end_time or None,
        _body(replace(job, spec=_NO_SPEC)),
    )


def _row_of_request(key: str, request: Request) -> Row:
    return key, request.time, _body(request)


def _row_of_gang(key: str, gang: Gang) -> Row:
    return key, gang.epoch, gang.job, gang.role.value, gang.phase.value, _body(gang)


def _row_of_node(key: str, node: Node) -> Row:
    return key, node.configuration_set, node.rack, node.state.value, _body(node)


def _row_of_node_set(key: str, node_set: NodeSet) -> Row:
    return key, _body(node_set)


def _row_of_set(key: str, configuration_set: ConfigurationSet) -> Row:
    return key, _body(configuration_set)


def _row_of_counters(key: str, counters: Counters) -> Row:
    return _COUNTERS_KEY, _body(counters)


_ROW_OF: Final[Mapping[str, Callable[[str, Any], Row]]] = {
    "jobs": _row_of_job,
    "requests": _row_of_request,
    "gangs": _row_of_gang,
    "nodes": _row_of_node,
    "node_sets": _row_of_node_set,
    "configuration_sets": _row_of_set,
    "counters": _row_of_counters,
}


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
        case NodeSet():
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
