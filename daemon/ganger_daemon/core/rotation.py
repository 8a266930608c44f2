"""Which row of a node set runs, and when the next one does: what its leader orders, and what a member makes of it.

Every order is complete: the matrix's version, the row, and for each gang that rests the switch that ended its turn. A
member obeys the highest (set epoch, sequence) it has heard, so orders may be lost, late or repeated. The leader orders
nothing before it has heard of every member, and nothing more before every member has obeyed. A row starts on a device
when the daemon that owns it has seen the others off it: that is not decided here, and needs no leader.

Row follows row in their order, but who is new comes next, so that its first steps do not wait for everybody else's
turn. Each turn that is taken so is made up for by one in order; no more are owed at a time than there are rows, so that
nobody starves however many come.

A turn goes on under a newer matrix, if that has a row of all who run and of others beside them: what idles because
somebody has ended, or gone elsewhere, is used before the turn is over, and the turn is no longer for it.

All rows of a cycle have the same quantum, settled when the cycle begins: what a switch was measured to take differs
from one to the next, often by which row leaves and which comes, and a quantum that followed it would favour one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

SWITCHES_PER_QUANTUM = 50.0
# A row whose gangs do not step by then, on devices that are free, has its quantum all the same: programs may take long
# to start.
START_SECONDS = 60.0
NO_ROW = -1


@dataclass(frozen=True, slots=True, order=True)
class SliceSwitch:
    """Rank of a leader's order."""

    set_epoch: int = 0
    sequence: int = 0


@dataclass(frozen=True, slots=True)
class Rows:
    """One version of a node set's matrix. `rows`: epochs; `members`: names of nodes, the leader's first."""

    version: int
    rows: tuple[tuple[int, ...], ...]
    quantum_seconds: float
    level: int
    members: tuple[str, ...]
    set_epoch: int

    @property
    def leader(self) -> str:
        return self.members[0]

    @property
    def epochs(self) -> frozenset[int]:
        return frozenset(epoch for row in self.rows for epoch in row)


@dataclass(frozen=True, slots=True)
class Position:
    """The last order obeyed: `row` of `version` runs; `stops`: of all others, the switch that ended their turn. A
    leader also notes `in_turn`, the row that ran last in its turn, `owed`: turns out of turn to be made up for,
    `quantum_seconds`, that of the rows of this cycle, zero if it is not settled, and `held_seconds`: how long this turn
    went on under former orders."""

    switch: SliceSwitch = SliceSwitch()
    version: int = 0
    row: int = NO_ROW
    stops: Mapping[int, SliceSwitch] = field(default_factory=dict)
    in_turn: int = NO_ROW
    owed: int = 0
    quantum_seconds: float = 0.0
    held_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class SliceMember:
    """What a member says: the order it obeys, the newest version it knows, whether all of the row's gangs there step,
    which gangs with a part there want turns, which step, and which were never started, whether one of the row waits for
    devices that others still have, and which gangs rest there because their master wants it."""

    position: Position
    known: int
    started: bool = False
    alive: frozenset[int] = frozenset()
    running: frozenset[int] = frozenset()
    switch_seconds: float = 0.0
    unstarted: frozenset[int] = frozenset()
    blocked: bool = False
    resting: frozenset[int] = frozenset()


def runs(position: Position, matrix: Rows | None, epoch: int) -> bool:
    """Whether it is the gang's turn."""
    if matrix is None or not 0 <= position.row < len(matrix.rows):
        return False
    return epoch in matrix.rows[position.row]


def _rank(position: Position) -> tuple[SliceSwitch, bool]:
    """Sort key: the highest position counts. A node that lost its notes has its gangs' last switch, and no row."""
    return position.switch, position.row != NO_ROW


def obey(position: Position, order: Position, matrices: Mapping[int, Rows], least_set_epoch: int) -> Position:
    """After an order was heard; as before if it is an old one, a former leader's, or of a matrix not known here."""
    if _rank(order) <= _rank(position) or order.switch.set_epoch < least_set_epoch or order.version not in matrices:
        return position
    return replace(order, in_turn=order.row, owed=0, quantum_seconds=0.0, held_seconds=0.0)


def quantum_seconds(matrix: Rows, switch_seconds: float) -> float:
    """As wanted, and never less than fifty times what a switch takes."""
    return max(matrix.quantum_seconds, SWITCHES_PER_QUANTUM * switch_seconds)


