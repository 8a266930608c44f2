"""The jobs of a trace as frozen columns, in the order in which they are submitted; how they are made into others; and
published profiles of models (sensitivity to cores and memory, speed by GPU type), with random models for traces
without any.

Times are seconds on the trace's own clock; what a trace does not say is NaN, or the label "". Durations are what was
recorded, and a policy without an oracle may not see them.

A workload may be drawn as Synergy's is (Mohan et al., OSDI 2022, section 5) and its public simulator (runner.py,
utils.get_gavel_like_iter): Poisson arrivals; durations of 10^U(1.5, 3) minutes for four jobs in five and 10^U(3, 4)
for the fifth; gangs of 1, 2, 4 and 8 GPUs in 70, 10, 15 and 5 % of jobs, or of one GPU only.

The figures of models are Synergy's (OSDI 2022), Gavel's (OSDI 2020) and ElasticFlow's (ASPLOS 2023), from their
public code; see ATTRIBUTION.md beside them.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import Enum
from functools import cache
from importlib import resources
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ganger_master.estimators.cores_and_memory import SensitivityMatrix

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
# Three thousand years; today in milliseconds is more.
MOST_S = 1e11


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
    losses of a job say that it has converged (NaN: when it ends), whenever it is stopped. `epoch_s` is the work of an
    epoch of a job that plans stop at ends of its epochs only (NaN: between any two steps). `cpus`, `memory_bytes`,
    `disk_mb_per_s` and `net_mb_per_s` are of the whole job. `deadline_s` is on the clock of `submit_s`. `gpu_type` may
    name several types, separated by "|". `lines` is where a job stood in its file, 0 if it came from none.
    """

    job_ids: tuple[str, ...]
    submit_s: Floats
    gpus: Integers
    duration_s: Floats
    min_gpus: Integers
    max_gpus: Integers
    converges_s: Floats
    epoch_s: Floats
    cpus: Floats
    memory_bytes: Floats
    disk_mb_per_s: Floats
    net_mb_per_s: Floats
    deadline_s: Floats
    priority: Integers
    weight: Floats
    iterations: Floats
    batch_size: Floats
    model: Labels
    tenant: Labels
    user: Labels
    gpu_type: Labels
    partition: Labels
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
    "epoch_s": (np.float64, np.nan),
    "cpus": (np.float64, np.nan),
    "memory_bytes": (np.float64, np.nan),
    "disk_mb_per_s": (np.float64, np.nan),
    "net_mb_per_s": (np.float64, np.nan),
    "deadline_s": (np.float64, np.nan),
    "priority": (np.int64, 0),
    "weight": (np.float64, 1.0),
    "iterations": (np.float64, np.nan),
    "batch_size": (np.float64, np.nan),
    "lines": (np.int64, 0),
}
_LABELS = ("model", "tenant", "user", "gpu_type", "partition")


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
    if (made.epoch_s <= 0).any() or np.isinf(made.epoch_s).any():
        raise ValueError("the work of an epoch must be above zero, or NaN for a job that is stopped at any step")


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


MULTI_GPU: Mapping[int, float] = {1: 0.70, 2: 0.10, 4: 0.15, 8: 0.05}
SINGLE_GPU: Mapping[int, float] = {1: 1.0}
_LONG_SHARE = 0.2
_SHORT_EXPONENTS = (1.5, 3.0)
_LONG_EXPONENTS = (3.0, 4.0)


def synthetic(jobs: int, jobs_per_hour: float, seed: int, gangs: Mapping[int, float] = MULTI_GPU) -> Workload:
    """Return random jobs, the first at time 0, numbered from 0 in order of arrival. The same seed gives the same jobs,
    and the first of a longer workload are those of a shorter one. `gangs`: share of jobs by GPUs. Raises ValueError for
    a rate or shares that are not above zero, or a negative number of jobs."""
    if jobs < 0 or not 0 < jobs_per_hour < np.inf:
        raise ValueError(f"{jobs} jobs at {jobs_per_hour} an hour are no workload")
    shares = np.array(list(gangs.values()), float)
    if not (len(shares) and (shares > 0).all()):
        raise ValueError("gangs need shares above zero")
    # One stream for each quantity, so that a longer workload begins as a shorter one does.
    arrivals, lengths, sizes = (np.random.default_rng(stream) for stream in np.random.SeedSequence(seed).spawn(3))
    between = arrivals.exponential(3600.0 / jobs_per_hour, jobs)
    between[:1] = 0.0
    draws = lengths.random((jobs, 2))
    long = draws[:, 0] < _LONG_SHARE
    low, high = (
        np.where(long, of_long, of_short) for of_short, of_long in zip(_SHORT_EXPONENTS, _LONG_EXPONENTS, strict=True)
    )
    minutes = 10.0 ** (low + (high - low) * draws[:, 1])
    size = np.searchsorted(np.cumsum(shares / shares.sum()), sizes.random(jobs), side="right")
    gpus = np.array(list(gangs), np.int64)[np.minimum(size, len(shares) - 1)]
    return workload(map(str, range(jobs)), np.cumsum(between), gpus, minutes * 60.0)


