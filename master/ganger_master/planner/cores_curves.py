"""What was measured of jobs with several numbers of cores, as the planner reports it to the master with its plans.

It is for users: the master decides nothing from it (`cores_explanation`).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from msgspec import structs

from ganger_master.core.commands import PROMISES_LIMIT
from ganger_master.core.plan_changes import CURVE_POINTS, CoresCurve, CurvePoint
from ganger_master.estimators.cpu import sweet_point_bounds
from ganger_master.planner.core_profiles import CoreProfile, ProfiledCores
from ganger_master.policies.tunings import ENOUGH


def curve_of(number: int, cores: ProfiledCores) -> CoresCurve:
    """Return the curve of a job in its present phase, with those of its other phases."""
    others = [_curve(number, phase, profile) for phase, profile in sorted(cores.others.items()) if profile.points]
    return structs.replace(
        _curve(number, cores.phase, cores.profile),
        trial_millicores=0 if cores.trial is None else cores.trial.millicores,
        tried_s=cores.tried_s,
        lost_s=cores.lost_s,
        others=tuple(others),
    )


def _curve(number: int, phase: str, profile: CoreProfile) -> CoresCurve:
    own = {point.cores for point in profile.own}
    points = sorted(profile.points, key=lambda point: point.cores)[:CURVE_POINTS]
    shown = tuple([CurvePoint(point.cores, point.rate, point.cores not in own) for point in points])
    model = profile.model
    if model is None:
        return CoresCurve(number, shown, phase=phase)
    low, high = sweet_point_bounds(profile.points)
    most = max(points[-1].cores, model.knee)
    # Cores are given whole.
    whole = np.arange(1.0, max(2.0, math.ceil(most)) + 1.0)
    rates = model.rates(whole)
    enough = float(whole[int(np.argmax(rates >= ENOUGH * rates.max()))])
    grid = np.unique(np.round(np.linspace(1.0, whole[-1], CURVE_POINTS)))
    return CoresCurve(
        number,
        shown,
        tuple([CurvePoint(count, model.rate(count)) for count in grid.tolist()]),
        model.sweet_point,
        low,
        0.0 if math.isinf(high) else high,
        model.error.worst,
        round(1000 * enough),
        phase=phase,
    )


class CurveNews:
    """The jobs whose measurements the planner has not reported since they changed."""

    def __init__(self) -> None:
        self._numbers: dict[int, None] = {}

    def note(self, number: int) -> None:
        """Note that the measurements of a job have changed."""
        self._numbers[number] = None

    def taken(self, cores_of: Callable[[int], ProfiledCores | None]) -> tuple[CoresCurve, ...]:
        """Return the curves to report now, as many as fit into a plan, and note that they are. `cores_of`: of a live
        job by number."""
        numbers = list(self._numbers)[:PROMISES_LIMIT]
        for number in numbers:
            del self._numbers[number]
        known = [(number, cores) for number in numbers if (cores := cores_of(number)) is not None]
        return tuple([curve_of(number, cores) for number, cores in known if cores.profile.points or cores.others])
