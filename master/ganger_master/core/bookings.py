"""Bookings: nodes that an operator keeps for some users, or for maintenance, for a time.

Before a booking begins its nodes are emptied as drained ones are, by moves. While it lasts they take gangs of its users
only, or none. Then they are as before. A node says what it is booked for (`Node.booking`, `booked_for`), which follows
from the bookings and the clock (`follow`).

Until then a job may start on such a node if it would end before by its time limit, or if it can be stopped or moved.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from enum import Enum
from typing import TYPE_CHECKING, Final

from ganger.cluster.refusals import Reason, Refusal
from ganger.protocol.gang_orders import Mechanism
from ganger.text import counted, format_duration
from msgspec import Struct
from msgspec.structs import replace

from ganger_master.core import ending
from ganger_master.core.answers import RefusedError
from ganger_master.core.job_model import Agent, JobRecord, JobSpec
from ganger_master.core.node_model import Booking

if TYPE_CHECKING:
    from ganger_master.core.commands import BookNodes
    from ganger_master.core.events import NodesBooked, NodesUnbooked
    from ganger_master.core.state import State


class BookingPhase(Enum):
    """AHEAD: its nodes are as others. EMPTYING: until it begins. ACTIVE: while it lasts. OVER: it is forgotten."""

    AHEAD = "ahead"
    EMPTYING = "emptying"
    ACTIVE = "active"
    OVER = "over"


def phase_of(booking: Booking, now: float) -> BookingPhase:
    if now >= booking.end:
        return BookingPhase.OVER
    if now >= booking.start:
        return BookingPhase.ACTIVE
    return BookingPhase.EMPTYING if now >= booking.start - booking.lead_s else BookingPhase.AHEAD


class NodeHold(Struct, frozen=True, gc=False):
    """What a node is booked for now: the name of the booking, and its users. Without users the node is emptied."""

    booking: str = ""
    users: tuple[str, ...] = ()


_FREE: Final = NodeHold()


def hold_of(bookings: Iterable[Booking], node: str, now: float) -> NodeHold:
    """Return what a node is booked for at a time. No two bookings have a node at once."""
    found = [hold for booking in bookings if node in booking.nodes and (hold := _hold(booking, now)) is not _FREE]
    return found[0] if found else _FREE


def _hold(booking: Booking, now: float) -> NodeHold:
    match phase_of(booking, now):
        case BookingPhase.EMPTYING:
            return NodeHold(booking.name)
        case BookingPhase.ACTIVE:
            return NodeHold(booking.name, booking.users)
        case _:
            return _FREE


# -- commands ----------------------------------------------------------------------------------------------------------

_MOST: Final = 1_000
_NAME_LIMIT: Final = 63
_TEXT_LIMIT: Final = 1_000
_USERS_LIMIT: Final = 1_000
_LONGEST_S: Final = 366 * 86_400.0
# Of the year 9999, by Unix's clock.
_LAST_SECOND: Final = 253_402_300_799.0


def check(state: State, command: BookNodes, now: float) -> None:
    """Raise RefusedError unless the booking is accepted."""
    booking = command.booking
    wrong = _mistakes(booking, now)
    if wrong:
        text = "; ".join([f"{path}: {what}" for path, what in wrong])
        raise RefusedError("BOOKING_INVALID", text, violations=tuple(wrong))
    if booking.name in state.bookings:
        raise RefusedError("BOOKING_EXISTS", f"there is a reservation {booking.name!r} already: delete it first")
    if len(state.bookings) >= _MOST:
        raise RefusedError("BOOKING_INVALID", f"there are {_MOST} reservations already")
    unknown = [node for node in booking.nodes if node not in state.nodes]
    if unknown:
        text = f"nodes/{unknown[0]} is unknown: `ganger nodes` lists those that there are"
        raise RefusedError("NODE_NOT_FOUND", text, {"node": f"nodes/{unknown[0]}"})
    for other in state.bookings.values():
        common = set(other.nodes).intersection(booking.nodes)
        if common and booking.start - booking.lead_s < other.end and other.start - other.lead_s < booking.end:
            node = min(common)
            text = f"nodes/{node} is reserved by {other.name!r} at that time: choose another time, or delete that one"
            raise RefusedError("BOOKING_CONFLICT", text, {"node": f"nodes/{node}", "booking": other.name})


def _mistakes(booking: Booking, now: float) -> list[tuple[str, str]]:
    wrong = []
    named = booking.name
    if not named or len(named) > _NAME_LIMIT or not all(sign.isalnum() or sign in "._-" for sign in named):
        wrong.append(("name", "letters, digits, '.', '_' and '-', at most 63"))
    if not booking.nodes:
        wrong.append(("nodes", "at least one"))
    # The bounds are tested positively, because NaN is neither more nor less.
    if not 0.0 <= booking.start <= _LAST_SECOND:
        wrong.append(("start_time", "a time up to the year 9999"))
    if not 0.0 < booking.end - booking.start <= _LONGEST_S:
        wrong.append(("end_time", "after the start, by a year at most"))
    elif not booking.end <= _LAST_SECOND:
        wrong.append(("end_time", "a time up to the year 9999"))
    elif not booking.end > now:
        wrong.append(("end_time", "has passed"))
    if not 0.0 <= booking.lead_s <= _LONGEST_S:
        wrong.append(("lead", "from 0 to a year"))
    if len(booking.users) > _USERS_LIMIT or not all(0 < len(user) <= _NAME_LIMIT for user in booking.users):
        wrong.append(("users", f"at most {_USERS_LIMIT}, of {_NAME_LIMIT} characters each"))
    if len(booking.reason) > _TEXT_LIMIT:
        wrong.append(("reason", f"at most {_TEXT_LIMIT} characters"))
    return wrong


def begin(state: State, event: NodesBooked) -> None:
    state.put_booking(event.booking)
    state.history(event.time, "cluster", "nodes_booked", event.cause, in_words(event.booking))
    follow(state, event.time, event.cause)


def end(state: State, event: NodesUnbooked) -> None:
    _forget(state, event.name)
    state.history(event.time, "cluster", "booking_deleted", event.cause, event.name)
    follow(state, event.time, event.cause)


def _forget(state: State, name: str) -> None:
    """Forget a booking, and report the pending jobs anew: a planner leaves a job out of the nodes that were refused for
    it, for a while or until the job changes."""
    state.forget_booking(name)
    state.dirty.news.update(dict.fromkeys(state.queue.waiting))


def in_words(booking: Booking) -> str:
    purpose = f"for {', '.join(booking.users)}" if booking.users else "for maintenance"
    return f"{booking.name}: {counted(len(booking.nodes), 'node')} {purpose}" + (
        f" ({booking.reason})" if booking.reason else ""
    )


# -- time --------------------------------------------------------------------------------------------------------------


def follow(state: State, now: float, cause: str) -> None:
    """Forget bookings that are over, bring all nodes up to date, and note when the next phase begins."""
    for booking in list(state.bookings.values()):
        if phase_of(booking, now) is BookingPhase.OVER:
            _forget(state, booking.name)
            state.history(now, "cluster", "booking_ended", cause, in_words(booking))
    holds = {}
    for booking in state.bookings.values():
        hold = _hold(booking, now)
        if hold is not _FREE:
            holds.update(dict.fromkeys(booking.nodes, hold))
    for name in [*holds, *state.nodes.booked]:
        _note(state, name, holds.get(name, _FREE), now, cause)
    state.booking_at = next_time(state.bookings.values(), now)


def note_node(state: State, name: str, now: float, cause: str) -> None:
    """Bring one node up to date, which has joined."""
    if state.bookings:
        _note(state, name, hold_of(state.bookings.values(), name, now), now, cause)


def _note(state: State, name: str, hold: NodeHold, now: float, cause: str) -> None:
    node = state.nodes.get(name)
    if node is None or (node.booking, node.booked_for) == (hold.booking, hold.users):
        return
    state.put_node(replace(node, booking=hold.booking, booked_for=hold.users))
    kind = "node_released" if not hold.booking else "node_booked" if hold.users else "node_emptied"
    state.history(now, f"nodes/{name}", kind, cause, hold.booking or node.booking)


def next_time(bookings: Iterable[Booking], now: float) -> float:
    """Return when a booking enters its next phase; infinite if none does."""
    times = [
        time
        for booking in bookings
        for time in (booking.start - booking.lead_s, booking.start, booking.end)
        if time > now
    ]
    return min(times, default=math.inf)


# -- jobs --------------------------------------------------------------------------------------------------------------


def start_rules(state: State, job: JobRecord, nodes: Collection[str], now: float) -> tuple[Refusal, ...]:
    """Return why a job may not start on these nodes now because of bookings that begin later; empty if it may."""
    if not state.bookings or can_leave(job):
        return ()
    ends = _ends_if_started(state, job, now)
    refusals = []
    for booking in state.bookings.values():
        if booking.start < ends and now < booking.end and job.user not in booking.users:
            begins = format_duration(max(0.0, booking.start - now))
            detail = (
                f"the node is reserved in {begins} ({booking.name}), when the job may still run, and it can be "
                "neither moved nor stopped: give it a --time that ends before"
            )
            there = sorted(set(booking.nodes).intersection(nodes))
            refusals += [Refusal(Reason.BOOKED, node=node, job=job.name, detail=detail) for node in there]
    return tuple(refusals)


def reached_by(state: State, job: JobRecord, spec: JobSpec, now: float) -> str:
    """Return why a gang may not have a new time limit: it would run into a booking that it avoids by the old one."""
    gang = state.gangs.get(job.epoch)
    if gang is None or not state.bookings:
        return ""
    before = {one.node for one in start_rules(state, job, gang.nodes, now)}
    reached = start_rules(state, replace(job, spec=spec), gang.nodes, now)
    found = next((one.detail for one in reached if one.node not in before), "")
    return found and f"{job.name} cannot have this time limit: {found}"


def _ends_if_started(state: State, job: JobRecord, now: float) -> float:
    limit = job.time_limit_s
    return math.inf if limit is None else now + max(0.0, limit - ending.counted_s(state, job, now))


def can_leave(job: JobRecord) -> bool:
    """Return whether a job can be moved or stopped without loss, as far as is known before it runs."""
    if job.capabilities.known:
        return job.capabilities.can_move or job.capabilities.checkpoint
    spec = job.spec
    saves_itself = bool(spec.stop_signal) or spec.mechanism is Mechanism.IMAGE
    return spec.agent is not Agent.NONE or saves_itself


def may_stay(state: State, job: JobRecord, name: str) -> bool:
    """Return whether a running job need not leave for a booking: it ends before by its time limit, or is of a user of
    the booking."""
    booking, ends = state.bookings.get(name), ending.ends_at(state, job)
    if booking is None:
        return False
    return job.user in booking.users or (ends is not None and ends <= booking.start)
