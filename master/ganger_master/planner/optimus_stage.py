"""Optimus's pass (Peng et al., EuroSys 2018, section 4): how many GPUs each job should have now, and the changes that
lead there.

Beyond the paper: jobs resize in place where they can; running jobs come before pending ones, so that no job is
preempted except for overdue jobs and those that fit nowhere; growth that saves less than it costs, or that fits
nowhere, does not happen, nor does the shrinking for it; an elastic gang that fits nowhere takes as many GPUs as fit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from ganger.cluster.capacity_index import CapacityIndex, Trial
from ganger.cluster.feasibility import FeasibilityQuery
from ganger.cluster.resources import GangShape, LocalityLevel, shapes_by_type
from ganger.cluster.search import Claims, PlacementRequest
from msgspec.structs import replace as replace_of

from ganger_master.core.elastic import devices_of
from ganger_master.core.gang_model import Gang, GangPhase
from ganger_master.core.job_model import JobRecord
from ganger_master.core.plan_changes import Goal, PlanChange, ResizeChange, StartChange, SuspendChange
from ganger_master.planner.context import PlanContext, PlanDraft, held_of
from ganger_master.planner.gang_fitting import ChosenJobs
from ganger_master.planner.in_place_resize import Resizing, can_change, claims_of, given_back, part_of, taken_beside
from ganger_master.planner.migration_plans import move_costs
from ganger_master.planner.plan import carried_out
from ganger_master.planner.size_requests import SizeRequests, TaskSizes, without_growth
from ganger_master.policies.orders import Capacity, Flags, Integers, guarded, ranked
from ganger_master.policies.placements import PlacementPreference


def plan_optimus(context: PlanContext) -> PlanDraft:
    """Return the changes to propose now, in the order of arrival. `context.resizing`: from the last plan."""
    table, now, room, may_preempt = context.jobs, context.now, context.room, context.may_preempt
    resizing = context.resizing.followed(table)
    # Each of several jobs that share devices counts with all of them.
    capacity = replace(context.capacity, gpus=context.capacity.gpus + table.groups.doubly_held_gpus)
    if not may_preempt and not table.has_waiting and not resizing.waits_for_room:
        return PlanDraft(next_change_s=now, resizing=resizing)
    rows, facts = table.facts(now)
    gangs = [table.gangs[row] for row in rows.tolist()]
    jobs = [job for row in rows.tolist() if (job := table.jobs[row]) is not None]
    # What a resize leaves is unknown if this planner did not decide it, or has lost it.
    may_preempt = may_preempt and not any(map(partial(_is_unknown, resizing), jobs, gangs))
    context = replace_of(context, may_preempt=may_preempt, resizing=resizing)
    line = ranked(context.order, facts, now, capacity)
    wanting = SizeRequests.of(context, capacity, rows, facts, jobs, gangs, line)
    if not wanting.has_choices and not resizing.waits_for_room:
        return PlanDraft(next_change_s=now if wanting.may_change_later else math.inf, resizing=resizing)
    room.follow()
    costs = move_costs([(job, gang) for job, gang in zip(jobs, gangs, strict=True) if gang is not None])
    measured_s = None if context.rates is None else context.rates.resize_s
    restart_s = context.settings.resize_s if measured_s is None else measured_s
    takes_s = [
        costs.pause_s(job, gang) if gang is not None and can_change(job, gang) else restart_s
        for job, gang in zip(jobs, gangs, strict=True)
    ]
    is_calm = may_preempt and not (wanting.waiting.any() or wanting.going.any() or resizing.wanted)
    wanting = wanting.with_trials(np.array(takes_s), context.free_devices if is_calm else None)
    sizes = wanting.sizes(capacity, np.array(takes_s))
    sizes = _within_reach(wanting, sizes, context)
    found, vain = _Sizing(context, capacity, rows, line, wanting, sizes).plan()
    if vain and not may_preempt:
        # Growth that no returned devices will allow does not hold up new jobs.
        return plan_optimus(replace_of(context, resizing=resizing.without(vain)))
    return found


@dataclass(frozen=True, slots=True, eq=False)
class _Sizing:
    """The changes that lead to decided sizes. By position: `rows`, and the decided `sizes`, as in `wanting`. `line`:
    positions of all jobs, first job first. `capacity`: with each shared device once for every job on it."""

    context: PlanContext
    capacity: Capacity
    rows: Integers
    line: Integers
    wanting: SizeRequests
    sizes: TaskSizes

    @property
    def gpus(self) -> Integers:
        """The decided numbers of GPUs."""
        return self.sizes.gpus

    def plan(self) -> tuple[PlanDraft, list[int]]:
        """Return the plan, and the numbers of jobs that no returned devices will let grow."""
        context, wanting, gpus = self.context, self.wanting, self.gpus
        jobs, facts = wanting.jobs, wanting.facts
        resized = np.flatnonzero(wanting.changed(self.sizes) & ~wanting.changing).tolist()
        in_place = [at for at in resized if wanting.in_place(at)]
        stopped = [at for at in resized if wanting.elastic[at] and not wanting.in_place(at)]
        shrunk, given = self._shrunk([at for at in in_place if gpus[at] < facts.gpus[at]])
        giving = replace(context.resizing, giving={**context.resizing.giving, **given})
        leaving = np.flatnonzero(wanting.going).tolist()
        going = [(jobs[at], gang) for at in leaving if (gang := wanting.gangs[at]) is not None]
        going = [*going, *giving.given(context.jobs)]
        found = self._started(in_place, stopped, going)
        growing = [at for at in wanting.line.tolist() if at in in_place and gpus[at] > facts.gpus[at]]
        stops = any(isinstance(one, SuspendChange) for one in found.changes)
        is_promised = found.waits and bool(going or stopped or stops)
        # Devices that are being returned, and free ones beside them, may be meant for a pending job.
        may_grow = [at for at in growing if jobs[at].number not in context.excluded.not_stopped and not is_promised]
        grown = _grown(wanting, may_grow, gpus, found.changes, context.room)
        is_coming = bool(going or stopped or wanting.changing.any())
        grows = {change.number for change in grown}
        vain = [jobs[at].number for at in growing if not is_coming and jobs[at].number not in grows]
        wanted = {jobs[at].number: int(gpus[at]) for at in growing if jobs[at].number not in vain}
        # The resizes under way if the plan is proposed.
        sizes = {change.number: devices_of(change.claims) for change in shrunk}
        begun = {change.number for change in (*shrunk, *grown)}
        going_on = {number: size for number, size in giving.wanted.items() if number in giving.begun}
        resizing = Resizing({**going_on, **wanted, **sizes}, frozenset(begun | going_on.keys()), giving.giving)
        return replace(found, changes=(*shrunk, *found.changes, *grown), resizing=resizing), vain

    def _shrunk(self, positions: Sequence[int]) -> tuple[list[ResizeChange], dict[int, Claims]]:
        """Return the changes of jobs that shrink, and the claims that they return, by number."""
        changes, given = [], {}
        for at in positions:
            job, gang = self.wanting.jobs[at], self.wanting.gangs[at]
            claims = None if gang is None else claims_of(self.context.room.view, job, gang, int(self.gpus[at]))
            if gang is not None and claims is not None:
                changes.append(self.wanting.resize(at, claims, Goal.GIVE_BACK))
                given[job.number] = given_back(gang, claims)
        return changes, given

    def _started(
        self, in_place: Sequence[int], stopped: Sequence[int], going: Sequence[tuple[JobRecord, Gang]]
    ) -> PlanDraft:
        """Return the starts of chosen jobs, and what makes room for them. Positions: jobs resized in place, and jobs
        that stop to start with another size. `going`: jobs that return devices, with gangs of what they return."""
        context, wanting, gpus = self.context, self.wanting, self.gpus
        jobs, terms = wanting.jobs, context.terms
        waiting = np.flatnonzero(wanting.waiting & wanting.elastic).tolist()
        shapes = {
            jobs[at].number: replace_of(
                wanting.shape(at, int(gpus[at]), int(self.sizes.servers[at])),
                residents=terms.shape(jobs[at]).residents,
            )
            for at in waiting
        }
        starting = wanting.waiting & (gpus > 0)
        in_line = wanting.line[starting[wanting.line]]
        least = {shapes[jobs[at].number]: wanting.floor(at) for at in in_line.tolist() if wanting.elastic[at]}
        placed = partial(
            carried_out,
            self._choice(in_place, stopped),
            replace_of(
                context,
                policy=replace(context.policy, placement=_yielding(context.policy.placement, least)),
                terms=replace_of(terms, shape=lambda job: shapes.get(job.number) or terms.shape(job), held=held_of),
            ),
            [(jobs[at], gang) for at in stopped if (gang := wanting.gangs[at]) is not None],
            going=going,
        )
        found = placed(placing=in_line[np.argsort(gpus[in_line], kind="stable")])
        have_run = {jobs[at].number for at in in_line.tolist() if jobs[at].run_s}
        if found.waits and any(change.number in have_run for change in found.changes):
            # Room is made in order of arrival: a preempted job must not start there only because it is smaller.
            found = placed(placing=in_line)
        served = {jobs[at].number: at for at in stopped if wanting.server_roles[at] >= 0}
        changes = [
            wanting.stop(served[one.number], self.sizes)
            if isinstance(one, SuspendChange) and one.number in served
            else one
            for one in found.changes
        ]
        return replace(found, changes=tuple(changes))

    def _choice(self, in_place: Sequence[int], stopped: Sequence[int]) -> ChosenJobs:
        wanting, facts = self.wanting, self.wanting.facts
        keeps, may_stop_it = facts.is_running.copy(), facts.is_preemptible & ~wanting.changing
        keeps[stopped] = False
        # A job gets one change at a time.
        may_stop_it[in_place] = False
        line = self.line[(wanting.waiting | keeps)[self.line]]
        return ChosenJobs(
            self.rows,
            replace_of(facts, is_running=keeps, is_preemptible=may_stop_it),
            line,
            facts.number[line[wanting.waiting[line]]],
            wanting.waiting,
            self.gpus > 0,
            *guarded(self.context.order, facts, self.capacity.gpus),
            # Measured rates and losses change all the time: plan resizes whenever jobs may be preempted.
            self.context.now if wanting.may_change_later else math.inf,
        )


def _is_unknown(resizing: Resizing, job: JobRecord, gang: Gang | None) -> bool:
    is_moved = gang is not None and gang.phase is GangPhase.MOVING
    return bool(job.next_epoch) and not is_moved and job.number not in resizing.wanted


def _grown(
    wanting: SizeRequests, positions: Sequence[int], gpus: Integers, changes: Sequence[PlanChange], room: CapacityIndex
) -> list[PlanChange]:
    found: list[PlanChange] = []
    trying = Trial(room)
    for change in changes:
        if isinstance(change, StartChange):
            trying.take(change.claims)
    for at in positions:
        job, gang = wanting.jobs[at], wanting.gangs[at]
        claims = None if gang is None else claims_of(room.view, job, gang, int(gpus[at]))
        if gang is not None and claims is not None:
            trying.take(taken_beside(gang, claims))
            found.append(wanting.resize(at, claims, Goal.GROW))
    trying.undo()
    return found


def _within_reach(wanting: SizeRequests, sizes: TaskSizes, context: PlanContext) -> TaskSizes:
    """Return the sizes without growth that would fail, since no place is large enough even after all other resizes.
    Else a job that gets less than decided would be resized every time."""
    while True:
        before = wanting.before
        resized = wanting.elastic & wanting.changed(sizes)
        if not (resized & ((sizes.gpus > before) | (wanting.server_roles >= 0))).any():
            return sizes
        decided, kept = _as_far_as_it_goes(wanting, sizes, resized, context)
        if (decided == sizes.gpus).all() and not (kept & wanting.changed(sizes)).any():
            return sizes
        gpus = without_growth(sizes.gpus, decided, before)
        servers = np.where(kept | (gpus == before) & (gpus != sizes.gpus), wanting.present, sizes.servers)
        sizes = TaskSizes(gpus, servers)


def _as_far_as_it_goes(
    wanting: SizeRequests, sizes: TaskSizes, resized: Flags, context: PlanContext
) -> tuple[Integers, Flags]:
    """Return the numbers of GPUs, with growth limited to what fits once all other jobs have returned their devices, and
    which jobs find no place with other tasks and keep those that they have."""
    gpus, before, placement, room = sizes.gpus, wanting.before, context.policy.placement, context.room
    in_place = np.array([wanting.in_place(at) for at in range(len(before))], bool)
    decided, kept = gpus.copy(), np.zeros(len(gpus), bool)
    trial = CapacityIndex(room.view.copy())
    for at in np.flatnonzero((resized & ~in_place) | wanting.going).tolist():
        trial.give(_held(wanting.gangs[at]))
    for _, part in context.resizing.given(context.jobs):
        trial.give(_held(part))
    for at in np.flatnonzero(resized & in_place & (gpus < before)).tolist():
        gang = wanting.gangs[at]
        claims = None if gang is None else claims_of(trial.view, wanting.jobs[at], gang, int(gpus[at]))
        if gang is not None and claims is not None:
            trial.give(_held(part_of(gang, given_back(gang, claims))))
    starting = np.flatnonzero((resized & ~in_place) | (wanting.waiting & (gpus > 0)))
    for at in starting[np.lexsort((starting, gpus[starting]))].tolist():
        shape = wanting.shape(at, int(gpus[at]), int(sizes.servers[at]))
        is_served = bool(wanting.server_roles[at] >= 0)
        yields = _yielding(placement, {shape: wanting.floor(at)} if wanting.elastic[at] and not is_served else {})
        claims = yields.place(trial, PlacementRequest(shape)) or ()
        trial.take(claims)
        if is_served and before[at] and not claims:
            decided[at], kept[at] = before[at], True
        elif before[at] and devices_of(claims) <= before[at] < gpus[at]:
            decided[at] = before[at]
    growing = np.flatnonzero(resized & in_place & (gpus > before))
    for at in growing[np.lexsort((growing, gpus[growing]))].tolist():
        decided[at] = before[at]
        gang = wanting.gangs[at]
        for size in wanting.sizes_below(at, int(gpus[at])):
            if gang is None or size <= before[at]:
                break
            claims = claims_of(trial.view, wanting.jobs[at], gang, size)
            if claims is not None:
                trial.take(taken_beside(gang, claims))
                decided[at] = size
                break
    return decided, kept


def _held(gang: Gang | None) -> Claims:
    return () if gang is None else held_of(gang)


def _yielding(placement: PlacementPreference, least: Mapping[GangShape, Sequence[int]]) -> PlacementPreference:
    """Return the placement with fewer tasks for an elastic gang that does not fit, but at least `least` of each role;
    of several roles the least."""

    # A gang that accepts several device types is searched for with one after the other.
    least = {one: tasks for shape, tasks in least.items() for one in shapes_by_type(shape)}

    def search(room: CapacityIndex, query: FeasibilityQuery, widest: LocalityLevel) -> Iterator[Claims]:
        found = next(placement.search(room, query, widest), None)
        if found is not None or query.shape not in least:
            return iter(() if found is None else (found,))
        floor = least[query.shape]
        if len(floor) > 1:
            roles = [replace_of(role, tasks=tasks) for role, tasks in zip(query.shape.roles, floor, strict=True)]
            smallest = replace_of(query.shape, roles=tuple(roles))
            found = next(placement.search(room, room.query(smallest), widest), None)
            return iter(() if found is None else (found,))
        # Where a gang fits, one with fewer tasks does.
        fits, too_many = floor[0] - 1, query.tasks
        while fits + 1 < too_many:
            tasks = (fits + too_many) // 2
            shape = replace_of(query.shape, roles=(replace_of(query.shape.roles[0], tasks=tasks),))
            smaller = next(placement.search(room, room.query(shape), widest), None)
            if smaller is None:
                too_many = tasks
            else:
                fits, found = tasks, smaller
        return iter(() if found is None else (found,))

    # By counts a gang would find no place with fewer tasks.
    return replace(placement, search=search, counts=None)
