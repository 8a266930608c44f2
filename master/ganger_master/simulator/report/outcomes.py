"""Outcomes of a run's jobs as frozen columns, quantities over simulated time, and what a replay records of both."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Self

import numpy as np
from ganger.cluster.feasibility import MOST_KINDS, GangMix, fragmented_gpus
from numpy.typing import ArrayLike

from ganger_master.core.gang_model import Gang, GangIntent, GangPhase
from ganger_master.core.state import State
from ganger_master.simulator.traces.workload import Floats, Integers, Workload

# Steps kept of a quantity: more than a plot can show, whatever the length of the run.
MOST_STEPS = 8_192


@dataclass(frozen=True, eq=False)
class StepSeries:
    """`values[i]` holds from `times[i]` to before `times[i + 1]`, the last one to `end`. Times ascend strictly.

    Seconds of simulated time; the unit of the values is the quantity's.
    """

    times: Floats
    values: Floats
    end: float

    @classmethod
    def of(cls, times: ArrayLike, values: ArrayLike, end: float) -> Self:
        """Make a series. Raises ValueError for no step, times that do not ascend, or an end before the last of them."""
        made = cls(np.array(times, float), np.array(values, float), float(end))
        if not len(made.times) or made.times.shape != made.values.shape:
            raise ValueError("a series needs as many values as times, and at least one")
        if (np.diff(made.times) <= 0).any() or made.end < made.times[-1]:
            raise ValueError("the times of a series must ascend, up to its end")
        made.times.flags.writeable = made.values.flags.writeable = False
        return made

    @property
    def start(self) -> float:
        return float(self.times[0])

    def at(self, when: ArrayLike) -> Floats:
        """Return the values at these times; NaN outside the series."""
        moments = np.asarray(when, float)
        step = np.searchsorted(self.times, moments, side="right") - 1
        inside = (step >= 0) & (moments <= self.end)
        return np.where(inside, self.values[np.maximum(step, 0)], np.nan)

    def integral_to(self, when: ArrayLike) -> Floats:
        """Return value x seconds from the start to each of these times, which must lie within the series."""
        moments = np.asarray(when, float)
        widths = np.diff(self.times)
        before = np.concatenate(([0.0], np.cumsum(widths * self.values[:-1])))
        step = np.clip(np.searchsorted(self.times, moments, side="right") - 1, 0, None)
        return np.asarray(before[step] + (moments - self.times[step]) * self.values[step])

    def mean(self, first: float | None = None, last: float | None = None) -> float:
        """Return the time-weighted mean over the series or from `first` to `last`; NaN if that has no length."""
        begin = self.start if first is None else max(first, self.start)
        end = self.end if last is None else min(last, self.end)
        if not end > begin:
            return float("nan")
        low, high = self.integral_to([begin, end])
        return float(high - low) / (end - begin)

    def thinned(self, most_steps: int = MOST_STEPS) -> StepSeries:
        """Return at most so many steps: neighbours are merged into their time-weighted mean, so that the mean over the
        whole stays exact."""
        series = self
        while len(series.times) > max(1, most_steps):
            series = series._halved()
        return series

    def _halved(self) -> StepSeries:
        widths = np.diff(np.append(self.times, self.end))
        firsts = np.arange(0, len(self.times), 2)
        width = np.add.reduceat(widths, firsts)
        area = np.add.reduceat(widths * self.values, firsts)
        # The last step may have no width yet: its value stands as it is.
        values = np.divide(area, width, out=self.values[firsts].copy(), where=width > 0)
        return StepSeries.of(self.times[firsts], values, self.end)


class SeriesRecorder:
    """Collects a series while time continues; what it holds does not grow with the run."""

    def __init__(self, start: float, value: float = 0.0, most_steps: int = MOST_STEPS) -> None:
        self._times = [start]
        self._values = [value]
        self._most_steps = max(2, most_steps)

    def record(self, now: float, value: float) -> None:
        """Record the value of the quantity from now on; of several at one instant the last counts."""
        assert now >= self._times[-1], f"time went back from {self._times[-1]} to {now}"
        if value == self._values[-1]:
            return
        if now == self._times[-1]:
            self._values[-1] = value
            return
        self._times.append(now)
        self._values.append(value)
        if len(self._times) > 2 * self._most_steps:
            # The newest step is still open: it must not be merged into the past.
            past = StepSeries.of(self._times[:-1], self._values[:-1], now).thinned(self._most_steps)
            self._times = [*past.times.tolist(), now]
            self._values = [*past.values.tolist(), value]

    def series(self, end: float) -> StepSeries:
        return StepSeries.of(self._times, self._values, end)


# Sums of floating-point seconds may be off by this share.
_ROUNDING = 1e-6


@dataclass(frozen=True, eq=False)
class Outcomes:
    """One entry a job, in the order of the workload. Seconds are simulated; NaN in `first_start_s` and `end_s` is what
    has not happened.

    `service_s`: seconds in which the job held its gang, of which `overhead_s` went into starting, stopping, saving and
    moving. `gpu_seconds` and `core_seconds`: what it held, summed over time (NaN: not recorded). `duration_s`: what it
    needs alone with its gang (NaN: unknown); `deadline_s`: by when (NaN: none).
    """

    job_ids: tuple[str, ...]
    submit_s: Floats
    gpus: Integers
    duration_s: Floats
    deadline_s: Floats
    first_start_s: Floats
    end_s: Floats
    service_s: Floats
    overhead_s: Floats
    gpu_seconds: Floats
    core_seconds: Floats
    preemptions: Integers
    migrations: Integers
    resizes: Integers

    def __len__(self) -> int:
        return len(self.job_ids)

    @property
    def jct_s(self) -> Floats:
        """Seconds from submission to end; NaN for jobs that have not ended."""
        return self.end_s - self.submit_s

    @property
    def start_delay_s(self) -> Floats:
        """Seconds from submission to the first start; NaN for jobs that never started."""
        return self.first_start_s - self.submit_s

    @property
    def waiting_s(self) -> Floats:
        """Seconds from submission to end in which the job held no gang; NaN for jobs that have not ended."""
        return np.maximum(self.jct_s - self.service_s, 0.0)

    @property
    def finished(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        return ~np.isnan(self.end_s)

    def take(self, jobs: ArrayLike) -> Outcomes:
        """Return the jobs where this mask is true."""
        chosen = np.flatnonzero(np.asarray(jobs, bool))
        ids = tuple(map(self.job_ids.__getitem__, chosen.tolist()))
        columns = {column.name: getattr(self, column.name)[chosen] for column in fields(self)[1:]}
        return Outcomes(ids, **columns)


def outcomes(
    jobs: Workload,
    first_start_s: ArrayLike,
    end_s: ArrayLike,
    service_s: ArrayLike,
    *,
    overhead_s: ArrayLike = 0.0,
    gpu_seconds: ArrayLike | None = None,
    core_seconds: ArrayLike = np.nan,
    preemptions: ArrayLike = 0,
    migrations: ArrayLike = 0,
    resizes: ArrayLike = 0,
) -> Outcomes:
    """Make the outcomes of these jobs. Without `gpu_seconds` a job held its whole gang for all its service.

    What cannot have happened is our mistake and asserted: a start before submission, an end before a start, more
    overhead than service, more service than time between start and end.
    """
    service = _column(service_s, len(jobs), np.float64)
    made = Outcomes(
        jobs.job_ids,
        jobs.submit_s,
        jobs.gpus,
        jobs.duration_s,
        jobs.deadline_s,
        _column(first_start_s, len(jobs), np.float64),
        _column(end_s, len(jobs), np.float64),
        service,
        _column(overhead_s, len(jobs), np.float64),
        _column(jobs.gpus * service if gpu_seconds is None else gpu_seconds, len(jobs), np.float64),
        _column(core_seconds, len(jobs), np.float64),
        _column(preemptions, len(jobs), np.int64),
        _column(migrations, len(jobs), np.int64),
        _column(resizes, len(jobs), np.int64),
    )
    slack = _ROUNDING * (1.0 + np.nan_to_num(made.jct_s))
    assert not (made.start_delay_s < -slack).any(), "a job started before it was submitted"
    assert not (np.isnan(made.first_start_s) & made.finished).any(), "a job ended that never started"
    assert not (made.end_s < made.first_start_s - slack).any(), "a job ended before it started"
    assert not (made.service_s < made.overhead_s - slack).any(), "a job paid more overhead than it was served"
    assert not (made.service_s > made.end_s - made.first_start_s + slack).any(), "a job was served longer than it ran"
    return made


@dataclass(frozen=True)
class Run:
    """A run of one policy on one trace and cluster, from `start_s` to `end_s` of simulated time.

    `series` by name: "used_gpus", "used_cores", "fragmented_gpus", "waiting_jobs", each where it was recorded.
    `wall_s`, `cpu_s` and `peak_memory_bytes` are of the simulator itself.
    """

    policy: str
    outcomes: Outcomes
    gpus: int
    cores: float
    start_s: float
    end_s: float
    series: Mapping[str, StepSeries] = field(default_factory=dict)
    # Jobs shared GPUs: what each held adds up to more than was in use.
    shares: bool = False
    seed: int = 0
    offered_load: float = float("nan")
    wall_s: float = float("nan")
    cpu_s: float = float("nan")
    peak_memory_bytes: int = 0
    events: int = 0


def _column(values: ArrayLike, jobs: int, kind: type[Any]) -> Any:
    column = np.array(np.broadcast_to(np.asarray(values, kind), (jobs,)))
    column.flags.writeable = False
    return column


def demand_of(jobs: Workload, device_types: tuple[str, ...]) -> GangMix:
    """Return the 128 most frequent kinds of gangs in a workload. Raises ValueError if there is none."""
    if not len(jobs):
        raise ValueError("the workload has no jobs")
    per_gpu = np.column_stack(
        (
            jobs.gpus,
            np.nan_to_num(jobs.cpus) * 1000 / jobs.gpus,
            np.nan_to_num(jobs.memory_bytes) / jobs.gpus,
            jobs.gpu_type.codes,
        )
    )
    kinds, counts = np.unique(per_gpu, axis=0, return_counts=True)
    frequent = np.argsort(-counts, kind="stable")[:MOST_KINDS]
    kinds, counts = kinds[frequent], counts[frequent]
    accepted = [jobs.gpu_type.names[int(code)] for code in kinds[:, 3]]
    accepts = [[not wish or kind in wish.split("|") for kind in device_types] for wish in accepted]
    return GangMix(
        kinds[:, 0].astype(np.int64),
        kinds[:, 1],
        kinds[:, 2],
        np.array(accepts, bool).reshape(len(kinds), len(device_types)),
        counts / counts.sum(),
        device_types,
    )


class Ledger:
    """Outcomes of jobs by position in the workload. Times are on the workload's clock."""

    def __init__(self, jobs: Workload) -> None:
        count = len(jobs)
        self._jobs = jobs
        # Plain arrays: writing single elements of NumPy arrays takes several times as long.
        nothing, never = array("d", bytes(8 * count)), array("d", [math.nan]) * count
        self._first_start, self._end, self._trains_since = never[:], never[:], never[:]
        self._service, self._trained = nothing[:], nothing[:]
        self._gpu_seconds, self._core_seconds = nothing[:], nothing[:]
        self._preemptions, self._migrations, self._resizes = (array("q", bytes(8 * count)) for _ in range(3))
        self.ended = 0

    def trains(self, job: int, held_since: float, now: float) -> None:
        """Record that its gang, which holds devices since `held_since`, has done its first step."""
        self.starts(job, held_since)
        self._trains_since[job] = now

    def halts(self, job: int, now: float) -> None:
        """Record that it stops training, though it may still hold devices. Idempotent."""
        if not math.isnan(self._trains_since[job]):
            self._trained[job] += now - self._trains_since[job]
            self._trains_since[job] = math.nan

    def leaves(self, job: int, gang: Gang, held_since: float, now: float, finished: bool) -> None:
        """Record that it released its devices, after `halts`."""
        self._hold(job, gang, now - held_since)
        if finished:
            self._end[job] = now
            self.ended += 1
        elif gang.intent is not GangIntent.HAND_OVER and gang.phase is not GangPhase.RESIZING:
            self._preemptions[job] += 1

    def starts(self, job: int, held_since: float) -> None:
        """Record that its first slice has begun at `held_since`."""
        if math.isnan(self._first_start[job]):
            self._first_start[job] = held_since

    def sliced(self, job: int, gang: Gang, held_s: float, trained_s: float, stops: int) -> None:
        """Record slices: seconds for which it held devices and for which it trained, and how often it was parked."""
        self._hold(job, gang, held_s)
        self._trained[job] += trained_s
        self._preemptions[job] += stops

    def received_s(self, job: int, now: float) -> float:
        """Return the seconds for which it has trained."""
        since = self._trains_since[job]
        return self._trained[job] + (0.0 if math.isnan(since) else now - since)

    def _hold(self, job: int, gang: Gang, held_s: float) -> None:
        self._service[job] += held_s
        self._gpu_seconds[job] += held_s * gang.devices
        self._core_seconds[job] += held_s * sum([sum(claim.millicores) for claim in gang.claims]) / 1000

    def moves(self, job: int, gang: Gang) -> None:
        """Record a migration or a resize of the running job."""
        (self._resizes if gang.resizes else self._migrations)[job] += 1

    def outcomes(self) -> Outcomes:
        service = np.array(self._service)
        return outcomes(
            self._jobs,
            np.array(self._first_start),
            np.array(self._end),
            service,
            overhead_s=service - np.array(self._trained),
            gpu_seconds=np.array(self._gpu_seconds),
            core_seconds=np.array(self._core_seconds),
            preemptions=np.array(self._preemptions),
            migrations=np.array(self._migrations),
            resizes=np.array(self._resizes),
        )


