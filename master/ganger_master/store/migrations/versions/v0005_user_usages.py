"""GPU-seconds of users."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision: str | None = "0004"
branch_labels: str | None = None
depends_on: str | None = None


def upgrade() -> None:
    op.create_table(
        "user_usages",
        sa.Column("key", sa.String(255), nullable=False),
        sa.Column("body", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("key", name="pk_user_usages"),
    )


def downgrade() -> None:
    op.drop_table("user_usages")
