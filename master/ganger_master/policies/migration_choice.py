"""Choice of migrations: closer together, out of a co-location, off a node, into fewer nodes.

A migration costs a pause. It is proposed where the expected saving is larger, and reverted where the job is measured to
be slower than before (`verdict`). `make_room` makes room for pending gangs. The number of concurrent migrations is
capped, to bound the load of networks and hosts.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final, TypeAlias

import numpy as np
from ganger.cluster.capacity_index import CapacityIndex, Claims, Trial
from ganger.cluster.fit import gang_level
from ganger.cluster.preferences import BEST_FIT
from ganger.cluster.resources import GangShape, LocalityLevel
from ganger.cluster.search import PlacementRequest
from ganger.cluster.view import View
from msgspec.structs import replace

from ganger_master.estimators.slowdown import LocalityModel
from ganger_master.policies.make_room import Displacement, Hole, Movable, Movables, hole_for
from ganger_master.policies.placements import PlacementPreference
from ganger_master.policies.trials import FailedTrials, Judged, TrialRates, judge

# Gandiva (OSDI 2018, section 3.3): a node that is not idle is fragmented when three of its four GPUs are free.
FRAGMENTED: Final = 0.75
# Least gain of a migration for locality; less is noise.
LEAST_GAIN: Final = 0.05
# Part of its rate that a migration for other jobs may cost a gang.
_MOST_LOSS: Final = 0.05
# Pairs of gangs of one search for places to exchange.
_MOST_LOOKS: Final = 128
# Minimum time between two migrations of a job.
_REST_S: Final = 600.0


class MigrationReason(Enum):
    LOCALITY = "closer together"
    HOLE = "room for a gang that waits"
    UNPACK = "a GPU of its own"
    DRAIN = "off the node"
    DEFRAGMENT = "fewer nodes half empty"
    EXCHANGE = "its place for another that needs it more"
    UNDO = "back where it was faster"
    BALANCE = "off a node where it is slower beside others"


@dataclass(frozen=True, slots=True)
class MigrationProposal:
    """Migrations that belong together, the gang's own last. `saves`: GPU-seconds, net of the cost of the migrations."""

    why: MigrationReason
    moves: tuple[Displacement, ...]
    saves: float = 0.0

    @property
    def nodes(self) -> frozenset[str]:
        """Return the nodes that a gang leaves or comes to."""
        return frozenset(claim.node for move in self.moves for claim in (*move.gang.claims, *move.claims))


@dataclass(frozen=True, slots=True)
class GangDistance:
    """A running gang and its locality model. `remaining_s`: its expected remaining time; without an estimate the time
    that it has run."""

    gang: Movable
    locality: LocalityModel
    remaining_s: float
    # How far apart the job may lie; None: no further than now.
    widest: LocalityLevel | None = None


@dataclass(frozen=True, slots=True)
class Packed:
    """A co-location: the sum of its residents' normalised rates, and those of them that may move."""

    gain: float
    residents: int
    movable: tuple[Movable, ...]

    @property
    def lost(self) -> float:
        """The share of its rate alone that each resident loses on average."""
        return 1.0 - self.gain / self.residents

    @property
    def is_slow(self) -> bool:
        """Return whether it loses more than noise."""
        return self.lost >= LEAST_GAIN


# The kind of a job, or the job itself, and the nodes where it was slow.
Tried: TypeAlias = tuple[str, frozenset[str]]
_NOTHING: Final[FailedTrials[Tried]] = FailedTrials()
_NO_OTHERS: Final = Movables(View(), ())


def tried(number: int, kind: str, claims: Claims) -> Tried:
    """Return the key of a failed place: the kind of the job, or the job if that is unknown, and the nodes."""
    return kind or f"jobs/{number}", frozenset([claim.node for claim in claims])


