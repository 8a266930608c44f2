"""Bookings as messages, both ways."""

from __future__ import annotations

from typing import Final

from ganger.node_ranges import compressed, expanded
from ganger.v1 import node_pb2
from ganger.wire import errors, times

from ganger_master.core.bookings import BookingPhase, phase_of
from ganger_master.core.node_model import Booking

_LEAD_S: Final = 600.0
_USERS_MOST: Final = 1_000
_PHASES: Final = {
    BookingPhase.AHEAD: node_pb2.Booking.PHASE_AHEAD,
    BookingPhase.EMPTYING: node_pb2.Booking.PHASE_EMPTYING,
    BookingPhase.ACTIVE: node_pb2.Booking.PHASE_ACTIVE,
    BookingPhase.OVER: node_pb2.Booking.PHASE_UNSPECIFIED,
}


def booking_from_wire(message: node_pb2.Booking) -> Booking:
    """Return the booking, which is not yet judged. Raises RequestInvalid."""
    if len(message.users) > _USERS_MOST:
        raise errors.RequestInvalid(f"a booking has at most {_USERS_MOST} users")
    try:
        nodes = expanded(message.nodes) if message.nodes else ()
    except ValueError as error:
        raise errors.RequestInvalid(f"nodes: {error}") from None
    return Booking(
        message.name,
        tuple(sorted(nodes)),
        times.unix_s(message.start_time),
        times.unix_s(message.end_time),
        tuple(dict.fromkeys(message.users)),
        message.reason,
        times.seconds(message.lead) if message.HasField("lead") else _LEAD_S,
    )


def booking_to_wire(booking: Booking, now: float) -> node_pb2.Booking:
    return node_pb2.Booking(
        name=booking.name,
        nodes=compressed(booking.nodes),
        start_time=times.timestamp(booking.start),
        end_time=times.timestamp(booking.end),
        users=booking.users,
        reason=booking.reason,
        lead=times.duration(booking.lead_s),
        user=booking.user,
        phase=_PHASES[phase_of(booking, now)],
    )
