"""Outcomes of migrations: rates before and after them, the decision to keep or revert each, fitted locality models, and
the locality that pending gangs are placed with by these.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np
from ganger.cluster.capacity_index import Claims
from ganger.cluster.fit import gang_level
from ganger.cluster.resources import GangShape, Locality, LocalityLevel
from ganger.cluster.view import LoadMode, View
from msgspec.structs import replace as replace_of

from ganger_master.core.gang_model import Gang, GangIntent, GangPhase
from ganger_master.core.gang_orders import same_place
from ganger_master.core.job_model import JobRecord
from ganger_master.core.plan_changes import Goal, TrialFinding
from ganger_master.estimators.slowdown import (
    UNKNOWN_JOB,
    LocalityLoss,
    LocalityModel,
    LocalityPoint,
    fit_locality,
    measured_loss,
)
from ganger_master.planner.context import PassTerms, PlanContext, PreferredPlace
from ganger_master.planner.device_groups import is_free
from ganger_master.planner.job_estimates import SeriesRates
from ganger_master.planner.job_table import LiveTable
from ganger_master.policies.learned_places import harmless_load, least_loaded_rate, types_by_worth
from ganger_master.policies.migration_choice import Tried, tried, verdict, worth_going_back
from ganger_master.policies.orders import SLACK_S
from ganger_master.policies.trials import FIRST_WINDOWS, FailedTrials, TrialRates, TrialVerdict

if TYPE_CHECKING:
    from ganger_master.planner.rate_registry import JobRates

# A migration without a verdict by then gets none.
_LONGEST_S: Final = 3600.0
# Seconds between two looks at a trial: at least, and while there are no windows.
_LEAST_LOOK_S: Final = 2.0
_LOOK_S: Final = 10.0
# Windows before a move that count; points kept for a kind of job; kinds kept.
_MOST_BEFORE: Final = 16
_MOST_POINTS: Final = 16
_MOST_KINDS: Final = 1024
# Not reverted: off a drained node, out of host memory, and out of a co-location, which other passes make.
_FINAL: Final = frozenset({Goal.DRAIN, Goal.RETURN, Goal.UNPACK})

Points: TypeAlias = tuple[LocalityPoint, ...]


@dataclass(frozen=True, slots=True)
class MigrationTrial:
    """A migration under measurement. `look_s`: when there may be more windows, in Unix seconds."""

    goal: Goal
    before: tuple[float, ...]
    source: Claims
    claims: Claims
    began_s: float
    look_s: float


@dataclass(frozen=True, slots=True)
class OwedReturn:
    """A migration to revert: in `claims` the job runs at `gain` times the rate that it had in `source`."""

    source: Claims
    claims: Claims
    gain: float
    until_s: float


@dataclass(frozen=True, slots=True)
class MigrationOutcomes:
    """The state between two passes. `failed`: kinds of jobs and nodes of failed migrations; `owed`: jobs that are to go
    back."""

    trials: Mapping[int, MigrationTrial] = field(default_factory=dict)
    failed: FailedTrials[Tried] = field(default_factory=FailedTrials)
    points: Mapping[str, Points] = field(default_factory=dict)
    owed: Mapping[int, OwedReturn] = field(default_factory=dict)

    def begun(
        self, number: int, goal: Goal, gang: Gang, claims: Claims, rates: JobRates, now: float
    ) -> MigrationOutcomes:
        """Return the state with a trial of a migration that begins now, if the rate before it is known well enough."""
        before = rates.present(number)[-_MOST_BEFORE:]
        if len(before) < 2 or not sum(before) > 0.0 or goal is Goal.UNDO:
            return self
        trial = MigrationTrial(goal, before, gang.claims, claims, now, now + _LOOK_S)
        return replace(self, trials={**self.trials, number: trial})

    @property
    def look_s(self) -> float:
        """When the next trial may have more windows, in Unix seconds."""
        return min([trial.look_s for trial in self.trials.values()], default=math.inf)

    def looked(
        self,
        table: LiveTable,
        view: View,
        rates: JobRates,
        now: float,
        takes: Callable[[JobRecord, Gang], tuple[float, float]],
    ) -> tuple[MigrationOutcomes, tuple[TrialFinding, ...]]:
        """Judge the trials that may have more windows; return the new state and the findings. `takes`: a job's expected
        remaining run time, and the pause of a move, in seconds."""
        if now < self.look_s:
            return self, ()
        trials, failed, points, owed = dict(self.trials), self.failed, dict(self.points), dict(self.owed)
        findings = []
        for number, trial in self.trials.items():
            if now < trial.look_s:
                continue
            trials[number] = replace(trial, look_s=now + _LOOK_S)
            found = table.get(number)
            if found is None or now >= trial.began_s + _LONGEST_S:
                del trials[number]
                continue
            where = _where(*found, trial)
            if where is None:
                continue
            if not where:
                del trials[number]
                continue
            after = rates.present(number)
            trials[number] = replace(trial, look_s=now + next_look_s(now - trial.began_s, len(after)))
            if len(after) < FIRST_WINDOWS:
                continue
            judged = verdict(trial.goal, TrialRates(trial.before, after))
            if judged.verdict is TrialVerdict.MEASURE:
                continue
            del trials[number]
            is_kept = judged.verdict is TrialVerdict.KEEP
            kind, gain, detail = rates.signature(number), judged.gain.value, ""
            if not is_kept:
                failed = failed.noted(tried(number, kind, trial.claims), now)
                job, gang = found
                assert gang is not None, "it runs"
                pays = trial.goal not in _FINAL and worth_going_back(gain, *takes(job, gang))
                if pays:
                    owed[number] = OwedReturn(trial.source, trial.claims, gain, now + _LONGEST_S)
                detail = _what_becomes(view, trial, pays=pays)
                if judged.is_open:
                    detail = f"{len(after)} windows leave that open; {detail}"
            findings.append(TrialFinding(number, trial.goal, is_kept, gain, judged.gain.deviation, detail))
            point = _point(view, trial, judged.gain.value, self.locality(kind))
            if kind and point is not None:
                points[kind] = (*points.pop(kind, ()), point)[-_MOST_POINTS:]
                if len(points) > _MOST_KINDS:
                    del points[next(iter(points))]
        return MigrationOutcomes(trials, failed, points, owed), tuple(findings)

    def still_owed(self, table: LiveTable, now: float) -> MigrationOutcomes:
        """Return the state without returns of jobs that have left the slow place or have waited too long for the old
        one."""
        if not self.owed:
            return self
        live = {
            number: one
            for number, one in self.owed.items()
            if now < one.until_s
            and (found := table.get(number)) is not None
            and found[1] is not None
            and not found[0].next_epoch
            and same_place(found[1].claims, one.claims)
        }
        return self if len(live) == len(self.owed) else replace(self, owed=live)

    def locality(self, kind: str) -> LocalityModel:
        """Return the locality model of a kind of job, fitted to its migrations."""
        points = self.points.get(kind)
        return fit_locality(points) if points else UNKNOWN_JOB


def _what_becomes(view: View, trial: MigrationTrial, *, pays: bool) -> str:
    if trial.goal in _FINAL:
        return "it stays all the same"
    if not pays:
        return "it stays: the way back would take more than it saves"
    where = " ".join(dict.fromkeys(claim.node for claim in trial.source))
    if is_free(view, trial.source):
        return f"it goes back to {where}"
    return f"it stays until its place on {where} is free again"


def next_look_s(gone_s: float, windows: int) -> float:
    """Return the seconds until the windows that the next look of `judge` needs, if they come at the same pace."""
    if not windows:
        return max(_LOOK_S, gone_s / 2)
    wanted = FIRST_WINDOWS
    while wanted <= windows:
        wanted *= 2
    # The first window is not reported.
    return max(_LEAST_LOOK_S, gone_s * (wanted - windows) / (windows + 1))


def _where(job: JobRecord, gang: Gang | None, trial: MigrationTrial) -> bool | None:
    """Return whether it runs where it was moved to; None while it is on its way."""
    if job.next_epoch or job.ending is not None or gang is None:
        return None
    runs = gang.intent is GangIntent.RUN and gang.phase is GangPhase.RUNNING
    if same_place(gang.claims, trial.claims):
        return runs or None
    # It is parked on its way; else it was sent elsewhere, or did not move.
    return None if same_place(gang.claims, trial.source) and not runs else False


def _point(view: View, trial: MigrationTrial, gain: float, model: LocalityModel) -> LocalityPoint | None:
    """Return the job's rate in the wider place, relative to the closest place; None if both are as close, or if one of
    them has left the cluster."""
    if not gain > 0.0 or any(claim.node not in view for claim in (*trial.source, *trial.claims)):
        return None
    places = [[claim for claim in claims if claim.device_mask] for claims in (trial.source, trial.claims)]
    (source, claims), levels = places, [gang_level(view, tuple(place)) for place in places]
    gpus = sum(claim.device_mask.bit_count() for claim in claims)
    if gpus < 2 or (len(source), levels[0]) == (len(claims), levels[1]):
        return None
    speeds = [model.relative_speed(gpus, len(place), level) for place, level in zip(places, levels, strict=True)]
    if (len(source), levels[0]) > (len(claims), levels[1]):
        return LocalityPoint(gpus, len(source), speeds[1] / gain, levels[0])
    return LocalityPoint(gpus, len(claims), speeds[0] * gain, levels[1])


class LearnedPlaces:
    """Where pending gangs go in one plan by what was measured of gangs alike: locality, types of GPU, and nodes on
    which neither they nor others lose speed. Made before the plan takes any device.

    ends_s: when the first wait ends that this plan or an earlier one (`ended_s`) has found, in Unix seconds; infinite
        without any.
    """

    def __init__(self, context: PlanContext, outcomes: MigrationOutcomes, ended_s: float = math.inf) -> None:
        self._context, self._outcomes = context, outcomes
        self._free = context.room.free_devices
        self._known: dict[int, Locality] = {}
        # Types of GPU in order, and the load that does no harm, by signature and number of GPUs.
        self._by_series: dict[tuple[str, int], tuple[str, float]] = {}
        self.ends_s = ended_s if ended_s > context.now else math.inf

    @property
    def terms(self) -> PassTerms:
        """Return the terms of the plan with these places."""
        rates = self._context.job_rates
        preferred = self._preferred if any(True for _ in rates.series) else self._context.terms.preferred
        return replace_of(self._context.terms, shape=self._shape, preferred=preferred)

    def _preferred(self, job: JobRecord) -> PreferredPlace | None:
        shape = job.shape
        if shape.nodes > 1 or len(shape.roles) > 1:
            return None
        key = self._context.job_rates.signature(job.number), job.gpus
        if key not in self._by_series:
            alike = self._context.job_rates.alike(job.number, job.gpus)
            self._by_series[key] = self._order_of(alike), _harmless(alike)
        order, harmless = self._by_series[key]
        device_type = shape.device_type or order
        avoid = self._crowded(job.gpus, harmless)
        return PreferredPlace(device_type, avoid) if avoid or device_type != shape.device_type else None

    def _order_of(self, alike: Mapping[str, SeriesRates]) -> str:
        """Return the types of GPU in the order in which to try them; empty without a preference."""
        if len(self._types) < 2 or len(alike) < 2:
            return ""
        is_scarce = self._context.room.view.mode is LoadMode.PACK
        order = types_by_worth(_speeds(alike), self._speeds, is_scarce=is_scarce)
        return ",".join([*order, *sorted(self._types.difference(order))]) if order else ""

    def _crowded(self, gpus: int, harmless: float) -> frozenset[str]:
        """Return the nodes where more devices are in use than do no harm, to a gang of so many or to those there."""
        view, most = self._context.room.view, self._most_used
        if math.isinf(harmless) and not most:
            return frozenset()
        used = {
            name: view.held[slot].bit_count()
            for name, slot in view.slots.items()
            if harmless < math.inf or name in most
        }
        return frozenset(
            [name for name, count in used.items() if count > harmless or count + gpus > most.get(name, math.inf)]
        )

    @cached_property
    def _most_used(self) -> dict[str, float]:
        """The devices that may be in use on a node before a gang that runs there loses speed."""
        rates, found = self._context.job_rates, dict[str, float]()
        for job, gang in self._context.jobs.running:
            if len(gang.claims) == 1:
                harmless = _harmless(rates.alike(job.number, gang.devices))
                if harmless < math.inf:
                    node = gang.claims[0].node
                    found[node] = min(found.get(node, math.inf), gang.devices + harmless)
        return found

    @cached_property
    def _types(self) -> set[str]:
        sets = [topology.configuration_set.device_type for topology in self._context.room.view.topologies]
        return {one for one in sets if one}

    @cached_property
    def _speeds(self) -> list[Mapping[str, float]]:
        return [_speeds(alike) for alike in self._context.job_rates.series]

    def _shape(self, job: JobRecord) -> GangShape:
        shape = self._context.terms.shape(job)
        locality = self._known.get(job.number)
        if locality is None:
            locality = self._known[job.number] = self._learned(job) or shape.locality
            ends_s = job.pending_since + locality.patience_s + SLACK_S
            if locality.wish is not None and ends_s > self._context.now:
                self.ends_s = min(self.ends_s, ends_s)
        return shape if locality is shape.locality else replace_of(shape, locality=locality)

    def _learned(self, job: JobRecord) -> Locality | None:
        """Return the locality that measurements prefer; None if there are none, or if the job states its own."""
        own, points = job.shape.locality, self._outcomes.points
        if not points or own.wish is not None or own.widest is not LocalityLevel.CLUSTER or job.gpus < 2:
            return None
        if job.gpus > self._free:
            # It needs devices of others, and takes those that it can get.
            return None
        loss = self._loss(job)
        if loss is None:
            return None
        lost_s = loss.share * self._remaining_s(job)
        patience_s = own.patience_s or min(lost_s, self._context.pace.every_s)
        return Locality(own.widest, loss.tolerated, patience_s)

    def _loss(self, job: JobRecord) -> LocalityLoss | None:
        points = self._outcomes.points.get(self._context.job_rates.signature(job.number))
        levels = self._levels
        if not points or not levels:
            return None
        nodes = max(1, job.shape.nodes, -(-job.gpus // max(levels)))
        inside = max([level for devices, level in levels.items() if devices >= job.gpus], default=LocalityLevel.NODE)
        return measured_loss(points, job.gpus, nodes, inside)

    @cached_property
    def _levels(self) -> dict[int, LocalityLevel]:
        """The locality of all devices of a node, by their number: that of the widest such node."""
        found: dict[int, LocalityLevel] = {}
        for topology in set(self._context.room.view.topologies):
            if topology.devices:
                level = topology.level(topology.all_mask)
                found[topology.devices] = max(level, found.get(topology.devices, level))
        return found

    def _remaining_s(self, job: JobRecord) -> float:
        """Return the expected run time that is left: the median of similar jobs, else as long again as it has run."""
        table = self._context.jobs
        if table.memory is not None:
            rows, ran_s = np.array([table.row(job.number)]), np.array([job.run_s])
            left_s = float(table.memory.remaining_s(rows, ran_s)[0])
            if math.isfinite(left_s):
                return left_s
        return job.run_s


def _speeds(alike: Mapping[str, SeriesRates]) -> Mapping[str, float]:
    """Return the rates by type of GPU, in steps/s, of those that are known by name and by enough windows."""
    speeds = {name: least_loaded_rate(one.by_load) for name, one in alike.items() if name}
    return {name: rate for name, rate in speeds.items() if rate}


def _harmless(alike: Mapping[str, SeriesRates]) -> float:
    """Return the devices that others may use on a gang's node, on whatever type of GPU; infinite where none harm."""
    return min([harmless_load(one.by_load) for one in alike.values()], default=math.inf)
