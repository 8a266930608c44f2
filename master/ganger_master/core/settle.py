"""What every event ends with: consequences drawn, rows and desired sets projected anew, turns given, effects named.

Nothing here decides about one job alone (`attempts`) or about one request (`decide`).
"""

from __future__ import annotations

from ganger_master.core import arenas, attempts, desired, draining, queue
from ganger_master.core.effects import Effect, JobNews, NodeNews, TurnsNews, ViewNews, WakeAt
from ganger_master.core.rows import row_of
from ganger_master.core.state import State

# A drain takes one round per gang of its nodes; what needs many more feeds itself.
_ROUNDS_LIMIT = 20_000
_TICK_SECONDS = 0.001


def settle(state: State, now: float, cause: str) -> list[Effect]:
    """Brings everything derived up to date and returns what the shell owes, history first."""
    rows: dict[str, None] = {}
    wants: dict[str, None] = {}
    for _ in range(_ROUNDS_LIMIT):
        _review_jobs(state, now, cause)
        rows.update(dict.fromkeys(_refresh_rows(state)))
        arenas.follow(state)
        draining.follow(state, now)
        if not state.dirty.jobs and not state.dirty.rows:
            break
    else:
        raise AssertionError("the state does not come to rest")
    while state.dirty.wants:
        name = next(iter(state.dirty.wants))
        del state.dirty.wants[name]
        if name in state.nodes and desired.refresh(state, name):
            wants[name] = None
    # Noting since when a part is wanted touches gangs, but nothing that follows from them.
    state.dirty.jobs.clear()
    state.dirty.rows.clear()
    given = queue.hand_out(state, now)
    effects: list[Effect] = [*state.outbox]
    state.outbox.clear()
    effects.extend(JobNews(number) for number in state.dirty.news)
    state.dirty.news.clear()
    effects.extend(NodeNews(name) for name in wants)
    if rows:
        effects.append(ViewNews(tuple(rows)))
    if given:
        effects.append(TurnsNews(given))
    wake = next_wake(state, now)
    if wake is not None:
        # Never at once again: what did not follow from this instant follows from a later one.
        wake = max(wake, now + _TICK_SECONDS)
    if wake is not None and wake != state.wake_at:
        effects.append(WakeAt(wake))
    state.wake_at = wake
    return effects


def next_wake(state: State, now: float) -> float | None:
    """The earliest time at which something happens by itself."""
    times = [queue.next_time(state, now)]
    for number in state.running_limited:
        job = state.jobs[number]
        limit = job.spec.time_limit_seconds
        if limit is not None and job.running_since:
            times.append(job.running_since + limit - job.run_seconds)
    times.extend(
        state.gangs[state.jobs[number].next_epoch].since + state.settings.move_deadline_seconds
        for number in state.moving
    )
    times.append(state.next_lost_check)
    return min((time for time in times if time is not None), default=None)


def _review_jobs(state: State, now: float, cause: str) -> None:
    while state.dirty.jobs:
        number = next(iter(state.dirty.jobs))
        del state.dirty.jobs[number]
        if number in state.jobs:
            attempts.review(state, number, now, cause)


def _refresh_rows(state: State) -> list[str]:
    changed = []
    for name in state.dirty.rows:
        node = state.nodes.get(name)
        if node is None:
            continue
        configuration_set = state.configuration_sets[node.configuration_set]
        if state.put_row(row_of(node, configuration_set, state.held_on(name), state.affinity_of(name))):
            changed.append(name)
    state.dirty.rows.clear()
    return changed
