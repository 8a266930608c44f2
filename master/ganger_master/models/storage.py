"""How fast a job's input can be fetched with so much memory to cache it in.

Seconds per unit of work = hit share * seconds from memory + miss share * seconds from storage (Synergy, OSDI 2022,
section 4; its profiler's t(mem) = cache / memory bandwidth + (dataset - cache) / storage bandwidth). A cache that
never evicts, as MinIO (VLDB 2021), makes the hit share cached / dataset. Below its working set a job thrashes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from ganger_master.models.accuracy import NOT_FITTED, FitError, fit_error, is_usable

# A line that misses the point of least memory by more than this did not come from caching: the job thrashes there.
_THRASHING = 0.25
# Knees of the memory axis tried between two measured amounts.
_KNEES = 8


@dataclass(frozen=True, slots=True)
class MemoryPoint:
    """A measurement with cores in plenty: host memory of the job, rate in any unit per second (both > 0)."""

    memory_bytes: float
    rate: float


@dataclass(frozen=True, slots=True)
class FetchModel:
    """Seconds to fetch a unit of work with the dataset in memory and on storage. All cached at `cached_bytes`."""

    hit_seconds: float
    miss_seconds: float
    cached_bytes: float
    working_set_bytes: float = 0.0
    thrashing_rate: float = 0.0
    error: FitError = NOT_FITTED

    def rate(self, memory_bytes: float) -> float:
        """The most units per second that can be fetched; infinite where fetching takes no time."""
        if memory_bytes < self.working_set_bytes:
            return self.thrashing_rate
        hits = 1.0 if self.cached_bytes <= 0.0 else min(1.0, max(0.0, memory_bytes) / self.cached_bytes)
        seconds = hits * self.hit_seconds + (1.0 - hits) * self.miss_seconds
        return float("inf") if seconds <= 0.0 else 1.0 / seconds


def fetch_from_dataset(
    dataset_bytes: float, bytes_per_unit: float, storage_bytes_per_second: float, memory_bytes_per_second: float
) -> FetchModel:
    """The model of a job that states its dataset, on a server that states its bandwidths. All arguments > 0."""
    if not is_usable(dataset_bytes, bytes_per_unit, storage_bytes_per_second, memory_bytes_per_second):
        raise ValueError("dataset, unit and bandwidths must be finite and above zero")
    return FetchModel(
        bytes_per_unit / memory_bytes_per_second, bytes_per_unit / storage_bytes_per_second, dataset_bytes
    )


def fit_fetch(points: Iterable[MemoryPoint]) -> FetchModel | None:
    """The model of least relative error, None without a usable point.

    Points unusable as numbers are left out. One point, or equal rates: memory is taken not to matter from the least
    measured amount on. Rates that fall with memory: the same, with an error that says so. What the least memory shows
    far off the line of the others is kept as thrashing.
    """
    measured = sorted(
        (float(point.memory_bytes), float(point.rate)) for point in points if is_usable(point.memory_bytes, point.rate)
    )
    if not measured:
        return None
    model = _fit(measured)
    amounts = sorted({memory for memory, _ in measured})
    if len(amounts) >= 3 and model.error.worst > _THRASHING:
        rest = [(memory, rate) for memory, rate in measured if memory > amounts[0]]
        calm = _fit(rest)
        lowest = [rate for memory, rate in measured if memory == amounts[0]]
        thrashing = float(sum(lowest) / len(lowest))
        if calm.error.worst < model.error.worst and thrashing < calm.rate(amounts[0]):
            model = replace(calm, working_set_bytes=amounts[1], thrashing_rate=thrashing)
            model = replace(model, error=_error(model, measured))
    return model


def _fit(measured: Sequence[tuple[float, float]]) -> FetchModel:
    memory = np.array([memory for memory, _ in measured])
    rates = np.array([rate for _, rate in measured])
    amounts = np.unique(memory)
    between = [np.linspace(low, high, _KNEES) for low, high in pairwise(amounts.tolist())]
    knees = np.unique(np.concatenate([amounts, *between]))
    found = []
    for knee in knees:
        hits = np.minimum(1.0, memory / knee)
        # a miss costs what a hit costs and something more, so that memory never slows a job down
        rows = np.stack([np.ones_like(hits), 1.0 - hits], axis=1) * rates[:, None]
        # loading it takes longer than a short simulation, which only reads profiles
        from scipy.optimize import nnls

        (hit, more), _ = nnls(rows, np.ones(len(rates)))
        model = FetchModel(float(hit), float(hit + more), float(knee))
        found.append(replace(model, error=_error(model, measured)))
    return min(found, key=lambda model: (round(model.error.mean, 9), model.cached_bytes))


def _error(model: FetchModel, measured: Sequence[tuple[float, float]]) -> FitError:
    return fit_error([model.rate(memory) for memory, _ in measured], [rate for _, rate in measured])
