"""`ganger daemon`: runs the daemon of this node in the foreground."""

from __future__ import annotations

import asyncio
import logging
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click
from ganger.console import Directory, Within
from ganger.units import parse_memory

if TYPE_CHECKING:
    from ganger_daemon.devices.virtual import VirtualSpec


class Bytes(click.ParamType):  # type: ignore[type-arg]
    """An amount of memory: 16G, 512M, or plain bytes."""

    name = "size"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        try:
            return parse_memory(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


@click.command()
@click.option("--state-dir", required=True, type=Directory(), help="Directory of this daemon, its own.")
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
@click.option("--run-dir", type=Directory(), help="Directory in a tmpfs for control pages and sockets, its own.")
@click.option("--virtual-gpus", type=click.IntRange(0, 64), help="Declare this many devices that are not there.")
@click.option(
    "--virtual-cores", type=click.IntRange(0), default=0, help="Cores to declare. Default: those of the machine."
)
@click.option("--virtual-memory", type=Bytes(), default=0, help="Host memory to declare, for example 16G.")
@click.option("--virtual-gpu-memory", type=Bytes(), default=0, help="Memory of one declared device.")
@click.option(
    "--virtual-gpu-cores",
    type=Within(min=0.1),
    help="CPU time of all jobs on one declared device, together, in cores. Default: any.",
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
@click.option("--rack", default="", help="Network place: rack.")
@click.option("--fabric", default="", help="Network place: fabric.")
@click.option("--storage", type=Directory(), help="Where this node sees the cluster's storage.")
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
    state_dir: Path,
    master: str,
    listen_host: str,
    tls: Path | None,
    node: str,
    run_dir: Path | None,
    virtual_gpus: int | None,
    virtual_cores: int,
    virtual_memory: int,
    virtual_gpu_memory: int,
    virtual_gpu_cores: float | None,
    topology: str | None,
    recorded: Path | None,
    cgroups: str,
    criu: str,
    rack: str,
    fabric: str,
    storage: Path | None,
    no_preload: bool,
    order_deadline: float,
    verbose: bool,
) -> None:
    """Run the daemon of this node. SIGTERM ends the daemon only: jobs go on, and the next daemon takes them over."""
    from ganger.console import CommandError, ExitCode

    from ganger_daemon.app import DaemonError, DaemonObstacle, DaemonSettings, JsonLines, run_daemon

    _start_logging(JsonLines(), verbose)
    virtual = _virtual_spec(
        virtual_gpus, topology, virtual_cores, virtual_memory, virtual_gpu_cores, virtual_gpu_memory
    )
    settings = DaemonSettings(
        state_directory=state_dir,
        master=master,
        listen_host=listen_host,
        tls=tls,
        node=node,
        run_directory=run_dir,
        virtual=virtual,
        recorded=recorded,
        cgroups=cgroups,
        criu=criu,
        rack=rack,
        fabric=fabric,
        storage=storage,
        preload=not no_preload,
        order_patience_s=order_deadline / 2,
        order_deadline_s=order_deadline,
    )
    try:
        asyncio.run(run_daemon(settings))
    except DaemonError as error:
        codes = {
            DaemonObstacle.SETTING: ExitCode.USAGE,
            DaemonObstacle.STATE: ExitCode.REFUSED,
            DaemonObstacle.RIGHTS: ExitCode.NOT_PERMITTED,
        }
        raise CommandError(str(error), codes[error.obstacle]) from error


def _start_logging(formatter: logging.Formatter, verbose: bool) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    logging.basicConfig(level=logging.DEBUG if verbose else logging.INFO, handlers=[handler])
    for noisy in ("asyncio", "grpc"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def _virtual_spec(
    gpus: int | None,
    topology: str | None,
    cores: int,
    memory_bytes: int,
    gpu_cores: float | None,
    gpu_memory_bytes: int,
) -> VirtualSpec | None:
    """Return the declared devices; None if none are declared. Raises click.UsageError for an empty topology."""
    if gpus is None:
        return None
    from ganger_daemon.devices.virtual import VirtualSpec

    if topology == "":
        raise click.UsageError("--topology: '' is none; leave it out for one group of all devices")
    spec = replace(VirtualSpec(gpus, topology or "", cores, memory_bytes), gpu_cores=gpu_cores or 0.0)
    return replace(spec, gpu_memory_bytes=gpu_memory_bytes) if gpu_memory_bytes else spec
