"""How a process ended: the durable exit record.

Making a checkpoint exist: the manifest, then the rename. The rename is the truth.
"""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from ganger.injob.launcher.launch_request import LaunchError
from ganger.injob.page import Page
from ganger.injob.page_access import PageError


class ExitRecord(NamedTuple):
    """One end. ``code`` is None when it is unknown, and 128 + ``signal`` after a deadly signal.

    ``source`` is where the code came from: wait, page, launch (it never ran), unknown.
    """

    name: str
    pid: int
    start_ticks: int
    code: int | None
    signal: int | None
    time: float
    source: str
    message: str = ""


def from_wait(name: str, pid: int, ticks: int, result: Any) -> ExitRecord:
    """Turn a waitid() result into an Exit."""
    if result.si_code == os.CLD_EXITED:
        return ExitRecord(name, pid, ticks, result.si_status, None, time.time(), "wait")
    return ExitRecord(name, pid, ticks, 128 + result.si_status, result.si_status, time.time(), "wait")


def from_page(name: str, pid: int, ticks: int, page_path: str) -> ExitRecord:
    """Ask the page of a rank that was not our child: it knows unless the rank was killed."""
    code = None
    if page_path:
        try:
            # never mapped: this launcher looks after other jobs too
            page = Page.open(page_path, writable=False, mapped=False)
            try:
                if page.identity().pid == pid:
                    code = page.progress().exit_code
            finally:
                page.close()
        except (OSError, PageError):
            pass
    return ExitRecord(name, pid, ticks, code, None, time.time(), "unknown" if code is None else "page")


def record(path: str, end: ExitRecord) -> None:
    """Write the exit record: it is there whole or not at all, and survives a power cut. Raises OSError."""
    content = {key: value for key, value in end._asdict().items() if key != "name" and value != ""}
    write_durably(path, json.dumps(content).encode() + b"\n")


def write_durably(path: str, data: bytes, mode: int = 0o600) -> None:
    """Replace a file by one with this content, synced, the directory too."""
    temporary = f"{path}.{os.getpid()}.tmp"
    for place in (temporary, path):
        # what a job has put there may be no file at all
        if os.path.lexists(place) and (os.path.islink(place) or not os.path.isfile(place)):
            os.rename(place, f"{place}.{time.monotonic_ns()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NONBLOCK, mode)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(descriptor, view) :]
        os.fsync(descriptor)
    except OSError:
        os.unlink(temporary)
        raise
    finally:
        os.close(descriptor)
    os.replace(temporary, path)
    sync_directory(os.path.dirname(path))


def sync_directory(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


MANIFEST = "MANIFEST.json"


def publish(temporary: str, final: str, manifest: Mapping[str, Any]) -> None:
    """Write the manifest into ``temporary``, sync, rename it to ``final``, sync the parent.

    Asked again after it was done, it agrees. Raises LaunchError(PUBLISH_FAILED) when shards the manifest names
    (``files``: name to {"bytes"}) are missing or of another size, LaunchError(STORAGE_FULL or STORAGE_FAILED) for what
    storage says.
    """
    if not os.path.isdir(temporary):
        if os.path.exists(os.path.join(final, MANIFEST)):
            return
        raise LaunchError("PUBLISH_FAILED", f"there is no {temporary} to publish")
    files = manifest.get("files", {})
    for name, facts in files.items() if isinstance(files, Mapping) else ():
        path = os.path.join(temporary, os.path.basename(name))
        try:
            size = os.stat(path).st_size
        except OSError as error:
            raise LaunchError("PUBLISH_FAILED", f"{path} is named in the manifest: {error.strerror}") from error
        if isinstance(facts, Mapping) and facts.get("bytes", size) != size:
            raise LaunchError("PUBLISH_FAILED", f"{path} has {size} bytes, the manifest says {facts['bytes']}")
    try:
        write_durably(os.path.join(temporary, MANIFEST), json.dumps(manifest, indent=1, sort_keys=True).encode(), 0o644)
        os.rename(temporary, final)
        sync_directory(os.path.dirname(os.path.abspath(final)))
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise LaunchError("STORAGE_FULL" if full else "STORAGE_FAILED", str(error)) from error
