"""The daemon's own core of the rotation on simulated nodes: leads, obeys, and lets ranks run or rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from faultsim.node_daemon import SimDaemon
from faultsim.rank_processes import Doing, Ranks
from ganger.protocol import gang_orders
from ganger.protocol import slice_rotation as core
from ganger.protocol.gang_orders import DesiredOrder, GangSlice, OrderKey, ParkLevel, agreement
from ganger.protocol.slice_rotation import NO_ROW, SliceMatrix, SliceMember, SlicePosition, SliceSwitch
from ganger_master.core.commands import ObservedRows
from ganger_master.core.desired_state import DesiredGang, DesiredRows
from ganger_master.core.model import GangIntent, SuspendLevel
from msgspec.structs import replace as other

_ASK_SECONDS = 0.5


@dataclass
class Standing:
    """A node set as a node knows it; as `ganger_daemon.node.slice_rotation` has it. What is noted survives the
    daemon."""

    number: int
    position: SlicePosition = field(default_factory=SlicePosition)
    matrices: dict[int, SliceMatrix] = field(default_factory=dict)
    known: int = 0
    ordered_at: float = 0.0
    started_at: float | None = None
    said: dict[str, SliceMember | None] = field(default_factory=dict)
    asked_at: float = 0.0

    @property
    def newest(self) -> SliceMatrix:
        return self.matrices[max(self.matrices)]

    @property
    def active(self) -> SliceMatrix | None:
        return self.matrices.get(self.position.version)

    @property
    def epochs(self) -> frozenset[int]:
        return frozenset().union(*[rows.epochs for rows in self.matrices.values()])


class DaemonTurns:
    """`by_node`: those of all nodes, for what leaders and members say to each other."""

    def __init__(self, daemon: SimDaemon, by_node: dict[str, DaemonTurns]) -> None:
        self.daemon = daemon
        self.by_node = by_node
        self.sets: dict[int, Standing] = {}
        by_node[daemon.name] = self

    # -- what others say ----------------------------------------------------------------------------------------------

    def hear(self, told: Sequence[DesiredRows]) -> None:
        for rows in told:
            standing = self.sets.get(rows.node_set)
            if standing is None:
                standing = self.sets[rows.node_set] = self._new_standing(rows.node_set)
            matrix = rows.matrix
            standing.matrices[matrix.version] = SliceMatrix(
                matrix.version,
                matrix.rows,
                matrix.quantum_seconds,
                int(matrix.level),
                tuple([member.node for member in rows.members]),
                rows.set_epoch,
            )
        for number in self.sets.keys() - {rows.node_set for rows in told}:
            del self.sets[number]

    def know(self) -> None:
        for standing in self.sets.values():
            standing.known = max(standing.matrices)

    def rules(self, ranks: Ranks, told: DesiredGang) -> bool:
        takes_turns = self._set_of(ranks) is not None or ranks.switch != (0, 0)
        return ranks.doing is not Doing.WAITING and takes_turns and told.intent is not GangIntent.STOP

    def waits(self, ranks: Ranks) -> bool:
        standing = self._set_of(ranks)
        return standing is not None and not core.is_running(standing.position, standing.active, ranks.order.epoch)

    def share_paused(self, one: Ranks, two: Ranks) -> bool:
        standing = self._set_of(one)
        if standing is None or self._set_of(two) is not standing:
            return False
        return _level_of(standing) is SuspendLevel.PAUSE

    def observed(self) -> tuple[ObservedRows, ...]:
        return tuple(
            [
                ObservedRows(
                    number,
                    one.position.version,
                    max(one.matrices),
                    max(0, one.position.row),
                    unable=tuple([r.order.epoch for r in self._members(one) if self._cannot_rest(r)]),
                )
                for number, one in sorted(self.sets.items())
            ]
        )

    def forget(self) -> None:
        self.sets.clear()

    def _cannot_rest(self, ranks: Ranks) -> bool:
        return ranks.doing is Doing.RUNNING and self.daemon.physics.ignores_stops(ranks)

    # -- leading and obeying ------------------------------------------------------------------------------------------

    def follow(self) -> None:
        for standing in list(self.sets.values()):
            self._lead(standing)
        for ranks in self._here():
            if ranks.is_alive and ranks.doing is not Doing.WAITING:
                self._follow(ranks, self._set_of(ranks))
        for standing in self.sets.values():
            turn = [one for one in self._members(standing) if not self.waits(one)]
            if standing.started_at is None and all(map(self._has_begun, turn)):
                standing.started_at = self.daemon.engine.now

    def heard(self, number: int, order: SlicePosition | None) -> SliceMember | None:
        standing = self.sets.get(number)
        if standing is None or not self.daemon.is_up:
            return None
        if order is not None:
            position = core.obey(standing.position, order, standing.matrices, standing.newest.set_epoch)
            if position is not standing.position:
                self._order(standing, position)
        return self._member(standing)

    def _lead(self, standing: Standing) -> None:
        newest, now = standing.newest, self.daemon.engine.now
        if newest.leader != self.daemon.name:
            return
        standing.said[self.daemon.name] = self._member(standing)
        others = newest.members[1:]
        if others and now - standing.asked_at >= _ASK_SECONDS:
            standing.asked_at = now
            for name in others:
                self._ask(standing, name)
        if any(said is not None and said.blocked for said in standing.said.values()):
            standing.ordered_at = now
        began = standing.started_at
        if any((said := standing.said.get(name)) is None or not said.started for name in others):
            began = None
        position = core.lead(
            standing.position,
            standing.matrices,
            standing.said,
            now - standing.ordered_at,
            None if began is None else now - began,
        )
        if position is None:
            return
        if position.switch == standing.position.switch:
            standing.position = position
            standing.ordered_at = standing.started_at = now
        else:
            self._order(standing, position)

    def _ask(self, standing: Standing, name: str) -> None:
        position, network, incarnation = standing.position, self.daemon.network, self.daemon.incarnation
        only_asks = position.switch.set_epoch < standing.newest.set_epoch or position.row == NO_ROW

        def answered(said: SliceMember | None) -> None:
            if self.daemon.is_up and incarnation == self.daemon.incarnation and standing.number in self.sets:
                standing.said[name] = said

        def asked() -> None:
            said = self.by_node[name].heard(standing.number, None if only_asks else position)
            network.send(lambda: answered(said))

        network.send(asked)

    def _order(self, standing: Standing, position: SlicePosition) -> None:
        standing.position = position
        standing.matrices = {v: rows for v, rows in standing.matrices.items() if v >= position.version}
        standing.ordered_at, standing.started_at, standing.asked_at = self.daemon.engine.now, None, 0.0
        # What was said of the order before says nothing about this one's row.
        standing.said = {name: said and replace(said, started=False) for name, said in standing.said.items()}
        for ranks in self._members(standing):
            self.daemon.physics.settle(ranks)

    def _follow(self, ranks: Ranks, standing: Standing | None) -> None:
        told, physics = ranks.wanted, self.daemon.physics
        if told.intent is GangIntent.STOP or (standing is None and ranks.switch == (0, 0)):
            return
        obeyed = _wanted(ranks.order, ranks.switch)
        wanted = gang_orders.next_order(
            _wanted(told, (0, 0)),
            obeyed,
            None if standing is None else _turn_of(standing, told.epoch),
            ranks.doing is Doing.PARKED,
            self._heard(ranks),
            lambda: physics.is_blocked(ranks),
        )
        if wanted is None or wanted.order <= obeyed.order:
            return
        intent, level = GangIntent[wanted.intent.name], SuspendLevel(wanted.level)
        order = other(told, intent=intent, level=level, stop_sequence=wanted.stop_sequence)
        switch = (wanted.order.set_epoch, wanted.order.local_sequence)
        physics.follow(ranks, order, switch)
        if switch != (0, 0):
            ranks.told = told

    def _heard(self, ranks: Ranks) -> int:
        """The relay of boundaries is here what peers that are up are seen to do."""
        told = ranks.wanted
        peers = [self.daemon.physics.ranks.get((told.epoch, member.node)) for member in told.members]
        agreements = [
            peer.order.stop_sequence
            for peer in peers
            if peer is not None
            and peer is not ranks
            and peer.doing is Doing.RUNNING
            and self.by_node[peer.node].daemon.is_up
        ]
        return max(agreements, default=0) if told.stop_sequence not in agreements else told.stop_sequence

    # -- what is here -------------------------------------------------------------------------------------------------

    def _member(self, standing: Standing) -> SliceMember:
        alive = [one for one in self._members(standing) if self._wants_turns(one)]
        running = [one for one in alive if one.doing is Doing.RUNNING and one.order.intent is GangIntent.RUN]
        return SliceMember(
            standing.position,
            standing.known,
            standing.started_at is not None,
            frozenset(one.order.epoch for one in alive),
            frozenset(one.order.epoch for one in running),
            unstarted=frozenset(one.order.epoch for one in alive if one.doing is Doing.WAITING),
            blocked=any(self._is_blocked(standing, one) for one in alive),
            resting=frozenset(one.order.epoch for one in self._members(standing) if self._rests_for_good(one)),
        )

    def _is_blocked(self, standing: Standing, ranks: Ranks) -> bool:
        in_turn = core.is_running(standing.position, standing.active, ranks.order.epoch)
        return in_turn and not self._has_begun(ranks) and self.daemon.physics.is_blocked(ranks)

    @staticmethod
    def _wants_turns(ranks: Ranks) -> bool:
        if not ranks.is_alive or ranks.wanted.intent is GangIntent.STOP:
            return False
        return ranks.wanted.intent is GangIntent.RUN or ranks.doing is not Doing.PARKED

    @staticmethod
    def _rests_for_good(ranks: Ranks) -> bool:
        return ranks.doing is Doing.PARKED and ranks.wanted.intent in (GangIntent.PARK, GangIntent.HAND_OVER)

    def _has_begun(self, ranks: Ranks) -> bool:
        if not self._wants_turns(ranks):
            return True
        if ranks.wanted.intent is not GangIntent.RUN:
            return ranks.doing is Doing.PARKED
        return ranks.doing is Doing.RUNNING and ranks.order.intent is GangIntent.RUN

    def _here(self) -> list[Ranks]:
        ranks = self.daemon.physics.ranks
        return [one for (_, node), one in sorted(ranks.items()) if node == self.daemon.name]

    def _members(self, standing: Standing) -> list[Ranks]:
        return [one for one in self._here() if one.order.epoch in standing.epochs]

    def _set_of(self, ranks: Ranks) -> Standing | None:
        return next((one for one in self.sets.values() if ranks.order.epoch in one.epochs), None)

    def _new_standing(self, number: int) -> Standing:
        """Of a set nothing is noted of: no order of it is older than those its gangs here have obeyed."""
        mine = agreement(number, SliceSwitch()) >> 40
        switches = [SliceSwitch(*one.switch) for one in self._here() if one.order.stop_sequence >> 40 == mine]
        position = SlicePosition(max(switches, default=SliceSwitch()))
        return Standing(number, position, ordered_at=self.daemon.engine.now)


def _turn_of(standing: Standing, epoch: int) -> GangSlice:
    position, active = standing.position, standing.active
    changes = position.version < max(standing.matrices)
    has_row = active is not None and epoch in active.epochs
    return GangSlice(
        standing.number, position.switch, position.stops.get(epoch), ParkLevel(_level_of(standing)), changes, has_row
    )


def _wanted(desired: DesiredGang, switch: tuple[int, int]) -> DesiredOrder:
    """In the daemon's words."""
    return DesiredOrder(
        desired.uid,
        OrderKey(desired.epoch, desired.master_sequence, *switch),
        gang_orders.OrderIntent[desired.intent.name],
        ParkLevel(desired.level if desired.intent is GangIntent.PARK else SuspendLevel.NONE),
        desired.stop_sequence,
    )


def _level_of(standing: Standing) -> SuspendLevel:
    return SuspendLevel((standing.active or standing.newest).level)
