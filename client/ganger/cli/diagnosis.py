"""What is wrong with this machine and with the cluster (`ganger doctor`), and what it takes to understand that from
afar, in one archive, without secrets (`ganger support-bundle`).

What the archive takes is named here; nothing is copied and then blacked out. Commands, environments, working
directories, parameters and outputs of jobs are the users', keys, tokens and certificates the cluster's: none of them
is taken.
"""

from __future__ import annotations

import io
import json
import os
import platform
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import suppress
from importlib import metadata
from importlib.metadata import entry_points
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from ganger.cli.checkout import require_server
from ganger.cli.host_checks import (
    FAIL,
    OK,
    WARN,
    Finding,
    certificate_finding,
    host_findings,
    master_of_unit,
    mended,
)
from ganger.cli.options import json_option, number, open_client
from ganger.console import CommandError, Directory, ExitCode, enum_text, plain, print_json, print_line
from ganger.text import counted, os_failure
from ganger.wire import times
from ganger.wire.methods import VISIBLE_OF_JOB, VISIBLE_OF_SPEC

if TYPE_CHECKING:
    from google.protobuf.message import Message

    from ganger.client import Client
    from ganger.v1.node_pb2 import Cluster, Node

# Programs of a node add their checks of this machine here; a login node has none of them.
ENTRY_POINTS: Final = "ganger.node_checks"


@click.command()
@click.option("--storage", type=Directory(), help="Directory that all nodes see: check that this machine can use it.")
@click.option("--tls", type=Directory(), help="Certificate (`ganger certs`) to check.")
@click.option("--criu", metavar="PATH", default="", help="CRIU to check. Default: as a daemon would find it.")
@click.option("--fix", is_flag=True, help="Mend what is marked with *: what has one right state, and no job feels.")
@json_option
def doctor(storage: Path | None, tls: Path | None, criu: str, fix: bool, as_json: bool) -> None:
    """Check this machine as a node, the master that --master or the unit of its daemon names, and all its nodes.

    Prints what was found and what to do. Ends with 4 if anything is marked FAIL.
    """
    found = []
    for finding in _findings(storage, tls, criu):
        # One after the other: what comes later may depend on what is mended.
        finding = mended(finding) if fix else finding
        found.append(finding)
        if not as_json:
            print_line(f"{finding.level:4}  {finding.subject}: {finding.found}")
            advice = f"mended: {finding.mended}" if finding.mended else finding.advice
            if advice:
                print_line(f"   {' ' if finding.mend is None or fix else '*'}  -> {advice}")
    if as_json:
        print_json(list(map(_plain, found)))
    failed = sum([finding.level == FAIL for finding in found])
    if failed:
        raise CommandError(f"{failed} of {counted(len(found), 'finding')} must be mended", ExitCode.REFUSED)
    if not as_json:
        warned = sum([finding.level == WARN for finding in found])
        print(f"nothing must be mended; {warned} of {len(found)} could be better", file=sys.stderr)


def _plain(finding: Finding) -> dict[str, Any]:
    return {**finding._asdict(), "mend": finding.mend is not None}


def _findings(storage: Path | None, tls: Path | None, criu: str) -> Iterator[Finding]:
    """Yield what is found of this machine, the master and its nodes; arguments as the options of `doctor`."""
    yield from _of_this_machine(storage, tls, criu)
    yield from _of_the_cluster(tls)


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
    subjects = set()
    for one in host_findings():
        subjects.add(one.subject)
        yield one
    if tls is not None and (own := certificate_finding(tls)).subject not in subjects:
        yield own


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
        "install CRIU 4 or newer (apt-get install criu on Debian 13), and run the daemon as root",
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


def _of_the_cluster(tls: Path | None) -> Iterator[Finding]:
    from ganger import __version__
    from ganger.client import Client
    from ganger.wire.endpoints import (
        ENDPOINT_FILE,
        MASTER_VARIABLE,
        TLS_VARIABLE,
        EndpointError,
        default_state_directory,
        find_endpoint,
    )
    from ganger.wire.errors import ApiError, RoleNotPermitted

    named = click.get_current_context().find_root().obj or os.environ.get(MASTER_VARIABLE, "")
    nodes: list[Node] | None = None
    try:
        own = "" if tls is None else str(tls)
        if not named and not (default_state_directory() / ENDPOINT_FILE).exists():
            # On a node no user has named the master, but its daemon knows it.
            named, of_daemon = master_of_unit()
            own = own or of_daemon
        with Client(find_endpoint(named or None, os.environ.get(TLS_VARIABLE) or own or None)) as client:
            began_s = time.time()
            cluster = client.get_cluster()
            ended_s = time.time()
            with suppress(RoleNotPermitted):
                nodes = list(client.list_nodes().nodes)
    except (EndpointError, ApiError, OSError) as error:
        # Else there may be none yet.
        yield Finding(FAIL if named else WARN, "master", os_failure(error))
        return
    yield from cluster_findings(cluster, __version__, None if nodes is None else len(nodes))
    if cluster.HasField("current_time"):
        yield clock_finding(times.unix_s(cluster.current_time), began_s, ended_s)
    for node in sorted(nodes or (), key=lambda one: one.name):
        yield from node_findings(node)
        if node.version and node.version != cluster.version:
            found = f"its daemon has version {node.version}, the master {cluster.version}"
            advice = "install the master's version there, and restart the daemon: jobs go on"
            yield Finding(WARN, number(node.name), found, advice)


