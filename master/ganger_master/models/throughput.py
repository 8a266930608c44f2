"""How fast a job would run anywhere: one model per job, T(GPUs, cores, memory, locality, co-residents).

A step takes the longest of what the GPUs do (computing and all-reduce, as in allreduce, with locality levels), what the
cores do (the rising branch of the CPU predictor, as in cpu) and what storage delivers (as in storage), slowed by who
shares the GPU or sits beside it (as in interference). Seventeen numbers, believed from the job's class before it runs
and corrected by every observed rate; what the law still misses at a configuration is kept as a smooth discrepancy, so
that predictions meet what was measured there and fade to the law elsewhere. Every prediction knows its spread.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from ganger.resources.values import Level

from ganger_master.models.accuracy import Floats, is_usable
from ganger_master.models.allreduce import MOST_OVERLAP, overlapped
from ganger_master.models.classes import Number, belief_of
from ganger_master.models.interference import host_slowdown
from ganger_master.models.posterior import Belief, jacobian, posterior

# Configurations remembered per job; the one seen longest ago goes first. Jobs move a few times, not hundreds.
MOST_OBSERVED = 32
# Windows that count at one configuration: older ones fade, since a job changes with its phases.
_MEMORY_WINDOWS = 20.0
# Log deviation of one observed window, and the least that any number of them comes down to.
_WINDOW_NOISE, _LEAST_NOISE = 0.05, 0.01
# What the law misses, and how near configurations must lie to be missed alike (in doublings). All-reduce fits of
# published profiles miss 6 % on average and 40 % at worst (two T4 servers are slower than three there); with these two,
# the ranges hold four fifths of the published steps from the first observation to the sixth, as they should.
_DISCREPANCY, _NEAR = 0.2, 0.7
# Sharpness of "the longest of": both alike cost 6 % more than either, as at the knee of measured CPU curves.
_SHARPNESS = 12.0
# Utilisation of a job nobody measured, the mean of Lucid's 66 single-job profiles.
_UTILISATION = 0.51
# 80 % of a normal lie within so many deviations.
_EIGHTY_PERCENT = 1.2816
_INFINITE = 1e6


@dataclass(frozen=True, slots=True)
class Configuration:
    """Where and how a job might run. Cores and memory are per GPU; `batch` is the samples per GPU against the job's
    reference (1/2 when twice the GPUs share one global batch); `sharers` are the utilisations of those on the same
    GPUs; `device_speed` compares the GPU type with the reference's."""

    gpus: int = 1
    nodes: int = 1
    level: Level = Level.NVLINK
    cores: float = math.inf
    memory_bytes: float = math.inf
    batch: float = 1.0
    sharers: tuple[float, ...] = ()
    switch_neighbours: int = 0
    socket_neighbours: int = 0
    device_speed: float = 1.0

    def __post_init__(self) -> None:
        if not (1 <= self.nodes <= self.gpus):
            raise ValueError(f"{self.gpus} GPUs on {self.nodes} nodes")
        if not (self.cores > 0.0 and self.memory_bytes > 0.0 and is_usable(self.batch, self.device_speed)):
            raise ValueError("cores, memory, batch and device speed must be above zero")


@dataclass(frozen=True, slots=True)
class Observation:
    """Steps per second seen at a configuration, the mean of `windows` windows in logarithm."""

    configuration: Configuration
    log_rate: float
    windows: float = 1.0


@dataclass(frozen=True, slots=True)
class Prediction:
    """Steps per second of the whole job; `deviation` of its logarithm, and the range that holds 80 %."""

    rate: float
    deviation: float

    @property
    def low(self) -> float:
        return self.rate * math.exp(-_EIGHTY_PERCENT * self.deviation)

    @property
    def high(self) -> float:
        return self.rate * math.exp(_EIGHTY_PERCENT * self.deviation)


