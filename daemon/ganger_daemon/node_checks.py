"""What `ganger doctor` checks of the machine that it runs on: what a daemon would find here at its start."""

from __future__ import annotations

import fcntl
import os
import resource
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final

from ganger.text import os_reason

from ganger_daemon.cgroups.group_tree import choose_cgroups
from ganger_daemon.devices.virtual import choose_devices
from ganger_daemon.images.contract import CAPABILITY
from ganger_daemon.images.criu import choose_images
from ganger_daemon.images.driver import choose_device_state
from ganger_daemon.node.daemon_files import LOCK, choose_run_directory, is_run_name, run_bases

# Level, subject, finding, advice, and what mends it and returns what it has done.
Found = tuple[str, str, str, str] | tuple[str, str, str, str, Callable[[], str]]

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
    found: list[Found] = [("FAIL", _SUBJECT, f"GPU {device}: {fault}", "") for device, fault in faults.items()]
    found += [*_limits(), *_run_directory(), *stale_run_directories(run_bases())]
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


# One that a daemon has made just now may not be locked yet.
_LEAST_AGE_S: Final = 600.0


def stale_run_directories(bases: Iterable[Path], least_age_s: float = _LEAST_AGE_S) -> Iterator[Found]:
    """Yield the run directories below `bases` that are of daemons which are gone, with all of their jobs."""
    directories = [path for base in bases if base.is_dir() for path in sorted(base.iterdir()) if is_run_name(path.name)]
    unused = [path for path in directories if _is_unlocked(path) and time.time() - path.stat().st_mtime >= least_age_s]
    if not unused:
        return
    # What the processes of jobs, launchers and daemons name, map, have open or listen at.
    named = _named_by_processes([str(path) for path in unused])
    for path in unused:
        if str(path) not in named:
            found = "a run directory of a daemon that is gone, and of no process"
            yield "WARN", str(path), found, f"rm -r {path}", partial(_remove, path)


def _is_unlocked(directory: Path) -> bool:
    """Return whether no daemon has a run directory, and this user may remove it."""
    try:
        if directory.is_symlink() or directory.stat().st_uid != os.geteuid():
            return False
        lock = os.open(directory / LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(lock)
    return True


def _named_by_processes(paths: Sequence[str]) -> set[str]:
    """Return those of the paths that a process names in its arguments or environment, maps, has open or listens at."""
    texts = [Path("/proc/net/unix")]
    links: list[Path] = []
    for process in Path("/proc").glob("[0-9]*"):
        if int(process.name) != os.getpid():
            texts += [process / name for name in ("cmdline", "environ", "maps")]
            links += [process / "cwd", process / "fd"]
    found: set[str] = set()
    for text in texts:
        with suppress(OSError):
            content = text.read_bytes()
            found |= {path for path in paths if path.encode() in content}
    for link in links:
        with suppress(OSError):
            for one in link.iterdir() if link.name == "fd" else (link,):
                with suppress(OSError):
                    target = os.readlink(one)
                    found |= {path for path in paths if target.startswith(path)}
    return found


def _remove(directory: Path) -> str:
    if not _is_unlocked(directory) or _named_by_processes([str(directory)]):
        return "it is used again, and stays"
    shutil.rmtree(directory)
    return "removed it"


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
