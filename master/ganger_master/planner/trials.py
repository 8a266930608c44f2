"""Which number of cores to try next with a job, and what a trial has shown.

Probes are chosen by optimal experiment design (`estimators.cpu_design`) among what the job has and what is free beside
it:
nobody else gives anything for a trial. Each is measured in windows against those just before it, and judged as every
other change (`policies.trial_test`). A gain that is not to be seen counts as none, and a loss likewise: the point
is put where the rate was before, the curve is flat there, and the tuning takes the cores back that it gains nothing
by. So a change is kept or undone by the tuning, from what was measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import log
from statistics import median
from typing import Final

from ganger_master.estimators.cpu import CpuPoint, sweet_point_bracket
from ganger_master.estimators.cpu_design import next_probe
from ganger_master.planner.profile import CoreProfile
from ganger_master.policies.trial_test import FIRST_WINDOWS, TrialRates, TrialVerdict, judge

# Below that nobody can tell a gain from chance in a minute.
LEAST_GAIN: Final = 0.02
# So many times the most cores that were measured are worth a trial of their own.
_FAR: Final = 1.25


@dataclass(frozen=True, slots=True)
class TrialPace:
    """How long things take, in seconds. `warm_s`: from the start of a stretch until it runs as it will; `settle_s`:
    from a change of cores until threads, caches and loaders have followed it; a window is at least `window_s` long and
    `window_steps` steps. After `most_s` a trial is over. Of its running time a job spends at most `share` in trials."""

    warm_s: float = 30.0
    settle_s: float = 5.0
    window_s: float = 2.0
    window_steps: int = 5
    most_s: float = 600.0
    share: float = 0.1


@dataclass(frozen=True, slots=True)
class CoresTrial:
    """`millicores` for each GPU are tried by a job that had `held`, and did so well with them: `before` are rates of
    windows, in steps per second."""

    millicores: int
    held: int
    before: tuple[float, ...]
    began_s: float


@lru_cache(16_384)
def next_cores(profile: CoreProfile, held_millicores: int, free_millicores: int) -> int | None:
    """Whole cores for each GPU to try next with a job that holds so much for each and could have so much more; None if
    enough is known, or what is to be known next cannot be had now."""
    there_are = (held_millicores + free_millicores) // 1000
    points = profile.points
    if not points or there_are < 1:
        return None
    if profile.inherited and len(profile.own) == 1:
        check = _check(profile, held_millicores / 1000, there_are)
        if check is not None:
            return check
    largest = max(point.cores for point in points)
    _, enough = sweet_point_bracket(points)
    # Beyond a plateau that was seen nothing is to be found, and what is free comes and goes.
    is_far = there_are > _FAR * largest and enough >= largest
    found = next_probe(points, there_are if is_far else max(1, round(largest)))
    if found is None or found > there_are or found * 1000 == held_millicores:
        return None
    return found


def _check(profile: CoreProfile, held: float, there_are: int) -> int | None:
    """One look, as far away as can be, at whether the curve of the one before holds for this job: else it might keep
    for ever what another one made the most of."""
    known = {round(point.cores) for point in profile.inherited}
    reach = sorted(cores for cores in known if 1 <= cores <= there_are and cores != held)
    return max(reach, key=lambda cores: abs(log(cores / held)), default=None)


def shown(trial: CoresTrial, after: tuple[float, ...], is_last: bool = False) -> CpuPoint | None:
    """What the trial has shown; None as long as that cannot be said. `is_last`: there will be no more windows, so what
    is open yet is not to be seen."""
    is_more = trial.millicores > trial.held
    threshold = 1.0 + (LEAST_GAIN if is_more else -LEAST_GAIN)
    verdict = judge([TrialRates(trial.before, after)], threshold).verdict
    if verdict is TrialVerdict.MEASURE and not (is_last and len(after) >= FIRST_WINDOWS):
        return None
    is_other = (verdict is TrialVerdict.KEEP) == is_more
    return CpuPoint(trial.millicores / 1000, median(after if is_other else trial.before))
