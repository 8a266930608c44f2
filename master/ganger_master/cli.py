"""`ganger master`: the program that owns the state of a cluster."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from ganger.console import CommandError, Directory, ExitCode

if TYPE_CHECKING:
    from ganger_master.config import Config


@click.group(invoke_without_command=True)
@click.option("--state-dir", type=Directory(), help="Directory of this master; made if missing.")
@click.option("--listen", metavar="ADDRESS", help="unix:/PATH or HOST:PORT; default: loopback, a free port.")
@click.option("--listen-tokens", metavar="HOST:PORT", help="Take access tokens of people (`ganger tokens`) there.")
@click.option("--tls", type=Directory(), help="Certificate of this master (`ganger certs`): needed beyond loopback.")
@click.option("--authority", type=Directory(), help="Authority (`ganger certs`) to renew daemons' certificates with.")
@click.option("--metrics", metavar="HOST:PORT", help="Serve metrics for Prometheus there; default: nowhere.")
@click.option("--database-url", metavar="URL", help="SQLAlchemy URL; default: SQLite in the state directory.")
@click.option("--storage", type=Directory(), help="Directory all nodes see; default: in --state-dir.")
@click.option("--lost-after", metavar="TIME", help="10m, 1h, ... or never: when a silent node's jobs start elsewhere.")
@click.option("--policy", metavar="NAME", help="Which jobs go first, and where; default: ganger.")
@click.option(
    "--keep-place-after",
    metavar="TIME",
    help="Where no planner ranks jobs: wait after which room is kept for a gang that does not fit; 2m.",
)
@click.option("--quantum", metavar="TIME", help="Length of a time slice; 1m; never: no time slicing.")
@click.option(
    "--plan-every",
    metavar="TIME",
    help="Least time between two plans that preempt running jobs, where a planner ranks jobs; 5m.",
)
@click.option(
    "--moves-per-hour",
    metavar="N",
    help="Most moves of a node in an hour that no pending job needs (+defrag); default: auto.",
)
@click.option("--checkpoint-interval", metavar="TIME", help="Between checkpoints of jobs that set none; default 30m.")
@click.option("--quotas", metavar="USER=GPUS,...", help="GPUs that a user may hold at once; *=GPUS: every other user.")
@click.option("--scheduler-host/--no-scheduler-host", default=None, help="Run the default job schedulers as a child.")
@click.option("--planner/--no-planner", default=None, help="Run the planner as a child where the policy needs one.")
@click.option("--restored", is_flag=True, default=None, help="The database is a backup: take what nodes run first.")
@click.option("--log-level", type=click.Choice(["debug", "info", "warning", "error"]), help="Default: info.")
@click.option("--config", "config_file", type=click.Path(path_type=Path), help="TOML file with the same settings.")
@click.pass_context
def master(context: click.Context, /, config_file: Path | None, **flags: str | Path | bool | None) -> None:
    """Run the master of a cluster in the foreground.

    Clients on this machine find it by STATE_DIR/endpoint.json. SIGTERM stops it; jobs keep running without it.
    """
    if context.invoked_subcommand is not None:
        # Before or after the name of the command, options mean the same.
        context.default_map = {context.invoked_subcommand: {"config_file": config_file, **flags}}
        return
    import asyncio

    from ganger.program_setup import set_up_log
    from ganger.tracing import set_up_tracing

    from ganger_master import app

    settings = _settings(config_file, flags)
    set_up_log("master", settings.log_level)
    set_up_tracing("master")
    with _explained():
        try:
            was_asked = asyncio.run(app.run(settings, lambda line: click.echo(line)))
        except app.FencedError as error:
            code = ExitCode.LEASE_LOST if error.may_stand_by else ExitCode.FENCED
            raise CommandError(str(error), code) from error
    if not was_asked:
        raise CommandError("the master could not go on: see its log", ExitCode.BUG)


def _database_options(command: Any) -> Any:
    for option in (
        click.option("--config", "config_file", type=click.Path(path_type=Path), help="TOML file of the master."),
        click.option("--database-url", metavar="URL", help="SQLAlchemy URL; default: SQLite in the state directory."),
        click.option("--state-dir", type=Directory(), help="Directory of the master."),
    ):
        command = option(command)
    return command


@master.command()
@_database_options
@click.argument("file", type=click.Path(path_type=Path))
def backup(file: Path, config_file: Path | None, **flags: str | Path | None) -> None:
    """Copy the master's database into FILE while the master runs, and check the copy.

    FILE may be an earlier copy: it stays until the new one is whole.
    """
    from ganger_master.store.sqlite_copy import back_up

    with _explained():
        copy = back_up(_sqlite_file(_settings(config_file, flags), "pg_dump"), file)
    click.echo(f"{file}: {copy}")


@master.command()
@_database_options
@click.argument("file", type=click.Path(path_type=Path))
def restore(file: Path, config_file: Path | None, **flags: str | Path | None) -> None:
    """Put a copy of the database, FILE, in its place. The master must not run; jobs and daemons continue.

    The former database stays beside it. At its next start the master takes what the nodes run.
    """
    from ganger.cli.local_cluster import read_up_file

    from ganger_master.runtime.state_directory import StateDirectory
    from ganger_master.store.sqlite_copy import restore as put_in_place

    settings = _settings(config_file, flags)
    with _explained():
        database = _sqlite_file(settings, "pg_restore")
        if not settings.state_dir.is_dir():
            raise CommandError(f"there is no {settings.state_dir}: name the master's state directory, or make it first")
        if read_up_file(settings.state_dir)[1]:
            flag = f" --state-dir {shlex.quote(str(settings.state_dir))}"
            raise CommandError(f"`ganger up` runs a cluster in {settings.state_dir}: stop it with `ganger down{flag}`")
        # No master may start meanwhile.
        directory = StateDirectory(settings.state_dir)
        try:
            copy, former = put_in_place(file, database)
        finally:
            directory.close()
    click.echo(f"{database}: {copy}")
    if former is not None:
        click.echo(f"the former database is {former}")
    click.echo("now start the master as before")


def _sqlite_file(settings: Config, instead: str) -> Path:
    if settings.database_path is None:
        raise CommandError(f"the database is no SQLite file: use the tools of its server, as {instead}")
    return settings.database_path


def _settings(config_file: Path | None, flags: dict[str, Any]) -> Config:
    from ganger.text import os_reason

    from ganger_master import config

    text = ""
    if config_file is not None:
        try:
            text = config_file.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise click.UsageError(f"cannot read {config_file}: {os_reason(error)}") from error
    given = {name: str(value) if isinstance(value, Path) else value for name, value in flags.items()}
    try:
        return config.load(given, os.environ, text, str(config_file or "config"))
    except config.ConfigError as error:
        raise click.UsageError(str(error)) from error


@contextmanager
def _explained() -> Iterator[None]:
    """Turn what keeps a master from its state into the error of a command."""
    from ganger_master.runtime.state_directory import MasterObstacle, StartError
    from ganger_master.store.sqlite_copy import CopyError
    from ganger_master.store.tables import StoreError

    codes = {
        MasterObstacle.SETTING: ExitCode.USAGE,
        MasterObstacle.STATE: ExitCode.REFUSED,
        MasterObstacle.UNREACHABLE: ExitCode.UNREACHABLE,
        MasterObstacle.RIGHTS: ExitCode.NOT_PERMITTED,
    }
    try:
        yield
    except StartError as error:
        raise CommandError(str(error), codes[error.obstacle]) from error
    except (CopyError, StoreError) as error:
        raise CommandError(str(error)) from error
