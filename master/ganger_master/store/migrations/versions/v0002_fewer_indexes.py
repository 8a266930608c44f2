"""Drop indexes that repeat a key: each costs one more page to write per row.

A job's number and a gang's epoch are their keys, and no query looks a job up by its uid. History is appended to in the
order of its sequence, which in SQLite needs no index of its own if its type is INTEGER.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision: str | None = "0001"


def upgrade() -> None:
    with op.batch_alter_table("jobs") as jobs:
        jobs.drop_constraint("uq_jobs_number", type_="unique")
        jobs.drop_constraint("uq_jobs_uid", type_="unique")
    with op.batch_alter_table("gangs") as gangs:
        gangs.drop_constraint("uq_gangs_epoch", type_="unique")
    if op.get_context().dialect.name == "sqlite":
        kind = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
        with op.batch_alter_table("events") as events:
            events.alter_column("sequence", existing_type=sa.BigInteger(), type_=kind, existing_nullable=False)