# Samples of fragmentation, which costs a pass over all nodes, between the first and the last submission.
_LOOKS = 1_000


class Meters:
    """Time series of the cluster. `millicores`: of the whole cluster."""

    def __init__(self, jobs: Workload, state: State, millicores: int) -> None:
        self._state = state
        self._millicores = millicores
        self._used = SeriesRecorder(0.0)
        self._cores = SeriesRecorder(0.0)
        self._waiting = SeriesRecorder(0.0)
        self._fragmented = SeriesRecorder(0.0)
        types = tuple(sorted({one.device_type for one in state.view.sets.values() if one.devices}))
        self._demand = demand_of(jobs, types) if len(jobs) and types else None
        # By node, all of which have joined.
        sets = [topology.configuration_set for topology in state.view.topologies]
        self._devices = np.array([one.devices for one in sets], np.int64)
        self._types = np.array([types.index(one.device_type) if one.devices else 0 for one in sets], np.int64)
        span = float(jobs.submit_s[-1] - jobs.submit_s[0]) if len(jobs) else 0.0
        self._every = span / _LOOKS
        self._next_look = 0.0

    def read(self, now: float) -> None:
        state = self._state
        self._used.record(now, state.nodes.devices - state.nodes.free_devices)
        self._waiting.record(now, len(state.queue.waiting))
        if now < self._next_look or self._demand is None:
            return
        self._next_look = now + self._every
        self._cores.record(now, (self._millicores - sum(map(sum, state.view.millicores))) / 1000)
        # Without free devices nothing is fragmented: on an oversubscribed cluster that is most of the time.
        self._fragmented.record(now, self._lost(self._demand) if any(state.view.free) else 0.0)

    def series(self, end: float) -> dict[str, StepSeries]:
        return {
            "used_gpus": self._used.series(end),
            "used_cores": self._cores.series(end),
            "waiting_jobs": self._waiting.series(end),
            "fragmented_gpus": self._fragmented.series(end),
        }

    def _lost(self, demand: GangMix) -> float:
        columns, size = self._state.view.columns(), len(self._devices)
        free = np.bitwise_count(columns.free[:size]).astype(np.int64)
        millicores, memory = columns.millicores[:size], columns.memory[:size]
        return float(fragmented_gpus(demand, free, millicores, memory, self._devices, self._types).sum())
