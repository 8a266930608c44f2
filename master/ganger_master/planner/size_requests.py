"""Jobs that share the cluster under Optimus's pass, and the number of GPUs, or of tasks, that each should have.

There are two kinds of tasks: those with the GPUs of a job, which are its workers, and its parameter servers. Only a job
whose roles have ranges has the second kind.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from ganger.cluster.resources import GangShape
from ganger.cluster.search import Claims
from ganger.text import counted

from ganger_master.core.elastic import devices_of
from ganger_master.core.gang_model import Gang
from ganger_master.core.job_model import JobRecord, SuspendLevel
from ganger_master.core.plan_changes import Goal, Purpose, ResizeChange, SuspendChange
from ganger_master.estimators.server_speed import ServerSpeed
from ganger_master.estimators.speed import AllReduceModel
from ganger_master.planner.context import PlanContext
from ganger_master.planner.in_place_resize import can_change, sizes_of
from ganger_master.planner.job_measurements import server_role
from ganger_master.planner.job_table import LiveTable
from ganger_master.planner.size_trials import TriedJob, pinned_tasks
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
    server_speeds,
)
from ganger_master.policies.orders import Capacity, Facts, Flags, Floats, Integers

# Kinds of tasks.
_WORKERS, _SERVERS = 0, 1


class TaskSizes(NamedTuple):
    """By position among the facts: GPUs, zero for jobs without any, and parameter servers."""

    gpus: Integers
    servers: Integers


@dataclass(frozen=True, eq=False)
class SizeRequests:
    """Jobs that share the cluster, by position among the facts. A worker has `each` GPUs; a rigid job is one. `least`,
    `most`: (jobs, 2), by kind. `server_roles`: position of the role of servers; -1: none that may change. `present`:
    parameter servers that they have. `pinned`: tasks that jobs are to have now, to be measured."""

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
    server_roles: Integers
    present: Integers
    # Runs, and keeps the size that is `counted`.
    fixed: Flags
    counted: Integers
    # Positions of all jobs that want GPUs, first job first.
    line: Integers
    beliefs: Sequence[OptimusEstimate]
    gpus_per_node: int
    # The tasks of each job, from the capacity.
    allocate: Callable[[ElasticJobs, Floats], Integers]
    pinned: Mapping[int, tuple[int, int]] = field(default_factory=dict)

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
        server_roles = np.array([_elastic_servers(job) for job in jobs], np.int64)
        elastic = np.array([job.spec.is_elastic for job in jobs], bool) | (server_roles >= 0)
        # A job parked in host memory keeps its size, and so does one that cannot resume with another number of ranks.
        can = [_may_change(job, waits) for job, waits in zip(jobs, waiting.tolist(), strict=True)]
        may_change = elastic & ~stays & np.array(can, bool)
        server_roles = np.where(may_change, server_roles, -1)
        present = np.array(
            [job.tasks_by_role[at] if at >= 0 else 0 for job, at in zip(jobs, server_roles.tolist(), strict=True)],
            np.int64,
        )
        wanted = [resizing.wanted.get(job.number, 0) for job in jobs]
        counted = np.where(stays & (np.array(wanted, np.int64) > 0), wanted, facts.gpus)
        ranges = _ranges(table, jobs, may_change, counted, server_roles)
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
        sized = (*known, may_change, *ranges, server_roles, present, stays, counted)
        return cls(*sized, asks, beliefs, per_node, allocate)

    def shape(self, at: int, gpus: int, servers: int = 0) -> GangShape:
        """Return the shape with that many GPUs, or for zero with the least that the job accepts."""
        job = self.jobs[at]
        if not self.elastic[at]:
            return job.shape
        if self.server_roles[at] >= 0:
            workers = gpus // int(self.each[at])
            return job.shape_for_tasks(self.by_role(at, workers, servers) if gpus else self.floor(at))
        return job.shape_for(gpus or int(self.least[at, _WORKERS] * self.each[at]))

    def by_role(self, at: int, workers: int, servers: int) -> tuple[int, ...]:
        """Return the tasks of a job with parameter servers, in the order of its roles."""
        return (servers, workers) if self.server_roles[at] == 0 else (workers, servers)

    def floor(self, at: int) -> tuple[int, ...]:
        """Return the least tasks that an elastic job accepts, in the order of its roles."""
        if self.server_roles[at] < 0:
            return (int(self.least[at, _WORKERS]),)
        return self.by_role(at, int(self.least[at, _WORKERS]), int(self.least[at, _SERVERS]))

    def changed(self, sizes: TaskSizes) -> Flags:
        """Return which running jobs are to have another size, by position."""
        other = (sizes.gpus != self.before) | ((self.server_roles >= 0) & (sizes.servers != self.present))
        return np.asarray((self.before > 0) & (sizes.gpus > 0) & other, bool)

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
        may = sizes_of(job, self.gangs[at]) or range(int(self.least[at, _WORKERS]), gpus // each + 1)
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

    def stop(self, at: int, sizes: TaskSizes) -> SuspendChange:
        """Return the stop of a job with parameter servers, which is to start with other tasks."""
        job, belief, each, role = self.jobs[at], self.beliefs[at], int(self.each[at]), int(self.server_roles[at])
        names = job.spec.roles[role].name, job.spec.roles[1 - role].name
        before = int(self.present[at]), int(self.facts.gpus[at]) // each
        becomes = int(sizes.servers[at]), int(sizes.gpus[at]) // each
        text = " to ".join([f"{names[0]}={servers} {names[1]}={workers}" for servers, workers in (before, becomes)])
        if isinstance(belief.speed, ServerSpeed):
            now, then = (belief.speed.steps_per_second(*one) for one in (before, becomes))
            foreseen = "guessed" if belief.is_young else "foreseen"
            text += f": {now:.3g} to {then:.3g} steps/s, {belief.steps_left:.4g} {foreseen} left"
        text = f"from {text}" + (", a trial" if at in self.pinned else "")
        purpose = Purpose(Goal.RESIZE, detail=text)
        return SuspendChange(job.number, job.revision, reason=text, purpose=purpose, level=SuspendLevel.CHECKPOINT)

    def with_trials(self, takes_s: Floats, free_gpus: int | None) -> SizeRequests:
        """Return the requests with tasks `pinned` for jobs of which too few sizes were measured: a job that would stop
        for other tasks keeps its own until it has a speed. `takes_s`: pauses by a resize; `free_gpus`: for trials;
        None: there are to be none."""
        speeds, _ = self._speeds(self.line, self.gpus_per_node)
        kept: dict[int, tuple[int, int]] = {}
        running: dict[int, TriedJob] = {}
        for place, at in enumerate(self.line.tolist()):
            belief, each = self.beliefs[at], int(self.each[at])
            if not (self.elastic[at] and self.facts.is_running[at]):
                continue
            present = int(self.facts.gpus[at]) // each, int(self.present[at])
            if belief.speed is None and self.server_roles[at] >= 0:
                kept[at] = present
            if belief.tried is None or belief.speed is None or free_gpus is None:
                continue
            if self.server_roles[at] < 0:
                belief = replace(belief, tried=tuple([(gpus // each, 0) for gpus, _ in belief.tried]))
            rate = float(speeds(np.array([place]), np.array([present]))[0])
            ranges = self._allowed(at, _WORKERS), self._allowed(at, _SERVERS)
            stretch_s = float(self.facts.stretch_s[at])
            running[at] = TriedJob(belief, present, ranges, float(takes_s[at]), stretch_s, rate, free_gpus // each)
        pinned = {**kept, **pinned_tasks(running)}
        return replace(self, pinned=pinned) if pinned else self

    @property
    def may_change_later(self) -> bool:
        """Whether any job may be resized once jobs may be preempted."""
        return any(self.jobs[at].spec.is_elastic or self.jobs[at].spec.has_role_ranges for at in self.line.tolist())

    @property
    def has_choices(self) -> bool:
        """Whether there is anything to decide."""
        return bool(self.waiting.any() or (self.elastic & self.facts.is_running).any())

    def sizes(self, capacity: Capacity, takes_s: Floats) -> TaskSizes:
        """Return the size that each job should have now. `takes_s`: pauses by a resize."""
        line, facts = self.line, self.facts
        kinds = 2 if (self.server_roles >= 0).any() else 1
        speeds, left = self._speeds(line, capacity.gpus_per_node)
        shapes = self._shapes()[line][:, :kinds]
        amounts = np.array([capacity.gpus, capacity.cores, capacity.memory_bytes])
        young = np.array([self.beliefs[at].is_young for at in line.tolist()], bool)
        least, most = self.least[line][:, :kinds].copy(), self.most[line][:, :kinds].copy()
        pinned = {place: self.pinned[at] for place, at in enumerate(line.tolist()) if at in self.pinned}
        for place, tasks_now in pinned.items():
            least[place] = most[place] = tasks_now[:kinds]
        bound = self._bounds(line)
        while True:
            tasks = self.allocate(growing(left, speeds, shapes, young, most, least), amounts)
            if left_out := [place for place in pinned if not tasks[place, _WORKERS]]:
                # Other resources than GPUs are too few for what was to be tried.
                for place in left_out:
                    del pinned[place]
                    least[place], most[place] = self.least[line[place], :kinds], self.most[line[place], :kinds]
            elif not _lowered(tasks, bound, least, most):
                break
        before = np.stack([facts.gpus // np.maximum(self.each, 1), self.present], axis=1)[:, :kinds]
        before = np.where((facts.is_running & self.elastic)[:, None], before, 0)[line]
        decided = _worth_it(tasks, before, self.each[line], left, speeds, takes_s[line], set(pinned))
        found, servers = np.zeros(len(facts), np.int64), self.present.copy()
        if kinds > 1:
            spare = capacity.gpus - int((decided[:, _WORKERS] * self.each[line]).sum())
            _keep_unneeded(decided, before, self.each[line], left, speeds, takes_s[line], spare, set(pinned))
            servers[line] = decided[:, _SERVERS]
        found[line] = decided[:, _WORKERS] * self.each[line]
        # A job that may not be preempted keeps its devices, whatever it is counted with.
        found[self.fixed] = self.counted[self.fixed]
        return TaskSizes(found, servers)

    def _shapes(self) -> Floats:
        """Return (jobs, kinds, resources): GPUs, cores and memory that a task of each kind takes."""
        facts = self.facts
        parts = self.each / np.maximum(facts.gpus, 1)
        found = np.zeros((len(facts), 2, 3))
        found[:, _WORKERS] = np.array([self.each, facts.cores * parts, facts.memory_bytes * parts], float).T
        for at in np.flatnonzero(self.server_roles >= 0).tolist():
            roles, servers = self.jobs[at].spec.roles, int(self.server_roles[at])
            tasks = max(1, sum(self.jobs[at].tasks_by_role))
            for kind, role in ((_WORKERS, roles[1 - servers]), (_SERVERS, roles[servers])):
                shape = role.shape
                cores = shape.millicores / 1000 or facts.cores[at] / tasks
                found[at, kind] = shape.gpus, cores, shape.memory_bytes or facts.memory_bytes[at] / tasks
        return found

    def _bounds(self, line: Integers) -> dict[tuple[int, int], Sequence[int]]:
        """Return the numbers of tasks that jobs may have, ascending, by place in the line and kind, where their ranges
        do not say all."""
        found: dict[tuple[int, int], Sequence[int]] = {}
        for place, at in enumerate(line.tolist()):
            if not self.elastic[at]:
                continue
            if self.server_roles[at] >= 0:
                found |= {(place, kind): self._allowed(at, kind) for kind in (_WORKERS, _SERVERS)}
            elif (may := sizes_of(self.jobs[at], self.gangs[at])) is not None:
                found[place, _WORKERS] = may
        return found

    def _allowed(self, at: int, kind: int) -> Sequence[int]:
        """Return the numbers of tasks of a kind that an elastic job may have, ascending."""
        job, servers = self.jobs[at], int(self.server_roles[at])
        between = range(int(self.least[at, kind]), int(self.most[at, kind]) + 1)
        if servers < 0:
            may = sizes_of(job, self.gangs[at]) if kind == _WORKERS else None
            return between if may is None else may
        role, divided = servers if kind == _SERVERS else 1 - servers, job.capabilities.role_divides
        whole = divided[role] if role < len(divided) else 0
        return [tasks for tasks in between if not whole % tasks]

    def _speeds(self, line: Integers, gpus_per_node: int) -> tuple[Callable[[Integers, Integers], Floats], Floats]:
        """Return steps per second by position in the line and tasks, and the steps left; NaN without an estimate."""
        left = np.full(len(line), np.nan)
        row, has_servers = np.zeros(len(line), np.int64), np.zeros(len(line), bool)
        models: list[AllReduceModel] = []
        server_models: list[ServerSpeed] = []
        for place, at in enumerate(line.tolist()):
            speed, is_served = self.beliefs[at].speed, bool(self.server_roles[at] >= 0)
            if isinstance(speed, AllReduceModel) and not is_served:
                left[place], row[place] = self.beliefs[at].steps_left, len(models)
                models.append(speed)
            elif isinstance(speed, ServerSpeed) and is_served:
                left[place], row[place], has_servers[place] = self.beliefs[at].steps_left, len(server_models), True
                server_models.append(speed)
        of_gpus, of_tasks = allreduce_speeds(models, np.ones(len(models)), gpus_per_node), server_speeds(server_models)
        each = self.each[line]

        def speed_of(jobs: Integers, counts: Integers) -> Floats:
            if not server_models:
                return of_gpus(row[jobs], counts[:, :1] * each[jobs][:, None])
            served = has_servers[jobs]
            found = np.empty(len(jobs))
            found[~served] = np.nan
            if models:
                others = jobs[~served]
                found[~served] = of_gpus(row[others], counts[~served, :1] * each[others][:, None])
            # There the servers come first.
            found[served] = of_tasks(row[jobs[served]], counts[served][:, ::-1])
            return found

        return speed_of, left


def _elastic_servers(job: JobRecord) -> int:
    """Return the position of the role of servers in a job that may have other numbers of tasks; -1 for others. Its
    workers have GPUs, and its servers none: only these have a speed model."""
    servers = server_role(job.spec) if job.spec.has_role_ranges else None
    if servers is None:
        return -1
    roles = job.spec.roles
    return servers if roles[1 - servers].shape.gpus and not roles[servers].shape.gpus else -1


def _may_change(job: JobRecord, waits: bool) -> bool:
    """Return whether a job may have another size. One that is parked in host memory keeps its own, and so does one that
    cannot resume with another number of ranks."""
    if job.spec.has_role_ranges:
        can_start = job.checkpoint is None or job.capabilities.starts_at_any_size
        return not job.epoch and can_start if waits else job.capabilities.starts_at_any_size
    return not job.is_bound if waits else job.capabilities.resize


def _lowered(tasks: Integers, bound: dict[tuple[int, int], Sequence[int]], least: Integers, most: Integers) -> bool:
    """Lower `most` of jobs whose tasks lie between two numbers that they may have: the tasks between it and the next
    smaller one go to other jobs. Return whether there are any."""
    between = [key for key, may in bound.items() if tasks[key[0], _WORKERS] and int(tasks[key]) not in may]
    for key in between:
        smaller = [number for number in bound[key] if number < tasks[key]]
        most[key] = max([number for number in smaller if number >= least[key]], default=least[key])
        if not smaller or most[key] > smaller[-1]:
            # No accepted size divides its batch: the master rejects it with this reason.
            del bound[key]
    return bool(between)


def _ranges(
    table: LiveTable, jobs: Sequence[JobRecord], may_change: Flags, counted: Integers, server_roles: Integers
) -> tuple[Integers, Integers, Integers]:
    """Return the GPUs of a worker, and the least and most tasks by kind, by position; a job that may not change is one
    worker."""
    each, least, most = counted.copy(), np.zeros((len(jobs), 2), np.int64), np.zeros((len(jobs), 2), np.int64)
    least[:, _WORKERS] = most[:, _WORKERS] = 1
    for at in np.flatnonzero(may_change).tolist():
        spec, servers = jobs[at].spec, int(server_roles[at])
        worker = spec.roles[0 if servers < 0 else 1 - servers]
        each[at] = task = worker.shape.gpus
        if servers < 0:
            least[at, _WORKERS], most[at, _WORKERS] = spec.gpus_min // task, spec.gpus_max // task
        else:
            for kind, role in ((_WORKERS, worker), (_SERVERS, spec.roles[servers])):
                least[at, kind], most[at, kind] = role.tasks_min or role.tasks, role.tasks_max or role.tasks
        if table.quotas is not None:
            left = table.quotas.left(jobs[at]) // task
            most[at, _WORKERS] = max(least[at, _WORKERS], min(most[at, _WORKERS], left))
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
    pinned: Collection[int],
) -> Integers:
    """Return the tasks without growth of running jobs that saves less time than it takes. A job with parameter servers
    stops for any change: one that returns no GPU must be worth it, too."""
    decided = tasks.copy()
    runs = (before[:, _WORKERS] > 0) & ~np.isnan(left)
    grows = runs & (tasks[:, _WORKERS] > before[:, _WORKERS])
    if tasks.shape[1] > 1:
        grows |= runs & (tasks[:, _WORKERS] == before[:, _WORKERS]) & (tasks != before).any(axis=1)
    grows[list(pinned)] = False
    rows = np.flatnonzero(grows)
    if len(rows):
        now = left[rows] / speeds(rows, before[rows])
        then = left[rows] / speeds(rows, tasks[rows])
        stay = rows[now - then < takes_s[rows]]
        decided[stay] = before[stay]
    workers = without_growth(tasks[:, _WORKERS] * each, decided[:, _WORKERS] * each, before[:, _WORKERS] * each) // each
    # Those that keep their workers after all need no other servers, either.
    kept = (workers != decided[:, _WORKERS]) & (workers == before[:, _WORKERS])
    decided[kept] = before[kept]
    decided[:, _WORKERS] = workers
    return decided


def _keep_unneeded(
    tasks: Integers,
    before: Integers,
    each: Integers,
    left: Floats,
    speeds: Callable[[Integers, Integers], Floats],
    takes_s: Floats,
    spare: int,
    pinned: Collection[int],
) -> None:
    """Restore the tasks of jobs with parameter servers that would stop only to return GPUs that no job gets, as long as
    there are `spare` ones."""
    returns = (before[:, _SERVERS] > 0) & (tasks[:, _WORKERS] > 0) & (tasks[:, _WORKERS] < before[:, _WORKERS])
    for row in np.flatnonzero(returns & ~np.isnan(left)).tolist():
        one, needed = np.array([row]), int((before[row, _WORKERS] - tasks[row, _WORKERS]) * each[row])
        saved_s = left[row] / speeds(one, before[one])[0] - left[row] / speeds(one, tasks[one])[0]
        if row not in pinned and needed <= spare and saved_s < takes_s[row]:
            tasks[row], spare = before[row], spare - needed


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
