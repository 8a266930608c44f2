"""Placement preferences from measured rates: the load of a node up to which a gang keeps its rate, and the GPU type
with the largest gain.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from statistics import fmean, geometric_mean

from ganger_master.policies.migration_choice import LEAST_GAIN
from ganger_master.policies.trials import DOUBT, FIRST_WINDOWS, TrialRates, normalised


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
