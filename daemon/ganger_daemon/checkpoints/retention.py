"""Retention and schedule of a gang's checkpoints.

All checkpoints are removed but the newest complete ones, those the master may start the job from, and those being
written. A checkpoint of a later epoch is newer, whatever its step: a job that went back to an older checkpoint leaves
unreadable ones of higher steps, which must not replace the good ones. Only the gang's leader requests checkpoints; the
relay carries the request to members.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

from ganger_daemon.checkpoints.layout import CheckpointName, complete, parse_unfinished

# The newest, and the one before it for when the newest turns out to be damaged.
KEEP = 2
_TRASH = ".trash-"


def surplus(
    names: Collection[CheckpointName], newest: CheckpointName, wanted: Collection[CheckpointName] = ()
) -> tuple[CheckpointName, ...]:
    """Return the checkpoints to remove once `newest` is published, oldest first.

    `wanted`: checkpoints the master may start the job from, as its newest desired set names them. The first one
    published since stays, too: the master may have recorded it although its answer was lost.
    """
    ordered = sorted(names, key=_age)
    newest_wanted = max(map(_age, wanted), default=(-1, -1))
    since = [name for name in ordered if _age(name) > newest_wanted]
    kept = {*ordered[-KEEP:], newest, *wanted, *since[:1]}
    return tuple(name for name in ordered if name not in kept)


def _age(name: CheckpointName) -> tuple[int, int]:
    return (name.epoch, name.step)


def is_leftover(unfinished: CheckpointName, newest: CheckpointName) -> bool:
    """Return whether no rank writes an unfinished checkpoint any more: it is no newer than the newest finished one."""
    return (unfinished.epoch, unfinished.step) <= (newest.epoch, newest.step)


def collect(directory: Path, newest: CheckpointName, wanted: Collection[CheckpointName] = ()) -> tuple[str, ...]:
    """Remove surplus checkpoints, leftovers and old trash from a job's directory once `newest` is published; return the
    removed names.

    A checkpoint is renamed before it is deleted, so that no reader finds half of one under its name.
    """
    if not directory.is_dir():
        return ()
    doomed = [str(name) for name in surplus(complete(directory), newest, wanted)]
    doomed += [name for name, unfinished in _unfinished(directory) if is_leftover(unfinished, newest)]
    return _remove(directory, doomed)


def collect_abandoned(directory: Path, epoch: int) -> tuple[str, ...]:
    """Remove the unfinished checkpoints of an epoch that no rank is writing just now; return their names."""
    if not directory.is_dir():
        return ()
    mine = [name for name, unfinished in _unfinished(directory) if unfinished.epoch == epoch]
    return _remove(directory, [name for name in mine if not any((directory / name).glob("*.part"))])


def _unfinished(directory: Path) -> list[tuple[str, CheckpointName]]:
    found = [(path.name, parse_unfinished(path.name)) for path in sorted(directory.iterdir())]
    return [(name, unfinished) for name, unfinished in found if unfinished is not None]


def _remove(directory: Path, doomed: Collection[str]) -> tuple[str, ...]:
    removed: list[str] = []
    for name in doomed:
        try:
            os.replace(directory / name, directory / f"{_TRASH}{name}")
            removed.append(name)
        except OSError:
            continue  # another process has removed it
    for path in directory.glob(f"{_TRASH}*"):
        shutil.rmtree(path, ignore_errors=True)
    return tuple(removed)


@dataclass(frozen=True, slots=True)
class Schedule:
    """Times are seconds of a monotonic clock. `asked` counts requests made, `served` is the master's counter obeyed."""

    last: float
    served: int = 0


def due(schedule: Schedule, now: float, interval_s: float, request: int) -> bool:
    """Return whether to request a checkpoint now: the master raised its counter, or the interval is over (0: never)."""
    if request > schedule.served:
        return True
    return interval_s > 0 and now - schedule.last >= interval_s


def asked(schedule: Schedule, now: float, request: int) -> Schedule:
    return replace(schedule, last=now, served=max(schedule.served, request))
