"""`ganger support-bundle`: what it takes to understand a cluster from afar, in one archive, without secrets.

What is taken is named here; nothing is copied and then blacked out. Commands, environments, working directories,
parameters and outputs of jobs are the users', keys, tokens and certificates the cluster's: none of them is taken.
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
from collections.abc import Callable, Iterator
from importlib import metadata
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from ganger.cli.doctor import findings
from ganger.cli.options import open_client
from ganger.console import CommandError, plain

if TYPE_CHECKING:
    from google.protobuf.message import Message

    from ganger.client import Client

_EVENTS: Final = 20_000
_JOBS: Final = 5_000
_LOG_LINES: Final = 20_000
_LOG_S: Final = 30.0
# Of a job, what scheduling looks at and what it decided; of its events, no text: that of a failure may be the job's.
_JOB: Final = frozenset({
    "name", "uid", "user", "state", "revision", "gang", "suspended_level", "create_time", "start_time", "end_time",
    "failures", "preemptions", "blockers", "queue_rank", "run_duration", "running_since_time",
})  # fmt: skip
_SPEC: Final = frozenset({
    "roles", "device_type", "locality", "nodes", "priority", "time_limit", "gpu_memory_bytes", "max_failures",
    "preemptible", "gpus_min", "gpus_max", "deadline", "movable", "weight", "mechanism", "checkpoint_interval",
})  # fmt: skip
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
    yield "doctor.json", _json([finding._asdict() for finding in findings(None, None, "")])
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


def _only(values: dict[str, Any], names: frozenset[str]) -> dict[str, Any]:
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
