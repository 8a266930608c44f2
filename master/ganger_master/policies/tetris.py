"""Tetris's packing of gangs (Grandl et al., "Multi-resource Packing for Cluster Schedulers", SIGCOMM 2014, section 3).

The node whose free devices, cores, memory and declared disk and network bandwidth lie best along the demand, in shares
of the node: by the dot product, or by the cosine (Yu's report, Virginia, 2021). Of all gangs the one starts first whose
place aligns best, less eps times its remaining work, among those furthest below their fair share.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from operator import mul
from typing import Any, Final, TypeAlias

import numpy as np
from ganger.cluster.capacity_index import CapacityIndex
from ganger.cluster.feasibility import Alike, Family, FeasibilityQuery
from ganger.cluster.resources import (
    UNLIMITED_MB_PER_S,
    Bandwidth,
    Claim,
    ConfigurationSet,
    GangShape,
    LocalityLevel,
)
from ganger.cluster.search import (
    Claims,
    PlacementPreference,
    PlacementRequest,
    Single,
    SpreadSearch,
    either,
    on_one_node,
    over_nodes,
)
from numpy.typing import NDArray

from ganger_master.policies.orders import Floats

# Of devices, cores and memory, and of disk and network bandwidth where the node declares them.
_Parts: TypeAlias = tuple[float, ...]
# Devices, cores and memory: what every node has.
_PLAIN: Final = 3


class Alignment(Enum):
    """DOT: the weighted dot product of the paper. COSINE: of the angle alone."""

    DOT = "dot"
    COSINE = "cosine"


def within_fairness(shares: Floats, waiting: NDArray[Any], fairness: float) -> NDArray[np.bool_]:
    """Return a mask of the jobs that may be served: the ceil((1 - fairness) x J) of the J waiting ones that are
    furthest below their fair share. `shares`: what a job has of what it ought to have; ties go to the one that came
    first. 0: all, for efficiency alone; near 1: the poorest alone."""
    assert 0.0 <= fairness < 1.0, f"the fairness knob is at {fairness}: it goes from 0 to below 1"
    candidates = np.flatnonzero(waiting)
    # Less a rounding error, so that 0.25 of 4 are 3 and not 4.
    count = int(np.ceil((1.0 - fairness) * len(candidates) - 1e-9))
    poorest = candidates[np.argsort(shares[candidates], kind="stable")][:count]
    allowed = np.zeros(len(shares), np.bool_)
    allowed[poorest] = True
    return allowed


def by_dot(alike: Alike, query: FeasibilityQuery) -> float:
    return -_dot(available(alike), demanded(alike.family, query))


def at_best_by_dot(family: Family, query: FeasibilityQuery) -> float:
    """Return the least key that a node of the family can have by `by_dot`: with all cores and memory free."""
    demand = demanded(family, query)
    return -_dot((family.free / (family.topology.devices or 1), *(1.0,) * (len(demand) - 1)), demand)


def by_cosine(alike: Alike, query: FeasibilityQuery) -> float:
    return _by_angle(available(alike), demanded(alike.family, query))


def _by_angle(one: _Parts, other: _Parts) -> float:
    lengths = math.hypot(*one) * math.hypot(*other)
    return -_dot(one, other) / lengths if lengths else 0.0


def at_best_by_cosine(family: Family, query: FeasibilityQuery) -> float:
    """Return no bound: any node of the family may lie exactly along the demand."""
    return -math.inf


def available(alike: Alike) -> _Parts:
    """Return the shares of the node's devices, cores, memory and bandwidth that are free."""
    of = alike.family.topology.configuration_set
    return _shares(of, alike.family.free, alike.millicores, alike.memory, alike.bandwidth)


def demanded(family: Family, query: FeasibilityQuery) -> _Parts:
    """Return shares of such a node: for the whole gang if it could be there, else for one task of its heaviest role."""
    needed = query.whole(family.topology)
    if needed.gpus > family.topology.devices:
        needed = query.rooms[query.by_weight[0]].needs(family.topology)
    of = family.topology.configuration_set
    return _shares(of, needed.gpus, needed.millicores, needed.memory_bytes, needed.bandwidth)


def _shares(of: ConfigurationSet, gpus: int, millicores: int, memory: int, bandwidth: Bandwidth) -> _Parts:
    cores = sum(socket.millicores for socket in of.sockets)
    # No gang on a node demands a resource that the node lacks.
    parts = (gpus / (of.devices or 1), millicores / (cores or 1), memory / (of.memory_bytes or 1))
    whole = of.bandwidth
    if not whole:
        return parts
    amounts = zip(bandwidth or (0,) * len(whole), whole, strict=True)
    return (
        *parts,
        *[max(0, some) / (all_of_it or 1) if all_of_it < UNLIMITED_MB_PER_S else 0.0 for some, all_of_it in amounts],
    )


