"""Choice of migrations: closer together, out of a co-location, off a node, into fewer nodes, off crowded nodes.

One is proposed where the expected saving exceeds the cost, and reverted where it is measured to be slower (`verdict`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
from ganger.cluster.capacity_index import CapacityIndex, Claims, Trial
from ganger.cluster.fit import gang_level
from ganger.cluster.preferences import BEST_FIT
from ganger.cluster.resources import GangShape, LocalityLevel
from ganger.cluster.search import PlacementRequest
from ganger.cluster.view import View
from msgspec.structs import replace

from ganger_master.core.plan_changes import Goal
from ganger_master.estimators.speed import LocalityModel
from ganger_master.policies.make_room import Displacement, Movable, Movables, no_further, overlap, room_for
from ganger_master.policies.placements import PlacementPreference
from ganger_master.policies.trials import DOUBT, FIRST_WINDOWS, FailedTrials, Judged, TrialRates, judge, normalised

# Gandiva (OSDI 2018, section 3.3): a node that is not idle is fragmented when three of its four GPUs are free.
_FRAGMENTED: Final = 0.75
# Least gain for which a running job is moved or restarted for its speed alone; less is noise.
LEAST_GAIN: Final = 0.05
# Part of its rate that a migration for other jobs may cost a gang.
_MOST_LOSS: Final = 0.05
# Pairs of gangs of one search for places to exchange.
_MOST_LOOKS: Final = 128
# Minimum time between two migrations of a job.
_REST_S: Final = 600.0


@dataclass(frozen=True, slots=True)
class MigrationProposal:
    """Migrations that belong together, the gang's own last. `saves`: GPU-seconds, net of the cost of the migrations."""

    goal: Goal
    moves: tuple[Displacement, ...]
    saves: float = 0.0

    @property
    def nodes(self) -> frozenset[str]:
        """Return the nodes that a gang leaves or comes to."""
        return frozenset(claim.node for move in self.moves for claim in (*move.gang.claims, *move.claims))


@dataclass(frozen=True, slots=True)
class GangDistance:
    """A running gang and its locality model. `remaining_s`: its expected remaining time; `widest`: how far apart the
    job may lie; None: no further than now."""

    gang: Movable
    locality: LocalityModel
    remaining_s: float
    widest: LocalityLevel | None = None


@dataclass(frozen=True, slots=True)
class MeasuredColocation:
    """A co-location: the sum of its residents' normalised rates, and those of them that may move."""

    gain: float
    residents: int
    movable: tuple[Movable, ...]

    @property
    def lost(self) -> float:
        """The part of its rate alone that a resident loses on average."""
        return 1.0 - self.gain / self.residents

    @property
    def is_slow(self) -> bool:
        """Return whether it loses more than noise."""
        return self.lost >= LEAST_GAIN


# The kind of a job, or the job itself, and the nodes where it was slow.
Tried: TypeAlias = tuple[str, frozenset[str]]
_NOTHING: Final[FailedTrials[Tried]] = FailedTrials()


def tried(number: int, kind: str, claims: Claims) -> Tried:
    """Return the key of a failed place: the kind of the job, or the job if that is unknown, and the nodes."""
    return kind or f"jobs/{number}", frozenset([claim.node for claim in claims])


@dataclass(frozen=True, slots=True)
class MigrationTerms:
    """What proposals are made with. `failed`: places that were tried in vain; `now`: in Unix seconds."""

    room: CapacityIndex
    now: float = 0.0
    failed: FailedTrials[Tried] = _NOTHING
    placement: PlacementPreference = BEST_FIT

    def place(self, shape: GangShape, avoid: frozenset[str] = frozenset()) -> Claims | None:
        """Return a place for a gang that no longer waits for a better one; None if there is none."""
        return self.placement.place(self.room, PlacementRequest(shape, math.inf, avoid=avoid))

    def has_failed(self, gang: Movable, claims: Claims) -> bool:
        """Return whether this place must not be tried now."""
        return self.failed.holds(tried(gang.number, gang.kind, claims), self.now)


