"""The jobs of a trace as frozen columns, in the order in which they are submitted.

Nothing here reads files or draws numbers. Times are seconds on the trace's own clock; what a trace does not say is NaN,
or the label "". Durations are what was recorded, and a policy without an oracle may not see them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Labels:
    """One label a job, as codes into names: `names[codes[j]]`. Names ascend and each is used; no label is ""."""

    codes: NDArray[np.int32]
    names: tuple[str, ...]

    @classmethod
    def of(cls, texts: Sequence[str]) -> Self:
        names = sorted(set(texts))
        code = {name: index for index, name in enumerate(names)}
        return cls(_frozen(np.fromiter((code[text] for text in texts), np.int32, len(texts))), tuple(names))

    @classmethod
    def same(cls, text: str, jobs: int) -> Self:
        return cls(_frozen(np.zeros(jobs, np.int32)), (text,) if jobs else ())

    def __len__(self) -> int:
        return len(self.codes)

    def __getitem__(self, job: int) -> str:
        return self.names[int(self.codes[job])]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Labels) and self.names == other.names and bool(np.array_equal(self.codes, other.codes))

    __hash__ = None  # type: ignore[assignment]

    def texts(self) -> list[str]:
        return [self.names[code] for code in self.codes.tolist()]

    def take(self, jobs: Integers) -> Labels:
        used, codes = np.unique(self.codes[jobs], return_inverse=True)
        return Labels(_frozen(codes.astype(np.int32)), tuple(self.names[code] for code in used.tolist()))


@dataclass(frozen=True, eq=False)
class Workload:
    """Columns of one entry a job, ascending by `submit_s`, ties by `id_order`. Arrays are read-only; make one with
    `workload`, derive others by `take` and `with_columns`.

    `gpus` is the gang; an elastic job accepts `min_gpus`..`max_gpus`. `converges_s` is after how much of its work the
    losses of a job say that it has converged (NaN: when it ends), whenever it is stopped. `cpus` and `memory_bytes` are
    of the whole job. `deadline_s` is on the clock of `submit_s`. `gpu_type` may name several types, separated by "|".
    `lines` is where a job stood in its file, 0 if it came from none.
    """

    job_ids: tuple[str, ...]
    submit_s: Floats
    gpus: Integers
    duration_s: Floats
    min_gpus: Integers
    max_gpus: Integers
    converges_s: Floats
    cpus: Floats
    memory_bytes: Floats
    deadline_s: Floats
    priority: Integers
    weight: Floats
    iterations: Floats
    batch_size: Floats
    model: Labels
    tenant: Labels
    user: Labels
    gpu_type: Labels
    lines: Integers

    def __len__(self) -> int:
        return len(self.job_ids)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Workload) and all(
            _same(getattr(self, column.name), getattr(other, column.name)) for column in fields(self)
        )

    __hash__ = None  # type: ignore[assignment]

    @property
    def gpu_seconds(self) -> Floats:
        return self.gpus * self.duration_s

    def take(self, jobs: ArrayLike) -> Workload:
        """The jobs of these positions, or where this mask is true; order of submission is kept."""
        chosen = np.asarray(jobs)
        chosen = np.flatnonzero(chosen) if chosen.dtype == bool else np.sort(chosen.astype(np.int64))
        return Workload(**{column.name: _taken(getattr(self, column.name), chosen) for column in fields(self)})

    def with_columns(self, **columns: Any) -> Workload:
        """A copy with other columns; ValueError if they are not what `workload` would accept, or change the order."""
        given: dict[str, Any] = {
            name: value if isinstance(value, Labels | tuple) else _frozen(np.array(value, getattr(self, name).dtype))
            for name, value in columns.items()
        }
        changed = replace(self, **given)
        _check(changed)
        return changed


def workload(
    job_ids: Iterable[str],
    submit_s: ArrayLike,
    gpus: ArrayLike,
    duration_s: ArrayLike | None = None,
    *,
    numbers: Mapping[str, ArrayLike] | None = None,
    labels: Mapping[str, Sequence[str] | Labels] | None = None,
) -> Workload:
    """A workload from columns in any order; they are sorted by submission, ties by `id_order`.

    `numbers` and `labels` are the other columns by name. ValueError for columns of different lengths, times that are
    negative or not finite, gangs below one GPU, durations not above zero (NaN: unknown), or an id given twice.
    """
    ids = tuple(job_ids)
    jobs = len(ids)
    more = dict(numbers or {})
    texts = dict(labels or {})
    unknown = (set(more) - set(_NUMBERS)) | (set(texts) - set(_LABELS))
    if unknown:
        raise ValueError(f"a workload has no columns {', '.join(sorted(unknown))}")
    more |= {"submit_s": submit_s, "gpus": gpus, "duration_s": np.nan if duration_s is None else duration_s}
    columns: dict[str, Any] = {}
    for name, (kind, default) in _NUMBERS.items():
        value = more.get(name, columns["gpus"] if name in ("min_gpus", "max_gpus") else default)
        columns[name] = np.broadcast_to(np.asarray(value, kind), jobs) if np.ndim(value) == 0 else np.array(value, kind)
    for name in _LABELS:
        given = texts.get(name)
        columns[name] = (
            Labels.same("", jobs) if given is None else given if isinstance(given, Labels) else Labels.of(given)
        )
    for name, column in columns.items():
        if len(column) != jobs:
            raise ValueError(f"{jobs} job ids, but {len(column)} entries of {name}")
    order = submission_order(ids, columns["submit_s"])
    made = Workload(job_ids=_taken(ids, order), **{name: _taken(column, order) for name, column in columns.items()})
    _check(made)
    return made


def submission_order(job_ids: Sequence[str], submit_s: Floats) -> Integers:
    """Positions ascending by time of submission, ties by `id_order`."""
    order = np.argsort(submit_s, kind="stable")
    times = submit_s[order]
    equal = np.flatnonzero(times[1:] == times[:-1])
    # Equal times are rare in most traces: only their runs are sorted by id.
    for run in np.split(equal, np.flatnonzero(np.diff(equal) > 1) + 1) if len(equal) else ():
        first, last = int(run[0]), int(run[-1]) + 2
        order[first:last] = sorted(order[first:last].tolist(), key=lambda job: id_order(job_ids[job]))
    return order


def id_order(job_id: str) -> tuple[bool, int, str]:
    """Sorts whole numbers as numbers, before everything else as text: "9", "10", "a"."""
    return (False, int(job_id), job_id) if job_id.isascii() and job_id.isdigit() else (True, 0, job_id)


_NUMBERS: Mapping[str, tuple[type[np.generic], float]] = {
    "submit_s": (np.float64, 0.0),
    "gpus": (np.int64, 1),
    "duration_s": (np.float64, np.nan),
    "min_gpus": (np.int64, 1),
    "max_gpus": (np.int64, 1),
    "converges_s": (np.float64, np.nan),
    "cpus": (np.float64, np.nan),
    "memory_bytes": (np.float64, np.nan),
    "deadline_s": (np.float64, np.nan),
    "priority": (np.int64, 0),
    "weight": (np.float64, 1.0),
    "iterations": (np.float64, np.nan),
    "batch_size": (np.float64, np.nan),
    "lines": (np.int64, 0),
}
_LABELS = ("model", "tenant", "user", "gpu_type")


def _check(made: Workload) -> None:
    jobs = len(made.job_ids)
    for column in fields(made):
        if len(getattr(made, column.name)) != jobs:
            raise ValueError(f"{jobs} job ids, but {len(getattr(made, column.name))} entries of {column.name}")
    if len(set(made.job_ids)) != jobs:
        raise ValueError("a job id is given twice")
    if not (np.isfinite(made.submit_s).all() and (made.submit_s >= 0).all()):
        raise ValueError("times of submission must be finite and not negative")
    if (np.diff(made.submit_s) < 0).any():
        raise ValueError("jobs must stay in the order of their submission")
    if (made.min_gpus < 1).any() or (made.gpus < made.min_gpus).any() or (made.max_gpus < made.gpus).any():
        raise ValueError("gangs must have at least one GPU, and lie between min_gpus and max_gpus")
    if (made.duration_s <= 0).any() or np.isinf(made.duration_s).any():
        raise ValueError("durations must be above zero, or NaN where unknown")
    if (made.converges_s <= 0).any() or np.isinf(made.converges_s).any():
        raise ValueError("work until a loss has converged must be above zero, or NaN where it ends with the job")


def _taken(column: Any, jobs: Integers) -> Any:
    if isinstance(column, tuple):
        return tuple(map(column.__getitem__, jobs.tolist()))
    return column.take(jobs) if isinstance(column, Labels) else _frozen(column[jobs])


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray):
        return bool(np.array_equal(one, other, equal_nan=one.dtype.kind == "f"))
    return bool(one == other)


def _frozen(array: NDArray[Any]) -> NDArray[Any]:
    array.flags.writeable = False
    return array


def offered_load(jobs: Workload, gpus: int) -> float:
    """GPU-seconds submitted by GPU-seconds there are between first and last submission: above 1, queues only grow.
    Infinite for jobs submitted at once. ValueError without GPUs, without jobs or with unknown durations."""
    if gpus < 1:
        raise ValueError("a cluster without GPUs has no load")
    if not len(jobs) or np.isnan(jobs.duration_s).any():
        raise ValueError("load needs jobs with known durations")
    span = float(jobs.submit_s[-1] - jobs.submit_s[0])
    return float(jobs.gpu_seconds.sum()) / (span * gpus) if span > 0 else math.inf


def percentile(values: Floats | Integers | Sequence[float], percent: float) -> float:
    """The smallest value that more than `percent` % of the values do not exceed, the largest for 100; NaN of no values.
    An observed value always, none in between; where nearest-rank, for which `percent` % are enough, falls on a whole
    number of values, this is the next one."""
    count = len(values)
    if not count:
        return math.nan
    # In millionths of a percent, so that the rank of 99.9 % of 1,000 is what it is in decimals.
    rank = min(count * round(percent * 1e6) // 100_000_000, count - 1)
    return float(np.partition(np.asarray(values), rank)[rank])


def size_class(gpus: int) -> str:
    """Gangs in powers of two: "1", "2", "3-4", "5-8", "9-16", ..."""
    if gpus <= 2:
        return str(gpus)
    top = 1 << (gpus - 1).bit_length()
    return f"{top // 2 + 1}-{top}"


def size_names(gpus: Integers) -> list[str]:
    """The size classes that occur, smallest first."""
    return list(dict.fromkeys(size_class(size) for size in sorted(set(gpus.tolist()))))
