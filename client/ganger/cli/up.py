"""`ganger up` and `ganger down`: a whole cluster on this machine, with its real devices or virtual ones."""

from __future__ import annotations

import fcntl
import os
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from ganger.cli import local_cluster as cluster
from ganger.cli.checkout import require_server
from ganger.console import CommandError, Directory
from ganger.text import counted

_READY_S = 60.0
_WATCH_S = 0.5


@click.command()
@click.option("--nodes", type=click.IntRange(1, 64), help="Daemons to start. Default: 2 with virtual devices, else 1.")
@click.option("--virtual-gpus", type=click.IntRange(0, 64), metavar="N", help="Pretend each node has N GPUs.")
@click.option("--virtual-cores", type=click.IntRange(1, 4096), metavar="C", help="Cores each node may give away.")
@click.option("--virtual-gpu-cores", metavar="C", help="CPU time of all jobs on one virtual GPU, together, in cores.")
@click.option("--virtual-memory", metavar="SIZE", help="Host memory each node may give away, e.g. 16G.")
@click.option("--topology", metavar="AxB", help="Groups of virtual GPUs, e.g. 2x2: two sockets of two.")
@click.option("--state-dir", type=Directory(), help="Where all state and logs are kept.")
@click.option("--storage", type=Directory(), help="Where checkpoints are kept.")
@click.option(
    "--config",
    "config_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="TOML file with settings of the master, as for `ganger master`; flags go first.",
)
@click.option("--listen", metavar="ADDRESS", help="Address of the master: 127.0.0.1:PORT or unix:PATH.")
@click.option("--metrics", metavar="HOST:PORT", help="Where the master serves metrics for Prometheus.")
@click.option("--policy", metavar="NAME", help="Which jobs go first; default: ganger.")
@click.option(
    "--plan-every",
    metavar="TIME",
    help="Least time between two plans that preempt running jobs, where the policy makes plans.",
)
@click.option(
    "--quantum", metavar="TIME", help="Length of a time slice where jobs share GPUs (gandiva); never: they share none."
)
@click.option(
    "--moves-per-hour",
    metavar="N",
    help="Most moves of a node in an hour that no pending job needs (+defrag); default: auto.",
)
@click.option("--lost-after", metavar="TIME", help="When a silent node counts as lost; or never.")
@click.option("--detach", "-d", is_flag=True, help="Return once it is ready; `ganger down` stops it.")
@click.option("--cancel-jobs", is_flag=True, help="Cancel all jobs when it is stopped; else they go on.")
def up(
    nodes: int | None,
    state_dir: Path | None,
    storage: Path | None,
    config_file: Path | None,
    detach: bool,
    cancel_jobs: bool,
    **flags: Any,
) -> None:
    """Start a cluster on this machine: a master and one daemon for each node.

    Runs until ctrl-C. Without GPUs it makes two nodes of four virtual ones.
    """
    require_server()
    directory = _state_directory(state_dir)
    if detach:
        _detach(directory)
        return
    pretends = flags["virtual_gpus"] is None and not _has_devices()
    if pretends:
        flags["virtual_gpus"] = 4
        flags["topology"] = "2x2" if flags["topology"] is None else flags["topology"]
    count = nodes or (1 if flags["virtual_gpus"] is None else 2)
    if flags["virtual_gpus"] is None and count > 1:
        raise click.UsageError("--nodes above 1 needs --virtual-gpus: real devices can belong to one node only")
    if flags["virtual_gpus"] is not None:
        flags["virtual_cores"] = flags["virtual_cores"] or max(2 * flags["virtual_gpus"], 2)
        if flags["virtual_memory"] is None:
            # Three quarters of the machine's memory, shared by the nodes.
            total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
            flags["virtual_memory"] = f"{max(1, int(total * 0.75) // count >> 20)}M"
    flags["storage"] = str(storage.absolute()) if storage else None
    flags["config"] = str(config_file.absolute()) if config_file else None
    command = _command(click.get_current_context(), directory)
    settings = cluster.LocalClusterSettings(directory, count, flags, command)
    with _alone(directory):
        if pretends:
            click.echo("no GPUs found: each node gets 4 virtual ones (--virtual-gpus N for other numbers)", err=True)
        _supervise(settings, cancel_jobs)


@click.command()
@click.option(
    "--state-dir",
    type=Directory(),
    help="As given to `ganger up`. Default: that of --master or $GANGER_MASTER, if one is given.",
)
@click.option("--cancel-jobs", is_flag=True, help="Cancel all jobs first; else they go on without us.")
@click.pass_context
def down(context: click.Context, state_dir: Path | None, cancel_jobs: bool) -> None:
    """Stop the cluster of this machine."""
    directory = _state_directory(state_dir or _directory_of_master(context.obj))
    _, started = cluster.read_up_file(directory)
    if not started:
        click.echo(f"no cluster of {directory} runs")
        return
    _settle_jobs(directory, cancel_jobs, cluster.command_of(directory))
    cluster.stop_started(started)
    click.echo("stopped")


def _supervise(settings: cluster.LocalClusterSettings, cancel_jobs: bool) -> None:
    import signal

    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: stop.set())
    supervisor = cluster.Supervisor(settings, _tell)

    def check() -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        supervisor.check_alive()

    supervisor.adopt()
    try:
        supervisor.start()
        address = cluster.wait_until_ready(settings, check, _READY_S)
        click.echo(_welcome(settings, address))
        sys.stdout.flush()
        # After the output: `ganger up --detach` prints that as soon as it finds this one ready.
        supervisor.announce_ready()
        while not stop.wait(_WATCH_S):
            supervisor.restart_dead()
        _tell("stopping")
        _settle_jobs(settings.state_directory, cancel_jobs, settings.command)
    finally:
        supervisor.stop()


