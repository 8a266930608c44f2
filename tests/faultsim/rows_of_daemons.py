"""The daemon's own core of the rotation on simulated nodes: leads, obeys, and lets ranks run or rest."""

from __future__ import annotations

from collections.abc import Sequence

from faultsim.node_daemon import SimDaemon
from faultsim.rank_processes import Doing, Ranks
from ganger.protocol import gang_orders
from ganger.protocol.gang_orders import DesiredOrder, OrderKey, ParkLevel
from ganger.protocol.group_rotation import GroupRotation, SlicedGang
from ganger.protocol.slice_rotation import SliceMatrix, SliceMember, SlicePosition, SliceSwitch
from ganger_master.core.commands import ObservedSlices
from ganger_master.core.desired_projection import DesiredGang, DesiredSlices
from ganger_master.core.gang_model import GangIntent
from ganger_master.core.job_model import SuspendLevel
from msgspec.structs import replace as other

_ASK_S = 0.5


class DaemonTurns:
    """`by_node`: those of all nodes, for what leaders and members say to each other."""

    def __init__(self, daemon: SimDaemon, by_node: dict[str, DaemonTurns]) -> None:
        self.daemon = daemon
        self.by_node = by_node
        self.sets: dict[int, GroupRotation] = {}
        by_node[daemon.name] = self

    # -- what others say ----------------------------------------------------------------------------------------------

    def hear(self, told: Sequence[DesiredSlices]) -> None:
        for rows in told:
            rotation = self.sets.get(rows.node_set)
            if rotation is None:
                rotation = self.sets[rows.node_set] = self._new_rotation(rows.node_set)
            matrix, members = rows.matrix, tuple([member.node for member in rows.members])
            level, quantum_s = int(matrix.level), matrix.quantum_s
            rotation.desire(SliceMatrix(matrix.version, matrix.rows, quantum_s, level, members, rows.set_epoch))
        for number in self.sets.keys() - {rows.node_set for rows in told}:
            del self.sets[number]

    def know(self) -> None:
        for rotation in self.sets.values():
            rotation.confirm_begun()

    def rules(self, ranks: Ranks, told: DesiredGang) -> bool:
        takes_turns = self._set_of(ranks) is not None or ranks.switch != (0, 0)
        return ranks.doing is not Doing.WAITING and takes_turns and told.intent is not GangIntent.STOP

    def waits(self, ranks: Ranks) -> bool:
        rotation = self._set_of(ranks)
        return rotation is not None and not rotation.is_in_turn(ranks.order.epoch)

    def share_paused(self, one: Ranks, two: Ranks) -> bool:
        rotation = self._set_of(one)
        return rotation is not None and self._set_of(two) is rotation and rotation.level is ParkLevel.PAUSE

    def observed(self) -> tuple[ObservedSlices, ...]:
        return tuple(
            [
                ObservedSlices(
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
        now = self.daemon.engine.now
        for rotation in list(self.sets.values()):
            for name in rotation.due_requests(now, _ASK_S):
                self._ask(rotation, name)
            former = rotation.position
            position = rotation.lead(self._sliced(rotation), now)
            if position is not None and position.switch != former.switch:
                self._settle(rotation)
        for ranks in self._here():
            if ranks.is_alive and ranks.doing is not Doing.WAITING:
                self._follow(ranks, self._set_of(ranks))
        for rotation in self.sets.values():
            rotation.begin(self._sliced(rotation), now)

    def heard(self, number: int, order: SlicePosition | None) -> SliceMember | None:
        rotation = self.sets.get(number)
        if rotation is None or not self.daemon.is_up:
            return None
        if order is not None and rotation.obey(order, self._sliced(rotation), self.daemon.engine.now):
            self._settle(rotation)
        return rotation.member(self._sliced(rotation))

    def _ask(self, rotation: GroupRotation, name: str) -> None:
        network, incarnation = self.daemon.network, self.daemon.incarnation
        order = None if rotation.only_asks else rotation.position

        def answered(said: SliceMember | None) -> None:
            is_here = self.daemon.is_up and incarnation == self.daemon.incarnation
            if is_here and self.sets.get(rotation.number) is rotation:
                rotation.report(name, said)

        def asked() -> None:
            said = self.by_node[name].heard(rotation.number, order)
            network.send(lambda: answered(said))

        network.send(asked)

    def _settle(self, rotation: GroupRotation) -> None:
        """Obey a new order."""
        for ranks in self._members(rotation):
            self.daemon.physics.settle(ranks)

    def _follow(self, ranks: Ranks, rotation: GroupRotation | None) -> None:
        told, physics = ranks.wanted, self.daemon.physics
        if told.intent is GangIntent.STOP or (rotation is None and ranks.switch == (0, 0)):
            return
        obeyed = _wanted(ranks.order, ranks.switch)
        wanted = gang_orders.next_order(
            _wanted(told, (0, 0)),
            obeyed,
            None if rotation is None else rotation.slice_of(told.epoch),
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
            ranks.newest_order = told

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

    def _sliced(self, rotation: GroupRotation) -> list[SlicedGang]:
        return [self._sliced_gang(ranks) for ranks in self._members(rotation)]

    def _sliced_gang(self, ranks: Ranks) -> SlicedGang:
        runs = ranks.doing is Doing.RUNNING and ranks.order.intent is GangIntent.RUN
        return SlicedGang(
            ranks.order.epoch,
            gang_orders.OrderIntent[ranks.wanted.intent.name],
            ranks.doing is not Doing.WAITING,
            runs,
            ranks.doing is Doing.PARKED,
            not ranks.is_alive,
            is_blocked=lambda: self.daemon.physics.is_blocked(ranks),
        )

    def _here(self) -> list[Ranks]:
        ranks = self.daemon.physics.ranks
        return [one for (_, node), one in sorted(ranks.items()) if node == self.daemon.name]

    def _members(self, rotation: GroupRotation) -> list[Ranks]:
        return [one for one in self._here() if rotation.has(one.order.epoch)]

    def _set_of(self, ranks: Ranks) -> GroupRotation | None:
        return next((one for one in self.sets.values() if one.has(ranks.order.epoch)), None)

    def _new_rotation(self, number: int) -> GroupRotation:
        rotation = GroupRotation(number, self.daemon.name, self.daemon.engine.now)
        rotation.continue_from((SliceSwitch(*one.switch), one.order.stop_sequence) for one in self._here())
        return rotation


def _wanted(desired: DesiredGang, switch: tuple[int, int]) -> DesiredOrder:
    """In the daemon's words."""
    return DesiredOrder(
        desired.uid,
        OrderKey(desired.epoch, desired.master_sequence, *switch),
        gang_orders.OrderIntent[desired.intent.name],
        ParkLevel(desired.level if desired.intent is GangIntent.PARK else SuspendLevel.NONE),
        desired.stop_sequence,
    )
