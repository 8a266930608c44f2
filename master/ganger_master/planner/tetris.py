"""Tetris's pass: of all who wait, who lies best along what is free and has little work left starts first; nobody stops.

Grandl et al., SIGCOMM 2014: alignment, less eps times the remaining work, among those furthest below their fair
share. Its authors estimate durations from earlier runs of the same job: so does this one where no oracle tells them
(`models.service`).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ganger_master.core.commands import Change
from ganger_master.planner.refused import NOBODY, KeptOut
from ganger_master.planner.table import LiveTable
from ganger_master.planner.target import Pass
from ganger_master.policies.facts import Capacity, Facts, Floats, Integers
from ganger_master.policies.order.ftf import expected_s
from ganger_master.policies.place.tetris_gangs import tetris_gangs
from ganger_master.policies.place.tetris_pass import Knobs
from ganger_master.policies.room import Room

# Who came first of those who wait: the others wait longer, so that a pass has a bound.
_MOST_WEIGHED = 1_000


def plan_tetris(
    knobs: Knobs,
    table: LiveTable,
    now: float,
    capacity: Capacity,
    room: Room,
    remaining_s: Callable[[Integers], Floats] | None = None,
    kept_out: KeptOut = NOBODY,
) -> Pass:
    """The starts to propose now; `room` is left as it is. Whom the master would not have on some nodes (`kept_out`) is
    left out altogether for that time."""
    if not table.has_waiting:
        return Pass()
    asks = knobs.srtf_weight > 0.0
    rows, facts = table.facts(now, expects=asks and remaining_s is None)
    work = np.zeros(len(facts))
    if asks:
        left = expected_s(facts) if remaining_s is None else remaining_s(facts.number)
        work = _demand(facts, capacity) * left
    line = np.flatnonzero(table.is_waiting(rows))
    line = line[np.lexsort((facts.number[line], facts.arrival_s[line], -facts.priority[line]))]
    refused = [*kept_out.not_started, *kept_out.nodes]
    waiting = line[~np.isin(facts.number[line], refused)][:_MOST_WEIGHED] if refused else line[:_MOST_WEIGHED]
    jobs = [table.jobs[row] for row in rows[waiting].tolist()]
    gangs = [job for job in jobs if job is not None]
    room.refresh()
    chosen = tetris_gangs(
        room,
        [job.shape for job in gangs],
        work[waiting],
        _shares(facts, capacity)[waiting],
        knobs,
    )
    for _, claims in reversed(chosen):
        room.give(claims)
    starts = tuple([Change(gangs[at].number, gangs[at].revision, "START", claims) for at, claims in chosen])
    return Pass(starts, waits=len(starts) < len(gangs), line=facts.number[line])


def _demand(facts: Facts, capacity: Capacity) -> Floats:
    """What each job asks for, in shares of the cluster, summed over resources."""
    demand: Floats = _parts(facts, capacity).sum(axis=0)
    return demand


def _shares(facts: Facts, capacity: Capacity) -> Floats:
    """Of each job, the largest part of any resource that its user holds, by the user's weight."""
    held = np.where(facts.is_running, _parts(facts, capacity), 0.0)
    users = int(facts.user.max(initial=0)) + 1
    by_user = np.array([np.bincount(facts.user, part, users) for part in held]).max(axis=0)
    shares: Floats = by_user[facts.user] / facts.weight
    return shares


def _parts(facts: Facts, capacity: Capacity) -> Floats:
    """(resources x jobs): what a job's gang takes of all GPUs, cores and memory there are."""
    amounts = np.array([facts.gpus, facts.cores, facts.memory_bytes], float)
    there_is = np.array([capacity.gpus, capacity.cores, capacity.memory_bytes])[:, None]
    parts: Floats = np.divide(amounts, there_is, out=np.zeros_like(amounts), where=there_is > 0)
    return parts
