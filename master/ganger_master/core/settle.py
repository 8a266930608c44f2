"""What every event ends with, and what every batch of them: consequences drawn; turns given, effects named.

The next request is judged by the rows of the view, so those follow each event. What leaves the master follows once per
batch, because it leaves only when the batch is durable. Nothing here decides about one job alone (`attempts`) or about
one request (`decide`).
"""

from __future__ import annotations

from ganger.cluster.view import LoadMode

from ganger_master.core import (
    arrays,
    attempts,
    colocation,
    desired_state,
    draining,
    placement_leases,
    rollback,
    time_limits,
    timeslice_groups,
)
from ganger_master.core.effects import Effects
from ganger_master.core.state import State

# A drain takes one round per gang of its nodes; what needs many more feeds itself.
_ROUNDS_LIMIT = 20_000
_TICK_SECONDS = 0.001


def settle(state: State, now: float, cause: str) -> None:
    """Draws every consequence of an event and brings the view up to date."""
    dirty = state.dirty
    for _ in range(_ROUNDS_LIMIT):
        # Most events leave nothing of the one or the other.
        if dirty.jobs:
            _review_jobs(state, now, cause)
        if dirty.sets:
            timeslice_groups.follow(state, now, cause)
        if dirty.rows:
            _refresh_rows(state)
        if dirty.arenas:
            colocation.follow(state)
        if dirty.arrays:
            arrays.follow(state, now)
        if state.draining and state.counters.restoring is None:
            draining.follow(state, now)
        if not (dirty.jobs or dirty.rows or dirty.sets):
            return
    raise AssertionError("the state does not come to rest")


def finish(state: State, now: float) -> Effects:
    """Brings what leaves the master up to date and returns what the shell owes for the events so far."""
    _tell_mode(state, now)
    nodes = tuple(desired_state.refresh(state))
    turns = placement_leases.hand_out(state, now) if state.counters.restoring is None else ()
    wake = next_wake(state, now)
    if wake is not None:
        # Never at once again: what did not follow from this instant follows from a later one.
        wake = max(wake, now + _TICK_SECONDS)
    is_said = wake == state.wake_at
    state.wake_at = wake
    dirty = state.dirty
    effects = Effects(
        tuple(state.outbox), tuple(dirty.news), nodes, tuple(dirty.shown), turns, None if is_said else wake
    )
    state.outbox.clear()
    dirty.news.clear()
    dirty.shown.clear()
    return effects


def next_wake(state: State, now: float) -> float | None:
    """The earliest time at which something happens by itself."""
    if state.counters.restoring is not None:
        return rollback.next_time(state, now)
    times = [placement_leases.next_time(state, now), state.next_silence_check]
    if state.running_limited:
        times += [time_limits.ends_at(state, state.jobs[number]) for number in state.running_limited]
    if state.backing_off:
        times += [state.jobs[number].again_at for number in state.backing_off]
    if state.moving:
        moved_since = [state.gangs[state.jobs[number].next_epoch].since for number in state.moving]
        times.append(min(moved_since) + state.settings.move_deadline_seconds)
    if state.promised:
        times.append(state.promised_at + state.settings.move_deadline_seconds)
    return min([time for time in times if time is not None], default=None)


def _tell_mode(state: State, now: float) -> None:
    """Gangs are packed from now on, or spread apart: for operators, and for after a restart."""
    packs = state.view.mode is LoadMode.PACK
    if packs == state.counters.packs:
        return
    state.counters.packs = packs
    held = state.devices - state.free_devices
    text = "gangs are packed, to keep holes for large ones" if packs else "gangs are spread apart"
    state.history(now, "cluster", "mode_changed", "load", text, mode=state.view.mode.name, held=held, of=state.devices)


def _review_jobs(state: State, now: float, cause: str) -> None:
    dirty = state.dirty.jobs
    while dirty:
        number = next(iter(dirty))
        del dirty[number]
        if number in state.jobs:
            attempts.review(state, number, now, cause)
            # It has come to rest, whatever it changed of itself on the way.
            dirty.pop(number, None)


def _refresh_rows(state: State) -> None:
    for name in state.dirty.rows:
        if name in state.nodes and state.refresh_row(name):
            state.dirty.shown[name] = None
    state.dirty.rows.clear()
