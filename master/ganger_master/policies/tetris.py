"""Tetris's packing (Grandl et al., SIGCOMM 2014, section 3.2): the node whose free pieces lie best along the demand.

Devices, cores and memory count in shares of the node. Here the gang is given, as an order chose it, and looks for its
node; the paper's own pass, in which a node looks for its job, is `tetris_pass`. `tetris` takes the dot product,
`tetris-cos` the cosine (Yu's report, Virginia, 2021).

Tetris's scores (Grandl et al., "Multi-resource Packing for Cluster Schedulers", SIGCOMM 2014, sections 3.2 and 3.3):
how well a task's demand lies along what a machine has left, and how little work its job has left.

Demands and what is available are in shares of the machine, columns of one entry a resource. The form with the cosine is
that of Yu's report (Virginia, 2021); it ignores magnitudes, so a tiny task may go to the emptiest machine.

Tetris's own pass, machine by machine: which task to put on it next (Grandl et al., SIGCOMM 2014, section 3).

Jobs are made of equal tasks that start one by one as there is room; a gang is a job of one task. What a task takes is
its peak, so nothing is over-committed. The pass uses durations only through the remaining work that it is given.

Tetris's choice of the job, for gangs: of all that may be served the one whose place scores best starts first.

The paper chooses, for each machine that has something free, the best task (`tetris_pass`). A gang is placed whole, so
here all nodes are searched at once: a gang's alignment is that of its best place (Grandl et al., SIGCOMM 2014, section
3.2), less eps times its remaining work (section 3.3), among those furthest below their fair share (section 3.4).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

import numpy as np
from ganger.cluster.capacity_index import CapacityIndex
from ganger.cluster.feasibility import Alike, Family, FeasibilityQuery, GangMix
from ganger.cluster.resources import Claim, GangShape, LocalityLevel
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

from ganger_master.policies.job_facts import Floats, Integers


class Alignment(Enum):
    """DOT: the weighted dot product of the paper. COSINE: of the angle alone."""

    DOT = "dot"
    COSINE = "cosine"


def aligned(demands: Floats, available: Floats, kind: Alignment = Alignment.DOT) -> Floats:
    """Return alignments (jobs x machines) from demands (jobs x resources) and what is available (machines x resources).

    The alignment is 0 for a machine without anything left and for a job that needs nothing.
    """
    dot = np.asarray(demands @ available.T, np.float64)
    if kind is Alignment.DOT:
        return dot
    lengths = np.linalg.norm(demands, axis=1)[:, None] * np.linalg.norm(available, axis=1)[None, :]
    cosine: Floats = np.divide(dot, lengths, out=np.zeros_like(dot), where=lengths > 0)
    return cosine


def scores(
    alignment: Floats,
    remaining_work: Floats,
    *,
    srtf_weight: float = 1.0,
    is_remote: NDArray[Any] | None = None,
    remote_penalty: float = 0.1,
    eligible: NDArray[Any] | None = None,
) -> Floats:
    """Return scores (jobs x machines), larger is better: alignment, less eps times the job's remaining work.

    `remaining_work`: of each job, in the same normalised unit for all: demand summed over resources, times duration,
    summed over its remaining tasks. eps = `srtf_weight` x mean alignment / mean work, both over `eligible` (jobs x
    machines; default: all), so that the two terms weigh alike at 1, the paper's default. A task that would read
    remote input there (`is_remote`, jobs x machines) has `remote_penalty` taken off its alignment. What is not eligible
    scores minus infinity.
    """
    if is_remote is not None:
        alignment = np.where(is_remote, alignment * (1.0 - remote_penalty), alignment)
    if eligible is None:
        eligible = np.ones(alignment.shape, np.bool_)
    some = eligible.any(axis=1)
    if not some.any():
        return np.full(alignment.shape, -np.inf)
    work = float(remaining_work[some].mean())
    epsilon = srtf_weight * float(alignment[eligible].mean()) / work if work > 0 else 0.0
    return np.where(eligible, alignment - epsilon * remaining_work[:, None], -np.inf)


def within_fairness(shares: Floats, waiting: NDArray[Any], fairness: float) -> NDArray[np.bool_]:
    """Return a mask of the jobs that may be served: the ceil((1 - fairness) x J) of the J waiting ones that are
    furthest below their fair share. `shares`: what a job has of what it ought to have; ties go to the one that came
    first.

    0: all, for efficiency alone; near 1: the poorest alone.
    """
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
    return -_dot((family.free / (family.topology.devices or 1), 1.0, 1.0), demanded(family, query))


def by_cosine(alike: Alike, query: FeasibilityQuery) -> float:
    free, wanted = available(alike), demanded(alike.family, query)
    lengths = math.hypot(*free) * math.hypot(*wanted)
    return -_dot(free, wanted) / lengths if lengths else 0.0


def at_best_by_cosine(family: Family, query: FeasibilityQuery) -> float:
    """Return no bound: any node of the family may lie exactly along the demand."""
    return -math.inf


def available(alike: Alike) -> tuple[float, float, float]:
    """Return the shares of the node's devices, cores and memory that are free."""
    return _shares(alike.family, alike.family.free, alike.millicores, alike.memory)