class FreeDeviceCounts:
    """The free devices of a view as it is now, counted by node, rack and fabric, as a bound for places of gangs."""

    def __init__(self, view: View) -> None:
        self._view = view
        columns, size = view.columns(), len(view.nodes)
        free = np.bitwise_count(columns.free[:size]).astype(np.int64)
        self._most = int(free.max(initial=0))
        self._largest = max([made.devices for made in view.sets.values()], default=0)
        # Nodes of no rack are under the first code, and are not close to each other.
        self._groups = [
            (level, codes[:size], sums, int(sums[1:].max()))
            for level, codes in ((LocalityLevel.RACK, columns.racks), (LocalityLevel.FABRIC, columns.fabrics))
            if len(sums := np.bincount(codes[:size], free)) > 1
        ]

    def closest(self, claims: Claims) -> LocalityLevel:
        """Return a lower bound of the locality level of free places for a gang with these claims, whose own devices
        count as free: the closest of node, rack and fabric with enough of them."""
        slots, free = self._view.slots, self._view.free
        gpus = sum([claim.device_mask.bit_count() for claim in claims])
        if self._most >= gpus:
            return LocalityLevel.NVLINK
        if gpus > self._largest and not self._groups:
            return LocalityLevel.CLUSTER
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
        closest = self.closest(claims)
        return closest < LocalityLevel.CLUSTER and closest < gang_level(self._view, claims)


def is_worth_reverting(gain: float, remaining_s: float, pause_s: float) -> bool:
    """Return whether a job that runs at `gain` times its former rate saves more by moving back than that takes."""
    return gain < 1.0 - _MOST_LOSS and (1.0 - gain) * remaining_s > pause_s


def pays_anywhere_s(gang: Movable) -> float:
    """Return how many seconds a gang must be expected to run for its move to pay wherever it is faster at all."""
    return gang.move_cost / max(1, gang.shape.gpus) * (1.0 + LEAST_GAIN) / LEAST_GAIN


def movable(view: View, number: int, shape: GangShape, claims: Claims, pause_s: float, kind: str = "") -> Movable:
    """Return a gang that pays with a pause for a move, and never moves further apart than now."""
    # Within one node it may move anywhere.
    widest = min(shape.locality.widest, max(gang_level(view, claims), LocalityLevel.NODE))
    return Movable(number, no_further(shape, widest), claims, pause_s * shape.gpus, kind=kind)


def judge_migration(goal: Goal, rates: TrialRates) -> Judged:
    """Judge a moved job: it stays if it is faster, where it was moved for its own sake, else if it is not slower."""
    own_sake = goal in (Goal.LOCALITY, Goal.UNPACK, Goal.BALANCE)
    return judge([rates], 1.0 if own_sake else 1.0 - _MOST_LOSS)


def closer(terms: MigrationTerms, gangs: Iterable[GangDistance]) -> list[MigrationProposal]:
    """Return migrations of gangs to closer free places, the largest saving first."""
    gangs, found, room = list(gangs), [], terms.room
    if not gangs:
        return []
    trying = Trial(room)
    free = FreeDeviceCounts(room.view)
    worth = [
        (-most, one.gang.number, one)
        for one in gangs
        if free.has_closer(one.gang.claims) and (most := _could_save(room.view, one)) > one.gang.move_cost
    ]
    for *_, one in sorted(worth):
        saves, claims = _better_place(trying, one, terms, free.closest(one.gang.claims))
        if saves > 0.0 and not terms.has_failed(one.gang, claims):
            found.append(MigrationProposal(Goal.LOCALITY, (Displacement(one.gang, claims),), saves))
            # A place that a gang leaves is still held. On a node that it stays on, its memory would count twice.
            if not {claim.node for claim in claims} & {claim.node for claim in one.gang.claims}:
                trying.take(claims)
                free = FreeDeviceCounts(room.view)
    trying.undo()
    return sorted(found, key=lambda proposal: (-proposal.saves, proposal.moves[-1].number))


def exchanged(
    terms: MigrationTerms, gangs: Iterable[GangDistance], others: Iterable[GangDistance]
) -> list[MigrationProposal]:
    """Return exchanges of places between a gang and one of the `others`, the largest saving first. They swap, or divide
    both places and the free devices there anew. The saving of the gang exceeds both pauses and the other's loss, and
    the other's rate falls by at most `_MOST_LOSS`. The gang that gains is the last of the moves."""
    room = terms.room
    gangs = sorted(gangs, key=lambda one: (-_could_save(room.view, one), one.gang.number))
    others = sorted(others, key=lambda one: one.gang.number)
    found: list[MigrationProposal] = []
    trying = Trial(room)
    done: set[int] = set()
    looks = _MOST_LOOKS
    for one in gangs:
        if one.gang.number in done or _could_save(room.view, one) <= one.gang.move_cost:
            continue
        best: MigrationProposal | None = None
        for other in others:
            if other.gang.number in done | {one.gang.number} or looks <= 0:
                continue
            looks -= 1
            way = _exchange(trying, one, other, terms)
            if way is None or (best is not None and way.saves <= best.saves):
                continue
            if not any(terms.has_failed(move.gang, move.claims) for move in way.moves):
                best = way
        if best is not None:
            found.append(best)
            done.update(move.number for move in best.moves)
    return found


