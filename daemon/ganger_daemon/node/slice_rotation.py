"""Time slicing on this node: leads its time-slice groups, and lets each of its gangs run or parks it, by the decisions
of `ganger.protocol.slice_rotation`. An order is noted before it is obeyed, so a restarted daemon continues from there.
A gang runs on its devices only once this daemon has seen the others off them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from ganger.agent.v1 import agent_pb2, peer_pb2
from ganger.protocol import gang_orders
from ganger.protocol.gang_orders import DesiredOrder, OrderIntent, ParkLevel
from ganger.protocol.group_rotation import GroupRotation, SlicedGang
from ganger.protocol.slice_rotation import NO_ROW, SliceMatrix, SliceMember, SlicePosition, SliceSwitch
from ganger.wire.errors import NodeSetNotFound
from ganger.wire.times import duration, seconds
from google.protobuf import json_format

from ganger_daemon.core.gang_judgement import PartPhase
from ganger_daemon.gang.gang_context import wanted_of, with_order
from ganger_daemon.gang.local_gang import LocalGang
from ganger_daemon.node.daemon_files import make_directory, read_json, write_hint
from ganger_daemon.node.node_context import NodeContext, PeerCalls

log = logging.getLogger(__name__)

# Poll intervals while a row is being switched, and while one runs; a change on this node is handled at once.
_SWITCHING_S = 0.005
_RUNNING_S = 0.1
# Interval of requests to each member of a group of several nodes.
_ASK_S = 0.1


@dataclass
class LocalTimesliceGroup:
    """A time-slice group on this node: its rotation, and the messages that its matrices are from."""

    rotation: GroupRotation
    messages: dict[int, agent_pb2.DesiredSlices] = field(default_factory=dict)
    # Whether the newest desired set has it; else it ends.
    is_desired: bool = True
    request: asyncio.Task[None] | None = None

    @property
    def number(self) -> int:
        return self.rotation.number

    def desire(self, message: agent_pb2.DesiredSlices) -> None:
        self.messages[message.version] = message
        self.rotation.desire(_matrix_of(message))


class Rotation:
    """Time-slice groups of this node. `gangs`: its gangs; `blocked_by`: the job that still uses a gang's devices."""

    def __init__(
        self,
        host: NodeContext,
        peers: PeerCalls,
        gangs: Callable[[], Sequence[LocalGang]],
        blocked_by: Callable[[LocalGang], str],
    ) -> None:
        self._host = host
        self._peers = peers
        self._gangs = gangs
        self._blocked_by = blocked_by
        self._directory = host.paths.state / "rows"
        self._groups: dict[int, LocalTimesliceGroup] = {}
        self._news = asyncio.Event()

    # -- interface ----------------------------------------------------------------------------------------------------

    def recall(self) -> None:
        """Restore the positions that a former daemon noted."""
        for path in sorted(self._directory.glob("*.json")):
            group = self._read(path)
            if group is None:
                log.warning("notes of a time-slice group cannot be read", extra={"path": str(path)})
                continue
            self._groups[group.number] = group

    def set_desired(self, desired: Iterable[agent_pb2.DesiredSlices]) -> None:
        """Take the complete groups of a desired set. No leader counts on their gangs before `confirm_begun`."""
        for group in self._groups.values():
            group.is_desired = False
        for message in desired:
            group = self._groups.get(message.node_set) or self._new_group(message.node_set)
            self._groups[message.node_set] = group
            group.is_desired = True
            if group.messages.get(message.version) == message:
                continue
            copy = agent_pb2.DesiredSlices()
            copy.CopyFrom(message)
            group.desire(copy)
            self._note(group)
        for number in [number for number, group in self._groups.items() if not group.is_desired]:
            del self._groups[number]
            (self._directory / f"{number}.json").unlink(missing_ok=True)
        self.news()

    def confirm_begun(self) -> None:
        """Record that all gangs that came with the groups have begun here."""
        for group in self._groups.values():
            group.rotation.confirm_begun()
        self.news()

    def governs(self, gang: LocalGang, order: DesiredOrder) -> bool:
        """Return whether an order of the master for a gang here waits for the begin or end of a slice."""
        is_sliced = self._rotation_of(gang) is not None or gang.wanted.order.is_by_rotation
        return gang.launched and is_sliced and gang_orders.may_wait_for_slice(order)

    def wait_reason(self, gang: LocalGang) -> str:
        """Return what slice the launch of a gang waits for; empty if it need not wait for one."""
        rotation = self._rotation_of(gang)
        if rotation is None or rotation.is_in_turn(gang.desired.epoch):
            return ""
        return f"its turn in nodeSets/{rotation.number}"

    def share_paused(self, one: LocalGang, other: LocalGang) -> bool:
        """Return whether two gangs are time-sliced against each other and keep their device memory while parked."""
        rotation = self._rotation_of(one)
        return rotation is not None and rotation.has(other.desired.epoch) and rotation.level is ParkLevel.PAUSE

    def news(self) -> None:
        """Wake the loop: a gang came, left, began or was parked."""
        self._news.set()

    def observed(self) -> list[agent_pb2.ObservedSlices]:
        return [
            agent_pb2.ObservedSlices(
                node_set=number,
                version=group.rotation.position.version,
                known_version=max(group.rotation.matrices),
                active_slice=max(0, group.rotation.position.row),
                switch_duration=duration(round(group.rotation.switch_s, 3)),
                unable_epochs=[gang.desired.epoch for gang in self._members(group.rotation) if gang.cannot_park],
            )
            for number, group in sorted(self._groups.items())
        ]

    async def receive_order(self, message: peer_pb2.SliceOrder) -> peer_pb2.SliceMember:
        """Obey an order of a leader, or only report the state if it asks. Raises NodeSetNotFound."""
        group = self._groups.get(message.node_set)
        if group is None:
            raise NodeSetNotFound(f"nodeSets/{message.node_set} has no part on this node")
        rotation = group.rotation
        if not message.is_query:
            former = rotation.position
            if rotation.obey(position_from_wire(message), self._sliced(rotation), time.monotonic()):
                self._ordered(group, former)
                self.news()
        return state_to_wire(group.number, rotation.member(self._sliced(rotation)))

    def nodes_of(self, node_set: int) -> frozenset[str]:
        """Return the names of a group's nodes; none for an unknown group."""
        group = self._groups.get(node_set)
        matrices = {} if group is None else group.rotation.matrices
        return frozenset(name for matrix in matrices.values() for name in matrix.members)

    # -- the loop -----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Run until cancelled. A fault of one group is logged and retried; the other groups continue meanwhile."""
        while True:
            self._news.clear()
            pause = _RUNNING_S
            for group in list(self._groups.values()):
                try:
                    self._lead(group)
                    if group.rotation.is_switching:
                        pause = _SWITCHING_S
                except Exception:
                    log.exception("time-slice group not led", extra={"node_set": group.number})
            try:
                self.follow()
            except Exception:
                log.exception("time slices not followed")
            with suppress(TimeoutError):
                async with asyncio.timeout(pause if self._groups else None):
                    await self._news.wait()

    async def close(self) -> None:
        tasks = [group.request for group in self._groups.values() if group.request is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def follow(self) -> None:
        """Resume or park each time-sliced gang here, as its slice and its devices allow."""
        for gang in self._gangs():
            rotation = self._rotation_of(gang)
            if rotation is not None or gang.wanted.order.is_by_rotation:
                self._follow_gang(gang, rotation)
        for group in self._groups.values():
            self._look_at_start(group.rotation)

    # -- leading and obeying ------------------------------------------------------------------------------------------

    def _lead(self, group: LocalTimesliceGroup) -> None:
        rotation, now = group.rotation, time.monotonic()
        if group.request is None or group.request.done():
            others = rotation.due_requests(now, _ASK_S)
            if others:
                group.request = asyncio.create_task(self._request_all(group, others), name=f"node set {group.number}")
        former = rotation.position
        position = rotation.lead(self._sliced(rotation), now)
        if position is None:
            return
        if position.switch == former.switch:
            self._note(group)
        else:
            self._ordered(group, former)

    async def _request_all(self, group: LocalTimesliceGroup, others: Sequence[str]) -> None:
        """Send the present order to every member and take their reports. A report shows whether its member obeys."""
        rotation = group.rotation
        newest = group.messages[max(rotation.matrices)]
        addresses = {member.node.removeprefix("nodes/"): member.peer_address for member in newest.members}
        message = order_to_wire(group.number, rotation.position)
        message.is_query = rotation.only_asks
        states = await asyncio.gather(*[self._peers.switch_row(addresses[name], message) for name in others])
        for name, state in zip(others, states, strict=True):
            rotation.report(name, None if state is None else member_from_wire(state))
        self.news()

    def _ordered(self, group: LocalTimesliceGroup, former: SlicePosition) -> None:
        position = group.rotation.position
        self._note(group)
        # A switch to another version of the matrix is worth a line.
        log.log(
            logging.DEBUG if position.version == former.version else logging.INFO,
            "row switched",
            extra={
                "node_set": group.number,
                "row": position.row,
                "version": position.version,
                "sequence": position.switch.sequence,
                "former_row": former.row,
                "switch_seconds": round(group.rotation.switch_s, 3),
            },
        )
        self._host.changed()

    def _follow_gang(self, gang: LocalGang, rotation: GroupRotation | None) -> None:
        if not gang.launched or gang.stop_wanted or gang.phase is PartPhase.ENDED:
            return
        wanted = gang_orders.next_order(
            wanted_of(gang.master_desired),
            gang.wanted,
            None if rotation is None else rotation.slice_of(gang.desired.epoch),
            gang.phase is PartPhase.PARKED,
            gang.parts.boundary.peer_agreement,
            lambda: bool(self._blocked_by(gang)),
        )
        if wanted is not None and wanted.order > gang.wanted.order:
            gang.apply_order(with_order(gang.master_desired, wanted))

    def _look_at_start(self, rotation: GroupRotation) -> None:
        """Record the time when all gangs of the row step, and the duration of the switch before it."""
        if rotation.begin(self._sliced(rotation), time.monotonic()):
            dead_s = self._dead_s(rotation)
            if dead_s is not None:
                rotation.note_switch(dead_s)
            self._host.changed()

    def _dead_s(self, rotation: GroupRotation) -> float | None:
        """Return how long devices here did no step at the last switch, in seconds: from the last step of the gangs that
        left to the begin of the first step of those that came. None if no gang came for another. A gang that was parked
        before the switch did not leave at it, and one that ran did not come."""
        position, members = rotation.position, self._members(rotation)
        left = [
            gang
            for gang in members
            if gang.desired.epoch in rotation.ran and position.stops.get(gang.desired.epoch) == position.switch
        ]
        found = []
        for gang in members:
            if gang.desired.epoch in rotation.ran or not rotation.is_in_turn(gang.desired.epoch):
                continue
            last = max([one.parts.step_rate.last_step_ns for one in left if collide(one, gang)], default=0)
            rate = gang.parts.step_rate
            if last and rate.first_step_ns > last:
                found.append((rate.first_step_ns - last) / 1e9 - rate.iteration_s)
        return max(0.0, *found) if found else None

    # -- what is here -------------------------------------------------------------------------------------------------

    def _members(self, rotation: GroupRotation) -> list[LocalGang]:
        return [gang for gang in self._gangs() if rotation.has(gang.desired.epoch)]

    def _sliced(self, rotation: GroupRotation) -> list[SlicedGang]:
        return [self._sliced_gang(gang) for gang in self._members(rotation)]

    def _sliced_gang(self, gang: LocalGang) -> SlicedGang:
        return SlicedGang(
            gang.desired.epoch,
            OrderIntent(gang.master_desired.intent),
            gang.launched,
            gang.launched and gang.phase is PartPhase.RUNNING,
            gang.phase is PartPhase.PARKED,
            gang.phase is PartPhase.ENDED,
            gang.launched and gang.wanted.intent is OrderIntent.RUN and gang.report.judged.order is gang.wanted,
            lambda: gang.report.has_stepped,
            lambda: bool(self._blocked_by(gang)),
        )

    def _rotation_of(self, gang: LocalGang) -> GroupRotation | None:
        groups = self._groups.values()
        return next((group.rotation for group in groups if group.rotation.has(gang.desired.epoch)), None)

    def _new_group(self, number: int) -> LocalTimesliceGroup:
        rotation = GroupRotation(number, self._host.node, time.monotonic())
        rotation.continue_from(
            (SliceSwitch(gang.wanted.order.set_epoch, gang.wanted.order.local_sequence), gang.wanted.stop_sequence)
            for gang in self._gangs()
        )
        return LocalTimesliceGroup(rotation)

    def _note(self, group: LocalTimesliceGroup) -> None:
        make_directory(self._directory)
        position = group.rotation.position
        group.messages = {version: one for version, one in group.messages.items() if version in group.rotation.matrices}
        matrices = [json_format.MessageToDict(message) for _, message in sorted(group.messages.items())]
        in_turn = [position.regular_row, position.owed, position.quantum_s]
        order = json_format.MessageToDict(order_to_wire(group.number, position))
        fields = {"position": order, "has_row": position.row != NO_ROW, "in_turn": in_turn}
        write_hint(self._directory / f"{group.number}.json", {**fields, "matrices": matrices})

    def _read(self, path: Path) -> LocalTimesliceGroup | None:
        fields = read_json(path)
        try:
            order = json_format.ParseDict(fields["position"], peer_pb2.SliceOrder())
            position = position_from_wire(order)
            if not fields["has_row"]:
                position = replace(position, row=NO_ROW)
            row, owed, quantum = fields["in_turn"]
            position = replace(position, regular_row=int(row), owed=int(owed), quantum_s=float(quantum))
            matrices = [json_format.ParseDict(one, agent_pb2.DesiredSlices()) for one in fields["matrices"]]
        except (KeyError, TypeError, ValueError, json_format.ParseError):
            return None
        group = LocalTimesliceGroup(GroupRotation(order.node_set, self._host.node, time.monotonic(), position))
        for message in matrices:
            group.desire(message)
        return group if matrices else None


def collide(one: LocalGang, other: LocalGang) -> bool:
    """Return whether two gangs have a device in common that they do not both share, by the master's newest desired
    state: the order that one still obeys may be from a time when they were co-located."""
    first, second = one.master_desired.claim, other.master_desired.claim
    return bool(first.device_mask & second.device_mask & ~(first.shared_mask & second.shared_mask))


def _matrix_of(message: agent_pb2.DesiredSlices) -> SliceMatrix:
    return SliceMatrix(
        message.version,
        tuple(tuple(row.epochs) for row in message.slices),
        seconds(message.quantum),
        message.level,
        tuple(member.node.removeprefix("nodes/") for member in message.members),
        message.set_epoch,
    )


def order_to_wire(number: int, position: SlicePosition) -> peer_pb2.SliceOrder:
    stops = [
        peer_pb2.Stop(epoch=epoch, set_epoch=stop.set_epoch, sequence=stop.sequence)
        for epoch, stop in sorted(position.stops.items())
    ]
    return peer_pb2.SliceOrder(
        node_set=number,
        set_epoch=position.switch.set_epoch,
        sequence=position.switch.sequence,
        version=position.version,
        slice=max(0, position.row),
        stops=stops,
    )


def position_from_wire(message: peer_pb2.SliceOrder) -> SlicePosition:
    """Return the position of an order; one with version 0 has no row."""
    stops = {stop.epoch: SliceSwitch(stop.set_epoch, stop.sequence) for stop in message.stops}
    row = message.slice if message.version else NO_ROW
    return SlicePosition(SliceSwitch(message.set_epoch, message.sequence), message.version, row, stops, row)


def state_to_wire(number: int, member: SliceMember) -> peer_pb2.SliceMember:
    return peer_pb2.SliceMember(
        order=order_to_wire(number, member.position),
        known_version=member.known_version,
        started=member.started,
        alive_epochs=sorted(member.alive),
        running_epochs=sorted(member.running),
        switch_duration=duration(member.switch_s),
        unstarted_epochs=sorted(member.unstarted),
        blocked=member.blocked,
        resting_epochs=sorted(member.resting),
    )


def member_from_wire(message: peer_pb2.SliceMember) -> SliceMember:
    return SliceMember(
        position_from_wire(message.order),
        message.known_version,
        message.started,
        frozenset(message.alive_epochs),
        frozenset(message.running_epochs),
        seconds(message.switch_duration),
        frozenset(message.unstarted_epochs),
        message.blocked,
        frozenset(message.resting_epochs),
    )
