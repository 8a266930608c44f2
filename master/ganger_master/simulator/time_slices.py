"""Virtual time: scheduled actions, ordered by time and then by the order of scheduling; and the time-slice groups of
modelled nodes, with the same rotation as on daemons, without an event for each switch.

While all gangs of a group want their slices, `slice_rotation.SliceCourse` gives what each received between two looks. A
group is looked at when a gang ends, comes or leaves, and at the end of a slice while a new matrix is on its way or a
gang is gone. All nodes of a group act at the same time, so one member reports for them.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Final

from ganger.protocol.slice_rotation import NO_ROW, SliceCourse, SliceMatrix, SliceMember, SlicePosition, lead, quantum_s

from ganger_master.core.gang_model import Matrix

# A trace's clock begins at zero, and a time of zero means "never" in the core.
EPOCH_S = 1_000_000.0


def instant(time: float) -> float:
    """Return the time rounded to microseconds, so that times equal in decimals compare equal."""
    return round(time, 6)


class Clock:
    """A clock of virtual time with scheduled actions. `now`: seconds."""

    def __init__(self, start: float) -> None:
        self.now = start
        self._heap: list[tuple[float, int, Callable[[], None], Callable[[], bool] | None]] = []
        self._order = count()

    def at(self, time: float, act: Callable[[], None], is_void: Callable[[], bool] | None = None) -> None:
        """Schedule an action. `is_void`: whether the action is cancelled by then.

        Virtual time skips the instant of a cancelled action: no policy may observe when a job would have ended.
        """
        heapq.heappush(self._heap, (max(time, self.now), next(self._order), act, is_void))

    def next_time(self) -> float | None:
        heap = self._heap
        while heap:
            time, _, _, is_void = heap[0]
            if is_void is None or not is_void():
                return time
            heapq.heappop(heap)
        return None

    def run_instant(self) -> int:
        """Advance to the next instant, run all of its actions and return their number."""
        time = self.next_time()
        assert time is not None, "no action is scheduled"
        self.now = time
        done = 0
        while time == self.now:
            heapq.heappop(self._heap)[2]()
            done += 1
            time = self.next_time()
        return done


_MEMBER: Final = "all nodes"
# Sums of seconds are equal but for rounding.
_ROUNDING_S: Final = 1e-6


@dataclass(slots=True)
class SlicedPart:
    """A gang in a time-slice group.

    `start_s`: seconds from its first order until it trains; `has_run`: it was launched, or came with its state.
    `credit(held_s, trained_s, stops)`: takes the seconds for which it held devices and trained since the last call, and
    how often it was parked, and returns the seconds of training until its end. `starts(time)`: called when it first
    gets devices. `begins`: called once its first slice has begun. `release(time)`: the time at which it releases its
    devices if it ends at `time`.
    """

    start_s: float
    has_run: bool
    credit: Callable[[float, float, int], float]
    starts: Callable[[float], None]
    begins: Callable[[], None]
    release: Callable[[float], float]
    left_s: float = math.inf
    has_begun: bool = False
    finishes: float = math.inf


@dataclass
class SliceGroup:
    """A time-slice group. Times are of the replay's clock.

    `switch_s`: seconds that two gangs take to change places, of which the first takes `offload_s`. `parts`: gangs by
    epoch. `on`: those of the active row, or on devices before the first order. `ordered_at`: time of the last order;
    `dead_s` later the gangs that it resumes, `entering`, train. `is_steady`: all gangs want their slices.
    """

    number: int
    synced_at: float
    offload_s: float
    switch_s: float
    parts: dict[int, SlicedPart] = field(default_factory=dict)
    matrices: dict[int, SliceMatrix] = field(default_factory=dict)
    position: SlicePosition = field(default_factory=SlicePosition)
    ordered_at: float = 0.0
    dead_s: float = 0.0
    entering: frozenset[int] = frozenset()
    on: set[int] = field(default_factory=set)
    is_steady: bool = False
    # The slices after a position.
    _known: tuple[SlicePosition, SliceCourse] | None = None

    def desire(self, matrix: Matrix) -> None:
        rows, level = matrix.rows, int(matrix.level)
        self.matrices.setdefault(
            matrix.version, SliceMatrix(matrix.version, rows, matrix.quantum_s, level, (_MEMBER,), 1)
        )

    @property
    def ends_at(self) -> float:
        """Time at which the active slice is over."""
        quantum = self.position.quantum_s or quantum_s(self.matrices[self.position.version], self.switch_s)
        held_s = self.position.held_s
        return self.ordered_at + quantum - held_s + (0.0 if held_s else self.dead_s)

    # -- accounts ----------------------------------------------------------------------------------------------------

    def sync(self, now: float) -> None:
        """Credit the gangs with what they received until now."""
        if self.is_steady and now >= self.ends_at:
            ended_at = self.ends_at
            self._credit_slice(ended_at)
            matrix = self.matrices[self.position.version]
            use = self._course(matrix).advance(now - ended_at)
            row = matrix.rows[use.position.row]
            for epoch, part in self.parts.items():
                trained = use.received_s.get(epoch, 0.0)
                switching = self.switch_s * use.resumed.get(epoch, 0)
                if epoch in use.entering:
                    switching -= max(0.0, self.switch_s - use.since_s)
                stops = use.resumed.get(epoch, 0) + (epoch in self.on) - (epoch in row)
                part.left_s = part.credit(trained + switching, trained, stops)
            self.position, self.entering = use.position, use.entering
            self.ordered_at, self.dead_s = now - use.since_s, self.switch_s if use.entering else 0.0
            self.on = set(row)
        else:
            self._credit_slice(now)
        self.synced_at = now

    def _course(self, matrix: SliceMatrix) -> SliceCourse:
        if self._known is None or self._known[0] is not self.position:
            self._known = self.position, SliceCourse(self.position, matrix, self.switch_s)
        return self._known[1]

    def _credit_slice(self, until: float) -> None:
        held = until - self.synced_at
        trained = until - min(until, max(self.synced_at, self.ordered_at + self.dead_s))
        for epoch in self.on & self.parts.keys():
            part = self.parts[epoch]
            part.left_s = part.credit(held, trained if epoch in self.entering else held, 0)
        self.synced_at = until

    # -- orders ------------------------------------------------------------------------------------------------------

    def review(self, now: float) -> float:
        """Give the orders that are due and return when to look again; infinite: not before a change."""
        self.sync(now)
        while self.matrices:
            since = now - self.ordered_at + _ROUNDING_S
            started = since - self.dead_s if since >= self.dead_s else None
            position = lead(self.position, self.matrices, {_MEMBER: self._member()}, since, started)
            if position is None:
                break
            self._order(position, now)
        self._begin(now)
        self.is_steady = self._may_be_steady()
        if not self.parts:
            return math.inf
        look = min([self._finish_time(epoch, part, now) for epoch, part in self.parts.items()])
        if not self.is_steady:
            look = min(look, self.ends_at if self.ends_at > now + _ROUNDING_S else math.inf)
        if any(not self.parts[epoch].has_begun for epoch in self.on & self.parts.keys()):
            look = min(look, self.ordered_at + self.dead_s)
        return max(look, now)

    def finished(self, now: float) -> list[int]:
        """Return the epochs of gangs that are done by now."""
        return [epoch for epoch, part in self.parts.items() if part.finishes <= now + _ROUNDING_S]

    def _member(self) -> SliceMember:
        alive = frozenset(self.parts)
        unstarted = frozenset([epoch for epoch, part in self.parts.items() if not part.has_run])
        has_started = self.synced_at + _ROUNDING_S >= self.ordered_at + self.dead_s
        running = frozenset(self.on) & alive - unstarted
        return SliceMember(
            self.position, max(self.matrices), has_started, alive, running, self.switch_s, unstarted=unstarted
        )

    def _order(self, position: SlicePosition, now: float) -> None:
        is_switch = position.switch != self.position.switch
        is_first = self.position.row == NO_ROW
        self.position = position
        self.ordered_at, self.dead_s, self.entering = now, 0.0, frozenset()
        self.matrices = {version: one for version, one in self.matrices.items() if version >= position.version}
        if not is_switch:
            return
        row = set(self.matrices[position.version].rows[position.row]) & self.parts.keys()
        leaving, entering = self.on - row, row - self.on
        self.entering, self.on = frozenset(entering), row
        if is_first:
            # As after a switch, so that slices and switches of rounds begin with rounds.
            self.dead_s = self.switch_s
        elif entering:
            restore_s = self.switch_s - self.offload_s
            each = [restore_s if self.parts[e].has_run else self.parts[e].start_s for e in entering]
            self.dead_s = max(each) + (self.offload_s if leaving & self.parts.keys() else 0.0)
        for epoch in entering:
            self.parts[epoch].starts(now)
            self.parts[epoch].has_run = True
        for epoch in leaving & self.parts.keys():
            self.parts[epoch].credit(0.0, 0.0, 1)

    def _begin(self, now: float) -> None:
        if now + _ROUNDING_S < self.ordered_at + self.dead_s:
            return
        for epoch in self.on & self.parts.keys():
            part = self.parts[epoch]
            if not part.has_begun:
                part.has_begun = True
                part.begins()

    def _may_be_steady(self) -> bool:
        matrix = self.matrices.get(self.position.version)
        if matrix is None or self.position.version != max(self.matrices):
            return False
        return matrix.epochs == self.parts.keys() and all(part.has_run for part in self.parts.values())

    def _finish_time(self, epoch: int, part: SlicedPart, now: float) -> float:
        """Return when a gang ends if nothing changes; infinite if that is not before the next look anyway."""
        part.finishes = math.inf
        left, ends_at = part.left_s, self.ends_at
        if ends_at <= now + _ROUNDING_S:
            # No other gang wants a slice.
            ends_at = math.inf
        if epoch in self.on:
            begins = max(now, self.ordered_at + self.dead_s) if epoch in self.entering else now
            if begins + left <= ends_at:
                part.finishes = part.release(begins + left)
                return part.finishes
            left -= max(0.0, ends_at - begins)
        if self.is_steady:
            matrix = self.matrices[self.position.version]
            part.finishes = part.release(ends_at + self._course(matrix).time_to_receive(epoch, left))
        return part.finishes
