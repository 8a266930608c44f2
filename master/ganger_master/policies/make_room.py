"""Make-room search: which running gangs to move or preempt so that a gang fits, at least cost.

On one node the search finds the cheapest solution: nodes are searched in order of a lower bound of the cost there, and
on each node all sets of gangs in order of cost. For gangs over several nodes the cheapest are emptied one by one.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from itertools import islice
from typing import Final

import numpy as np
from ganger.cluster.capacity_index import CapacityIndex, Claims, Trial
from ganger.cluster.claims import evenly, greedily, make_claim
from ganger.cluster.fit import gang_level
from ganger.cluster.preferences import BEST_FIT
from ganger.cluster.resources import GangShape, LocalityLevel, accepts_type, shapes_by_type
from ganger.cluster.search import PlacementRequest
from ganger.cluster.view import LoadMode, View
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray

from ganger_master.policies.placements import PlacementPreference

MOST_MOVES: Final = 8
# Sets of gangs that one search tries, and the depth to which room is made for displaced gangs.
_MOST_LOOKS: Final = 512
_MOST_DEPTH: Final = 2
# Sets of gangs of one node, including those that hold too little.
_MOST_SETS: Final = 4096
# For gangs over several nodes: racks (fabrics) that are tried, nodes of one that are given up, sets of gangs of a node.
_MOST_SPANS: Final = 4
_MOST_OTHERS: Final = 32
_MOST_SETS_OF_MANY: Final = 4
# Moves of a plan that are checked for whether they are needed.
_MOST_DROPPED: Final = 32


class Movable(Struct, frozen=True, gc=False):
    """A running gang. `shape`: what it accepts elsewhere. Infinite costs: it may not be moved, or not be preempted.
    `kind`: gangs of one kind behave alike; empty if unknown."""

    number: int
    shape: GangShape
    claims: Claims
    move_cost: float = math.inf
    stop_cost: float = math.inf
    kind: str = ""
    # Claims of gangs on its devices that leave with it.
    beside: Claims = ()

    @property
    def held(self) -> Claims:
        """Return the claims that are released when it leaves."""
        return (*self.claims, *self.beside)

    @property
    def price(self) -> float:
        return min(self.move_cost, self.stop_cost)


@dataclass(frozen=True, slots=True)
class Displacement:
    """A gang and the claims that it moves to; without claims it is stopped."""

    gang: Movable
    claims: Claims

    @property
    def number(self) -> int:
        return self.gang.number

    @property
    def cost(self) -> float:
        return self.gang.move_cost if self.claims else self.gang.stop_cost


@dataclass(frozen=True, slots=True)
class RoomPlan:
    """Claims where a gang fits after `moves`, made in this order; keep them for the gang. Costs are in GPU-seconds."""

    claims: Claims
    moves: tuple[Displacement, ...] = ()

    @property
    def cost(self) -> float:
        return sum([move.cost for move in self.moves])


class Movables:
    """Gangs of finite price by the nodes they are on. The order of `gangs` makes no difference."""

    def __init__(self, view: View, gangs: Iterable[Movable]) -> None:
        self.gangs = sorted((gang for gang in gangs if gang.price < math.inf), key=lambda gang: gang.number)
        parts = [
            (slot, claim.device_mask.bit_count(), index)
            for index, gang in enumerate(self.gangs)
            for claim in gang.claims
            if (slot := view.slots.get(claim.node)) is not None
        ]
        slots, gpus, index = np.array(parts, np.int64).reshape(-1, 3).T
        prices = np.array([gang.price for gang in self.gangs])[index] if parts else np.zeros(0)
        by_gpu = np.divide(prices, gpus, out=np.full(len(prices), np.inf), where=gpus > 0)
        order = np.lexsort((index, by_gpu, slots))
        self._slots, self._gpus, self._index, self._prices = (column[order] for column in (slots, gpus, index, prices))
        # Devices of the gangs before on the same node.
        before = np.cumsum(self._gpus) - self._gpus
        starts = np.searchsorted(self._slots, self._slots)
        self._before = before - before[starts] if len(starts) else before

    def on(self, slot: int) -> list[int]:
        """Return the positions in `gangs` of those on a node, the cheapest for each device first."""
        start, end = np.searchsorted(self._slots, (slot, slot + 1))
        return list(dict.fromkeys(self._index[start:end].tolist()))

    def least(self, missing: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return by slot the least cost of `missing` devices, if gangs could be cut; infinite if they hold fewer."""
        wanted = np.clip(missing[self._slots] - self._before, 0, self._gpus)
        share = np.divide(wanted, self._gpus, out=np.zeros(len(wanted)), where=self._gpus > 0)
        size = len(missing)
        if not self.gangs:
            return np.where(missing > 0, np.inf, 0.0)
        cost = np.bincount(self._slots, share * self._prices, size)
        enough = np.bincount(self._slots, wanted, size) >= missing
        return np.where(enough, cost, np.inf)


