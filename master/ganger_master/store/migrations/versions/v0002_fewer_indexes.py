"""Drop indexes that repeat a key: each costs one more page to write per row.

A job's number and a gang's epoch are their keys, and no query looks a job up by its uid. History is appended to in the
order of its sequence, which in SQLite needs no index of its own if its type is INTEGER.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision: str | None = "0001"
branch_labels: str | None = None
depends_on: str | None = None


def upgrade() -> None:
    with op.batch_alter_table("jobs") as jobs:
        jobs.drop_constraint("uq_jobs_number", type_="unique")
        jobs.drop_constraint("uq_jobs_uid", type_="unique")
    with op.batch_alter_table("gangs") as gangs:
        gangs.drop_constraint("uq_gangs_epoch", type_="unique")
    _retype_history(sa.BigInteger(), sa.BigInteger().with_variant(sa.Integer(), "sqlite"))


def downgrade() -> None:
    _retype_history(sa.BigInteger().with_variant(sa.Integer(), "sqlite"), sa.BigInteger())
    with op.batch_alter_table("gangs") as gangs:
        gangs.create_unique_constraint("uq_gangs_epoch", ["epoch"])
    with op.batch_alter_table("jobs") as jobs:
        jobs.create_unique_constraint("uq_jobs_uid", ["uid"])
        jobs.create_unique_constraint("uq_jobs_number", ["number"])


def _retype_history(old: sa.types.TypeEngine[int], new: sa.types.TypeEngine[int]) -> None:
    if op.get_context().dialect.name == "sqlite":
        with op.batch_alter_table("events") as events:
            events.alter_column("sequence", existing_type=old, type_=new, existing_nullable=False)
