"""What `ganger doctor` checks of the machine that it runs on: what a daemon would find here at its start."""

from __future__ import annotations

import os
import resource
import secrets
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from ganger.text import os_reason

from ganger_daemon.cgroups.group_tree import choose_cgroups
from ganger_daemon.devices.virtual import choose_devices
from ganger_daemon.images.contract import CAPABILITY
from ganger_daemon.images.criu import choose_images
from ganger_daemon.images.driver import choose_device_state
from ganger_daemon.node.daemon_files import choose_run_directory

# Level, subject, finding, advice.
Found = tuple[str, str, str, str]

# Files that a daemon holds for each rank, times the ranks of a large node, and its streams.
_LEAST_FILES: Final = 16_384
# Control pages, sockets and process images of small jobs.
_LEAST_SHARED_BYTES: Final = 1 << 30
_LEAST_FREE_SHARE: Final = 0.05
_SUBJECT: Final = "this machine"


def findings(storage: Path | None, criu: str) -> tuple[Mapping[str, str], list[Found]]:
    """Return the capabilities that a daemon would report here, and what else was found. It leaves nothing behind.

    storage: directory that all nodes see, if one is to be checked; criu: as `ganger daemon --criu`.
    """
    devices = choose_devices()
    cgroups = choose_cgroups(f"ganger-doctor-{os.getpid()}", quotas=True)
    try:
        state = choose_device_state(devices.inventory.driver)
        images = choose_images(criu, state)
        capabilities = {
            **cgroups.capabilities,
            **devices.capabilities,
            CAPABILITY: images.capability,
            "gpu_state": state.capability,
        }
        faults = devices.faults()
    finally:
        cgroups.tidy()
        devices.close()
    found = [("FAIL", _SUBJECT, f"GPU {device}: {fault}", "") for device, fault in faults.items()]
    found += [*_limits(), *_run_directory()]
    return capabilities, found if storage is None else [*found, *_storage(storage)]


def _limits() -> Iterator[Found]:
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if 0 <= files < _LEAST_FILES:
        advice = "raise it: LimitNOFILE=1048576 in the unit of the daemon"
        yield "WARN", _SUBJECT, f"a program may open {files} files, a daemon of many ranks needs more", advice


def _run_directory() -> Iterator[Found]:
    directory = choose_run_directory(Path("/nowhere"), {"machine_uuid": "doctor"})
    if directory.is_relative_to("/nowhere"):
        yield "WARN", _SUBJECT, "control pages have no directory in a tmpfs", "give the daemon --run-dir in a tmpfs"
    shared = shutil.disk_usage("/dev/shm")
    if shared.total < _LEAST_SHARED_BYTES:
        found = f"/dev/shm has {shared.total >> 20} MiB, which parked jobs and data loaders fill"
        yield "WARN", _SUBJECT, found, "mount it larger; of a container: --shm-size"


def _storage(storage: Path) -> Iterator[Found]:
    subject = f"storage {storage}"
    try:
        probe = storage / f".ganger-doctor-{secrets.token_hex(8)}"
        descriptor = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, b"probe")
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
            probe.unlink()
        usage = shutil.disk_usage(storage)
    except OSError as error:
        yield "FAIL", subject, f"cannot be written: {os_reason(error)}", "mount it here, for the daemon's user to write"
        return
    free = f"{usage.free / 2**30:.1f} of {usage.total / 2**30:.1f} GiB are free"
    if usage.free < _LEAST_FREE_SHARE * usage.total:
        yield "WARN", subject, free, "free some space: full storage means checkpoints are skipped"
    else:
        yield "ok", subject, f"can be written; {free}", ""