class FreeDeviceCounts:
    """The free devices of a view as it is now, counted by node, rack and fabric, as a bound for places of gangs."""

    def __init__(self, view: View) -> None:
        self._view = view
        columns, size = view.columns(), len(view.nodes)
        free = np.bitwise_count(columns.free[:size]).astype(np.int64)
        self._most = int(free.max(initial=0))
        # Nodes of no rack are under the first code, and are not close to each other.
        self._groups = [
            (level, codes[:size], sums, int(sums[1:].max()))
            for level, codes in ((LocalityLevel.RACK, columns.racks), (LocalityLevel.FABRIC, columns.fabrics))
            if len(sums := np.bincount(codes[:size], free)) > 1
        ]

    def closest(self, claims: Claims) -> LocalityLevel:
        """Return a lower bound of the locality level of free places for a gang with these claims, whose own devices
        count as free: the closest of node, rack and fabric with enough of them. Levels within a node are not
        distinguished."""
        slots, free = self._view.slots, self._view.free
        gpus = sum([claim.device_mask.bit_count() for claim in claims])
        if self._most >= gpus:
            return LocalityLevel.NVLINK
        own = [(slots[claim.node], claim.device_mask.bit_count()) for claim in claims]
        if max([free[slot].bit_count() + count for slot, count in own]) >= gpus:
            return LocalityLevel.NVLINK
        for level, codes, sums, most in self._groups:
            returned: Counter[int] = Counter()
            for slot, count in own:
                returned[int(codes[slot])] += count
            if max([most, *[sums[code] + count for code, count in returned.items() if code]]) >= gpus:
                return level
        return LocalityLevel.CLUSTER

    def has_closer(self, claims: Claims) -> bool:
        """Return whether a gang with these claims could have room closer together than it is."""
        present = gang_level(self._view, claims)
        return present > LocalityLevel.NVLINK and self.closest(claims) < present


def worth_going_back(gain: float, remaining_s: float, pause_s: float) -> bool:
    """Return whether a job that runs at `gain` times its former rate saves more by moving back than that takes."""
    return gain < 1.0 - _MOST_LOSS and (1.0 - gain) * remaining_s > pause_s


def pays_anywhere_s(gang: Movable) -> float:
    """Return how many seconds a gang must be expected to run for its move to pay wherever it is faster at all."""
    return gang.move_cost / max(1, gang.shape.gpus) * (1.0 + LEAST_GAIN) / LEAST_GAIN


def movable(view: View, number: int, shape: GangShape, claims: Claims, pause_s: float, kind: str = "") -> Movable:
    """Return a gang that pays with a pause for a move, and never moves further apart than now."""
    widest = min(shape.locality.widest, max(gang_level(view, claims), _of_one_node(shape)))
    narrowed = replace(shape, locality=replace(shape.locality, widest=widest, wish=None))
    return Movable(number, narrowed, claims, pause_s * shape.gpus, kind=kind)


def verdict(why: MigrationReason, rates: TrialRates) -> Judged:
    """Judge a moved job: it stays if it is faster, where it was moved for its own sake, else if it is not slower."""
    own_sake = why in (MigrationReason.LOCALITY, MigrationReason.UNPACK, MigrationReason.BALANCE)
    return judge([rates], 1.0 if own_sake else 1.0 - _MOST_LOSS)


def closer(
    room: CapacityIndex,
    gangs: Iterable[GangDistance],
    *,
    now: float = 0.0,
    failed: FailedTrials[Tried] = _NOTHING,
    others: Movables | None = None,
    placement: PlacementPreference = BEST_FIT,
) -> list[MigrationProposal]:
    """Return migrations of gangs to closer places, the largest saving first.

    Places are free or, with `others`, freed by moving these, through host memory on a full cluster.
    """
    found = []
    trying = Trial(room)
    # With `others` any place may become free.
    free = FreeDeviceCounts(room.view) if others is None else None
    worth = [
        (-most, one.gang.number, one)
        for one in gangs
        if (free is None or free.has_closer(one.gang.claims))
        and (most := _could_save(room.view, one)) > one.gang.move_cost
    ]
    for *_, one in sorted(worth):
        closest = LocalityLevel.NVLINK if free is None else free.closest(one.gang.claims)
        saves, hole = _better_place(trying, one, others, placement, closest)
        if saves > 0.0 and not failed.holds(tried(one.gang.number, one.gang.kind, hole.claims), now):
            found.append(
                MigrationProposal(MigrationReason.LOCALITY, (*hole.moves, Displacement(one.gang, hole.claims)), saves)
            )
            # A place that a gang leaves is still held in this plan, so no other gang moves into it. On a node that it
            # stays on, its host memory would count twice.
            if not hole.moves and not {claim.node for claim in hole.claims} & {claim.node for claim in one.gang.claims}:
                trying.take(hole.claims)
                free = free and FreeDeviceCounts(room.view)
    trying.undo()
    return sorted(found, key=lambda proposal: (-proposal.saves, proposal.moves[-1].number))


