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
from functools import cached_property
from typing import Final

import numpy as np
from ganger.placement.candidates import widest_now
from ganger.resources.values import GangShape
from ganger.resources.view import Mode
from msgspec.structs import replace as replace_of

from ganger_master.core.arenas import has_arenas
from ganger_master.core.commands import Change, Promise
from ganger_master.core.model import Gang, GangPhase, Intent, Job, JobState, SuspendLevel
from ganger_master.core.moving import can_hand_over
from ganger_master.core.purpose import Finding, Goal, Purpose
from ganger_master.planner.brought import Brought, Nobody, Rated
from ganger_master.planner.errands import Errand, Leg, Stage, carry_on, is_free, is_waiting, keep, stage_of
from ganger_master.planner.move_costs import MoveCosts, move_costs
from ganger_master.planner.refused import KeptOut
from ganger_master.planner.table import LiveTable
from ganger_master.planner.target import Pass
from ganger_master.policies.introspect.hole import Hole, Movable, Movables, hole_for, in_order
from ganger_master.policies.introspect.migration import (
    Proposal,
    Spread,
    Why,
    capped,
    closer,
    defragmented,
    drained,
    movable,
)
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
# A hole that was not there is looked for again when more is free, or when the gang has waited so much longer.
_LOOK_AGAIN: Final = 2.0
_LEAST_LOOK_S: Final = 5.0
# Who lies badly is looked for, and what moves have brought is looked at, so often.
_CLOSER_S: Final = 30.0
_TRIAL_S: Final = 10.0
# Moves under way at once, for each of which hosts and networks work; and those begun in an hour that neither a gang nor
# an operator waits for, at least: else one for each GPU that runs somebody.
MOST_AT_ONCE: Final = 16
_LEAST_AN_HOUR: Final = 16
_HOUR_S: Final = 3600.0

Inner = Callable[[KeptOut, bool], Pass]


@dataclass(frozen=True, slots=True)
class Looked:
    """When a gang's hole is looked for again: then, or when more devices are `free`. `is_found`: there is one, which
    will be worth it soon."""

    again_s: float
    free: int
    is_found: bool = False


@dataclass(frozen=True, slots=True)
class Moving:
    """What is remembered; lost, it costs some moves twice."""

    errands: tuple[Errand, ...] = ()
    looked: Mapping[int, Looked] = field(default_factory=dict)
    # When each job was last sent away, for a while.
    moved_at: Mapping[int, float] = field(default_factory=dict)
    brought: Brought = field(default_factory=Brought)
    # When who lies badly was looked for last.
    closer_s: float = -math.inf

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
    rated: Rated = field(default_factory=Nobody)


