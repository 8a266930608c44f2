"""B5. Six jobs of one GPU each are time-sliced on four (Gandiva, OSDI 2018, figure 9: each gets four sixths of the
time, and switching costs no more than 2 %).

Set-up: one node of four GPUs and six jobs that each need eight hours, through the production core and the planner's
loop in virtual time, under `gandiva`; slices of 60 s. No two of these jobs fit into the memory of a GPU, so that none
are co-located. The planner decides which jobs run when, how often they are switched and moved, and how long slices are.
A switch takes 1 s, the longest that Gandiva measured; beside it stand 0.1 s, the shortest, and jobs that need 80
minutes. Starts and moves take the simulator's defaults. A job's share is what it needs alone by the time from its
submission to its end. The aggregate is all of that work by all GPUs until the last job has ended, so GPUs that are idle
then count, too.
"""

from __future__ import annotations

from collections.abc import Sequence

from ganger_master.simulator.inputs import ReplayOptions, SwitchCosts
from ganger_master.simulator.run import simulate
from ganger_master.simulator.traces.servers import servers_from_flags
from ganger_master.simulator.traces.workload import workload
from ganger_master.simulator.true_rates import Footprints

from experiments.experiment import CoreUse, Experiment, MeasuredRows, Row, Setting

_JOBS, _GPUS, _WORK_S = 6, 4, 8 * 3600.0
# Seconds to suspend one job and resume another, as Gandiva published them, and seconds of work of a job.
_CASES = {"judged": (1.0, _WORK_S), "least": (0.1, _WORK_S), "short": (1.0, 80 * 60.0)}


def parts(setting: Setting) -> Sequence[Row]:
    return [{"case": name} for name in _CASES]


def measure(setting: Setting, part: Row) -> Sequence[Row]:
    return shared("gandiva", *_CASES[part["case"]])


def shared(policy: str, switch_s: float, work_s: float = _WORK_S) -> list[Row]:
    """Return each job's share of the time, and what it paid, under a policy."""
    jobs = workload(
        map(str, range(_JOBS)), [0.0] * _JOBS, [1] * _JOBS, [work_s] * _JOBS, labels={"model": ["ResNeXt-50"] * _JOBS}
    )
    servers = servers_from_flags(nodes=1, gpus_per_node=_GPUS)
    device_bytes = servers.groups[0].configuration_set.device_memory_bytes
    seed = next(seed for seed in range(1_000) if 2 * Footprints(jobs, servers, seed).memory_bytes(0) > device_bytes)
    costs = SwitchCosts(offload_s=switch_s / 2, restore_s=switch_s / 2)
    found = simulate(jobs, servers, policy, ReplayOptions(costs=costs, seed=seed)).outcomes
    return [
        {
            "job": job,
            "share": work_s / float(found.jct_s[job]),
            "aggregate": _JOBS * work_s / (_GPUS * float(found.end_s.max())),
            "overhead": float(found.overhead_s[job] / found.service_s[job]),
            "switches": int(found.preemptions[job]),
            "moves": int(found.migrations[job]),
        }
        for job in range(_JOBS)
    ]


def conclude(rows: Sequence[Row]) -> MeasuredRows:
    def of(figure: str, case: str = "judged") -> list[float]:
        return [row[figure] for row in rows if row["case"] == case]

    def off_by(case: str = "judged") -> float:
        return max(abs(share / (_GPUS / _JOBS) - 1.0) for share in of("share", case))

    overhead, short = sum(of("overhead")) / _JOBS, min(of("aggregate", "short"))
    return MeasuredRows(
        {
            "share_off_by": off_by(),
            "aggregate": min(of("aggregate")),
            "overhead": overhead,
            "switches_of_a_job": sum(of("switches")) / _JOBS,
            "moves_of_a_job": sum(of("moves")) / _JOBS,
            "share_off_by_at_0.1_s": off_by("least"),
            "aggregate_at_0.1_s": min(of("aggregate", "least")),
            "share_off_by_of_80_minutes": off_by("short"),
            "aggregate_of_80_minutes": short,
        },
        seeds=1,
        load=_JOBS / _GPUS,
        why=f"{overhead:.1%} of the time goes into switches, and into moves, without which six jobs have no equal "
        "shares of four GPUs; the rest of what is missing is GPUs that are idle once the first jobs have ended. Jobs "
        "of 80 minutes, to which these last slices matter more, would miss both limits: shares are off by "
        f"{off_by('short'):.1%}, and the aggregate is {short:.3f}",
    )


SLICED_GPUS = Experiment("B5", parts, measure, conclude, core=CoreUse.WHOLE)
