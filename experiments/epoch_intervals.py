"""B24. A simplified Gandiva in intervals of an epoch: completion times, and deadlines by the number of jobs (Yu,
University of Virginia, 2021, figures 2 and 3: the share of jobs that are completed before their deadlines falls as the
number of jobs grows; the text gives no figures).

Set-up: through the production core and the planner's loop in virtual time, 20 nodes of a GPU, as in the report's
simulation. A job is a worker and a parameter server on two nodes, whose epoch takes between 49 and 330 s (what the
report's AlexNet takes with batches of 128 and 16; log-uniform); it has 3 to 15 epochs. Jobs come uniformly within
3,000 s: 10, 20, 40 or 80, of which the fewer are the first of the more. Neither how many epochs nor what deadlines are
is published: a job has until one and a half to four times the time that it needs alone.

`report` is what the report describes: at the end of an epoch the job that has waited longest is next (`round-robin`,
all jobs scheduled at epochs). Plans that stop jobs are as long apart as a mean epoch, 150 s. Beside it stand, with the
same jobs: the same between any two steps (`any_step`), earliest deadline first at epochs and at any step
(`edf_epochs`, `edf`), and the default (`ganger`, at any step). Switches cost what they do by default. Figure 2 is told
by deciles, of all seeds with 40 jobs; each job's time is in the rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from ganger_master.simulator.inputs import ReplayOptions
from ganger_master.simulator.report.figures import Interval, interval
from ganger_master.simulator.run import simulate
from ganger_master.simulator.traces.servers import servers_from_flags
from ganger_master.simulator.traces.workload import Workload, workload

from experiments.experiment import CoreUse, Experiment, MeasuredRows, Row, Setting

_NODES, _ARRIVALS_S, _GANG = 20, 3000.0, 2
_JOBS = (10, 20, 40, 80)
_EPOCH_S, _EPOCHS, _SLACK = (49.0, 330.0), (3, 15), (1.5, 4.0)
# The mean length of an epoch.
_PLAN_EVERY_S = 150.0
_TOLD_OF = 40


class Way(NamedTuple):
    policy: str
    at_epochs: bool


_WAYS: Mapping[str, Way] = {
    "report": Way("round-robin", True),
    "any_step": Way("round-robin", False),
    "edf_epochs": Way("edf", True),
    "edf": Way("edf", False),
    "ganger": Way("ganger", False),
}


def parts(setting: Setting) -> Sequence[Row]:
    return [{"jobs": jobs, "seed": seed} for jobs in _JOBS for seed in setting.seeds(5)]


def measure(setting: Setting, part: Row) -> Sequence[Row]:
    return [{"way": name, **ended(way, part["jobs"], part["seed"])} for name, way in _WAYS.items()]


def ended(way: Way, count: int, seed: int) -> Row:
    """Return the share of jobs that met their deadlines, and each job's completion time in seconds."""
    jobs = drawn(count, seed)
    if not way.at_epochs:
        jobs = jobs.with_columns(epoch_s=np.full(count, np.nan))
    servers = servers_from_flags(nodes=_NODES, gpus_per_node=1)
    found = simulate(jobs, servers, way.policy, ReplayOptions(seed=seed, plan_every_s=_PLAN_EVERY_S)).outcomes
    return {
        "met": float((found.end_s <= found.deadline_s).mean()),
        "jct_s": float(found.jct_s.mean()),
        "stops": float(found.preemptions.mean()),
        "load": float(jobs.gpu_seconds.sum()) / (_NODES * _ARRIVALS_S),
        "jcts_s": [round(time, 1) for time in found.jct_s.tolist()],
    }


def drawn(count: int, seed: int) -> Workload:
    """Return the first jobs of a seed, by the order in which they are drawn; they come at the same times whatever the
    number of others."""
    random = np.random.default_rng(seed)
    most = max(_JOBS)
    epoch_s = np.exp(random.uniform(math.log(_EPOCH_S[0]), math.log(_EPOCH_S[1]), most))
    epochs = random.integers(_EPOCHS[0], _EPOCHS[1] + 1, most)
    arrivals, slack = random.uniform(0.0, _ARRIVALS_S, most), random.uniform(*_SLACK, most)
    duration_s = epochs * epoch_s
    return workload(
        map(str, range(count)),
        arrivals[:count],
        np.full(count, _GANG),
        duration_s[:count],
        numbers={"epoch_s": epoch_s[:count], "deadline_s": (arrivals + slack * duration_s)[:count]},
    )


def conclude(rows: Sequence[Row]) -> MeasuredRows:
    table = {(row["way"], row["jobs"], row["seed"]): row for row in rows}
    seeds = sorted({row["seed"] for row in rows})
    numbers = sorted({row["jobs"] for row in rows})

    def of(figure: str, way: str, jobs: int) -> list[float]:
        return [table[way, jobs, seed][figure] for seed in seeds]

    ours: dict[str, float | Interval] = {}
    for way in _WAYS:
        for jobs in numbers:
            ours[f"{way}_met_of_{jobs}"] = interval(of("met", way, jobs))
        ours[f"{way}_jct_s_of_{_TOLD_OF}"] = interval(of("jct_s", way, _TOLD_OF))
        every = [seconds for seed in seeds for seconds in table[way, _TOLD_OF, seed]["jcts_s"]]
        ours |= {f"{way}_jct_p{share}_s": float(np.percentile(every, share)) for share in (10, 30, 50, 70, 90)}

    def met(way: str) -> str:
        return f"{np.mean(of('met', way, _TOLD_OF)):.0%}"

    shares = [float(np.mean(of("met", "report", jobs))) for jobs in numbers]
    gained = [
        ours - theirs for ours, theirs in zip(of("met", "edf", _TOLD_OF), of("met", "report", _TOLD_OF), strict=True)
    ]
    return MeasuredRows(
        {
            "most_rise": max(more - fewer for fewer, more in pairwise(shares)),
            "fall": shares[0] - shares[-1],
            "gained_by_edf": interval(gained),
            **ours,
        },
        len(seeds),
        load={f"{jobs} jobs": float(np.mean(of("load", "report", jobs))) for jobs in numbers},
        why="directional: the report's text has no figures; of its jobs, "
        f"{' '.join(f'{share:.0%}' for share in shares)} meet their deadlines with {' '.join(map(str, numbers))} jobs. "
        f"Turns make all jobs late, whether they end with an epoch or not ({met('any_step')} of {_TOLD_OF} between any "
        f"two steps); an order that goes by deadlines meets {met('edf_epochs')}, at epochs, too",
    )


EPOCH_INTERVALS = Experiment("B24", parts, measure, conclude, core=CoreUse.WHOLE)
