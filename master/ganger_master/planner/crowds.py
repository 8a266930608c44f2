"""How fast jobs go by how much of their nodes is in use by others: what cores, links and memory of a host that several
share take from each of them.

Of each job rates are kept in windows for every number of devices that others had in use on its nodes meanwhile. Nobody
is asked to change anything for it: jobs come and go by themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, TypeAlias

from ganger_master.planner.windows import ProgressSample, RateWindows

# Windows at one load that count, and loads of a job.
_MOST_WINDOWS: Final = 16
_MOST_LOADS: Final = 16

# Node and number of a device.
Place: TypeAlias = frozenset[tuple[str, int]]
Rates: TypeAlias = Mapping[int, tuple[float, ...]]
# Millicores and devices of a job; None: it does not run.
Like: TypeAlias = tuple[int, int] | None


@dataclass(frozen=True, slots=True)
class _Job:
    """`like`: what its rates hang on beside the load; others make them void. `since_s`: from when on reports count."""

    place: Place
    like: Like
    load: int = 0
    since_s: float = 0.0
    windows: RateWindows = field(default_factory=RateWindows)
    rates: Rates = field(default_factory=dict)


Remembered: TypeAlias = Mapping[int, _Job]


class Crowds:
    """By job number. `settle_s`: until caches and loaders have followed a change; a window is at least `window_s` long
    and `window_steps` steps."""

    def __init__(self, settle_s: float, window_s: float, window_steps: int) -> None:
        self._settle_s, self._window_s, self._window_steps = settle_s, window_s, window_steps
        self._jobs: dict[int, _Job] = {}
        self._on: dict[str, dict[int, int]] = {}

    def put(self, number: int, place: Place, like: Like, since_s: float, now: float) -> None:
        """A job runs there, measured from then on; nowhere: it does not run."""
        old = self._jobs.get(number, _Job(frozenset(), like))
        rates = old.rates if old.like == like else {}
        self._jobs[number] = _Job(place, like, -1, since_s, rates=rates)
        touched = {node for node, _ in old.place | place}
        for node in touched:
            on = self._on.setdefault(node, {})
            count = sum(one == node for one, _ in place)
            if count:
                on[number] = count
            else:
                on.pop(number, None)
            if not on:
                del self._on[node]
        self._look_around({number} | {other for node in touched for other in self._on.get(node, ())}, now)

    def forget(self, number: int, now: float) -> None:
        if number in self._jobs:
            self.put(number, frozenset(), None, now, now)
            del self._jobs[number]

    def record(self, number: int, look: ProgressSample, now: float) -> None:
        """A report of progress of a job that has its devices to itself."""
        job = self._jobs.get(number)
        if job is None or not job.place or now < job.since_s:
            return
        windows = job.windows.after(look, self._window_s, self._window_steps)
        if windows.rates is not job.windows.rates:
            seen = (*job.rates.get(job.load, ()), windows.rates[-1])[-_MOST_WINDOWS:]
            rates = {load: some for load, some in job.rates.items() if load != job.load}
            if len(rates) >= _MOST_LOADS:
                # The one that was met longest ago.
                del rates[next(iter(rates))]
            job = replace(job, rates={**rates, job.load: seen})
        self._jobs[number] = replace(job, windows=windows)

    def load(self, number: int) -> int:
        """Devices that others have in use on its nodes."""
        job = self._jobs.get(number)
        return 0 if job is None else max(0, job.load)

    def rates(self, number: int) -> Rates:
        """Steps a second, window by window, by load."""
        job = self._jobs.get(number)
        return {} if job is None else job.rates

    @property
    def remembered(self) -> Remembered:
        """For one that goes on from there."""
        return self._jobs

    def recall(self, remembered: Remembered) -> None:
        """What one before this remembered."""
        self._jobs, self._on = dict(remembered), {}
        for number, job in self._jobs.items():
            for node, _ in job.place:
                on = self._on.setdefault(node, {})
                on[number] = on.get(number, 0) + 1

    def _look_around(self, numbers: Iterable[int], now: float) -> None:
        for number in numbers:
            job = self._jobs[number]
            nodes = {node for node, _ in job.place}
            load = sum(count for node in nodes for other, count in self._on[node].items() if other != number)
            if load != job.load:
                since_s = max(job.since_s, now + self._settle_s)
                self._jobs[number] = replace(job, load=load, since_s=since_s, windows=RateWindows())