@dataclass(frozen=True)
class ThroughputModel:
    """What is known of one job. `observe` gives a new one; fitting waits until somebody asks.

    Before anything was observed rates have no scale: only ratios of two predictions (`speed_up`) mean something, and
    `predict` says so by its deviation.
    """

    prior: Belief = field(default_factory=belief_of)
    observations: tuple[Observation, ...] = ()
    utilisation: float = _UTILISATION

    def observe(self, configuration: Configuration, steps_per_second: float, windows: float = 1.0) -> ThroughputModel:
        """With one more measurement; the same model if it is not finite and above zero (a stall is no speed)."""
        if not is_usable(steps_per_second, windows):
            return self
        seen = [known for known in self.observations if known.configuration == configuration]
        others = [known for known in self.observations if known.configuration != configuration]
        before = seen[0] if seen else Observation(configuration, 0.0, 0.0)
        kept = min(before.windows, max(0.0, _MEMORY_WINDOWS - windows))
        mean = (kept * before.log_rate + windows * math.log(steps_per_second)) / (kept + windows)
        latest = Observation(configuration, mean, min(kept + windows, _MEMORY_WINDOWS))
        return replace(self, observations=(*others[-(MOST_OBSERVED - 1) :], latest))

    def rate(self, configuration: Configuration) -> float:
        """The predicted steps per second, without its spread (a few microseconds once fitted)."""
        fitted = log_rate(self.numbers, configuration, self.utilisation)
        if len(self.observations) > 1:
            here = _place(configuration)
            for place, weight in self._discrepancy:
                fitted += weight * _kernel(here, place)
        return math.exp(fitted)

    def predict(self, configuration: Configuration) -> Prediction:
        """With the spread that numbers, discrepancy and noise leave."""
        spread = self._spread((configuration,))
        return Prediction(self.rate(configuration), math.sqrt(max(0.0, float(spread[0, 0]))))

    def speed_up(self, to: Configuration, base: Configuration) -> Prediction:
        """Rate at `to` over rate at `base`: what both share is not uncertain in their ratio."""
        spread = self._spread((to, base))
        variance = float(spread[0, 0] + spread[1, 1] - 2.0 * spread[0, 1])
        return Prediction(self.rate(to) / self.rate(base), math.sqrt(max(0.0, variance)))

    @cached_property
    def numbers(self) -> tuple[float, ...]:
        """The most plausible numbers of the law."""
        if not self.observations:
            return tuple(self.prior.mean.tolist())
        if len(self.observations) == 1:
            # one configuration sets the scale, by far the least known number, and says nothing of shapes
            known = self.observations[0]
            numbers = self.prior.mean.tolist()
            numbers[Number.SCALE] += log_rate(tuple(numbers), known.configuration, self.utilisation) - known.log_rate
            return tuple(numbers)
        return tuple(self.belief.mean.tolist())

    @cached_property
    def belief(self) -> Belief:
        """The belief over the numbers after all observations."""
        return _fit(self.prior, self.observations, self.utilisation)

    @cached_property
    def _discrepancy(self) -> tuple[tuple[tuple[float, ...], float], ...]:
        """Where each observation lies and the weight of its kernel, so that predictions meet what was measured."""
        law = np.array([log_rate(self.numbers, o.configuration, self.utilisation) for o in self.observations])
        measured = np.array([known.log_rate for known in self.observations])
        weights = np.linalg.solve(_noise(self.observations), measured - law).tolist()
        return tuple((_place(o.configuration), weight) for o, weight in zip(self.observations, weights, strict=True))

    def _spread(self, configurations: Sequence[Configuration]) -> Floats:
        """Covariance of the log rates at the configurations, given the observations: law (linear around its numbers)
        and discrepancy are normal together."""
        seen = [known.configuration for known in self.observations]
        everywhere = [*configurations, *seen]
        around = Belief(np.array(self.numbers), self.prior.covariance)
        slopes = jacobian(around, lambda numbers: _log_rates(numbers, everywhere, self.utilisation))
        joint = slopes @ self.prior.covariance @ slopes.T + _kernels(everywhere, everywhere)
        wanted = len(configurations)
        if not seen:
            return joint
        inner = joint[wanted:, wanted:] + np.diag([_variance(known) for known in self.observations])
        across = joint[:wanted, wanted:]
        return np.asarray(joint[:wanted, :wanted] - across @ np.linalg.solve(inner, across.T), float)


