"""B19. How much worse the worst-off job is for sharing (Themis, NSDI 2020: the largest rho, finish time shared by
finish time alone on an equal part of the cluster, is 1.2 on its testbed).

Set-up: 200 jobs of Synergy's generator (durations from half an hour to a week, gangs of 1, 2, 4 and 8) on 8 servers of
8 GPUs, Poisson arrivals at loads 0.7, 1.0 and 1.3, switching costs at their defaults, plans at most every 5 minutes.
`ftf-oracle` serves the job that is worst off first and knows the remaining work, which Themis's jobs report; `ftf`
knows no durations; `las2d` and `fifo` stand beside. The figure compared is the largest rho of any job under
`ftf-oracle`, mean over seeds, at the worst of the loads. Contention is the mean number of live jobs over a job's life,
as in Themis. An equal part is one of the GPUs, in which a gang that fits runs at full speed; Themis itself allows the
time alone on the whole cluster by the contention, which is the same for its apps, as large as the cluster, and far more
for gangs like these. Its rho stands beside as `own`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from ganger_master.simulator.inputs import ReplayOptions
from ganger_master.simulator.report.figures import figures, finish_time_fairness, interval, mean_contention
from ganger_master.simulator.run import simulate
from ganger_master.simulator.traces.servers import servers_from_flags
from ganger_master.simulator.traces.workload import scaled_to_load, synthetic

from experiments.experiment import CoreUse, Experiment, MeasuredRows, Row, Setting

_JOBS, _NODES, _GPUS_PER_NODE = 200, 8, 8
_LOADS = (0.7, 1.0, 1.3)
_COMPARED = "ftf-oracle"
_POLICIES = (_COMPARED, "ftf", "las2d", "fifo")


def parts(setting: Setting) -> Sequence[Row]:
    return [{"load": load, "seed": seed} for load in _LOADS for seed in setting.seeds(5)]


def measure(setting: Setting, part: Row) -> Sequence[Row]:
    gpus = _NODES * _GPUS_PER_NODE
    jobs = scaled_to_load(synthetic(_JOBS, 1.0, part["seed"]), gpus, part["load"])
    servers = servers_from_flags(nodes=_NODES, gpus_per_node=_GPUS_PER_NODE)
    rows: list[Row] = []
    for policy in _POLICIES:
        run = simulate(jobs, servers, policy, ReplayOptions(seed=part["seed"], plan_every_s=300.0))
        found, done = figures(run), run.outcomes
        rho = finish_time_fairness(done.submit_s, done.end_s, done.gpus, done.duration_s, gpus, run.end_s)
        worst = int(np.nanargmax(rho))
        own = done.jct_s / (done.duration_s * mean_contention(done.submit_s, done.end_s))
        rows.append(
            {
                "policy": policy,
                "max_rho": found.max_rho,
                "own_max_rho": float(own.max()),
                "worst_gpus": int(done.gpus[worst]),
                "worst_duration_s": float(done.duration_s[worst]),
                "worst_waiting_s": float(done.waiting_s[worst]),
                "p95_rho": found.p95_rho,
                "share_above_1": found.share_rho_above_1,
                "avg_jct_s": found.avg_jct_s,
            }
        )
    return rows


def conclude(rows: Sequence[Row]) -> MeasuredRows:
    table = {(row["load"], row["policy"], row["seed"]): row for row in rows}
    seeds = sorted({row["seed"] for row in rows})
    loads = sorted({row["load"] for row in rows})

    def of(figure: str, policy: str, load: float) -> list[float]:
        return [table[load, policy, seed][figure] for seed in seeds]

    worst = max(loads, key=lambda load: np.mean(of("max_rho", _COMPARED, load)))
    ours = {"max_rho": interval(of("max_rho", _COMPARED, worst))}
    for policy in _POLICIES:
        label = policy.replace("-", "_")
        for load in loads:
            ours[f"{label}_max_rho_at_{load:g}"] = interval(of("max_rho", policy, load))
        ours[f"{label}_own_max_rho_at_{worst:g}"] = interval(of("own_max_rho", policy, worst))
    return MeasuredRows(
        ours,
        len(seeds),
        load={"compared": worst},
        why="gangs here are whole and wait for room, Themis's apps are as large as the cluster and may be given a part "
        f"of their GPUs; FIFO is at {np.mean(of('max_rho', 'fifo', worst)):.0f}, and by Themis's own allowance at "
        f"{np.mean(of('own_max_rho', 'fifo', worst)):.2f}",
    )


FAIRNESS = Experiment("B19", parts, measure, conclude, core=CoreUse.WHOLE)
