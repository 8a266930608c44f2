"""Calls that create, list, update and delete reservations: what one says, pages, and what a restart keeps."""

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


def reservation(name: str, nodes: str = "n1", start: float = 0.0, **changes: object) -> node_pb2.Reservation:
    begin = time.time() + start
    span = {"start_time": times.timestamp(begin), "end_time": times.timestamp(begin + 3_600.0)}
    return node_pb2.Reservation(name=name, nodes=nodes, **span, **changes)  # type: ignore[arg-type]


async def create(served: Served, wanted: node_pb2.Reservation) -> node_pb2.Reservation:
    return await served.nodes.CreateReservation(node_pb2.CreateReservationRequest(reservation=wanted))


def test_a_reservation_closes_its_nodes_survives_a_restart_and_is_deleted(tmp_path: Path) -> None:
    async def story() -> None:
        async with serving(tmp_path) as served:
            for number in (1, 2, 3):
                await Speaker(served, f"n{number}").join()
            made = await create(served, reservation("upgrade", "n[1-2]", reason="disks"))
            assert (made.nodes, made.phase, bool(made.user)) == ("n[1-2]", node_pb2.Reservation.PHASE_ACTIVE, True)
            assert times.seconds(made.lead) == 600.0
            node = await served.nodes.GetNode(node_pb2.GetNodeRequest(name="nodes/n1"))
            assert node.state == node_pb2.Node.STATE_DRAINING
            assert "reserved: upgrade" in node.state_reason
            assert node.reservation == "upgrade"
            await create(served, reservation("course", "n3", 7_200.0, users=["ann"], lead=times.duration(60.0)))
            update = node_pb2.UpdateReservationRequest(name="course", users=["ann", "bob"])
            changed = await served.nodes.UpdateReservation(update)
            assert (changed.nodes, list(changed.users), changed.user) == ("n3", ["ann", "bob"], made.user)
            assert times.unix_s(changed.end_time) - times.unix_s(changed.start_time) == pytest.approx(3_600.0)
            more = node_pb2.UpdateReservationRequest(
                name="course", nodes="n2", nodes_change=node_pb2.UpdateReservationRequest.LIST_CHANGE_ADD
            )
            assert (await served.nodes.UpdateReservation(more)).nodes == "n[2-3]"
            more.nodes_change = 9  # type: ignore[assignment]
            with pytest.raises(grpc.RpcError, match="change 9 of a list is unknown here"):
                await served.nodes.UpdateReservation(more)
        async with serving(tmp_path) as served:
            first = await served.nodes.ListReservations(node_pb2.ListReservationsRequest(page_size=1))
            request = node_pb2.ListReservationsRequest(page_token=first.next_page_token)
            found = [*first.reservations, *(await served.nodes.ListReservations(request)).reservations]
            assert [(one.name, one.phase, list(one.users)) for one in found] == [
                ("course", node_pb2.Reservation.PHASE_AHEAD, ["ann", "bob"]),
                ("upgrade", node_pb2.Reservation.PHASE_ACTIVE, []),
            ]
            await served.nodes.DeleteReservation(node_pb2.DeleteReservationRequest(name="upgrade"))
            await Speaker(served, "n1").join()
            await until(lambda: served.master.writer.state.nodes["n1"].takes_gangs)

    asyncio.run(story())


def test_a_reservation_begins_by_itself(tmp_path: Path) -> None:
    async def story() -> None:
        async with serving(tmp_path) as served:
            await Speaker(served, "n1").join()
            await create(served, reservation("soon", start=1.0, lead=times.duration(0.0)))
            assert served.master.writer.state.nodes["n1"].takes_gangs
            await until(lambda: not served.master.writer.state.nodes["n1"].takes_gangs)

    asyncio.run(story())


@pytest.mark.parametrize(
    ("wanted", "code", "reason"),
    [
        (reservation("b", "n[2-1]"), grpc.StatusCode.INVALID_ARGUMENT, "REQUEST_INVALID"),
        (reservation("b", "n9"), grpc.StatusCode.NOT_FOUND, "NODE_NOT_FOUND"),
        (reservation("b", ""), grpc.StatusCode.INVALID_ARGUMENT, "RESERVATION_INVALID"),
        (reservation("known", "n1", 9_999.0), grpc.StatusCode.FAILED_PRECONDITION, "RESERVATION_EXISTS"),
        (reservation("b"), grpc.StatusCode.FAILED_PRECONDITION, "RESERVATION_CONFLICT"),
    ],
)
def test_a_reservation_that_cannot_be_is_refused(
    tmp_path: Path, wanted: node_pb2.Reservation, code: grpc.StatusCode, reason: str
) -> None:
    async def story() -> None:
        async with serving(tmp_path) as served:
            await Speaker(served, "n1").join()
            await create(served, reservation("known"))
            with pytest.raises(grpc.RpcError) as refused:
                await create(served, wanted)
            assert (refused.value.code(), from_rpc_error(refused.value).reason) == (code, reason)

    asyncio.run(story())
