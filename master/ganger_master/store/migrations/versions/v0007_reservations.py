"""Nodes that are kept for users or for maintenance."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision: str | None = "0006"
branch_labels: str | None = None
depends_on: str | None = None


def upgrade() -> None:
    op.create_table(
        "reservations",
        sa.Column("key", sa.String(255), nullable=False),
        sa.Column("body", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("key", name="pk_reservations"),
    )


def downgrade() -> None:
    op.drop_table("reservations")
