"""What moves have brought: rates before and after them, whether each is kept, and what that says of distance.

A move that was for the job's own sake is kept if it is faster, one for others' if it is not slower
(`introspect.migration.verdict`). What did not help is undone where that saves more than it takes, once the old place is
free, and remembered by kind of job and nodes; and every move between places of
different closeness is a measurement of how much closeness means to jobs of its kind.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Protocol, TypeAlias

from ganger.cluster.fit import gang_level
from ganger.cluster.trial import Claims
from ganger.cluster.view import View

from ganger_master.core.change_reason import Goal, TrialFinding
from ganger_master.core.gang_orders import same_place
from ganger_master.core.model import Gang, GangIntent, GangPhase, JobRecord
from ganger_master.estimators.locality import UNKNOWN_JOB, LocalityModel, LocalityPoint, fit_locality
from ganger_master.planner.job_table import LiveTable
from ganger_master.planner.migration_plans import is_free
from ganger_master.policies.backoff import FailedTrials
from ganger_master.policies.migration_choice import MigrationReason, Tried, tried, verdict, worth_going_back
from ganger_master.policies.trial_test import FIRST_WINDOWS, TrialRates, TrialVerdict

# What is not settled by then is not to be seen.
_LONGEST_S: Final = 3600.0
# What moves have brought is looked at so often, at most and before anything is seen.
_LEAST_LOOK_S: Final = 2.0
_LOOK_S: Final = 10.0
# Windows before a move that count; measurements kept of jobs of one kind, and kinds.
_MOST_BEFORE: Final = 16
_MOST_POINTS: Final = 16
_MOST_KINDS: Final = 1024
_WHY: Final = {
    Goal.LOCALITY: MigrationReason.LOCALITY,
    Goal.HOLE: MigrationReason.HOLE,
    Goal.UNPACK: MigrationReason.UNPACK,
    Goal.DRAIN: MigrationReason.DRAIN,
    Goal.DEFRAGMENT: MigrationReason.DEFRAGMENT,
    Goal.RETURN: MigrationReason.HOLE,
    Goal.EXCHANGE: MigrationReason.EXCHANGE,
    Goal.BALANCE: MigrationReason.BALANCE,
}
# There is no way back to a node that is drained, who rested had no place to go back to, and into packs others put jobs.
_FINAL: Final = frozenset({Goal.DRAIN, Goal.RETURN, Goal.UNPACK})

Points: TypeAlias = tuple[LocalityPoint, ...]


class RateSource(Protocol):
    """What is measured of jobs, by number."""

    def present(self, number: int) -> tuple[float, ...]:
        """Steps a second in windows since it runs as it does now, without the first of them."""
        ...

    def signature(self, number: int) -> str:
        """What behaves like it."""
        ...

    def alone(self, number: int) -> tuple[float, ...]:
        """The same when it last had its devices to itself."""
        ...

    def beside(self, number: int) -> frozenset[int]:
        """Who runs on its devices, too."""
        ...

    def crowd(self, number: int) -> tuple[int, Mapping[int, tuple[float, ...]]]:
        """Devices that others have in use on its nodes, and steps a second in windows by how many those were; nothing
        where that is not measured."""
        ...


class NoRates:
    """Of whom nothing is measured."""

    def present(self, number: int) -> tuple[float, ...]:
        return ()

    def signature(self, number: int) -> str:
        return ""

    def alone(self, number: int) -> tuple[float, ...]:
        return ()

    def beside(self, number: int) -> frozenset[int]:
        return frozenset()

    def crowd(self, number: int) -> tuple[int, Mapping[int, tuple[float, ...]]]:
        return 0, {}


@dataclass(frozen=True, slots=True)
class MigrationTrial:
    """`look_s`: when there may be more to see."""

    goal: Goal
    before: tuple[float, ...]
    source: Claims
    claims: Claims
    began_s: float
    look_s: float


@dataclass(frozen=True, slots=True)
class OwedReturn:
    """A way back: a job that goes at `gain` times its pace of before, in `claims`, was faster in `source`."""

    source: Claims
    claims: Claims
    gain: float
    until_s: float


@dataclass(frozen=True, slots=True)
class MigrationOutcomes:
    """What is remembered. `failed`: by kind of job and nodes where a move did not help; `owed`: who is to go back."""

    trials: Mapping[int, MigrationTrial] = field(default_factory=dict)
    failed: FailedTrials[Tried] = field(default_factory=FailedTrials)
    points: Mapping[str, Points] = field(default_factory=dict)
    owed: Mapping[int, OwedReturn] = field(default_factory=dict)

    def begun(
        self, number: int, goal: Goal, gang: Gang, claims: Claims, rated: RateSource, now: float
    ) -> MigrationOutcomes:
        """With a move that begins now, be it that it goes to rest on its way; of whom too little was measured before,
        nothing is to be told afterwards."""
        before = rated.present(number)[-_MOST_BEFORE:]
        if len(before) < 2 or not sum(before) > 0.0 or goal not in _WHY:
            return self
        trial = MigrationTrial(goal, before, gang.claims, claims, now, now + _LOOK_S)
        return replace(self, trials={**self.trials, number: trial})

    @property
    def look_s(self) -> float:
        """When to look at some of them again, though nothing happens."""
        return min([trial.look_s for trial in self.trials.values()], default=math.inf)

    def looked(
        self,
        table: LiveTable,
        view: View,
        rated: RateSource,
        now: float,
        takes: Callable[[JobRecord, Gang], tuple[float, float]],
    ) -> tuple[MigrationOutcomes, tuple[TrialFinding, ...]]:
        """After a look at all that were moved and of whom there may be more to see; and what was found. `takes`: for
        how long a job is expected to run yet, and to stand still for a move."""
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
            after = rated.present(number)
            trials[number] = replace(trial, look_s=now + next_look_s(now - trial.began_s, len(after)))
            if len(after) < FIRST_WINDOWS:
                continue
            judged = verdict(_WHY[trial.goal], TrialRates(trial.before, after))
            if judged.verdict is TrialVerdict.MEASURE:
                continue
            del trials[number]
            is_kept = judged.verdict is TrialVerdict.KEEP
            kind, gain, detail = rated.signature(number), judged.gain.value, ""
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
        """Without those who are not any more where they were slow, or wait for their old place for too long."""
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
        """Of jobs of this kind, as far as moves have shown it."""
        points = self.points.get(kind)
        return fit_locality(points) if points else UNKNOWN_JOB


def _what_becomes(view: View, trial: MigrationTrial, *, pays: bool) -> str:
    """Of one whose move did not help, for people."""
    if trial.goal in _FINAL:
        return "it stays all the same"
    if not pays:
        return "it stays: the way back would take more than it saves"
    where = " ".join(dict.fromkeys(claim.node for claim in trial.source))
    if is_free(view, trial.source):
        return f"it goes back to {where}"
    return f"it stays until its place on {where} is free again"


def next_look_s(gone_s: float, windows: int) -> float:
    """How long until there are as many windows as the next look of `judge` needs: as they came so far."""
    if not windows:
        return max(_LOOK_S, gone_s / 2)
    wanted = FIRST_WINDOWS
    while wanted <= windows:
        wanted *= 2
    # Of the first one nothing is told.
    return max(_LEAST_LOOK_S, gone_s * (wanted - windows) / (windows + 1))


def _where(job: JobRecord, gang: Gang | None, trial: MigrationTrial) -> bool | None:
    """Whether it runs where it was moved to; None while it is on its way."""
    if job.next_epoch or job.ending is not None or gang is None:
        return None
    runs = gang.intent is GangIntent.RUN and gang.phase is GangPhase.RUNNING
    if same_place(gang.claims, trial.claims):
        return runs or None
    # It rests on its way; else it has been sent elsewhere, or stays after all.
    return None if same_place(gang.claims, trial.source) and not runs else False


def _point(view: View, trial: MigrationTrial, gain: float, model: LocalityModel) -> LocalityPoint | None:
    """How fast it was where it lay further apart, against the closest; None where that was the same, or where one of
    both places is no more."""
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
