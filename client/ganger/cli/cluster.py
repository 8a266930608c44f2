"""`ganger cluster`: the master of this machine, and nodes of a cluster, by ssh. `ganger unit`: a unit file."""

from __future__ import annotations

import asyncio
import getpass
import os
import posixpath
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from ganger.cli.administration import revoke_certificates
from ganger.cli.options import confirm, open_client, timeout_s, yes_option
from ganger.console import CommandError, Directory, ExitCode, Within
from ganger.text import os_failure
from ganger.wire.tls import AUTHORITY

if TYPE_CHECKING:
    from ganger.client import Client
    from ganger.local_master import MasterPlaces
    from ganger.remote_node import NodePlaces, RemoteNode

_AT_ONCE: Final = 16
_LOOK_S: Final = 0.2
_FORGET_S: Final = 60.0
_ANSWER_S: Final = 5.0
_PATH = click.Path()


def _directory(_context: click.Context, _parameter: click.Parameter, path: str | None) -> str | None:
    """Return a directory on another machine, that the daemon has for itself. Raises click.BadParameter."""
    if path is None:
        return None
    found = posixpath.normpath(path)
    if not found.startswith("/") or not found.strip("/") or not found.isprintable():
        raise click.BadParameter(f"{path!r}: name an absolute path, of a directory that is the daemon's alone")
    return found


def _remote_options(command: Any) -> Any:
    """The options that say how machines are reached and where Ganger lies on them."""
    for option in (
        click.option(
            "--state-dir", "state", callback=_directory, help="Of the daemon.  [default: /var/lib/ganger/daemon]"
        ),
        click.option(
            "--tls", "certificates", callback=_directory, help="Of its certificate.  [default: /etc/ganger/tls]"
        ),
        click.option("--python", default="", help="Interpreter there that has Ganger already; nothing is installed."),
        click.option("--prefix", callback=_directory, help="Where to install Ganger there.  [default: /opt/ganger]"),
        click.option("--identity", "key", type=click.Path(path_type=Path, exists=True), help="Key for ssh."),
        click.option("--port", type=click.IntRange(1, 65535), help="Port of ssh."),
        click.argument("hosts", nargs=-1, required=True, metavar="[USER@]HOST..."),
    ):
        command = option(command)
    return command


@click.group()
def cluster() -> None:
    """Make this machine a master, and other machines its nodes, by ssh; remove both."""


def _master_options(command: Any) -> Any:
    """Add the options for the directories of a master on this machine."""
    for option in (
        click.option(
            "--state-dir", "state", type=Directory(), help="Of the master.  [default: /var/lib/ganger/master]"
        ),
        click.option("--tls", "certificates", type=Directory(), help="Its certificate.  [default: /etc/ganger/master]"),
        click.option("--authority", type=Directory(), help="Makes all certificates.  [default: /etc/ganger/ca]"),
        click.option("--operator-tls", "operator", type=Directory(), help="Yours.  [default: /etc/ganger/operator]"),
    ):
        command = option(command)
    return command


@cluster.command()
@click.option("--storage", type=Directory(), help="Directory all nodes see; made if missing.")
@click.option("--port", type=click.IntRange(1, 65535), default=7070, show_default=True, help="Where it listens.")
@click.option("--operator-name", metavar="NAME", help="Name on your certificate.  [default: your account]")
@click.option(
    "--python", default="", help="Interpreter of the installation that the master runs from.  [default: this]"
)
@click.option("--timeout", metavar="TIME", default="60s", help="How long the master may take to answer [60s].")
@click.option("--flag", "flags", multiple=True, help="Another option of `ganger master`, such as --flag=--policy=las.")
@_master_options
@click.argument("host")
def init(
    host: str,
    storage: Path | None,
    port: int,
    operator_name: str | None,
    python: str,
    timeout: str,
    flags: tuple[str, ...],
    **where: Any,
) -> None:
    """Make this machine the master of a new cluster: authority, certificates, and a systemd unit that runs.

    HOST is the name or address of this machine that nodes and users dial. The same command again repairs or upgrades
    the master and renews its certificate; jobs, nodes and authority stay.
    """
    from ganger.local_master import LocalMasterError, check_machine, make_credentials, make_unit, start
    from ganger.wire.certificate_authority import CertificateError
    from ganger.wire.methods import is_name

    name = operator_name or os.environ.get("SUDO_USER") or getpass.getuser()
    if not is_name(name):
        raise click.UsageError(f"{name!r} cannot be the name of an operator: name one with --operator-name")
    places, limit_s = _master_places(where), timeout_s(timeout)
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        check_machine(places)
        make_credentials(places, host, name)
        click.echo(f"certificates by {places.authority}: of the master, and of the operator {name}")
        make_unit(places, python, address, storage, flags)
        start(places)
    except (LocalMasterError, CertificateError) as error:
        raise CommandError(str(error)) from error
    except OSError as error:
        raise CommandError(os_failure(error)) from error
    click.echo(f"{places.unit.name} answers at {address} after {_answered(places, address, limit_s):.1f} s")
    known = f"GANGER_MASTER={address} GANGER_TLS={places.operator}"
    click.echo(f"next: {known} ganger cluster add --authority {places.authority} HOST...")


