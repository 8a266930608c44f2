"""Planner loop: follow a cluster and return plans when they are due.

The loop is pure: times are arguments. Its memory saves time; all of it could be measured again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, assert_never

from ganger.cluster.capacity_index import CapacityIndex
from ganger.cluster.view import View
from ganger.job_state import JobState

from ganger_master.core.commands import KeepPlace
from ganger_master.core.gang_model import Gang
from ganger_master.core.node_closures import NO_CLOSURES, NodeClosures
from ganger_master.core.plan_changes import StartChange
from ganger_master.planner.context import (
    ClusterChange,
    Plan,
    PlanContext,
    PlannerSettings,
    PlanOutcome,
    PlanStage,
    PlanVerdict,
    ProgressReports,
    capacity_of,
    terms_of,
)
from ganger_master.planner.job_table import LiveTable
from ganger_master.planner.order_stage import OrderStage
from ganger_master.planner.plan import partition_bounds
from ganger_master.planner.plan_pace import NONE_EXCLUDED, AnsweredPlan, PlanPace, RefusalBackoff, RoundPace, is_stop
from ganger_master.policies import (
    Colocate,
    Grow,
    Migrate,
    Policy,
    ResizeByOptimus,
    ShareByTimeSlices,
    SliceNewcomers,
    StartByRank,
    StartByTetris,
    Tune,
)
from ganger_master.policies.fairness import TeamUse
from ganger_master.policies.orders import JobOrder

if TYPE_CHECKING:
    # Stages of few policies and their state are slow to import.
    from ganger_master.planner.memory import PlannerMemory
    from ganger_master.planner.rate_registry import JobRates, RateRegistry
    from ganger_master.planner.remaining_time import Calibration, RemainingTime

# A ranking up to this length is reported at every change, a longer one once per `_RANKING_S`.
_SHORT_RANKING: Final = 100
_RANKING_S: Final = 1.0


class PlannerLoop:
    """Plans of one policy. `rates`: None if it measures no jobs. `memory`: of an earlier loop to continue."""

    def __init__(
        self,
        policy: Policy,
        settings: PlannerSettings,
        rates: JobRates | None = None,
        memory: PlannerMemory | None = None,
    ) -> None:
        if policy.order.with_interval is not None:
            policy = replace(policy, order=policy.order.with_interval(settings.pace.every_s))
        self.policy, self.settings = policy, settings
        order = policy.aging_order if settings.bounds_waits else policy.order
        # Rounds place all jobs anew, so every job may be preempted.
        self.order = replace(order, preempts=True) if isinstance(settings.pace, RoundPace) else order
        self.learns = self.order.learns or policy.has(StartByTetris)
        self.table = LiveTable(self.learns)
        self._rates = rates
        self._stages, self._order = stages_of(policy, self.order, memory)
        self._acts_on_measures, self._resizes = _acts_on_measures(policy), policy.has(ResizeByOptimus)
        self._tries_cores = policy.tunes_by_profiles
        self._pace = settings.pace
        self._refused = RefusalBackoff()
        self._excluded = NONE_EXCLUDED
        # Which nodes reservations close to jobs, and which jobs refusals have closed nodes to.
        self._closures = NO_CLOSURES
        self._noted: Mapping[int, frozenset[str]] = {}
        self._cluster: ClusterChange | None = None
        self._room: CapacityIndex | None = None
        self._is_news = False
        # The ranking last reported, and when; the kept places last proposed.
        self._ranking: tuple[int, ...] | None = None
        self._ranking_reported_s = -math.inf
        # The master has none of the curves by cores: it, or this loop, has just begun.
        self._lacks_curves = True
        self._kept_places: tuple[KeepPlace, ...] | None = None
        # The plan without a verdict, with its context.
        self._open: tuple[Plan, PlanContext] | None = None

    @property
    def memory(self) -> PlannerMemory:
        """Return the state from which a new loop of this policy continues."""
        from ganger_master.planner.memory import PlannerMemory

        found: dict[str, Any] = {}
        for stage in self._stages:
            found.update(stage.memory)
        if self._rates is not None:
            found["rates"] = self._rates.remembered
        return PlannerMemory(**found)

    # -- events --------------------------------------------------------------------------------------------------------

    def observe(self, event: ClusterChange | ProgressReports | PlanVerdict, now: float) -> None:
        """Take an event into account. After `step` has returned a plan, its verdict comes before the next `step`."""
        match event:
            case ClusterChange():
                self._follow(event, now)
            case ProgressReports():
                self._measure(event, now)
            case PlanVerdict():
                self._settle(event, now)

    def _follow(self, change: ClusterChange, now: float) -> None:
        self._is_news = True
        if change.is_whole:
            teams = TeamUse(change.teams, change.usage_half_life_s) if change.teams else None
            self.table, self._lacks_curves = LiveTable(self.learns, change.limits, teams), True
        if self._room is None or self._room.view is not change.view:
            self._room = CapacityIndex(change.view)
        table, rates, has_notes = self.table, self._rates, self._refused.has_notes
        if table.teams is not None:
            table.teams.put(change.usage)
        for job, gang, signature in change.jobs:
            table.put(job, gang)
            if has_notes:
                self._refused.forget(job.number)
            if rates is None:
                continue
            if table.get(job.number) is not None:
                rates.put(job, gang, signature, now, _device_type(change.view, gang))
            else:
                rates.settle(job)
                rates.forget(job.number, now)
        for number in change.forgotten:
            if table.get(number) is not None:
                table.forget(number)
            self._refused.forget(number)
            if rates is not None:
                rates.forget(number, now)
        if change.is_whole and rates is not None:
            rates.keep(lambda number: table.get(number) is not None, now)
        if self._cluster is None:
            # A preemption before a restart counts toward the interval.
            self._pace = self._pace.begun(table.last_stop_s)
        self._cluster = change

    def _measure(self, progress: ProgressReports, now: float) -> None:
        self._is_news = self._is_news or bool(progress.profiled)
        if self._rates is None or self._room is None:
            return
        rates = self._rates
        is_reason = False
        for number, report in progress.reports.items():
            is_reason = rates.record(number, report, now) or is_reason
        # Co-location under an order has its own interval, so its reports trigger no plan.
        self._is_news = self._is_news or (is_reason and self._acts_on_measures)
        if progress.reports and self._tries_cores:
            self._is_news = rates.update_trials(self._room.view, self._tuned_s(now), now) or self._is_news

    def _tuned_s(self, now: float) -> dict[int, float]:
        tune = self.policy.stage(Tune)
        return {
            job.number: job.ran_s(now)
            for job, _ in self.table.running
            if tune is not None and tune.tuning.decides_cores_of(job.shape)
        }

    def remaining(self, now: float) -> tuple[Sequence[RemainingTime], Calibration] | None:
        """Return the remaining times of running jobs, where the policy estimates them, and how good ranges were; None
        without measurements."""
        if self._rates is None or self._room is None:
            return None
        per_node = capacity_of(self._room.view, self.table).gpus_per_node
        return self._rates.remaining(self.table.running, per_node, now), self._rates.calibration

    # -- plans ---------------------------------------------------------------------------------------------------------

    def step(self, now: float) -> tuple[Plan | None, float]:
        """Return (plan, infinity) if a plan is due, else (None, time): when the next plan is due if no event comes
        before, in Unix seconds; infinite if only an event can bring it. An empty plan has a verdict, too.

        Raises what a stage raises. Nothing of that plan is left then, and a later step makes the next one."""
        assert self._open is None, "the last plan has no verdict yet"
        next_s = self.next_s(now)
        if next_s > now or self._cluster is None:
            return None, next_s
        if self._is_passed_over():
            self._is_news, self._pace = False, self._pace.passed_over(now)
            return None, self.next_s(now)
        context = self._context(now)
        self._is_news = False
        try:
            with context.room.tentative():
                if not self.settings.line_limit and all(stage.is_idle(context) for stage in self._stages):
                    self._pace = self._pace.passed_over(now)
                    return None, self.next_s(now)
                for stage in self._stages:
                    stage.plan(context)
                plan = self._plan_of(context)
        except Exception:
            # As after a plan with a refused change: the next ones come later and later.
            self._pace = self._pace.after(now, AnsweredPlan(is_refused=True, waits=True))
            raise
        self._open = plan, context
        return plan, math.inf

    def _is_passed_over(self) -> bool:
        """Return whether the plan would be empty: it could only start jobs, and too few devices are free."""
        if self.settings.line_limit or self._order is None or len(self._stages) > 1 or self._cluster is None:
            return False
        free = self._cluster.free_devices
        return free is not None and self._order.starts_no_job(self.table, free)

    def next_s(self, now: float) -> float:
        """Return when the next plan is due without an event, in Unix seconds; infinite if only an event brings it."""
        return now + self._pace.wait_s(now, self._is_news)

    def _context(self, now: float) -> PlanContext:
        assert self._room is not None, "the cluster was observed"
        assert self._cluster is not None, "the cluster was observed"
        excluded = self._refused.at(now)
        self._close_nodes(now)
        excluded = excluded.resting(self._shut_out(self._room.view))
        began_s = self._pace.round_began_s(now)
        if began_s < math.inf:
            waiting = self.table.queue()
            excluded = excluded.resting(frozenset([job.number for job in waiting if job.create_time > began_s]))
        # A refusal that has expired triggers a plan.
        is_news = self._is_news or (excluded, self._refused.closed_nodes) != (self._excluded, self._noted)
        self._excluded, self._noted = excluded, dict(self._refused.closed_nodes)
        found = PlanContext(
            now, self.policy, self.order, self.settings, self._pace, self._cluster, self.table, self._room, self._rates
        )
        found.excluded, found.is_news, found.last_line = excluded, is_news, self._ranking or ()
        found.may_preempt = self._pace.may_stop(now, self._is_news)
        if len(self._stages) > 1:
            found.on_trial = frozenset().union(*[stage.on_trial for stage in self._stages])
        found.terms = terms_of(self.policy, self.table)
        return found

    def _close_nodes(self, now: float) -> None:
        """Note at each job the nodes that reservations, or the refusals of the master, close to it."""
        assert self._cluster is not None, "the cluster was observed"
        if not self._closures.are_of(self._cluster.reservations, now):
            self._closures = NodeClosures(self._cluster.reservations, now)
        closed = dict(self._refused.closed_nodes)
        for job, gang in self.table.live() if self._closures else ():
            nodes = self._closures.of(job, now)
            if gang is not None and job.state is JobState.HOLDING and not nodes.isdisjoint(gang.nodes):
                # Where it runs it stays, until the master empties the node.
                nodes = nodes.difference(gang.nodes)
            if nodes:
                closed[job.number] = nodes | closed[job.number] if job.number in closed else nodes
        self.table.close(closed)

    def _shut_out(self, view: View) -> list[int]:
        """Return the numbers of pending jobs that would find too few GPUs even if all other jobs left: nodes are closed
        to them."""
        jobs = [job for job in self.table.queue() if job.closed_nodes] if self.table.has_closed_nodes else []
        if not jobs:
            return []
        bounds = partition_bounds([(job.partition.name, job.closed_nodes) for job in jobs], view)
        most, pairs = bounds.most(), zip(jobs, bounds.partition, strict=True)
        return [job.number for job, number in pairs if most.get(number, -1) < (job.spec.gpus_min or job.gpus)]

    def _plan_of(self, context: PlanContext) -> Plan:
        draft, now = context.draft, context.now
        ranking, most = self._ranking, self.settings.line_limit
        if most:
            started = {change.number for change in draft.changes if isinstance(change, StartChange)}
            ranking = tuple([number for number in draft.line.tolist() if number not in started][:most])
        reports_ranking = False
        if ranking is not None and ranking != self._ranking:
            reports_ranking = len(ranking) <= _SHORT_RANKING or now >= self._ranking_reported_s + _RANKING_S
        if reports_ranking:
            self._ranking, self._ranking_reported_s = ranking, now
        if ranking != self._ranking:
            context.come_back(self._ranking_reported_s + _RANKING_S)
        kept_places = context.kept_places
        keeps = kept_places is not None and kept_places != self._kept_places
        if keeps:
            self._kept_places = kept_places
        curves = () if self._rates is None else self._rates.curve_news(self._lacks_curves)
        self._lacks_curves = False
        return Plan(
            draft.changes,
            tuple(context.findings),
            ranking if reports_ranking else None,
            kept_places if keeps else None,
            curves,
        )

    def _settle(self, verdict: PlanVerdict, now: float) -> None:
        assert self._open is not None, "a verdict is on a plan"
        (plan, context), self._open = self._open, None
        pairs = list(zip(plan.changes, verdict.answers, strict=True))
        refusals = tuple([(change, answer.refusals) for change, answer in pairs if not answer.approved])
        outcome = PlanOutcome(now, refusals)
        # Under a strict order no later job would start in place of an unplaced one.
        unplaced = frozenset[int]()
        if self.settings.unplaced_rest_s > 0.0:
            unplaced = unplaced if self.order.is_strict else context.draft.unplaced
            self._refused.note_unplaced(unplaced, context.may_preempt, context.now + self.settings.unplaced_rest_s)
        for change, reasons in refusals:
            self._refused.note(change, reasons, now)
        for stage in self._stages:
            stage.settle(outcome)
        draft = context.draft
        answered = AnsweredPlan(
            preempts=any(answer.approved and is_stop(change, self._resizes) for change, answer in pairs),
            is_refused=bool(refusals),
            waits=draft.leaves_waiting,
            due_s=draft.next_change_s,
            again_s=min(context.again_s, now if unplaced else self._refused.next_s),
            took_s=verdict.planning_s,
            judged_s=max(0.0, now - context.now - verdict.planning_s),
        )
        self._pace = self._pace.after(now, answered)


def _device_type(view: View, gang: Gang | None) -> str:
    """Return the type of a gang's devices, by its first node; empty without one."""
    slots = [] if gang is None else [slot for one in gang.claims if (slot := view.slots.get(one.node)) is not None]
    return view.topologies[slots[0]].configuration_set.device_type if slots else ""


