"""Brings a database's schema up to this program's, or says that a newer program wrote it."""

from __future__ import annotations

from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, Engine

from ganger_master.store.contract import Problem, StoreError

_MIGRATIONS = Path(__file__).with_name("migrations")


def upgrade(engine: Engine) -> None:
    """One transaction where the database can; does nothing if the schema is there."""
    scripts = ScriptDirectory.from_config(_config(None))
    known = {script.revision for script in scripts.walk_revisions()}
    with engine.begin() as connection:
        current = MigrationContext.configure(connection).get_current_revision()
        if current is not None and current not in known:
            raise StoreError(Problem.NEWER, f"the database has schema {current}, this ganger knows {sorted(known)[-1]}")
        if current != scripts.get_current_head():
            command.upgrade(_config(connection), "head")


def downgrade(engine: Engine, revision: str) -> None:
    """Back to an older schema; `base` drops everything."""
    with engine.begin() as connection:
        command.downgrade(_config(connection), revision)


def _config(connection: Connection | None) -> Config:
    config = Config()
    config.set_main_option("script_location", str(_MIGRATIONS).replace("%", "%%"))
    config.set_main_option("path_separator", "newline")
    config.attributes["connection"] = connection
    return config