def plan_moves(
    inner: Inner,
    terms: Terms,
    table: LiveTable,
    now: float,
    room: Room,
    moving: Moving,
    kept_out: KeptOut,
    may_stop: bool,
) -> tuple[Pass, Moving, tuple[Finding, ...], float]:
    """The changes to propose now, those of `inner` among them; what to remember if they are proposed; what was found of
    moves before; and when to ask again though nothing happens. `inner` is asked with the room as it is without what
    moves need, and for whom it is to find no place. The room is left as it was."""
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
        self._brought = moving.brought
        self._closer_s = moving.closer_s
        self._looked = dict(moving.looked)
        self._moved_at = {number: at for number, at in moving.moved_at.items() if now < at + _HOUR_S}
        self._old = moving.errands
        self._again_s = math.inf
        # Whose hole will be worth it soon: nobody is stopped for them meanwhile.
        self._soon: set[int] = set()

    def run(self, inner: Inner, kept_out: KeptOut, may_stop: bool) -> tuple[Pass, Moving, tuple[Finding, ...], float]:
        carried = carry_on(self._old, self._table, self._trying, self._now)
        for errand in carried.given_up:
            self._look_later(errand.waiting)
        self._errands, self._changes = carried.errands, carried.changes
        parked = self._parked() if self._terms.holes else []
        urgent = self._table.most_urgent_waiting
        self._bring_back([one for one in parked if urgent is None or one[0].spec.priority >= urgent])
        for node in self._terms.draining:
            self._drain(node)
        self._brought, self._findings = self._brought.looked(self._table, self._room.view, self._terms.rated, self._now)
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
        if not self._errands and not found.changes:
            self._closer()
        if not self._table.has_waiting and not self._errands and self._room.view.mode is Mode.PACK:
            self._defragment()
        for trial in self._brought.trials.values():
            # With twice the windows more is known, not before.
            self._again_s = min(self._again_s, self._now + max(_TRIAL_S, (self._now - trial.began_s) / 2))
        return self._result(found)

    def _result(self, found: Pass) -> tuple[Pass, Moving, tuple[Finding, ...], float]:
        for change in self._changes:
            if change.kind == "MOVE":
                self._moved_at[change.number] = self._now
                self._measure(change)
        live = {number: looked for number, looked in self._looked.items() if is_waiting(self._table, number)}
        moving = Moving(tuple(self._errands), live, self._moved_at, self._brought, self._closer_s)
        own = {change.number for change in self._changes}
        others = tuple([change for change in found.changes if change.number not in own])
        starts = np.array(
            [c.number for c in self._changes if c.kind == "START" and c.number not in found.line], np.int64
        )
        line = np.concatenate((starts, found.line)) if len(starts) else found.line
        return replace(found, changes=(*self._changes, *others), line=line), moving, self._findings, self._again_s

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
        return self._costs.pause_s(job, gang)

    @cached_property
    def _running(self) -> list[tuple[Job, Gang]]:
        return self._table.running

    @property
    def _free(self) -> int:
        """Devices that nobody has, and that are kept for nobody."""
        return int(np.bitwise_count(self._room.view.columns().free).sum())

    @cached_property
    def _costs(self) -> MoveCosts:
        return move_costs(self._running)

    @cached_property
    def _gangs(self) -> dict[int, tuple[Job, Gang, Movable]]:
        """Those that can be moved at all, by number."""
        found = {}
        for job, gang in self._running:
            if _can_move(job, gang):
                one = movable(self._room.view, job.number, job.shape, _held(gang), self._pause_s(job, gang))
                found[job.number] = job, gang, one
        return found

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
            looked = self._looked.get(number, _NEVER)
            if self._now < looked.again_s and self._free <= looked.free:
                self._again_s = min(self._again_s, looked.again_s)
                if looked.is_found:
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
        stay = self._busy
        hole = None
        if self._free >= shape.gpus:
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
            self._looked[job.number] = Looked(job.pending_since + worth_s, self._free, is_soon)
            self._again_s = min(self._again_s, job.pending_since + worth_s)
            return
        if self._under_way + len(hole.moves) > MOST_AT_ONCE:
            self._look_later(job.number)
            return
        saved = waited * shape.gpus - (hole.cost if worth_s else 0.0)
        self._begin(Goal.HOLE, hole, job.number, max(0.0, saved))

    def _outranks(self, job: Job) -> bool:
        return any(other.spec.priority < job.spec.priority for other, _ in self._running)

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
            self._looked[number] = Looked(max(again_s, self._now + _LEAST_LOOK_S), self._free)
            self._again_s = min(self._again_s, self._looked[number].again_s)

    def _begin(self, goal: Goal, hole: Hole, waiting: int, saved: float) -> None:
        """An errand, and its first changes."""
        ordered, parked = in_order(hole.moves)
        if not all(has_arenas(self._gangs[move.number][1]) for move in parked):
            # Whoever has no memory reserved cannot rest on its way.
            return
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

    def _closer(self) -> None:
        """Gangs over several nodes that lie further apart than is good for them, as far as is known of their kind, into
        what is free."""
        if self._now < self._closer_s + _CLOSER_S:
            return
        gangs = [pair for pair in self._gangs.values() if pair[0].spec.movable and len(pair[1].claims) > 1]
        if not gangs:
            return
        self._closer_s = self._now
        kinds = {job.number: self._terms.rated.signature(job.number) for job, _, _ in gangs}
        models = {kind: self._brought.locality(kind) for kind in sorted(set(kinds.values()))}
        spreads = [Spread(one, models[kinds[job.number]], self._ran_s(job)) for job, _, one in gangs]
        failed, placement = self._brought.failed, self._terms.placement
        self._propose(closer(self._room, spreads, now=self._now, failed=failed, placement=placement))

    def _ran_s(self, job: Job) -> float:
        """As long as it is expected to run yet."""
        return job.run_seconds + (max(0.0, self._now - job.running_since) if job.running_since else 0.0)

    def _defragment(self) -> None:
        gangs = [one for job, _, one in self._gangs.values() if job.spec.movable]
        if self._left > 0:
            failed = self._brought.failed
            self._propose(defragmented(self._room, gangs, most_moves=self._left, now=self._now, failed=failed))

    @property
    def _left(self) -> int:
        """Moves that nobody waits for and may still begin."""
        most = self._terms.per_hour
        if most is None:
            most = max(_LEAST_AN_HOUR, sum(one.shape.gpus for _, _, one in self._gangs.values()))
        return min(MOST_AT_ONCE, int(most - len(self._moved_at)))

    def _propose(self, proposals: Iterable[Proposal]) -> None:
        for proposal in capped(proposals, self._now, self._moved_at, (), max(0, self._left)):
            self._begin(_GOALS[proposal.why], Hole((), proposal.moves), 0, proposal.saves)

    def _measure(self, change: Change) -> None:
        got = self._table.get(change.number)
        if got is not None and got[1] is not None:
            goal, rated = change.purpose.goal, self._terms.rated
            self._brought = self._brought.begun(change.number, goal, got[1], change.claims, rated, self._now)

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


_NEVER: Final = Looked(-math.inf, 0)
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