def live_loop(policy: Policy, plan_every_s: float, registry: RateRegistry, memory: PlannerMemory | None) -> PlannerLoop:
    """Return the loop of a live planner, which continues from `memory` with this registry. `plan_every_s`: least
    seconds between two plans that preempt running jobs."""
    registry.weighs_sizes = policy.has(ResizeByOptimus)
    settings = PlannerSettings(PlanPace(plan_every_s))
    return PlannerLoop(policy, settings, registry if measures_jobs(policy) else None, memory)


def stages_of(
    policy: Policy, order: JobOrder, memory: PlannerMemory | None = None
) -> tuple[list[PlanStage], OrderStage | None]:
    """Return the stages of a policy, in order, as `memory` left them, and the one of them that starts jobs by order."""
    # Imported on demand: the stages of few policies take longer to load than many passes.
    shares = policy.has(ShareByTimeSlices)
    starting = None if shares else OrderStage(policy, order, None if memory is None else memory.resizing)
    migrating = None
    if policy.has(Migrate):
        from ganger_master.planner.migrate_stage import MigrationStage

        # It contains the stage that starts jobs. A stage that shares devices runs next to it.
        migrating = MigrationStage(starting, None if memory is None else memory.moving)
    stages = list[PlanStage]()
    for spec in policy.stages:
        match spec:
            case Grow():
                from ganger_master.planner.growth_stage import GrowthStage

                stages.append(GrowthStage(None if memory is None else memory.growing))
            case ShareByTimeSlices():
                from ganger_master.planner.sharing_stage import SharingStage

                stages.append(SharingStage(migrating, None if memory is None else memory.shared))
            case StartByRank() | StartByTetris() | ResizeByOptimus():
                stages.extend([stage for stage in (migrating or starting,) if stage is not None])
            case Tune():
                if not policy.has(StartByRank):
                    from ganger_master.planner.tune_stage import TuneStage

                    stages.append(TuneStage(spec.tuning))
            case SliceNewcomers():
                from ganger_master.planner.sharing_under_order import NewcomerStage

                stages.append(NewcomerStage())
            case Colocate():
                from ganger_master.planner.sharing_under_order import ColocationStage

                stages.append(ColocationStage(None if memory is None else memory.packing))
            case Migrate():
                stages.extend([migrating] if shares and migrating is not None else [])
            case _:
                assert_never(spec)
    return stages, None if policy.has(Migrate) else starting


def measures_jobs(policy: Policy) -> bool:
    """Return whether the planner measures jobs under this policy."""
    return policy.has(Colocate) or _acts_on_measures(policy)


def _acts_on_measures(policy: Policy) -> bool:
    return policy.tunes_by_profiles or policy.has(Grow, ResizeByOptimus, ShareByTimeSlices, Migrate)
