"""Outcomes of migrations: rates before and after them, the decision to keep or revert each, and fitted locality
models. And the preferred places of pending gangs that follow from measurements of gangs of the same series: locality,
types of GPU, and nodes on which neither they nor gangs that run there lose speed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from statistics import fmean, geometric_mean
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
from ganger_master.estimators.speed import (
    UNKNOWN_JOB,
    LocalityLoss,
    LocalityModel,
    LocalityPoint,
    fit_locality,
    measured_loss,
)
from ganger_master.planner.context import PassTerms, PlanContext, PreferredPlace
from ganger_master.planner.device_groups import is_free
from ganger_master.planner.job_measurements import SeriesRates
from ganger_master.planner.job_table import LiveTable
from ganger_master.policies.migration_choice import LEAST_GAIN, Tried, is_worth_reverting, judge_migration, tried
from ganger_master.policies.orders import SLACK_S
from ganger_master.policies.trials import DOUBT, FIRST_WINDOWS, FailedTrials, TrialRates, TrialVerdict, normalised

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
# Migrations that are never reverted: off a drained node, out of host memory, out of a co-location.
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
class PendingRevert:
    """A migration to revert: in `claims` the job runs at `gain` times the rate that it had in `source`."""

    source: Claims
    claims: Claims
    gain: float
    until_s: float


@dataclass(frozen=True, slots=True)
class MigrationOutcomes:
    """The state between two passes. `failed`: kinds of jobs and nodes of failed migrations; `pending_reverts`:
    migrations to revert, by job number."""

    trials: Mapping[int, MigrationTrial] = field(default_factory=dict)
    failed: FailedTrials[Tried] = field(default_factory=FailedTrials)
    points: Mapping[str, Points] = field(default_factory=dict)
    pending_reverts: Mapping[int, PendingRevert] = field(default_factory=dict)

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

    def judged(
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
        trials, failed, points, pending_reverts = (
            dict(self.trials),
            self.failed,
            dict(self.points),
            dict(self.pending_reverts),
        )
        findings = []
        for number, trial in self.trials.items():
            if now < trial.look_s:
                continue
            trials[number] = replace(trial, look_s=now + _LOOK_S)
            found = table.get(number)
            if found is None or now >= trial.began_s + _LONGEST_S:
                del trials[number]
                continue
            has_arrived = _has_arrived(*found, trial)
            if has_arrived is None:
                continue
            if not has_arrived:
                del trials[number]
                continue
            after = rates.present(number)
            trials[number] = replace(trial, look_s=now + next_judgement_in_s(now - trial.began_s, len(after)))
            if len(after) < FIRST_WINDOWS:
                continue
            finding = judge_migration(trial.goal, TrialRates(trial.before, after))
            if finding.verdict is TrialVerdict.MEASURE:
                continue
            del trials[number]
            is_kept = finding.verdict is TrialVerdict.KEEP
            kind, gain, detail = rates.signature(number), finding.gain.value, ""
            if not is_kept:
                failed = failed.noted(tried(number, kind, trial.claims), now)
                job, gang = found
                assert gang is not None, "it runs"
                pays = trial.goal not in _FINAL and is_worth_reverting(gain, *takes(job, gang))
                if pays:
                    pending_reverts[number] = PendingRevert(trial.source, trial.claims, gain, now + _LONGEST_S)
                detail = _consequence(view, trial, pays=pays)
                if finding.is_open:
                    detail = f"{len(after)} windows leave that open; {detail}"
            findings.append(TrialFinding(number, trial.goal, is_kept, gain, finding.gain.deviation, detail))
            point = _locality_point(view, trial, finding.gain.value, self.locality(kind))
            if kind and point is not None:
                points[kind] = (*points.pop(kind, ()), point)[-_MOST_POINTS:]
                if len(points) > _MOST_KINDS:
                    del points[next(iter(points))]
        return MigrationOutcomes(trials, failed, points, pending_reverts), tuple(findings)

    def with_live_reverts(self, table: LiveTable, now: float) -> MigrationOutcomes:
        """Return the state without returns of jobs that have left the slow place or waited too long for the old one."""
        if not self.pending_reverts:
            return self
        live = {
            number: one
            for number, one in self.pending_reverts.items()
            if now < one.until_s
            and (found := table.get(number)) is not None
            and found[1] is not None
            and not found[0].next_epoch
            and same_place(found[1].claims, one.claims)
        }
        return self if len(live) == len(self.pending_reverts) else replace(self, pending_reverts=live)

    def locality(self, kind: str) -> LocalityModel:
        """Return the locality model of a kind of job, fitted to its migrations."""
        points = self.points.get(kind)
        return fit_locality(points) if points else UNKNOWN_JOB


def _consequence(view: View, trial: MigrationTrial, *, pays: bool) -> str:
    if trial.goal in _FINAL:
        return "it stays all the same"
    if not pays:
        return "it stays: the way back would take more than it saves"
    where = " ".join(dict.fromkeys(claim.node for claim in trial.source))
    if is_free(view, trial.source):
        return f"it goes back to {where}"
    return f"it stays until its place on {where} is free again"


def next_judgement_in_s(gone_s: float, windows: int) -> float:
    """Return the seconds until the windows that the next look of `judge` needs, if they come at the same pace."""
    if not windows:
        return max(_LOOK_S, gone_s / 2)
    wanted = FIRST_WINDOWS
    while wanted <= windows:
        wanted *= 2
    # The first window is not reported.
    return max(_LEAST_LOOK_S, gone_s * (wanted - windows) / (windows + 1))


def _has_arrived(job: JobRecord, gang: Gang | None, trial: MigrationTrial) -> bool | None:
    """Return True if the job runs at its destination, False if it does not, None while it migrates."""
    if job.next_epoch or job.ending is not None or gang is None:
        return None
    runs = gang.intent is GangIntent.RUN and gang.phase is GangPhase.RUNNING
    if same_place(gang.claims, trial.claims):
        return runs or None
    # Parked at its source during the migration. Else it went elsewhere, or its migration was aborted.
    return None if same_place(gang.claims, trial.source) and not runs else False


def _locality_point(view: View, trial: MigrationTrial, gain: float, model: LocalityModel) -> LocalityPoint | None:
    """Return the job's rate in the wider place, relative to the closest place; None if both are equally close, or if a
    node of one is no longer in the cluster."""
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


class MeasuredPlaces:
    """Preferred places of pending gangs in one plan. Made before the plan takes any device.

    ends_s: earliest end of a wait for a preferred place, in Unix seconds, of this plan or an earlier one (`ended_s`);
        infinite without any.
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
            series = self._context.job_rates.same_series(job.number, job.gpus)
            self._by_series[key] = self._order_of(series), _harmless(series)
        order, harmless = self._by_series[key]
        device_type = shape.device_type or order
        avoid = self._harmful_nodes(job.gpus, harmless)
        return PreferredPlace(device_type, avoid) if avoid or device_type != shape.device_type else None

    def _order_of(self, series: Mapping[str, SeriesRates]) -> str:
        """Return the types of GPU in the order in which to try them; empty without a preference."""
        if len(self._types) < 2 or len(series) < 2:
            return ""
        is_scarce = self._context.room.view.mode is LoadMode.PACK
        order = types_by_gain(_speeds(series), self._speeds, is_scarce=is_scarce)
        return ",".join([*order, *sorted(self._types.difference(order))]) if order else ""

    def _harmful_nodes(self, gpus: int, harmless: float) -> frozenset[str]:
        """Return the nodes where a gang of `gpus` GPUs would lose speed, or would slow down gangs that run there."""
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
        """Devices that may be in use on a node before a gang that runs there loses speed, by node."""
        rates, found = self._context.job_rates, dict[str, float]()
        for job, gang in self._context.jobs.running:
            if len(gang.claims) == 1:
                harmless = _harmless(rates.same_series(job.number, gang.devices))
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
        return [_speeds(one) for one in self._context.job_rates.series]

    def _shape(self, job: JobRecord) -> GangShape:
        shape = self._context.terms.shape(job)
        locality = self._known.get(job.number)
        if locality is None:
            locality = self._known[job.number] = self._measured(job) or shape.locality
            ends_s = job.pending_since + locality.patience_s + SLACK_S
            if locality.wish is not None and ends_s > self._context.now:
                self.ends_s = min(self.ends_s, ends_s)
        return shape if locality is shape.locality else replace_of(shape, locality=locality)

    def _measured(self, job: JobRecord) -> Locality | None:
        """Return the locality that measurements prefer; None if there are none, or if the job states its own."""
        own, points = job.shape.locality, self._outcomes.points
        if not points or own.wish is not None or own.widest is not LocalityLevel.CLUSTER or job.gpus < 2:
            return None
        if job.gpus > self._free:
            # Too few devices are free, so it accepts any place.
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
        """Locality level of a whole node by its number of devices; the widest level if nodes differ."""
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


