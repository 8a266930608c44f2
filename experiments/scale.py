"""B4. How long Optimus takes to decide for a large cluster (EuroSys 2018, section 6.5: 5 s for 4,000 jobs with about
100,000 tasks on 16,000 nodes).

Set-up: the whole pass of the planner under `optimus`, as `ganger bench plan` runs it: 4,000 pending elastic jobs that
ask for 100,000 tasks of one GPU at least, on 16,000 nodes of 8 GPUs. It weighs GPUs by marginal gain, places all gangs,
and writes the changes of one plan. Timed is processor time of one thread, as other experiments run beside this one; the
wall clock stands beside it. Models of the jobs' speeds were fitted before.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from benchmarks.plan import JOBS, NODES, idle_view, optimus_pass, workload
from experiments.experiment import CoreUse, Experiment, MeasuredRows, Row, Setting

_ROUNDS = 5


def parts(setting: Setting) -> Sequence[Row]:
    return [{"rounds": 1 if setting.is_quick else _ROUNDS}]


def measure(setting: Setting, part: Row) -> Sequence[Row]:
    shapes, facts = workload(JOBS)
    view = idle_view(NODES)
    rows: list[Row] = []
    for _ in range(part["rounds"]):
        wall_s, cpu_s, jobs, gpus = optimus_pass(view, shapes, facts)
        tasks = int(facts.gpus.sum())
        rows.append({"pass_cpu_s": cpu_s, "pass_wall_s": wall_s, "tasks": tasks, "jobs": jobs, "placed": gpus})
    return rows


def conclude(rows: Sequence[Row]) -> MeasuredRows:
    return MeasuredRows(
        {
            "seconds": median(row["pass_cpu_s"] for row in rows),
            "longest_seconds": max(row["pass_cpu_s"] for row in rows),
            "wall_seconds": median(row["pass_wall_s"] for row in rows),
            "tasks": rows[0]["tasks"],
            "placed_jobs": rows[0]["jobs"],
            "placed_gpus": rows[0]["placed"],
        },
        seeds=1,
        why=f"another machine, six years on, and processor time instead of the wall clock: the median of {len(rows)} "
        "passes over the same jobs",
    )


SCALE = Experiment("B4", parts, measure, conclude, core=CoreUse.PLANNER)
