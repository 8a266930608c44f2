"""What jobs use of their GPUs, and how fast they are beside others on one. Hidden from every policy but for what
daemons measure: how busy a job keeps its GPU, how much of its memory it uses, and rates.

How busy: as Gandiva measured of eight models (OSDI 2018, table 1); a job of another model is like one of these, by the
seed. Memory is not published there: a tenth to six tenths of the device, by the seed and the model.

Residents of a GPU that want more than all of it each get their share, speed = min(1, 1 / (0.9 x sum of utilisations)),
a law whose mean error over 1,388 pairs that Lucid measured (ASPLOS 2023) is 0.071. Every set of models is off it by as
much, to one side or the other, by the seed: no policy can reckon what it has not tried.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import numpy as np

from ganger_master.estimators.interference import Pressure
from ganger_master.simulator.traces.servers import Servers
from ganger_master.simulator.traces.workload import Workload

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
# Of a normal error, the mean size is 0.8 deviations.
_SCATTER = 0.071 / math.sqrt(2.0 / math.pi)
_LEAST = 0.05


class Footprints:
    """Of the jobs of a workload, by position."""

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
        self._memory = {name: int(share * self._device_bytes) for name, share in shares.items()}
        self._speeds = cache(self._speeds_of)

    def signature(self, job: int) -> str:
        """What behaves alike."""
        return self._models[job]

    def utilisation(self, job: int) -> float:
        return _UTILISATION[self._models[job]]

    def memory_bytes(self, job: int) -> int:
        return self._memory[self._models[job]]

    def pressure(self, job: int) -> Pressure:
        return Pressure(self.utilisation(job), float(self.memory_bytes(job)))

    def speed(self, job: int, beside: Sequence[int]) -> float:
        """Against alone on the device."""
        if not beside:
            return 1.0
        models = tuple(sorted(self._models[other] for other in beside))
        return self._speeds(self._models[job], models)

    def _speeds_of(self, model: str, beside: tuple[str, ...]) -> float:
        everybody = sorted((model, *beside))
        load = _LOAD * sum(_UTILISATION[name] for name in everybody)
        names = list(_UTILISATION)
        random = np.random.default_rng([self._seed, 2, *(names.index(name) for name in everybody)])
        off = 1.0 + _SCATTER * float(random.standard_normal())
        return max(_LEAST, min(1.0, off / max(load, 1e-9)))


def _key(model: str) -> str:
    return model.lower().replace("-", "").replace("milstm", "mi-lstm")