def _exchange(trying: Trial, one: GangDistance, other: GangDistance, terms: MigrationTerms) -> MigrationProposal | None:
    """Return the best exchange of two gangs; None if none saves any GPU-seconds. One gang goes as close together as
    possible on the devices of both and free ones, the other where room is left."""
    if math.inf in (one.gang.move_cost, other.gang.move_cost):
        return None
    mark, room = trying.mark, trying.room
    trying.give(one.gang.claims)
    trying.give(other.gang.claims)
    given = trying.mark
    wide = other.gang.shape
    if other.widest is not None:
        # It may lie further apart than now.
        wide = replace(wide, locality=replace(wide.locality, widest=other.widest))
    best: MigrationProposal | None = None
    there = {claim.node for gang in (one.gang, other.gang) for claim in gang.claims}
    # Once for all levels: to hide a node takes as long as to look for a place on it.
    with room.excluding(frozenset(room.view.slots) - there):
        for level in range(LocalityLevel.NVLINK, gang_level(room.view, one.gang.claims)):
            shape = no_further(one.gang.shape, LocalityLevel(level))
            claims = terms.place(shape)
            if claims is None:
                continue
            trying.take(claims)
            others = terms.place(wide)
            trying.undo(given)
            # An exchange in which the other stays is a migration of one gang.
            if others is None or not overlap(claims, other.gang.claims):
                continue
            before, after = _speed(room.view, other, other.gang.claims), _speed(room.view, other, others)
            if after < (1.0 - _MOST_LOSS) * before:
                continue
            loses = other.remaining_s * other.gang.shape.gpus * (1.0 - after / before)
            saves = (
                _saved(room.view, one, _speed(room.view, one, claims))
                - loses
                - one.gang.move_cost
                - other.gang.move_cost
            )
            if saves > (0.0 if best is None else best.saves):
                moves = Displacement(other.gang, others), Displacement(one.gang, claims)
                best = MigrationProposal(Goal.EXCHANGE, moves, saves)
    trying.undo(mark)
    return best


def separated(terms: MigrationTerms, packs: Iterable[MeasuredColocation], horizon_s: float) -> list[MigrationProposal]:
    """Return migrations out of co-locations to idle GPUs: the co-location that loses most first, its cheapest resident.
    `horizon_s`: how long the GPUs are expected to stay idle."""
    found = []
    trying = Trial(terms.room)
    for pack in sorted(packs, key=lambda pack: (pack.gain - pack.residents, [one.number for one in pack.movable])):
        for one in sorted(pack.movable if pack.is_slow else (), key=lambda one: (one.move_cost, one.number)):
            # The others continue at least as fast as all of them did, and this one by itself.
            saves = pack.lost * one.shape.gpus * horizon_s - one.move_cost
            claims = terms.place(one.shape) if saves > 0.0 else None
            if claims is not None and not terms.has_failed(one, claims):
                trying.take(claims)
                found.append(MigrationProposal(Goal.UNPACK, (Displacement(one, claims),), saves))
                break
    trying.undo()
    return found


def drained(
    terms: MigrationTerms, node: str, gangs: Iterable[Movable], others: Movables
) -> tuple[list[MigrationProposal], list[int]]:
    """Return migrations of all gangs off a node, the largest first, with the moves that make room for them elsewhere;
    and the numbers of the gangs that find no place or may not be moved."""
    found, stuck = [], []
    trying = Trial(terms.room)
    there = [gang for gang in gangs if any(claim.node == node for claim in gang.claims)]
    on_the_way = {gang.number for gang in there}
    for gang in sorted(there, key=lambda gang: (-gang.shape.gpus, gang.number)):
        room_plan = None
        if gang.move_cost < math.inf:
            room_plan = room_for(
                terms.room, others, gang.shape, placement=terms.placement, avoid=(node,), stay=on_the_way
            )
        if room_plan is None:
            stuck.append(gang.number)
            continue
        on_the_way.update(move.number for move in room_plan.moves)
        for move in room_plan.moves:
            trying.give(move.gang.claims)
        for claims in (*(move.claims for move in room_plan.moves), room_plan.claims):
            trying.take(claims)
        found.append(MigrationProposal(Goal.DRAIN, (*room_plan.moves, Displacement(gang, room_plan.claims))))
    trying.undo()
    return found, stuck


