"""When a job is tried again whose attempts fail by themselves: at once after the first, then later and later, so that
one that cannot work spends its restarts neither in a minute nor on devices that others wait for."""

from __future__ import annotations

from msgspec.structs import replace

from ganger_master.core.model import JobRecord, JobState
from ganger_master.core.settings import CoreSettings
from ganger_master.core.state import State


def note_failure(settings: CoreSettings, job: JobRecord, now: float) -> JobRecord:
    """An attempt has failed; one that ran for long says nothing of those before it."""
    ran = now - job.running_since if job.running_since else 0.0
    in_row = 1 if ran >= settings.restart_reset_seconds else job.failed_in_row + 1
    delay = delay_after(settings, in_row)
    return replace(job, failed_in_row=in_row, again_at=now + delay if delay else 0.0)


def delay_after(settings: CoreSettings, failed_in_row: int) -> float:
    """Seconds."""
    if failed_in_row < 2:
        return 0.0
    # No more doublings than any limit has.
    return min(settings.restart_delay_most_seconds, settings.restart_delay_seconds * 2.0 ** min(failed_in_row - 2, 30))


def let_go_on(state: State, now: float) -> None:
    """Whose time has come waits for a place again."""
    for number in list(state.backing_off):
        job = state.jobs[number]
        # Else a clock that was set back would keep it.
        is_beyond = job.again_at - now > state.settings.restart_delay_most_seconds
        if now >= job.again_at or is_beyond:
            state.put_job(replace(job, again_at=0.0, pending_since=now, revision=job.revision + 1))


def is_backing_off(job: JobRecord) -> bool:
    return bool(job.again_at) and job.state is JobState.PENDING and job.ending is None