def exchanged(
    room: CapacityIndex,
    gangs: Iterable[GangDistance],
    others: Iterable[GangDistance],
    *,
    now: float = 0.0,
    failed: FailedTrials[Tried] = _NOTHING,
    placement: PlacementPreference = BEST_FIT,
) -> list[MigrationProposal]:
    """Return exchanges of places between a gang and one of the `others`, the largest saving first.

    They swap, or divide both places and the free devices there anew. The saving of the gang exceeds both pauses and the
    other's loss, and the other's rate falls by at most `_MOST_LOSS`. The gang that gains is the last of the moves.
    """
    gangs = sorted(gangs, key=lambda one: (-_could_save(room.view, one), one.gang.number))
    others = sorted(others, key=lambda one: one.gang.number)
    found: list[MigrationProposal] = []
    trying = Trial(room)
    done: set[int] = set()
    looks = _MOST_LOOKS
    for one in gangs:
        if one.gang.number in done or _could_save(room.view, one) <= one.gang.move_cost:
            continue
        best: tuple[float, MigrationProposal] | None = None
        for other in others:
            if other.gang.number in done | {one.gang.number} or looks <= 0:
                continue
            looks -= 1
            way = _exchange(trying, one, other, placement)
            if way is not None and (best is None or way[0] > best[0]):
                moves = way[1].moves
                if not any(failed.holds(tried(move.number, move.gang.kind, move.claims), now) for move in moves):
                    best = way
        if best is not None:
            found.append(best[1])
            done.update(move.number for move in best[1].moves)
    return found


def _exchange(
    trying: Trial, one: GangDistance, other: GangDistance, placement: PlacementPreference
) -> tuple[float, MigrationProposal] | None:
    """Return the best exchange of two gangs and the GPU-seconds that it saves; None if none saves any. One gang goes as
    close together as possible on the devices of both and free ones, the other where room is left."""
    if math.inf in (one.gang.move_cost, other.gang.move_cost):
        return None
    mark, room = trying.mark, trying.room
    there = frozenset(claim.node for gang in (one.gang, other.gang) for claim in gang.claims)
    elsewhere = frozenset(room.view.slots) - there
    trying.give(one.gang.claims)
    trying.give(other.gang.claims)
    best: tuple[float, MigrationProposal] | None = None
    # Once for all levels: to hide a node takes as long as to look for a place on it.
    with room.excluding(elsewhere):
        for level in range(LocalityLevel.NVLINK, gang_level(room.view, one.gang.claims)):
            shape = replace(
                one.gang.shape, locality=replace(one.gang.shape.locality, widest=LocalityLevel(level), wish=None)
            )
            claims = placement.place(room, PlacementRequest(shape, math.inf))
            if claims is None:
                continue
            trying.take(claims)
            others = placement.place(room, PlacementRequest(_wide(other), math.inf))
            trying.undo(mark + len(one.gang.claims) + len(other.gang.claims))
            # An exchange in which the other stays is a migration of one gang.
            if others is None or not _overlap(claims, other.gang.claims):
                continue
            speeds = [_speed(room.view, other, place) for place in (other.gang.claims, others)]
            if speeds[1] < (1.0 - _MOST_LOSS) * speeds[0]:
                continue
            loses = other.remaining_s * other.gang.shape.gpus * (1.0 - speeds[1] / speeds[0])
            saves = _saves(room.view, one, claims) - loses - one.gang.move_cost - other.gang.move_cost
            if saves > 0.0 and (best is None or saves > best[0]):
                best = (
                    saves,
                    MigrationProposal(
                        MigrationReason.EXCHANGE,
                        (Displacement(other.gang, others), Displacement(one.gang, claims)),
                        saves,
                    ),
                )
    trying.undo(mark)
    return best


def _wide(one: GangDistance) -> GangShape:
    """Return the shape of the gang with the widest locality that the job accepts, even if it is wider than now."""
    shape = one.gang.shape
    return shape if one.widest is None else replace(shape, locality=replace(shape.locality, widest=one.widest))


