"""Rotation of the slices (rows) of a time-slice group: orders of its leader, and their acceptance by a member.

Every order is complete: the matrix's version, the row, and for each parked gang the switch that ended its slice. A
member obeys the highest (set epoch, sequence) that it has received, so orders may be lost, late or repeated. The leader
orders nothing before every member has reported, and nothing more before every member has obeyed. A row starts on a
device once the daemon of the device has seen the other gangs off it: that is not decided here, and needs no leader.

Rows run in order, but a row with a new gang comes next, so that its first steps do not wait for a whole cycle. Each
such row out of order is followed by one in order. At most as many are owed as there are rows, so that no gang starves
however many arrive.

A slice continues under a newer matrix that has a row of all running gangs and of further ones. So devices that became
idle because a gang ended or moved are used before the slice ends. The slice does not become longer by it.

All rows of a cycle have the same quantum, computed when the cycle begins. The measured time of a switch depends on the
rows before and after it, and a quantum that followed it would favour some rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice

SWITCHES_PER_QUANTUM = 50.0
# A row whose gangs do no step within this time on free devices has its quantum all the same: programs may take long to
# start.
START_S = 60.0
NO_ROW = -1


@dataclass(frozen=True, order=True)
class SliceSwitch:
    """Number of a leader's order; orders with higher numbers win."""

    set_epoch: int = 0
    sequence: int = 0


@dataclass(frozen=True)
class SliceMatrix:
    """One version of a group's slice matrix. `rows`: epochs of gangs; `members`: names of nodes, the leader's first."""

    version: int
    rows: tuple[tuple[int, ...], ...]
    quantum_s: float
    level: int
    members: tuple[str, ...]
    set_epoch: int

    @property
    def leader(self) -> str:
        return self.members[0]

    @cached_property
    def epochs(self) -> frozenset[int]:
        return frozenset(epoch for row in self.rows for epoch in row)


@dataclass(frozen=True)
class SlicePosition:
    """The last order obeyed: `row` of the matrix `version` runs; `stops`: for every parked gang, the switch that ended
    its slice.

    A leader also notes `regular_row`, the last row that ran in order; `owed`, the rows that ran out of order and are to
    be followed by one in order; `quantum_s` of this cycle, zero before it is computed; and `held_s`, the time that this
    slice has run under earlier orders."""

    switch: SliceSwitch = SliceSwitch()
    version: int = 0
    row: int = NO_ROW
    stops: Mapping[int, SliceSwitch] = field(default_factory=dict)
    regular_row: int = NO_ROW
    owed: int = 0
    quantum_s: float = 0.0
    held_s: float = 0.0


@dataclass(frozen=True)
class SliceMember:
    """Report of a member to its leader.

    `position`: the order that it obeys; `known_version`: newest matrix it has; `started`: all of the row's gangs there
    step; `alive`: gangs there that want slices; `running`: gangs that step; `unstarted`: gangs that were never
    launched; `blocked`: a gang of the row waits for devices that others still hold; `resting`: gangs that the
    master has parked."""

    position: SlicePosition
    known_version: int
    started: bool = False
    alive: frozenset[int] = frozenset()
    running: frozenset[int] = frozenset()
    switch_s: float = 0.0
    unstarted: frozenset[int] = frozenset()
    blocked: bool = False
    resting: frozenset[int] = frozenset()


def is_running(position: SlicePosition, matrix: SliceMatrix | None, epoch: int) -> bool:
    """Return whether the active row has the gang of this epoch."""
    if matrix is None or not 0 <= position.row < len(matrix.rows):
        return False
    return epoch in matrix.rows[position.row]


def _rank(position: SlicePosition) -> tuple[SliceSwitch, bool]:
    """Return the sort key of positions; the highest counts. Without notes a node has only its gangs' last switch."""
    return position.switch, position.row != NO_ROW


def obey(
    position: SlicePosition, order: SlicePosition, matrices: Mapping[int, SliceMatrix], least_set_epoch: int
) -> SlicePosition:
    """Return the position after an order; unchanged if it is old, of a former leader, or of an unknown matrix."""
    if _rank(order) <= _rank(position) or order.switch.set_epoch < least_set_epoch or order.version not in matrices:
        return position
    return replace(order, regular_row=order.row, owed=0, quantum_s=0.0, held_s=0.0)


def quantum_s(matrix: SliceMatrix, switch_s: float) -> float:
    """Return the quantum of a matrix: at least fifty times the time of a switch."""
    return max(matrix.quantum_s, SWITCHES_PER_QUANTUM * switch_s)