def scaled_to_load(jobs: Workload, gpus: int, load: float) -> Workload:
    """Return the same jobs, submitted closer together or further apart, so that they offer `load` to `gpus` GPUs.

    Times between submissions are multiplied by one factor; gangs, durations and the time each job has until its
    deadline stay. The first submission keeps its time. ValueError where there is nothing to scale: a load not above
    zero, no GPUs, unknown durations, all jobs submitted at once, a load so low that no calendar holds the trace.
    """
    if not (load > 0 and np.isfinite(load)):
        raise ValueError(f"a load of {load} cannot be offered: give a number above zero")
    now = offered_load(jobs, gpus)
    if not np.isfinite(now):
        raise ValueError("jobs that are all submitted at once offer no load that could be scaled")
    first, last, stretch = float(jobs.submit_s[0]), float(jobs.submit_s[-1]), now / load
    if first + (last - first) * stretch > MOST_S:
        raise ValueError(f"a load of {load:g} cannot be offered: the trace would take thousands of years")
    submit = first + (jobs.submit_s - first) * stretch
    return jobs.with_columns(submit_s=submit, deadline_s=submit + (jobs.deadline_s - jobs.submit_s))


def with_loads(jobs: Workload, gpus: int, phases: Sequence[tuple[float, float]]) -> Workload:
    """Return the trace stretched and squeezed so that it offers one load after another: `phases` are (seconds, load).

    The trace's clock runs load / (load of the whole trace) times as fast in each phase, so bursts stay bursts; jobs
    beyond the last phase are left out, and the time until deadlines stays. ValueError for phases that are not longer
    than zero or whose load is not above it, and for a trace too short to fill them.
    """
    if not phases or any(not (0 < seconds < np.inf and 0 < load < np.inf) for seconds, load in phases):
        raise ValueError(f"phases {list(phases)} are not all (seconds, load) above zero")
    whole = offered_load(jobs, gpus)
    ends = np.cumsum([seconds for seconds, _ in phases])
    taken = np.cumsum([seconds * load / whole for seconds, load in phases])
    first, last = float(jobs.submit_s[0]), float(jobs.submit_s[-1])
    if taken[-1] > last - first:
        raise ValueError(f"the trace spans {last - first:,.0f} s; these loads would need {taken[-1]:,.0f} s of it")
    part = window(jobs, first, first + float(taken[-1]))
    submit = first + np.interp(part.submit_s - first, np.append(0.0, taken), np.append(0.0, ends))
    return part.with_columns(submit_s=submit, deadline_s=submit + (part.deadline_s - part.submit_s))


def window(jobs: Workload, first_s: float, end_s: float) -> Workload:
    """Return the jobs submitted from `first_s` to before `end_s`, on the trace's clock, at the times they had."""
    return jobs.take((jobs.submit_s >= first_s) & (jobs.submit_s < end_s))


def sample(jobs: Workload, count: int, seed: int) -> Workload:
    """Return `count` of the jobs, each equally likely, at the times they had: the load falls with them. ValueError for
    a negative count or more than there are."""
    if not 0 <= count <= len(jobs):
        raise ValueError(f"cannot sample {count:,} of {len(jobs):,} jobs")
    return jobs.take(np.random.default_rng(seed).choice(len(jobs), count, replace=False))


def with_durations(jobs: Workload, duration_s: Floats) -> Workload:
    """Return the jobs with run times for those that have none; recorded ones stay."""
    return jobs.with_columns(duration_s=np.where(np.isnan(jobs.duration_s), duration_s, jobs.duration_s))