def room_for(
    room: CapacityIndex,
    movables: Movables,
    shape: GangShape,
    *,
    placement: PlacementPreference = BEST_FIT,
    most_moves: int = MOST_MOVES,
    most_cost: float = math.inf,
    avoid: Collection[str] = (),
    stay: Collection[int] = (),
) -> RoomPlan | None:
    """Return the cheapest plan that costs less than `most_cost`; None where there is none.

    `movables`: gangs on the room's view. `most_cost`: expected loss of the gang by waiting, in GPU-seconds.
    `placement`: places the displaced gangs, and the gang where it fits already. `avoid`: nodes on which no gang is
    placed. `stay`: numbers of gangs that are not displaced. The room is left unchanged.
    """
    closed = frozenset(avoid)
    claims = placement.place(room, PlacementRequest(shape, math.inf, avoid=closed))
    if claims is not None:
        return RoomPlan(claims)
    search = _Search(room, movables, placement, stay)
    found = None
    if shape.nodes <= 1:
        found = search.on_one_node(shape, closed, closed, most_cost, most_moves, _MOST_DEPTH)
    if shape.gpus and shape.nodes != 1 and shape.tasks > 1 and shape.locality.widest > LocalityLevel.NODE:
        if found is None:
            by_type = [search.over_nodes(one, closed, most_cost, most_moves) for one in shapes_by_type(shape)]
            found = min(
                [room_plan for room_plan in by_type if room_plan is not None],
                key=lambda room_plan: room_plan.cost,
                default=None,
            )
        # The gang need not fill the nodes that were emptied for it: fragments may suffice.
        found = None if found is None else search.without_needless(found, shape, closed)
    return found


def in_order(moves: Sequence[Displacement]) -> tuple[tuple[Displacement, ...], tuple[Displacement, ...]]:
    """Return the moves in an order in which each place is left before it is taken, and the moves that are parked first.
    Parked in host memory are gangs that move to a part of their own place, and the cheapest of each cycle."""
    parked = sorted((move for move in moves if overlap(move.claims, move.gang.claims)), key=lambda move: move.number)
    left = sorted((move for move in moves if move not in parked), key=lambda move: (bool(move.claims), move.number))
    ordered: list[Displacement] = []
    while left:
        free = [move for move in left if not any(overlap(move.claims, other.gang.claims) for other in left)]
        if free:
            ordered.append(free[0])
            left.remove(free[0])
        else:
            # Parking it frees its place and so breaks the cycle.
            parked.append(min(left, key=lambda move: (move.cost, move.number)))
            left.remove(parked[-1])
    return (*ordered, *parked), tuple(parked)


def overlap(some: Claims, others: Claims) -> bool:
    """Return whether both name a device in common."""
    held = {claim.node: claim.device_mask for claim in others}
    return any(claim.device_mask & held.get(claim.node, 0) for claim in some)


def no_further(shape: GangShape, widest: LocalityLevel) -> GangShape:
    """Return the shape that accepts places up to this level, without a preference."""
    return replace(shape, locality=replace(shape.locality, widest=widest, wish=None))


