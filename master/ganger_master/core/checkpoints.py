"""Checkpoints that a job may start from: those that daemons have published, and those found on storage."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Final

from msgspec.structs import replace

from ganger_master.core.job_model import Checkpoint, JobRecord
from ganger_master.core.state import State

# After so many unreadable checkpoints in a row, a job is given no other one.
UNREADABLE_MOST: Final = 16


def is_newer(one: Checkpoint, other: Checkpoint | None) -> bool:
    """Return whether `one` is newer than `other`. The later epoch counts first, then the step: an attempt may have had
    to start from before a damaged checkpoint."""
    return other is None or (one.epoch, one.step) > (other.epoch, other.step)


def record(
    state: State, job: JobRecord, checkpoint: Checkpoint, now: float, cause: str, before: Checkpoint | None = None
) -> JobRecord:
    """Record a complete checkpoint that is newer than the known one. `before`: the one to fall back to; by default the
    known one. Return the changed job."""
    unreadable = () if checkpoint.epoch == job.epoch else job.unreadable
    job = replace(
        job, checkpoint=checkpoint, checkpoint_before=before or job.checkpoint, unreadable=unreadable, trouble=""
    )
    state.put_job(job)
    state.history(now, job, "checkpoint_complete", cause, step=checkpoint.step)
    return job


def usable(found: Iterable[Checkpoint], epoch: int, unreadable: Collection[str]) -> list[Checkpoint]:
    """Return the checkpoints that an attempt of this epoch may start from, the newest first.

    `found`: those that a daemon found on storage. `unreadable`: paths that are known to be unreadable."""
    if len(unreadable) >= UNREADABLE_MOST:
        return []
    earlier = [one for one in found if one.epoch < epoch and one.path not in unreadable]
    return sorted(earlier, key=lambda one: (one.epoch, one.step), reverse=True)
