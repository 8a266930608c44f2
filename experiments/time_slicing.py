"""B18. Two-dimensional LAS against time slicing in turns (Tiresias, NSDI 2019: 480 jobs on 60 GPUs; in simulation
about half of Gandiva's average job completion time, and 5.5 times less than YARN's on the testbed).

Set-up: 480 jobs on 15 servers of 4 GPUs, through the production core and the planner's loop in virtual time; all
policies plan every 60 s, as Gandiva's slices last. `tiresias` has the thresholds of the authors' simulator,
`round-robin` serves first the job that has waited longest for its next turn. Switching costs nothing, which favours
turns: they switch a hundred times as often.

The trace of 480 jobs is not published. The authors' repository has a scaled-down example of 60 (60_job.csv), from which
gangs and durations are drawn together, and the GPU time of the jobs of a production cluster (yarn-gput10000.csv), from
which GPU time is drawn up to the 95th percentile (one job in a thousand beyond would make all of the average), with
gangs of the example. Between them stand durations log-uniform from 2 minutes to 2 hours. Arrivals are Poisson at the
stated loads. The cell compared is chosen by another baseline than the one compared: that in which FIFO, which is
YARN's, is closest to being 5.5 times worse than 2D-LAS. The share of all cells with a ratio of 1.5 stands beside.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from itertools import product

import numpy as np
from ganger_master.policies.orders import Floats, Integers
from ganger_master.simulator.inputs import FREE, ReplayOptions
from ganger_master.simulator.report.figures import interval, paired_ratio
from ganger_master.simulator.run import simulate
from ganger_master.simulator.traces.servers import servers_from_flags
from ganger_master.simulator.traces.workload import Workload, scaled_to_load, workload

from experiments.experiment import CoreUse, Experiment, MeasuredRows, Row, Setting
from experiments.paper_claims import claims

_EXAMPLE, _GPU_TIME = "jobs_tiresias_60.csv", "dist_tiresias_gputime_10000.csv"
_JOBS, _NODES, _GPUS_PER_NODE = 480, 15, 4
_GPUS = _NODES * _GPUS_PER_NODE
_DURATIONS = ("example", "log-uniform", "production")
_LOADS = (1.0, 2.0)
_ORDERS = ("tiresias", "round-robin", "fifo", "srtf")
_OPTIONS = ReplayOptions(round_s=60.0, costs=FREE)
_MOST_PERCENT = 95
_PAPER_FIFO_RATIO = 5.5


def parts(setting: Setting) -> Sequence[Row]:
    return [{"durations": durations, "seed": seed} for durations in _DURATIONS for seed in setting.seeds(5)]


def measure(setting: Setting, part: Row) -> Sequence[Row]:
    servers = servers_from_flags(nodes=_NODES, gpus_per_node=_GPUS_PER_NODE)
    rows: list[Row] = []
    for load, name in product(_LOADS, _ORDERS):
        jobs = drawn(setting, part["durations"], load, part["seed"])
        found = simulate(jobs, servers, name, _OPTIONS).outcomes
        rows.append(
            {
                "load": load,
                "policy": name,
                "avg_jct_s": float(found.jct_s.mean()),
                "p95_jct_s": float(np.percentile(found.jct_s, 95)),
                "makespan_s": float(found.end_s.max()),
            }
        )
    return rows


def conclude(rows: Sequence[Row]) -> MeasuredRows:
    table = {(row["durations"], row["load"], row["policy"], row["seed"]): row["avg_jct_s"] for row in rows}
    cells = list(dict.fromkeys((row["durations"], row["load"]) for row in rows))
    seeds = sorted({row["seed"] for row in rows})

    def jcts(cell: tuple[str, float], policy: str) -> list[float]:
        return [table[*cell, policy, seed] for seed in seeds]

    ratios = {cell: paired_ratio(jcts(cell, "round-robin"), jcts(cell, "tiresias")) for cell in cells}
    by_fifo = {cell: paired_ratio(jcts(cell, "fifo"), jcts(cell, "tiresias")) for cell in cells}
    compared = min(cells, key=lambda cell: abs(np.log(by_fifo[cell].mean / _PAPER_FIFO_RATIO)))
    enough = claims()["B18"].holds["jct_ratio"]["at_least"]
    return MeasuredRows(
        {
            "jct_ratio": ratios[compared],
            "share_of_cells": float(np.mean([ratio.mean >= enough for ratio in ratios.values()])),
            **{f"ratio_{name.replace('-', '_')}_at_{load:g}": ratio for (name, load), ratio in ratios.items()},
            "jct_s": interval(jcts(compared, "tiresias")),
            "fifo_ratio": by_fifo[compared],
            "srtf_jct_s": interval(jcts(compared, "srtf")),
        },
        len(seeds),
        load={f"compared ({compared[0]})": compared[1]},
        why=f"the paper's trace is not published; of the declared cells FIFO is furthest behind in this one, "
        f"{by_fifo[compared].mean:.2f} times; turns lose by how much durations differ and queues grow",
    )


def drawn(setting: Setting, durations: str, load: float, seed: int) -> Workload:
    random = np.random.default_rng(seed)
    gangs, seconds = _example(setting)
    chosen = random.integers(len(gangs), size=_JOBS)
    gpus = gangs[chosen]
    arrivals = np.cumsum(random.exponential(1.0, _JOBS))
    if durations == "example":
        lengths = seconds[chosen]
    elif durations == "log-uniform":
        lengths = np.exp(random.uniform(np.log(120.0), np.log(7200.0), _JOBS))
    else:
        times = _column(setting, _GPU_TIME, "gpu_time_s")
        lengths = random.choice(times[times <= np.percentile(times, _MOST_PERCENT)], _JOBS) / gpus
    return scaled_to_load(workload(map(str, range(_JOBS)), arrivals, gpus, lengths), _GPUS, load)


def _example(setting: Setting) -> tuple[Integers, Floats]:
    return _column(setting, _EXAMPLE, "gpus").astype(np.int64), _column(setting, _EXAMPLE, "duration_s")


def _column(setting: Setting, name: str, column: str) -> Floats:
    with (setting.traces / name).open(newline="") as file:
        return np.array([float(row[column]) for row in csv.DictReader(file)])


TIME_SLICING = Experiment(
    "B18", parts, measure, conclude, core=CoreUse.WHOLE, needs=(("traces", _EXAMPLE), ("traces", _GPU_TIME))
)