def _tell(text: str) -> None:
    """Print to stderr. Ignore errors: the log of a detached supervisor may be on a full disk."""
    with suppress(OSError):
        click.echo(text, err=True)


def _detach(directory: Path) -> None:
    """Run this command without --detach in a new session; return once the cluster is ready. Raises CommandError."""
    arguments = [argument for argument in sys.argv[1:] if argument not in ("--detach", "-d")]
    (directory / "logs").mkdir(mode=0o700, parents=True, exist_ok=True)
    path = directory / "logs" / "up.log"
    # To the end: a cluster that runs here already writes there too.
    with path.open("ab") as log:
        begin = log.tell()
        process = subprocess.Popen(
            [sys.executable, "-m", "ganger.cli.main", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    deadline = time.monotonic() + _READY_S + 5.0
    while time.monotonic() < deadline:
        if process.poll() is not None:
            text = f"the cluster did not start:\n{cluster.tail(path, after=begin)}"
            raise CommandError(text, cluster.exit_of(process.returncode))
        is_ready, started = cluster.read_up_file(directory)
        if is_ready and any(each.pid == process.pid for each in started):
            click.echo(path.read_bytes()[begin:].decode(errors="replace").rstrip())
            click.echo("stop it with: ganger down" + _state_flag(directory))
            return
        time.sleep(0.05)
    raise CommandError(f"the cluster was not ready in time; see {path}")


def _settle_jobs(directory: Path, cancel_jobs: bool, command: str) -> None:
    """Cancel all live jobs and wait until they end; without `cancel_jobs`, report how to manage them again."""
    from ganger.client import Client
    from ganger.v1.job_pb2 import Job
    from ganger.wire.endpoints import EndpointError, read_endpoint
    from ganger.wire.errors import ApiError

    try:
        with Client(read_endpoint(directory), patience_s=5.0) as client:
            live = list(client.list_jobs([Job.STATE_PENDING, Job.STATE_HOLDING, Job.STATE_SUSPENDED]))
            if not cancel_jobs:
                held = sum(job.state == Job.STATE_HOLDING for job in live)
                if held:
                    goes, them = ("goes", "it") if held == 1 else ("go", "them")
                    message = f"{counted(held, 'job')} {goes} on without a scheduler; `{command}` takes {them} up again"
                    click.echo(f"{message}, and `ganger down --cancel-jobs` after that ends {them}", err=True)
                return
            for job in live:
                client.cancel_job(job.name, "ganger down")
            deadline = time.monotonic() + 30.0
            while any(client.get_job(job.name).HasField("gang") for job in live) and time.monotonic() < deadline:
                time.sleep(0.1)
    except (ApiError, EndpointError) as error:
        # A master that does not answer is no reason not to stop it.
        click.echo(f"could not ask the master about jobs: {error}", err=True)


def _command(context: click.Context, directory: Path) -> str:
    """Return the command line that starts the same cluster again, with the nodes and devices that its jobs need."""
    flags: list[str] = []
    for parameter in context.command.params:
        name = parameter.name or ""
        is_given = context.get_parameter_source(name) is ParameterSource.COMMANDLINE
        if is_given and name not in ("state_dir", "detach", "cancel_jobs"):
            flags += [parameter.opts[0], shlex.quote(str(context.params[name]))]
    return " ".join([f"ganger up{_state_flag(directory)}", *flags])


@contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """One supervisor to a directory. Raises CommandError if there is one."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    with (directory / "up.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CommandError(
                f"a cluster runs in {directory} already: use it, stop it with `ganger down{_state_flag(directory)}`,"
                " or choose another --state-dir"
            ) from None
        yield


def _welcome(settings: cluster.LocalClusterSettings, address: str) -> str:
    directory = settings.state_directory
    virtual = settings.flags["virtual_gpus"]
    devices = "this machine's GPUs" if virtual is None else f"{counted(str(virtual), 'virtual GPU')} each"
    nodes = counted(settings.nodes, "node")
    export = "" if not _state_flag(directory) else f"  export GANGER_MASTER={shlex.quote(str(directory))}\n"
    return (
        f"ganger is up: {nodes}, {devices}; master at {address}\n"
        f"logs are in {directory / 'logs'}\n"
        f"next:\n{export}"
        "  ganger submit --gpus 2 -- python train.py    a job of two tasks\n"
        "  ganger queue      what runs and what waits\n"
        "  ganger top        the same, live\n"
        "  ganger why JOB    why it waits"
    )


def _state_directory(given: Path | None) -> Path:
    from ganger.wire.endpoints import default_state_directory

    return (given or default_state_directory()).absolute()


def _directory_of_master(given: str | None) -> Path | None:
    """The state directory that other commands use here. Raises UsageError if they use an address."""
    from ganger.wire.endpoints import ENDPOINT_FILE, MASTER_VARIABLE, is_address

    master = given or os.environ.get(MASTER_VARIABLE, "")
    if is_address(master):
        source = "--master" if given else f"${MASTER_VARIABLE}"
        raise click.UsageError(f"{source} is the address {master}: name the cluster to stop by --state-dir")
    path = Path(master).expanduser()
    return (path.parent if path.name == ENDPOINT_FILE else path) if master else None


def _state_flag(directory: Path) -> str:
    from ganger.wire.endpoints import default_state_directory

    return "" if directory == default_state_directory().absolute() else f" --state-dir {shlex.quote(str(directory))}"


def _has_devices() -> bool:
    return any(path.name.removeprefix("nvidia").isdigit() for path in Path("/dev").glob("nvidia[0-9]*"))
