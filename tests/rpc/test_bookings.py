"""CreateBooking, ListBookings, DeleteBooking: what a booking says, pages, and what a restart keeps."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import grpc
import pytest
from ganger.v1 import node_pb2
from ganger.wire import times
from ganger.wire.errors import from_rpc_error
from rpc.kit import Served, Speaker, serving, until


def booking(name: str, nodes: str = "n1", start: float = 0.0, **changes: object) -> node_pb2.Booking:
    begin = time.time() + start
    span = {"start_time": times.timestamp(begin), "end_time": times.timestamp(begin + 3_600.0)}
    return node_pb2.Booking(name=name, nodes=nodes, **span, **changes)  # type: ignore[arg-type]


async def create(served: Served, wanted: node_pb2.Booking) -> node_pb2.Booking:
    return await served.nodes.CreateBooking(node_pb2.CreateBookingRequest(booking=wanted))


def test_a_booking_closes_its_nodes_survives_a_restart_and_is_deleted(tmp_path: Path) -> None:
    async def story() -> None:
        async with serving(tmp_path) as served:
            for number in (1, 2, 3):
                await Speaker(served, f"n{number}").join()
            made = await create(served, booking("upgrade", "n[1-2]", reason="disks"))
            assert (made.nodes, made.phase, bool(made.user)) == ("n[1-2]", node_pb2.Booking.PHASE_ACTIVE, True)
            assert times.seconds(made.lead) == 600.0
            node = await served.nodes.GetNode(node_pb2.GetNodeRequest(name="nodes/n1"))
            assert node.state == node_pb2.Node.STATE_DRAINING
            assert "reserved: upgrade" in node.state_reason
            assert node.booking == "upgrade"
            await create(served, booking("course", "n3", 7_200.0, users=["ann", "bob"], lead=times.duration(60.0)))
        async with serving(tmp_path) as served:
            first = await served.nodes.ListBookings(node_pb2.ListBookingsRequest(page_size=1))
            request = node_pb2.ListBookingsRequest(page_token=first.next_page_token)
            found = [*first.bookings, *(await served.nodes.ListBookings(request)).bookings]
            assert [(one.name, one.phase, list(one.users)) for one in found] == [
                ("course", node_pb2.Booking.PHASE_AHEAD, ["ann", "bob"]),
                ("upgrade", node_pb2.Booking.PHASE_ACTIVE, []),
            ]
            await served.nodes.DeleteBooking(node_pb2.DeleteBookingRequest(name="upgrade"))
            await Speaker(served, "n1").join()
            await until(lambda: served.master.writer.state.nodes["n1"].takes_gangs)

    asyncio.run(story())


def test_a_booking_begins_by_itself(tmp_path: Path) -> None:
    async def story() -> None:
        async with serving(tmp_path) as served:
            await Speaker(served, "n1").join()
            await create(served, booking("soon", start=1.0, lead=times.duration(0.0)))
            assert served.master.writer.state.nodes["n1"].takes_gangs
            await until(lambda: not served.master.writer.state.nodes["n1"].takes_gangs)

    asyncio.run(story())


@pytest.mark.parametrize(
    ("wanted", "code", "reason"),
    [
        (booking("b", "n[2-1]"), grpc.StatusCode.INVALID_ARGUMENT, "REQUEST_INVALID"),
        (booking("b", "n9"), grpc.StatusCode.NOT_FOUND, "NODE_NOT_FOUND"),
        (booking("b", ""), grpc.StatusCode.INVALID_ARGUMENT, "BOOKING_INVALID"),
        (booking("known", "n1", 9_999.0), grpc.StatusCode.FAILED_PRECONDITION, "BOOKING_EXISTS"),
        (booking("b"), grpc.StatusCode.FAILED_PRECONDITION, "BOOKING_CONFLICT"),
    ],
)
def test_a_booking_that_cannot_be_is_refused(
    tmp_path: Path, wanted: node_pb2.Booking, code: grpc.StatusCode, reason: str
) -> None:
    async def story() -> None:
        async with serving(tmp_path) as served:
            await Speaker(served, "n1").join()
            await create(served, booking("known"))
            with pytest.raises(grpc.RpcError) as refused:
                await create(served, wanted)
            assert (refused.value.code(), from_rpc_error(refused.value).reason) == (code, reason)

    asyncio.run(story())
