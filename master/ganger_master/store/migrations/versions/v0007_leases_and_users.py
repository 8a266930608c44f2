"""GPU-seconds of users; nodes that are kept for users or for maintenance; and the lease of the master that leads, where
a database may have several masters."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision: str | None = "0004"


def upgrade() -> None:
    for table in ("user_usages", "reservations"):
        op.create_table(
            table,
            sa.Column("key", sa.String(255), nullable=False),
            sa.Column("body", sa.Text(), nullable=False),
            sa.PrimaryKeyConstraint("key", name=f"pk_{table}"),
        )
    op.add_column("writer", sa.Column("holder", sa.String(255)))
    op.add_column("writer", sa.Column("address", sa.String(255)))
    op.add_column("writer", sa.Column("expiry", sa.Double()))
