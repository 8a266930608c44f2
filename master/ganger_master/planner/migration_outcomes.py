"""Outcomes of migrations: rates before and after them, the decision to keep or revert each, and fitted locality
models."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, TypeAlias

from ganger.cluster.capacity_index import Claims
from ganger.cluster.fit import gang_level
from ganger.cluster.view import View

from ganger_master.core.gang_model import Gang, GangIntent, GangPhase
from ganger_master.core.gang_orders import same_place
from ganger_master.core.job_model import JobRecord
from ganger_master.core.plan_changes import Goal, TrialFinding
from ganger_master.estimators.slowdown import (
    UNKNOWN_JOB,
    LocalityModel,
    LocalityPoint,
    fit_locality,
)
from ganger_master.planner.device_groups import is_free
from ganger_master.planner.job_table import LiveTable
from ganger_master.policies.migration_choice import Tried, is_worth_reverting, judge_migration, tried
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
        """Return the state without returns of jobs that have left the slow place or have waited too long for the old
        one."""
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
