"""Nodes that operators select, as messages: partitions with what their jobs hold, and reservations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Final

from ganger.job_state import JobState
from ganger.text import compress_names, expand_names
from ganger.v1 import node_pb2
from ganger.wire import errors, times

from ganger_master.core.commands import UpdateReservation
from ganger_master.core.gang_model import Gang
from ganger_master.core.job_model import JobRecord
from ganger_master.core.node_model import ListChange, Reservation
from ganger_master.core.reservations import ReservationPhase, phase_of
from ganger_master.core.state import State


def partitions_to_wire(
    state: State, jobs: Iterable[JobRecord], gangs: Mapping[int, Gang]
) -> node_pb2.ListPartitionsResponse:
    """Return all partitions, in the order of the settings. jobs: those that are kept. gangs: by epoch."""
    by_partition: dict[str, list[JobRecord]] = {name: [] for name in state.partitions}
    for job in jobs if by_partition else ():
        if not job.state.is_finished and job.partition.name in by_partition:
            by_partition[job.partition.name].append(job)
    found = [_partition_to_wire(state, name, there, gangs) for name, there in by_partition.items()]
    return node_pb2.ListPartitionsResponse(partitions=found)


def absent_nodes(state: State) -> Iterator[tuple[str, str]]:
    """Yield the partitions whose settings name nodes that have not joined, with the first of these nodes as ranges."""
    for name in state.partitions:
        if absent := state.partitions.absent(name, state.view.slots):
            yield name, compress_names(absent[:_NAMES_MOST])


def _partition_to_wire(
    state: State, name: str, jobs: Sequence[JobRecord], gangs: Mapping[int, Gang]
) -> node_pb2.Partition:
    """Return a partition with what is free there. jobs: its jobs that have not ended. gangs: by epoch."""
    partition, view = state.partitions[name], state.view
    slots = [slot for slot, node in enumerate(view.nodes) if node and view.topologies[slot].is_in(name)]
    available = [slot for slot in slots if view.available[slot]]
    # A device shared by several gangs counts once.
    held: dict[str, int] = {}
    for job in jobs:
        gang = gangs.get(job.epoch)
        for claim in () if gang is None else gang.held:
            held[claim.node] = held.get(claim.node, 0) | claim.device_mask
    absent = state.partitions.absent(name, view.slots)
    states = Counter([job.state for job in jobs])
    return node_pb2.Partition(
        name=name,
        is_default=name == state.partitions.default,
        nodes=compress_names([view.nodes[slot] for slot in slots])[:_RANGES_MOST],
        node_count=len(slots),
        available_node_count=len(available),
        devices=sum([view.topologies[slot].devices for slot in slots]),
        devices_free=sum([view.free[slot].bit_count() for slot in available]),
        devices_held=sum([mask.bit_count() for mask in held.values()]),
        jobs_pending=states[JobState.PENDING],
        jobs_holding=states[JobState.HOLDING],
        time_limit=None if partition.time_s is None else times.duration(partition.time_s),
        gpus_limit=partition.gpus,
        gpus_per_user_limit=partition.gpus_per_user,
        gpus_per_job_limit=partition.gpus_per_job,
        priority=partition.priority,
        preemptible=partition.preemptible,
        users=partition.users[:_NAMES_MOST],
        teams=partition.teams[:_NAMES_MOST],
        absent_nodes=compress_names(absent[:_NAMES_MOST]),
        absent_node_count=len(absent),
    )


# Of a partition's nodes, and of users and teams that may use it; names without numbers make no ranges.
_RANGES_MOST: Final = 20_000
_NAMES_MOST: Final = 1_000


# -- reservations ------------------------------------------------------------------------------------------------------

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
    users = _users(message.users)
    if message.maintenance and users:
        raise errors.RequestInvalid("users: a reservation for maintenance has none")
    return UpdateReservation(
        message.name,
        _nodes(message.nodes) or None,
        times.unix_s(message.start_time) if message.HasField("start_time") else None,
        times.seconds(message.duration) if message.HasField("duration") else None,
        users if users or message.maintenance else None,
        message.reason if message.HasField("reason") else None,
        times.seconds(message.lead) if message.HasField("lead") else None,
        nodes_change=_list_change(message.nodes_change),
        users_change=_list_change(message.users_change),
    )


def _list_change(change: int) -> ListChange:
    try:
        return ListChange(change)
    except ValueError:
        raise errors.RequestInvalid(f"change {change} of a list is unknown here: the sender is newer") from None


def _nodes(ranges: str) -> tuple[str, ...]:
    try:
        return tuple(sorted(expand_names(ranges) if ranges else ()))
    except ValueError as error:
        raise errors.RequestInvalid(f"nodes: {error}") from None


def _users(users: Collection[str]) -> tuple[str, ...]:
    if len(users) > _USERS_MOST:
        raise errors.RequestInvalid(f"a reservation has at most {_USERS_MOST} users")
    return tuple(dict.fromkeys(users))


def reservation_to_wire(reservation: Reservation, now: float) -> node_pb2.Reservation:
    return node_pb2.Reservation(
        name=reservation.name,
        nodes=compress_names(reservation.nodes),
        start_time=times.timestamp(reservation.start),
        end_time=times.timestamp(reservation.end),
        users=reservation.users,
        reason=reservation.reason,
        lead=times.duration(reservation.lead_s),
        user=reservation.user,
        phase=_PHASES[phase_of(reservation, now)],
    )
