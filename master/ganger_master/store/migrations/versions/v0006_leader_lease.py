"""The lease of the master that leads, where a database may have several masters."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision: str | None = "0005"
branch_labels: str | None = None
depends_on: str | None = None


def upgrade() -> None:
    op.add_column("writer", sa.Column("holder", sa.String(255)))
    op.add_column("writer", sa.Column("address", sa.String(255)))
    op.add_column("writer", sa.Column("expiry", sa.Double()))


def downgrade() -> None:
    with op.batch_alter_table("writer") as writer:
        writer.drop_column("expiry")
        writer.drop_column("address")
        writer.drop_column("holder")