def cluster_findings(cluster: Cluster, own_version: str, nodes: int | None) -> Iterator[Finding]:
    """Yield what is to be said of a master by `GetCluster`. `nodes`: how many it knows; None: this caller's role may
    not list them."""
    known = "nodes are for users and operators to see" if nodes is None else counted(nodes, "node")
    holds = f"{known}, {counted(cluster.devices, 'GPU')}"
    found = f"version {cluster.version}, policy {cluster.policy}, {holds}"
    if cluster.version != own_version:
        yield Finding(WARN, "master", f"{found}; here is version {own_version}", "install the same version")
    else:
        yield Finding(OK, "master", found)
    if nodes == 0:
        yield Finding(FAIL, "master", "it has no node", "start a daemon: ganger daemon --master ...")
    if cluster.HasField("restore"):
        waits = " ".join([number(name) for name in cluster.restore.awaited_nodes]) or "nodes"
        found = f"its database was restored ({cluster.restore.reason}): it waits for {waits}"
        yield Finding(FAIL, "master", found, "start their daemons, or: ganger nodes quarantine go-on")


# Above the first, times in logs of two machines cannot be compared; above the second, certificates may seem invalid.
_CLOCK_WARN_S: Final = 1.0
_CLOCK_FAIL_S: Final = 60.0


def clock_finding(master_s: float, began_s: float, ended_s: float) -> Finding:
    """Return how the master's clock differs from this machine's, by the time that it sent with an answer. All in Unix
    seconds: the call began and ended then, by the clock here."""
    ahead_s, unknown_s = master_s - (began_s + ended_s) / 2, (ended_s - began_s) / 2
    least_s = max(0.0, abs(ahead_s) - unknown_s)
    found = f"that of the master is {abs(ahead_s):.3f} s {'ahead' if ahead_s > 0 else 'behind'} (± {unknown_s:.3f} s)"
    if least_s <= _CLOCK_WARN_S:
        return Finding(OK, "clock", found)
    level = FAIL if least_s > _CLOCK_FAIL_S else WARN
    return Finding(level, "clock", found, "synchronise the clocks of all machines (chrony, systemd-timesyncd)")


_STATES: Final = {
    "unknown": (WARN, "the master has not heard of it since its start", "start its daemon"),
    "cordoned": (WARN, "it gets no new jobs", "ganger uncordon {node}"),
    "draining": (WARN, "its jobs move off, and it gets no new ones", "ganger uncordon {node}"),
    "lost": (FAIL, "it is lost", "start its daemon, or: ganger nodes remove {node}"),
    "silent": (FAIL, "its daemon does not call", "start its daemon, or look at its network"),
}


def node_findings(node: Node) -> Iterator[Finding]:
    """Yield what is to be said of a node, one finding at least."""
    name = number(node.name)
    findings: list[Finding] = []
    state = _STATES.get(enum_text(node.State, node.state))
    # A node with a fault of its own is emptied as a drained one; the fault says what to do.
    if state is not None and not (node.faults and node.state == node.STATE_DRAINING):
        level, found, advice = state
        reason = f": {node.state_reason}" if node.state_reason else ""
        if node.reservation and node.state == node.STATE_DRAINING:
            # With another reason beside it an operator has drained the node, too.
            is_drained = node.state_reason != f"reserved: {node.reservation}"
            returns = "it returns by itself at the end, or: ganger reserve delete {reservation}"
            advice = f"{advice}; reservation {{reservation}} stands beside that" if is_drained else returns
        findings.append(Finding(level, name, found + reason, advice.format(node=name, reservation=node.reservation)))
    if node.state == node.STATE_READY and node.state_reason and not node.state_reason.startswith("reserved"):
        findings.append(Finding(WARN, name, node.state_reason, f"take it out of service: ganger drain {name}"))
    advice = "mend it; the node returns by itself once its check has passed often enough"
    findings += [Finding(FAIL, name, fault, advice) for _, fault in sorted(node.faults.items())]
    faults = [f"GPU {device}: {fault}" for device, fault in sorted(node.device_faults.items())]
    findings += [Finding(FAIL, name, fault, "mend or replace it; until then no job gets it") for fault in faults]
    findings += [
        Finding(WARN, name, f"GPU {device}: {why}", "jobs on it are slower, and with them all ranks of their gangs")
        for device, why in sorted(node.device_warnings.items())
    ]
    if node.launch_failures:
        found = f"{counted(node.launch_failures, 'job')} in a row did not start here: {node.launch_failure}"
        findings.append(Finding(FAIL, name, found, f"mend the cause, then: ganger uncordon {name}"))
    if node.quarantined:
        found = "gangs run here that the master did not start: " + " ".join(number(gang) for gang in node.quarantined)
        findings.append(Finding(WARN, name, found, "adopt or end them: ganger nodes quarantine"))
    yield from findings or capability_findings(name, node.capabilities)