class _Search:
    def __init__(
        self, room: CapacityIndex, movables: Movables, placement: PlacementPreference, stay: Collection[int]
    ) -> None:
        self._room = room
        self._movables = movables
        self._placement = placement
        self._trying = Trial(room)
        # Gangs that stay or are being moved.
        self._busy = frozenset(stay)
        self._looks = _MOST_LOOKS

    def on_one_node(
        self,
        shape: GangShape,
        avoid: frozenset[str],
        closed: frozenset[str],
        most_cost: float,
        most_moves: int,
        depth: int,
    ) -> RoomPlan | None:
        """Return the cheapest plan below `most_cost` on a node not in `avoid`; no gang moves to a node in `closed`."""
        view = self._room.view
        everything = tuple([role.tasks for role in shape.roles])
        widest = min(shape.locality.widest, LocalityLevel.NODE)
        least = self._least(shape, shape.gpus, avoid)
        best: RoomPlan | None = None
        for slot in _least_first(least, most_cost, self._looks):
            if least[slot] >= most_cost or self._looks <= 0:
                break
            for gangs in self._sets(slot, shape.gpus, most_moves, widest):
                if sum([gang.price for gang in gangs]) >= most_cost or self._looks <= 0:
                    break
                self._looks -= 1
                mark = self._trying.mark
                for gang in gangs:
                    self._trying.give(gang.held)
                claim = make_claim(view, slot, shape, everything, LoadMode.PACK, widest)
                moves = None
                if claim is not None:
                    self._trying.take((claim,))
                    moves = self._rehome(gangs, closed, {view.nodes[slot]}, most_cost, most_moves, depth)
                self._trying.undo(mark)
                if claim is not None and moves is not None:
                    best = RoomPlan((claim,), moves)
                    most_cost = best.cost
        return best

    def over_nodes(self, shape: GangShape, avoid: frozenset[str], most_cost: float, most_moves: int) -> RoomPlan | None:
        """Return a plan cheaper than `most_cost` on nodes that the gang fills, in one rack if that costs no more."""
        devices = max([topology.devices for topology in self._room.view.topologies], default=0)
        count = shape.nodes or -(-shape.gpus // max(1, devices))
        share = -(-shape.gpus // count)
        least = self._least(shape, share, avoid)
        able = np.flatnonzero(np.isfinite(least))
        by_cost = able[np.argsort(least[able], kind="stable")]
        spans = [
            (float(least[slots[:count]].sum()), level, slots[: count + _MOST_OTHERS].tolist())
            for level in (LocalityLevel.RACK, LocalityLevel.FABRIC, LocalityLevel.CLUSTER)
            if level <= shape.locality.widest
            for slots in self._spans(level, by_cost)
            if len(slots) >= count
        ]
        best: RoomPlan | None = None
        for cost, _, nodes in sorted(spans)[:_MOST_SPANS]:
            if cost < most_cost:
                found = self._emptied(shape, nodes, count, share, avoid, most_cost, most_moves)
                if found is not None:
                    best, most_cost = found, found.cost
        return best

    def without_needless(self, room_plan: RoomPlan, shape: GangShape, avoid: frozenset[str]) -> RoomPlan:
        """Return the plan without moves that it does not need; the dearest are tried first."""
        for move in sorted(room_plan.moves[:_MOST_DROPPED], key=lambda move: (-move.cost, move.number)):
            others = tuple([other for other in room_plan.moves if other is not move])
            left = {claim.node for claim in move.gang.held}
            if any(claim.node in left for other in others for claim in other.claims):
                # Others move to what it leaves.
                continue
            for other in others:
                self._trying.give(other.gang.held)
            for other in others:
                self._trying.take(other.claims)
            claims = self._placement.place(self._room, PlacementRequest(shape, math.inf, avoid=avoid))
            self._trying.undo()
            if claims is not None:
                room_plan = RoomPlan(claims, others)
        return room_plan

    def _emptied(
        self,
        shape: GangShape,
        slots: Sequence[int],
        count: int,
        share: int,
        avoid: frozenset[str],
        most_cost: float,
        most_moves: int,
    ) -> RoomPlan | None:
        """Return a plan on the cheapest of these nodes whose gangs find room elsewhere, node by node."""
        view = self._room.view
        start, busy = self._trying.mark, self._busy
        chosen: list[int] = []
        moves: list[Displacement] = []
        cost = 0.0
        for at, slot in enumerate(slots):
            # No gang moves to nodes that are emptied, or may be next.
            names = avoid | {view.nodes[other] for other in (*chosen, *slots[at : at + count - len(chosen)])}
            found = self._emptied_node(slot, share, names, most_cost - cost, most_moves - len(moves))
            if found is None:
                continue
            self._busy |= {move.number for move in found}
            moves.extend(found)
            cost += sum([move.cost for move in found])
            chosen.append(slot)
            if len(chosen) == count:
                break
        claims = (evenly if shape.nodes else greedily)(view, shape, chosen, LoadMode.PACK)
        room_plan = None
        if claims is not None and gang_level(view, claims) <= shape.locality.widest:
            room_plan = RoomPlan(claims, tuple(moves))
        self._trying.undo(start)
        self._busy = busy
        return room_plan

    def _emptied_node(
        self, slot: int, share: int, avoid: frozenset[str], most_cost: float, most_moves: int
    ) -> tuple[Displacement, ...] | None:
        """Return the moves that free a share of a node, and apply them to the room; None leaves it unchanged."""
        for gangs in islice(self._sets(slot, share, most_moves, LocalityLevel.NODE), _MOST_SETS_OF_MANY):
            mark = self._trying.mark
            for gang in gangs:
                self._trying.give(gang.held)
            moves = self._rehome(gangs, avoid, frozenset(), most_cost, most_moves, 1)
            if moves is not None:
                return moves
            self._trying.undo(mark)
        return None

    def _rehome(
        self,
        gangs: Sequence[Movable],
        closed: frozenset[str],
        left: Set[str],
        most_cost: float,
        most_moves: int,
        depth: int,
    ) -> tuple[Displacement, ...] | None:
        """Return moves of these released gangs to other nodes, applied to the room for the caller to undo; None where a
        gang finds no place, or at `most_cost` or more."""
        before = self._busy
        self._busy = before | {gang.number for gang in gangs}
        moves: list[Displacement] = []
        rest = sorted(gangs, key=lambda gang: (-gang.shape.gpus, gang.number))
        while rest:
            gang = rest.pop(0)
            most = most_cost - sum([move.cost for move in moves]) - sum([other.price for other in rest])
            found = self._rehome_one(gang, closed, left, most, most_moves - len(moves) - len(rest), depth)
            if not found:
                self._busy = before
                return None
            moves.extend(found)
        self._busy = before
        return tuple(moves)

    def _rehome_one(
        self, gang: Movable, closed: frozenset[str], left: Set[str], most_cost: float, most_moves: int, depth: int
    ) -> tuple[Displacement, ...]:
        if most_moves < 1:
            return ()
        if gang.move_cost < min(most_cost, gang.stop_cost):
            avoid = closed | left
            claims = self._placement.place(self._room, PlacementRequest(gang.shape, math.inf, avoid=avoid))
            if claims is not None:
                self._trying.take(claims)
                return (Displacement(gang, claims),)
            most = min(most_cost, gang.stop_cost) - gang.move_cost
            room_plan = self.on_one_node(gang.shape, avoid, closed, most, most_moves - 1, depth - 1) if depth else None
            if room_plan is not None:
                for move in room_plan.moves:
                    self._trying.give(move.gang.held)
                for claims in (*(move.claims for move in room_plan.moves), room_plan.claims):
                    self._trying.take(claims)
                self._busy |= {move.number for move in room_plan.moves}
                return (*room_plan.moves, Displacement(gang, room_plan.claims))
        return (Displacement(gang, ()),) if gang.stop_cost < most_cost else ()

    def _least(self, shape: GangShape, gpus: int, avoid: frozenset[str]) -> NDArray[np.float64]:
        """Return by slot the least cost of `gpus` devices there; infinite where the gang cannot be placed."""
        view = self._room.view
        size = len(view.nodes)
        columns = view.columns()
        missing = np.maximum(gpus - np.bitwise_count(columns.free[:size]).astype(np.int64), 0)
        least = self._movables.least(missing)
        hosts = {
            view.set_code(name): of.devices >= gpus and accepts_type(shape.device_type, of.device_type)
            for name, of in view.sets.items()
        }
        fits = np.array([hosts[code] for code in range(len(hosts))], np.bool_)
        least[~(columns.available[:size] & fits[columns.sets[:size]])] = np.inf
        if shape.partition:
            least[[not topology.is_in(shape.partition) for topology in view.topologies]] = np.inf
        least[[view.slots[name] for name in avoid | shape.closed_nodes if name in view.slots]] = np.inf
        return least

    def _spans(self, level: LocalityLevel, slots: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        """Group slots by rack or fabric, without nodes that are in none, or return one group. Keep their order."""
        if level is LocalityLevel.CLUSTER:
            return [slots]
        columns = self._room.view.columns()
        codes = (columns.racks if level is LocalityLevel.RACK else columns.fabrics)[slots]
        slots, codes = slots[codes > 0], codes[codes > 0]
        by_code = np.argsort(codes, kind="stable")
        return np.split(slots[by_code], np.flatnonzero(np.diff(codes[by_code])) + 1)

    def _sets(self, slot: int, gpus: int, most: int, widest: LocalityLevel) -> Iterator[tuple[Movable, ...]]:
        """Yield sets of gangs on a node whose devices there, with the free ones, are enough: the cheapest first, then
        the smallest. Equivalent sets are yielded once."""
        view = self._room.view
        name = view.nodes[slot]
        missing = gpus - view.free[slot].bit_count()
        there = [
            (gang, claim)
            for gang in (self._movables.gangs[index] for index in self._movables.on(slot))
            if gang.number not in self._busy
            for claim in gang.claims
            if claim.node == name
        ]
        # Gangs of the same kind are interchangeable, and sorted beside each other.
        kinds: dict[tuple[object, ...], int] = {}
        kind_of: dict[int, int] = {}
        for gang, claim in there:
            mask = claim.device_mask if widest < LocalityLevel.NODE else claim.device_mask.bit_count()
            held = (claim.millicores, claim.memory_bytes, claim.bandwidth, mask)
            kind = (gang.shape, gang.price, len(gang.claims), *held, gang.beside)
            kind_of[gang.number] = kinds.setdefault(kind, len(kinds))
        there.sort(key=lambda pair: (pair[0].price, kind_of[pair[0].number], pair[0].number))
        ways = cheapest_first(
            [gang.price for gang, _ in there],
            [claim.device_mask.bit_count() for _, claim in there],
            [kind_of[gang.number] for gang, _ in there],
            missing,
            most,
        )
        return (tuple([there[at][0] for at in chosen]) for chosen in ways)


def _least_first(least: NDArray[np.float64], below: float, most: int) -> list[int]:
    """Return the positions of values below `below`, least first; at least `most` of them if there are so many."""
    able = np.flatnonzero(least < below)
    if len(able) > most:
        able = able[least[able] <= np.partition(least[able], most)[most]]
    positions: list[int] = able[np.argsort(least[able], kind="stable")].tolist()
    return positions


def cheapest_first(
    prices: Sequence[float], gpus: Sequence[int], kinds: Sequence[int], missing: int, most: int
) -> Iterator[tuple[int, ...]]:
    """Yield sets of at most `most` positions that have the missing devices, by the sum of their prices, which ascend;
    of equal ones the smaller. Positions of one kind are adjacent, and taken from the first one on."""
    if missing <= 0:
        yield ()
    end = len(prices)
    # Devices from a position on, and where the next kind begins.
    after, following = [0] * (end + 1), [end] * (end + 1)
    for at in range(end - 1, -1, -1):
        after[at] = after[at + 1] + gpus[at]
        following[at] = following[at + 1] if at + 1 < end and kinds[at + 1] == kinds[at] else at + 1
    waiting: list[tuple[float, int, tuple[int, ...]]] = []

    def consider(cost: float, held: int, chosen: tuple[int, ...], last: int) -> None:
        if last < end and held + after[last] >= missing and len(chosen) < most:
            heapq.heappush(waiting, (cost + prices[last], len(chosen) + 1, (*chosen, last)))

    consider(0.0, 0, (), 0)
    for _ in range(_MOST_SETS):
        if not waiting:
            return
        cost, _, chosen = heapq.heappop(waiting)
        before, last = chosen[:-1], chosen[-1]
        held = sum([gpus[at] for at in before])
        if held + gpus[last] >= missing:
            yield chosen
        consider(cost - prices[last], held, before, following[last])
        consider(cost, held + gpus[last], chosen, last + 1)
