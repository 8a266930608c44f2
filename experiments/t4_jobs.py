"""Jobs whose batches may follow what they gain, on servers of four T4: what Pollux (OSDI 2021) compares policies in.

The production core trains every job with the batch it was submitted with, so that a policy which trades throughput for
what a sample teaches it does not carry. Hence this small simulation, as its authors' public one is (petuum/adaptdl,
branch osdi21-artifact): how long a step takes is measured for each placement and batch on a GPU, between which one
interpolates; how much a step of a larger batch is worth follows from the gradient's measured noise at that epoch; work
is counted in steps of the initial batch, and a job ends with its last epoch. Every minute a policy says how many GPUs
each job has; a job keeps its places if their number stays, others take them from the servers with the most free GPUs,
and lose 30 s.
"""

from __future__ import annotations

import csv
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TypeAlias

import numpy as np
from ganger_master.policies.orders import Floats
from scipy.interpolate import LinearNDInterpolator

SERVERS, GPUS_PER_SERVER = 16, 4
INTERVAL_S, RESTART_S = 60, 30
APPLICATIONS = ("bert", "cifar10", "deepspeech2", "imagenet", "ncf", "yolov3")
# What its memory holds at most of a GPU, where less than what was measured (the authors' simulator).
_LARGEST_LOCAL = {"yolov3": 8}
_MOST_SERVERS = 16
_ROUNDING = 1e-8

# GPUs on each server that holds any.
Placement: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class T4Batch:
    """Samples of a GPU at a time, and how many times it adds up gradients before they are exchanged."""

    local: int
    accumulated: int

    def samples(self, gpus: int) -> int:
        return gpus * self.local * (self.accumulated + 1)


