"""The pass of whoever moves running jobs: around another pass, which says who starts and who is stopped.

Goals in their order: a hole for a gang that finds no room, though there is enough of it in pieces; everybody off a node
that is drained; whoever rests for another goes on; fewer nodes that are neither full nor idle. A hole is made once the
gang has waited as long as it would cost others, GPU-second for GPU-second: who has waited so long may have to wait as
long again. What is left of a place that was found is kept, so that nobody else takes it meanwhile. Who outranks others
may have them rest in host memory, where they lose nothing, and they go on wherever there is room first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
from ganger.placement.candidates import widest_now
from ganger.resources.values import GangShape
from ganger.resources.view import Mode
from msgspec.structs import replace as replace_of

from ganger_master.core.arenas import has_arenas
from ganger_master.core.attempts import can_hand_over
from ganger_master.core.commands import Change, Promise
from ganger_master.core.model import Gang, GangPhase, Intent, Job, JobState, SuspendLevel
from ganger_master.core.purpose import Goal, Purpose
from ganger_master.planner.errands import Errand, Leg, Stage, carry_on, is_free, is_waiting, keep, stage_of
from ganger_master.planner.move_costs import Measured, measured_moves, pause_s
from ganger_master.planner.refused import KeptOut
from ganger_master.planner.table import LiveTable
from ganger_master.planner.target import Pass
from ganger_master.policies.introspect.failed import Failed
from ganger_master.policies.introspect.hole import Hole, Movable, Movables, hole_for, in_order
from ganger_master.policies.introspect.migration import Why, capped, defragmented, drained, movable
from ganger_master.policies.introspect.swap import swap_for
from ganger_master.policies.introspect.whatif import Claims, WhatIf
from ganger_master.policies.order import SLACK_S
from ganger_master.policies.place import Placement, Want
from ganger_master.policies.room import Room

# Jobs of one pass for which a hole is looked for, first job first: a search takes as long as many placements.
_MOST_HOLES: Final = 4
# Nobody is stopped for a gang for which moves will make a hole within this time.
_SOON_S: Final = 60.0
# Who rests for another is of the lowest priority that will do.
_LOWEST: Final = -1000
# A hole that was not worth it, or not there, is looked for again when the gang has waited so much longer.
_LOOK_AGAIN: Final = 1.25
_LEAST_LOOK_S: Final = 1.0
# Moves under way at once, for each of which hosts and networks work; and those begun in an hour that neither a gang nor
# an operator waits for, at least: else one for each GPU that runs somebody.
MOST_AT_ONCE: Final = 16
_LEAST_AN_HOUR: Final = 16
_HOUR_S: Final = 3600.0

Inner = Callable[[KeptOut, bool], Pass]


@dataclass(frozen=True, slots=True)
class Looked:
    """When a gang's hole is looked for again. `is_found`: there is one, which will be worth it soon."""

    again_s: float
    is_found: bool = False


@dataclass(frozen=True, slots=True)
class Moving:
    """What is remembered; lost, it costs some moves twice."""

    errands: tuple[Errand, ...] = ()
    looked: Mapping[int, Looked] = field(default_factory=dict)
    # When each job was last sent away, for a while.
    moved_at: Mapping[int, float] = field(default_factory=dict)
    # By job and nodes: where a move did not help.
    failed: Failed[tuple[int, frozenset[str]]] = field(default_factory=Failed)

    @property
    def promises(self) -> tuple[Promise, ...]:
        """What the master is to keep for whom."""
        return tuple([Promise(one.waiting, one.hole) for one in self.errands if one.waiting])


@dataclass(frozen=True, slots=True)
class Terms:
    """`placement`: who finds places. `draining`: names of nodes that are to be emptied. `holes`: room is made for gangs
    that wait, and who rests by a plan is brought back; no other pass does. `per_hour`: moves that nobody waits for."""

    placement: Placement
    draining: tuple[str, ...] = ()
    holes: bool = True
    is_strict: bool = False
    per_hour: float | None = None


def plan_moves(
    inner: Inner,
    terms: Terms,
    table: LiveTable,
    now: float,
    room: Room,
    moving: Moving,
    kept_out: KeptOut,
    may_stop: bool,
) -> tuple[Pass, Moving, float]:
    """The changes to propose now, those of `inner` among them; what to remember if they are proposed; and when to ask
    again though nothing happens. `inner` is asked with the room as it is without what moves need, and for whom it is to
    find no place. The room is left as it was."""
    room.refresh()
    trying = WhatIf(room)
    planner = _Pass(terms, table, now, trying, moving)
    try:
        return planner.run(inner, kept_out, may_stop)
    finally:
        trying.undo()


