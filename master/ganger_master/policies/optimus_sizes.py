"""Optimus (EuroSys 2018): the number of tasks of each job by marginal gain (section 4.1), and its estimates of jobs.

Every job receives one task of each kind, in order of arrival. Then the task is added repeatedly that saves most seconds
of its job per unit of its dominant resource. Differences from the public code: a task that does not fit closes that
kind for that job only; no factor for young jobs; `LEAST_GAIN`, without which models get dozens of servers for a few
percent.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from ganger_master.core.gang_model import Gang
from ganger_master.core.job_model import JobRecord
from ganger_master.estimators.server_speed import ServerSpeed, UpdateMode
from ganger_master.estimators.speed import AllReduceModel
from ganger_master.policies.orders import Flags, Floats, Integers

if TYPE_CHECKING:
    from ganger_master.estimators.convergence import StepsLeftEstimate

# Gains of jobs at their beginning, whose steps are not yet well predicted, count a little less (section 4.1).
YOUNG = 0.95
# Part of the remaining time that one more task must save.
LEAST_GAIN = 0.01
# What adds up to the whole by rounding fits: relative to the capacity.
_ROUNDING = 1e-9
# Numbers of GPUs with which a new job is tried, at most.
_FIRST_SIZES = 8
# Moves looked ahead at once for many jobs, and for few: a look costs about as much for one as for hundreds.
_FAR, _NEAR, _MANY = 64, 8, 64

# Steps per second of jobs (positions) with so many tasks of each kind, one row per job.
Speed: TypeAlias = Callable[[Integers, Integers], Floats]


@dataclass(frozen=True, slots=True, eq=False)
class ElasticJobs:
    """One entry per job, in order of arrival; k kinds of tasks, r resources."""

    # NaN or nothing: unknown, the job keeps what it begins with.
    remaining_steps: Floats
    speed: Speed
    # (jobs, k, r): what one task of each kind takes.
    shapes: Floats
    is_young: Flags
    # (jobs, k): it cannot use more, nor begin with less.
    most: Integers
    least: Integers

    def __len__(self) -> int:
        return len(self.remaining_steps)


def growing(
    remaining_steps: Sequence[float] | Floats,
    speed: Speed,
    shapes: Floats,
    is_young: Sequence[bool] | Flags | None = None,
    most: Integers | None = None,
    least: Integers | None = None,
) -> ElasticJobs:
    """Make `ElasticJobs`. Defaults: no young jobs, no limits, and one task of each kind to begin with."""
    steps, needs = np.asarray(remaining_steps, float), np.asarray(shapes, float)
    if needs.ndim != 3 or len(needs) != len(steps):
        raise ValueError(f"shapes {needs.shape} must be (jobs, kinds, resources) of {len(steps)} jobs")
    return ElasticJobs(
        steps,
        speed,
        needs,
        np.zeros(len(steps), bool) if is_young is None else np.asarray(is_young, bool),
        np.full(needs.shape[:2], np.iinfo(np.int64).max) if most is None else np.asarray(most, np.int64),
        np.ones(needs.shape[:2], np.int64) if least is None else np.asarray(least, np.int64),
    )


def allreduce_speeds(models: Sequence[AllReduceModel], batch: Sequence[float] | Floats, gpus_per_node: int) -> Speed:
    """Return the speeds, in steps/s, of jobs whose only kind of task is a GPU. `batch`: samples of each job in a step,
    shared by its GPUs. The GPUs of a job fill nodes."""
    columns = np.array([(m.fixed, m.per_sample, m.local, m.local_per_gpu, m.across, m.across_per_gpu) for m in models])
    columns = columns.reshape(len(models), 6)
    overlap = np.array([model.overlap for model in models])
    samples = np.asarray(batch, float)

    def speed(jobs: Integers, counts: Integers) -> Floats:
        gpus, t, sharp = counts[:, 0].astype(float), columns[jobs].T, overlap[jobs]
        compute = t[0] + t[1] * samples[jobs] / gpus
        beyond = np.maximum(gpus - 2.0, 0.0)
        sync = np.where(gpus <= gpus_per_node, t[2] + t[3] * beyond, t[4] + t[5] * beyond)
        sync = np.where(gpus < 2.0, 0.0, sync)
        longer, shorter = np.maximum(compute, sync), np.minimum(compute, sync)
        return np.asarray(1.0 / (longer * (1.0 + (shorter / longer) ** sharp) ** (1.0 / sharp)), float)

    return speed


def server_speeds(models: Sequence[ServerSpeed]) -> Speed:
    """Return the speeds, in steps/s, of jobs that train over parameter servers. Kinds of tasks: servers, workers."""
    rows = np.zeros((len(models), 6))
    for row, model in zip(rows, models, strict=True):
        t = model.coefficients
        if model.mode is UpdateMode.ASYNCHRONOUS:
            row[1:5] = t
        else:
            row[:] = t
            row[0] *= model.batch
    is_asynchronous = np.array([model.mode is UpdateMode.ASYNCHRONOUS for model in models], bool)

    def speed(jobs: Integers, counts: Integers) -> Floats:
        p, w, t = counts[:, 0].astype(float), counts[:, 1].astype(float), rows[jobs].T
        seconds = t[0] / w + t[1] + t[2] * (w / p) + t[3] * w + t[4] * p + t[5] / p
        return np.asarray(np.where(is_asynchronous[jobs], w, 1.0) / seconds, float)

    return speed


def allocated(jobs: ElasticJobs, capacity: Floats, least_gain: float = LEAST_GAIN) -> Integers:
    """Return (jobs, k): tasks of each kind; zeros for jobs whose first tasks do not fit. `capacity`: of all nodes."""
    growth = _Growth(jobs, np.asarray(capacity, float), least_gain)
    growth.start()
    growth.run()
    return np.array(growth.counts, np.int64).reshape(jobs.shapes.shape[:2])


@dataclass(frozen=True, slots=True, eq=False)
class _Ahead:
    """The next moves of jobs, a row each: kinds of tasks to add (the first `length`), and whether more may follow."""

    gains: Floats
    moves: Integers
    length: Integers
    goes_on: Flags


class _Growth:
    """The pass. Each job's own next moves do not depend on others, so they are looked ahead for many jobs at once; a
    heap merges them by gain. Ties go to the earlier job, within a job to the earlier kind."""

    def __init__(self, jobs: ElasticJobs, capacity: Floats, least_gain: float) -> None:
        count, kinds, _ = jobs.shapes.shape
        self.jobs = jobs
        self.counts = [[0] * kinds for _ in range(count)]
        self._free: list[float] = (capacity * (1.0 + _ROUNDING)).tolist()
        # What the gain of a task is divided by: the raw amount of its dominant resource.
        part = jobs.shapes / np.maximum(capacity, 1e-9)
        amount = np.take_along_axis(jobs.shapes, np.argmax(part, axis=2)[:, :, None], axis=2)[:, :, 0]
        self._divisor = np.maximum(amount, 1e-9)
        self._least = least_gain
        self._factor = np.where(jobs.is_young, YOUNG, 1.0)
        # Tasks that no longer fit; what is free only shrinks.
        self._closed = np.zeros((count, kinds), bool)
        # By job: (gain, move) of the moves ahead, the next one last; and whether more may follow them.
        self._ahead: list[list[tuple[float, int]]] = [[] for _ in range(count)]
        self._goes_on = [False] * count

    def start(self) -> None:
        """Give each job one task of each kind, or the least that it accepts, where that fits."""
        first = np.einsum("jk,jkr->jr", self.jobs.least.astype(float), self.jobs.shapes).tolist()
        may_run: list[bool] = np.all(self.jobs.most >= self.jobs.least, axis=1).tolist()
        least = self.jobs.least.tolist()
        for job, need in enumerate(first):
            if may_run[job] and self._fits(need):
                self._take(need)
                self.counts[job] = least[job]

    def run(self) -> None:
        """Add what gains most, until nothing fits or gains."""
        started = np.array([counts[0] > 0 for counts in self.counts], bool)
        jobs = np.flatnonzero(np.logical_and(started, self.jobs.remaining_steps > 0.0))
        ahead_of = self._looked_ahead(jobs)
        self._keep(jobs, ahead_of, self._take_at_once(jobs, ahead_of))
        needs = self.jobs.shapes.tolist()
        heap = [(-ahead[-1][0], job) for job, ahead in enumerate(self._ahead) if ahead]
        heapq.heapify(heap)
        while heap:
            key, job = heap[0]
            ahead = self._ahead[job]
            if ahead and -ahead[-1][0] == key:
                move = ahead[-1][1]
                if self._fits(needs[job][move]):
                    ahead.pop()
                    self._take(needs[job][move])
                    self.counts[job][move] += 1
                    if not ahead and self._goes_on[job]:
                        self._look_again(np.array([job]))
                else:
                    self._close(move)
            # Of jobs that were closed meanwhile the heap holds an old gain: they come up once more with the new one.
            if self._ahead[job]:
                heapq.heapreplace(heap, (-self._ahead[job][-1][0], job))
            else:
                heapq.heappop(heap)

    def _take_at_once(self, jobs: Integers, ahead: _Ahead) -> Integers:
        """Take all that the heap would take before something does not fit or is not known; how many moves of each job.
        The heap takes a move when it comes to the least gain among it and those before it of the same job, so that is
        what moves are sorted by."""
        place = np.arange(ahead.gains.shape[1])
        row, place = np.nonzero(place < ahead.length[:, None])
        least = np.minimum.accumulate(ahead.gains, axis=1)
        order = np.lexsort((place, row, -least[row, place]))
        row, place = row[order], place[order]
        move = ahead.moves[row, place]
        used = np.cumsum(self.jobs.shapes[jobs[row], move], axis=0)
        fitting = [int(np.searchsorted(u, free, "right")) for u, free in zip(used.T, self._free, strict=True)]
        count = min([len(row), *fitting])
        last_known = np.flatnonzero(ahead.goes_on[row] & (place == ahead.length[row] - 1))
        count = min(count, int(last_known[0])) if len(last_known) else count
        if count:
            self._take(used[count - 1].tolist())
        added = np.zeros((len(jobs), self.jobs.shapes.shape[1]), np.int64)
        np.add.at(added, (row[:count], move[:count]), 1)
        for job, more in zip(jobs.tolist(), added.tolist(), strict=True):
            self.counts[job] = [have + extra for have, extra in zip(self.counts[job], more, strict=True)]
        return np.asarray(added.sum(axis=1), np.int64)

    def _fits(self, need: list[float]) -> bool:
        return all(wanted <= there for wanted, there in zip(need, self._free, strict=True))

    def _take(self, need: list[float]) -> None:
        self._free = [there - wanted for wanted, there in zip(need, self._free, strict=True)]

    def _close(self, move: int) -> None:
        """Close the move for all jobs that it no longer fits, and reconsider these."""
        over = np.any(self.jobs.shapes[:, move] > np.array(self._free), axis=1)
        over &= ~self._closed[:, move]
        self._closed[over, move] = True
        changed = [job for job in np.flatnonzero(over).tolist() if any(ahead == move for _, ahead in self._ahead[job])]
        self._look_again(np.array(changed, np.int64))

    def _look_again(self, jobs: Integers) -> None:
        self._keep(jobs, self._looked_ahead(jobs), np.zeros(len(jobs), np.int64))

    def _keep(self, jobs: Integers, ahead: _Ahead, taken: Integers) -> None:
        columns = jobs, ahead.gains, ahead.moves, taken, ahead.length, ahead.goes_on
        for job, gains, moves, first, end, goes_on in zip(*[column.tolist() for column in columns], strict=True):
            self._ahead[job] = list(zip(gains[first:end], moves[first:end], strict=True))[::-1]
            self._goes_on[job] = goes_on

    def _looked_ahead(self, jobs: Integers) -> _Ahead:
        far = _FAR if len(jobs) >= _MANY else _NEAR
        gains, moves = np.full((len(jobs), far), -np.inf), np.zeros((len(jobs), far), np.int64)
        length = np.zeros(len(jobs), np.int64)
        counts = np.array([self.counts[job] for job in jobs.tolist()], np.int64)
        more = np.eye(self.jobs.shapes.shape[1], dtype=np.int64)
        counts = counts.reshape(len(jobs), len(more))
        seconds = self._remaining_s(jobs, counts)
        # Rows that still continue, by position in `jobs`.
        row = np.arange(len(jobs))
        for place in range(far):
            of_row = jobs[row]
            after = np.stack([self._remaining_s(of_row, counts + one) for one in more], axis=1)
            with np.errstate(invalid="ignore"):
                saved = seconds[:, None] - after
            may_have = counts < self.jobs.most[of_row]
            helps = ~self._closed[of_row] & may_have & (saved > 0.0) & (saved >= self._least * seconds[:, None])
            gain = np.where(helps, saved / self._divisor[of_row] * self._factor[of_row][:, None], -np.inf)
            best = np.argmax(gain, axis=1)
            grows = np.flatnonzero(helps.any(axis=1))
            row, counts, best = row[grows], counts[grows] + more[best[grows]], best[grows]
            seconds = after[grows, best]
            gains[row, place], moves[row, place] = gain[grows, best], best
            length[row] += 1
            if not len(row):
                break
        return _Ahead(gains, moves, length, length == far)

    def _remaining_s(self, jobs: Integers, counts: Integers) -> Floats:
        """Return the seconds until each job ends with these counts of tasks; infinite where it makes no progress."""
        with np.errstate(divide="ignore", invalid="ignore"):
            seconds = self.jobs.remaining_steps[jobs] / self.jobs.speed(jobs, counts)
        return np.where(np.isnan(seconds), np.inf, seconds)


# Epochs that a job is taken to need still as long as its losses say nothing (Optimus's public code).
UNKNOWN_EPOCHS = 20.0


@dataclass(frozen=True, slots=True)
class OptimusEstimate:
    """The estimate of a job. `steps_left`: NaN if its speed is unknown, with its range; `is_young`: it is not predicted
    well. `speed`: by GPUs, or by servers and workers. `tried`: GPUs, or workers, and servers of which the rate was
    measured; None: the job needs no trials."""

    steps_left: float = math.nan
    is_young: bool = True
    speed: AllReduceModel | ServerSpeed | None = None
    low: float = 0.0
    high: float = math.inf
    tried: tuple[tuple[int, int], ...] | None = None


NOTHING = OptimusEstimate()
# Of elastic jobs, with the gangs they have: what is believed of each.
Believed: TypeAlias = Callable[[Sequence[tuple[JobRecord, Gang | None]]], Sequence[OptimusEstimate]]


def nothing_believed(jobs: Sequence[tuple[JobRecord, Gang | None]]) -> Sequence[OptimusEstimate]:
    """Return no estimate for any job: there are no measurements."""
    return [NOTHING] * len(jobs)


def steps_left(whole: StepsLeftEstimate | None, steps_done: float, epoch_steps: float) -> tuple[float, bool]:
    """Return the steps that are left, and whether that is a guess. `whole`: the fitted total; None or infinite while
    there is none. A job that continues after convergence has one epoch left."""
    if whole is None or not math.isfinite(whole.value):
        return UNKNOWN_EPOCHS * epoch_steps, True
    return max(epoch_steps, whole.value - steps_done), not whole.is_known


def first_sizes(least: int, most: int, each: int = 1) -> Sequence[int]:
    """Return the numbers of GPUs with which a new job is tried: from its least to its most, each next one larger by
    about the same factor, whole tasks of `each`."""
    if least >= most:
        return (least,)
    factor = (most / least) ** (1.0 / (_FIRST_SIZES - 1))
    return sorted({min(most, max(least, round(least * factor**place / each) * each)) for place in range(_FIRST_SIZES)})
