"""Jobs that share the cluster under Optimus's pass, and the number of GPUs that each should have."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np
from ganger.cluster.resources import GangShape
from ganger.cluster.search import Claims
from ganger.text import counted

from ganger_master.core.elastic import devices_of
from ganger_master.core.gang_model import Gang
from ganger_master.core.job_model import JobRecord
from ganger_master.core.plan_changes import Goal, Purpose, ResizeChange
from ganger_master.estimators.speed import AllReduceModel
from ganger_master.planner.context import PlanContext
from ganger_master.planner.in_place_resize import can_change, sizes_of
from ganger_master.planner.job_table import LiveTable
from ganger_master.policies import ResizeByOptimus
from ganger_master.policies.optimus_sizes import (
    NOTHING,
    Believed,
    ElasticJobs,
    OptimusEstimate,
    allocated,
    allreduce_speeds,
    growing,
    nothing_believed,
)
from ganger_master.policies.orders import Capacity, Facts, Flags, Floats, Integers


@dataclass(frozen=True, eq=False)
class SizeRequests:
    """Jobs that share the cluster, by position among the facts. A task has `each` GPUs; a rigid job is one."""

    facts: Facts
    jobs: Sequence[JobRecord]
    gangs: Sequence[Gang | None]
    waiting: Flags
    # Changes its size or place now.
    changing: Flags
    # Returns its devices, to wait afterwards.
    going: Flags
    elastic: Flags
    each: Integers
    least: Integers
    most: Integers
    # Runs, and keeps the size that is `counted`.
    fixed: Flags
    counted: Integers
    # Positions of all jobs that want GPUs, first job first.
    line: Integers
    beliefs: Sequence[OptimusEstimate]
    gpus_per_node: int
    # The tasks of each job, from the capacity.
    allocate: Callable[[ElasticJobs, Floats], Integers]

    @classmethod
    def of(
        cls,
        context: PlanContext,
        capacity: Capacity,
        rows: Integers,
        facts: Facts,
        jobs: Sequence[JobRecord],
        gangs: Sequence[Gang | None],
        line: Integers,
    ) -> SizeRequests:
        table, order, excluded, resizing = context.jobs, context.order, context.excluded, context.resizing
        changing = np.array([bool(job.next_epoch) for job in jobs], bool)
        going = table.is_going(rows) & ~facts.is_running & ~changing
        waiting = table.is_waiting(rows) & ~_among(facts, excluded.not_started)
        # Co-located and time-sliced jobs keep their sizes.
        left_alone = (
            ~facts.is_preemptible
            | _among(facts, table.groups.co_located)
            | _among(facts, excluded.not_stopped)
            | (not context.may_preempt)
        )
        stays = changing | (facts.is_running & left_alone)
        elastic = np.array([job.spec.is_elastic for job in jobs], bool)
        # A job parked in host memory keeps its size, and so does one that cannot resume with another number of ranks.
        can = [not job.is_bound if waits else job.capabilities.resize for job, waits in zip(jobs, waiting, strict=True)]
        may_change = elastic & ~stays & np.array(can, bool)
        wanted = [resizing.wanted.get(job.number, 0) for job in jobs]
        counted = np.where(stays & (np.array(wanted, np.int64) > 0), wanted, facts.gpus)
        ranges = _ranges(table, jobs, may_change, counted)
        wants = facts.is_running | waiting | going | changing
        # Jobs that may not be preempted keep their devices, then come overdue jobs, then running ones: none of these is
        # preempted for any other than an overdue job.
        overdue = np.zeros(len(jobs), bool) if order.overdue is None else order.overdue(facts, capacity.gpus)
        group = np.select([stays, overdue, facts.is_running], [0, 1, 2], 3)
        ranks = line[np.argsort(group[line], kind="stable")]
        # For growth that was decided before, the estimate only explains the change.
        believed = nothing_believed if context.rates is None else context.rates.believed(capacity.gpus_per_node)
        beliefs = _beliefs(jobs, gangs, (may_change | (np.array(wanted, np.int64) > 0)) & wants, believed)
        asks, per_node = ranks[wants[ranks]], capacity.gpus_per_node
        known = facts, jobs, gangs, waiting, changing, going
        stage = context.policy.stage(ResizeByOptimus)
        allocate = (stage and stage.allocate) or allocated
        return cls(*known, may_change, *ranges, stays, counted, asks, beliefs, per_node, allocate)

    def shape(self, at: int, gpus: int) -> GangShape:
        """Return the shape with that many GPUs, or for zero with the least that the job accepts."""
        job = self.jobs[at]
        if not self.elastic[at]:
            return job.shape
        least = int(self.least[at] * self.each[at])
        return job.shape_for(gpus or least)

    @property
    def before(self) -> Integers:
        """The GPUs of running jobs; zero of others."""
        return np.where(self.facts.is_running, self.facts.gpus, 0)

    def in_place(self, at: int) -> bool:
        """Return whether the gang there can be resized in place."""
        gang = self.gangs[at]
        return gang is not None and can_change(self.jobs[at], gang)

    def sizes_below(self, at: int, gpus: int) -> Sequence[int]:
        """Return the numbers of GPUs that the elastic job may have, from `gpus` down to its least."""
        each, job = int(self.each[at]), self.jobs[at]
        may = sizes_of(job, self.gangs[at]) or range(int(self.least[at]), gpus // each + 1)
        return [tasks * each for tasks in reversed(may) if tasks * each <= gpus]

    def resize(self, at: int, claims: Claims, goal: Goal) -> ResizeChange:
        """Return the resize to these claims, with the estimates that it rests on."""
        job, before, gpus = self.jobs[at], int(self.facts.gpus[at]), devices_of(claims)
        belief = self.beliefs[at]
        text = f"from {counted(before, 'GPU')} to {gpus}"
        if isinstance(belief.speed, AllReduceModel):
            speed = allreduce_speeds([belief.speed], np.ones(1), self.gpus_per_node)
            now, then = speed(np.zeros(2, np.int64), np.array([[before], [gpus]])).tolist()
            foreseen = "guessed" if belief.is_young else "foreseen"
            text += (
                f": {now:.3g} steps/s with {before}, {then:.3g} with {gpus}, {belief.steps_left:.4g} {foreseen} left"
            )
        return ResizeChange(job.number, job.revision, claims, reason=text, purpose=Purpose(goal))

    @property
    def may_change_later(self) -> bool:
        """Whether any job may be resized once jobs may be preempted."""
        return any(self.jobs[at].spec.is_elastic for at in self.line.tolist())

    @property
    def has_choices(self) -> bool:
        """Whether there is anything to decide."""
        return bool(self.waiting.any() or (self.elastic & self.facts.is_running).any())

    def sizes(self, capacity: Capacity, takes_s: Floats) -> Integers:
        """Return the GPUs that each job should have now; zero for jobs without any. `takes_s`: pauses by a resize."""
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
            tasks = self.allocate(jobs, amounts)[:, 0]
            between = [place for place, may in bound.items() if tasks[place] and int(tasks[place]) not in may]
            if not between:
                break
            # The tasks between it and the next smaller accepted number go to other jobs.
            for place in between:
                smaller = [number for number in bound[place] if number < tasks[place]]
                most[place] = max([number for number in smaller if number >= least[place]], default=least[place])
                if not smaller or most[place] > smaller[-1]:
                    # No accepted size divides its batch: the master rejects it with this reason.
                    del bound[place]
        before = np.where(facts.is_running & self.elastic, facts.gpus // np.maximum(self.each, 1), 0)[line]
        tasks = _worth_it(tasks, before, self.each[line], left, speeds, takes_s[line])
        found = np.zeros(len(facts), np.int64)
        found[line] = tasks * self.each[line]
        # A job that may not be preempted keeps its devices, whatever it is counted with.
        found[self.fixed] = self.counted[self.fixed]
        return found

    def _speeds(self, line: Integers, gpus_per_node: int) -> tuple[Callable[[Integers, Integers], Floats], Floats]:
        """Return steps per second by position in the line and tasks, and the steps left; NaN without an estimate."""
        known = [
            (place, self.beliefs[at])
            for place, at in enumerate(line.tolist())
            if isinstance(self.beliefs[at].speed, AllReduceModel)
        ]
        left = np.full(len(line), np.nan)
        row = np.zeros(len(line), np.int64)
        for index, (place, belief) in enumerate(known):
            left[place], row[place] = belief.steps_left, index
        models = [belief.speed for _, belief in known if isinstance(belief.speed, AllReduceModel)]
        of_gpus = allreduce_speeds(models, np.ones(len(models)), gpus_per_node)
        each = self.each[line]

        def speed(jobs: Integers, counts: Integers) -> Floats:
            return of_gpus(row[jobs], counts * each[jobs][:, None])

        return speed, left


def _ranges(
    table: LiveTable, jobs: Sequence[JobRecord], may_change: Flags, counted: Integers
) -> tuple[Integers, Integers, Integers]:
    """Return the GPUs of a task, and the least and most tasks, by position; a job that may not change is one task."""
    each, least, most = counted.copy(), np.ones(len(jobs), np.int64), np.ones(len(jobs), np.int64)
    for at in np.flatnonzero(may_change).tolist():
        spec = jobs[at].spec
        each[at] = task = spec.roles[0].shape.gpus
        least[at], most[at] = spec.gpus_min // task, spec.gpus_max // task
        if table.quotas is not None:
            most[at] = max(least[at], min(most[at], table.quotas.left(jobs[at]) // task))
    return each, least, most


def _beliefs(
    jobs: Sequence[JobRecord], gangs: Sequence[Gang | None], among: Flags, believed: Believed
) -> list[OptimusEstimate]:
    found = [NOTHING] * len(jobs)
    positions = np.flatnonzero(among).tolist()
    pairs = [(jobs[at], gangs[at]) for at in positions]
    for at, belief in zip(positions, believed(pairs) if pairs else (), strict=True):
        found[at] = belief
    return found


def _worth_it(
    tasks: Integers,
    before: Integers,
    each: Integers,
    left: Floats,
    speeds: Callable[[Integers, Integers], Floats],
    takes_s: Floats,
) -> Integers:
    """Return the sizes without growth of running jobs that saves less time than it takes."""
    decided = tasks.copy()
    grows = np.flatnonzero((before > 0) & (tasks > before) & ~np.isnan(left))
    if len(grows):
        now = left[grows] / speeds(grows, before[grows][:, None])
        then = left[grows] / speeds(grows, tasks[grows][:, None])
        stay = grows[now - then < takes_s[grows]]
        decided[stay] = before[stay]
    return without_growth(tasks * each, decided * each, before * each) // each


def without_growth(wanted: Integers, decided: Integers, before: Integers) -> Integers:
    """Return the decided sizes, where GPUs that are decided less than wanted go to jobs that would shrink, in order, if
    these then need no resize."""
    found = decided.copy()
    spare = int((wanted - decided).sum())
    for place in np.flatnonzero((before > decided) & (decided > 0)).tolist():
        needed = int(before[place] - decided[place])
        if needed <= spare:
            found[place], spare = before[place], spare - needed
    return found


def _among(facts: Facts, numbers: Collection[int]) -> Flags:
    return np.isin(facts.number, list(numbers))