@cluster.command()
@click.option("--force", is_flag=True, help="Also while it has nodes, or does not answer.")
@yes_option
@_master_options
def delete(force: bool, is_sure: bool, **where: Any) -> None:
    """Delete the master that `cluster init` made on this machine, with its database, certificates and authority.

    Remove its nodes first, by `cluster remove`. The storage stays: it has the logs and checkpoints of jobs.
    """
    from ganger.client import Client
    from ganger.local_master import LocalMasterError, is_anything_made, remove
    from ganger.wire.endpoints import EndpointError
    from ganger.wire.errors import ApiError

    places = _master_places(where)
    if not is_anything_made(places):
        raise CommandError("there is nothing on this machine that `cluster init` made", ExitCode.NOT_FOUND)
    confirm("delete the master of this machine, with all that it knows of jobs and nodes?", is_sure)
    if not force:
        try:
            with Client(str(places.state), patience_s=_ANSWER_S) as client:
                nodes = [node.name.removeprefix("nodes/") for node in client.list_nodes().nodes]
        except (EndpointError, ApiError) as error:
            raise CommandError(f"the master does not answer ({error}): --force deletes it all the same") from error
        if nodes:
            raise CommandError(f"it has nodes: `ganger cluster remove {' '.join(nodes)}` first, or --force")
    try:
        remove(places)
    except LocalMasterError as error:
        raise CommandError(str(error)) from error
    except OSError as error:
        raise CommandError(os_failure(error)) from error
    click.echo("stopped, and what `cluster init` made is gone")


def _master_places(where: dict[str, Any]) -> MasterPlaces:
    from ganger.local_master import MasterPlaces

    return MasterPlaces(**{name: value.absolute() for name, value in where.items() if value})


def _answered(places: MasterPlaces, address: str, limit_s: float) -> float:
    """Wait until the master answers its operator, and return after how many seconds. Raises CommandError."""
    from ganger.client import Client
    from ganger.local_master import log_end
    from ganger.wire.endpoints import Endpoint
    from ganger.wire.errors import ApiError

    began = time.monotonic()
    with Client(Endpoint(address, tls=str(places.operator))) as client:
        while True:
            try:
                client.get_cluster()
            except ApiError as error:
                if time.monotonic() - began >= limit_s:
                    why = f"the master does not answer at {address} after {limit_s:g} s: {error}"
                    raise CommandError(f"{why}; its log ends: {log_end(places)}") from error
                time.sleep(_LOOK_S)
            else:
                return time.monotonic() - began


@cluster.command()
@click.option(
    "--authority", type=Directory(), required=True, help="Directory of `ganger certs init`; makes their certificates."
)
@click.option("--master-address", metavar="HOST:PORT", help="Where nodes dial the master. Default: as we do.")
@click.option("--storage", type=_PATH, help="Where the nodes see the cluster's storage.")
@click.option("--wheel", type=click.Path(path_type=Path, exists=True), help="Install this, not from the package index.")
@click.option("--days", type=Within(min=0.0001, max=3650.0), default=365.0, help="How long a certificate lasts.")
@click.option("--timeout", metavar="TIME", default="60s", help="How long a daemon may take to be ready [60s].")
@click.option("--flag", "flags", multiple=True, help="Another option of `ganger daemon`, such as --flag=--rack=R1.")
@_remote_options
def add(
    hosts: tuple[str, ...],
    authority: Path,
    master_address: str | None,
    storage: str | None,
    wheel: Path | None,
    days: float,
    timeout: str,
    flags: tuple[str, ...],
    port: int | None,
    key: Path | None,
    **where: Any,
) -> None:
    """Make machines nodes: install Ganger, issue a certificate, start the daemon, and wait until it is ready.

    HOST is the name that nodes and master dial, and its first part names the node. Connects as ssh does, and needs root
    there, or sudo without a password. The same command again repairs or upgrades a node; its jobs go on.
    """
    from ganger import __version__
    from ganger.remote_node import connected

    places, nodes, limit_s = _places(where), _node_names(hosts), timeout_s(timeout)
    with open_client() as client:
        address = _address_for_nodes(client, master_address, hosts)

        async def one(destination: str, say: Callable[[str], None]) -> None:
            host, node = destination.rpartition("@")[2], nodes[destination]
            async with connected(destination, places, port, key) as machine:
                await machine.probe()
                say(await machine.install(__version__, wheel))
                own = ["--state-dir", places.state, "--tls", places.certificates, "--node", node]
                seen = ["--storage", storage] if storage is not None else []
                # Stopped first: else its last heartbeat would pass for the new one's first, and it might renew its
                # certificate meanwhile.
                await machine.stop()
                with tempfile.TemporaryDirectory() as directory:
                    _issue(authority, node, host, days, Path(directory) / "tls")
                    _trust(Path(directory) / "tls" / AUTHORITY, Path(client.endpoint.tls) / AUTHORITY)
                    await machine.write_certificate(Path(directory) / "tls")
                before = await asyncio.to_thread(_last_session, client, node)
                say(await machine.start([*own, "--master", address, "--listen", host, *seen, *flags]))
                say(await _ready(client, machine, node, before, limit_s))

        _for_each(hosts, one)


