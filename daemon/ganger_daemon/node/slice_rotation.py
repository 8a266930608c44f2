"""Time slicing on this node: leads the time-slice groups of this node, and lets each of its gangs run or parks it.

The decisions are in `ganger.protocol.slice_rotation`. An order is noted before it is obeyed, so a restarted daemon
continues from there, with or without a master. Whatever is ordered, a gang runs on its devices only once this daemon
has seen the others off them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median_low
from typing import TYPE_CHECKING, Any

from ganger.agent.v1 import agent_pb2, peer_pb2
from ganger.protocol import gang_orders
from ganger.protocol import slice_rotation as core
from ganger.protocol.gang_orders import DesiredOrder, GangSlice, OrderIntent, ParkLevel
from ganger.protocol.slice_rotation import NO_ROW, SliceMatrix, SliceMember, SlicePosition, SliceSwitch
from ganger.wire.errors import NodeSetNotFound
from google.protobuf import json_format

from ganger_daemon.core.outcomes import PartPhase
from ganger_daemon.gang.desired_messages import wanted_of, with_order
from ganger_daemon.gang.gang_context import Peers
from ganger_daemon.node.node_context import NodeContext
from ganger_daemon.node.safe_files import make_directory, read_json, write_hint

if TYPE_CHECKING:
    from ganger_daemon.gang.gang import LocalGang

log = logging.getLogger(__name__)

# Poll intervals while a row is being switched, and while one runs; a change on this node is handled at once.
_SWITCHING_SECONDS = 0.005
_RUNNING_SECONDS = 0.1
# Interval of requests to each member of a group of several nodes.
_ASK_SECONDS = 0.1
# The median of so many switches counts, of two the shorter one. Else one late switch would keep quanta long until a
# third is measured, which takes such a quantum.
_SWITCHES = 5


@dataclass
class LocalTimesliceGroup:
    """State of a time-slice group on this node. Times are seconds of one monotonic clock."""

    number: int
    position: SlicePosition = field(default_factory=SlicePosition)
    matrices: dict[int, agent_pb2.DesiredRows] = field(default_factory=dict)
    # Newest version whose gangs have all begun here; zero until this daemon has received a desired set.
    known_version: int = 0
    # Whether the newest desired set has it; else it ends.
    is_desired: bool = True
    ordered_at: float = 0.0
    started_at: float | None = None
    # A gang of the row was launched for its slice: the time of a launch is not that of a switch.
    launches: bool = False
    # Epochs that ran here when the present row was ordered.
    ran: frozenset[int] = frozenset()
    switches: list[float] = field(default_factory=list)
    reports: dict[str, SliceMember | None] = field(default_factory=dict)
    requested_at: float = 0.0
    request: asyncio.Task[None] | None = None

    @property
    def rows(self) -> dict[int, SliceMatrix]:
        return {version: _rows_of(message) for version, message in self.matrices.items()}

    @property
    def newest(self) -> SliceMatrix:
        return _rows_of(self.matrices[max(self.matrices)])

    @property
    def active(self) -> SliceMatrix | None:
        message = self.matrices.get(self.position.version)
        return None if message is None else _rows_of(message)

    @property
    def switch_s(self) -> float:
        return median_low(self.switches) if self.switches else 0.0

    @property
    def epochs(self) -> frozenset[int]:
        return frozenset().union(*[rows.epochs for rows in self.rows.values()])


class Rotation:
    """Time-slice groups of this node. `gangs`: the `GangSet` of this node."""

    def __init__(self, host: NodeContext, peers: Peers, gangs: Any) -> None:
        self._host = host
        self._peers = peers
        self._gangs = gangs
        self._directory = host.paths.state / "rows"
        self._groups: dict[int, LocalTimesliceGroup] = {}
        self._news = asyncio.Event()

    # -- interface ----------------------------------------------------------------------------------------------------

    def recall(self) -> None:
        """Restore the positions that a former daemon noted."""
        for path in sorted(self._directory.glob("*.json")):
            group = _read_group(path)
            if group is None:
                log.warning("notes of a node set cannot be read", extra={"path": str(path)})
                continue
            group.ordered_at = time.monotonic()
            group.launches = True
            self._groups[group.number] = group

    def set_desired(self, told: Iterable[agent_pb2.DesiredRows]) -> None:
        """Take the complete groups of a desired set. Their gangs begin later: no leader counts on them before
        `confirm_begun`."""
        now = time.monotonic()
        for group in self._groups.values():
            group.is_desired = False
        for message in told:
            group = self._groups.get(message.node_set) or self._new_group(message.node_set, now)
            self._groups[message.node_set] = group
            group.is_desired = True
            known = group.matrices.get(message.version)
            if known == message:
                continue
            copy = agent_pb2.DesiredRows()
            copy.CopyFrom(message)
            group.matrices[message.version] = copy
            self._note(group)
        for number in [number for number, group in self._groups.items() if not group.is_desired]:
            del self._groups[number]
            (self._directory / f"{number}.json").unlink(missing_ok=True)
        self.news()

    def confirm_begun(self) -> None:
        """Record that all gangs that came with the groups have begun here."""
        for group in self._groups.values():
            group.known_version = max(group.matrices)
        self.news()

    def governs(self, gang: LocalGang, told: DesiredOrder) -> bool:
        """Return whether an order of the master for a gang here waits for the begin or end of a slice."""
        takes_turns = self._group_of(gang.desired.epoch) is not None or gang.wanted.order.is_by_rotation
        return gang.launched and takes_turns and gang_orders.may_wait_for_slice(told)

    def wait_reason(self, gang: LocalGang) -> str:
        """Return what slice the launch of a gang waits for; empty if it need not wait for one."""
        group = self._group_of(gang.desired.epoch)
        if group is None or core.is_running(group.position, group.active, gang.desired.epoch):
            return ""
        return f"its turn in nodeSets/{group.number}"

    def share_paused(self, one: LocalGang, other: LocalGang) -> bool:
        """Return whether two gangs are time-sliced against each other and keep their device memory while parked."""
        group = self._group_of(one.desired.epoch)
        if group is None or self._group_of(other.desired.epoch) is not group:
            return False
        return _level_of(group) is ParkLevel.PAUSE

    def news(self) -> None:
        """Wake the loop: a gang came, left, began or was parked."""
        self._news.set()

    def observed(self) -> list[agent_pb2.ObservedRows]:
        return [
            agent_pb2.ObservedRows(
                node_set=number,
                version=group.position.version,
                known_version=max(group.matrices),
                row=max(0, group.position.row),
                switch_seconds=round(group.switch_s, 3),
                unable_epochs=[gang.desired.epoch for gang in self._members(group) if gang.cannot_park],
            )
            for number, group in sorted(self._groups.items())
        ]

    async def receive_order(self, message: peer_pb2.RowOrder) -> peer_pb2.RowState:
        """Obey an order of a leader, or only report the state if it asks. Raises NodeSetNotFound."""
        group = self._groups.get(message.node_set)
        if group is None:
            raise NodeSetNotFound(f"nodeSets/{message.node_set} has no part on this node")
        if not message.ask:
            self._follow_order(group, position_from_wire(message))
        return state_to_wire(group.number, self._member(group))

    def nodes_of(self, node_set: int) -> frozenset[str]:
        """Return the names of a group's nodes; none for an unknown group."""
        group = self._groups.get(node_set)
        matrices = {} if group is None else group.matrices
        return frozenset(one.node.removeprefix("nodes/") for rows in matrices.values() for one in rows.members)

    # -- the loop -----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Run until cancelled. A fault of one group is logged and retried; the other groups go on meanwhile."""
        while True:
            self._news.clear()
            pause = _RUNNING_SECONDS
            for group in list(self._groups.values()):
                try:
                    self._lead(group)
                    if group.started_at is None:
                        pause = _SWITCHING_SECONDS
                except Exception:
                    log.exception("node set not led", extra={"node_set": group.number})
            try:
                self.follow()
            except Exception:
                log.exception("turns not followed")
            try:
                await asyncio.wait_for(self._news.wait(), pause if self._groups else None)
            except TimeoutError:
                pass

    async def close(self) -> None:
        tasks = [group.request for group in self._groups.values() if group.request is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def follow(self) -> None:
        """Resume or park each time-sliced gang here, as its slice and its devices allow."""
        for gang in self._gangs.all():
            group = self._group_of(gang.desired.epoch)
            if group is not None or gang.wanted.order.is_by_rotation:
                self._follow_gang(gang, group)
        for group in self._groups.values():
            self._look_at_start(group)

    # -- leading ------------------------------------------------------------------------------------------------------

    def _lead(self, group: LocalTimesliceGroup) -> None:
        newest = group.newest
        if newest.leader != self._host.node:
            return
        now = time.monotonic()
        group.reports[self._host.node] = self._member(group)
        others = [name for name in newest.members if name != self._host.node]
        if others:
            self._request_reports(group, others, now)
        if any(said is not None and said.blocked for said in group.reports.values()):
            group.ordered_at = now
        began = group.started_at
        if any(said is None or not said.started for name, said in group.reports.items() if name in others):
            began = None
        position = core.lead(
            group.position,
            group.rows,
            group.reports,
            now - group.ordered_at,
            None if began is None else now - began,
        )
        if position is None:
            return
        if position.switch == group.position.switch:
            # The next row has the same gangs: their next quantum begins.
            group.position = position
            group.ordered_at = group.started_at = now
            self._note(group)
        else:
            self._order(group, position)

    def _request_reports(self, group: LocalTimesliceGroup, others: Sequence[str], now: float) -> None:
        if group.request is not None and not group.request.done():
            return
        if now - group.requested_at < _ASK_SECONDS:
            return
        group.requested_at = now
        group.request = asyncio.create_task(self._request_all(group, others), name=f"node set {group.number}")

    async def _request_all(self, group: LocalTimesliceGroup, others: Sequence[str]) -> None:
        """Send the present order to every member and take their reports. A report shows whether its member obeys."""
        addresses = {
            member.node.removeprefix("nodes/"): member.peer_address
            for member in group.matrices[max(group.matrices)].members
        }
        message = order_to_wire(group.number, group.position)
        message.ask = group.position.switch.set_epoch < group.newest.set_epoch or group.position.row == NO_ROW
        said = await asyncio.gather(*[self._peers.switch_row(addresses[name], message) for name in others])
        for name, state in zip(others, said, strict=True):
            group.reports[name] = None if state is None else member_from_wire(state)
        self.news()

    # -- obeying ------------------------------------------------------------------------------------------------------

    def _follow_order(self, group: LocalTimesliceGroup, order: SlicePosition) -> None:
        position = core.obey(group.position, order, group.rows, group.newest.set_epoch)
        if position is not group.position:
            self._order(group, position)
            self.news()

    def _order(self, group: LocalTimesliceGroup, position: SlicePosition) -> None:
        """Note an order, then obey it."""
        former = group.position
        group.position = position
        group.matrices = {v: rows for v, rows in group.matrices.items() if v >= position.version}
        group.ordered_at, group.started_at = time.monotonic(), None
        group.launches = False
        group.ran = frozenset(gang.desired.epoch for gang in self._members(group) if _runs_here(gang))
        group.requested_at = 0.0
        self._note(group)
        # a switch to another version of the matrix is worth a line
        log.log(
            logging.DEBUG if position.version == former.version else logging.INFO,
            "row switched",
            extra={
                "node_set": group.number,
                "row": position.row,
                "version": position.version,
                "sequence": position.switch.sequence,
                "former_row": former.row,
                "switch_seconds": round(group.switch_s, 3),
            },
        )
        self._host.changed()

    def _follow_gang(self, gang: LocalGang, group: LocalTimesliceGroup | None) -> None:
        if not gang.launched or gang.stop_wanted or gang.phase is PartPhase.ENDED:
            return
        wanted = gang_orders.next_order(
            wanted_of(gang.master_desired),
            gang.wanted,
            None if group is None else _slice_of(group, gang.desired.epoch),
            gang.phase is PartPhase.PARKED,
            gang.peer_agreement,
            lambda: bool(self._gangs.blocked_by(gang)),
        )
        if wanted is not None and wanted.order > gang.wanted.order:
            gang.apply_order(with_order(gang.master_desired, wanted))

    def _look_at_start(self, group: LocalTimesliceGroup) -> None:
        """Record the time when all gangs of the row step, and the duration of the switch before it."""
        turn = [
            gang for gang in self._members(group) if core.is_running(group.position, group.active, gang.desired.epoch)
        ]
        group.launches = group.launches or any(not gang.launched or not gang.has_stepped for gang in turn)
        if group.started_at is None and all(map(_has_begun, turn)):
            group.started_at = time.monotonic()
            if not group.launches and (dead := self._dead_s(group, turn)) is not None:
                group.switches = [*group.switches, dead][-_SWITCHES:]
            self._host.changed()

    def _dead_s(self, group: LocalTimesliceGroup, turn: Sequence[LocalGang]) -> float | None:
        """Return how long devices here did no step at the last switch, in seconds: from the last step of the gangs that
        left to the begin of the first step of those that came. None if no gang came for another. A gang that was parked
        before the switch did not leave at it, and one that ran did not come."""
        members = [gang for gang in self._members(group) if gang.desired.epoch in group.ran]
        left = [gang for gang in members if group.position.stops.get(gang.desired.epoch) == group.position.switch]
        found = []
        for gang in [one for one in turn if one.desired.epoch not in group.ran]:
            last = max([one.last_step_ns for one in left if self._gangs.collide(one, gang)], default=0)
            if last and gang.first_step_ns > last:
                found.append((gang.first_step_ns - last) / 1e9 - gang.iteration_seconds)
        return max(0.0, *found) if found else None

    # -- what is here -------------------------------------------------------------------------------------------------

    def _member(self, group: LocalTimesliceGroup) -> SliceMember:
        members = self._members(group)
        alive = [gang for gang in members if _wants_slices(gang)]
        return SliceMember(
            group.position,
            group.known_version,
            group.started_at is not None,
            frozenset(gang.desired.epoch for gang in alive),
            frozenset(gang.desired.epoch for gang in alive if _runs_here(gang)),
            group.switch_s,
            frozenset(gang.desired.epoch for gang in alive if not gang.launched),
            any(self._is_blocked(group, gang) for gang in alive),
            frozenset(gang.desired.epoch for gang in members if _is_parked_by_master(gang)),
        )

    def _is_blocked(self, group: LocalTimesliceGroup, gang: LocalGang) -> bool:
        in_turn = core.is_running(group.position, group.active, gang.desired.epoch)
        return in_turn and not _has_begun(gang) and bool(self._gangs.blocked_by(gang))

    def _members(self, group: LocalTimesliceGroup) -> list[LocalGang]:
        epochs = group.epochs
        return [gang for gang in self._gangs.all() if gang.desired.epoch in epochs]

    def _group_of(self, epoch: int) -> LocalTimesliceGroup | None:
        return next((group for group in self._groups.values() if epoch in group.epochs), None)

    def _new_group(self, number: int, now: float) -> LocalTimesliceGroup:
        """Return a group without notes. Its orders are at least as new as those that its gangs here obey."""
        group = LocalTimesliceGroup(number, ordered_at=now, launches=True)
        switches = [
            SliceSwitch(gang.wanted.order.set_epoch, gang.wanted.order.local_sequence)
            for gang in self._gangs.all()
            if gang_orders.agreement(number, SliceSwitch()) >> 40 == gang.wanted.stop_sequence >> 40
        ]
        group.position = SlicePosition(max(switches, default=SliceSwitch()))
        return group

    def _note(self, group: LocalTimesliceGroup) -> None:
        make_directory(self._directory)
        position = json_format.MessageToDict(order_to_wire(group.number, group.position))
        matrices = [json_format.MessageToDict(message) for _, message in sorted(group.matrices.items())]
        in_turn = [group.position.regular_row, group.position.owed, group.position.quantum_s]
        fields = {"position": position, "has_row": group.position.row != NO_ROW, "in_turn": in_turn}
        write_hint(self._directory / f"{group.number}.json", {**fields, "matrices": matrices})


def _read_group(path: Path) -> LocalTimesliceGroup | None:
    fields = read_json(path)
    try:
        order = json_format.ParseDict(fields["position"], peer_pb2.RowOrder())
        position = position_from_wire(order)
        if not fields["has_row"]:
            position = replace(position, row=NO_ROW)
        row, owed, quantum = fields["in_turn"]
        position = replace(position, regular_row=int(row), owed=int(owed), quantum_s=float(quantum))
        matrices = [json_format.ParseDict(one, agent_pb2.DesiredRows()) for one in fields["matrices"]]
    except (KeyError, TypeError, ValueError, json_format.ParseError):
        return None
    if not matrices:
        return None
    return LocalTimesliceGroup(order.node_set, position, {matrix.version: matrix for matrix in matrices})


def _wants_slices(gang: LocalGang) -> bool:
    """Return whether a gang needs slices. One that the master has parked does not, while others have its devices."""
    if gang.phase is PartPhase.ENDED or gang.master_desired.intent == agent_pb2.INTENT_STOP:
        return False
    return gang.master_desired.intent == agent_pb2.INTENT_RUN or not gang.launched or gang.phase is not PartPhase.PARKED


def _is_parked_by_master(gang: LocalGang) -> bool:
    """Return whether the master, and not a switch, has parked the gang."""
    wants_rest = gang.master_desired.intent in (agent_pb2.INTENT_PARK, agent_pb2.INTENT_HAND_OVER)
    return gang.launched and gang.phase is PartPhase.PARKED and wants_rest


def _runs_here(gang: LocalGang) -> bool:
    return gang.launched and gang.phase is PartPhase.RUNNING


def _has_begun(gang: LocalGang) -> bool:
    """Return whether a gang steps, or will not in this slice."""
    if not _wants_slices(gang):
        return True
    if gang.master_desired.intent != agent_pb2.INTENT_RUN:
        return gang.phase is PartPhase.PARKED
    runs = gang.wanted.intent is OrderIntent.RUN and gang.judged_order is gang.wanted
    return gang.launched and runs and gang.phase is PartPhase.RUNNING


def _slice_of(group: LocalTimesliceGroup, epoch: int) -> GangSlice:
    position, active = group.position, group.active
    changes = position.version < max(group.matrices)
    has_row = active is not None and epoch in active.epochs
    return GangSlice(group.number, position.switch, position.stops.get(epoch), _level_of(group), changes, has_row)


def _level_of(group: LocalTimesliceGroup) -> ParkLevel:
    return ParkLevel((group.active or group.newest).level)


def _rows_of(message: agent_pb2.DesiredRows) -> SliceMatrix:
    return SliceMatrix(
        message.version,
        tuple(tuple(row.epochs) for row in message.rows),
        message.quantum.ToTimedelta().total_seconds(),
        message.level,
        tuple(member.node.removeprefix("nodes/") for member in message.members),
        message.set_epoch,
    )


def order_to_wire(number: int, position: SlicePosition) -> peer_pb2.RowOrder:
    stops = [
        peer_pb2.Stop(epoch=epoch, set_epoch=stop.set_epoch, sequence=stop.sequence)
        for epoch, stop in sorted(position.stops.items())
    ]
    return peer_pb2.RowOrder(
        node_set=number,
        set_epoch=position.switch.set_epoch,
        sequence=position.switch.sequence,
        version=position.version,
        row=max(0, position.row),
        stops=stops,
    )


def position_from_wire(message: peer_pb2.RowOrder) -> SlicePosition:
    """Return the position of an order; one with version 0 has no row."""
    stops = {stop.epoch: SliceSwitch(stop.set_epoch, stop.sequence) for stop in message.stops}
    row = message.row if message.version else NO_ROW
    return SlicePosition(SliceSwitch(message.set_epoch, message.sequence), message.version, row, stops, row)


def state_to_wire(number: int, member: SliceMember) -> peer_pb2.RowState:
    return peer_pb2.RowState(
        order=order_to_wire(number, member.position),
        known_version=member.known_version,
        started=member.started,
        alive_epochs=sorted(member.alive),
        running_epochs=sorted(member.running),
        switch_seconds=member.switch_s,
        unstarted_epochs=sorted(member.unstarted),
        blocked=member.blocked,
        resting_epochs=sorted(member.resting),
    )


def member_from_wire(message: peer_pb2.RowState) -> SliceMember:
    return SliceMember(
        position_from_wire(message.order),
        message.known_version,
        message.started,
        frozenset(message.alive_epochs),
        frozenset(message.running_epochs),
        message.switch_seconds,
        frozenset(message.unstarted_epochs),
        message.blocked,
        frozenset(message.resting_epochs),
    )
