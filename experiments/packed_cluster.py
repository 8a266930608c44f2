"""B9. How much more a cluster does when jobs that leave GPUs idle are co-located (Gandiva, OSDI 2018, figure 15: 26 %
more work of the GPUs).

Set-up: 8 servers of 4 GPUs, through the production core and the planner's loop in virtual time. Ten jobs of one GPU for
every GPU come at once, each alone for half an hour to eight hours (log-uniform), training the models of Gandiva's table
1 (drawn; `simulator.true_rates` has their utilisations and what two of them lose together). `gandiva` decides from
measured windows which jobs are tried together and which stay; the default, `ganger`, stands beside it. The gain is the
work of all jobs, in GPU-seconds alone, by the GPU-seconds in which a GPU was held; without co-location it is one for
one. Time slices and moves cost what they do by default, and a trial that is undone costs the time it took. The slowest
is the job that made the least of the seconds in which it trained.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from ganger_master.simulator.inputs import ReplayOptions
from ganger_master.simulator.report.figures import interval
from ganger_master.simulator.run import simulate
from ganger_master.simulator.traces.servers import servers_from_flags
from ganger_master.simulator.traces.workload import workload
from ganger_master.simulator.true_rates import Footprints

from experiments.experiment import CoreUse, Experiment, MeasuredRows, Row, Setting

_NODES, _GPUS_PER_NODE, _JOBS_PER_GPU = 8, 4, 10
_SHORTEST_S, _LONGEST_S = 1800.0, 8 * 3600.0
_POLICIES = ("gandiva", "ganger")


def parts(setting: Setting) -> Sequence[Row]:
    return [{"policy": policy, "seed": seed} for policy in _POLICIES for seed in setting.seeds(5)]


def measure(setting: Setting, part: Row) -> Sequence[Row]:
    return [worked(part["policy"], part["seed"])]


def worked(policy: str, seed: int, jobs_per_gpu: int = _JOBS_PER_GPU) -> Row:
    """Return what a cluster makes of its GPUs under a policy."""
    servers = servers_from_flags(nodes=_NODES, gpus_per_node=_GPUS_PER_NODE)
    count = jobs_per_gpu * servers.gpus
    lasts = np.exp(np.random.default_rng(seed).uniform(np.log(_SHORTEST_S), np.log(_LONGEST_S), count))
    jobs = workload(map(str, range(count)), np.zeros(count), np.ones(count, np.int64), lasts)
    drawn = Footprints(jobs, servers, seed)
    run = simulate(jobs, servers, policy, ReplayOptions(seed=seed))
    found = run.outcomes
    held = run.series["used_gpus"].mean() * (run.end_s - run.start_s)
    trained_s = found.service_s - found.overhead_s
    return {
        "gain": float(found.duration_s.sum()) / held - 1.0,
        "slowest": float((found.duration_s / trained_s).min()),
        "jct_h": float(found.jct_s.mean()) / 3600.0,
        "utilisation": float(np.median([drawn.utilisation(job) for job in range(count)])),
    }


def conclude(rows: Sequence[Row]) -> MeasuredRows:
    def of(figure: str, policy: str = _POLICIES[0]) -> list[float]:
        return [row[figure] for row in rows if row["policy"] == policy]

    return MeasuredRows(
        {
            "throughput_gain": interval(of("gain")),
            "slowest_job": min(of("slowest")),
            "jct_hours": interval(of("jct_h")),
            "throughput_gain_ganger": interval(of("gain", "ganger")),
            "slowest_job_ganger": min(of("slowest", "ganger")),
            "jct_hours_ganger": interval(of("jct_h", "ganger")),
        },
        len(of("gain")),
        load={"waiting for every GPU, all at once, jobs": float(_JOBS_PER_GPU)},
        why="the gain is that of the mix, and Gandiva's is not published: the median of these models uses "
        f"{np.median(of('utilisation')):.0%} of its GPU when alone. Trials that are undone count, and so do the last "
        f"jobs, which have GPUs of their own. The default policy gains {np.mean(of('gain', 'ganger')):.1%} on the same "
        "jobs, and they end sooner; why `gandiva`, which slices the time of pending jobs, co-locates fewer was not "
        "examined",
    )


PACKED_CLUSTER = Experiment("B9", parts, measure, conclude, core=CoreUse.WHOLE)
