"""`ganger doctor`: what is wrong with this machine and with the cluster, and what to do about it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import click

from ganger.cli.checkout import require_server
from ganger.cli.options import json_option, number, open_client
from ganger.console import CommandError, Directory, ExitCode, print_json, print_line
from ganger.protocol.os_errors import os_failure
from ganger.units import counted

if TYPE_CHECKING:
    from ganger.v1.node_pb2 import Cluster, Node

# Programs of a node add their checks of this machine here; a login node has none of them.
ENTRY_POINTS: Final = "ganger.node_checks"

OK, WARN, FAIL = "ok", "WARN", "FAIL"


class Finding(NamedTuple):
    """One thing that was looked at. `level`: OK, WARN (something could be better) or FAIL (jobs are harmed, or
    cannot start); `advice`: what mends it, empty where nothing must."""

    level: str
    subject: str
    found: str
    advice: str = ""


@click.command()
@click.option("--storage", type=Directory(), help="Directory that all nodes see: check that this machine can use it.")
@click.option("--tls", type=Directory(), help="Certificate (`ganger certs`) to check.")
@click.option("--criu", metavar="PATH", default="", help="CRIU to check. Default: as a daemon would find it.")
@json_option
def doctor(storage: Path | None, tls: Path | None, criu: str, as_json: bool) -> None:
    """Check this machine as a node, the master that --master names, and all its nodes.

    Prints what was found and what to do. Ends with 4 if anything is marked FAIL.
    """
    found = findings(storage, tls, criu)
    if as_json:
        print_json([finding._asdict() for finding in found])
    else:
        for finding in found:
            print_line(f"{finding.level:4}  {finding.subject}: {finding.found}")
            if finding.advice:
                print_line(f"      -> {finding.advice}")
    failed = sum([finding.level == FAIL for finding in found])
    if failed:
        raise CommandError(f"{failed} of {counted(len(found), 'finding')} must be mended", ExitCode.REFUSED)
    if not as_json:
        warned = sum([finding.level == WARN for finding in found])
        print(f"nothing must be mended; {warned} of {len(found)} could be better", file=sys.stderr)


def findings(storage: Path | None, tls: Path | None, criu: str) -> list[Finding]:
    """Return what was found of this machine, the master and its nodes; arguments as the options of `doctor`."""
    return [*_of_this_machine(storage, tls, criu), *_of_the_cluster()]


def _of_this_machine(storage: Path | None, tls: Path | None, criu: str) -> Iterator[Finding]:
    try:
        require_server()
        checks = tuple(entry_points(group=ENTRY_POINTS))
    except ModuleNotFoundError:
        checks = ()
    if not checks:
        yield Finding(OK, "this machine", "it is no node: what a daemon needs is not installed here")
    for check in checks:
        capabilities, findings = check.load()(storage, criu)
        yield from capability_findings("this machine", capabilities)
        yield from [Finding(*one) for one in findings]
    if tls is not None:
        yield certificate_finding(tls)


def certificate_finding(directory: Path) -> Finding:
    """Return whether a certificate can be used, and for how long."""
    from ganger.wire.endpoints import CredentialError
    from ganger.wire.tls import check_directory, ends_soon

    subject = f"certificate {directory}"
    try:
        identity = check_directory(directory)
        end, is_soon = ends_soon(directory)
    except CredentialError as error:
        return Finding(FAIL, subject, str(error))
    advice = "make a new one: ganger certs renew" if is_soon else ""
    return Finding(WARN if is_soon else OK, subject, f"of {identity}, until {end}", advice)


_AS_ROOT: Final = "run the daemon as root, or in a systemd unit with Delegate=yes"

# Capability, the beginning of the value that tells that it is missing, what that means, what to do.
_CAPABILITIES: Final = (
    ("cgroup", "none", "jobs are kept apart by nothing", _AS_ROOT),
    ("cpuset", "affinity", "a job may leave its cores", _AS_ROOT),
    ("memory", "none", "a job may use more memory than it has asked for", _AS_ROOT),
    ("freeze", "signals", "a job that does not obey is stopped process by process", _AS_ROOT),
    (
        "image",
        "none",
        "only programs that write checkpoints, or can be run again, are moved",
        "install CRIU 4 or newer, and run the daemon as root",
    ),
    (
        "switch_user",
        "shared",
        "jobs of all users run as the daemon's user: they can read its key and each other's files",
        "run the daemon as root and without --accounts own, or trust all users of the node",
    ),
    ("gpu_state", "none", "programs without an agent keep their GPU memory while they are stopped", ""),
    ("devices", "none", "no job with GPUs runs here", "install the NVIDIA driver, or try --virtual-gpus"),
)


def capability_findings(subject: str, capabilities: Mapping[str, str]) -> Iterator[Finding]:
    """Yield what a node lacks, by what its daemon reports (`Node.capabilities`): one finding for all that one advice
    mends, and one if it lacks nothing."""
    lacks: dict[str, list[tuple[str, str, str]]] = {}
    has_gpus = capabilities.get("devices") not in (None, "none", "virtual")
    for name, missing, meaning, advice in _CAPABILITIES:
        value = capabilities.get(name, "")
        if not value.startswith(missing) or (name == "gpu_state" and not has_gpus):
            continue
        why = capabilities.get(f"{name}_reason") or value.partition(": ")[2]
        lacks.setdefault(advice or name, []).append((name, meaning, why))
        if name == "cgroup":
            # The rest of it follows.
            capabilities = {
                key: text for key, text in capabilities.items() if key not in ("cpuset", "memory", "freeze")
            }
    for advice, found in lacks.items():
        names, meanings, causes = zip(*found, strict=True)
        # The system's reason alone: it is the same for the directory of each.
        causes = tuple({why.rpartition(": ")[2]: why for why in reversed(causes) if why}.values())[::-1]
        cause = f" ({'; '.join(causes)})" if causes else ""
        text = f"{', '.join(names)}: {'; '.join(meanings)}{cause}"
        yield Finding(WARN, subject, text, "" if advice in names else advice)
    if not lacks:
        yield Finding(OK, subject, f"cgroup {capabilities.get('cgroup', '?')}, image {capabilities.get('image', '?')}")


def _of_the_cluster() -> Iterator[Finding]:
    from ganger import __version__
    from ganger.wire.endpoints import EndpointError
    from ganger.wire.errors import ApiError

    try:
        with open_client() as client:
            cluster, nodes = client.get_cluster(), client.list_nodes().nodes
    except (EndpointError, ApiError, OSError) as error:
        is_named = click.get_current_context().find_root().obj or os.environ.get("GANGER_MASTER")
        # Else there may be none yet.
        yield Finding(FAIL if is_named else WARN, "master", os_failure(error))
        return
    yield from cluster_findings(cluster, __version__, len(nodes))
    for node in sorted(nodes, key=lambda one: one.name):
        yield from node_findings(node)
        if node.version and node.version != cluster.version:
            found = f"its daemon has version {node.version}, the master {cluster.version}"
            advice = "install the master's version there, and restart the daemon: jobs go on"
            yield Finding(WARN, number(node.name), found, advice)


def cluster_findings(cluster: Cluster, own_version: str, nodes: int) -> Iterator[Finding]:
    """Yield what is to be said of a master by `GetCluster`. `nodes`: how many it knows."""
    holds = f"{counted(nodes, 'node')}, {counted(cluster.devices, 'GPU')}"
    found = f"version {cluster.version}, policy {cluster.policy}, {holds}"
    if cluster.version != own_version:
        yield Finding(WARN, "master", f"{found}; here is version {own_version}", "install the same version")
    else:
        yield Finding(OK, "master", found)
    if not nodes:
        yield Finding(FAIL, "master", "it has no node", "start a daemon: ganger daemon --master ...")
    if cluster.HasField("restore"):
        waits = " ".join([number(name) for name in cluster.restore.awaited_nodes]) or "nodes"
        found = f"its database was restored ({cluster.restore.reason}): it waits for {waits}"
        yield Finding(FAIL, "master", found, "start their daemons, or: ganger nodes quarantine go-on")


_STATES: Final = {
    "STATE_UNKNOWN": (WARN, "the master has not heard of it since its start", "start its daemon"),
    "STATE_CORDONED": (WARN, "it gets no new jobs", "ganger uncordon {node}"),
    "STATE_DRAINING": (WARN, "its jobs move off, and it gets no new ones", "ganger uncordon {node}"),
    "STATE_LOST": (FAIL, "it is lost", "start its daemon, or: ganger nodes remove {node}"),
    "STATE_SILENT": (FAIL, "its daemon does not call", "start its daemon, or look at its network"),
}


def node_findings(node: Node) -> Iterator[Finding]:
    """Yield what is to be said of a node, one finding at least."""
    name = number(node.name)
    findings: list[Finding] = []
    state = _STATES.get(type(node).State.Name(node.state))
    if state is not None:
        level, found, advice = state
        reason = f": {node.state_reason}" if node.state_reason else ""
        findings.append(Finding(level, name, found + reason, advice.format(node=name)))
    faults = [f"GPU {device}: {fault}" for device, fault in sorted(node.device_faults.items())]
    findings += [Finding(FAIL, name, fault, "mend or replace it; until then no job gets it") for fault in faults]
    if node.launch_failures:
        found = f"{counted(node.launch_failures, 'job')} in a row did not start here: {node.launch_failure}"
        findings.append(Finding(FAIL, name, found, f"mend the cause, then: ganger uncordon {name}"))
    if node.quarantined:
        found = "gangs run here that the master did not start: " + " ".join(number(gang) for gang in node.quarantined)
        findings.append(Finding(WARN, name, found, "adopt or end them: ganger nodes quarantine"))
    yield from findings or capability_findings(name, node.capabilities)