@cluster.command()
@click.option("--authority", type=Directory(), help="Revoke their certificates by it, too.")
@click.option("--to", type=Directory(), help="Where the master has its certificate: it gets the list of revoked ones.")
@yes_option
@_remote_options
def remove(
    hosts: tuple[str, ...],
    authority: Path | None,
    to: Path | None,
    is_sure: bool,
    port: int | None,
    key: Path | None,
    **where: Any,
) -> None:
    """Remove nodes from the cluster: stop the daemon, remove what `cluster add` made, forget the node.

    Drain the node first: one on which jobs have something is refused.
    """
    from ganger.remote_node import connected
    from ganger.wire.methods import CallerIdentity, CallerRole

    if to is not None and authority is None:
        raise click.UsageError("--to is for the list of revoked certificates: name the --authority that writes it")
    places, nodes = _places(where), _node_names(hosts)
    with open_client() as client:
        confirm(f"remove {', '.join(hosts)}?", is_sure)
        for node in nodes.values():
            _close(client, node)
        # First: a machine that is not reached any more is the one whose certificate matters.
        if authority is not None:
            revoke_certificates(authority, [CallerIdentity(CallerRole.DAEMON, node) for node in nodes.values()], to)

        async def one(destination: str, say: Callable[[str], None]) -> None:
            async with connected(destination, places, port, key) as machine:
                await machine.probe()
                await machine.remove()
            say("stopped, and what was made there is gone")
            await _forget(client, nodes[destination])
            say("forgotten by the master")

        _for_each(hosts, one)


@click.command()
@click.argument("program", type=click.Choice(("master", "daemon")))
@click.argument("flags", nargs=-1, type=click.UNPROCESSED)
@click.option("--user", help="Account that the master runs as.  [default: yours]")
def unit(program: Any, flags: tuple[str, ...], user: str | None) -> None:
    """Print a systemd unit of a program with these FLAGS, after "--".

    \b
    ganger unit master -- --state-dir /var/lib/ganger/master --storage /shared/ganger \\
        > /etc/systemd/system/ganger-master.service
    """
    from ganger.service_unit import WRITTEN, directories_of, unit_text

    named = directories_of(flags)
    relative = [path for _, path in named if not path.startswith("/")]
    if relative:
        raise click.UsageError(f"{relative[0]}: a unit needs absolute paths")
    writable = [path for name, path in named if name in WRITTEN]
    if program == "daemon" and user is not None:
        raise click.UsageError("--user is for masters: a daemon runs as root, and jobs as --accounts says")
    if program == "master" and "--state-dir" not in dict(named):
        raise click.UsageError("name the master's --state-dir: it may write into the directories that it is given only")
    command = (sys.executable, "-m", "ganger.cli.main", program, *flags)
    click.echo(unit_text(program, command, user=user or getpass.getuser(), writable=writable), nl=False)


def _places(where: dict[str, Any]) -> NodePlaces:
    from ganger.remote_node import NodePlaces

    return NodePlaces(**{name: value for name, value in where.items() if value})


def _node_name(host: str) -> str:
    """Return the name of the node on a host: of an address all of it. Raises click.UsageError."""
    from ganger.wire.resource_names import is_node_id

    name = host if host.replace(".", "").isdigit() else host.partition(".")[0].lower()
    if not is_node_id(name):
        raise click.UsageError(f"{host!r} gives no name for a node: name the machine by a host name or an IPv4 address")
    return name


def _node_names(hosts: Sequence[str]) -> dict[str, str]:
    """Return the name of each host's node. Raises click.UsageError, also for two of one name."""
    found: dict[str, str] = {}
    for destination in dict.fromkeys(hosts):
        node = _node_name(destination.rpartition("@")[2])
        if node in found.values():
            raise click.UsageError(f"two of the hosts would be nodes/{node}: the first part of a name names the node")
        found[destination] = node
    return found


