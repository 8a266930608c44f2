"""What is left of a gang that its job moved away from: the source of the next one, a copy until that has stepped."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from ganger_master.core import gang_orders as orders
from ganger_master.core.change_reason import NO_PURPOSE, Purpose
from ganger_master.core.lifecycle import Seen, seen_of
from ganger_master.core.model import (
    Claim,
    Gang,
    GangIntent,
    GangPhase,
    GangRole,
    JobRecord,
    JobState,
    LocalityLevel,
    Restore,
)
from ganger_master.core.state import State


def go_on_elsewhere(
    state: State,
    job: JobRecord,
    source: Gang,
    claims: Sequence[Claim],
    level: LocalityLevel,
    now: float,
    purpose: Purpose = NO_PURPOSE,
) -> int:
    """Prepares a destination that takes its state from there; its epoch, which is not active yet."""
    epoch = state.take_epoch()
    peak = job.peak_device_bytes
    restore = Restore(parked_epoch=source.epoch, step=source.stop_step, peak_device_bytes=peak)
    version = state.next_desired_version
    destination = orders.new_gang(epoch, job.number, claims, level, now, GangRole.DESTINATION, restore, version)
    state.put_gang(replace(destination, purpose=purpose))
    state.put_job(replace(job, next_epoch=epoch))
    return epoch


def go_back(state: State, job: JobRecord, source: Gang, now: float, cause: str) -> None:
    """A move failed after its commit and its destination is dead: the parked source runs again, as a newer epoch."""
    job = replace(job, state=JobState.HOLDING)
    state.put_gang(orders.holding_nothing(source))
    source = state.gangs[source.epoch]
    epoch = go_on_elsewhere(state, job, source, source.claims, source.level, now)
    state.history(now, job, "move_back", cause, epoch=epoch, source=source.epoch)


def reap(state: State, job: JobRecord, now: float) -> bool:
    """The new gang has the state and used it: the copies it came from may go."""
    sources = [other for other in state.gangs_of_job(job.number) if other.role is GangRole.SOURCE]
    for source in sources:
        state.put_gang(orders.stop(source, now))
    return bool(sources)


def is_usable(gang: Gang) -> bool:
    """Whether a job whose new gang has failed can go on from it."""
    return gang.role is GangRole.SOURCE and gang.phase is GangPhase.PARKED and seen_of(gang) is Seen.PARKED


def is_superseded(state: State, gang: Gang) -> bool:
    """A newer epoch of the job was committed after it: it may be read, never run."""
    return state.jobs[gang.job].moved_from >= gang.epoch


def has_two_worlds(state: State, number: int) -> bool:
    """Whether a job is between two worlds, be it that the old one is only still leaving: what both have in common the
    one of them holds, and who comes to it there would not be known to the other."""
    return any(one.resizes and one.restore.parked_epoch in state.gangs for one in state.gangs_of_job(number))


def can_go_back(gang: Gang) -> bool:
    """Whether an old world that was told to rest, or to hand over, can simply go on: it has given nothing up yet."""
    return gang.intent in (GangIntent.RUN, GangIntent.HAND_OVER) or gang.phase is not GangPhase.PARKED