def demanded(family: Family, query: FeasibilityQuery) -> tuple[float, float, float]:
    """Return shares of such a node: for the whole gang if it could be there, else for one task of its heaviest role."""
    needed = query.whole(family.topology)
    if needed.gpus > family.topology.devices:
        needed = query.rooms[query.by_weight[0]].needs(family.topology)
    return _shares(family, needed.gpus, needed.millicores, needed.memory_bytes)


def _shares(family: Family, gpus: int, millicores: int, memory: int) -> tuple[float, float, float]:
    of = family.topology.configuration_set
    cores = sum(socket.millicores for socket in of.sockets)
    # No gang on a node demands a resource that the node lacks.
    return (gpus / (of.devices or 1), millicores / (cores or 1), memory / (of.memory_bytes or 1))


def _dot(one: tuple[float, float, float], other: tuple[float, float, float]) -> float:
    return one[0] * other[0] + one[1] * other[1] + one[2] * other[2]


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

    def search(
        room: CapacityIndex, query: FeasibilityQuery, widest: LocalityLevel, demand: GangMix | None
    ) -> Iterator[Claims]:
        return either(on_one_node(room, query, widest, single), over_nodes(room, query, widest, spread))

    return PlacementPreference(name, summary, search)


TETRIS = _placement(
    "tetris", "where free devices, cores and memory lie best along the demand (dot product)", at_best_by_dot, by_dot
)
TETRIS_COS = _placement("tetris-cos", "the same by the angle between them alone (cosine)", at_best_by_cosine, by_cosine)


# Shares of machines are sums of floats: a task that fits to a millionth of a machine fits.
_SLACK = 1e-9
# Scores that differ by less than a billionth are a tie.
DIGITS: Final = 9


@dataclass(frozen=True, slots=True)
class Knobs:
    """Parameters with the paper's defaults: the SRTF weight m, the fairness f, the penalty for reading remote input."""

    srtf_weight: float = 1.0
    fairness: float = 0.25
    remote_penalty: float = 0.1
    alignment: Alignment = Alignment.DOT


_DEFAULT = Knobs()


def tetris_pass(
    demands: Floats,
    pending: Integers,
    remaining_work: Floats,
    available: Floats,
    shares: Floats,
    *,
    knobs: Knobs = _DEFAULT,
    is_remote: NDArray[np.bool_] | None = None,
) -> Integers:
    """Return how many tasks of each job each machine starts now: (jobs x machines).

    `demands` (jobs x resources) of one task and `available` (machines x resources) are in shares of a machine;
    `pending` tasks wait; `remaining_work` and `is_remote` as in `scores`; `shares`: what each job holds of its fair
    share, by which the fairness knob chooses once, before the pass. Each machine in turn takes the best task that fits
    until none does; ties go to the job that came first.
    """
    jobs, machines = len(demands), len(available)
    placed = np.zeros((jobs, machines), np.int64)
    waiting = np.array(pending, np.int64)
    allowed = within_fairness(shares, waiting > 0, knobs.fairness)
    left = np.array(available, np.float64)
    for machine in range(machines):
        remote = None if is_remote is None else is_remote[:, machine, None]
        while True:
            fits = allowed & (waiting > 0) & (demands <= left[machine] + _SLACK).all(axis=1)
            if not fits.any():
                break
            here = scores(
                aligned(demands, left[machine, None], knobs.alignment),
                remaining_work,
                srtf_weight=knobs.srtf_weight,
                is_remote=remote,
                remote_penalty=knobs.remote_penalty,
                eligible=fits[:, None],
            )
            job = int(np.argmax(np.round(here[:, 0], DIGITS)))
            placed[job, machine] += 1
            waiting[job] -= 1
            left[machine] -= demands[job]
    return placed


def tetris_gangs(
    room: CapacityIndex, gangs: Sequence[GangShape], remaining_work: Floats, shares: Floats, knobs: Knobs = _DEFAULT
) -> list[tuple[int, Claims]]:
    """Return the gangs that start now and their claims, in the order of choice; the claims are taken in the room.

    `remaining_work` and `shares` as in `tetris_pass`; eps is set once, by the gangs that find a place at the start.
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
    epsilon = _epsilon(aligned, remaining_work, knobs.srtf_weight)
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
    view = room.view
    slot = view.slots[claim.node]
    of = view.topologies[slot].configuration_set
    total = np.array([of.devices, sum(socket.millicores for socket in of.sockets), of.memory_bytes], np.float64)
    wanted = np.array([claim.device_mask.bit_count(), sum(claim.millicores), claim.memory_bytes], np.float64)
    free = np.array([view.free[slot].bit_count(), sum(view.millicores[slot]), view.memory[slot]], np.float64)
    # No gang on a node demands a resource that the node lacks.
    wanted, free = (np.divide(one, total, out=np.zeros(3), where=total > 0) for one in (wanted, free))
    dot = float(wanted @ free)
    lengths = float(np.linalg.norm(wanted) * np.linalg.norm(free))
    return dot if kind is Alignment.DOT else dot / lengths if lengths else 0.0


def _epsilon(aligned: dict[int, float], remaining_work: Floats, weight: float) -> float:
    work = sum(float(remaining_work[job]) for job in aligned)
    return weight * sum(aligned.values()) / work if work > 0 else 0.0


def _rank(score: float) -> float:
    """Return the sort key of a score: smaller is better; a difference below a billionth is a tie."""
    return -round(float(score), DIGITS)
