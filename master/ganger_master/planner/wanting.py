"""Who shares the cluster under Optimus's pass, as what counts, and how many GPUs each should have by that."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np
from ganger.cluster.place_placement import Claims
from ganger.cluster.resources import GangShape

from ganger_master.core.change_reason import Goal, Purpose
from ganger_master.core.commands import Change
from ganger_master.core.elastic import devices_of
from ganger_master.core.model import Gang, JobRecord
from ganger_master.planner.in_place_resize import (
    Resizing,
    can_change,
    sizes_of,
)
from ganger_master.planner.job_table import LiveTable
from ganger_master.planner.refusal_backoff import ExcludedJobs
from ganger_master.policies.job_facts import Capacity, Facts, Flags, Floats, Integers
from ganger_master.policies.optimus_sizes import (
    NOTHING,
    Believed,
    OptimusEstimate,
    allocated,
    allreduce_speeds,
    growing,
)
from ganger_master.policies.orders import JobOrder


@dataclass(frozen=True, eq=False)
class SizeRequests:
    """Who shares the cluster, by position among the facts; tasks of `each` GPUs, for who is not elastic the gang."""

    facts: Facts
    jobs: Sequence[JobRecord]
    gangs: Sequence[Gang | None]
    waiting: Flags
    # Between two sizes, or two places.
    changing: Flags
    # Gives back what it holds, to wait then.
    going: Flags
    elastic: Flags
    each: Integers
    least: Integers
    most: Integers
    # Runs, and may have no other size now than the one that is `counted`.
    fixed: Flags
    counted: Integers
    # Positions of all who want GPUs, first job first.
    line: Integers
    beliefs: Sequence[OptimusEstimate]
    gpus_per_node: int

    @classmethod
    def of(
        cls,
        order: JobOrder,
        table: LiveTable,
        rows: Integers,
        facts: Facts,
        jobs: Sequence[JobRecord],
        gangs: Sequence[Gang | None],
        line: Integers,
        capacity: Capacity,
        believed: Believed,
        may_stop: bool,
        kept_out: ExcludedJobs,
        resizing: Resizing,
    ) -> SizeRequests:
        changing = np.array([bool(job.next_epoch) for job in jobs], bool)
        going = table.is_going(rows) & ~facts.is_running & ~changing
        waiting = table.is_waiting(rows) & ~_among(facts, kept_out.not_started)
        left_alone = ~facts.is_preemptible | _among(facts, kept_out.not_stopped) | (not may_stop)
        stays = changing | (facts.is_running & left_alone)
        elastic = np.array([job.spec.is_elastic for job in jobs], bool)
        # Who rests in memory keeps its size, and so does who cannot go on from its checkpoint with another one.
        can = [not job.is_bound if waits else job.capabilities.resize for job, waits in zip(jobs, waiting, strict=True)]
        may_change = elastic & ~stays & np.array(can, bool)
        wanted = [resizing.wanted.get(job.number, 0) for job in jobs]
        counted = np.where(stays & (np.array(wanted, np.int64) > 0), wanted, facts.gpus)
        each, least, most = counted.copy(), np.ones(len(jobs), np.int64), np.ones(len(jobs), np.int64)
        for at in np.flatnonzero(may_change).tolist():
            spec = jobs[at].spec
            each[at] = task = spec.roles[0].shape.gpus
            least[at], most[at] = spec.gpus_min // task, spec.gpus_max // task
            if table.quotas is not None:
                most[at] = max(least[at], min(most[at], table.quotas.left(jobs[at]) // task))
        wants = facts.is_running | waiting | going | changing
        # Who may not be stopped has what it has, whoever was first; and nobody who runs is stopped altogether but for
        # those who have waited too long.
        overdue = np.zeros(len(jobs), bool) if order.overdue is None else order.overdue(facts, capacity.gpus)
        group = np.select([stays, overdue, facts.is_running], [0, 1, 2], 3)
        ranks = line[np.argsort(group[line], kind="stable")]
        beliefs = [NOTHING] * len(jobs)
        # Of those whose growth was decided before it is only told.
        asked = np.flatnonzero((may_change | (np.array(wanted, np.int64) > 0)) & wants).tolist()
        pairs = [(jobs[at], gangs[at]) for at in asked]
        for at, belief in zip(asked, believed(pairs) if pairs else (), strict=True):
            beliefs[at] = belief
        everybody = ranks[wants[ranks]]
        return cls(
            facts,
            jobs,
            gangs,
            waiting,
            changing,
            going,
            may_change,
            each,
            least,
            most,
            stays,
            counted,
            everybody,
            beliefs,
            capacity.gpus_per_node,
        )

    def shape(self, at: int, gpus: int) -> GangShape:
        """With so many GPUs, or with the least that it accepts."""
        job = self.jobs[at]
        if not self.elastic[at]:
            return job.shape
        least = int(self.least[at] * self.each[at])
        return job.spec.shape(job.arena_bytes_per_device, job.used_device_bytes, gpus or least)

    def in_place(self, at: int) -> bool:
        """Whether the gang there can have another size where it is."""
        gang = self.gangs[at]
        return gang is not None and can_change(self.jobs[at], gang)

    def sizes_below(self, at: int, gpus: int) -> Sequence[int]:
        """Numbers of GPUs that the elastic job there may have instead, from that one down to its least."""
        each, job = int(self.each[at]), self.jobs[at]
        may = sizes_of(job, self.gangs[at]) or range(int(self.least[at]), gpus // each + 1)
        return [tasks * each for tasks in reversed(may) if tasks * each <= gpus]

    def resize(self, at: int, claims: Claims, goal: Goal) -> Change:
        """To these claims, with what it rests on."""
        job, before, gpus = self.jobs[at], int(self.facts.gpus[at]), devices_of(claims)
        belief = self.beliefs[at]
        text = f"from {before} GPUs to {gpus}"
        if belief.speed is not None:
            speed = allreduce_speeds([belief.speed], np.ones(1), self.gpus_per_node)
            now, then = speed(np.zeros(2, np.int64), np.array([[before], [gpus]])).tolist()
            foreseen = "guessed" if belief.is_young else "foreseen"
            text += (
                f": {now:.3g} steps/s with {before}, {then:.3g} with {gpus}, {belief.steps_left:.4g} {foreseen} left"
            )
        return Change(job.number, job.revision, "RESIZE", claims, reason=text, purpose=Purpose(goal))

    @property
    def may_change_later(self) -> bool:
        """Whether anybody may have another size once somebody may be stopped for it."""
        return any(self.jobs[at].spec.is_elastic for at in self.line.tolist())

    @property
    def is_anybody(self) -> bool:
        """Whether there is anything to decide."""
        return bool(self.waiting.any() or (self.elastic & self.facts.is_running).any())

    def sizes(self, capacity: Capacity, takes_s: Floats) -> Integers:
        """GPUs that each should have now; nothing for whom there are none, and for who wants none. `takes_s`: how long
        a change makes each stand still."""
        line, facts = self.line, self.facts
        speeds, left = self._speeds(line, capacity.gpus_per_node)
        parts = self.each / np.maximum(facts.gpus, 1)
        shapes = np.array([self.each, facts.cores * parts, facts.memory_bytes * parts], float).T[line][:, None, :]
        amounts = np.array([capacity.gpus, capacity.cores, capacity.memory_bytes])
        young = np.array([self.beliefs[at].is_young for at in line.tolist()], bool)
        least, most = self.least[line][:, None], self.most[line][:, None].copy()
        bound = {
            place: may
            for place, at in enumerate(line.tolist())
            if self.elastic[at] and (may := sizes_of(self.jobs[at], self.gangs[at])) is not None
        }
        while True:
            jobs = growing(left, speeds, shapes, young, most, least)
            tasks = allocated(jobs, amounts)[:, 0]
            between = [place for place, may in bound.items() if tasks[place] and int(tasks[place]) not in may]
            if not between:
                break
            # What the next smaller number leaves is for others.
            for place in between:
                smaller = [number for number in bound[place] if number < tasks[place]]
                most[place] = max([number for number in smaller if number >= least[place]], default=least[place])
                if not smaller or most[place] > smaller[-1]:
                    # None that it accepts divides its batch: the master says so.
                    del bound[place]
        before = np.where(facts.is_running & self.elastic, facts.gpus // np.maximum(self.each, 1), 0)[line]
        tasks = _worth_it(tasks, before, self.each[line], left, speeds, takes_s[line])
        found = np.zeros(len(facts), np.int64)
        found[line] = tasks * self.each[line]
        # Who may not be stopped keeps what it has, whatever it counts for.
        found[self.fixed] = self.counted[self.fixed]
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
    takes_s: Floats,
) -> Integers:
    """The sizes without growth of who runs that saves less than it takes."""
    decided = tasks.copy()
    grows = np.flatnonzero((before > 0) & (tasks > before) & ~np.isnan(left))
    if len(grows):
        now = left[grows] / speeds(grows, before[grows][:, None])
        then = left[grows] / speeds(grows, tasks[grows][:, None])
        stay = grows[now - then < takes_s[grows]]
        decided[stay] = before[stay]
    return without_growth(tasks * each, decided * each, before * each) // each


def without_growth(wanted: Integers, decided: Integers, before: Integers) -> Integers:
    """The GPUs that were decided, where what is less than what was wanted goes to those who would shrink, as they come,
    if they need not change then."""
    found = decided.copy()
    spare = int((wanted - decided).sum())
    for place in np.flatnonzero((before > decided) & (decided > 0)).tolist():
        needed = int(before[place] - decided[place])
        if needed <= spare:
            found[place], spare = before[place], spare - needed
    return found


def _among(facts: Facts, numbers: Collection[int]) -> Flags:
    return np.isin(facts.number, list(numbers))