def lead(
    position: SlicePosition,
    matrices: Mapping[int, SliceMatrix],
    members: Mapping[str, SliceMember | None],
    since_order_s: float,
    since_start_s: float | None,
) -> SlicePosition | None:
    """Return the leader's next order; None while there is nothing to order.

    `members`: last report of each member of the newest matrix, None for one that does not answer. `since_order_s`: time
    since the last order, or since a gang of its row last waited for devices that others held. `since_start_s`: time
    since all gangs of the row step; None before."""
    newest = matrices[max(matrices)]
    latest_reports = [members.get(name) for name in newest.members]
    reports = [member for member in latest_reports if member is not None]
    if len(reports) < len(latest_reports):
        return None
    # The last order of a former leader, or of this one before it lost its notes, is known from the members' reports.
    latest = max([position, *[member.position for member in reports]], key=_rank)
    if latest.switch.set_epoch < newest.set_epoch or _rank(latest) > _rank(position):
        return _take_over(latest, newest, matrices, reports)
    if any(member.position.switch < position.switch for member in reports):
        return None if since_order_s < START_S else _skip_unknown(position, matrices, reports)
    matrix = matrices.get(position.version)
    if matrix is None:
        return _skip_unknown(position, matrices, reports)
    alive = frozenset[int]().union(*[member.alive for member in reports])
    own = alive.intersection(matrix.rows[position.row]) if 0 <= position.row < len(matrix.rows) else frozenset()
    switch_s = max([member.switch_s for member in reports], default=0.0)
    if own:
        # A leaving gang stops at its next boundary or is escalated: the slice does not end before the row has started.
        waits = since_order_s < START_S or any(member.blocked for member in reports)
        if since_start_s is None and waits:
            return None
        counted = since_order_s if since_start_s is None or position.held_s else since_start_s
        elapsed = position.held_s + counted
        quantum = position.quantum_s or quantum_s(matrix, switch_s)
        if elapsed < quantum:
            return _filled(position, matrix, matrices, reports, alive, elapsed)
        # An order of the master to park is on its way to other nodes of a gang, which cannot obey a switch meanwhile.
        is_torn = not own.isdisjoint(frozenset[int]().union(*[member.resting for member in reports]))
        if is_torn and elapsed < quantum + START_S:
            return None
    return _next(position, matrix, matrices, reports, alive, switch_s)


@dataclass(frozen=True)
class SliceUse:
    """Use of a matrix over a time, by epoch: seconds in which each gang ran, and how often each was resumed.

    `position`: the last order, given `since_s` seconds before the end of that time; `entering`: gangs that it
    resumes."""

    position: SlicePosition
    since_s: float
    entering: frozenset[int]
    received_s: Mapping[int, float]
    resumed: Mapping[int, int]


