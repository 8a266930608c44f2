"""`ganger master`: the program that owns the state of a cluster."""

from __future__ import annotations

import os
from pathlib import Path

import click
from ganger.console import Directory


@click.command()
@click.option("--state-dir", type=Directory(), help="Directory of this master; made if missing.")
@click.option("--listen", metavar="ADDRESS", help="unix:/PATH or HOST:PORT; default: loopback, a free port.")
@click.option("--tls", type=Directory(), help="Certificate of this master (`ganger certs`): needed beyond loopback.")
@click.option("--metrics", metavar="HOST:PORT", help="Serve metrics for Prometheus there; default: nowhere.")
@click.option("--database-url", metavar="URL", help="SQLAlchemy URL; default: SQLite in the state directory.")
@click.option("--storage", type=Directory(), help="Directory all nodes see; default: in --state-dir.")
@click.option("--lost-after", metavar="TIME", help="10m, 1h, ... or never: when a silent node's jobs start elsewhere.")
@click.option("--policy", metavar="NAME", help="Which jobs go first, and where; default: ganger.")
@click.option(
    "--reserve-after",
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
def master(config_file: Path | None, **flags: str | Path | bool | None) -> None:
    """Run the master of a cluster in the foreground.

    Clients on this machine find it by STATE_DIR/endpoint.json. SIGTERM stops it; jobs keep running without it.
    """
    import asyncio

    from ganger.console import CommandError, ExitCode

    from ganger_master import app, config
    from ganger_master.runtime import process_setup
    from ganger_master.runtime.state_directory import MasterObstacle, StartError

    text = ""
    if config_file is not None:
        try:
            text = config_file.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise click.UsageError(f"cannot read {config_file}: {error}") from error
    given = {name: str(value) if isinstance(value, Path) else value for name, value in flags.items()}
    try:
        settings = config.load(given, os.environ, text, str(config_file or "config"))
    except config.ConfigError as error:
        raise click.UsageError(str(error)) from error
    process_setup.set_up_logs(settings.log_level)
    codes = {
        MasterObstacle.SETTING: ExitCode.USAGE,
        MasterObstacle.STATE: ExitCode.REFUSED,
        MasterObstacle.UNREACHABLE: ExitCode.UNREACHABLE,
        MasterObstacle.RIGHTS: ExitCode.NOT_PERMITTED,
    }
    try:
        was_asked = asyncio.run(app.run(settings, lambda line: click.echo(line)))
    except StartError as error:
        raise CommandError(str(error), codes[error.obstacle]) from error
    except app.FencedError as error:
        raise CommandError(str(error), ExitCode.FENCED) from error
    if not was_asked:
        raise CommandError("the master could not go on: see its log", ExitCode.BUG)
