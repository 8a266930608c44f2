"""Use of GPUs by a user: GPU-seconds by day, and their sum with a weight that halves with every half-life.

A gang counts from its first step until its GPUs are free. While their number stays the same, both sums follow from it
and the time, so a row changes only when a gang makes its first step or gives GPUs up. With g GPUs from time a on, the
decayed sum U grows as dU/dt = g - U / tau, tau = half-life / ln 2 (Slurm's priority plug-in decays the sum in steps
instead).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

DAY_S: Final = 86_400
# Days of which the use is kept, the present one included.
DAYS_KEPT: Final = 92


class UserUsage(Struct, frozen=True, gc=False, omit_defaults=True):
    """A user's GPU-seconds up to `time`, Unix seconds.

    gpus: GPUs that gangs use from then on; of a time-sliced or co-located gang only its part of them.
    decayed_gpu_s: GPU-seconds, each weighted by its age. first_day: the first day of `days`, in days since 1970 (UTC).
    days: GPU-seconds by day.
    """

    user: str
    time: float
    gpus: float = 0.0
    decayed_gpu_s: float = 0.0
    first_day: int = 0
    days: tuple[float, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Return whether nothing of it is left to know."""
        return not (self.gpus or self.days) and self.decayed_gpu_s < _NOTHING_GPU_S


# Decayed GPU-seconds that make no difference any more.
_NOTHING_GPU_S: Final = 1e-3


def used_until(usage: UserUsage, now: float, half_life_s: float) -> UserUsage:
    """Return the use at `now`. A clock that was set back adds nothing."""
    passed_s = now - usage.time
    if passed_s <= 0.0:
        return usage
    days = _with_days(usage, now)
    first = int(now // DAY_S) - DAYS_KEPT + 1
    kept = {day: gpu_s for day, gpu_s in days.items() if day >= first and gpu_s > 0.0}
    first_day, last_day = min(kept, default=0), max(kept, default=-1)
    by_day = tuple([round(kept.get(day, 0.0), 3) for day in range(first_day, last_day + 1)])
    return UserUsage(usage.user, now, usage.gpus, decayed_at(usage, now, half_life_s), first_day, by_day)


def decayed_at(usage: UserUsage, now: float, half_life_s: float) -> float:
    """Return the decayed GPU-seconds at `now`."""
    tau_s = half_life_s / math.log(2.0)
    left = math.exp(-max(0.0, now - usage.time) / tau_s)
    return usage.decayed_gpu_s * left + usage.gpus * tau_s * (1.0 - left)


def mean_gpus(decayed_gpu_s: float, half_life_s: float) -> float:
    """Return the GPUs that were in use on average: those that, in use for ever, have this decayed sum."""
    return decayed_gpu_s * math.log(2.0) / half_life_s


def gpu_s_since(usage: UserUsage, day: int) -> float:
    """Return the GPU-seconds of a day, in days since 1970, and of all days after it, up to the usage's time."""
    return math.fsum(gpu_s for at, gpu_s in enumerate(usage.days, usage.first_day) if at >= day)


def with_gpus(usage: UserUsage, gpus: float, now: float, half_life_s: float) -> UserUsage:
    """Return the use with another number of running GPUs from `now` on."""
    return replace(used_until(usage, now, half_life_s), gpus=gpus)


def _with_days(usage: UserUsage, now: float) -> dict[int, float]:
    days = dict(enumerate(usage.days, usage.first_day))
    for day, seconds in _by_day(usage.time, now) if usage.gpus else ():
        days[day] = days.get(day, 0.0) + usage.gpus * seconds
    return days


def _by_day(begin: float, end: float) -> Iterator[tuple[int, float]]:
    """Yield each day of a time, with its seconds; only the last ones, if they are more than are kept."""
    last = int(end // DAY_S)
    for day in range(max(int(begin // DAY_S), last - DAYS_KEPT + 1), last + 1):
        yield day, min(end, (day + 1.0) * DAY_S) - max(begin, float(day * DAY_S))
