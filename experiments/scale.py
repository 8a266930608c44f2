"""B4. How long Optimus takes to decide for a large cluster (EuroSys 2018, section 6.5: 5 s for 4,000 jobs with about
100,000 tasks on 16,000 nodes).

Set-up: nodes of 16 cores, 4 GPUs and 80 GB; parameter servers of 2 cores and 9 GB, workers of 2 cores, a GPU and 8 GB,
as in the released parameters. Jobs follow the published coefficients, half of them synchronous, half asynchronous, each
scaled by its own factor (lognormal, 0.5), with 1,000 to 100,000 steps left. Timed are all allocations by marginal gain
and the placement of all tasks, on one thread: processor time, since other experiments run beside this one; the wall
clock stands beside it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
from ganger_master.estimators.speed import ServerSpeed, UpdateMode
from ganger_master.policies.optimus_sizes import allocated, growing, server_speeds
from ganger_master.simulator.report.figures import interval

from experiments.experiment import CoreUse, Experiment, MeasuredRows, Row, Setting
from experiments.optimus_spread import spread

_JOBS, _NODES = 4_000, 16_000
# Optimus's published coefficients (dossier, section 3a.2).
_MODELS = (
    ServerSpeed(UpdateMode.SYNCHRONOUS, (1.02, 2.78, 4.92, 0.0, 0.02, 0.0)),
    ServerSpeed(UpdateMode.ASYNCHRONOUS, (2.83, 3.92, 0.0, 0.11)),
)
# Cores, GPUs, GB of a node; of a parameter server and a worker.
_NODE = (16.0, 4.0, 80.0)
_TASKS = ((2.0, 0.0, 9.0), (2.0, 1.0, 8.0))


def parts(setting: Setting) -> Sequence[Row]:
    return [{"seed": seed} for seed in setting.seeds(5)]


def measure(setting: Setting, part: Row) -> Sequence[Row]:
    random = np.random.default_rng(part["seed"])
    models = [
        ServerSpeed(model.mode, tuple(factor * seconds for seconds in model.coefficients))
        for model, factor in zip(_MODELS * (_JOBS // 2), random.lognormal(0.0, 0.5, _JOBS).tolist(), strict=True)
    ]
    shapes = np.tile(np.array(_TASKS), (_JOBS, 1, 1))
    free = np.tile(np.array(_NODE), (_NODES, 1))
    jobs = growing(random.uniform(1e3, 1e5, _JOBS), server_speeds(models), shapes)
    wall, cpu = time.perf_counter(), time.process_time()
    counts = allocated(jobs, free.sum(axis=0))
    placed = spread(counts, shapes, free)
    return [
        {
            "cpu_seconds": time.process_time() - cpu,
            "wall_seconds": time.perf_counter() - wall,
            "tasks": int(counts.sum()),
            "placed": int(placed.counts.sum()),
        }
    ]


def conclude(rows: Sequence[Row]) -> MeasuredRows:
    return MeasuredRows(
        {
            "seconds": interval([row["cpu_seconds"] for row in rows]),
            "wall_seconds": interval([row["wall_seconds"] for row in rows]),
            "tasks": interval([row["tasks"] for row in rows]),
            "placed_tasks": interval([row["placed"] for row in rows]),
        },
        len(rows),
        why="another machine, six years on, and processor time instead of the wall clock",
    )


SCALE = Experiment("B4", parts, measure, conclude, core=CoreUse.ARITHMETIC)