class SliceCourse:
    """The slices that follow each other while all gangs of a matrix want theirs: each is computed once.

    position: its slice is just over. switch_s: seconds from an order until the gangs that it resumes run; gangs of both
    rows run meanwhile, and the quantum begins when all do.
    """

    def __init__(self, position: SlicePosition, matrix: SliceMatrix, switch_s: float) -> None:
        slices = list(islice(_slices(position, matrix, switch_s), 2 * len(matrix.rows) + 1))
        # The first slice may follow one out of order. The last slices are one cycle, which repeats.
        self._head, self._cycle = slices[: len(matrix.rows) + 1], slices[len(matrix.rows) + 1 :]
        self._cycle_s = sum([one.seconds for one in self._cycle])

    def advance(self, until_s: float) -> SliceUse:
        """Return what `until_s` seconds of identical switches bring to the gangs."""
        use, left = _Use(), until_s
        for one in self._head:
            if left < one.seconds:
                return use.ended(one, left, 0)
            use.add(one, one.seconds)
            left -= one.seconds
        cycles = int(left // self._cycle_s)
        for one in self._cycle:
            use.add(one, one.seconds, cycles)
        left -= cycles * self._cycle_s
        orders = cycles * sum([one.is_ordered for one in self._cycle])
        for one in self._cycle:
            if left < one.seconds:
                return use.ended(one, left, orders)
            use.add(one, one.seconds)
            left -= one.seconds
        # Rounding has left a whole cycle.
        return use.ended(one, one.seconds, orders)

    def time_to_receive(self, epoch: int, received_s: float) -> float:
        """Return the seconds of identical switches until a gang has run for `received_s`; infinite if it never runs."""
        passed_s, left = 0.0, received_s
        for one in self._head:
            received = one.received_s(epoch, one.seconds)
            if received >= left:
                return passed_s + left + (one.seconds - received)
            passed_s += one.seconds
            left -= received
        each = sum([one.received_s(epoch, one.seconds) for one in self._cycle])
        if not each:
            return math.inf
        cycles = max(0, math.ceil(left / each) - 1)
        passed_s += cycles * self._cycle_s
        left -= cycles * each
        # Rounding may leave a little for the next cycle.
        for one in (*self._cycle, *self._cycle):
            received = one.received_s(epoch, one.seconds)
            if received >= left:
                return passed_s + left + (one.seconds - received)
            passed_s += one.seconds
            left -= received
        return math.inf


@dataclass(frozen=True)
class _Slice:
    """A slice from its order to the next one, `seconds` later; `entering` gangs run `dead_s` after the order."""

    position: SlicePosition
    row: frozenset[int]
    entering: frozenset[int]
    dead_s: float
    seconds: float
    is_ordered: bool

    def received_s(self, epoch: int, seconds: float) -> float:
        """Return how long a gang has run within the first `seconds` of the slice."""
        if epoch not in self.row:
            return 0.0
        return max(0.0, seconds - self.dead_s) if epoch in self.entering else seconds


def _slices(position: SlicePosition, matrix: SliceMatrix, switch_s: float) -> Iterator[_Slice]:
    matrices, alive = {matrix.version: matrix}, matrix.epochs
    while True:
        row = frozenset(matrix.rows[position.row])
        member = SliceMember(position, matrix.version, True, alive, row)
        # No order: the same row continues.
        following = _next(position, matrix, matrices, [member], alive, switch_s) or position
        entering = frozenset(matrix.rows[following.row]) - row
        dead_s = switch_s if entering else 0.0
        quantum = following.quantum_s or quantum_s(matrix, switch_s)
        is_ordered = following.switch != position.switch
        position = following
        yield _Slice(position, frozenset(matrix.rows[position.row]), entering, dead_s, dead_s + quantum, is_ordered)


class _Use:
    """Sums of a `SliceCourse.advance`."""

    def __init__(self) -> None:
        self.received_s: dict[int, float] = {}
        self.resumed: dict[int, int] = {}

    def add(self, one: _Slice, seconds: float, times: int = 1) -> None:
        for epoch in one.row:
            self.received_s[epoch] = self.received_s.get(epoch, 0.0) + times * one.received_s(epoch, seconds)
        for epoch in one.entering:
            self.resumed[epoch] = self.resumed.get(epoch, 0) + times

    def ended(self, one: _Slice, seconds: float, orders: int) -> SliceUse:
        """Return the sums at `seconds` of a slice, which comes `orders` orders later than when it was computed."""
        self.add(one, seconds)
        position = one.position
        if orders:
            stops = {epoch: replace(stop, sequence=stop.sequence + orders) for epoch, stop in position.stops.items()}
            switch = replace(position.switch, sequence=position.switch.sequence + orders)
            position = replace(position, switch=switch, stops=stops)
        return SliceUse(position, seconds, one.entering, self.received_s, self.resumed)


def _filled(
    position: SlicePosition,
    matrix: SliceMatrix,
    matrices: Mapping[int, SliceMatrix],
    reports: Sequence[SliceMember],
    alive: frozenset[int],
    elapsed: float,
) -> SlicePosition | None:
    """Return the order to continue the slice under a newer matrix, if further gangs resume and no running one stops.

    A gang that was never started gets its first slice whole, so it joins only if it is in every row."""
    version = _newest_known(matrices, reports, position.version)
    fresh, present = matrices[version], alive.intersection(matrix.rows[position.row])
    always = frozenset(fresh.rows[0]).intersection(*fresh.rows)
    able = (alive - frozenset[int]().union(*[member.unstarted for member in reports])) | (alive & always) | present
    fuller = [(len(able.intersection(own)), -at) for at, own in enumerate(fresh.rows) if present < able & set(own)]
    if version == position.version or not fuller:
        return None
    regular_row = _before_next(fresh, matrix, position.regular_row)
    switch = SliceSwitch(position.switch.set_epoch, position.switch.sequence + 1)
    return replace(
        _ordered(position, switch, fresh, -max(fuller)[1]),
        regular_row=regular_row,
        owed=position.owed,
        quantum_s=position.quantum_s,
        held_s=elapsed,
    )


def _next(
    position: SlicePosition,
    matrix: SliceMatrix,
    matrices: Mapping[int, SliceMatrix],
    reports: Sequence[SliceMember],
    alive: frozenset[int],
    switch_s: float,
) -> SlicePosition | None:
    version = _newest_known(matrices, reports, position.version)
    fresh = matrices[version]
    regular_row = (
        position.regular_row if version == position.version else _before_next(fresh, matrix, position.regular_row)
    )
    present = frozenset(matrix.rows[position.row]) if 0 <= position.row < len(matrix.rows) else frozenset()
    unstarted = frozenset[int]().union(*[member.unstarted for member in reports])
    # A gang that had its devices alone until now is running, and so not new.
    running = frozenset[int]().union(*[member.running for member in reports])
    new = alive & ((fresh.epochs - matrix.epochs - running) | (fresh.epochs & unstarted - present))
    row, owed = _following(fresh, regular_row, alive), max(0, position.owed - 1)
    if row is not None and new.intersection(fresh.rows[row]):
        regular_row, owed = row, position.owed
    elif new and position.owed < len(fresh.rows):
        row, owed = next(i for i, own in enumerate(fresh.rows) if new.intersection(own)), position.owed + 1
    else:
        row = regular_row = min(max(0, regular_row), len(fresh.rows) - 1) if row is None else row
    goes_on = version == position.version and (owed > position.owed or regular_row > position.regular_row)
    quantum = position.quantum_s if goes_on else quantum_s(fresh, switch_s)
    before = alive & present
    if version == position.version and alive.intersection(fresh.rows[row]) == before:
        # No other gang wants a slice, or the next row has the same gangs: there is nothing to switch.
        if (row, regular_row, owed) == (position.row, position.regular_row, position.owed):
            return None
        return replace(position, row=row, regular_row=regular_row, owed=owed, quantum_s=quantum, held_s=0.0)
    switch = SliceSwitch(position.switch.set_epoch, position.switch.sequence + 1)
    return replace(_ordered(position, switch, fresh, row), regular_row=regular_row, owed=owed, quantum_s=quantum)


def _ordered(position: SlicePosition, switch: SliceSwitch, matrix: SliceMatrix, row: int) -> SlicePosition:
    """Return the order of a row. Parked gangs keep their stop; gangs whose slice ends get this switch as theirs."""
    turn = frozenset(matrix.rows[row])
    stops = {epoch: position.stops.get(epoch, switch) for epoch in sorted(matrix.epochs | position.stops.keys())}
    stops = {epoch: stop for epoch, stop in stops.items() if epoch not in turn and epoch in matrix.epochs}
    return SlicePosition(switch, matrix.version, row, stops, row)


def _take_over(
    latest: SlicePosition, newest: SliceMatrix, matrices: Mapping[int, SliceMatrix], reports: Sequence[SliceMember]
) -> SlicePosition | None:
    """Return the first order of a leader that has no notes: the group's position again, or else the row that runs."""
    is_own = latest.switch.set_epoch == newest.set_epoch
    switch = SliceSwitch(newest.set_epoch, latest.switch.sequence + 1 if is_own else 1)
    if latest.row != NO_ROW and latest.version in matrices:
        return replace(latest, switch=switch, regular_row=latest.row, owed=0, quantum_s=0.0, held_s=0.0)
    version = _newest_known(matrices, reports, 0)
    if not all(member.known_version >= version for member in reports) or version not in matrices:
        return None
    matrix = matrices[version]
    running = frozenset[int]().union(*[member.running for member in reports])
    alive = frozenset[int]().union(*[member.alive for member in reports])
    most = max([len(running.intersection(row)) for row in matrix.rows])
    row = next(i for i, own in enumerate(matrix.rows) if len(running.intersection(own)) == most)
    if not alive.intersection(matrix.rows[row]):
        row = next((i for i, own in enumerate(matrix.rows) if alive.intersection(own)), row)
    return _ordered(replace(latest, stops={}), switch, matrix, row)


def _skip_unknown(
    position: SlicePosition, matrices: Mapping[int, SliceMatrix], reports: Sequence[SliceMember]
) -> SlicePosition | None:
    """Return the order to continue with the newest matrix that all members have, where one has lost the active one."""
    version = _newest_known(matrices, reports, 0)
    if version <= position.version:
        return None
    matrix = matrices[version]
    switch = SliceSwitch(position.switch.set_epoch, position.switch.sequence + 1)
    row = min(max(0, position.row), len(matrix.rows) - 1)
    return _ordered(position, switch, matrix, row)


def _newest_known(matrices: Mapping[int, SliceMatrix], reports: Sequence[SliceMember], least: int) -> int:
    known_version = min([member.known_version for member in reports])
    return max([version for version in matrices if version <= known_version], default=least)


def _following(matrix: SliceMatrix, row: int, alive: frozenset[int]) -> int | None:
    count = len(matrix.rows)
    order = [(row + step) % count for step in range(1, count + 1)]
    return next((index for index in order if alive.intersection(matrix.rows[index])), None)


def _before_next(fresh: SliceMatrix, former: SliceMatrix, row: int) -> int:
    """Return the row of the new matrix before the gangs that were next in the former one, as far as it has them.

    New rows between them are not in order: they come next, or last."""
    count = len(former.rows)
    for step in range(1, count + 1):
        before = (row + step) % count
        own = set(former.rows[before])
        # Of equally similar rows, where a gang has several, the one nearest to the former place.
        shared, _, after = max((len(own.intersection(now)), -abs(at - before), at) for at, now in enumerate(fresh.rows))
        if shared:
            return (after - 1) % len(fresh.rows)
    return NO_ROW