def _address_for_nodes(client: Client, named: str | None, hosts: Sequence[str]) -> str:
    """Return where nodes dial the master. Raises CommandError."""
    from ganger.wire.endpoints import is_loopback

    if not client.endpoint.tls:
        raise CommandError(
            "nodes on other machines need a master with a certificate, and an operator's here: see `ganger certs` and"
            " GANGER_TLS"
        )
    address = named or str(client.endpoint.masters or client.endpoint.address)
    if any(map(is_loopback, address.split(","))) and not all(
        is_loopback(f"{host.rpartition('@')[2]}:0") for host in hosts
    ):
        raise CommandError(f"nodes cannot dial {address}: name the master's address with --master-address")
    return address


def _issue(authority: Path, node: str, host: str, days: float, out: Path) -> None:
    from ganger.remote_node import RemoteNodeError
    from ganger.wire.certificate_authority import CertificateError, issue
    from ganger.wire.methods import CallerIdentity, CallerRole

    try:
        issue(authority, CallerIdentity(CallerRole.DAEMON, node), (host,), days, out)
    except CertificateError as error:
        raise RemoteNodeError(f"{host}: {error}") from error


def _trust(node: Path, own: Path) -> None:
    """Let a node trust what the operator trusts, too: in a change of authority the master's is another one."""
    made, known = node.read_bytes(), own.read_bytes()
    node.write_bytes(known if made.strip() in known else known.rstrip() + b"\n" + made)


def _last_session(client: Client, node: str) -> float:
    """Return when the master last heard of a node, in seconds since 1970; zero: never."""
    from ganger.wire.errors import NodeNotFound

    try:
        found = client.get_node(node)
    except NodeNotFound:
        return 0.0
    return float(found.last_seen_time.ToMicroseconds()) / 1e6


async def _ready(client: Client, machine: RemoteNode, node: str, before: float, limit_s: float) -> str:
    """Wait for the first heartbeat. Raises RemoteNodeError with the end of the daemon's log."""
    from ganger.remote_node import RemoteNodeError
    from ganger.v1.node_pb2 import Node
    from ganger.wire.errors import NodeNotFound

    began, why = time.monotonic(), "the master has not heard of it"
    while time.monotonic() - began < limit_s:
        try:
            found = await asyncio.to_thread(client.get_node, node)
        except NodeNotFound:
            pass
        else:
            seen = float(found.last_seen_time.ToMicroseconds()) / 1e6
            if seen > before and found.state in (Node.STATE_READY, Node.STATE_CORDONED):
                return f"nodes/{node} is ready after {time.monotonic() - began:.1f} s"
            why = found.state_reason or why
        await asyncio.sleep(_LOOK_S)
    said = await machine.log_end()
    raise RemoteNodeError(f"{machine.host}: the daemon is not ready after {limit_s:g} s: {why}; its log ends: {said}")


def _for_each(hosts: Sequence[str], one: Callable[[str, Callable[[str], None]], Coroutine[Any, Any, None]]) -> None:
    """Do all machines at once, and raise CommandError at the end for those that failed."""
    from ganger.remote_node import RemoteNodeError
    from ganger.wire.errors import ApiError

    async def all_of_them() -> list[str]:
        room = asyncio.Semaphore(_AT_ONCE)

        async def guarded(destination: str) -> str:
            def say(text: str) -> None:
                click.echo(f"{destination.rpartition('@')[2]}: {text}")

            async with room:
                try:
                    await one(destination, say)
                except RemoteNodeError as error:
                    return str(error)
                # The master refused something: the other machines go on.
                except ApiError as error:
                    return f"{destination.rpartition('@')[2]}: {error.message}"
                except OSError as error:
                    return f"{destination.rpartition('@')[2]}: {os_failure(error)}"
            return ""

        return [why for why in await asyncio.gather(*map(guarded, dict.fromkeys(hosts))) if why]

    if failed := asyncio.run(all_of_them()):
        raise CommandError("\n".join(failed))


def _close(client: Client, node: str) -> None:
    """Give a node no new jobs. Raises CommandError while jobs have something on it."""
    from ganger.wire.errors import NodeNotFound

    try:
        found = client.cordon_node(node, "it is removed")
    except NodeNotFound:
        return
    if any(found.view_entry.socket_jobs) or found.quarantined:
        raise CommandError(
            f"nodes/{node} has jobs, and gets no new ones: `ganger drain {node}` moves them off, then remove it"
        )


async def _forget(client: Client, node: str) -> None:
    """Let the master forget a node whose daemon was stopped. It does so once the node has been silent for some time."""
    from ganger.wire.errors import NodeAlive, NodeNotFound

    end = time.monotonic() + _FORGET_S
    while True:
        try:
            await asyncio.to_thread(client.declare_node_lost, node)
            await asyncio.to_thread(client.remove_node, node)
        except NodeNotFound:
            return
        except NodeAlive:
            if time.monotonic() >= end:
                raise
            await asyncio.sleep(1.0)
        else:
            return
