"""What complete checkpoints a job has on storage, whatever the master knows of them."""

from __future__ import annotations

import heapq
from pathlib import Path

from ganger_daemon.core.orders import FoundCheckpoint

from .layout import checkpoints_directory, complete, read_manifest

# A job keeps fewer; one may have filled its directory with others.
_MOST = 16


def newest_found(storage: Path, job_uid: str, before_epoch: int) -> tuple[FoundCheckpoint, ...]:
    """Of attempts before that epoch, newest first. What cannot be read is left out. Blocks."""
    directory = checkpoints_directory(storage, job_uid)
    try:
        names = [name for name in complete(directory) if name.epoch < before_epoch]
    except OSError:
        return ()
    found = []
    for name in heapq.nlargest(_MOST, names, key=lambda name: (name.epoch, name.step)):
        try:
            one = read_manifest(directory / str(name))
        except (OSError, ValueError):
            continue
        found.append(FoundCheckpoint(name.step, name.epoch, f"checkpoints/{name}", one.size_bytes, one.time))
    return tuple(found)
