"""Which checkpoints may go: all but the newest complete ones, those pinned, and what a living epoch is still
writing."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection
from pathlib import Path

from .layout import CheckpointName, complete, parse_unfinished

KEEP = 2
_TRASH = ".trash-"


def surplus(
    names: Collection[CheckpointName], pinned: Collection[CheckpointName] = (), keep: int = KEEP
) -> tuple[CheckpointName, ...]:
    """What to remove, oldest first; the `keep` newest and the pinned ones stay."""
    return tuple(name for name in sorted(names)[: max(0, len(names) - keep)] if name not in pinned)


def collect(
    directory: Path, live_epochs: Collection[int], pinned: Collection[CheckpointName] = (), keep: int = KEEP
) -> tuple[str, ...]:
    """Removes surplus checkpoints, leftovers of dead epochs and old trash from one job's directory; names removed.

    A checkpoint is renamed before it is deleted, so that nobody ever finds half of one under its name.
    """
    if not directory.is_dir():
        return ()
    removed: list[str] = []
    doomed = [str(name) for name in surplus(complete(directory), pinned, keep)]
    for path in sorted(directory.iterdir()):
        unfinished = parse_unfinished(path.name)
        if unfinished is not None and unfinished.epoch not in live_epochs:
            doomed.append(path.name)
    for name in doomed:
        try:
            os.replace(directory / name, directory / f"{_TRASH}{name}")
            removed.append(name)
        except OSError:
            continue  # somebody else was faster
    for path in directory.glob(f"{_TRASH}*"):
        shutil.rmtree(path, ignore_errors=True)
    return tuple(removed)
