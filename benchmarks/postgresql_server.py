"""A PostgreSQL server of its own for a benchmark or a test: made in a directory that goes with it, on a Unix socket."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Final

# Debian's packages put the server's programs here, and not on the path.
_DEBIAN: Final = Path("/usr/lib/postgresql")
_USER: Final = "ganger"


class PostgresqlError(Exception):
    """The server cannot be used; the message says why."""


def why_no_postgresql() -> str:
    """Return why this machine can run no server; empty if it can."""
    if _programs() is None:
        return "no PostgreSQL server is installed here (Debian: apt-get install postgresql)"
    if importlib.util.find_spec("psycopg") is None:
        return "its driver is not installed (pip install 'ganger[postgresql]')"
    return ""


def _programs() -> Path | None:
    """Return the directory of the server's programs."""
    found = shutil.which("initdb")
    if found is not None:
        return Path(found).resolve().parent
    versions = [path for path in _DEBIAN.glob("*/bin") if (path / "initdb").exists()]
    return max(versions, key=lambda path: float(path.parent.name), default=None)


class PostgresqlServer:
    """`with PostgresqlServer() as server: ... server.url`. Raises PostgresqlError."""

    def __init__(self) -> None:
        programs = _programs()
        if programs is None:
            raise PostgresqlError(why_no_postgresql())
        self._programs = programs
        # Not below a test's directory: the server's user could not pass through it.
        self.directory = Path(tempfile.mkdtemp(prefix="ganger-postgresql-"))
        # The server refuses to run as root.
        self._as: tuple[str, ...] = ()
        if os.geteuid() == 0:
            shutil.chown(self.directory, "postgres")
            self._as = ("runuser", "-u", "postgres", "--")

    @property
    def url(self) -> str:
        """The URL of its database, for `ganger master --database-url`."""
        return f"postgresql+psycopg://{_USER}@/postgres?host={self.directory}"

    def __enter__(self) -> PostgresqlServer:
        try:
            self._run("initdb", "-A", "trust", "-U", _USER)
            options = f"-k {self.directory} -c listen_addresses=''"
            self._run("pg_ctl", "-o", options, "-l", str(self.directory / "server.log"), "-w", "start")
        except BaseException:
            shutil.rmtree(self.directory, ignore_errors=True)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._run("pg_ctl", "-m", "immediate", "stop")
        finally:
            shutil.rmtree(self.directory, ignore_errors=True)

    def _run(self, program: str, *arguments: str) -> None:
        command = [*self._as, str(self._programs / program), "-D", str(self.directory / "data"), *arguments]
        # Not into a pipe: the server would hold it open.
        with tempfile.TemporaryFile() as output:
            done = subprocess.run(command, stdout=output, stderr=output, cwd="/", timeout=120, check=False)
            output.seek(0)
            if done.returncode:
                raise PostgresqlError(f"{program}: {output.read().decode(errors='replace').strip()[-500:]}")
