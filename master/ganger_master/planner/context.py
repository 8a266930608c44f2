"""What a stage of the planner reads and edits, the terms and settings it plans with, and what the loop observes.

Stages plan one after the other. Where two would change the same job, the earlier one wins and the later sees the
result.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from ganger.cluster.capacity_index import CapacityIndex
from ganger.cluster.refusals import Refusal, RefusalKind
from ganger.cluster.resources import GangShape
from ganger.cluster.view import View
from msgspec import Struct
from msgspec import field as struct_field
from msgspec.structs import replace as replace_of

from ganger_master.core.accounting import NO_LIMITS, Limits, UserUsage
from ganger_master.core.answers import ChangeAnswer
from ganger_master.core.commands import LINE_LIMIT, KeepPlace
from ganger_master.core.gang_model import Gang
from ganger_master.core.job_model import JobRecord
from ganger_master.core.node_model import Reservation
from ganger_master.core.plan_changes import CoresCurve, PlanChange, StartChange, TrialFinding, claims_in
from ganger_master.core.tenancy import Team
from ganger_master.planner.device_groups import ALONE, Claims, CoLocatedJobs, Unit, shape_for_two
from ganger_master.planner.in_place_resize import NOTHING_UNDER_WAY, Resizing
from ganger_master.planner.job_table import LiveTable
from ganger_master.planner.plan_pace import NONE_EXCLUDED, NOTED_S, ExcludedJobs, PlanPace
from ganger_master.policies import Colocate, Policy
from ganger_master.policies.orders import Capacity, Floats, Integers, JobOrder

if TYPE_CHECKING:
    # Most policies measure no job, and what measures is slow to import.
    from ganger_master.planner.rate_registry import JobRates, ProgressReport


def held_of(gang: Gang) -> Claims:
    """Return what a gang holds. Devices of a time-sliced gang count as shared: others of its group hold them too."""
    if not gang.node_set:
        return gang.held
    return tuple([replace_of(claim, shared_mask=claim.device_mask) for claim in gang.held])


def held_by_all(table: LiveTable, held: Callable[[Gang], Claims] = held_of) -> list[Claims]:
    """Return the claims of all running gangs, by `held`, and of all that are being returned."""
    return [*[held(gang) for _, gang in table.running], *[held_of(gang) for _, gang in table.going]]


def _own_shape(job: JobRecord) -> GangShape:
    return job.shape


class PreferredPlace(Struct, frozen=True):
    """`device_type`: types of GPU, first choice first; `avoid`: nodes where the gang or others would lose speed."""

    device_type: str
    avoid: frozenset[str]


def _no_preference(job: JobRecord) -> PreferredPlace | None:
    return None


class PassTerms(Struct, frozen=True):
    """What a pass plans with.

    shape: the shape that a pending job is placed with.
    held: what a running gang holds.
    co_located_now: the present groups of jobs that share devices.
    preferred: where a job without a place goes if it can, by what was measured; None: anywhere.
    """

    shape: Callable[[JobRecord], GangShape] = _own_shape
    held: Callable[[Gang], Claims] = held_of
    co_located_now: Callable[[], CoLocatedJobs] = lambda: ALONE
    preferred: Callable[[JobRecord], PreferredPlace | None] = _no_preference

    @property
    def co_located(self) -> CoLocatedJobs:
        return self.co_located_now()

    @property
    def has_preferred(self) -> bool:
        return self.preferred is not _no_preference

    def held_by(self, unit: Unit) -> Claims:
        """Return what all gangs of a unit hold."""
        return tuple([claim for _, gang in unit for claim in self.held(gang)])


def capacity_of(view: View, table: LiveTable, resizing: Resizing = NOTHING_UNDER_WAY) -> Capacity:
    """Return the devices, cores and memory that gangs can have. Devices are the free ones of available nodes and those
    of gangs that run or leave, on any node; devices of parked gangs and broken ones do not count. Cores and memory are
    those of all available nodes. `resizing`: resizes under way, whose next worlds hold devices, too."""
    columns = view.columns()
    available = columns.available
    free = int(np.bitwise_count(columns.free[available]).sum())
    cores = memory = gpus_per_node = 0
    numbers = np.bincount(columns.sets[available], minlength=len(view.sets)).tolist()
    for name, configuration_set in view.sets.items():
        nodes = numbers[view.set_code(name)]
        if nodes:
            cores += nodes * sum(socket.millicores for socket in configuration_set.sockets)
            memory += nodes * configuration_set.memory_bytes
            gpus_per_node = max(gpus_per_node, configuration_set.devices)
    return Capacity(free + table.held_gpus + resizing.held_beside(table), cores / 1000, float(memory), gpus_per_node)


def terms_of(policy: Policy, table: LiveTable) -> PassTerms:
    """Jobs on the same devices go together: another policy may have time-sliced or co-located them. Under a policy that
    co-locates, a job leaves memory for another one."""
    shape = shape_for_two if policy.has(Colocate) else _own_shape
    return PassTerms(shape, co_located_now=lambda: table.groups.co_located)


@dataclass(frozen=True, slots=True)
class PlannerSettings:
    """What the loop plans with, beside its policy.

    pace: when plans are made, and when they may preempt; by default every plan may.
    resize_s: seconds that a resize by checkpoint and restart takes.
    oracle: remaining seconds by job number; only policies that know durations read it.
    capacity: what gangs can have; None: what the view has.
    line_limit: pending jobs of the order that a plan reports at most. Where a plan reports none, events that only
        change the order need no plan (`PlanStage.is_idle`).
    bounds_waits: no job waits without bound (`orders.with_aging`), whatever the order.
    unplaced_rest_s: seconds for which jobs that fit nowhere are left out, so that the next plans choose others.
    look_s: seconds between two looks at trials of co-locations where jobs are time-sliced; None: the pace decides.
    """

    pace: PlanPace = field(default_factory=lambda: PlanPace(0.0))
    resize_s: float = 30.0
    oracle: Callable[[Integers], Floats] | None = None
    capacity: Capacity | None = None
    line_limit: int = LINE_LIMIT
    bounds_waits: bool = True
    unplaced_rest_s: float = NOTED_S
    look_s: float | None = None


class ClusterChange(Struct, frozen=True, gc=False):
    """What has changed in the cluster; with `is_whole` everything that there is.

    jobs: changed jobs with their gangs, and the signature of each one's series.
    forgotten: numbers of jobs that the master has dropped.
    view: the cluster's nodes; one object as long as `is_whole` is false.
    limits: on the GPUs of users, teams and partitions. teams, usage_half_life_s: as in `CoreSettings`. All three are
        read with `is_whole`.
    usage: changed use of users, with teams only.
    draining: names of nodes to be emptied.
    changing: numbers of time-slice groups whose last change some of their nodes have not acknowledged.
    quantum_s: seconds of a time slice; None: no time slicing.
    moves_per_hour: opportunistic migrations of a node and hour; None: the planner decides.
    free_devices: number of free devices on available nodes; None: counted where it is needed.
    reservations: those that are not over.
    """

    view: View
    jobs: Sequence[tuple[JobRecord, Gang | None, int]] = ()
    forgotten: Sequence[int] = ()
    is_whole: bool = False
    limits: Limits = NO_LIMITS
    teams: Mapping[str, Team] = {}
    usage_half_life_s: float = 0.0
    usage: Sequence[UserUsage] = ()
    draining: tuple[str, ...] = ()
    changing: frozenset[int] = frozenset()
    quantum_s: float | None = None
    moves_per_hour: float | None = None
    free_devices: int | None = None
    reservations: tuple[Reservation, ...] = ()


@dataclass(frozen=True, slots=True)
class ProgressReports:
    """Reports of running jobs by number. `profiled`: numbers of jobs that were measured otherwise."""

    reports: Mapping[int, ProgressReport] = field(default_factory=dict)
    profiled: Collection[int] = ()


@dataclass(frozen=True, slots=True)
class PlanVerdict:
    """The master's answers to the changes of the last plan, in their order. `planning_s`: seconds that `step` took."""

    answers: Sequence[ChangeAnswer] = ()
    planning_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Plan:
    """What the loop proposes.

    line: numbers of the pending jobs, first job first; None: the last one stands.
    kept_places: places to be kept for pending jobs; None: the last ones stand.
    curves: of jobs that were measured anew.
    """

    changes: tuple[PlanChange, ...] = ()
    findings: tuple[TrialFinding, ...] = ()
    line: tuple[int, ...] | None = None
    kept_places: tuple[KeepPlace, ...] | None = None
    curves: tuple[CoresCurve, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Return whether there is nothing to propose."""
        reports = self.findings or self.curves
        return not self.changes and not reports and self.line is None and self.kept_places is None


@dataclass(frozen=True, slots=True)
class PlanOutcome:
    """A plan after the master's verdict, at `now`. `refusals`: by refused change."""

    now: float
    refusals: tuple[tuple[PlanChange, tuple[Refusal, ...]], ...] = ()

    @property
    def refused(self) -> frozenset[int]:
        """Return the numbers of the jobs whose changes were refused."""
        return frozenset([change.number for change, _ in self.refusals])

    @property
    def barred(self) -> frozenset[int]:
        """Return those of `refused` that no fresh view would allow."""
        races = [
            change.number
            for change, refusals in self.refusals
            if any(refusal.reason.kind is RefusalKind.RACE for refusal in refusals)
        ]
        return self.refused.difference(races)


@dataclass(frozen=True, slots=True)
class PlanDraft:
    """The changes of one pass, and what the planner needs for the next one.

    waits: a chosen job has no place yet, so a later pass may find one without any event.
    next_change_s: when the order may change by itself, in Unix seconds; infinite if it changes only with events.
    line: numbers of all pending jobs in the order of the policy, with those that start now.
    unplaced: numbers of chosen jobs that fit nowhere, whatever is preempted. A pass that may not preempt lists those
        that an earlier pass found to be such.
    displaced: numbers of preempted jobs that fit nowhere else, under an order that parks them for that.
    resizing: the resizes under way if the plan is proposed; None: as before.
    """

    changes: tuple[PlanChange, ...] = ()
    waits: bool = False
    next_change_s: float = math.inf
    line: Integers = field(default_factory=lambda: np.zeros(0, np.int64))
    unplaced: frozenset[int] = frozenset()
    displaced: frozenset[int] = frozenset()
    resizing: Resizing | None = None

    @property
    def leaves_waiting(self) -> bool:
        """Return whether a pending job, chosen or not, does not start in this plan."""
        return self.waits or len(self.line) > sum(isinstance(change, StartChange) for change in self.changes)

    def followed_by(self, later: PlanDraft) -> PlanDraft:
        """Return a later stage's draft after these changes, without atomic groups that change the same jobs."""
        if not self.changes and self.next_change_s == math.inf:
            return later
        numbers = {change.number for change in self.changes}
        groups = {change.together for change in later.changes if change.together and change.number in numbers}
        others = [one for one in later.changes if one.number not in numbers and one.together not in groups]
        next_s = min(self.next_change_s, later.next_change_s)
        return replace(later, changes=(*self.changes, *others), next_change_s=next_s)


NOTHING_TO_DO: Final = PlanDraft()


class PlanContext(Struct):
    """One plan in the making. A pass that needs other terms gets a copy with them, and returns a draft.

    order: the policy's order, or one derived from it.
    pace: the times of this plan and the next ones.
    cluster: the last `ClusterChange`.
    jobs, room: live jobs, and the capacity index; both are unchanged on return of a stage.
    rates: measurements of jobs; None: no stage of this policy reads them.
    excluded: jobs and nodes that recent refusals exclude.
    may_preempt: running jobs may be preempted. A stage that frees devices otherwise sets it to False.
    is_news: something has changed since the last plan.
    last_line: the order of pending jobs as last reported.
    on_trial: numbers of jobs in co-locations under measurement.
    terms: the shapes and holdings to plan with.
    resizing: resizes under way, whose next worlds hold devices, too.
    draft, findings: the plan so far, and findings of earlier trials.
    kept_places: places to be kept for pending jobs; None: no stage keeps any.
    kept_on: nodes with places that are kept for pending jobs: what running jobs give back there is for these first.
    migrating: numbers of jobs of migration plans under way.
    is_giving: running jobs are about to return devices to pending ones.
    ranked: what `plan.plan` has ranked and chosen, by all that it depends on in one plan.
    again_s: when the next plan is due without any event, beside the draft's own time.
    """

    now: float
    policy: Policy
    order: JobOrder
    settings: PlannerSettings
    pace: PlanPace
    cluster: ClusterChange
    jobs: LiveTable
    room: CapacityIndex
    rates: JobRates | None = None
    excluded: ExcludedJobs = NONE_EXCLUDED
    may_preempt: bool = True
    is_news: bool = True
    last_line: tuple[int, ...] = ()
    on_trial: frozenset[int] = frozenset()
    terms: PassTerms = struct_field(default_factory=PassTerms)
    resizing: Resizing = NOTHING_UNDER_WAY
    draft: PlanDraft = NOTHING_TO_DO
    findings: list[TrialFinding] = struct_field(default_factory=list)
    kept_places: tuple[KeepPlace, ...] | None = None
    kept_on: frozenset[str] = frozenset()
    migrating: frozenset[int] = frozenset()
    is_giving: bool = False
    ranked: dict[Any, Any] = struct_field(default_factory=dict)
    again_s: float = math.inf

    @property
    def job_rates(self) -> JobRates:
        """Return `rates` for a stage that reads them."""
        assert self.rates is not None, f"{self.policy.name} measures no jobs"
        return self.rates

    @property
    def capacity(self) -> Capacity:
        """Return the devices, cores and memory that gangs can have."""
        return self.settings.capacity or capacity_of(self.room.view, self.jobs, self.resizing)

    @property
    def remaining_s(self) -> Callable[[Integers], Floats] | None:
        """Return the oracle of remaining seconds by job number, where the order knows durations."""
        return self.settings.oracle if self.order.knows_durations else None

    @property
    def free_devices(self) -> int:
        """Return the number of free devices on available nodes."""
        if self.cluster.free_devices is not None:
            return self.cluster.free_devices
        self.room.follow()
        return self.room.free_devices

    def come_back(self, when_s: float) -> None:
        """Request the next plan at `when_s` at the latest, without any event."""
        self.again_s = min(self.again_s, when_s)

    def add(self, found: PlanDraft) -> None:
        """Add the result of a stage."""
        self.draft = self.draft.followed_by(found)


_DEFAULTS: Final = PlannerSettings()


def context_of(
    policy: Policy,
    jobs: LiveTable,
    room: CapacityIndex,
    now: float,
    *,
    settings: PlannerSettings = _DEFAULTS,
    **more: Any,
) -> PlanContext:
    """Return the context of a plan outside a loop. `more`: fields that differ from those of a first plan."""
    cluster, terms = ClusterChange(room.view), terms_of(policy, jobs)
    context = PlanContext(now, policy, policy.aging_order, settings, settings.pace, cluster, jobs, room, terms=terms)
    return replace_of(context, **more)


class PlanStage(ABC):
    """A part of planning, with what it remembers from one plan to the next."""

    @abstractmethod
    def plan(self, context: PlanContext) -> None:
        """Add changes to the draft."""

    def is_idle(self, context: PlanContext) -> bool:
        """Return whether `plan` would certainly change nothing."""
        return False

    def settle(self, outcome: PlanOutcome) -> None:
        """Take the verdict on the last plan into account."""

    @property
    def on_trial(self) -> frozenset[int]:
        """Return the numbers of jobs in co-locations under measurement."""
        return frozenset()

    @property
    def memory(self) -> Mapping[str, Any]:
        """Return what it remembers, by field of `PlannerMemory`."""
        return {}


# -- parts of long plans, which the master judges quickly; changes that belong together stay in one part ---------------

# The master judges such a part in 8 ms, and serves other calls between two parts.
_CHANGES_MOST: Final = 200
_CLAIMS_MOST: Final = 1_000


def parts_of(plan: Plan, most: int = _CHANGES_MOST, most_claims: int = _CLAIMS_MOST) -> Iterator[Plan]:
    """Yield the parts of a plan in the order in which they are proposed; none of an empty plan.

    A part has at most `most` changes with `most_claims` claims. A group, whose changes follow each other, is never
    split; a group larger than that is a part by itself. Findings, curves and kept places are in the first part, the
    line of pending jobs in the last one.
    """
    parts = list(_split(plan.changes, most, most_claims)) or ([] if plan.is_empty else [()])
    for number, changes in enumerate(parts, 1):
        is_first, is_last = number == 1, number == len(parts)
        yield Plan(
            changes,
            plan.findings if is_first else (),
            plan.line if is_last else None,
            plan.kept_places if is_first else None,
            plan.curves if is_first else (),
        )


def _split(changes: Sequence[PlanChange], most: int, most_claims: int) -> Iterator[tuple[PlanChange, ...]]:
    part: list[PlanChange] = []
    claims = 0
    # A change that belongs to no group is one by itself.
    for _, group in groupby(enumerate(changes, 1), key=lambda pair: pair[1].together or -pair[0]):
        together = [change for _, change in group]
        own = sum([len(claims_in(change)) for change in together])
        if part and (len(part) + len(together) > most or claims + own > most_claims):
            yield tuple(part)
            part, claims = [], 0
        part.extend(together)
        claims += own
    if part:
        yield tuple(part)
