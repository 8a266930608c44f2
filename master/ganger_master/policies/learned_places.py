"""Where a gang goes by what was measured of gangs like it: beside how many devices in use it is as fast as alone, and
which type of GPU is worth most to it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from statistics import fmean, geometric_mean

from ganger_master.policies.migration_choice import LEAST_GAIN
from ganger_master.policies.trials import DOUBT, FIRST_WINDOWS, TrialRates, normalised


def harmless_load(rates: Mapping[int, tuple[float, ...]]) -> float:
    """Return the devices that others may use on a gang's node before it loses `LEAST_GAIN`; infinite where no harm is
    measured beyond chance. Between two measured loads the loss is taken to grow evenly.

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


def types_by_worth(
    own: Mapping[str, float], others: Iterable[Mapping[str, float]], *, is_scarce: bool
) -> Sequence[str]:
    """Return the measured types of GPU, the one to take first first; none where less than `LEAST_GAIN` is at stake.

    While devices are plenty that is the fastest type. Once they are scarce a type is worth to a program what it gains
    there more than others do, as if types were traded (Chaudhary et al., Gandiva_fair, EuroSys 2020): programs that
    gain little leave the fast types to those that gain much.

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
