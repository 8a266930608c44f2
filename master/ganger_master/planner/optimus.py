"""Optimus's pass: how many GPUs each job should have now, by what one more would save, and the changes that lead there.

Peng et al., EuroSys 2018, section 4. Every interval all live jobs are weighed anew: each gets what it needs at least,
in order of arrival, as far as that fits; then the task that saves most time goes to its job, again and again
(`policies.optimus`). Who should have another size is stopped with a checkpoint and starts again, the smallest first,
on the fewest servers (its placement). Between intervals nobody is stopped: who waits is weighed for what is left.

Beyond the paper: who runs comes before who waits, so that nobody is stopped altogether but for those who have waited
too long, or who find no place; who is not elastic counts with its whole gang; growth that saves less than it costs, or
finds no place, does not happen, and what that leaves goes back to those who would have given it; an elastic gang that
fits nowhere takes as many GPUs as do fit; and room is made for a gang that fits nowhere though there are GPUs enough,
as in every other pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from ganger.resources.values import GangShape, Level
from msgspec.structs import replace as replace_of

from ganger_master.core.model import Job
from ganger_master.core.sizes import devices_of
from ganger_master.planner.refused import NOBODY, KeptOut
from ganger_master.planner.table import LiveTable
from ganger_master.planner.target import Choice, Pass, Terms, carried_out
from ganger_master.policies.ask import Ask
from ganger_master.policies.facts import Capacity, Facts, Flags, Floats, Integers
from ganger_master.policies.fragmentation import Demand
from ganger_master.policies.optimus import allocated, allreduce_speeds, growing
from ganger_master.policies.optimus_belief import NOTHING, Belief, Believed
from ganger_master.policies.order import Order, ranked
from ganger_master.policies.place import Placement
from ganger_master.policies.place.placement import Claims
from ganger_master.policies.room import Room


def plan_optimus(
    order: Order,
    placement: Placement,
    table: LiveTable,
    now: float,
    capacity: Capacity,
    room: Room,
    believed: Believed,
    may_stop: bool = True,
    resize_s: float = 0.0,
    kept_out: KeptOut = NOBODY,
) -> Pass:
    """As `planner.target.plan`. `order`: by arrival, and what else `carried_out` asks it; `resize_s`: what a change of
    size takes."""
    if not may_stop and not table.has_waiting:
        return Pass(next_change_s=now)
    rows, facts = table.facts(now)
    line = ranked(order, facts, now, capacity)
    wanting = _Wanting.of(order, table, rows, facts, line, capacity, believed, may_stop, kept_out)
    if not wanting.is_anybody:
        return Pass(next_change_s=now if wanting.may_change_later else math.inf)

    def held(at: int) -> Claims:
        gang = table.gangs[int(rows[at])]
        return () if gang is None else tuple([piece.held for piece in gang.pieces if piece.held is not None])

    room.refresh()
    gpus = _within_reach(wanting, wanting.sizes(capacity, resize_s), placement, room, held)
    jobs, running = wanting.jobs, facts.is_running
    resized = np.flatnonzero(running & (gpus > 0) & (gpus != facts.gpus))
    waiting = np.flatnonzero(wanting.waiting & wanting.elastic).tolist()
    shapes = {jobs[at].number: wanting.shape(at, int(gpus[at])) for at in waiting}
    keeps = running.copy()
    keeps[resized] = False
    line = line[(wanting.waiting | keeps)[line]]
    choice = Choice(
        rows,
        replace(facts, is_running=keeps),
        line,
        facts.number[line[wanting.waiting[line]]],
        wanting.waiting,
        gpus > 0,
        # Speeds are measured and losses fall all the time: whoever could have another size is weighed once more as soon
        # as somebody may be stopped for it.
        now if wanting.may_change_later else math.inf,
    )
    starting = wanting.waiting & (gpus > 0)
    placing = wanting.line[starting[wanting.line]]
    placing = placing[np.argsort(gpus[placing], kind="stable")]
    stopped = [(jobs[at], gang) for at in resized.tolist() if (gang := table.gangs[int(rows[at])]) is not None]
    least = {shapes[jobs[at].number]: int(wanting.least[at]) for at in placing.tolist() if wanting.elastic[at]}
    return carried_out(
        choice,
        order,
        _yielding(placement, least),
        table,
        now,
        room,
        may_stop,
        kept_out,
        Terms(lambda job: shapes.get(job.number) or job.shape),
        stopped,
        placing,
    )


@dataclass(frozen=True, eq=False)
class _Wanting:
    """Who shares the cluster, by position among the facts; tasks of `each` GPUs, for who is not elastic the gang."""

    facts: Facts
    jobs: Sequence[Job]
    waiting: Flags
    # Gives back what it holds, to wait then.
    going: Flags
    elastic: Flags
    each: Integers
    least: Integers
    most: Integers
    # Runs, and may have no other size now.
    fixed: Flags
    # Positions of all who want GPUs, first job first.
    line: Integers
    beliefs: Sequence[Belief]

    @classmethod
    def of(
        cls,
        order: Order,
        table: LiveTable,
        rows: Integers,
        facts: Facts,
        line: Integers,
        capacity: Capacity,
        believed: Believed,
        may_stop: bool,
        kept_out: KeptOut,
    ) -> _Wanting:
        jobs = [job for row in rows.tolist() if (job := table.jobs[row]) is not None]
        going = table.is_going(rows) & ~facts.is_running
        waiting = table.is_waiting(rows) & ~_among(facts, kept_out.not_started)
        stays = facts.is_running & (~facts.is_preemptible | _among(facts, kept_out.not_stopped) | (not may_stop))
        elastic = np.array([job.spec.is_elastic for job in jobs], bool)
        # Who rests in memory keeps its size, and so does who cannot go on from its checkpoint with another one.
        can = [not job.is_bound if waits else job.capabilities.resize for job, waits in zip(jobs, waiting, strict=True)]
        may_change = elastic & ~stays & np.array(can, bool)
        each, least, most = facts.gpus.copy(), np.ones(len(jobs), np.int64), np.ones(len(jobs), np.int64)
        for at in np.flatnonzero(may_change).tolist():
            spec = jobs[at].spec
            each[at] = task = spec.roles[0].shape.gpus
            least[at], most[at] = spec.gpus_min // task, spec.gpus_max // task
        wants = facts.is_running | waiting | going
        # Who may not be stopped has what it has, whoever was first; and nobody who runs is stopped altogether but for
        # those who have waited too long.
        overdue = np.zeros(len(jobs), bool) if order.overdue is None else order.overdue(facts, capacity.gpus)
        group = np.select([stays, overdue, facts.is_running], [0, 1, 2], 3)
        ranks = line[np.argsort(group[line], kind="stable")]
        beliefs = [NOTHING] * len(jobs)
        asked = np.flatnonzero(may_change & wants).tolist()
        pairs = [(jobs[at], table.gangs[int(rows[at])]) for at in asked]
        for at, belief in zip(asked, believed(pairs) if pairs else (), strict=True):
            beliefs[at] = belief
        return cls(facts, jobs, waiting, going, may_change, each, least, most, stays, ranks[wants[ranks]], beliefs)

    def shape(self, at: int, gpus: int) -> GangShape:
        """With so many GPUs, or with the least that it accepts."""
        job = self.jobs[at]
        if not self.elastic[at]:
            return job.shape
        least = int(self.least[at] * self.each[at])
        return job.spec.shape(job.arena_bytes_per_device, job.used_device_bytes, gpus or least)

    @property
    def may_change_later(self) -> bool:
        """Whether anybody may have another size once somebody may be stopped for it."""
        return any(self.jobs[at].spec.is_elastic for at in self.line.tolist())

    @property
    def is_anybody(self) -> bool:
        """Whether there is anything to decide."""
        return bool(self.waiting.any() or (self.elastic & self.facts.is_running).any())

    def sizes(self, capacity: Capacity, resize_s: float) -> Integers:
        """GPUs that each should have now; nothing for whom there are none, and for who wants none."""
        line, facts = self.line, self.facts
        speeds, left = self._speeds(line, capacity.gpus_per_node)
        parts = self.each / np.maximum(facts.gpus, 1)
        shapes = np.array([self.each, facts.cores * parts, facts.memory_bytes * parts], float).T[line][:, None, :]
        amounts = np.array([capacity.gpus, capacity.cores, capacity.memory_bytes])
        young = np.array([self.beliefs[at].is_young for at in line.tolist()], bool)
        least, most = self.least[line][:, None], self.most[line][:, None]
        jobs = growing(left, speeds, shapes, young, most, least)
        tasks = allocated(jobs, amounts)[:, 0]
        before = np.where(facts.is_running & self.elastic, facts.gpus // np.maximum(self.each, 1), 0)[line]
        tasks = _worth_it(tasks, before, self.each[line], left, speeds, resize_s)
        found = np.zeros(len(facts), np.int64)
        found[line] = tasks * self.each[line]
        # Who may not be stopped keeps what it has, whatever it counts for.
        found[self.fixed] = facts.gpus[self.fixed]
        return found

    def _speeds(self, line: Integers, gpus_per_node: int) -> tuple[Callable[[Integers, Integers], Floats], Floats]:
        """Steps a second by position in the line and tasks, and steps left; NaN where no speed is known."""
        known = [(place, self.beliefs[at]) for place, at in enumerate(line.tolist()) if self.beliefs[at].speed]
        left = np.full(len(line), np.nan)
        row = np.zeros(len(line), np.int64)
        for index, (place, belief) in enumerate(known):
            left[place], row[place] = belief.steps_left, index
        models = [belief.speed for _, belief in known if belief.speed is not None]
        of_gpus = allreduce_speeds(models, np.ones(len(models)), gpus_per_node)
        each = self.each[line]

        def speed(jobs: Integers, counts: Integers) -> Floats:
            return of_gpus(row[jobs], counts * each[jobs][:, None])

        return speed, left


def _worth_it(
    tasks: Integers,
    before: Integers,
    each: Integers,
    left: Floats,
    speeds: Callable[[Integers, Integers], Floats],
    resize_s: float,
) -> Integers:
    """The sizes without growth of who runs that saves less than it takes."""
    decided = tasks.copy()
    grows = np.flatnonzero((before > 0) & (tasks > before) & ~np.isnan(left))
    if len(grows):
        now = left[grows] / speeds(grows, before[grows][:, None])
        then = left[grows] / speeds(grows, tasks[grows][:, None])
        stay = grows[now - then < resize_s]
        decided[stay] = before[stay]
    return _given_back(tasks * each, decided * each, before * each) // each


def _given_back(wanted: Integers, decided: Integers, before: Integers) -> Integers:
    """The GPUs that were decided, where what is less than what was wanted goes to those who would shrink, as they come,
    if they need not change then."""
    found = decided.copy()
    spare = int((wanted - decided).sum())
    for place in np.flatnonzero((before > decided) & (decided > 0)).tolist():
        needed = int(before[place] - decided[place])
        if needed <= spare:
            found[place], spare = before[place], spare - needed
    return found


def _within_reach(
    wanting: _Wanting, wanted: Integers, placement: Placement, room: Room, held: Callable[[int], Claims]
) -> Integers:
    """The sizes without growth that would come to nothing, because no place is large enough once all who change size
    have left theirs: else who got less than it should would be stopped for more every time. `held`: what the gang at a
    position holds."""
    before = np.where(wanting.facts.is_running, wanting.facts.gpus, 0)
    gpus = wanted
    while True:
        resized = (before > 0) & (gpus > 0) & (gpus != before)
        if not (resized & (gpus > before)).any():
            return gpus
        trial = Room(room.view.copy())
        for at in np.flatnonzero(resized | wanting.going).tolist():
            trial.give(held(at))
        starting = np.flatnonzero(resized | (wanting.waiting & (gpus > 0)))
        vain = []
        for at in starting[np.lexsort((starting, gpus[starting]))].tolist():
            shape = wanting.shape(at, int(gpus[at]))
            yields = _yielding(placement, {shape: int(wanting.least[at])} if wanting.elastic[at] else {})
            claims = yields.place(trial, shape) or ()
            trial.take(claims)
            if before[at] and devices_of(claims) <= before[at] < gpus[at]:
                vain.append(at)
        if not vain:
            return gpus
        decided = gpus.copy()
        decided[vain] = before[vain]
        gpus = _given_back(gpus, decided, before)


def _yielding(placement: Placement, least: Mapping[GangShape, int]) -> Placement:
    """The placement, which gives an elastic gang fewer tasks, but no fewer than those, where more do not fit."""

    def search(room: Room, ask: Ask, widest: Level, demand: Demand | None) -> Claims | None:
        found = placement.search(room, ask, widest, demand)
        if found is not None or ask.shape not in least:
            return found
        # Where a gang fits, one with fewer tasks does.
        fits, too_many = least[ask.shape] - 1, ask.tasks
        while fits + 1 < too_many:
            tasks = (fits + too_many) // 2
            smaller = placement.search(room, room.ask(_with_tasks(ask.shape, tasks)), widest, demand)
            if smaller is None:
                too_many = tasks
            else:
                fits, found = tasks, smaller
        return found

    return replace(placement, search=search)


def _with_tasks(shape: GangShape, tasks: int) -> GangShape:
    return replace_of(shape, roles=(replace_of(shape.roles[0], tasks=tasks),))


def _among(facts: Facts, numbers: object) -> Flags:
    found: Flags = np.isin(facts.number, list(numbers))  # type: ignore[call-overload]
    return found