def _dot(one: _Parts, other: _Parts) -> float:
    found = one[0] * other[0] + one[1] * other[1] + one[2] * other[2]
    return found if len(one) == _PLAIN else found + sum(map(mul, one[_PLAIN:], other[_PLAIN:]))


def _placement(
    name: str,
    summary: str,
    at_best: Callable[[Family, FeasibilityQuery], float],
    score: Callable[[Alike, FeasibilityQuery], float],
) -> PlacementPreference:
    def key(alike: Alike, query: FeasibilityQuery, bound: float) -> float:
        scores: dict[Alike, float] = query.memo(score, lambda alike: score(alike, query))
        return scores[alike]

    single, spread = Single(at_best, key), SpreadSearch(score)

    def search(room: CapacityIndex, query: FeasibilityQuery, widest: LocalityLevel) -> Iterator[Claims]:
        return either(on_one_node(room, query, widest, single), over_nodes(room, query, widest, spread))

    return PlacementPreference(name, summary, search)


TETRIS = _placement(
    "tetris", "where free devices, cores and memory lie best along the demand (dot product)", at_best_by_dot, by_dot
)
TETRIS_COS = _placement("tetris-cos", "the same by the angle between them alone (cosine)", at_best_by_cosine, by_cosine)


# Scores that differ by less than a billionth are a tie.
DIGITS: Final = 9


@dataclass(frozen=True, slots=True)
class Knobs:
    """Parameters with the paper's defaults: the SRTF weight m and the fairness f."""

    srtf_weight: float = 1.0
    fairness: float = 0.25
    alignment: Alignment = Alignment.DOT


_DEFAULT = Knobs()


def tetris_gangs(
    room: CapacityIndex, gangs: Sequence[GangShape], remaining_work: Floats, shares: Floats, knobs: Knobs = _DEFAULT
) -> list[tuple[int, Claims]]:
    """Return the gangs that start now and their claims, in the order of choice; the claims are taken in the room.

    remaining_work: what is left of each gang's job, in units that are the same for all.
    shares: what each gang's job holds of its fair share, by which the knob of fairness chooses.

    eps is set once, by the gangs that find a place at the start.
    Free capacity only shrinks in a pass, and with it every alignment by the dot product. So a gang is placed again only
    at the head of the heap, and starts if it is still ahead of all others. Ties go to the gang that came first.
    """
    placement = placement_by(knobs)
    allowed = within_fairness(shares, np.ones(len(gangs), np.bool_), knobs.fairness)
    aligned: dict[int, float] = {}
    # Nothing is taken yet: gangs alike have the same place.
    known: dict[GangShape, float | None] = {}
    for job in np.flatnonzero(allowed).tolist():
        shape = gangs[job]
        if shape not in known:
            claims = placement.place(room, PlacementRequest(shape))
            known[shape] = None if claims is None else alignment_of(room, claims, knobs.alignment)
        found = known[shape]
        if found is not None:
            aligned[job] = found
    work = sum([float(remaining_work[job]) for job in aligned])
    epsilon = knobs.srtf_weight * sum(aligned.values()) / work if work > 0 else 0.0
    waiting = [(_rank(alignment - epsilon * remaining_work[job]), job) for job, alignment in aligned.items()]
    heapq.heapify(waiting)
    chosen: list[tuple[int, Claims]] = []
    while waiting:
        _, job = heapq.heappop(waiting)
        claims = placement.place(room, PlacementRequest(gangs[job]))
        if claims is None:
            continue
        now = (_rank(alignment_of(room, claims, knobs.alignment) - epsilon * remaining_work[job]), job)
        if waiting and waiting[0] < now:
            heapq.heappush(waiting, now)
            continue
        room.take(claims)
        chosen.append((job, claims))
    return chosen


def placement_by(knobs: Knobs) -> PlacementPreference:
    """Return the placement of a single gang."""
    return TETRIS_COS if knobs.alignment is Alignment.COSINE else TETRIS


def alignment_of(room: CapacityIndex, claims: Claims, kind: Alignment) -> float:
    """Return the alignment of the claims with what is free there, in shares of the node; the mean over nodes."""
    return sum(_aligned(room, claim, kind) for claim in claims) / len(claims)


def _aligned(room: CapacityIndex, claim: Claim, kind: Alignment) -> float:
    view, slot = room.view, room.view.slots[claim.node]
    of = view.topologies[slot].configuration_set
    wanted = _shares(of, claim.device_mask.bit_count(), sum(claim.millicores), claim.memory_bytes, claim.bandwidth)
    cores, bandwidth = sum(view.millicores[slot]), view.bandwidth.get(slot, ())
    free = _shares(of, view.free[slot].bit_count(), cores, view.memory[slot], bandwidth)
    return _dot(wanted, free) if kind is Alignment.DOT else -_by_angle(wanted, free)


def _rank(score: float) -> float:
    """Return the sort key of a score: smaller is better; a difference below a billionth is a tie."""
    return -round(float(score), DIGITS)
