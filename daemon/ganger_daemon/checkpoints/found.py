"""What complete checkpoints a job has on storage, whatever the master knows of them."""

from __future__ import annotations

import heapq
from pathlib import Path

from ganger_daemon.core.orders import Found

from .layout import checkpoints_directory, complete, read_manifest

# A job keeps fewer; one may have filled its directory with others.
_MOST = 16


def newest_found(storage: Path, job_uid: str, before_epoch: int) -> tuple[Found, ...]:
    """Of attempts before that epoch, newest first. What cannot be read is left out. Blocks."""
    directory = checkpoints_directory(storage, job_uid)
    try:
        names = [name for name in complete(directory) if name.epoch < before_epoch]
    except OSError:
        return ()
    found = []
    for name in heapq.nlargest(_MOST, names, key=lambda name: (name.epoch, name.step)):
        try:
            fields = read_manifest(directory / str(name))
            size = sum(int(entry["bytes"]) for entry in fields["files"].values())
            found.append(Found(name.step, name.epoch, f"checkpoints/{name}", size, float(fields.get("time", 0.0))))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            continue
    return tuple(found)