def _speeds(series: Mapping[str, SeriesRates]) -> Mapping[str, float]:
    """Return the rates by type of GPU, in steps/s, of those that are known by name and by enough windows."""
    speeds = {name: least_loaded_rate(one.by_load) for name, one in series.items() if name}
    return {name: rate for name, rate in speeds.items() if rate}


def _harmless(series: Mapping[str, SeriesRates]) -> float:
    """Return the devices that others may use on a gang's node, whatever the GPU type; infinite if no load harmed."""
    return min([harmless_load(one.by_load) for one in series.values()], default=math.inf)


def harmless_load(rates: Mapping[int, tuple[float, ...]]) -> float:
    """Return the devices that others may use on a gang's node before it loses `LEAST_GAIN`; infinite if no significant
    loss was measured. The loss is interpolated linearly between measured loads.

    rates: windows in steps/s, by the number of devices that others use.
    """
    known = _enough(rates)
    for (harmless, _), (load, some) in pairwise(known):
        gain, _ = normalised([TrialRates(some, known[0][1])]).bounds(DOUBT)
        if gain >= 1.0 + LEAST_GAIN:
            return min(load - 1, harmless + math.floor((load - harmless) * LEAST_GAIN / (gain - 1.0)))
    return math.inf


def least_loaded_rate(rates: Mapping[int, tuple[float, ...]]) -> float:
    """Return the mean rate beside the fewest devices in use, in steps/s; 0 without enough windows."""
    known = _enough(rates)
    return fmean(known[0][1]) if known else 0.0