@dataclass(frozen=True, eq=False)
class Application:
    """Measurements of one. `curves`: by batch, ascending, (epochs, 3): progress at the end of each epoch in steps of
    the initial batch, squared norm of the gradient and its variance; `iterations` (epochs) likewise."""

    name: str
    curves: Mapping[int, Floats]
    iterations: Mapping[int, Floats]
    # (rows, 2) samples and seconds of a step, of these the exchange: by placement, its GPUs a digit a server.
    placed: Mapping[str, Floats]
    # (rows, 5): servers, GPUs, samples of each, seconds of a step, of these the exchange.
    scaled: Floats
    _known: dict[tuple[Placement, int], tuple[float, float]] = field(default_factory=dict)

    @property
    def initial_batch(self) -> int:
        return min(self.curves)

    @property
    def largest_batch(self) -> int:
        return max(self.curves)

    @cached_property
    def local_range(self) -> tuple[int, int]:
        """The fewest and the most samples on a GPU."""
        samples = np.concatenate([rows[:, 0] for rows in self.placed.values()])
        return int(samples.min()), _LARGEST_LOCAL.get(self.name, int(samples.max()))

    @property
    def epochs(self) -> int:
        return min(map(len, self.curves.values()))

    @cached_property
    def ends(self) -> list[float]:
        """Progress at which each epoch ends."""
        found: list[float] = np.min([curve[: self.epochs, 0] for curve in self.curves.values()], axis=0).tolist()
        return found

    def iteration(self, batch: int, epoch: int) -> float:
        """Steps of this batch up to the end of this epoch."""
        return self._between(batch, lambda size: float(self.iterations[size][epoch]))

    def noise(self, batch: int, epoch: int) -> tuple[float, float]:
        """The gradient's squared norm and its variance."""
        return (
            self._between(batch, lambda size: float(self.curves[size][epoch, 1])),
            self._between(batch, lambda size: float(self.curves[size][epoch, 2])),
        )

    def seconds(self, placement: Placement, local: int) -> tuple[float, float]:
        """Of a step with so many samples on each GPU, and those of the exchange in it."""
        key = (min(placement[i:] + placement[:i] for i in range(len(placement))), local)
        if key not in self._known:
            self._known[key] = self._interpolated(*key)
        return self._known[key]

    def step_s(self, placement: Placement, batch: T4Batch) -> float:
        step, exchange = self.seconds(placement, batch.local)
        return step + (step - exchange) * batch.accumulated

    def split(self, batch: int, gpus: int, one_accumulates: bool) -> T4Batch:
        """How a whole batch is trained on so many GPUs. `one_accumulates`: one GPU with more than the initial batch
        does so in two parts at least, without which the noise is unknown."""
        _, largest = self.local_range
        each = math.ceil(batch / gpus - _ROUNDING)
        accumulated = math.ceil(each / largest - _ROUNDING) - 1
        if gpus == 1 and one_accumulates:
            accumulated = max(1, accumulated)
        local = math.ceil(each / (accumulated + 1) - _ROUNDING)
        return T4Batch(min(local, self.largest_batch // (gpus * (accumulated + 1))), accumulated)

    def _between(self, batch: int, of: Callable[[int], float]) -> float:
        sizes = list(self.curves)
        low, high = max(s for s in sizes if s <= batch), min(s for s in sizes if s >= batch)
        if low == high:
            return of(low)
        return ((batch - low) * of(high) + (high - batch) * of(low)) / (high - low)

    def _interpolated(self, placement: Placement, local: int) -> tuple[float, float]:
        rows = self.placed.get("".join(map(str, placement)))
        if rows is not None:
            step, exchange = (float(np.interp(local, rows[:, 0], rows[:, column])) for column in (1, 2))
            return step, exchange
        at = (min(len(placement), _MOST_SERVERS), sum(placement), local)
        step, exchange = self._over_servers(np.array([at], float))[0].tolist()
        assert not math.isnan(step), f"{self.name}: nothing was measured around {at}"
        return step, exchange

    @cached_property
    def _over_servers(self) -> LinearNDInterpolator:
        return LinearNDInterpolator(self.scaled[:, :3], self.scaled[:, 3:])


def applications(placements: Path, scalability: Path, validation: Path) -> dict[str, Application]:
    """By name, from the published measurements of T4 (`gpu_type` aws)."""
    placed: dict[tuple[str, str], list[list[float]]] = {}
    together: dict[str, dict[tuple[int, int, int], list[list[float]]]] = {}
    with placements.open(newline="") as file:
        for row in csv.DictReader(file):
            if row["gpu_type"] == "aws":
                seconds = [float(row["step_time_s"]), float(row["sync_time_s"])]
                placed.setdefault((row["app"], row["placement"]), []).append([float(row["local_bsz"]), *seconds])
                at = (int(row["num_nodes"]), int(row["num_replicas"]), int(row["local_bsz"]))
                together.setdefault(row["app"], {}).setdefault(at, []).append(seconds)
    scaled = {
        app: [[*at, *np.mean(seconds, axis=0).tolist()] for at, seconds in sorted(of_app.items())]
        for app, of_app in together.items()
    }
    with scalability.open(newline="") as file:
        for row in csv.DictReader(file):
            if row["gpu_type"] == "aws":
                columns = ("num_nodes", "num_replicas", "local_bsz", "step_time_s", "sync_time_s")
                scaled[row["app"]].append([float(row[column]) for column in columns])
    curves: dict[str, dict[int, list[list[float]]]] = {}
    with validation.open(newline="") as file:
        for row in csv.DictReader(file):
            values = [float(row[column]) for column in ("progress", "grad_sqr", "grad_var", "iteration")]
            curves.setdefault(row["app"], {}).setdefault(int(row["batch_size"]), []).append(values)
    found = {}
    for app in APPLICATIONS:
        of_app = {batch: np.array(rows) for batch, rows in sorted(curves[app].items())}
        found[app] = Application(
            app,
            {batch: rows[:, :3] for batch, rows in of_app.items()},
            {batch: rows[:, 3] for batch, rows in of_app.items()},
            {places: np.array(sorted(rows)) for (name, places), rows in placed.items() if name == app},
            np.array(scaled[app]),
        )
    return found


@dataclass(eq=False)
class T4Job:
    """`wanted` GPUs and `batch` are what its user asked for. What follows is how it is getting on: a policy may look at
    what a job can know of itself, which is everything but how it will go on."""

    application: Application
    submit_s: int
    wanted: int
    batch: int
    progress: float = 0.0
    epoch: int = 0
    end_s: float = math.nan
    placement: Placement = ()
    trains: T4Batch = T4Batch(0, 0)
    # Still to wait until it goes on.
    restart_s: float = 0.0
    restarts: int = 0
    # For how long it has held GPUs, and how many GPU-seconds.
    held_s: float = 0.0
    service_s: float = 0.0
    # Seconds of a step, by servers, GPUs and samples on each, as it was trained.
    seen: dict[tuple[int, int, int], float] = field(default_factory=dict)
    noise: tuple[float, float] | None = None

    @property
    def gpus(self) -> int:
        return sum(self.placement)

    @property
    def is_over(self) -> bool:
        return not math.isnan(self.end_s)


@dataclass(frozen=True, eq=False)
class Way:
    """A policy. `gpus`: of each live job, in order of submission; `line`: in which order those without places take
    them; `batch`: how a job trains where it is now."""

    gpus: Callable[[Sequence[T4Job], int], Sequence[int]]
    line: Callable[[Sequence[T4Job], Sequence[int]], Sequence[int]]
    batch: Callable[[T4Job], T4Batch]


def simulated(jobs: Sequence[T4Job], way: Way) -> None:
    """All jobs, in order of submission, to their ends."""
    on: dict[int, list[int]] = {}
    now = 0
    while not all(job.is_over for job in jobs):
        for job in jobs:
            if job.placement and not job.is_over:
                _train(job, now, way.batch)
        now += INTERVAL_S
        live = [number for number, job in enumerate(jobs) if job.submit_s <= now and not job.is_over]
        on = {number: places for number, places in on.items() if number in live}
        of_live = [jobs[number] for number in live]
        counts = way.gpus(of_live, now) if live else []
        assert sum(counts) <= SERVERS * GPUS_PER_SERVER, "a GPU was given away twice"
        line = [live[place] for place in way.line(of_live, counts)] if live else []
        places = _placed(live, counts, line, on)
        for number in live:
            if places.get(number) != on.get(number):
                _reallocate(jobs[number], places.get(number, []), way.batch)
        on = places


def _placed(
    live: Sequence[int], counts: Sequence[int], line: Sequence[int], before: Mapping[int, list[int]]
) -> dict[int, list[int]]:
    """The server of each GPU of each job."""
    wanted = dict(zip(live, counts, strict=True))
    places = {number: on for number, on in before.items() if len(on) == wanted[number]}
    free = Counter(dict.fromkeys(range(SERVERS), GPUS_PER_SERVER))
    for on in places.values():
        free.subtract(on)
    for number in line:
        if wanted[number] and number not in places:
            on = places[number] = []
            while len(on) < wanted[number]:
                server, most = max(free.items(), key=lambda item: (item[1], -item[0]))
                taken = min(most, wanted[number] - len(on))
                on += [server] * taken
                free[server] -= taken
    return places


def _reallocate(job: T4Job, on: list[int], batch: Callable[[T4Job], T4Batch]) -> None:
    had_run = job.held_s > 0.0
    job.placement = tuple(Counter(on).values())
    if on:
        job.trains = batch(job)
        job.restart_s = RESTART_S
        job.restarts += had_run


def _train(job: T4Job, now: float, batch: Callable[[T4Job], T4Batch]) -> None:
    """For an interval."""
    seconds = float(INTERVAL_S)
    lost = min(job.restart_s, seconds)
    job.restart_s -= lost
    job.held_s += seconds
    job.service_s += seconds * job.gpus
    seconds, now = seconds - lost, now + lost
    app = job.application
    while seconds > 0.0 and not job.is_over:
        samples = job.trains.samples(job.gpus)
        squared, variance = job.noise = app.noise(samples, job.epoch)
        gain = (variance + squared) / (variance / (samples / app.initial_batch) + squared)
        job.seen[len(job.placement), job.gpus, job.trains.local] = app.seconds(job.placement, job.trains.local)[0]
        rate = gain / app.step_s(job.placement, job.trains)
        end = app.ends[job.epoch]
        if job.progress + rate * seconds < end:
            job.progress += rate * seconds
            return
        spent = min(seconds, (end - job.progress) / rate)
        job.progress, job.epoch = end, job.epoch + 1
        seconds, now = seconds - spent, now + spent
        if job.epoch == app.epochs:
            job.end_s = now
        else:
            job.trains = batch(job)
