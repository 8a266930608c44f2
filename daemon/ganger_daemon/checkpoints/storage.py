"""Whether this node sees the storage everybody means, and whether a checkpoint still fits there."""

from __future__ import annotations

import os
from pathlib import Path

TOKEN_FILE = ".ganger-token"
# A checkpoint needs its size and a fifth: shards are written beside the old ones before those go.
_ROOM_NUMERATOR, _ROOM_DENOMINATOR = 6, 5


def token_found(storage: Path | None) -> str:
    """The token in the storage directory; empty when there is none."""
    if storage is None:
        return ""
    try:
        return (storage / TOKEN_FILE).read_text().strip()
    except OSError:
        return ""


def room_missing(storage: Path, size_bytes: int) -> int:
    """Bytes that lack for a checkpoint of this size; 0 when it fits, or when the file system does not say."""
    free = free_bytes(storage)
    return 0 if free is None else max(0, size_bytes * _ROOM_NUMERATOR // _ROOM_DENOMINATOR - free)


def free_bytes(storage: Path) -> int | None:
    """None when the file system does not say."""
    try:
        state = os.statvfs(storage)
    except OSError:
        return None
    return state.f_bavail * state.f_frsize
