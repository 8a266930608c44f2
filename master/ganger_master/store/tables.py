"""The tables: state, which is the truth, and history, which is kept for a while.

Every state table has `key`, real columns for what people query, and where there is more `body`, the element as JSON.
Every index is one more page to write for each row, so there is none but what is looked up by.
"""

from __future__ import annotations

from typing import Final

from sqlalchemy import BigInteger, Column, Double, Index, Integer, MetaData, String, Table, Text

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
    "counters",
    metadata,
    Column("key", String(_KEY_LENGTH), primary_key=True),
    Column("body", Text, nullable=False),
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
    "job_specs",
    metadata,
    Column("key", String(_KEY_LENGTH), primary_key=True),
    Column("body", Text, nullable=False),
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
    "node_sets",
    metadata,
    Column("key", String(_KEY_LENGTH), primary_key=True),
    Column("body", Text, nullable=False),
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