def defragmented(terms: MigrationTerms, gangs: Iterable[Movable], most_moves: int = 16) -> list[MigrationProposal]:
    """Return Gandiva's migrations onto fewer nodes. Gangs leave the non-idle nodes with the most free devices for nodes
    with no more free devices, the smallest gang first, until no node is fragmented or no gang finds a place. A node
    that cannot be emptied is left alone."""
    room, view = terms.room, terms.room.view
    on: dict[str, list[Movable]] = {}
    for gang in sorted(gangs, key=lambda gang: (gang.shape.gpus, gang.number)):
        if len(gang.claims) == 1 and gang.claims[0].device_mask and gang.move_cost < math.inf:
            on.setdefault(gang.claims[0].node, []).append(gang)
    found: list[MigrationProposal] = []
    trying = Trial(room)
    done: set[str] = set()
    while len(found) < most_moves:
        sources = [name for name in on if on[name] and name not in done and _is_fragmented(view, name)]
        if not sources:
            break
        source = min(sources, key=lambda name: (-_free(view, name), name))
        gang = on[source].pop(0)
        # Where the least is left: if even there is more free than here, there is nothing to gain.
        claims = BEST_FIT.place(room, PlacementRequest(gang.shape, math.inf, avoid=frozenset({source})))
        if (
            claims is None
            or max(_free(view, claim.node) for claim in claims) > _free(view, source)
            or terms.has_failed(gang, claims)
        ):
            done.add(source)
            continue
        # It has left: nothing counts on its old place before it has.
        trying.take(claims)
        trying.give(gang.claims)
        found.append(MigrationProposal(Goal.DEFRAGMENT, (Displacement(gang, claims),)))
    trying.undo()
    return found


def capped(
    proposals: Iterable[MigrationProposal], now: float, moved_at: Mapping[int, float], most: int
) -> list[MigrationProposal]:
    """Return the proposals, in their order, that may begin now: at most `most` moves, one per node at a time, and no
    job that was moved within `_REST_S`."""
    chosen: list[MigrationProposal] = []
    busy = set[str]()
    for proposal in proposals:
        if now >= rested_s(proposal, moved_at) and len(proposal.moves) <= most and not busy & proposal.nodes:
            chosen.append(proposal)
            busy |= proposal.nodes
            most -= len(proposal.moves)
    return chosen


def rested_s(proposal: MigrationProposal, moved_at: Mapping[int, float]) -> float:
    """Return when all gangs of the proposal may migrate again."""
    return max([moved_at.get(move.number, -math.inf) for move in proposal.moves], default=-math.inf) + _REST_S


def _better_place(
    trying: Trial, one: GangDistance, terms: MigrationTerms, closest: LocalityLevel
) -> tuple[float, Claims]:
    """Return the GPU-seconds that the best closer place saves beyond its cost, and that place, at `closest` or wider.
    Free devices are preferred, so that the gang can move while it runs; then places with its own devices."""
    room = trying.room
    best: tuple[float, Claims] = (0.0, ())
    for level in range(closest, gang_level(room.view, one.gang.claims)):
        shape = no_further(one.gang.shape, LocalityLevel(level))
        claims = terms.place(shape)
        if claims is None:
            mark = trying.mark
            trying.give(one.gang.claims)
            claims = terms.place(shape)
            trying.undo(mark)
        if claims is not None:
            saves = _saved(room.view, one, _speed(room.view, one, claims)) - one.gang.move_cost
            if saves > best[0]:
                best = saves, claims
    return best


