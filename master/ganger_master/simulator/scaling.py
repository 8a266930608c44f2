"""How much faster an elastic job really goes with other numbers of GPUs than that of its trace. Hidden from every
policy but for what was measured.

Of the models that ElasticFlow published (ASPLOS 2023: A100, eight in a server, one global batch whatever the size) it
is what it measured, between its points straight in the logarithms; fewer GPUs than it measured go as fast each as its
fewest, more are of no further use. Every other model has the curve of one of those, drawn by the seed, the same for all
of its jobs; and so has each job that names none.
"""

from __future__ import annotations

import math
from typing import TypeAlias

import numpy as np

from ganger_master.simulator.traces.profiles import elasticflow_speeds
from ganger_master.simulator.traces.workload import Workload

# Names of the same models in traces and papers.
_ALIASES = {"res50": "resnet50", "deepspeech": "deepspeech2", "inceptionv3": "inception3", "bert-base": "bert"}
# A published model and its global batch.
_Curve: TypeAlias = tuple[str, int]


class Scaling:
    """Of the jobs of a workload, by position."""

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
        self._known: dict[tuple[_Curve, int], float] = {}

    def rate(self, job: int, gpus: int) -> float:
        """1 with as many GPUs as its trace says."""
        return self._speed(self._curve[job], gpus) / self._speed(self._curve[job], int(self._gpus[job]))

    def _speed(self, curve: _Curve, gpus: int) -> float:
        found = self._known.get((curve, gpus))
        if found is None:
            found = self._known[curve, gpus] = _measured(curve, gpus)
        return found


def _published(model: str, batch: float) -> _Curve | None:
    """That of the nearest batch; None for a model nobody published."""
    name = _ALIASES.get(model.lower(), model.lower())
    batches = elasticflow_speeds().get(name)
    if batches is None:
        return None
    return name, min(batches, key=lambda known: (0.0 if math.isnan(batch) else abs(known - batch), known))


def _measured(curve: _Curve, gpus: int) -> float:
    points = elasticflow_speeds()[curve[0]][curve[1]]
    sizes = sorted(points)
    if gpus < sizes[0]:
        return points[sizes[0]] * gpus / sizes[0]
    logs = np.interp(math.log(gpus), np.log(sizes), np.log([points[size] for size in sizes]))
    return math.exp(float(logs))
