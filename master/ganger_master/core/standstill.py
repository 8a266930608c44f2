"""Time that did not pass as the clock says: somebody set the clock, or the master stood still and answered nobody.

Silence since then is the master's own: no node is lost for it and no lease was left unused. How long something has been
going on is counted on as before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from msgspec.structs import replace

from ganger_master.core.commands import Tick
from ganger_master.core.state import State

# Less is what clocks drift; what nodes are granted beyond lost_after has room for it.
_SET_SECONDS: Final = 5.0
_STILL_SECONDS: Final = 30.0


@dataclass(frozen=True, slots=True)
class ClockReading:
    """What two clocks said at once, in seconds: the one that people set, and one that only ever goes on."""

    wall: float
    steady: float


def noticed(before: ClockReading, now: ClockReading) -> Tick | None:
    """What to tell the core ahead of everything else; None where time just passed. `before` is to be only seconds ago
    unless the master stood still."""
    passed = now.steady - before.steady
    set_by = now.wall - before.wall - passed
    is_set, stood_still = abs(set_by) >= _SET_SECONDS, passed >= _STILL_SECONDS
    return Tick(set_by if is_set else 0.0, stood_still) if is_set or stood_still else None


def forgive(state: State, now: float, set_by: float) -> None:
    """Goes on as if everybody had been answered now, but who was silent is so until it calls; the clock says `set_by`
    seconds more than it would have."""
    state.next_silence_check = None
    for node in state.nodes.values():
        if not node.lost:
            state.note_answer(node.name, now)
    for number in list(state.turn_of):
        state.drop_turn(number)
    if set_by:
        _move_times(state, set_by)


def _move_times(state: State, set_by: float) -> None:
    def moved(time: float) -> float:
        return time + set_by if time else 0.0

    state.passed = {number: (version, moved(time)) for number, (version, time) in state.passed.items()}
    state.returned = {number: moved(time) for number, time in state.returned.items()}
    # It goes by how long those who lack places have waited.
    state.blocked = None
    state.promised_at = moved(state.promised_at)
    for number in list(state.live):
        job = state.jobs[number]
        state.put_job(
            replace(
                job,
                pending_since=moved(job.pending_since),
                running_since=moved(job.running_since),
                again_at=moved(job.again_at),
            )
        )
    for gang in list(state.gangs.values()):
        state.put_gang(replace(gang, since=moved(gang.since), refused_at=moved(gang.refused_at)))
