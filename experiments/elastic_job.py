"""B7. A job grows from one GPU to four while they are idle and gives three back when others come (Gandiva, OSDI 2018,
figure 11; no figures are published with it).

Set-up: one node of four GPUs, through the production core and the planner's loop in virtual time, under `gandiva`. An
elastic ResNet-50 at one global batch of 256 starts on one GPU; its rates with 1, 2 and 4 A100 are ElasticFlow's, and
the planner sees them in windows that scatter. When the job has settled, a gang of three GPUs comes at a drawn instant.
The order to shrink takes effect when the running mini-batch is over, which is drawn for each gang, too, and the state
is parked, which takes the 0.1 and 1 s of Gandiva's suspensions. The gang's wait is from its submission until it holds
its GPUs: whatever the core and the loop add to boundary and suspension is in it, and one mini-batch and a suspension
are the bound. Gangs that come while the job still grows stand beside.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from ganger_master.simulator.inputs import ReplayOptions, SwitchCosts
from ganger_master.simulator.report.figures import interval
from ganger_master.simulator.report.outcomes import Run
from ganger_master.simulator.run import simulate
from ganger_master.simulator.traces.servers import servers_from_flags
from ganger_master.simulator.traces.workload import elasticflow_speeds, workload

from experiments.experiment import CoreUse, Experiment, MeasuredRows, Row, Setting

_MODEL, _BATCH, _GPUS = "resnet50", 256, 4
_WORK_S, _GANG_S = 3000.0, 300.0
_SUSPENSIONS_S = {"least": 0.1, "most": 1.0}
# When gangs come, and how many of each kind: while the job grows, and once it has settled.
_COMES_S = {"growing": (61.0, 200.0), "settled": (400.0, 900.0)}
_ARRIVALS = 5


def parts(setting: Setting) -> Sequence[Row]:
    return [{"seed": seed} for seed in setting.seeds(5)]


def measure(setting: Setting, part: Row) -> Sequence[Row]:
    return waits("gandiva", part["seed"])


def waits(policy: str, seed: int, arrivals: int = _ARRIVALS) -> list[Row]:
    """Return what each gang waits under a policy, and what the job has before and after it comes."""
    random = np.random.default_rng(seed)
    batch_s = 1.0 / elasticflow_speeds()[_MODEL][_BATCH][_GPUS]
    alone = _run(policy, seed, None, 0.0)
    used = alone.series["used_gpus"]
    rows: list[Row] = []
    for (name, suspension_s), (when, (first_s, last_s)) in (
        (suspension, comes) for suspension in _SUSPENSIONS_S.items() for comes in _COMES_S.items()
    ):
        for _ in range(arrivals):
            comes_s, boundary_s = random.uniform(first_s, last_s), random.uniform(0.0, batch_s)
            found = _run(policy, seed, comes_s, boundary_s + suspension_s)
            wait_s = float(found.outcomes.start_delay_s[1])
            before, beside = found.series["used_gpus"].at([comes_s - 1.0, comes_s + wait_s + 10.0])
            rows.append(
                {
                    "suspension": name,
                    "when": when,
                    "had": int(before),
                    "left": int(beside) - (_GPUS - 1),
                    "wait_s": wait_s,
                    "over": wait_s / (batch_s + suspension_s),
                    "settled_s": float(used.times[np.argmax(used.values)]),
                    "speed_up": _WORK_S / float(alone.outcomes.jct_s[0]),
                }
            )
    return rows


def _run(policy: str, seed: int, gang_s: float | None, park_s: float) -> Run:
    """The elastic job, and a gang that comes at this time; parking the job takes so many seconds."""
    jobs = workload(
        ["elastic", "gang"],
        [0.0, gang_s or 0.0],
        [1, _GPUS - 1],
        [_WORK_S, _GANG_S],
        numbers={"min_gpus": [1, _GPUS - 1], "max_gpus": [_GPUS, _GPUS - 1], "batch_size": [_BATCH, 1]},
        labels={"model": [_MODEL, ""]},
    )
    chosen = jobs if gang_s is not None else jobs.take([0])
    options = ReplayOptions(seed=seed, costs=SwitchCosts(offload_s=park_s))
    return simulate(chosen, servers_from_flags(nodes=1, gpus_per_node=_GPUS), policy, options)


def conclude(rows: Sequence[Row]) -> MeasuredRows:
    def of(figure: str, when: str = "settled", suspension: str | None = None) -> list[float]:
        return [row[figure] for row in rows if row["when"] == when and suspension in (None, row["suspension"])]

    over, growing = of("over"), of("wait_s", "growing", "most")
    return MeasuredRows(
        {
            "shrink_over_batch_and_suspension": max(over),
            "shrink_seconds": max(of("wait_s", suspension="least")),
            "shrink_seconds_at_1_s": max(of("wait_s", suspension="most")),
            "shrink_seconds_while_growing_at_1_s": max(growing),
            "grown_to": interval(of("had")),
            "shrunk_to": interval(of("left")),
            "settled_after_seconds": interval(of("settled_s")),
            "speed_up_alone": interval(of("speed_up")),
        },
        seeds=len({row["seed"] for row in rows}),
        why=f"of {len(over)} gangs that come to a settled job {sum(one > 1.0 for one in over)} wait for longer than a "
        f"mini-batch and a suspension; what these take is an input, and what the core and the loop add to them is "
        f"measured; a gang that comes while the job changes its size waits for that, too, up to {max(growing):.1f} s",
    )


ELASTIC_JOB = Experiment("B7", parts, measure, conclude, core=CoreUse.WHOLE)
