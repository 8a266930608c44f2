"""What the master's writer requires of a store: its tables, with the core's elements as their rows, and the failpoints
around commits.

A store keeps *elements*, each one row of a state table (the truth), and the *history* of what happened, for a while.
It promises that a batch is durable and whole when `commit` returns, and that nothing of it is there when `commit`
raises.

Every state table has `key`, real columns for what people query, and `body`, the element as JSON. Every index is one
more page to write for each row, so there is none but what is looked up by. Cells repeat what people query; the body
alone is what is read back. A job's spec hardly ever changes and is by far its largest part, so it has a row of its
own that is written once, and again when the job is updated.

The thread is cheaper than an executor, whose every task costs a future, a lock and a condition: a busy master submits
hundreds of tasks per second. The pause is none for a single caller and a few milliseconds under load. The cost of a
commit per change depends mostly on the batch size (an order of magnitude between 1 and 32 changes). A fixed pause
would slow a single caller down, so the pause follows the size of the last batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any, Final, Protocol

import msgspec
from ganger.cluster.resources import ConfigurationSet
from msgspec import Struct, field
from msgspec.structs import replace
from sqlalchemy import BigInteger, Column, Double, Index, Integer, MetaData, String, Table, Text

from ganger_master.core.accounting import UserUsage
from ganger_master.core.events import ELEMENT_TYPES, HistoryRow
from ganger_master.core.gang_model import Gang, TimesliceGroup
from ganger_master.core.job_model import JobRecord, Request
from ganger_master.core.job_spec import JobSpec
from ganger_master.core.leader_lease import LeaderLease, LeaseCandidate
from ganger_master.core.node_model import AccessToken, Counters, Element, Node, Reservation

Cell = int | float | str | None
Row = tuple[Cell, ...]


class Problem(Enum):
    """How a store fails; the value says what an operator can do."""

    URL = "correct the database URL, as in sqlite:////path/ganger.db or postgresql+psycopg://user@host/ganger"
    DRIVER = "install its driver; for PostgreSQL pip install 'ganger[postgresql]'"
    LOCKED = "another program holds it: stop that program"
    FULL = "the disk is full: free some space; nothing accepted was lost"
    NEWER = "a newer ganger wrote it: start that version, or restore the backup made before its upgrade"
    SERVER = "check the database URL, and that its server runs and admits this user"
    UNREADABLE = "it cannot be read or written: check its path, its permissions and its disk"
    FENCED = "another master has taken it over: this one ends"
    DAMAGED = "put a backup in its place (`ganger master restore`)"


class StoreError(Exception):
    """A store that did not do what was asked; nothing of the batch was kept."""

    def __init__(self, problem: Problem, detail: str) -> None:
        super().__init__(f"{detail}; {problem.value}")
        self.problem = problem


class HistoryEntry(Struct, frozen=True, gc=False, array_like=True):
    """One thing that happened. Sequences are unique and rise; time is Unix seconds."""

    sequence: int
    time: float
    subject: str
    kind: str
    cause: str
    message: str = ""
    figures: str = "{}"


class StoreBatch(Struct, frozen=True, gc=False):
    """What one commit makes durable, as one; by table, and at most one change for each key."""

    # Inserted or replaced: the key, then the values in the order of `COLUMNS`.
    puts: Mapping[str, Sequence[Row]] = field(default_factory=dict)
    # Keys.
    removes: Mapping[str, Sequence[str]] = field(default_factory=dict)
    history: Sequence[HistoryEntry] = ()

    @property
    def is_empty(self) -> bool:
        return not (self.puts or self.removes or self.history)


class StoredRow(Struct, frozen=True, gc=False):
    table: str
    key: str
    columns: Mapping[str, Cell] = field(default_factory=dict)


class Store(Protocol):
    """Called from one thread at a time, except `history`, `check_owner` and `prepare`: those may run beside the
    others."""

    # Whether masters may stand by: the store knows which of them leads by a lease.
    has_leases: bool

    def open(self, candidate: LeaseCandidate | None = None) -> LeaderLease | None:
        """Bring the schema up to date and take the store over from any former master. Raises StoreError.

        With a candidate, only if it may take the lease. Otherwise return the lease of the master that leads, and change
        nothing. A candidate that has taken it calls `migrate` next, and renews the lease meanwhile."""

    def migrate(self) -> None:
        """Bring the schema up to date, under the lease. Raises StoreError."""

    def load(self) -> Iterator[StoredRow]:
        """Every element, table by table in the order of `STATE`, in no order within one. Raises StoreError."""

    def commit(self, batch: StoreBatch) -> None:
        """Durable and whole when it returns; nothing kept when it raises StoreError."""

    def prepare(self, batch: StoreBatch) -> Callable[[], None]:
        """Does of `commit` what needs no disk; what is left of it, to be called in the order of the batches."""

    def check_owner(self) -> None:
        """Return if no other master has taken the store over since `open`, and renew the lease, if this master has
        one. Touches one row. Raises StoreError."""

    def history(self, subject: str, after_sequence: int, limit: int) -> Sequence[HistoryEntry]:
        """Oldest first; subject "" means all. Raises StoreError."""

    def oldest_sequence(self) -> int:
        """Sequence of the oldest entry of history still kept, zero if there is none."""

    def compact(self, before_time: float, limit: int) -> int:
        """Forgets at most `limit` entries of history older than a time; returns how many went."""

    def close(self) -> None:
        """Give the lease back, if this master has one, so that a stand-by need not wait for its end."""


metadata = MetaData(
    naming_convention={
        "pk": "pk_%(table_name)s",
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    }
)

_KEY_LENGTH: Final = 255

# One row: which master may write. A commit under an older generation, the term of its master, is refused. Where there
# are leases: that of the master that leads; its expiry is in Unix seconds of the database's clock.
writer = Table(
    "writer",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("generation", BigInteger, nullable=False),
    Column("holder", String(_KEY_LENGTH)),
    Column("address", String(_KEY_LENGTH)),
    Column("expiry", Double),
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
    # GPU-seconds of users.
    _state_table("user_usages"),
    # Nodes that are kept for users or for maintenance.
    _state_table("reservations"),
    # Of people; of each only the digest.
    _state_table("access_tokens"),
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
TABLE_OF_KIND: Final = {kind: kind if kind == "counters" else f"{kind}s" for kind in ELEMENT_TYPES}
_NO_SPEC: Final = JobSpec((), ())
_COUNTERS_KEY: Final = "counters"
_encode: Final = msgspec.json.Encoder().encode
_DECODERS: Final[Mapping[str, msgspec.json.Decoder[Any]]] = {
    "job_specs": msgspec.json.Decoder(JobSpec),
    **{TABLE_OF_KIND[kind]: msgspec.json.Decoder(element) for kind, element in ELEMENT_TYPES.items()},
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
    except (ValueError, RecursionError) as error:
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
        case UserUsage():
            return 6, 0, element.user
        case Reservation():
            return 7, 0, element.name
        case AccessToken():
            return 8, 0, element.name


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


# Where a test may have the master killed; see ganger.failpoints.
BEFORE_COMMIT: Final = "before-commit"
AFTER_COMMIT: Final = "after-commit"
COMMIT_BEFORE_REPLY: Final = "commit-before-reply"
BEFORE_MOVE_COMMIT: Final = "before-move-commit"
AFTER_MOVE_COMMIT: Final = "after-move-commit"
MID_LOAD: Final = "mid-load"

FAILPOINTS: Final = frozenset(
    {BEFORE_COMMIT, AFTER_COMMIT, COMMIT_BEFORE_REPLY, BEFORE_MOVE_COMMIT, AFTER_MOVE_COMMIT, MID_LOAD}
)
