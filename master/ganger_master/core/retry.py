"""Retries: failed launches and attempts, the backoff after them, time limits, levels that a job no longer offers, and
the checkpoints that it may start from.

A node that could not launch a gang, by no fault of the command, is closed to that job, so that one bad node does not
use up all its attempts. It opens when any gang has run there, its daemon begins a new session or an operator uncordons
it. A node without which the job would find no place in the whole cluster stays open. Other jobs may use the node: one
that can be launched nowhere would close one node after the other.

A job whose attempts fail by themselves is retried at once after the first failure, then after growing delays, so that
a job that cannot work spends its restarts neither in a minute nor on devices that others wait for. A level that failed
once is withdrawn: the next attempt would fail too, and end the job.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final

from ganger.cluster.capacity_index import CapacityIndex
from ganger.cluster.preferences import BEST_FIT
from ganger.cluster.search import PlacementRequest
from ganger.job_state import JobState
from msgspec.structs import replace

from ganger_master.core.gang_model import Gang, GangIntent, GangRole, Outcome, OutcomeKind, Piece
from ganger_master.core.job_model import Checkpoint, Failure, JobRecord, SuspendLevel
from ganger_master.core.lifecycle import bad_outcome
from ganger_master.core.settings import CoreSettings
from ganger_master.core.state import State

# Nodes of a job that are remembered; a gang may be as wide as the cluster.
_MOST_NODES: Final = 64


def note_failed_launch(state: State, job: JobRecord, gang: Gang) -> JobRecord:
    """Record a failed launch at the nodes that could not launch their part, and those nodes at the job."""
    failed = _failed(gang)
    if not failed:
        return job
    for piece in failed:
        node = state.nodes.get(piece.claim.node)
        if node is not None:
            said = f"{job.name}: {piece.outcome.message}"
            state.put_node(replace(node, launch_failures=node.launch_failures + 1, launch_failure=said))
    nodes = dict.fromkeys([*job.launch_failed_on, *(piece.claim.node for piece in failed)])
    return replace(job, launch_failed_on=tuple(nodes)[-_MOST_NODES:])


def note_launched(state: State, gang: Gang) -> None:
    """Record that the nodes of a gang can launch: it stepped, or its command ended by itself."""
    for name in gang.nodes:
        node = state.nodes.get(name)
        if node is not None and node.launch_failures:
            state.put_node(replace(node, launch_failures=0, launch_failure=""))


def visible_to(jobs: Mapping[int, JobRecord], said: str, user: str) -> str:
    """Return the part of a launch failure ("jobs/7: ...") that a user may read: of another user's job only the name,
    for the rest names that user's files."""
    name, _, _ = said.partition(":")
    number = name.removeprefix("jobs/")
    job = jobs.get(int(number)) if number.isdecimal() else None
    is_own = job is not None and job.user == user
    return said if is_own or not said else f"{name}: its user and operators see why"


def failed_on(state: State, job: JobRecord) -> list[str]:
    """Return the nodes on which the job could not be launched, and no other job has been since."""
    return [name for name in job.launch_failed_on if (node := state.nodes.get(name)) and node.launch_failures]


def could_go_elsewhere(state: State, job: JobRecord, closed: Sequence[str]) -> bool:
    """Return whether the available nodes, without the closed ones, could hold the job if they were empty."""
    shape = job.shape
    shape = replace(shape, locality=replace(shape.locality, wish=None), arena_bytes_per_device=0)
    return bool(BEST_FIT.place(CapacityIndex.of(state.view.vacant()), PlacementRequest(shape, avoid=frozenset(closed))))


def _failed(gang: Gang) -> list[Piece]:
    return [
        piece
        for piece in gang.pieces
        if piece.outcome.kind is OutcomeKind.LAUNCH_FAILED and not piece.outcome.exit_code
    ]


def note_failed_attempt(settings: CoreSettings, job: JobRecord, now: float) -> JobRecord:
    """Record a failed attempt; one that ran for long begins the count anew."""
    ran = now - job.running_since if job.running_since else 0.0
    in_row = 1 if ran >= settings.restart_reset_s else job.failed_in_row + 1
    delay = delay_after(settings, in_row)
    return replace(job, failed_in_row=in_row, again_at=now + delay if delay else 0.0)


def delay_after(settings: CoreSettings, failed_in_row: int) -> float:
    """Return the backoff in seconds after that many failures in a row."""
    if failed_in_row < 2:
        return 0.0
    # No more doublings than any limit has.
    return min(settings.restart_delay_most_s, settings.restart_delay_s * 2.0 ** min(failed_in_row - 2, 30))


def let_go_on(state: State, now: float) -> None:
    """Requeue jobs whose backoff is over."""
    for number in list(state.jobs.backing_off):
        job = state.jobs[number]
        # A clock that was set back must not prolong it.
        is_beyond = job.again_at - now > state.settings.restart_delay_most_s
        if now >= job.again_at or is_beyond:
            state.put_job(replace(job, again_at=0.0, pending_since=now, revision=job.revision + 1))


def is_backing_off(job: JobRecord) -> bool:
    return bool(job.again_at) and job.state is JobState.PENDING and job.ending is None


def ends_at(state: State, job: JobRecord) -> float | None:
    """Return when a job's time limit ends it; None if it has none, or neither runs nor starts."""
    limit = job.spec.time_limit_s
    if limit is None:
        return None
    if job.running_since:
        return job.running_since + limit - job.run_s
    gang = state.gangs.get(job.epoch)
    starts = _starts_at(gang) if gang is not None else 0.0
    # A job that hangs before its first step must not keep its devices for ever.
    return starts + limit - job.run_s if starts else None


def counted_s(state: State, job: JobRecord, now: float) -> float:
    """Return the seconds that count against the job's time limit by now."""
    if job.running_since:
        return job.run_s + max(0.0, now - job.running_since)
    gang = state.gangs.get(job.epoch)
    starts = _starts_at(gang) if gang is not None else 0.0
    return job.run_s + (max(0.0, now - starts) if starts else 0.0)


def failure_of(job: JobRecord) -> Failure:
    done = "ran for" if job.running_since else "did not come to a step within"
    return Failure("TIME_LIMIT", f"{done} its time limit of {job.spec.time_limit_s:g} s", epoch=job.epoch)


def _starts_at(gang: Gang) -> float:
    """Return since when all processes of the present start exist; zero while they do not, or it is parked."""
    if gang.intent is not GangIntent.RUN or not all(piece.launch_time for piece in gang.pieces):
        return 0.0
    return max(gang.since, *[piece.launch_time for piece in gang.pieces])


# How a daemon's trouble begins where the job's state, and not a disk or a node, is what failed (`Error` of the page).
_UNSAVEABLE = "STATE_UNSAVEABLE:"
_UNREADABLE = "STATE_UNREADABLE:"
# A rank's exit code for the same.
_NO_STATE = 77


def has_no_state(outcome: Outcome) -> bool:
    """Return whether a rank ended because it could not bring back the state that it was given."""
    return outcome.kind is OutcomeKind.FAILED and outcome.exit_code == _NO_STATE


def after_failed_move(job: JobRecord, gang: Gang, trouble: str) -> JobRecord:
    """Return the job without the levels that this failure rules out. `gang`: the side that failed, before the commit.

    A destination whose program ended, or could not read the state, would do so after a checkpoint too."""
    if gang.role is GangRole.DESTINATION:
        outcome = bad_outcome(gang)
        # Another number of ranks may run where this one did not: of a resize only the state counts.
        has_ended = outcome.kind is OutcomeKind.FAILED and (not gang.resizes or has_no_state(outcome))
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