def unpacked(
    room: CapacityIndex,
    packs: Iterable[Packed],
    horizon_s: float,
    placement: PlacementPreference = BEST_FIT,
    *,
    now: float = 0.0,
    failed: FailedTrials[Tried] = _NOTHING,
) -> list[MigrationProposal]:
    """Return migrations out of co-locations to idle GPUs: the co-location that loses most first, its cheapest resident.

    `horizon_s`: how long the GPUs are expected to stay idle.
    """
    found = []
    trying = Trial(room)
    for pack in sorted(packs, key=lambda pack: (pack.gain - pack.residents, [one.number for one in pack.movable])):
        for one in sorted(pack.movable, key=lambda one: (one.move_cost, one.number)):
            # The others go on at least as fast as all of them did, and this one by itself.
            saves = pack.lost * one.shape.gpus * horizon_s - one.move_cost
            pays = saves > 0.0 and pack.is_slow
            claims = placement.place(room, PlacementRequest(one.shape, math.inf)) if pays else None
            if claims is not None and failed.holds(tried(one.number, one.kind, claims), now):
                continue
            if claims is not None:
                trying.take(claims)
                found.append(MigrationProposal(MigrationReason.UNPACK, (Displacement(one, claims),), saves))
                break
    trying.undo()
    return found


def drained(
    room: CapacityIndex,
    node: str,
    gangs: Iterable[Movable],
    others: Movables,
    placement: PlacementPreference = BEST_FIT,
) -> tuple[list[MigrationProposal], list[int]]:
    """Return migrations of all gangs off a node, the largest first, with the moves that make room for them elsewhere;
    and the numbers of the gangs that find no place or may not be moved."""
    found, stuck = [], []
    trying = Trial(room)
    there = [gang for gang in gangs if any(claim.node == node for claim in gang.claims)]
    on_the_way = {gang.number for gang in there}
    for gang in sorted(there, key=lambda gang: (-gang.shape.gpus, gang.number)):
        hole = None
        if gang.move_cost < math.inf:
            hole = hole_for(room, others, gang.shape, placement=placement, avoid=(node,), stay=on_the_way)
        if hole is None:
            stuck.append(gang.number)
            continue
        on_the_way.update(move.number for move in hole.moves)
        for move in hole.moves:
            trying.give(move.gang.claims)
        for claims in (*(move.claims for move in hole.moves), hole.claims):
            trying.take(claims)
        found.append(MigrationProposal(MigrationReason.DRAIN, (*hole.moves, Displacement(gang, hole.claims))))
    trying.undo()
    return found, stuck


def defragmented(
    room: CapacityIndex,
    gangs: Iterable[Movable],
    *,
    fragmented: float = FRAGMENTED,
    most_moves: int = 16,
    now: float = 0.0,
    failed: FailedTrials[Tried] = _NOTHING,
) -> list[MigrationProposal]:
    """Return Gandiva's migrations onto fewer nodes.

    Gangs leave the non-idle nodes with the most free devices for nodes with no more free devices, the smallest gang
    first, until no node is fragmented or no gang finds a place. A node that cannot be emptied is left alone.
    """
    view = room.view
    on: dict[str, list[Movable]] = {}
    for gang in gangs:
        if len(gang.claims) == 1 and gang.claims[0].device_mask and gang.move_cost < math.inf:
            on.setdefault(gang.claims[0].node, []).append(gang)
    for some in on.values():
        some.sort(key=lambda gang: (gang.shape.gpus, gang.number))
    found: list[MigrationProposal] = []
    trying = Trial(room)
    done: set[str] = set()
    while len(found) < most_moves:
        sources = [name for name in on if on[name] and name not in done and _is_fragmented(view, name, fragmented)]
        if not sources:
            break
        source = min(sources, key=lambda name: (-_free(view, name), name))
        gang = on[source].pop(0)
        # Where the least is left: if even there is more free than here, there is nothing to gain.
        claims = BEST_FIT.place(room, PlacementRequest(gang.shape, math.inf, avoid=frozenset({source})))
        if (
            claims is None
            or max(_free(view, claim.node) for claim in claims) > _free(view, source)
            or failed.holds(tried(gang.number, gang.kind, claims), now)
        ):
            done.add(source)
            continue
        # It has left: nothing counts on its old place before it has.
        trying.take(claims)
        trying.give(gang.claims)
        found.append(MigrationProposal(MigrationReason.DEFRAGMENT, (Displacement(gang, claims),)))
    trying.undo()
    return found


