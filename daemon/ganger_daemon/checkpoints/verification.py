"""The complete checkpoints that a job has on storage, whether or not the master has recorded them."""

from __future__ import annotations

import heapq
from pathlib import Path

from ganger_daemon.checkpoints.layout import checkpoints_directory, complete, read_manifest
from ganger_daemon.core.orders import FoundCheckpoint

# More than a job keeps; a job may have filled its directory with others.
_MOST = 16


def newest_found(storage: Path, job_uid: str, before_epoch: int) -> tuple[FoundCheckpoint, ...]:
    """Return the complete checkpoints of attempts before `before_epoch`, newest first, at most 16. Blocks.

    Those that cannot be read are left out."""
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
