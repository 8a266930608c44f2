"""The true rates and the true work of simulated jobs. Policies see of them only what daemons measure and profiles.

`Footprints`: utilisation, device memory and interference. Utilisation is Gandiva's measurement of eight models (OSDI
2018, table 1); the seed assigns other models to one of these. Device memory is not published there: the seed draws a
share of 0.1 to 0.6 per model. Co-located jobs whose utilisations exceed the device run at speed min(1, 1 / (0.9 x sum
of utilisations)). The mean error of this law over 1,388 pairs measured by Lucid (ASPLOS 2023) is 0.071; the seed draws
an error of that size for every set of models, so that no policy can compute the speed without a trial.

`TrueRates`: the rate of a gang relative to the rate that its trace recorded, which holds for the cores and memory in
the trace (or a proportional share of the servers), the closest locality on these servers and the GPU type in the trace.
A rate is a product of three factors:

* cores and memory: the published matrix of the model (Synergy, OSDI 2022), at the gang's slowest piece. For a model
  without a matrix, more than the recorded amounts gains nothing and less costs in proportion;
* locality: Chronus's table of five models, interpolated by `estimators.speed`; for other models, the curve of an
  unknown job;
* GPU type: Gavel's steps per second (OSDI 2020), of the model, or else the median over all models.

`Scaling`: the rate of an elastic job at other sizes. For the models of ElasticFlow (ASPLOS 2023: A100, eight a server,
a constant global batch) it interpolates the measurements linearly in logarithms; below the smallest measured size the
rate is proportional, above the largest it is constant. Any other model, and each job without a model, has the curve of
a published one, drawn by the seed.

`Work`: remaining work in seconds at the recorded rate: at rate 1 a job ends after its duration in the trace.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, cached_property, lru_cache
from statistics import median
from typing import TYPE_CHECKING, Protocol, TypeAlias

import numpy as np
from ganger.cluster.fit import share_of_cores, share_of_memory
from ganger.cluster.resources import Claim, LocalityLevel
from msgspec import structs

from ganger_master.core.gang_model import Gang
from ganger_master.estimators.speed import UNKNOWN_JOB, LocalityModel, LocalityPoint, Pressure, fit_locality
from ganger_master.policies.orders import Flags, Floats, Integers
from ganger_master.simulator.traces.servers import ServerGroup, Servers
from ganger_master.simulator.traces.workload import Workload, elasticflow_speeds, gavel_speeds, synergy_profiles

if TYPE_CHECKING:
    from ganger_master.policies.tunings import Known

_UTILISATION = {
    "vae": 0.087,
    "superres": 0.141,
    "rhn": 0.616,
    "scrnn": 0.668,
    "mi-lstm": 0.762,
    "lstm": 0.872,
    "resnet50": 0.940,
    "resnext50": 0.989,
}
_MEMORY = (0.1, 0.6)
_LOAD = 0.9
# The mean absolute value of a normal error is 0.8 standard deviations.
_SCATTER = 0.071 / math.sqrt(2.0 / math.pi)
_LEAST = 0.05


class Footprints:
    """Device memory and utilisation of the jobs of a workload, by position."""

    def __init__(self, jobs: Workload, servers: Servers, seed: int) -> None:
        sizes = [group.configuration_set.device_memory_bytes for group in servers.groups]
        self._device_bytes = min([size for size in sizes if size], default=0)
        self._seed = seed
        random = np.random.default_rng([seed, 1])
        names = list(_UTILISATION)
        drawn = random.integers(len(names), size=len(jobs)).tolist()
        self._models = [
            name if name in _UTILISATION else names[at]
            for name, at in zip(map(_key, jobs.model.texts()), drawn, strict=True)
        ]
        shares = dict(zip(names, random.uniform(*_MEMORY, len(names)).tolist(), strict=True))
        # A state of unknown size takes next to nothing of the host memory, so that it always fits.
        self._memory = {name: max(1, int(share * self._device_bytes)) for name, share in shares.items()}
        self._speeds = cache(self._speeds_of)

    def signature(self, job: int) -> str:
        """Return a key that jobs with equal behaviour share."""
        return self._models[job]

    def utilisation(self, job: int) -> float:
        return _UTILISATION[self._models[job]]

    def memory_bytes(self, job: int) -> int:
        return self._memory[self._models[job]]

    def pressure(self, job: int) -> Pressure:
        return Pressure(self.utilisation(job), float(self.memory_bytes(job)))

    def speed(self, job: int, beside: Sequence[int]) -> float:
        """Return its speed beside other jobs, relative to its speed alone on the device."""
        if not beside:
            return 1.0
        models = tuple(sorted(self._models[other] for other in beside))
        return self._speeds(self._models[job], models)

    def _speeds_of(self, model: str, beside: tuple[str, ...]) -> float:
        models = sorted((model, *beside))
        load = _LOAD * sum(_UTILISATION[name] for name in models)
        names = list(_UTILISATION)
        random = np.random.default_rng([self._seed, 2, *(names.index(name) for name in models)])
        off = 1.0 + _SCATTER * float(random.standard_normal())
        return max(_LEAST, min(1.0, off / max(load, 1e-9)))


def _key(model: str) -> str:
    return model.lower().replace("-", "").replace("milstm", "mi-lstm")


# Names of the same models in traces and papers.
_ALIASES = {"resnet18": "res18", "resnet50": "res50", "mobilenetv2": "mobilenet", "shufflenetv2": "shufflenet"}
# Relative speed of 2 GPUs on 2 servers, 4 on 2, 4 on 4, 8 on 2 and 8 on 4 (Chronus's table).
_CHRONUS: Mapping[str, tuple[float, ...]] = {
    "alexnet": (0.745, 0.397, 0.325, 0.508, 0.268),
    "vgg16": (0.896, 0.576, 0.318, 0.572, 0.261),
    "resnet101": (0.991, 0.969, 0.954, 0.948, 0.803),
    "mobilenet_v2": (0.996, 0.972, 0.794, 0.930, 0.627),
    "inception3": (1.0, 0.983, 0.964, 0.923, 0.879),
}
_CHRONUS_GPUS_AND_NODES = ((2, 2), (4, 2), (4, 4), (8, 2), (8, 4))
# Measured model by prefix of a model's name: models of a family share its locality curve.
_FAMILIES = {
    "alexnet": "alexnet",
    "vgg": "vgg16",
    "res": "resnet101",
    "mobilenet": "mobilenet_v2",
    "inception": "inception3",
}


class TrueRates:
    """True rates of the jobs of a workload, by position."""

    def __init__(self, jobs: Workload, servers: Servers) -> None:
        self._gpus = jobs.gpus
        self._models = jobs.model
        self._named_types = jobs.gpu_type
        self._groups = servers.groups
        largest = max(servers.groups, key=lambda group: group.nodes * group.configuration_set.devices)
        self._usual = largest.configuration_set
        names = [_ALIASES.get(name.lower(), name.lower()) for name in jobs.model.names]
        known = list(synergy_profiles())
        positions = np.array([known.index(name) if name in known else -1 for name in names] or [-1])
        self._position = positions[jobs.model.codes] if len(jobs) else np.zeros(0, np.int64)
        self._matrices = [profile.matrix for profile in synergy_profiles().values()]
        self._recorded = [self._recorded_amounts(jobs, job) for job in range(len(jobs))]
        self._measured = lru_cache(_MOST_KEPT)(self._measure)
        self._of_distance = cache(self._slowdown)

    def rate(self, job: int, gang: Gang) -> float:
        """Return the rate relative to the recorded one, above zero."""
        claims = [claim for claim in gang.claims if claim.device_mask]
        if not claims:
            return 1.0
        amounts = min([self._of_amounts(job, claim) for claim in claims])
        gpus = sum([claim.device_mask.bit_count() for claim in claims])
        rate = amounts * (
            self._of_distance(_family(self._models[job]), gpus, len(claims), gang.level) if gpus > 1 else 1.0
        )
        if len(self._groups) > 1 and not self._named_types[job]:
            rate *= min([self._of_type(job, claim.node) for claim in claims])
        return max(rate, _RATES_LEAST)

    def known(self, is_profiled: Callable[[Integers], Flags]) -> Known:
        """Return the matrices that a policy may read: those of jobs (by number) that are profiled by now."""

        def position(numbers: Integers) -> Integers:
            return np.where(is_profiled(numbers), self._position[numbers - 1], -1)

        # Only tunings go by profiles; other policies load none of them.
        from ganger_master.policies.tunings import Known, profiles_of

        return Known(profiles_of(self._matrices), position)

    # -- cores and memory ----------------------------------------------------------------------------------------------

    def _recorded_amounts(self, jobs: Workload, job: int) -> tuple[int, int]:
        gpus, cpus, memory = int(jobs.gpus[job]), jobs.cpus[job], jobs.memory_bytes[job]
        return (
            share_of_cores(self._usual, 1) if np.isnan(cpus) else max(1, int(1000 * cpus) // gpus),
            share_of_memory(self._usual, 1) if np.isnan(memory) else max(1, int(memory) // gpus),
        )

    def _of_amounts(self, job: int, claim: Claim) -> float:
        gpus, millicores = claim.device_mask.bit_count(), sum(claim.millicores)
        position = int(self._position[job])
        recorded = self._recorded[job]
        if (millicores, claim.memory_bytes) == (recorded[0] * gpus, recorded[1] * gpus):
            return 1.0
        if position < 0:
            return min(1.0, millicores / (recorded[0] * gpus), claim.memory_bytes / (recorded[1] * gpus))
        return self._measured(position, millicores, claim.memory_bytes, gpus) / self._measured(position, *recorded, 1)

    def _measure(self, position: int, millicores: int, memory_bytes: int, gpus: int) -> float:
        return max(self._matrices[position].rate(millicores / 1000 / gpus, memory_bytes / gpus), _RATES_LEAST)

    # -- distance ------------------------------------------------------------------------------------------------------

    def _slowdown(self, family: str, gpus: int, nodes: int, level: LocalityLevel) -> float:
        best = _closest(gpus, self._groups)
        there, recorded = _relative_speed(family, gpus, nodes, level), _relative_speed(family, gpus, *best)
        if nodes > 1 == best[0]:
            # The measurements compare with one server, whatever the locality of devices inside it.
            recorded = 1.0
        return min(1.0, there / recorded)

    # -- type ----------------------------------------------------------------------------------------------------------

    @cached_property
    def _types(self) -> dict[str, str]:
        return {row.node: group.configuration_set.device_type for group in self._groups for row in group.rows()}

    def _of_type(self, job: int, node: str) -> float:
        model = self._models[job]
        return _type_speed(model, self._types[node]) / _type_speed(model, self._usual.device_type)


# Minimum rate, so that every gang makes progress.
_RATES_LEAST = 1e-3
_MOST_KEPT = 100_000


def without_arenas(servers: Servers) -> Servers:
    """Return the servers without host-memory arenas: the shares in published profiles refer to all host memory."""
    groups = [
        replace(group, configuration_set=structs.replace(group.configuration_set, device_memory_bytes=0))
        for group in servers.groups
    ]
    return Servers(tuple(groups))


def _family(model: str) -> str:
    return next((name for start, name in _FAMILIES.items() if model.lower().startswith(start)), "")


def _relative_speed(family: str, gpus: int, nodes: int, level: LocalityLevel) -> float:
    """Return the speed relative to the same GPUs in one server at their best locality."""
    model = _locality(family)
    law = model.relative_speed(gpus, nodes, level)
    if (gpus, nodes) not in _CHRONUS_GPUS_AND_NODES or not family:
        return law
    speed = _CHRONUS[family][_CHRONUS_GPUS_AND_NODES.index((gpus, nodes))]
    return speed * law / model.relative_speed(gpus, nodes, LocalityLevel.RACK)


@cache
def _locality(family: str) -> LocalityModel:
    if not family:
        return UNKNOWN_JOB
    pairs = zip(_CHRONUS_GPUS_AND_NODES, _CHRONUS[family], strict=True)
    return fit_locality([LocalityPoint(gpus, nodes, speed) for (gpus, nodes), speed in pairs])


def _closest(gpus: int, groups: tuple[ServerGroup, ...]) -> tuple[int, LocalityLevel]:
    """Return the smallest number of servers that hold so many GPUs, and the closest locality there."""
    found = []
    for group in groups:
        made = group.configuration_set
        if not made.devices:
            continue
        nodes = -(-gpus // made.devices)
        if nodes == 1:
            levels = [part.level for part in made.groups if part.device_mask.bit_count() >= gpus]
            found.append((1, min(levels, default=LocalityLevel.NODE)))
        else:
            near = group.nodes_per_rack >= nodes
            found.append(
                (nodes, LocalityLevel.RACK if near else LocalityLevel.FABRIC if group.fabric else LocalityLevel.CLUSTER)
            )
    return min(found)


@cache
def _type_speed(model: str, device_type: str) -> float:
    """Return the speed relative to the fastest type; 1 for types without measurements."""
    speeds: dict[str, dict[str, float]] = {}
    for (kind, is_on_one_node, name, gpus), speed in gavel_speeds().items():
        if is_on_one_node and gpus == 1 and speed:
            speeds.setdefault(name, {})[kind] = speed
    kind = device_type.lower()
    of_models = [own for name, own in speeds.items() if name == model and kind in own] or list(speeds.values())
    relative = [own[kind] / max(own.values()) for own in of_models if kind in own]
    return median(relative) if relative else 1.0


# Names of the same models in traces and papers.
_SCALING_ALIASES = {"res50": "resnet50", "deepspeech": "deepspeech2", "inceptionv3": "inception3", "bert-base": "bert"}
# A published model and its global batch.
_Curve: TypeAlias = tuple[str, int]


class SizeLaw(Protocol):
    """How the rates of the jobs of a workload scale with GPUs, by position."""

    def rate(self, job: int, gpus: Sequence[int]) -> float:
        """Return the rate with so many GPUs on each node, relative to that with the GPUs in its trace."""
        ...


class Scaling(SizeLaw):
    """The published speeds of models, whatever the nodes."""

    def __init__(self, jobs: Workload, seed: int) -> None:
        self._gpus = jobs.gpus
        published = [(model, batch) for model, batches in elasticflow_speeds().items() for batch in batches]
        random = np.random.default_rng(seed)
        of_job = random.integers(len(published), size=len(jobs)).tolist()
        names = sorted(name for name in jobs.model.names if name)
        of_model = dict(zip(names, random.integers(len(published), size=len(names)).tolist(), strict=True))
        self._curve: list[_Curve] = []
        for job, (model, batch) in enumerate(zip(jobs.model.texts(), jobs.batch_size.tolist(), strict=True)):
            self._curve.append(_published(model, batch) or published[of_model[model] if model else of_job[job]])

    def rate(self, job: int, gpus: Sequence[int]) -> float:
        return published_speed(self._curve[job], sum(gpus)) / published_speed(self._curve[job], int(self._gpus[job]))


def devices_by_node(gang: Gang) -> tuple[int, ...]:
    return tuple([claim.device_mask.bit_count() for claim in gang.claims if claim.device_mask])


def _published(model: str, batch: float) -> _Curve | None:
    """Return the published curve of the nearest batch size; None for a model that is not published."""
    name = _SCALING_ALIASES.get(model.lower(), model.lower())
    batches = elasticflow_speeds().get(name)
    if batches is None:
        return None
    return name, min(batches, key=lambda known: (0.0 if math.isnan(batch) else abs(known - batch), known))


@cache
def published_speed(curve: tuple[str, int], gpus: int) -> float:
    """Return ElasticFlow's steps per second of a model and global batch on so many GPUs."""
    points = elasticflow_speeds()[curve[0]][curve[1]]
    sizes = sorted(points)
    if gpus < sizes[0]:
        return points[sizes[0]] * gpus / sizes[0]
    logs = np.interp(math.log(gpus), np.log(sizes), np.log([points[size] for size in sizes]))
    return math.exp(float(logs))


