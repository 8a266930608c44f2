"""Turns on devices, alive: hears of node sets, leads those this node leads, and lets each gang here run or rest.

The decisions are in `core.rotation`. What this node obeyed last is noted before it is obeyed, so a restarted daemon
goes on from there, with or without a master. A gang runs on its devices only once this daemon has seen the others off
them, whatever anybody ordered.
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
from ganger.wire.errors import NodeSetNotFound
from google.protobuf import json_format

from ganger_daemon.core import rotation as core
from ganger_daemon.core import turns
from ganger_daemon.core.orders import DesiredOrder, OrderIntent, ParkLevel, PartPhase
from ganger_daemon.core.rotation import NO_ROW, Position, Rows, SliceMember, SliceSwitch
from ganger_daemon.core.turns import GangSlice
from ganger_daemon.gang.desired_messages import in_turn, wanted_of
from ganger_daemon.gang.others import Peers
from ganger_daemon.node.node_context import NodeContext
from ganger_daemon.node.safe_files import make_directory, read_json, write_hint

if TYPE_CHECKING:
    from ganger_daemon.gang.gang import LocalGang

log = logging.getLogger(__name__)

# Between two looks while a row is being switched, and while one runs; what changes on this node is looked at at once.
_SWITCHING_SECONDS = 0.005
_RUNNING_SECONDS = 0.1
# Between two questions to each member of a set that has several.
_ASK_SECONDS = 0.1
# Of the last switches the median counts, of two the shorter one: else one that was late keeps quanta long until a third
# has been measured, which takes such a quantum.
_SWITCHES = 5


@dataclass
class LocalTimesliceGroup:
    """A node set as this node knows it. Times are seconds of one monotonic clock."""

    number: int
    position: Position = field(default_factory=Position)
    matrices: dict[int, agent_pb2.DesiredRows] = field(default_factory=dict)
    # The newest version of which every gang is here that has a part here; none until this daemon was told once more.
    known: int = 0
    # Of the present master's desired set; a set that is no longer told is over once its gangs are let go.
    is_told: bool = True
    ordered_at: float = 0.0
    started_at: float | None = None
    # Somebody of the row was launched for its turn: that takes what it takes, and is no switch.
    launches: bool = False
    # Epochs that ran here when the present row was ordered.
    ran: frozenset[int] = frozenset()
    switches: list[float] = field(default_factory=list)
    said: dict[str, SliceMember | None] = field(default_factory=dict)
    asked_at: float = 0.0
    asking: asyncio.Task[None] | None = None

    @property
    def rows(self) -> dict[int, Rows]:
        return {version: _rows_of(message) for version, message in self.matrices.items()}

    @property
    def newest(self) -> Rows:
        return _rows_of(self.matrices[max(self.matrices)])

    @property
    def active(self) -> Rows | None:
        message = self.matrices.get(self.position.version)
        return None if message is None else _rows_of(message)

    @property
    def switch_seconds(self) -> float:
        return median_low(self.switches) if self.switches else 0.0

    @property
    def epochs(self) -> frozenset[int]:
        return frozenset().union(*[rows.epochs for rows in self.rows.values()])


class Rotation:
    """`gangs`: those of this node, by epoch order; `blocked_by`: who is still on the devices of one."""

    def __init__(self, host: NodeContext, peers: Peers, gangs: Any) -> None:
        self._host = host
        self._peers = peers
        self._gangs = gangs
        self._directory = host.paths.state / "rows"
        self._sets: dict[int, LocalTimesliceGroup] = {}
        self._news = asyncio.Event()

    # -- what others say and ask --------------------------------------------------------------------------------------

    def recall(self) -> None:
        """What a former daemon had obeyed."""
        for path in sorted(self._directory.glob("*.json")):
            standing = _standing_of(path)
            if standing is None:
                log.warning("notes of a node set cannot be read", extra={"path": str(path)})
                continue
            standing.ordered_at = time.monotonic()
            standing.launches = True
            self._sets[standing.number] = standing

    def hear(self, told: Iterable[agent_pb2.DesiredRows]) -> None:
        """The node sets of a desired set, complete. Its gangs are yet to begin here: until `know` no leader counts on
        them."""
        now = time.monotonic()
        for standing in self._sets.values():
            standing.is_told = False
        for message in told:
            standing = self._sets.get(message.node_set) or self._new_standing(message.node_set, now)
            self._sets[message.node_set] = standing
            standing.is_told = True
            known = standing.matrices.get(message.version)
            if known == message:
                continue
            copy = agent_pb2.DesiredRows()
            copy.CopyFrom(message)
            standing.matrices[message.version] = copy
            self._note(standing)
        for number in [number for number, standing in self._sets.items() if not standing.is_told]:
            del self._sets[number]
            (self._directory / f"{number}.json").unlink(missing_ok=True)
        self.news()

    def know(self) -> None:
        """All gangs that were told with the node sets have begun here."""
        for standing in self._sets.values():
            standing.known = max(standing.matrices)
        self.news()

    def rules(self, gang: LocalGang, told: DesiredOrder) -> bool:
        """Whether what the master wants of a gang here waits for a turn, or for the end of one."""
        takes_turns = self._set_of(gang.desired.epoch) is not None or gang.wanted.order.is_by_turn
        return gang.launched and takes_turns and turns.may_wait_its_turn(told)

    def waits(self, gang: LocalGang) -> str:
        """Why a gang that was never launched is not to be yet; empty if nothing of this kind is in its way."""
        standing = self._set_of(gang.desired.epoch)
        if standing is None or core.runs(standing.position, standing.active, gang.desired.epoch):
            return ""
        return f"its turn in nodeSets/{standing.number}"

    def share_paused(self, one: LocalGang, other: LocalGang) -> bool:
        """Whether both stay on their devices while they take turns there."""
        standing = self._set_of(one.desired.epoch)
        if standing is None or self._set_of(other.desired.epoch) is not standing:
            return False
        return _level_of(standing) is ParkLevel.PAUSE

    def news(self) -> None:
        """A gang came, went, began or came to rest."""
        self._news.set()

    def observed(self) -> list[agent_pb2.ObservedRows]:
        return [
            agent_pb2.ObservedRows(
                node_set=number,
                version=standing.position.version,
                known_version=max(standing.matrices),
                row=max(0, standing.position.row),
                switch_seconds=round(standing.switch_seconds, 3),
                unable_epochs=[gang.desired.epoch for gang in self._members(standing) if gang.cannot_rest],
            )
            for number, standing in sorted(self._sets.items())
        ]

    async def heard(self, message: peer_pb2.RowOrder) -> peer_pb2.RowState:
        """An order or a question of a leader, answered. Raises NodeSetNotFound."""
        standing = self._sets.get(message.node_set)
        if standing is None:
            raise NodeSetNotFound(f"nodeSets/{message.node_set} has no part on this node")
        if not message.ask:
            self._obey(standing, position_from_wire(message))
        return state_to_wire(standing.number, self._member(standing))

    def nodes_of(self, node_set: int) -> frozenset[str]:
        """Those that this node knows to have a part in it; none where it knows of no such set."""
        standing = self._sets.get(node_set)
        matrices = {} if standing is None else standing.matrices
        return frozenset(one.node.removeprefix("nodes/") for rows in matrices.values() for one in rows.members)

    # -- the loop -----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Until cancelled. A fault of one set is logged, and it is looked at again: nobody else waits for it."""
        while True:
            self._news.clear()
            pause = _RUNNING_SECONDS
            for standing in list(self._sets.values()):
                try:
                    self._lead(standing)
                    if standing.started_at is None:
                        pause = _SWITCHING_SECONDS
                except Exception:
                    log.exception("node set not led", extra={"node_set": standing.number})
            try:
                self.follow()
            except Exception:
                log.exception("turns not followed")
            try:
                await asyncio.wait_for(self._news.wait(), pause if self._sets else None)
            except TimeoutError:
                pass

    async def close(self) -> None:
        tasks = [standing.asking for standing in self._sets.values() if standing.asking is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def follow(self) -> None:
        """Lets each gang here run or rest, as far as it may."""
        for gang in self._gangs.all():
            standing = self._set_of(gang.desired.epoch)
            if standing is not None or gang.wanted.order.is_by_turn:
                self._follow_gang(gang, standing)
        for standing in self._sets.values():
            self._look_at_start(standing)

    # -- leading ------------------------------------------------------------------------------------------------------

    def _lead(self, standing: LocalTimesliceGroup) -> None:
        newest = standing.newest
        if newest.leader != self._host.node:
            return
        now = time.monotonic()
        standing.said[self._host.node] = self._member(standing)
        others = [name for name in newest.members if name != self._host.node]
        if others:
            self._ask(standing, others, now)
        if any(said is not None and said.blocked for said in standing.said.values()):
            standing.ordered_at = now
        began = standing.started_at
        if any(said is None or not said.started for name, said in standing.said.items() if name in others):
            began = None
        position = core.lead(
            standing.position,
            standing.rows,
            standing.said,
            now - standing.ordered_at,
            None if began is None else now - began,
        )
        if position is None:
            return
        if position.switch == standing.position.switch:
            # The next row is the same gangs': their next quantum begins.
            standing.position = position
            standing.ordered_at = standing.started_at = now
            self._note(standing)
        else:
            self._order(standing, position)

    def _ask(self, standing: LocalTimesliceGroup, others: Sequence[str], now: float) -> None:
        if standing.asking is not None and not standing.asking.done():
            return
        if now - standing.asked_at < _ASK_SECONDS:
            return
        standing.asked_at = now
        standing.asking = asyncio.create_task(self._ask_all(standing, others), name=f"node set {standing.number}")

    async def _ask_all(self, standing: LocalTimesliceGroup, others: Sequence[str]) -> None:
        """Tells every member the present order, again and again: whoever has obeyed it says so."""
        addresses = {
            member.node.removeprefix("nodes/"): member.peer_address
            for member in standing.matrices[max(standing.matrices)].members
        }
        message = order_to_wire(standing.number, standing.position)
        message.ask = standing.position.switch.set_epoch < standing.newest.set_epoch or standing.position.row == NO_ROW
        said = await asyncio.gather(*[self._peers.switch_row(addresses[name], message) for name in others])
        for name, state in zip(others, said, strict=True):
            standing.said[name] = None if state is None else member_from_wire(state)
        self.news()

    # -- obeying ------------------------------------------------------------------------------------------------------

    def _obey(self, standing: LocalTimesliceGroup, order: Position) -> None:
        position = core.obey(standing.position, order, standing.rows, standing.newest.set_epoch)
        if position is not standing.position:
            self._order(standing, position)
            self.news()

    def _order(self, standing: LocalTimesliceGroup, position: Position) -> None:
        """Noted first, then obeyed."""
        former = standing.position
        standing.position = position
        standing.matrices = {v: rows for v, rows in standing.matrices.items() if v >= position.version}
        standing.ordered_at, standing.started_at = time.monotonic(), None
        standing.launches = False
        standing.ran = frozenset(gang.desired.epoch for gang in self._members(standing) if _runs_here(gang))
        standing.asked_at = 0.0
        self._note(standing)
        # a switch is news where the rows are others than before
        log.log(
            logging.DEBUG if position.version == former.version else logging.INFO,
            "row switched",
            extra={
                "node_set": standing.number,
                "row": position.row,
                "version": position.version,
                "sequence": position.switch.sequence,
                "former_row": former.row,
                "switch_seconds": round(standing.switch_seconds, 3),
            },
        )
        self._host.changed()

    def _follow_gang(self, gang: LocalGang, standing: LocalTimesliceGroup | None) -> None:
        if not gang.launched or gang.stop_wanted or gang.phase is PartPhase.ENDED:
            return
        wanted = turns.next_order(
            wanted_of(gang.told),
            gang.wanted,
            None if standing is None else _turn_of(standing, gang.desired.epoch),
            gang.phase is PartPhase.PARKED,
            gang.heard_agreement,
            lambda: bool(self._gangs.blocked_by(gang)),
        )
        if wanted is not None and wanted.order > gang.wanted.order:
            gang.obey(in_turn(gang.told, wanted))

    def _look_at_start(self, standing: LocalTimesliceGroup) -> None:
        """Whether the row's gangs step by now."""
        turn = [
            gang
            for gang in self._members(standing)
            if core.runs(standing.position, standing.active, gang.desired.epoch)
        ]
        standing.launches = standing.launches or any(not gang.launched or not gang.has_stepped for gang in turn)
        if standing.started_at is None and all(map(_has_begun, turn)):
            standing.started_at = time.monotonic()
            if not standing.launches and (dead := self._dead_seconds(standing, turn)) is not None:
                standing.switches = [*standing.switches, dead][-_SWITCHES:]
            self._host.changed()

    def _dead_seconds(self, standing: LocalTimesliceGroup, turn: Sequence[LocalGang]) -> float | None:
        """For how long devices here did no step at the last switch: from the last step of the gangs that left to the
        begin of the first one of those that came. None if no gang came for another. A gang that was parked before the
        switch did not leave at it, and one that ran did not come."""
        members = [gang for gang in self._members(standing) if gang.desired.epoch in standing.ran]
        left = [gang for gang in members if standing.position.stops.get(gang.desired.epoch) == standing.position.switch]
        found = []
        for gang in [one for one in turn if one.desired.epoch not in standing.ran]:
            last = max([one.last_step_ns for one in left if self._gangs.collide(one, gang)], default=0)
            if last and gang.first_step_ns > last:
                found.append((gang.first_step_ns - last) / 1e9 - gang.iteration_seconds)
        return max(0.0, *found) if found else None

    # -- what is here -------------------------------------------------------------------------------------------------

    def _member(self, standing: LocalTimesliceGroup) -> SliceMember:
        members = self._members(standing)
        alive = [gang for gang in members if _wants_turns(gang)]
        return SliceMember(
            standing.position,
            standing.known,
            standing.started_at is not None,
            frozenset(gang.desired.epoch for gang in alive),
            frozenset(gang.desired.epoch for gang in alive if _runs_here(gang)),
            standing.switch_seconds,
            frozenset(gang.desired.epoch for gang in alive if not gang.launched),
            any(self._is_blocked(standing, gang) for gang in alive),
            frozenset(gang.desired.epoch for gang in members if _rests_for_good(gang)),
        )

    def _is_blocked(self, standing: LocalTimesliceGroup, gang: LocalGang) -> bool:
        in_turn = core.runs(standing.position, standing.active, gang.desired.epoch)
        return in_turn and not _has_begun(gang) and bool(self._gangs.blocked_by(gang))

    def _members(self, standing: LocalTimesliceGroup) -> list[LocalGang]:
        epochs = standing.epochs
        return [gang for gang in self._gangs.all() if gang.desired.epoch in epochs]

    def _set_of(self, epoch: int) -> LocalTimesliceGroup | None:
        return next((standing for standing in self._sets.values() if epoch in standing.epochs), None)

    def _new_standing(self, number: int, now: float) -> LocalTimesliceGroup:
        """Of a set nothing is noted of: no order of it is older than those its gangs here have obeyed."""
        standing = LocalTimesliceGroup(number, ordered_at=now, launches=True)
        switches = [
            SliceSwitch(gang.wanted.order.set_epoch, gang.wanted.order.local_sequence)
            for gang in self._gangs.all()
            if turns.agreement(number, SliceSwitch()) >> 40 == gang.wanted.stop_sequence >> 40
        ]
        standing.position = Position(max(switches, default=SliceSwitch()))
        return standing

    def _note(self, standing: LocalTimesliceGroup) -> None:
        make_directory(self._directory)
        position = json_format.MessageToDict(order_to_wire(standing.number, standing.position))
        matrices = [json_format.MessageToDict(message) for _, message in sorted(standing.matrices.items())]
        in_turn = [standing.position.in_turn, standing.position.owed, standing.position.quantum_seconds]
        fields = {"position": position, "has_row": standing.position.row != NO_ROW, "in_turn": in_turn}
        write_hint(self._directory / f"{standing.number}.json", {**fields, "matrices": matrices})


def _standing_of(path: Path) -> LocalTimesliceGroup | None:
    fields = read_json(path)
    try:
        order = json_format.ParseDict(fields["position"], peer_pb2.RowOrder())
        position = position_from_wire(order)
        if not fields["has_row"]:
            position = replace(position, row=NO_ROW)
        row, owed, quantum = fields["in_turn"]
        position = replace(position, in_turn=int(row), owed=int(owed), quantum_seconds=float(quantum))
        matrices = [json_format.ParseDict(one, agent_pb2.DesiredRows()) for one in fields["matrices"]]
    except (KeyError, TypeError, ValueError, json_format.ParseError):
        return None
    if not matrices:
        return None
    return LocalTimesliceGroup(order.node_set, position, {matrix.version: matrix for matrix in matrices})


def _wants_turns(gang: LocalGang) -> bool:
    """Not who is told to rest and does: its devices are another's until it goes on."""
    if gang.phase is PartPhase.ENDED or gang.told.intent == agent_pb2.INTENT_STOP:
        return False
    return gang.told.intent == agent_pb2.INTENT_RUN or not gang.launched or gang.phase is not PartPhase.PARKED


def _rests_for_good(gang: LocalGang) -> bool:
    """Not for another's turn, but because the master wants it."""
    wants_rest = gang.told.intent in (agent_pb2.INTENT_PARK, agent_pb2.INTENT_HAND_OVER)
    return gang.launched and gang.phase is PartPhase.PARKED and wants_rest


def _runs_here(gang: LocalGang) -> bool:
    return gang.launched and gang.phase is PartPhase.RUNNING


def _has_begun(gang: LocalGang) -> bool:
    """It steps, or will not in this turn."""
    if not _wants_turns(gang):
        return True
    if gang.told.intent != agent_pb2.INTENT_RUN:
        return gang.phase is PartPhase.PARKED
    runs = gang.wanted.intent is OrderIntent.RUN and gang.judged_under is gang.wanted
    return gang.launched and runs and gang.phase is PartPhase.RUNNING


def _turn_of(standing: LocalTimesliceGroup, epoch: int) -> GangSlice:
    position, active = standing.position, standing.active
    changes = position.version < max(standing.matrices)
    has_row = active is not None and epoch in active.epochs
    return GangSlice(standing.number, position.switch, position.stops.get(epoch), _level_of(standing), changes, has_row)


def _level_of(standing: LocalTimesliceGroup) -> ParkLevel:
    return ParkLevel((standing.active or standing.newest).level)


def _rows_of(message: agent_pb2.DesiredRows) -> Rows:
    return Rows(
        message.version,
        tuple(tuple(row.epochs) for row in message.rows),
        message.quantum.ToTimedelta().total_seconds(),
        message.level,
        tuple(member.node.removeprefix("nodes/") for member in message.members),
        message.set_epoch,
    )


def order_to_wire(number: int, position: Position) -> peer_pb2.RowOrder:
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


def position_from_wire(message: peer_pb2.RowOrder) -> Position:
    """Of an order nobody ever gave: no row."""
    stops = {stop.epoch: SliceSwitch(stop.set_epoch, stop.sequence) for stop in message.stops}
    row = message.row if message.version else NO_ROW
    return Position(SliceSwitch(message.set_epoch, message.sequence), message.version, row, stops, row)


def state_to_wire(number: int, member: SliceMember) -> peer_pb2.RowState:
    return peer_pb2.RowState(
        order=order_to_wire(number, member.position),
        known_version=member.known,
        started=member.started,
        alive_epochs=sorted(member.alive),
        running_epochs=sorted(member.running),
        switch_seconds=member.switch_seconds,
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