class _Pass:
    def __init__(self, terms: Terms, table: LiveTable, now: float, trying: WhatIf, moving: Moving) -> None:
        self._terms = terms
        self._table = table
        self._now = now
        self._trying = trying
        self._room = trying.room
        self._failed = moving.failed
        self._looked = dict(moving.looked)
        self._moved_at = {number: at for number, at in moving.moved_at.items() if now < at + _HOUR_S}
        self._old = moving.errands
        self._again_s = math.inf
        # Whose hole will be worth it soon: nobody is stopped for them meanwhile.
        self._soon: set[int] = set()
        self._measured: Measured | None = None
        self._movables: dict[int, tuple[Job, Gang, Movable]] | None = None

    def run(self, inner: Inner, kept_out: KeptOut, may_stop: bool) -> tuple[Pass, Moving, float]:
        carried = carry_on(self._old, self._table, self._trying, self._now)
        for errand in carried.given_up:
            self._look_later(errand.waiting)
        self._errands, self._changes = carried.errands, carried.changes
        parked = self._parked() if self._terms.holes else []
        urgent = self._table.most_urgent_waiting
        self._bring_back([one for one in parked if urgent is None or one[0].spec.priority >= urgent])
        for node in self._terms.draining:
            self._drain(node)
        found = inner(self._kept_out(kept_out), False)
        mark, known = self._trying.mark, len(self._errands)
        self._take_starts(found)
        if self._terms.holes:
            self._make_holes(found)
        if may_stop:
            self._trying.undo(mark)
            self._keep_for(self._errands[known:])
            found = inner(self._kept_out(kept_out), True)
            self._take_starts(found)
        self._bring_back([one for one in parked if urgent is not None and one[0].spec.priority < urgent])
        if not self._table.has_waiting and not self._errands and self._room.view.mode is Mode.PACK:
            self._defragment()
        return self._result(found)

    def _result(self, found: Pass) -> tuple[Pass, Moving, float]:
        for change in self._changes:
            if change.kind == "MOVE":
                self._moved_at[change.number] = self._now
        live = {number: looked for number, looked in self._looked.items() if is_waiting(self._table, number)}
        moving = Moving(tuple(self._errands), live, self._moved_at, self._failed)
        own = {change.number for change in self._changes}
        others = tuple([change for change in found.changes if change.number not in own])
        starts = np.array(
            [c.number for c in self._changes if c.kind == "START" and c.number not in found.line], np.int64
        )
        line = np.concatenate((starts, found.line)) if len(starts) else found.line
        return replace(found, changes=(*self._changes, *others), line=line), moving, self._again_s

    def _kept_out(self, kept_out: KeptOut) -> KeptOut:
        """Who is on an errand, or is sent on one, is nobody else's to start or to stop."""
        numbers = frozenset().union(*[errand.numbers for errand in self._errands])
        numbers |= {change.number for change in self._changes} | self._soon
        if not numbers:
            return kept_out
        not_started = frozenset(kept_out.not_started) | numbers
        return replace(kept_out, not_started=not_started, not_stopped=frozenset(kept_out.not_stopped) | numbers)

    # -- who may go ----------------------------------------------------------------------------------------------------

    def _pause_s(self, job: Job, gang: Gang) -> float:
        if self._measured is None:
            self._measured = measured_moves(self._table.running)
        return pause_s(job, gang, self._measured)

    @property
    def _gangs(self) -> dict[int, tuple[Job, Gang, Movable]]:
        """Those that can be moved at all, by number."""
        if self._movables is None:
            self._movables = {
                job.number: (
                    job,
                    gang,
                    movable(self._room.view, job.number, job.shape, _held(gang), self._pause_s(job, gang)),
                )
                for job, gang in self._table.running
                if _can_move(job, gang)
            }
        return self._movables

    @property
    def _busy(self) -> frozenset[int]:
        return frozenset().union(*[errand.numbers for errand in self._errands])

    @property
    def _under_way(self) -> int:
        """Legs of errands that are not done."""
        stages = [stage_of(leg, self._table) for errand in self._errands for leg in errand.legs]
        return sum(stage not in (Stage.DONE, Stage.RESTS) for stage in stages)

    # -- holes ---------------------------------------------------------------------------------------------------------

    def _make_holes(self, found: Pass) -> None:
        """Begins errands for the first of those who wait on."""
        started = {change.number for change in found.changes if change.kind == "START"}
        busy = self._busy
        vain: set[GangShape] = set()
        looks = 0
        for number in found.line.tolist():
            if number in started or number in busy:
                continue
            got = self._table.get(number)
            if got is None or not is_waiting(self._table, number) or number in self._moved_away:
                continue
            job = got[0]
            shape = job.shape
            if shape in vain or looks == _MOST_HOLES:
                continue
            if self._now < self._looked.get(number, _NEVER).again_s:
                self._again_s = min(self._again_s, self._looked[number].again_s)
                if self._looked[number].is_found:
                    self._soon.add(number)
            else:
                looks += 1
                self._make_hole(job)
            vain.add(shape)
            if self._terms.is_strict:
                break

    @property
    def _moved_away(self) -> frozenset[int]:
        return frozenset(change.number for change in self._changes)

    def _make_hole(self, job: Job) -> None:
        waited = max(0.0, self._now - job.pending_since)
        shape = replace_of(
            job.shape, locality=replace_of(job.shape.locality, widest=widest_now(job.shape, waited), wish=None)
        )
        free = int(np.bitwise_count(self._room.view.columns().free).sum())
        stay = self._busy
        hole = None
        if free >= shape.gpus:
            gangs = [one for other, _, one in self._gangs.values() if _may_go(other, job)]
            movables = Movables(self._room.view, gangs)
            hole = hole_for(self._room, movables, shape, placement=self._terms.placement, stay=stay)
        if hole is None or not hole.moves:
            hole = None
            if self._outranks(job):
                hole = swap_for(self._room, self._stoppable(job), shape, placement=self._terms.placement, stay=stay)
            worth_s = 0.0
        else:
            worth_s = hole.cost / max(1, shape.gpus)
        if hole is None or not hole.moves:
            self._look_later(job.number)
            return
        if waited + SLACK_S < worth_s:
            is_soon = worth_s <= waited + _SOON_S
            if is_soon:
                self._soon.add(job.number)
            self._looked[job.number] = Looked(job.pending_since + worth_s, is_soon)
            self._again_s = min(self._again_s, job.pending_since + worth_s)
            return
        if self._under_way + len(hole.moves) > MOST_AT_ONCE:
            self._look_later(job.number)
            return
        saved = waited * shape.gpus - (hole.cost if worth_s else 0.0)
        self._begin(Goal.HOLE, hole, job.number, max(0.0, saved))

    def _outranks(self, job: Job) -> bool:
        return any(other.spec.priority < job.spec.priority for other, _, _ in self._gangs.values())

    def _stoppable(self, job: Job) -> list[Movable]:
        """Who may move for a job, those of lower priority also by resting in host memory, where they keep theirs."""
        found = []
        for other, gang, one in self._gangs.values():
            if not _may_go(other, job):
                continue
            if other.spec.priority < job.spec.priority and other.capabilities.offload and has_arenas(gang):
                # Nothing of the memory is given back.
                claims = tuple([replace_of(claim, memory_bytes=0, arena_bytes=0) for claim in one.claims])
                one = replace(one, claims=claims, stop_cost=(1.0 + other.spec.priority - _LOWEST) * max(1, other.gpus))
            found.append(one)
        return found

    def _look_later(self, number: int) -> None:
        got = self._table.get(number) if number else None
        if got is not None:
            waited = max(_LEAST_LOOK_S, self._now - got[0].pending_since)
            again_s = self._now + (_LOOK_AGAIN - 1.0) * waited
            self._looked[number] = Looked(max(again_s, self._now + _LEAST_LOOK_S))
            self._again_s = min(self._again_s, self._looked[number].again_s)

    def _begin(self, goal: Goal, hole: Hole, waiting: int, saved: float) -> None:
        """An errand, and its first changes."""
        ordered, parked = in_order(hole.moves)
        legs = []
        for move in ordered:
            job, gang, _ = self._gangs[move.number]
            pause = self._pause_s(job, gang)
            legs.append(Leg(move.number, gang.claims, move.claims, pause, is_parked=move in parked))
        errand = Errand(goal, tuple(legs), self._now, waiting, hole.claims if waiting else (), saved)
        carried = carry_on([errand], self._table, self._trying, self._now)
        self._errands.extend(carried.errands)
        self._changes.extend(carried.changes)

    # -- off a node, and back ------------------------------------------------------------------------------------------

    def _drain(self, node: str) -> None:
        """Who can leave does, also where others have to make room; who cannot is parked on storage."""
        busy = self._busy
        gangs = [one for number, (_, _, one) in self._gangs.items() if number not in busy]
        others = Movables(
            self._room.view, [one for n, (job, _, one) in self._gangs.items() if n not in busy and job.spec.movable]
        )
        proposals, stuck = drained(self._room, node, gangs, others, self._terms.placement)
        for proposal in proposals:
            if self._under_way + len(proposal.moves) > MOST_AT_ONCE or self._busy & {m.number for m in proposal.moves}:
                break
            self._begin(Goal.DRAIN, Hole((), proposal.moves), 0, 0.0)
        if not self._errands and not any(job.next_epoch for job, _ in self._table.running):
            # Nobody is on the way who could leave room.
            for number in stuck:
                job = self._gangs[number][0]
                if job.capabilities.checkpoint:
                    level = SuspendLevel.CHECKPOINT
                    purpose = Purpose(Goal.DRAIN)
                    self._changes.append(Change(number, job.revision, "SUSPEND", level=level, purpose=purpose))

    def _parked(self) -> list[tuple[Job, Gang]]:
        """Who rests in host memory because a plan said so, and is on no errand, first one first."""
        busy = self._busy
        found = [
            (job, gang)
            for job, gang in self._table.parked
            if job.number not in busy and gang.park_level is SuspendLevel.OFFLOAD and job.ending is None
        ]
        return sorted(found, key=lambda one: (-one[0].spec.priority, one[0].number))

    def _bring_back(self, parked: Sequence[tuple[Job, Gang]]) -> None:
        """Where it was, if that is free, else elsewhere out of its memory."""
        for job, gang in parked:
            purpose = Purpose(Goal.RETURN, pause_seconds=self._pause_s(job, gang))
            own = tuple([replace_of(claim, memory_bytes=0, arena_bytes=0) for claim in gang.claims])
            if is_free(self._room.view, own):
                self._changes.append(Change(job.number, job.revision, "RESUME", purpose=purpose))
                self._trying.take(own)
                continue
            claims = self._terms.placement.place(self._room, job.shape, Want(math.inf)) if can_hand_over(job) else None
            if claims is not None:
                self._changes.append(Change(job.number, job.revision, "MOVE", claims, purpose=purpose))
                self._trying.take(claims)

    # -- order ---------------------------------------------------------------------------------------------------------

    def _defragment(self) -> None:
        gangs = [one for job, _, one in self._gangs.values() if job.spec.movable]
        most = self._terms.per_hour
        if most is None:
            most = max(_LEAST_AN_HOUR, sum(one.shape.gpus for one in gangs))
        left = min(MOST_AT_ONCE, int(most - len(self._moved_at)))
        if left <= 0:
            return
        proposals = defragmented(self._room, gangs, most_moves=left, now=self._now, failed=self._failed)
        for proposal in capped(proposals, self._now, self._moved_at, (), left):
            self._begin(_GOALS[proposal.why], Hole((), proposal.moves), 0, proposal.saves)

    # -- the room ------------------------------------------------------------------------------------------------------

    def _take_starts(self, found: Pass) -> None:
        own = {change.number for change in self._changes}
        for change in found.changes:
            if change.kind == "START" and change.number not in own and is_free(self._room.view, change.claims):
                self._trying.take(change.claims)

    def _keep_for(self, errands: Iterable[Errand]) -> None:
        """What errands that have just begun need, in a room that does not know of them."""
        for errand in errands:
            for leg in errand.legs:
                keep(self._trying, leg.claims)
            keep(self._trying, errand.hole)


_NEVER: Final = Looked(-math.inf)
_GOALS: Final = {
    Why.LOCALITY: Goal.LOCALITY,
    Why.HOLE: Goal.HOLE,
    Why.UNPACK: Goal.UNPACK,
    Why.DRAIN: Goal.DRAIN,
    Why.DEFRAGMENT: Goal.DEFRAGMENT,
}


def _can_move(job: Job, gang: Gang) -> bool:
    if gang.intent is not Intent.RUN or gang.phase is not GangPhase.RUNNING or job.state is not JobState.HOLDING:
        return False
    if job.next_epoch or job.ending is not None or not job.spec.preemptible or not job.capabilities.known:
        return False
    # Who shares a device is its pack's to move.
    return can_hand_over(job) and not any(claim.shared_mask for claim in gang.claims)


def _may_go(other: Job, job: Job) -> bool:
    """Whether one may be moved for the other: nobody waits for a move of lower priority."""
    return other.spec.movable and other.spec.priority <= job.spec.priority


def _held(gang: Gang) -> Claims:
    return tuple([piece.held for piece in gang.pieces if piece.held is not None])
