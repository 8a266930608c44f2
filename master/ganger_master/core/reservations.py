"""Reservations: nodes that an operator keeps for some users, or for maintenance, for a time.

Before a reservation begins its nodes are emptied as drained ones are, by moves. While it lasts they take gangs of its
users only, or none. Then they are as before. What a node is reserved for (`Node.reservation`, `reserved_for`) follows
from the reservations and the clock (`follow`).

Until then a job may start on such a node if it would end before by its time limit, or if it can be stopped or moved.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from enum import Enum
from typing import TYPE_CHECKING, Final, NamedTuple

from ganger.cluster.refusals import Reason, Refusal
from ganger.text import counted, format_duration
from msgspec.structs import replace

from ganger_master.core import ending
from ganger_master.core.answers import RefusedError
from ganger_master.core.job_model import JobRecord
from ganger_master.core.job_spec import JobSpec
from ganger_master.core.node_closures import NodeClosures, can_leave, end_of_start
from ganger_master.core.node_model import ListChange, Reservation
from ganger_master.core.tenancy import NAME_LIMIT, is_plain_name

if TYPE_CHECKING:
    from ganger_master.core.commands import UpdateReservation
    from ganger_master.core.events import NodesReserved, ReservationDeleted
    from ganger_master.core.state import State


class ReservationPhase(Enum):
    """AHEAD: its nodes are as others. EMPTYING: until it begins. ACTIVE: while it lasts. OVER: it is forgotten."""

    AHEAD = "ahead"
    EMPTYING = "emptying"
    ACTIVE = "active"
    OVER = "over"


def phase_of(reservation: Reservation, now: float) -> ReservationPhase:
    """Return the phase of a reservation at a time, in Unix seconds."""
    if now >= reservation.end:
        return ReservationPhase.OVER
    if now >= reservation.start:
        return ReservationPhase.ACTIVE
    return ReservationPhase.EMPTYING if now >= reservation.start - reservation.lead_s else ReservationPhase.AHEAD


class NodeHold(NamedTuple):
    """What a node is reserved for: `Node.reservation` and `reserved_for`. `name`: of the reservation, or empty."""

    name: str = ""
    users: tuple[str, ...] = ()


_NO_HOLD: Final = NodeHold()


def hold_of(reservations: Iterable[Reservation], node: str, now: float) -> NodeHold:
    """Return what a node is reserved for at a time, in Unix seconds. No two reservations have a node at once."""
    found = [hold for one in reservations if node in one.nodes and (hold := _hold(one, now)) != _NO_HOLD]
    return found[0] if found else _NO_HOLD


def _hold(reservation: Reservation, now: float) -> NodeHold:
    match phase_of(reservation, now):
        case ReservationPhase.EMPTYING:
            return NodeHold(reservation.name)
        case ReservationPhase.ACTIVE:
            return NodeHold(reservation.name, reservation.users)
        case _:
            return _NO_HOLD


# -- commands ----------------------------------------------------------------------------------------------------------

_MOST: Final = 1_000
# Most reservations that an error names.
_SHOWN: Final = 10
_TEXT_LIMIT: Final = 1_000
_USERS_LIMIT: Final = 1_000
_LONGEST_S: Final = 366 * 86_400.0
# The last second of the year 9999, in Unix seconds.
_LAST_SECOND: Final = 253_402_300_799.0


def named(state: State, name: str) -> Reservation:
    """Return a reservation that is not over. Raises RefusedError."""
    found = state.reservations.get(name)
    if found is None:
        there = ", ".join(sorted(state.reservations)[:_SHOWN]) or "none"
        raise RefusedError("RESERVATION_NOT_FOUND", f"there is no reservation {name!r}: there are {there}")
    return found


def updated(known: Reservation, update: UpdateReservation) -> Reservation:
    """Return a reservation with what an update changes. A later start leaves its duration, unless that is named. Raises
    RefusedError for one that would lose all its users, and so become maintenance."""
    start = known.start if update.start is None else update.start
    length_s = known.end - known.start if update.duration_s is None else update.duration_s
    is_same_time = update.start is None and update.duration_s is None
    users = _changed(known.users, update.users, update.users_change)
    if update.users_change is ListChange.REMOVE and known.users and not users:
        text = f"users: {known.name!r} would have none left; make it maintenance, or delete it"
        raise RefusedError("RESERVATION_INVALID", text, violations=(("users", "none would be left"),))
    return replace(
        known,
        nodes=tuple(sorted(_changed(known.nodes, update.nodes, update.nodes_change))),
        start=start,
        end=known.end if is_same_time else start + length_s,
        users=users,
        reason=known.reason if update.reason is None else update.reason,
        lead_s=known.lead_s if update.lead_s is None else update.lead_s,
    )


def _changed(known: tuple[str, ...], named: tuple[str, ...] | None, change: ListChange) -> tuple[str, ...]:
    if named is None:
        return known
    match change:
        case ListChange.ADD:
            return tuple(dict.fromkeys((*known, *named)))
        case ListChange.REMOVE:
            return tuple([one for one in known if one not in set(named)])
        case _:
            return named


def check(state: State, reservation: Reservation, now: float, before: Reservation | None = None) -> None:
    """Raise RefusedError unless a reservation can be made, or changed.

    before: what it replaces; None for a new one. now: Unix seconds."""
    wrong = _mistakes(reservation, now)
    if wrong:
        text = "; ".join([f"{path}: {what}" for path, what in wrong])
        raise RefusedError("RESERVATION_INVALID", text, violations=tuple(wrong))
    if before is None and reservation.name in state.reservations:
        text = f"there is a reservation {reservation.name!r} already: `ganger reserve update` changes it"
        raise RefusedError("RESERVATION_EXISTS", text)
    if before is None and len(state.reservations) >= _MOST:
        raise RefusedError("RESERVATION_INVALID", f"there are {_MOST} reservations already")
    had = () if before is None else before.nodes
    unknown = [node for node in reservation.nodes if node not in state.nodes and node not in had]
    if unknown:
        text = f"nodes/{unknown[0]} is unknown: `ganger nodes` lists those that there are"
        raise RefusedError("NODE_NOT_FOUND", text, {"node": f"nodes/{unknown[0]}"})
    for other in state.reservations.values():
        common = set(other.nodes).intersection(reservation.nodes) if other.name != reservation.name else ()
        if (
            common
            and reservation.start - reservation.lead_s < other.end
            and other.start - other.lead_s < reservation.end
        ):
            node = min(common)
            text = f"nodes/{node} is reserved by {other.name!r} at that time: choose another time, or delete that one"
            raise RefusedError("RESERVATION_CONFLICT", text, {"node": f"nodes/{node}", "reservation": other.name})


def _mistakes(reservation: Reservation, now: float) -> list[tuple[str, str]]:
    wrong = []
    if not is_plain_name(reservation.name):
        wrong.append(("name", f"letters, digits, '.', '_' and '-', at most {NAME_LIMIT}"))
    if not reservation.nodes:
        wrong.append(("nodes", "at least one"))
    # The bounds are tested positively, because NaN is neither more nor less.
    if not 0.0 <= reservation.start <= _LAST_SECOND:
        wrong.append(("start_time", "a time up to the year 9999"))
    if not 0.0 < reservation.end - reservation.start <= _LONGEST_S:
        wrong.append(("end_time", "after the start, by a year at most"))
    elif not reservation.end <= _LAST_SECOND:
        wrong.append(("end_time", "a time up to the year 9999"))
    elif not reservation.end > now:
        wrong.append(("end_time", "has passed"))
    if not 0.0 <= reservation.lead_s <= _LONGEST_S:
        wrong.append(("lead", "from 0 to a year"))
    if len(reservation.users) > _USERS_LIMIT or not all(0 < len(user) <= NAME_LIMIT for user in reservation.users):
        wrong.append(("users", f"at most {_USERS_LIMIT}, of {NAME_LIMIT} characters each"))
    if len(reservation.reason) > _TEXT_LIMIT:
        wrong.append(("reason", f"at most {_TEXT_LIMIT} characters"))
    return wrong


def begin(state: State, event: NodesReserved) -> None:
    """Store a new or changed reservation, and bring its nodes up to date."""
    kind = "reservation_updated" if event.reservation.name in state.reservations else "nodes_reserved"
    state.put_reservation(event.reservation)
    state.history(event.time, "cluster", kind, event.cause, in_words(event.reservation) + _span(event))
    follow(state, event.time, event.cause)


def end(state: State, event: ReservationDeleted) -> None:
    """Forget a reservation, and bring its nodes up to date."""
    state.forget_reservation(event.name)
    state.history(event.time, "cluster", "reservation_deleted", event.cause, event.name)
    follow(state, event.time, event.cause)


def in_words(reservation: Reservation) -> str:
    """Return "course: 2 nodes for ann, bob (exam)"."""
    purpose = f"for {', '.join(reservation.users)}" if reservation.users else "for maintenance"
    return f"{reservation.name}: {counted(len(reservation.nodes), 'node')} {purpose}" + (
        f" ({reservation.reason})" if reservation.reason else ""
    )


def _span(event: NodesReserved) -> str:
    """Return ", in 2h for 30m": the start and duration of a reservation as it is made or changed."""
    start, end = event.reservation.start, event.reservation.end
    if start <= event.time:
        return f", for another {format_duration(max(0.0, end - event.time))}"
    return f", in {format_duration(start - event.time)} for {format_duration(end - start)}"


# -- time --------------------------------------------------------------------------------------------------------------


def follow(state: State, now: float, cause: str) -> None:
    """Forget reservations that are over, bring all nodes up to date, and note when the next phase begins."""
    for reservation in list(state.reservations.values()):
        if phase_of(reservation, now) is ReservationPhase.OVER:
            state.forget_reservation(reservation.name)
            state.history(now, "cluster", "reservation_ended", cause, in_words(reservation))
    holds = {}
    for reservation in state.reservations.values():
        hold = _hold(reservation, now)
        if hold != _NO_HOLD:
            holds.update(dict.fromkeys(reservation.nodes, hold))
    for name in [*holds, *state.nodes.reserved]:
        _note(state, name, holds.get(name, _NO_HOLD), now, cause)
    state.reservation_at = next_time(state.reservations.values(), now)


def note_node(state: State, name: str, now: float, cause: str) -> None:
    """Bring one node up to date, which has joined."""
    if state.reservations:
        _note(state, name, hold_of(state.reservations.values(), name, now), now, cause)


def _note(state: State, name: str, hold: NodeHold, now: float, cause: str) -> None:
    node = state.nodes.get(name)
    if node is None or (node.reservation, node.reserved_for) == hold:
        return
    state.put_node(replace(node, reservation=hold.name, reserved_for=hold.users))
    kind = "node_released" if not hold.name else "node_reserved" if hold.users else "node_emptied"
    state.history(now, f"nodes/{name}", kind, cause, hold.name or node.reservation)


def next_time(reservations: Iterable[Reservation], now: float) -> float:
    """Return when a reservation enters its next phase; infinite if none does."""
    times = [
        time
        for reservation in reservations
        for time in (reservation.start - reservation.lead_s, reservation.start, reservation.end)
        if time > now
    ]
    return min(times, default=math.inf)


# -- jobs --------------------------------------------------------------------------------------------------------------


def closed_to(state: State, job: JobRecord, now: float) -> frozenset[str]:
    """Return the nodes on which reservations do not let a job start now. Cheap for a list of jobs."""
    return closures_of(state, now).of(job, now) if state.reservations else frozenset()


def closures_of(state: State, now: float) -> NodeClosures:
    """Return what the reservations close, found anew only once they have changed or the first has ended."""
    if state.closures is None or not state.closures.hold_at(now):
        state.closures = NodeClosures(tuple(state.reservations.values()), now)
    return state.closures


def start_rules(state: State, job: JobRecord, nodes: Collection[str], now: float) -> tuple[Refusal, ...]:
    """Return why a job may not start on these nodes now because of reservations that begin later; empty if it may."""
    if not state.reservations or can_leave(job):
        return ()
    ends = end_of_start(job, ending.counted_s(state, job, now), now)
    refusals = []
    for reservation in closures_of(state, now).on(nodes):
        if reservation.start < ends and now < reservation.end and job.user not in reservation.users:
            begins = format_duration(max(0.0, reservation.start - now))
            detail = (
                f"the node is reserved in {begins} ({reservation.name}), when the job may still run, and it can be "
                "neither moved nor stopped: give it a --time that ends before"
            )
            there = sorted(set(reservation.nodes).intersection(nodes))
            refusals += [Refusal(Reason.NODE_RESERVED, node=node, job=job.name, detail=detail) for node in there]
    return tuple(refusals)


def for_reader(state: State, refusal: Refusal, now: float) -> Refusal:
    """Return why a job does not start, for its user: how long a reservation lasts that keeps it out. The job itself is
    not named, for it is the one that the user has asked about."""
    if refusal.reason is not Reason.NODE_RESERVED:
        return refusal
    node = state.nodes.get(refusal.node)
    lasting = state.reservations.get(node.reservation) if node is not None and node.reserved_for else None
    more = f" for another {format_duration(max(0.0, lasting.end - now))}" if lasting is not None else ""
    return replace(refusal, job="", detail=refusal.detail + more)


def reached_by(state: State, job: JobRecord, spec: JobSpec, now: float) -> str:
    """Return why a gang may not have a new time limit: it would run into a reservation that the old one avoids."""
    gang = state.gangs.get(job.epoch)
    if gang is None or not state.reservations:
        return ""
    before = {one.node for one in start_rules(state, job, gang.nodes, now)}
    reached = start_rules(state, replace(job, spec=spec), gang.nodes, now)
    found = next((one.detail for one in reached if one.node not in before), "")
    return found and f"{job.name} cannot have this time limit: {found}"


def may_stay(state: State, job: JobRecord, name: str) -> bool:
    """Return whether a running job need not leave for the reservation of this name: its time limit ends it before, or
    its user is one of the reservation."""
    reservation, ends = state.reservations.get(name), ending.ends_at(state, job)
    if reservation is None:
        return False
    return job.user in reservation.users or (ends is not None and ends <= reservation.start)
