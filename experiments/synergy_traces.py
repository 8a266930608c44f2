"""B10 and B11. Synergy's own two traces under its tunings (OSDI 2022; what its authors' simulator gives on them is in
the dossier, section 5b, as the paper's own tables are of larger runs).

Set-up: 4 servers of 8 V100, 24 cores and 500 GB; 100 jobs of one GPU with the authors' models, iterations and arrivals
(msr-fiddle/synergy: the static trace, all at once, under FIFO; the dynamic one, which comes within 3.3 hours, under
SRTF); rounds of 300 s, packed anew, no cost of moving, profiles known from the start, through the simulator and with it
the production core. Nothing is drawn: one run says all. `best` is our exact choice of cores and memory on each server
in the place of Tune's: for the average JCT in the same order of jobs; for the makespan longest remaining time first,
which asks an oracle as SRTF does, since FIFO leaves long jobs to the end. `with_costs` is Tune with switching at its
default costs and profiles that take eight minutes a job, compared with nothing.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from ganger_master.simulator.inputs import FREE, ReplayOptions
from ganger_master.simulator.run import simulate
from ganger_master.simulator.traces.servers import servers_from_flags
from ganger_master.simulator.traces.workload import Workload, synergy_profiles, workload

from experiments.experiment import CoreUse, Experiment, MeasuredRows, Row, Setting
from experiments.paper_claims import claims

ROUNDS = ReplayOptions(round_s=300.0, costs=FREE, rates="profiles", profile_s=0.0)
_WITH_COSTS = ReplayOptions(round_s=300.0, rates="profiles")
_LONGEST_FIRST = "lrtf"
_ORDERS = ("fifo", "srtf")
_ALL = ("proportional", "synergy-greedy", "synergy-tune", "synergy-opt", "exact")
_HOUR = 3600.0


def static_parts(setting: Setting) -> Sequence[Row]:
    return [*_parts("static"), {"trace": "static", "order": _LONGEST_FIRST, "tuning": "exact", "costs": False}]


def dynamic_parts(setting: Setting) -> Sequence[Row]:
    return _parts("dynamic")


def _parts(trace: str) -> list[Row]:
    every = [{"trace": trace, "order": order, "tuning": tuning, "costs": False} for order in _ORDERS for tuning in _ALL]
    return [*every, *({"trace": trace, "order": order, "tuning": "synergy-tune", "costs": True} for order in _ORDERS)]


def measure(setting: Setting, part: Row) -> Sequence[Row]:
    jobs = public_trace(setting.papers / _FILES[part["trace"]])
    servers = servers_from_flags(nodes=4, gpus_per_node=8)
    options = _WITH_COSTS if part["costs"] else ROUNDS
    run = simulate(jobs, servers, f"{part['order']}+{part['tuning']}", options)
    jct = run.outcomes.jct_s
    return [
        {
            "jct_h": float(jct.mean()) / _HOUR,
            "p99_h": float(np.sort(jct)[98]) / _HOUR,
            "makespan_h": float(run.outcomes.end_s.max() - jobs.submit_s[0]) / _HOUR,
            "work_h": float(jobs.gpu_seconds.sum()) / servers.gpus / _HOUR,
            "span_h": float(jobs.submit_s[-1] - jobs.submit_s[0]) / _HOUR,
        }
    ]


def static_found(rows: Sequence[Row]) -> MeasuredRows:
    table = _table(rows)
    makespan = {tuning: table["fifo", tuning, False]["makespan_h"] for tuning in _ALL}
    paper = float(claims()["B10"].paper["makespan_hours"])
    tune, proportional = makespan["synergy-tune"], makespan["proportional"]
    return MeasuredRows(
        {
            "makespan_hours": tune,
            "makespan_off_by": abs(tune / paper - 1.0),
            "proportional_makespan_hours": proportional,
            "ratio": proportional / tune,
            "greedy_makespan_hours": makespan["synergy-greedy"],
            "opt_makespan_hours": makespan["synergy-opt"],
            "exact_makespan_hours": makespan["exact"],
            "best_makespan_hours": table[_LONGEST_FIRST, "exact", False]["makespan_h"],
            "makespan_hours_with_costs": table["fifo", "synergy-tune", True]["makespan_h"],
            "jct_hours": table["fifo", "synergy-tune", False]["jct_h"],
            "exact_jct_hours": table["fifo", "exact", False]["jct_h"],
        },
        seeds=1,
        load={"hours of work for every GPU, all at once": rows[0]["work_h"]},
        why="FIFO leaves long jobs to the end: their own best rates bound its makespan, whatever is chosen before; the "
        "fluid bound of these servers is 7.82 h (dossier, section 5b)",
    )


def dynamic_found(rows: Sequence[Row]) -> MeasuredRows:
    table = _table(rows)
    jct = {tuning: table["srtf", tuning, False]["jct_h"] for tuning in _ALL}
    paper = float(claims()["B11"].paper["jct_hours"])
    return MeasuredRows(
        {
            "jct_hours": jct["synergy-tune"],
            "jct_off_by": abs(jct["synergy-tune"] / paper - 1.0),
            "proportional_jct_hours": jct["proportional"],
            "ratio": jct["proportional"] / jct["synergy-tune"],
            "greedy_jct_hours": jct["synergy-greedy"],
            "opt_jct_hours": jct["synergy-opt"],
            "best_jct_hours": jct["exact"],
            "jct_hours_with_costs": table["srtf", "synergy-tune", True]["jct_h"],
            "p99_hours": table["srtf", "synergy-tune", False]["p99_h"],
        },
        seeds=1,
        load=rows[0]["work_h"] / rows[0]["span_h"],
        why="theirs counts whole iterations of a round only, and slows a neighbour that is cut back to its share "
        "whatever it still holds",
    )


def _table(rows: Sequence[Row]) -> dict[tuple[str, str, bool], Row]:
    return {(row["order"], row["tuning"], row["costs"]): row for row in rows}


def public_trace(path: Path) -> Workload:
    """Jobs of one of the two traces, with the recorded pace of a proportional share."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    known = synergy_profiles()
    return workload(
        [row["job_id"] for row in rows],
        [float(row["arrival_s"]) for row in rows],
        [int(row["gpus"]) for row in rows],
        [float(row["iterations"]) * known[row["model"]].step_s for row in rows],
        labels={"model": [row["model"] for row in rows]},
    )


_FILES = {"static": "synergy_static_100job.csv", "dynamic": "synergy_dynamic_100job.csv"}
SYNERGY_STATIC = Experiment(
    "B10", static_parts, measure, static_found, core=CoreUse.WHOLE, needs=(("papers", _FILES["static"]),)
)
SYNERGY_DYNAMIC = Experiment(
    "B11", dynamic_parts, measure, dynamic_found, core=CoreUse.WHOLE, needs=(("papers", _FILES["dynamic"]),)
)
