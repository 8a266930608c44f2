"""`ganger daemon`: runs the daemon of this node in the foreground."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import click
from ganger.console import Directory, Parsed, Within
from ganger.injob.launcher.process_record import DEFAULT_LIMITS, parse_limits
from ganger.spec_values import parse_positive_duration
from ganger.text import parse_memory

_SIZE = Parsed(parse_memory, "size")


@click.command()
@click.option(
    "--state-dir", "state_directory", required=True, type=Directory(), help="Directory of this daemon, its own."
)
@click.option("--master", required=True, help="Address of the master, or its state directory.")
@click.option(
    "--listen",
    "listen_host",
    metavar="HOST",
    default="127.0.0.1",
    show_default=True,
    help="Name or address of this node under which the master and other daemons reach it.",
)
@click.option(
    "--tls",
    type=Directory(),
    envvar="GANGER_DAEMON_TLS",
    help="Certificate of this daemon (`ganger certs`): needed beyond loopback.  [env: GANGER_DAEMON_TLS]",
)
@click.option("--node", default="", help="Name of this node. Default: the host name.")
@click.option(
    "--run-dir", "run_directory", type=Directory(), help="Directory in a tmpfs for control pages and sockets, its own."
)
@click.option(
    "--virtual-gpus", "gpus", type=click.IntRange(0, 64), help="Declare this many devices that are not there."
)
@click.option(
    "--virtual-cores",
    "cores",
    type=click.IntRange(0),
    default=0,
    help="Cores to declare. Default: those of the machine.",
)
@click.option(
    "--virtual-memory",
    "memory_bytes",
    type=_SIZE,
    default=0,
    help="Host memory to declare, for example 16G.",
)
@click.option(
    "--virtual-gpu-memory",
    "gpu_memory_bytes",
    type=_SIZE,
    default=0,
    help="Memory of one declared device.",
)
@click.option(
    "--virtual-gpu-cores",
    "gpu_cores",
    type=Within(min=0.1),
    help="CPU time of all jobs on one declared device, together, in cores. Default: any.",
)
@click.option(
    "--disk-mb-per-s",
    type=click.IntRange(1),
    help="Bandwidth of this node's disks that jobs may name, in megabytes (10^6) per second. Default: no limit.",
)
@click.option(
    "--net-mb-per-s",
    type=click.IntRange(1),
    help="Bandwidth of this node's network that jobs may name, in megabytes (10^6) per second. Default: no limit.",
)
@click.option("--topology", help="Of declared devices: sockets x devices, for example 2x2.")
@click.option("--recorded", type=click.Path(path_type=Path, exists=True), help="Devices from a recording.")
@click.option(
    "--cgroups", type=click.Choice(["auto", "none", "v1", "v2"]), default="auto", help="Which cgroups to use."
)
@click.option(
    "--criu",
    metavar="PATH|none",
    default="",
    envvar="GANGER_DAEMON_CRIU",
    help="CRIU for images of processes. Default: on the path, or beside this program's Python.  "
    "[env: GANGER_DAEMON_CRIU]",
)
@click.option(
    "--accounts",
    metavar="own|system|FILE",
    default="",
    envvar="GANGER_DAEMON_ACCOUNTS",
    help="Run jobs as the daemon's own user, as the accounts of their users, or as those that a file maps them to "
    "(root only). Default: system for root with --tls, else own.  [env: GANGER_DAEMON_ACCOUNTS]",
)
@click.option(
    "--private-tmp/--no-private-tmp",
    "has_private_places",
    default=None,
    envvar="GANGER_DAEMON_PRIVATE_TMP",
    help="Whether each job that runs as an account has a /tmp and a /dev/shm of its own, removed when it leaves the "
    "node. Default: it has, where the machine allows it.  [env: GANGER_DAEMON_PRIVATE_TMP]",
)
@click.option(
    "--limits",
    type=Parsed(parse_limits, "limits"),
    default=DEFAULT_LIMITS,
    show_default=True,
    envvar="GANGER_DAEMON_LIMITS",
    help="Limits of each process of a job: NAME=SOFT[:HARD] of core, memlock and nofile.  [env: GANGER_DAEMON_LIMITS]",
)
@click.option(
    "--prolog",
    type=click.Path(path_type=Path),
    envvar="GANGER_DAEMON_PROLOG",
    help="Program to run before the first process of a gang on this node; unless it ends with 0, the gang does not "
    "start here and the node is cordoned.  [env: GANGER_DAEMON_PROLOG]",
)
@click.option(
    "--epilog",
    type=click.Path(path_type=Path),
    envvar="GANGER_DAEMON_EPILOG",
    help="Program to run after the last process of a gang on this node.  [env: GANGER_DAEMON_EPILOG]",
)
@click.option(
    "--health-check",
    type=click.Path(path_type=Path),
    envvar="GANGER_DAEMON_HEALTH_CHECK",
    help="Program to run again and again; while it does not end with 0, jobs move off this node and none start.  "
    "[env: GANGER_DAEMON_HEALTH_CHECK]",
)
@click.option(
    "--health-check-every",
    type=Parsed(parse_positive_duration, "time"),
    default="1m",
    show_default=True,
    envvar="GANGER_DAEMON_HEALTH_CHECK_EVERY",
    help="Time from the end of one health check to the next.  [env: GANGER_DAEMON_HEALTH_CHECK_EVERY]",
)
@click.option(
    "--hook-timeout",
    type=Parsed(parse_positive_duration, "time"),
    default="5m",
    show_default=True,
    envvar="GANGER_DAEMON_HOOK_TIMEOUT",
    help="Time after which one of these programs is killed and has failed.  [env: GANGER_DAEMON_HOOK_TIMEOUT]",
)
@click.option(
    "--hooks-as-user",
    is_flag=True,
    envvar="GANGER_DAEMON_HOOKS_AS_USER",
    help="Run prolog and epilog as the account of the job's user.  [env: GANGER_DAEMON_HOOKS_AS_USER]",
)
@click.option("--rack", default="", help="Network place: rack.")
@click.option("--fabric", default="", help="Network place: fabric.")
@click.option("--storage", type=Directory(may_hang=True), help="Where this node sees the cluster's storage.")
@click.option(
    "--no-preload",
    is_flag=True,
    envvar="GANGER_DAEMON_NO_PRELOAD",
    help="Launchers do not import PyTorch ahead.  [env: GANGER_DAEMON_NO_PRELOAD]",
)
@click.option(
    "--order-deadline",
    type=Within(min=0.1),
    default=60.0,
    show_default=True,
    help="Seconds after which a job that does not obey gets SIGTERM; its stacks are dumped after half of it.",
)
@click.option("--verbose", is_flag=True, help="Log more.")
def daemon(
    gpus: int | None,
    topology: str | None,
    cores: int,
    memory_bytes: int,
    gpu_memory_bytes: int,
    gpu_cores: float | None,
    disk_mb_per_s: int | None,
    net_mb_per_s: int | None,
    no_preload: bool,
    order_deadline: float,
    prolog: Path | None,
    epilog: Path | None,
    hook_timeout: float,
    health_check: Path | None,
    health_check_every: float,
    hooks_as_user: bool,
    verbose: bool,
    **settings: Any,
) -> None:
    """Run the daemon of this node. SIGTERM ends the daemon only: jobs continue, and the next daemon takes them over."""
    from ganger.console import CommandError, ExitCode
    from ganger.program_setup import set_up_log
    from ganger.tracing import set_up_tracing

    from ganger_daemon.app import DaemonSettings, run_daemon
    from ganger_daemon.claimed_directories import DaemonError, DaemonObstacle
    from ganger_daemon.devices.virtual import VirtualSpec
    from ganger_daemon.node.hooks import NodeHooks

    set_up_log("daemon", "debug" if verbose else "info")
    set_up_tracing("daemon")
    if gpus is not None:
        if topology == "":
            raise click.UsageError("--topology: '' is none; leave it out for one group of all devices")
        settings["virtual"] = VirtualSpec(
            gpus, topology or "", cores, memory_bytes, gpu_memory_bytes or 4 << 30, gpu_cores or 0.0
        )
    declared = {"disk_mb_per_s": disk_mb_per_s, "net_mb_per_s": net_mb_per_s}
    settings["dimensions"] = {name: amount for name, amount in declared.items() if amount is not None}
    settings["hooks"] = NodeHooks(prolog, epilog, hook_timeout, health_check, health_check_every, hooks_as_user)
    settings.update(preload=not no_preload, order_patience_s=order_deadline / 2, order_deadline_s=order_deadline)
    try:
        asyncio.run(run_daemon(DaemonSettings(**settings)))
    except DaemonError as error:
        codes = {
            DaemonObstacle.SETTING: ExitCode.USAGE,
            DaemonObstacle.STATE: ExitCode.REFUSED,
            DaemonObstacle.RIGHTS: ExitCode.NOT_PERMITTED,
        }
        raise CommandError(str(error), codes[error.obstacle]) from error