def lead(
    position: Position,
    matrices: Mapping[int, Rows],
    members: Mapping[str, SliceMember | None],
    ordered_seconds: float,
    started_seconds: float | None,
) -> Position | None:
    """The next order; None while there is nothing to order. `members`: what each of the newest matrix's said last, None
    for who does not answer. `ordered_seconds`: since the last order, or since one of its row last waited for devices
    that others had; `started_seconds`: since the row stepped everywhere."""
    newest = matrices[max(matrices)]
    heard = [members.get(name) for name in newest.members]
    said = [member for member in heard if member is not None]
    if len(said) < len(heard):
        return None
    # The last order of a former leader, or of this one before it lost its notes, is with the members that it reached.
    latest = max([position, *[member.position for member in said]], key=_rank)
    if latest.switch.set_epoch < newest.set_epoch or _rank(latest) > _rank(position):
        return _take_over(latest, newest, matrices, said)
    if any(member.position.switch < position.switch for member in said):
        return None if ordered_seconds < START_SECONDS else _past_unknown(position, matrices, said)
    matrix = matrices.get(position.version)
    if matrix is None:
        return _past_unknown(position, matrices, said)
    alive = frozenset[int]().union(*[member.alive for member in said])
    own = alive.intersection(matrix.rows[position.row]) if 0 <= position.row < len(matrix.rows) else frozenset()
    switch_seconds = max([member.switch_seconds for member in said], default=0.0)
    if own:
        # who leaves stops at its next boundary, whenever that is, or is pressed to: no turn is over before
        waits = ordered_seconds < START_SECONDS or any(member.blocked for member in said)
        if started_seconds is None and waits:
            return None
        counted = ordered_seconds if started_seconds is None or position.held_seconds else started_seconds
        elapsed = position.held_seconds + counted
        quantum = position.quantum_seconds or quantum_seconds(matrix, switch_seconds)
        if elapsed < quantum:
            return _filled(position, matrix, matrices, said, alive, elapsed)
        # the master's order to rest is on its way to the others of a gang, who cannot come to rest by another one
        is_torn = not own.isdisjoint(frozenset[int]().union(*[member.resting for member in said]))
        if is_torn and elapsed < quantum + START_SECONDS:
            return None
    return _next(position, matrix, matrices, said, alive, switch_seconds)


def _filled(
    position: Position,
    matrix: Rows,
    matrices: Mapping[int, Rows],
    said: Sequence[SliceMember],
    alive: frozenset[int],
    elapsed: float,
) -> Position | None:
    """The same turn under a newer matrix, if others go on beside those who run and none of these stops. Who was never
    started has its first turn whole, so it joins only where it is in every row."""
    version = _newest_known(matrices, said, position.version)
    fresh, present = matrices[version], alive.intersection(matrix.rows[position.row])
    always = frozenset(fresh.rows[0]).intersection(*fresh.rows)
    able = (alive - frozenset[int]().union(*[member.unstarted for member in said])) | (alive & always) | present
    fuller = [(len(able.intersection(own)), -at) for at, own in enumerate(fresh.rows) if present < able & set(own)]
    if version == position.version or not fuller:
        return None
    in_turn = _before_next(fresh, matrix, position.in_turn)
    switch = SliceSwitch(position.switch.set_epoch, position.switch.sequence + 1)
    return replace(
        _ordered(position, switch, fresh, -max(fuller)[1]),
        in_turn=in_turn,
        owed=position.owed,
        quantum_seconds=position.quantum_seconds,
        held_seconds=elapsed,
    )


def _next(
    position: Position,
    matrix: Rows,
    matrices: Mapping[int, Rows],
    said: Sequence[SliceMember],
    alive: frozenset[int],
    switch_seconds: float,
) -> Position | None:
    version = _newest_known(matrices, said, position.version)
    fresh = matrices[version]
    in_turn = position.in_turn if version == position.version else _before_next(fresh, matrix, position.in_turn)
    present = frozenset(matrix.rows[position.row]) if 0 <= position.row < len(matrix.rows) else frozenset()
    unstarted = frozenset[int]().union(*[member.unstarted for member in said])
    # who shares from now on what it has had alone until now waits for nothing
    running = frozenset[int]().union(*[member.running for member in said])
    new = alive & ((fresh.epochs - matrix.epochs - running) | (fresh.epochs & unstarted - present))
    row, owed = _following(fresh, in_turn, alive), max(0, position.owed - 1)
    if row is not None and new.intersection(fresh.rows[row]):
        in_turn, owed = row, position.owed
    elif new and position.owed < len(fresh.rows):
        row, owed = next(i for i, own in enumerate(fresh.rows) if new.intersection(own)), position.owed + 1
    else:
        row = in_turn = min(max(0, in_turn), len(fresh.rows) - 1) if row is None else row
    goes_on = version == position.version and (owed > position.owed or in_turn > position.in_turn)
    quantum = position.quantum_seconds if goes_on else quantum_seconds(fresh, switch_seconds)
    before = alive & present
    if version == position.version and alive.intersection(fresh.rows[row]) == before:
        # Nobody else wants a turn, or the next row is the same gangs': nothing is to be switched.
        if (row, in_turn, owed) == (position.row, position.in_turn, position.owed):
            return None
        return replace(position, row=row, in_turn=in_turn, owed=owed, quantum_seconds=quantum, held_seconds=0.0)
    switch = SliceSwitch(position.switch.set_epoch, position.switch.sequence + 1)
    return replace(_ordered(position, switch, fresh, row), in_turn=in_turn, owed=owed, quantum_seconds=quantum)


