"""Which checkpoints of a job the master believes in: what daemons have published, and what lies on storage."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Final

from msgspec.structs import replace

from ganger_master.core.model import Checkpoint, Job
from ganger_master.core.state import State

# A job that has had so many unreadable ones in a row is not given another.
UNREADABLE_MOST: Final = 16


def is_newer(one: Checkpoint, other: Checkpoint | None) -> bool:
    """A later epoch's is newer whatever its step: it may have had to go back behind a damaged one."""
    return other is None or (one.epoch, one.step) > (other.epoch, other.step)


def learn(
    state: State, job: Job, checkpoint: Checkpoint, now: float, cause: str, before: Checkpoint | None = None
) -> Job:
    """Records a complete checkpoint that is newer than the known one. `before`: the one to fall back to; by default
    the one known so far."""
    unreadable = () if checkpoint.epoch == job.epoch else job.unreadable
    job = replace(
        job, checkpoint=checkpoint, checkpoint_before=before or job.checkpoint, unreadable=unreadable, trouble=""
    )
    state.put_job(job)
    state.history(now, job, "checkpoint_complete", cause, step=checkpoint.step)
    return job


def usable(found: Iterable[Checkpoint], epoch: int, unreadable: Collection[str]) -> list[Checkpoint]:
    """Of those that a daemon found on storage for an attempt of this epoch: written by earlier attempts and not known
    to be unreadable, the newest first."""
    if len(unreadable) >= UNREADABLE_MOST:
        return []
    earlier = [one for one in found if one.epoch < epoch and one.path not in unreadable]
    return sorted(earlier, key=lambda one: (one.epoch, one.step), reverse=True)
