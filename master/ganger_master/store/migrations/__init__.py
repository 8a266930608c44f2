"""Alembic's scripts, run by `ganger_master.store.sql`."""