def with_sizes(jobs: Workload, times: float, most: int) -> Workload:
    """Make jobs of one size elastic, from one GPU to `times` theirs, but no more than `most` unless they request more.
    Jobs that are elastic already stay."""
    is_fixed = jobs.min_gpus == jobs.max_gpus
    largest = np.maximum(jobs.gpus, np.minimum((jobs.gpus * times).astype(np.int64), most))
    return jobs.with_columns(
        min_gpus=np.where(is_fixed, 1, jobs.min_gpus), max_gpus=np.where(is_fixed, largest, jobs.max_gpus)
    )


class ModelClass(Enum):
    """The field of a model: profiles of one class are similar."""

    IMAGE = "image"
    LANGUAGE = "language"
    SPEECH = "speech"
    RECOMMENDATION = "recommendation"


@dataclass(frozen=True)
class ModelProfile:
    """A model on one V100. `matrix` holds its rate by cores and memory for each GPU, against what it makes with its
    share of a server (3 cores, 62.5 GB), where a step takes `step_s` seconds."""

    model: str
    model_class: ModelClass
    batch_size: int
    step_s: float
    matrix: SensitivityMatrix


@cache
def synergy_profiles() -> Mapping[str, ModelProfile]:
    """Ten models by name, in the order image, language, speech."""
    rows: dict[str, list[dict[str, str]]] = {}
    for row in _rows("profiles_synergy.csv"):
        rows.setdefault(row["model"], []).append(row)
    return {model: _profile(model, of_model) for model, of_model in rows.items()}


@cache
def gavel_speeds() -> Mapping[tuple[str, bool, str, int], float]:
    """Steps a second by (GPU type, whether the GPUs are in one server, model, GPUs); 0 where a model does not fit."""
    return {
        (row["gpu_type"], row["placement"] == "together", row["model"], int(row["gpus"])): float(row["steps_per_s"])
        for row in _rows("speeds_gavel.csv")
    }


@cache
def elasticflow_speeds() -> Mapping[str, Mapping[int, Mapping[int, float]]]:
    """Steps a second by model, samples in a step of the whole job, and number of GPUs (A100, eight in a server)."""
    found: dict[str, dict[int, dict[int, float]]] = {}
    for row in _rows("speeds_elasticflow.csv"):
        of_batch = found.setdefault(row["model"], {}).setdefault(int(row["global_batch_size"]), {})
        of_batch[int(row["gpus"])] = float(row["steps_per_s"])
    return found


def with_models(jobs: Workload, seed: int) -> Workload:
    """Models for the jobs that name none, each equally likely; the others keep theirs."""
    names, texts = list(synergy_profiles()), jobs.model.texts()
    unnamed = [job for job, text in enumerate(texts) if not text]
    for job, index in zip(unnamed, np.random.default_rng(seed).integers(len(names), size=len(unnamed)), strict=True):
        texts[job] = names[index]
    return jobs.with_columns(model=Labels.of(texts))


def with_iterations(jobs: Workload) -> Workload:
    """Iterations where a trace gives run time and a profiled model, but not how many: run time by time of a step."""
    known = synergy_profiles()
    step_s = np.array([known[name].step_s if name in known else np.nan for name in jobs.model.names])
    from_time = jobs.duration_s / step_s[jobs.model.codes] if len(jobs) else jobs.duration_s
    return jobs.with_columns(iterations=np.where(np.isnan(jobs.iterations), from_time, jobs.iterations))


def _profile(model: str, rows: Sequence[Mapping[str, str]]) -> ModelProfile:
    cores = tuple(sorted({float(row["cores_per_gpu"]) for row in rows}))
    memory = tuple(sorted({float(row["memory_gb_per_gpu"]) for row in rows}))
    rates = {(float(row["cores_per_gpu"]), float(row["memory_gb_per_gpu"])): float(row["rate"]) for row in rows}
    first = rows[0]
    return ModelProfile(
        model,
        ModelClass(first["class"]),
        int(first["batch_size"]),
        float(first["step_s"]),
        SensitivityMatrix(
            cores,
            tuple(gigabytes * 1e9 for gigabytes in memory),
            tuple(tuple(rates[count, gigabytes] for gigabytes in memory) for count in cores),
        ),
    )


def _rows(name: str) -> list[dict[str, str]]:
    text = resources.files("ganger_master.simulator.traces").joinpath(name).read_text(encoding="utf-8")
    return list(csv.DictReader(text.splitlines()))
