"""The schema of a SQL database: its versions, and the change that leads to each from the one before.

`store.tables` has the newest version, and a test compares both. A version that was released is never edited again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import sqlalchemy as sa
from alembic.migration import MigrationContext
from alembic.operations import Operations

from ganger_master.store.tables import Problem, StoreError

# Of PostgreSQL's advisory lock that one of several masters holds while it changes the schema.
_SCHEMA_LOCK: Final = 0x67616E676572
# The one row of this table is the version, under the name that Alembic gives it.
_version: Final = sa.Table(
    "alembic_version",
    sa.MetaData(),
    sa.Column("version_num", sa.String(32), nullable=False),
    sa.PrimaryKeyConstraint("version_num", name="alembic_version_pkc"),
)


def upgrade(engine: sa.Engine) -> None:
    """Update the schema, if need be, in one transaction where the database can. Raises StoreError."""
    with engine.begin() as connection:
        if engine.dialect.name == "postgresql":
            connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_SCHEMA_LOCK)))
        migrate(connection, NEWEST)


def migrate(connection: sa.Connection, version: str) -> None:
    """Make all changes that lead to a version. Raises StoreError if a newer ganger made the schema."""
    current = schema_of(connection) or ""
    changes = [change for name, change in _CHANGES.items() if current < name <= version]
    operations = Operations(MigrationContext.configure(connection))
    for change in changes:
        change(operations)
    if changes:
        _version.create(connection, checkfirst=True)
        connection.execute(sa.delete(_version))
        connection.execute(sa.insert(_version).values(version_num=version))


def schema_of(connection: sa.Connection) -> str | None:
    """Return the version of a database's schema; None without any. Raises StoreError if a newer ganger made it."""
    current = MigrationContext.configure(connection).get_current_revision()
    if current is not None and current not in _CHANGES:
        raise StoreError(Problem.NEWER, f"the database has schema {current}, this ganger supports {NEWEST}")
    return current


# -- versions ----------------------------------------------------------------------------------------------------------


def _column(name: str, kind: Any) -> sa.Column[Any]:
    return sa.Column(name, kind, nullable=False)


def _create(operations: Operations, table: str, *columns: sa.Column[Any], unique: Sequence[str] = ()) -> None:
    """Create a table of bodies by key, with further columns between the two."""
    operations.create_table(
        table,
        _column("key", sa.String(255)),
        *columns,
        _column("body", sa.Text()),
        sa.PrimaryKeyConstraint("key", name=f"pk_{table}"),
        *[sa.UniqueConstraint(name, name=f"uq_{table}_{name}") for name in unique],
    )


def _first_schema(operations: Operations) -> None:
    operations.create_table(
        "writer",
        _column("id", sa.Integer()),
        _column("generation", sa.BigInteger()),
        sa.PrimaryKeyConstraint("id", name="pk_writer"),
    )
    _create(operations, "counters")
    _create(operations, "configuration_sets")
    words = (_column("rack", sa.String(255)), _column("state", sa.String(16)))
    _create(operations, "nodes", _column("configuration_set", sa.String(63)), *words)
    of_jobs: tuple[sa.Column[Any], ...] = (
        _column("number", sa.BigInteger()),
        _column("uid", sa.String(36)),
        _column("user", sa.String(255)),
        _column("state", sa.String(16)),
        _column("revision", sa.BigInteger()),
        _column("epoch", sa.BigInteger()),
        _column("create_time", sa.Double()),
        sa.Column("end_time", sa.Double(), nullable=True),
    )
    _create(operations, "jobs", *of_jobs, unique=("number", "uid"))
    operations.create_index("ix_jobs_state_number", "jobs", ["state", "number"])
    _create(operations, "job_specs")
    numbers = (_column("epoch", sa.BigInteger()), _column("job", sa.BigInteger()))
    words = (_column("role", sa.String(16)), _column("phase", sa.String(16)))
    _create(operations, "gangs", *numbers, *words, unique=("epoch",))
    operations.create_table(
        "events",
        sa.Column("sequence", sa.BigInteger(), autoincrement=False, nullable=False),
        _column("time", sa.Double()),
        _column("subject", sa.String(255)),
        _column("kind", sa.String(63)),
        _column("cause", sa.String(255)),
        _column("message", sa.Text()),
        _column("figures", sa.Text()),
        sa.PrimaryKeyConstraint("sequence", name="pk_events"),
    )
    operations.create_index("ix_events_subject_sequence", "events", ["subject", "sequence"])


def _fewer_indexes(operations: Operations) -> None:
    """Drop indexes that repeat a key: each costs one more page to write per row.

    A job's number and a gang's epoch are their keys, and no query looks a job up by its uid. History is appended to in
    the order of its sequence, which in SQLite needs no index of its own if its type is INTEGER."""
    with operations.batch_alter_table("jobs") as jobs:
        jobs.drop_constraint("uq_jobs_number", type_="unique")
        jobs.drop_constraint("uq_jobs_uid", type_="unique")
    with operations.batch_alter_table("gangs") as gangs:
        gangs.drop_constraint("uq_gangs_epoch", type_="unique")
    if operations.get_context().dialect.name == "sqlite":
        kind = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
        with operations.batch_alter_table("events") as events:
            events.alter_column("sequence", existing_type=sa.BigInteger(), type_=kind, existing_nullable=False)


def _former_requests(operations: Operations) -> None:
    """Under which ids jobs were submitted that are no longer kept, so that none is accepted twice."""
    _create(operations, "requests", _column("time", sa.Double()))


def _timeslice_groups(operations: Operations) -> None:
    _create(operations, "node_sets")


def _leases_and_users(operations: Operations) -> None:
    """GPU-seconds of users; nodes that are kept for users or for maintenance; and the lease of the master that leads,
    where a database may have several masters."""
    _create(operations, "user_usages")
    _create(operations, "reservations")
    for column in (
        sa.Column("holder", sa.String(255)),
        sa.Column("address", sa.String(255)),
        sa.Column("expiry", sa.Double()),
    ):
        operations.add_column("writer", column)


def _access_tokens(operations: Operations) -> None:
    """Access tokens of people, by their digests."""
    _create(operations, "access_tokens")


# The first schema with leases: a master of an older one knows of no stand-by.
LEASE_SCHEMA: Final = "0007"
_CHANGES: Final[dict[str, Callable[[Operations], None]]] = {
    "0001": _first_schema,
    "0002": _fewer_indexes,
    "0003": _former_requests,
    "0004": _timeslice_groups,
    LEASE_SCHEMA: _leases_and_users,
    "0008": _access_tokens,
}
NEWEST: Final = max(_CHANGES)
