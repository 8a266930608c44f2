"""Reservations as messages, both ways."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from ganger.node_ranges import compressed, expanded
from ganger.v1 import node_pb2
from ganger.wire import errors, times

from ganger_master.core.commands import UpdateReservation
from ganger_master.core.node_model import Reservation
from ganger_master.core.reservations import ReservationPhase, phase_of

_LEAD_S: Final = 600.0
_USERS_MOST: Final = 1_000
_PHASES: Final = {
    ReservationPhase.AHEAD: node_pb2.Reservation.PHASE_AHEAD,
    ReservationPhase.EMPTYING: node_pb2.Reservation.PHASE_EMPTYING,
    ReservationPhase.ACTIVE: node_pb2.Reservation.PHASE_ACTIVE,
    ReservationPhase.OVER: node_pb2.Reservation.PHASE_UNSPECIFIED,
}


def reservation_from_wire(message: node_pb2.Reservation) -> Reservation:
    """Return the reservation, which is not yet judged. Raises RequestInvalid."""
    return Reservation(
        message.name,
        _nodes(message.nodes),
        times.unix_s(message.start_time),
        times.unix_s(message.end_time),
        _users(message.users),
        message.reason,
        times.seconds(message.lead) if message.HasField("lead") else _LEAD_S,
    )


def reservation_update_from_wire(message: node_pb2.UpdateReservationRequest) -> UpdateReservation:
    """Return the update, which is not yet judged. Raises RequestInvalid."""
    return UpdateReservation(
        message.name,
        _nodes(message.nodes) or None,
        times.unix_s(message.start_time) if message.HasField("start_time") else None,
        times.seconds(message.duration) if message.HasField("duration") else None,
        _users(message.users) or None,
        message.reason if message.HasField("reason") else None,
        times.seconds(message.lead) if message.HasField("lead") else None,
    )


def _nodes(ranges: str) -> tuple[str, ...]:
    try:
        return tuple(sorted(expanded(ranges) if ranges else ()))
    except ValueError as error:
        raise errors.RequestInvalid(f"nodes: {error}") from None


def _users(users: Collection[str]) -> tuple[str, ...]:
    if len(users) > _USERS_MOST:
        raise errors.RequestInvalid(f"a reservation has at most {_USERS_MOST} users")
    return tuple(dict.fromkeys(users))


def reservation_to_wire(reservation: Reservation, now: float) -> node_pb2.Reservation:
    return node_pb2.Reservation(
        name=reservation.name,
        nodes=compressed(reservation.nodes),
        start_time=times.timestamp(reservation.start),
        end_time=times.timestamp(reservation.end),
        users=reservation.users,
        reason=reservation.reason,
        lead=times.duration(reservation.lead_s),
        user=reservation.user,
        phase=_PHASES[phase_of(reservation, now)],
    )