# Share of an epoch.
_ROUNDING = 1e-6


class Work:
    """Remaining and completed work of jobs, by position in the workload."""

    def __init__(self, duration_s: Floats) -> None:
        # Plain arrays: nearly all access is by single element, which takes several times as long in NumPy arrays.
        self._left: array[float] = array("d", duration_s.tolist())
        # Counted separately: derived from the remaining work, its rounding would reveal the end to policies.
        self._done, self._since, self._rate = (array("d", bytes(8 * len(self._left))) for _ in range(3))
        # Views of the same memory, for oracles.
        self._columns = [np.frombuffer(one) for one in (self._left, self._since, self._rate)]

    def begin(self, job: int, now: float, rate: float = 1.0) -> float:
        """Start training at a rate. Return the time of its end if nothing changes."""
        self._since[job], self._rate[job] = now, rate
        return now + self._left[job] / rate

    def change(self, job: int, now: float, rate: float) -> float:
        """Continue at another rate. Return the new time of its end."""
        self.stop(job, now)
        return self.begin(job, now, rate)

    def stop(self, job: int, now: float) -> float:
        """Stop training. Return the seconds of work left."""
        done = (now - self._since[job]) * self._rate[job]
        self._left[job] -= done
        self._done[job] += done
        self._rate[job] = 0.0
        return self._left[job]

    def credit(self, job: int, seconds: float) -> float:
        """Count seconds of work that were done outside of `begin` and `stop`. Return the seconds of work left."""
        done = min(seconds, self._left[job])
        self._left[job] -= done
        self._done[job] += done
        return self._left[job]

    def done(self, job: int, now: float) -> float:
        """Return the seconds of work done, which the job reports as steps."""
        return self._done[job] + (now - self._since[job]) * self._rate[job]

    def epoch_end(self, job: int, now: float, epoch_s: float) -> float:
        """Return when the job, which trains, comes to the end of an epoch of so many seconds of work, at the earliest
        `now`, which is returned for NaN; infinite if it ends before."""
        rate, rounding = self._rate[job], _ROUNDING * epoch_s
        trained = (now - self._since[job]) * rate
        over = math.fmod(self._done[job] + trained + rounding, epoch_s)
        # The end that was waited for may be off by rounding.
        if math.isnan(epoch_s) or over <= 2.0 * rounding:
            return now
        missing = epoch_s + rounding - over
        return now + missing / rate if missing < self._left[job] - trained - rounding else math.inf

    def remaining(self, jobs: Integers, now: float) -> Floats:
        """Return the seconds of work left; for oracles."""
        left, since, rate = (column[jobs] for column in self._columns)
        return np.maximum(left - (now - since) * rate, 0.0)
