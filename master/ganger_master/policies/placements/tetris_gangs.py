"""Tetris's choice of the job, for gangs: of all that may be served the one whose place scores best goes first.

The paper asks, for each machine that has something free, for the best task (`tetris_pass`). A gang is placed whole, so
here all nodes are asked at once: a gang's alignment is that of its best place (Grandl et al., SIGCOMM 2014, section
3.2), less eps times its remaining work (section 3.3), among those furthest below their fair share (section 3.4).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
from ganger.cluster.place_placement import Claims, PlacementPreference
from ganger.cluster.resources import Claim, GangShape
from ganger.cluster.room import CapacityIndex

from ganger_master.policies.job_facts import Floats
from ganger_master.policies.placements.alignment import Alignment, within_fairness
from ganger_master.policies.placements.tetris import TETRIS, TETRIS_COS
from ganger_master.policies.placements.tetris_pass import DIGITS, Knobs

_DEFAULT = Knobs()


def tetris_gangs(
    room: CapacityIndex,
    gangs: Sequence[GangShape],
    remaining_work: Floats,
    shares: Floats,
    knobs: Knobs = _DEFAULT,
) -> list[tuple[int, Claims]]:
    """Which gangs start now, in the order in which they were chosen, and where; they are taken in the room.

    `remaining_work` and `shares` as in `tetris_pass`; eps is set once, by those that find a place at the start. What is
    free only gets less in a pass, and with it every alignment by the dot product; so a gang is placed again only when
    it comes up, and goes if no other could beat it still. Ties go to the gang that came first.
    """
    placement = placement_by(knobs)
    allowed = within_fairness(shares, np.ones(len(gangs), np.bool_), knobs.fairness)
    aligned: dict[int, float] = {}
    # Nothing is taken yet: gangs alike have the same place.
    known: dict[GangShape, float | None] = {}
    for job in np.flatnonzero(allowed).tolist():
        shape = gangs[job]
        if shape not in known:
            claims = placement.place(room, shape)
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
        claims = placement.place(room, gangs[job])
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
    """Of one gang alone."""
    return TETRIS_COS if knobs.alignment is Alignment.COSINE else TETRIS


def alignment_of(room: CapacityIndex, claims: Claims, kind: Alignment) -> float:
    """Of what is claimed with what is free there, in shares of the node; of several nodes their mean."""
    return sum(_aligned(room, claim, kind) for claim in claims) / len(claims)


def _aligned(room: CapacityIndex, claim: Claim, kind: Alignment) -> float:
    view = room.view
    slot = view.slots[claim.node]
    of = view.topologies[slot].configuration_set
    total = np.array([of.devices, sum(socket.millicores for socket in of.sockets), of.memory_bytes], np.float64)
    wanted = np.array([claim.device_mask.bit_count(), sum(claim.millicores), claim.memory_bytes], np.float64)
    free = np.array([view.free[slot].bit_count(), sum(view.millicores[slot]), view.memory[slot]], np.float64)
    # What a node has nothing of, nobody there asks for.
    wanted, free = (np.divide(one, total, out=np.zeros(3), where=total > 0) for one in (wanted, free))
    dot = float(wanted @ free)
    lengths = float(np.linalg.norm(wanted) * np.linalg.norm(free))
    return dot if kind is Alignment.DOT else dot / lengths if lengths else 0.0


def _epsilon(aligned: dict[int, float], remaining_work: Floats, weight: float) -> float:
    work = sum(float(remaining_work[job]) for job in aligned)
    return weight * sum(aligned.values()) / work if work > 0 else 0.0


def _rank(score: float) -> float:
    """Smaller is better; less than a billionth is a tie."""
    return -round(float(score), DIGITS)
