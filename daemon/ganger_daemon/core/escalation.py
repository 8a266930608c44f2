"""Escalation of an order that a job does not obey: after `patience` the agent prints the stacks of its threads; at the
deadline SIGTERM; after the grace the kill. Phases without boundaries move the clock, up to a bound. STOP begins at
SIGTERM. A move ends no job: at its deadline the gang reports that it did not stop, and goes on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum

PATIENCE_S = 30.0
DEADLINE_S = 60.0
# Evaluation or compilation extends a deadline by at most this: an endless evaluation cannot hold a device.
EXTENSION_S = 600.0


class Rung(IntEnum):
    NONE = 0
    DUMP = 1
    TERMINATE = 2
    KILL = 3
    GIVE_UP = 4  # instead of TERMINATE: the order is reported as one that cannot be carried out


@dataclass(frozen=True, slots=True)
class Ladder:
    """State of one order's escalation. Times are seconds; `extended`: time spent in phases without boundaries."""

    ordered_at: float
    patience: float
    deadline: float
    grace: float
    rung: Rung = Rung.NONE
    extended: float = 0.0
    terminated_at: float | None = None
    ends: bool = True  # whether processes may be ended for this order


def begin(
    now: float,
    iteration_s: float,
    grace: float,
    deadline: float = DEADLINE_S,
    patience: float = PATIENCE_S,
    *,
    ends: bool = True,
) -> Ladder:
    patient = max(min(patience, deadline), 2.0 * iteration_s)
    return Ladder(now, patient, max(deadline, 2.0 * patient), grace, ends=ends)


def begin_stop(now: float, grace: float) -> Ladder:
    """Return the ladder of a STOP, which begins with SIGTERM."""
    return Ladder(now, 0.0, 0.0, grace, Rung.TERMINATE, terminated_at=now)


def extend(ladder: Ladder, seconds: float) -> Ladder:
    """Return the ladder with time in a phase without boundaries added, within the bound."""
    return replace(ladder, extended=min(EXTENSION_S, ladder.extended + max(0.0, seconds)))


def climb(ladder: Ladder, now: float) -> Ladder:
    """Return the ladder one rung higher if that rung is due at `now`; else the same ladder."""
    waited = now - ladder.ordered_at - ladder.extended
    if ladder.rung is Rung.NONE and waited >= ladder.patience:
        return replace(ladder, rung=Rung.DUMP)
    if ladder.rung is Rung.DUMP and waited >= ladder.deadline and not ladder.ends:
        return replace(ladder, rung=Rung.GIVE_UP)
    if ladder.rung is Rung.DUMP and waited >= ladder.deadline:
        return replace(ladder, rung=Rung.TERMINATE, terminated_at=now)
    if (
        ladder.rung is Rung.TERMINATE
        and ladder.terminated_at is not None
        and now - ladder.terminated_at >= ladder.grace
    ):
        return replace(ladder, rung=Rung.KILL)
    return ladder
