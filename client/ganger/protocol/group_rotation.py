"""One time-slice group on one node: its matrices, its position, the members' reports, and its next order.

A shell passes the gangs of its node, the reports of other members and the time in. It sends what has to be sent, notes
every new position before it obeys it, and lets gangs run or parks them as `gang_orders.next_order` demands.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median_low

from ganger.protocol.gang_orders import GangSlice, OrderIntent, ParkLevel, agreement
from ganger.protocol.slice_rotation import (
    NO_ROW,
    SliceMatrix,
    SliceMember,
    SlicePosition,
    SliceSwitch,
    is_running,
    lead,
    obey,
)

# The median of so many switches counts, of two the shorter one. Else one late switch would keep quanta long until a
# third is measured, which takes such a quantum.
_SWITCHES = 5


@dataclass(frozen=True)
class SlicedGang:
    """A gang's part on this node.

    `intent`: what the master wants of it. `follows`: it runs by its newest order. `has_stepped`: returns whether it has
    ever done a step. `is_blocked`: returns whether other gangs are on its devices."""

    epoch: int
    intent: OrderIntent
    is_launched: bool
    is_running: bool
    is_parked: bool
    is_ended: bool = False
    follows: bool = True
    has_stepped: Callable[[], bool] = lambda: True
    is_blocked: Callable[[], bool] = lambda: False

    @property
    def wants_slices(self) -> bool:
        """Whether it needs slices. A gang that the master has parked does not, while others have its devices."""
        if self.is_ended or self.intent is OrderIntent.STOP:
            return False
        return self.intent is OrderIntent.RUN or not self.is_launched or not self.is_parked

    @property
    def is_parked_by_master(self) -> bool:
        """Whether the master, and not a switch, has parked it."""
        return self.is_launched and self.is_parked and self.intent in (OrderIntent.PARK, OrderIntent.HAND_OVER)

    @property
    def has_begun(self) -> bool:
        """Whether it steps, or will not in this slice."""
        if not self.wants_slices:
            return True
        return self.is_parked if self.intent is not OrderIntent.RUN else self.is_running and self.follows


class GroupRotation:
    """State of a time-slice group on `node`. Times are seconds of one monotonic clock.

    `position`: the last order obeyed. `matrices`: by version, from that of the position on. `known_version`: newest
    matrix whose gangs have all begun here; zero before. `launches`: a gang of the row was launched for its slice, and
    the time of a launch is not that of a switch. `ran`: epochs that ran here when the present row was ordered.
    `switches`: seconds of the last switches."""

    def __init__(self, number: int, node: str, now_s: float, position: SlicePosition | None = None) -> None:
        self.number, self.node, self.position = number, node, position or SlicePosition()
        self.matrices: dict[int, SliceMatrix] = {}
        self.known_version = 0
        self.launches = True
        self.ran: frozenset[int] = frozenset()
        self.switches: list[float] = []
        self._epochs: frozenset[int] = frozenset()
        self._ordered_s = now_s
        self._started_s: float | None = None
        self._requested_s = -math.inf
        self._reports: dict[str, SliceMember | None] = {}

    # -- what it is --------------------------------------------------------------------------------------------------

    @property
    def newest(self) -> SliceMatrix:
        return self.matrices[max(self.matrices)]

    @property
    def active(self) -> SliceMatrix | None:
        return self.matrices.get(self.position.version)

    @property
    def level(self) -> ParkLevel:
        return ParkLevel((self.active or self.newest).level)

    @property
    def switch_s(self) -> float:
        return median_low(self.switches) if self.switches else 0.0

    @property
    def is_switching(self) -> bool:
        """Whether gangs of the active row do not step yet."""
        return self._started_s is None

    @property
    def only_asks(self) -> bool:
        """Whether a message to members asks for their positions, and orders nothing."""
        return self.position.switch.set_epoch < self.newest.set_epoch or self.position.row == NO_ROW

    def has(self, epoch: int) -> bool:
        return epoch in self._epochs

    def is_in_turn(self, epoch: int) -> bool:
        """Return whether the active row has the gang."""
        return is_running(self.position, self.active, epoch)

    def slice_of(self, epoch: int) -> GangSlice:
        position, active = self.position, self.active
        changes = position.version < max(self.matrices)
        has_row = active is not None and epoch in active.epochs
        return GangSlice(self.number, position.switch, position.stops.get(epoch), self.level, changes, has_row)

    # -- what it receives --------------------------------------------------------------------------------------------

    def desire(self, matrix: SliceMatrix) -> None:
        """Take a version of the matrix. Its gangs begin later: no leader counts on them before `confirm_begun`."""
        self.matrices[matrix.version] = matrix
        self._note_epochs()

    def confirm_begun(self) -> None:
        """Record that all gangs that came with the matrices have begun here."""
        self.known_version = max(self.matrices)

    def continue_from(self, stops: Iterable[tuple[SliceSwitch, int]]) -> None:
        """Take a position without notes. Its orders are at least as new as those that gangs here obey, given as the
        switch and the number of the boundary agreement."""
        own = agreement(self.number, SliceSwitch()) >> 40
        switches = [switch for switch, number in stops if number >> 40 == own]
        self.position = SlicePosition(max(switches, default=SliceSwitch()))

    def report(self, node: str, member: SliceMember | None) -> None:
        """Take the report of another member; None: it does not answer."""
        self._reports[node] = member

    def obey(self, order: SlicePosition, gangs: Sequence[SlicedGang], now_s: float) -> bool:
        """Take an order of the leader. Return whether it is a new one."""
        position = obey(self.position, order, self.matrices, self.newest.set_epoch)
        if position is self.position:
            return False
        self._order(position, gangs, now_s)
        return True

    # -- what it reports and orders ----------------------------------------------------------------------------------

    def member(self, gangs: Sequence[SlicedGang]) -> SliceMember:
        """Return the report of this node."""
        alive = [gang for gang in gangs if gang.wants_slices]
        return SliceMember(
            self.position,
            self.known_version,
            not self.is_switching,
            frozenset([gang.epoch for gang in alive]),
            frozenset([gang.epoch for gang in alive if gang.is_running]),
            self.switch_s,
            frozenset([gang.epoch for gang in alive if not gang.is_launched]),
            any(self.is_in_turn(gang.epoch) and not gang.has_begun and gang.is_blocked() for gang in alive),
            frozenset([gang.epoch for gang in gangs if gang.is_parked_by_master]),
        )

    def due_requests(self, now_s: float, every_s: float) -> tuple[str, ...]:
        """Return the members to send the present order to now; none if this node does not lead."""
        newest = self.newest
        if newest.leader != self.node or now_s - self._requested_s < every_s or len(newest.members) == 1:
            return ()
        self._requested_s = now_s
        return newest.members[1:]

    def lead(self, gangs: Sequence[SlicedGang], now_s: float) -> SlicePosition | None:
        """Return the new position if this node leads and it is time for another. With the same switch as before, the
        next row has the same gangs, whose next quantum begins."""
        newest = self.newest
        if newest.leader != self.node:
            return None
        self._reports[self.node] = self.member(gangs)
        if any(member is not None and member.blocked for member in self._reports.values()):
            self._ordered_s = now_s
        others = [self._reports.get(name) for name in newest.members[1:]]
        has_started = all(member is not None and member.started for member in others)
        since_s = now_s - self._started_s if self._started_s is not None and has_started else None
        position = lead(self.position, self.matrices, self._reports, now_s - self._ordered_s, since_s)
        if position is None:
            return None
        if position.switch == self.position.switch:
            self.position = position
            self._ordered_s = self._started_s = now_s
        else:
            self._order(position, gangs, now_s)
        return position

    def begin(self, gangs: Sequence[SlicedGang], now_s: float) -> bool:
        """Return whether all gangs of the row have just begun."""
        turn = [gang for gang in gangs if self.is_in_turn(gang.epoch)]
        self.launches = self.launches or any(not (gang.is_launched and gang.has_stepped()) for gang in turn)
        if not self.is_switching or not all(gang.has_begun for gang in turn):
            return False
        self._started_s = now_s
        return True

    def note_switch(self, seconds: float) -> None:
        """Count the duration of the last switch, unless a program was launched in it."""
        if not self.launches:
            self.switches = [*self.switches, seconds][-_SWITCHES:]

    def _order(self, position: SlicePosition, gangs: Sequence[SlicedGang], now_s: float) -> None:
        self.position = position
        self.matrices = {version: one for version, one in self.matrices.items() if version >= position.version}
        self._note_epochs()
        self._ordered_s, self._started_s, self._requested_s = now_s, None, -math.inf
        # A report on the order before says nothing about the row of this one.
        self._reports = {name: one and replace(one, started=False) for name, one in self._reports.items()}
        self.launches = False
        self.ran = frozenset([gang.epoch for gang in gangs if gang.is_running])

    def _note_epochs(self) -> None:
        self._epochs = frozenset().union(*[matrix.epochs for matrix in self.matrices.values()])