def _enough(rates: Mapping[int, tuple[float, ...]]) -> list[tuple[int, tuple[float, ...]]]:
    return sorted((load, some) for load, some in rates.items() if len(some) >= FIRST_WINDOWS and sum(some) > 0.0)


def types_by_gain(own: Mapping[str, float], others: Iterable[Mapping[str, float]], *, is_scarce: bool) -> Sequence[str]:
    """Return the measured types of GPU, the preferred one first; empty if the rates differ by less than `LEAST_GAIN`.

    While devices are plenty the fastest type goes first. Once they are scarce, types are ranked by the program's gain
    relative to the mean gain of all programs, as in trading (Chaudhary et al., Gandiva_fair, EuroSys 2020): programs
    that gain little leave the fast types to those that gain much.

    own: steps/s of the program by type; others: those of all programs, only their ratios count.
    """
    if len(own) < 2 or max(own.values()) < (1.0 + LEAST_GAIN) * min(own.values()):
        return ()
    if not is_scarce:
        return sorted(own, key=lambda one: (-own[one], one))
    relative = [_relative({one: rates[one] for one in own}) for rates in others if own.keys() <= rates.keys()]
    mean = {one: fmean([speeds[one] for speeds in relative]) if relative else 1.0 for one in own}
    return sorted(own, key=lambda one: (-own[one] / mean[one], -own[one], one))


def _relative(rates: Mapping[str, float]) -> dict[str, float]:
    middle = geometric_mean(rates.values())
    return {one: rate / middle for one, rate in rates.items()}