def log_rate(numbers: Sequence[float], at: Configuration, utilisation: float) -> float:
    """The law: log steps per second. `numbers` by `Number`."""
    n = numbers
    fixed = 1.0 / (1.0 + math.exp(-n[Number.FIXED]))
    # in units of the seconds one reference GPU computes for a reference step
    compute = (fixed + (1.0 - fixed) * at.batch) / at.device_speed
    sync = 0.0
    if at.gpus > 1:
        sync = math.exp(n[Number.ACROSS]) + math.exp(n[Number.ACROSS_PER_GPU]) * (at.gpus - 2)
        sync += math.exp(n[Number.ACROSS_PER_NODE]) * max(0, at.nodes - 2)
        sync *= 1.0 + math.exp(n[Number.BEYOND]) * (max(at.level, Level.RACK) - Level.RACK)
    if at.gpus > 1 and at.nodes < 2:
        local = math.exp(n[Number.LOCAL]) + math.exp(n[Number.LOCAL_PER_GPU]) * (at.gpus - 2)
        local *= 1.0 + math.exp(n[Number.INSIDE]) * (min(at.level, Level.NODE) - Level.NVLINK)
        # a slope from two to four GPUs, carried to sixteen, must not say that one server is worse than two
        sync = min(local, sync)
    overlap = 1.0 + (MOST_OVERLAP - 1.0) / (1.0 + math.exp(-n[Number.OVERLAP]))
    device = overlapped(compute, sync, overlap)
    cores = min(at.cores, _INFINITE)
    bend = math.exp(n[Number.BEND]) - 1.0
    pace = cores + bend * math.log(cores) if cores > 1.0 else cores
    feeding = at.batch * math.exp(n[Number.CORES]) / pace
    fetching = 0.0
    if at.memory_bytes < math.inf:
        cached = at.memory_bytes / math.exp(n[Number.DATASET])
        # min(1, cached), its corner rounded like the others so that every measurement says something of the dataset
        hits = cached / (1.0 + cached**_SHARPNESS) ** (1.0 / _SHARPNESS)
        fetching = at.batch * math.exp(n[Number.MISS]) * (1.0 - hits)
    longest = max(device, feeding, fetching)
    together = sum((part / longest) ** _SHARPNESS for part in (device, feeding, fetching))
    step = longest * together ** (1.0 / _SHARPNESS)
    slowdown = host_slowdown(at.switch_neighbours, at.socket_neighbours, math.exp(n[Number.HOST]))
    if at.sharers:
        wanted = (utilisation + sum(at.sharers)) * math.exp(n[Number.SHARING])
        load = wanted + (1 + len(at.sharers)) * math.exp(n[Number.RESIDENT])
        slowdown /= (1.0 + load**_SHARPNESS) ** (1.0 / _SHARPNESS)
    return math.log(slowdown) - n[Number.SCALE] - math.log(step)


def _log_rates(numbers: Floats, configurations: Sequence[Configuration], utilisation: float) -> Floats:
    values = numbers.tolist()
    return np.array([log_rate(values, configuration, utilisation) for configuration in configurations])


def _fit(prior: Belief, observations: Sequence[Observation], utilisation: float) -> Belief:
    configurations = [known.configuration for known in observations]
    return posterior(
        prior,
        lambda numbers: _log_rates(numbers, configurations, utilisation),
        np.array([known.log_rate for known in observations]),
        _noise(observations),
    )


def _variance(known: Observation) -> float:
    return max(_LEAST_NOISE**2, _WINDOW_NOISE**2 / known.windows)


def _noise(observations: Sequence[Observation]) -> Floats:
    configurations = [known.configuration for known in observations]
    return _kernels(configurations, configurations) + np.diag([_variance(known) for known in observations])


def _kernels(left: Sequence[Configuration], right: Sequence[Configuration]) -> Floats:
    places = [_place(other) for other in right]
    return np.array([[_kernel(here, place) for place in places] for here in map(_place, left)])


def _kernel(one: tuple[float, ...], other: tuple[float, ...]) -> float:
    """Covariance of what the law misses at two places."""
    return _DISCREPANCY**2 * math.exp(-0.5 * (math.dist(one, other) / _NEAR) ** 2)


def _place(at: Configuration) -> tuple[float, ...]:
    # a doubling in any direction is one unit; cores and memory that exceed any server are all alike
    return (
        math.log2(at.gpus),
        math.log2(at.nodes),
        0.5 * at.level,
        math.log2(min(at.cores, 256.0)),
        math.log2(min(at.memory_bytes, 2.0**41)),
        math.log2(at.batch),
        2.0 * sum(at.sharers),
        0.5 * at.switch_neighbours + 0.25 * at.socket_neighbours,
        math.log2(at.device_speed),
    )