def _could_save(view: View, one: GangDistance) -> float:
    gpus = one.gang.shape.gpus
    most = max((made.devices for made in view.sets.values()), default=1)
    nodes = max(1, one.gang.shape.nodes, -(-gpus // max(1, most)))
    best = one.locality.relative_speed(gpus, nodes, LocalityLevel.NVLINK if nodes == 1 else LocalityLevel.RACK)
    return _saved(view, one, best)


def _saved(view: View, one: GangDistance, then: float) -> float:
    """Return the GPU-seconds that it would save at this relative speed."""
    now = _speed(view, one, one.gang.claims)
    return one.remaining_s * one.gang.shape.gpus * (1.0 - now / then) if then >= (1.0 + LEAST_GAIN) * now else 0.0


def _speed(view: View, one: GangDistance, claims: Claims) -> float:
    with_devices = [claim for claim in claims if claim.device_mask]
    return one.locality.relative_speed(one.gang.shape.gpus, len(with_devices), gang_level(view, claims))


def _free(view: View, name: str) -> int:
    return view.free[view.slots[name]].bit_count()


def fragmented_nodes(view: View) -> frozenset[str]:
    """Return the nodes that are in use, with at least `_FRAGMENTED` of their devices free."""
    devices = [made.devices for made in view.sets.values()]
    free = np.bitwise_count(view.columns().free[: len(view.nodes)])
    # By the smallest and the largest node: few are left to look at.
    slots = ((free >= _FRAGMENTED * min(devices, default=0)) & (free < max(devices, default=0))).nonzero()[0]
    names = [view.nodes[slot] for slot in slots.tolist()]
    return frozenset([name for name in names if name and _is_fragmented(view, name)])


def _is_fragmented(view: View, name: str) -> bool:
    devices = view.topology(name).devices
    return _FRAGMENTED * devices <= _free(view, name) < devices


@dataclass(frozen=True, slots=True)
class SlowedGang:
    """A running gang on one node. `load`: devices that others have in use there; `rates`: its windows by load;
    `remaining_s`: its expected remaining time."""

    gang: Movable
    load: int
    rates: Mapping[int, tuple[float, ...]]
    remaining_s: float

    @property
    def node(self) -> str:
        return self.gang.claims[0].node


def relieved(terms: MigrationTerms, gangs: Iterable[SlowedGang]) -> list[MigrationProposal]:
    """Return migrations to free places, the largest saving first, at most one to or from a node at once."""
    gangs = sorted(gangs, key=lambda one: one.gang.number)
    view = terms.room.view
    used: dict[str, float] = {
        name: view.topology(name).devices - view.free[slot].bit_count() for name, slot in view.slots.items()
    }
    there: dict[str, list[SlowedGang]] = {}
    for one in gangs:
        there.setdefault(one.node, []).append(one)
    found: list[MigrationProposal] = []
    trying = Trial(terms.room)
    ranked = [(at_most(one), one) for one in gangs if one.gang.move_cost < math.inf]
    for (load, gain), one in sorted(ranked, key=lambda pair: (-pair[0][1], pair[1].gang.number)):
        saves = (1.0 - 1.0 / gain) * one.remaining_s * one.gang.shape.gpus - one.gang.move_cost
        # Both nodes are then used up: the gangs that stay have to be measured with the new load first.
        if gain < 1.0 + LEAST_GAIN or saves <= 0.0 or used[one.node] == math.inf:
            continue
        full = frozenset(name for name, count in used.items() if count > load or name == one.node)
        claims = terms.place(one.gang.shape, full)
        if claims is None or len(claims) != 1 or terms.has_failed(one.gang, claims):
            continue
        harm = sum(_lost(other, one.gang.shape.gpus) for other in there.get(claims[0].node, ()))
        if saves > harm:
            trying.take(claims)
            used[claims[0].node] = used[one.node] = math.inf
            found.append(MigrationProposal(Goal.BALANCE, (Displacement(one.gang, claims),), saves - harm))
    trying.undo()
    return found


def at_most(one: SlowedGang) -> tuple[int, float]:
    """Return the load below the present one with the highest rate, and the lower bound of its speed-up over the present
    one; 1 where that was not measured."""
    here = one.rates.get(one.load, ())
    best = one.load, 1.0
    if len(here) < FIRST_WINDOWS or not sum(here) > 0.0:
        return best
    for load, rates in sorted(one.rates.items(), reverse=True):
        if load < one.load and len(rates) >= FIRST_WINDOWS:
            gain, _ = normalised([TrialRates(here, rates)]).bounds(DOUBT)
            if gain > best[1]:
                best = load, gain
    return best


def _lost(one: SlowedGang, more: int) -> float:
    """Return the GPU-seconds that a gang loses with `more` devices in use beside it; 0 where that was not measured."""
    here = one.rates.get(one.load, ())
    later = [rates for load, rates in sorted(one.rates.items()) if load >= one.load + more]
    if len(here) < FIRST_WINDOWS or not later or len(later[0]) < FIRST_WINDOWS or not sum(here) > 0.0:
        return 0.0
    speed = min(1.0, normalised([TrialRates(here, later[0])]).value)
    return (1.0 - speed) * one.remaining_s * one.gang.shape.gpus