def capped(
    proposals: Iterable[MigrationProposal],
    now: float,
    moved_at: Mapping[int, float],
    busy_nodes: Collection[str],
    most: int,
) -> list[MigrationProposal]:
    """Return the proposals, in their order, that may begin now: at most `most` moves, one per node at a time, and no
    job that was moved within `_REST_S`."""
    chosen: list[MigrationProposal] = []
    busy = set(busy_nodes)
    left = most
    for proposal in proposals:
        if now >= rested_s(proposal, moved_at) and len(proposal.moves) <= left and not busy & proposal.nodes:
            chosen.append(proposal)
            busy |= proposal.nodes
            left -= len(proposal.moves)
    return chosen


def rested_s(proposal: MigrationProposal, moved_at: Mapping[int, float]) -> float:
    """Return when all gangs of the proposal may migrate again."""
    return max([moved_at.get(move.number, -math.inf) for move in proposal.moves], default=-math.inf) + _REST_S


def _better_place(
    trying: Trial,
    one: GangDistance,
    others: Movables | None,
    placement: PlacementPreference,
    closest: LocalityLevel,
) -> tuple[float, Hole]:
    """Return the GPU-seconds that the best closer place saves beyond its cost, and that place, at `closest` or wider.
    Free devices are preferred, so that the gang can move while it runs; then places with its own devices; then places
    from which others move."""
    room = trying.room
    best = (0.0, Hole(()))
    most = _could_save(room.view, one) - one.gang.move_cost
    for level in range(closest, gang_level(room.view, one.gang.claims)):
        locality = replace(one.gang.shape.locality, widest=LocalityLevel(level), wish=None)
        shape = replace(one.gang.shape, locality=locality)
        claims = placement.place(room, PlacementRequest(shape, math.inf))
        hole = None if claims is None else Hole(claims)
        if hole is None:
            mark = trying.mark
            trying.give(one.gang.claims)
            gone = others if others is not None else _NO_OTHERS
            hole = hole_for(room, gone, shape, placement=placement, most_cost=most, stay=(one.gang.number,))
            trying.undo(mark)
        if hole is not None:
            saves = _saves(room.view, one, hole.claims) - one.gang.move_cost - hole.cost
            if saves > best[0]:
                best = (saves, hole)
    return best


def _could_save(view: View, one: GangDistance) -> float:
    """Return the GPU-seconds that it would save if its GPUs were as close as possible on any nodes."""
    gpus = one.gang.shape.gpus
    most = max((made.devices for made in view.sets.values()), default=1)
    nodes = max(1, one.gang.shape.nodes, -(-gpus // max(1, most)))
    best = one.locality.relative_speed(gpus, nodes, LocalityLevel.NVLINK if nodes == 1 else LocalityLevel.RACK)
    return _saved(one, _speed(view, one, one.gang.claims), best)


def _saves(view: View, one: GangDistance, claims: Claims) -> float:
    return _saved(one, _speed(view, one, one.gang.claims), _speed(view, one, claims))


def _saved(one: GangDistance, now: float, then: float) -> float:
    return one.remaining_s * one.gang.shape.gpus * (1.0 - now / then) if then >= (1.0 + LEAST_GAIN) * now else 0.0


def _speed(view: View, one: GangDistance, claims: Claims) -> float:
    """Return the speed of the gang with these claims, relative to its best on one node."""
    with_devices = [claim for claim in claims if claim.device_mask]
    return one.locality.relative_speed(one.gang.shape.gpus, len(with_devices), gang_level(view, claims))


def _overlap(some: Claims, others: Claims) -> bool:
    held = {claim.node: claim.device_mask for claim in others}
    return any(claim.device_mask & held.get(claim.node, 0) for claim in some)


def _of_one_node(shape: GangShape) -> LocalityLevel:
    """Return the widest level within a node that the gang accepts: within one node it may move anywhere."""
    return min(shape.locality.widest, LocalityLevel.NODE)


def _free(view: View, name: str) -> int:
    return view.free[view.slots[name]].bit_count()


def fragmented_nodes(view: View, share: float = FRAGMENTED) -> frozenset[str]:
    """Return the nodes that are in use, with at least `share` of their devices free."""
    columns, size = view.columns(), len(view.nodes)
    devices = np.array([configuration_set.devices for configuration_set in view.sets.values()], np.int64)
    free, all_of = np.bitwise_count(columns.free[:size]), devices[columns.sets[:size]]
    return frozenset([view.nodes[slot] for slot in np.flatnonzero((free >= share * all_of) & (free < all_of)).tolist()])


def _is_fragmented(view: View, name: str, share: float) -> bool:
    devices = view.topology(name).devices
    return share * devices <= _free(view, name) < devices