_EVENTS: Final = 20_000
_JOBS: Final = 5_000
_LOG_LINES: Final = 20_000
_LOG_S: Final = 30.0
# Of a job, what scheduling looks at and what it decided; of its events, no text: that of a failure may be the job's.
_JOB: Final = {*VISIBLE_OF_JOB.split()} - {"spec", "progress", "array"}
_SPEC: Final = {*VISIBLE_OF_SPEC.split()} - {"display_name"} | {"mechanism", "checkpoint_interval"}
_EVENT: Final = frozenset({"sequence", "time", "subject", "kind", "cause"})
_QUARANTINED: Final = frozenset({"name", "job", "job_known", "epoch", "parts", "reason", "user", "adoption_refusal"})


@click.command("support-bundle")
@click.argument("file", type=click.Path(path_type=Path), required=False)
def support_bundle(file: Path | None) -> None:
    """Write what is known of this machine and the cluster into FILE (.tar.gz).

    It has the findings of `ganger doctor`, versions, nodes, the queue, the history, and the logs of Ganger's systemd
    units here. Of jobs it has what was requested and what happened, not what they run: no command, environment or
    output. It has names of users, nodes and jobs; no key, token or certificate.
    """
    path = file or Path(f"ganger-support-{time.strftime('%Y%m%d-%H%M%S')}.tar.gz")
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise CommandError(f"cannot write {path}: {(error.strerror or '').lower()}") from error
    with os.fdopen(descriptor, "wb") as raw, tarfile.open(fileobj=raw, mode="w:gz") as archive:
        for name, content in _parts():
            entry = tarfile.TarInfo(f"ganger-support/{name}")
            entry.size, entry.mtime, entry.mode = len(content), int(time.time()), 0o600
            archive.addfile(entry, io.BytesIO(content))
            click.echo(f"{name}: {len(content):,} bytes", err=True)
    print(path)


def _parts() -> Iterator[tuple[str, bytes]]:
    from ganger.wire.endpoints import EndpointError
    from ganger.wire.errors import ApiError

    yield "machine.json", _json(_machine())
    yield "doctor.json", _json(list(map(_plain, _findings(None, None, ""))))
    for name, take in _TAKEN.items():
        try:
            with open_client() as client:
                yield f"{name}.json", _json(take(client))
        except (ApiError, EndpointError) as error:
            # The rest is worth sending.
            yield f"{name}.error", f"{error}\n".encode()
    for unit in ("ganger-master", "ganger-daemon"):
        if log := _unit_log(unit):
            yield f"{unit}.log", log


_TAKEN: Final[dict[str, Callable[[Client], Any]]] = {
    "cluster": lambda client: plain(client.get_cluster()),
    "nodes": lambda client: plain(client.list_nodes()),
    "jobs": lambda client: [_of_job(job) for job in client.list_jobs(limit=_JOBS)],
    "events": lambda client: [_of_event(event) for event in islice(client.list_events(), _EVENTS)],
    "quarantined": lambda client: [_only(plain(gang), _QUARANTINED) for gang in client.list_quarantined_gangs()],
}


def _of_job(job: Message) -> dict[str, Any]:
    shown = plain(job)
    return _only(shown, _JOB) | {"spec": _only(shown["spec"], _SPEC)}


def _of_event(event: Message) -> dict[str, Any]:
    shown = plain(event)
    return shown if shown["subject"].startswith("nodes/") else _only(shown, _EVENT)


def _only(values: dict[str, Any], names: Set[str]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name in names}


def _machine() -> dict[str, Any]:
    packages = {one.metadata["Name"]: one.version for one in metadata.distributions() if one.metadata["Name"]}
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "python": sys.version,
        "system": platform.uname()._asdict(),
        "processors": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "cgroups": Path("/proc/self/cgroup").read_text().splitlines(),
        "packages": dict(sorted(packages.items())),
    }


def _unit_log(unit: str) -> bytes:
    command = ("journalctl", "--no-pager", "-o", "short-iso", "-n", str(_LOG_LINES), "-u", unit)
    try:
        return subprocess.run(command, capture_output=True, timeout=_LOG_S, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return b""


def _json(value: Any) -> bytes:
    return json.dumps(value, indent=1).encode()
