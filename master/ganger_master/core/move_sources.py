"""The source of a move: parked until the new gang has stepped, and what a job can go back to until then."""

from __future__ import annotations

from collections.abc import Sequence

from ganger.cluster.resources import Claim, LocalityLevel
from ganger.job_state import JobState
from msgspec.structs import replace

from ganger_master.core import gang_orders as orders
from ganger_master.core.change_reason import NO_PURPOSE, Purpose
from ganger_master.core.gang_model import Gang, GangIntent, GangPhase, GangRole, Restore
from ganger_master.core.job_model import JobRecord
from ganger_master.core.lifecycle import GangObservation, observation_of
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
    """Prepare a destination that takes its state from `source`; return its epoch, which is not active yet."""
    epoch = state.take_epoch()
    peak = job.peak_device_bytes
    restore = Restore(parked_epoch=source.epoch, step=source.stop_step, peak_device_bytes=peak)
    version = state.next_desired_version
    destination = orders.new_gang(epoch, job.number, claims, level, now, GangRole.DESTINATION, restore, version)
    state.put_gang(replace(destination, purpose=purpose))
    state.put_job(replace(job, next_epoch=epoch))
    return epoch


def go_back(state: State, job: JobRecord, source: Gang, now: float, cause: str) -> None:
    """Run the parked source again, as a newer epoch: the move failed after its commit."""
    job = replace(job, state=JobState.HOLDING)
    state.put_gang(orders.holding_nothing(source))
    source = state.gangs[source.epoch]
    epoch = go_on_elsewhere(state, job, source, source.claims, source.level, now)
    state.history(now, job, "move_back", cause, epoch=epoch, source=source.epoch)


def reap(state: State, job: JobRecord, now: float) -> bool:
    """Stop the sources of a job whose new gang has stepped; return whether there were any."""
    sources = [other for other in state.gangs.of_job(job.number) if other.role is GangRole.SOURCE]
    for source in sources:
        state.put_gang(orders.stop(source, now))
    return bool(sources)


def is_usable(gang: Gang) -> bool:
    """Return whether a job whose new gang has failed can continue from this one."""
    return (
        gang.role is GangRole.SOURCE
        and gang.phase is GangPhase.PARKED
        and observation_of(gang) is GangObservation.PARKED
    )


def is_superseded(state: State, gang: Gang) -> bool:
    """Return whether a newer epoch of the job was committed: then this gang may be read, but never run."""
    return state.jobs[gang.job].moved_from >= gang.epoch


def has_two_worlds(state: State, number: int) -> bool:
    """Return whether an elastic job has two worlds, also while the old one is only stopping. Only one of them holds
    their common devices, so a gang that joined those would not be known to the other."""
    return any(one.resizes and one.restore.parked_epoch in state.gangs for one in state.gangs.of_job(number))


def can_go_back(gang: Gang) -> bool:
    """Return whether a source that was ordered to park or to hand over can run on: it has given nothing up yet."""
    return gang.intent in (GangIntent.RUN, GangIntent.HAND_OVER) or gang.phase is not GangPhase.PARKED