def _ordered(position: Position, switch: SliceSwitch, matrix: Rows, row: int) -> Position:
    """The order, of a row in its turn: who rests already keeps its stop, whose turn ends gets this one's."""
    turn = frozenset(matrix.rows[row])
    stops = {epoch: position.stops.get(epoch, switch) for epoch in sorted(matrix.epochs | position.stops.keys())}
    stops = {epoch: stop for epoch, stop in stops.items() if epoch not in turn and epoch in matrix.epochs}
    return Position(switch, matrix.version, row, stops, row)


def _take_over(
    latest: Position, newest: Rows, matrices: Mapping[int, Rows], said: Sequence[SliceMember]
) -> Position | None:
    """The first order of a new leader, or of one that lost its notes: the position of the set, repeated. If no node has
    that, the row that runs."""
    is_own = latest.switch.set_epoch == newest.set_epoch
    switch = SliceSwitch(newest.set_epoch, latest.switch.sequence + 1 if is_own else 1)
    if latest.row != NO_ROW and latest.version in matrices:
        return replace(latest, switch=switch, in_turn=latest.row, owed=0, quantum_seconds=0.0, held_seconds=0.0)
    version = _newest_known(matrices, said, 0)
    if not all(member.known >= version for member in said) or version not in matrices:
        return None
    matrix = matrices[version]
    running = frozenset[int]().union(*[member.running for member in said])
    alive = frozenset[int]().union(*[member.alive for member in said])
    most = max([len(running.intersection(row)) for row in matrix.rows])
    row = next(i for i, own in enumerate(matrix.rows) if len(running.intersection(own)) == most)
    if not alive.intersection(matrix.rows[row]):
        row = next((i for i, own in enumerate(matrix.rows) if alive.intersection(own)), row)
    return _ordered(replace(latest, stops={}), switch, matrix, row)


def _past_unknown(position: Position, matrices: Mapping[int, Rows], said: Sequence[SliceMember]) -> Position | None:
    """Somebody does not know the matrix that is active (what it knew was lost): on with the newest, which all know."""
    version = _newest_known(matrices, said, 0)
    if version <= position.version:
        return None
    matrix = matrices[version]
    switch = SliceSwitch(position.switch.set_epoch, position.switch.sequence + 1)
    row = min(max(0, position.row), len(matrix.rows) - 1)
    return _ordered(position, switch, matrix, row)


def _newest_known(matrices: Mapping[int, Rows], said: Sequence[SliceMember], least: int) -> int:
    known = min([member.known for member in said])
    return max([version for version in matrices if version <= known], default=least)


def _following(matrix: Rows, row: int, alive: frozenset[int]) -> int | None:
    count = len(matrix.rows)
    order = [(row + step) % count for step in range(1, count + 1)]
    return next((index for index in order if alive.intersection(matrix.rows[index])), None)


def _before_next(fresh: Rows, former: Rows, row: int) -> int:
    """The row of the new matrix after which those go on that were next in the former one, as far as they are there
    still. Rows that are new between are not in turn: they come next, or wait for the rest."""
    count = len(former.rows)
    for step in range(1, count + 1):
        before = (row + step) % count
        own = set(former.rows[before])
        # of several that are as alike, for whoever has more than one, the one at its place
        shared, _, after = max((len(own.intersection(now)), -abs(at - before), at) for at, now in enumerate(fresh.rows))
        if shared:
            return (after - 1) % len(fresh.rows)
    return NO_ROW
