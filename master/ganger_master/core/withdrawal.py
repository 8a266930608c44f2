"""Levels that a job no longer offers because they failed once: the next attempt would fail too, and end the job."""

from __future__ import annotations

from msgspec.structs import replace

from ganger_master.core.lifecycle import bad_outcome
from ganger_master.core.model import Gang, GangRole, JobRecord, OutcomeKind, SuspendLevel

# How a daemon's trouble begins where the job's state, and not a disk or a node, is what failed (`Error` of the page).
_UNSAVEABLE = "STATE_UNSAVEABLE:"
_UNREADABLE = "STATE_UNREADABLE:"
# A rank's exit code for the same.
_NO_STATE = 77


def after_failed_move(job: JobRecord, gang: Gang, trouble: str) -> JobRecord:
    """Return the job without the levels that this failure rules out. `gang`: the side that failed, before the commit.

    A destination whose program ended, or could not read the state, would do so after a checkpoint too."""
    if gang.role is GangRole.DESTINATION:
        outcome = bad_outcome(gang)
        # Another number of ranks may run where this one did not: of a resize only the state counts.
        has_ended = outcome.kind is OutcomeKind.FAILED and (not gang.resizes or outcome.exit_code == _NO_STATE)
        has_failed = trouble.startswith(_UNREADABLE) or has_ended
        names: tuple[str, ...] = ("RESIZE",) if gang.resizes else ("MOVE", "CHECKPOINT", "RESIZE")
    else:
        has_failed = trouble.startswith(_UNSAVEABLE)
        names = ("MOVE",)
    if not has_failed:
        return job
    what = "a resize" if gang.resizes else "a move"
    return _without(job, names, f"{what} failed at it once: {trouble}")


def after_refused_suspend(job: JobRecord, level: SuspendLevel, trouble: str) -> JobRecord:
    """Return the job without `level`, if it was refused because the state cannot be saved."""
    if not trouble.startswith(_UNSAVEABLE):
        return job
    return _without(job, (level.name,), f"it failed once: {trouble}")


def _without(job: JobRecord, names: tuple[str, ...], why: str) -> JobRecord:
    return replace(job, capabilities=job.capabilities.without(dict.fromkeys(names, why)))
