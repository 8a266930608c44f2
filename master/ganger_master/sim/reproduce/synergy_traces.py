"""B10 and B11. Synergy's own two traces under its tunings (OSDI 2022; what its authors' simulator gives on them is in
the dossier, section 5b, as the paper's own tables are of larger runs).

Set-up: 4 servers of 8 V100, 24 cores and 500 GB; 100 jobs of one GPU with the authors' models, iterations and arrivals
(msr-fiddle/synergy: the static trace, all at once, under FIFO; the dynamic one, which comes within 3.3 hours, under
SRTF); rounds of 300 s, packed anew, no cost of moving. Nothing is drawn: one run says all. `best` is our exact choice
of cores and memory on each server in the place of Tune's.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence

import numpy as np

from ganger_master.policies.order.registry import ORDERS
from ganger_master.policies.tune import Nodes, gangs, profiles_of
from ganger_master.policies.tune.catalogue import TUNINGS
from ganger_master.sim.reproduce.claims import claims
from ganger_master.sim.reproduce.experiment import Experiment, Found, Row, Setting
from ganger_master.sim.reproduce.rounds import FILLED, RoundJobs, ends
from ganger_master.sim.traces.profiles import synergy_profiles

_ORDERS = ("fifo", "srtf")
_ALL = {
    "proportional": FILLED,
    **{name: TUNINGS[name] for name in ("synergy-greedy", "synergy-tune", "synergy-opt", "exact")},
}
_HOUR = 3600.0
_NODES = Nodes(np.full(4, 8), np.full(4, 24.0), np.full(4, 500e9))


def static_parts(setting: Setting) -> Sequence[Row]:
    return [{"trace": "static", "order": order, "tuning": tuning} for order in _ORDERS for tuning in _ALL]


def dynamic_parts(setting: Setting) -> Sequence[Row]:
    return [{"trace": "dynamic", "order": order, "tuning": tuning} for order in _ORDERS for tuning in _ALL]


def measure(setting: Setting, part: Row) -> Sequence[Row]:
    jobs = _jobs(setting, part["trace"])
    end = ends(jobs, _NODES, ORDERS[part["order"]], _ALL[part["tuning"]])
    jct = end - jobs.arrival_s
    span = float(jobs.arrival_s[-1] - jobs.arrival_s[0])
    work = float(jobs.seconds.sum()) / float(_NODES.gpus.sum())
    return [
        {
            "jct_h": float(jct.mean()) / _HOUR,
            "p99_h": float(np.sort(jct)[98]) / _HOUR,
            "makespan_h": float(end.max() - jobs.arrival_s[0]) / _HOUR,
            "work_h": work / _HOUR,
            "span_h": span / _HOUR,
        }
    ]


def static_found(rows: Sequence[Row]) -> Found:
    table = {(row["order"], row["tuning"]): row for row in rows}
    makespan = {tuning: table["fifo", tuning]["makespan_h"] for tuning in _ALL}
    paper = float(claims()["B10"].paper["makespan_hours"])
    tune, proportional = makespan["synergy-tune"], makespan["proportional"]
    return Found(
        {
            "makespan_hours": tune,
            "makespan_off_by": abs(tune / paper - 1.0),
            "proportional_makespan_hours": proportional,
            "ratio": proportional / tune,
            "greedy_makespan_hours": makespan["synergy-greedy"],
            "opt_makespan_hours": makespan["synergy-opt"],
            "best_makespan_hours": makespan["exact"],
            "jct_hours": table["fifo", "synergy-tune"]["jct_h"],
            "best_jct_hours": table["fifo", "exact"]["jct_h"],
        },
        seeds=1,
        load={"hours of work for every GPU, all at once": rows[0]["work_h"]},
        why="FIFO leaves long jobs to the end: their own best rates bound the makespan, whatever is chosen before",
    )


def dynamic_found(rows: Sequence[Row]) -> Found:
    table = {(row["order"], row["tuning"]): row for row in rows}
    jct = {tuning: table["srtf", tuning]["jct_h"] for tuning in _ALL}
    paper = float(claims()["B11"].paper["jct_hours"])
    return Found(
        {
            "jct_hours": jct["synergy-tune"],
            "jct_off_by": abs(jct["synergy-tune"] / paper - 1.0),
            "proportional_jct_hours": jct["proportional"],
            "ratio": jct["proportional"] / jct["synergy-tune"],
            "greedy_jct_hours": jct["synergy-greedy"],
            "opt_jct_hours": jct["synergy-opt"],
            "best_jct_hours": jct["exact"],
            "p99_hours": table["srtf", "synergy-tune"]["p99_h"],
        },
        seeds=1,
        load=rows[0]["work_h"] / rows[0]["span_h"],
        why="theirs counts whole iterations of a round only, and slows a neighbour that is cut back to its share "
        "whatever it still holds",
    )


def _jobs(setting: Setting, kind: str) -> RoundJobs:
    with (setting.papers / _FILES[kind]).open(newline="") as file:
        rows = list(csv.DictReader(file))
    known = synergy_profiles()
    position = {name: index for index, name in enumerate(known)}
    steps = np.array([known[row["model"]].step_s for row in rows])
    return RoundJobs(
        np.array([float(row["arrival_s"]) for row in rows]),
        np.array([float(row["iterations"]) for row in rows]) * steps,
        gangs(
            [int(row["gpus"]) for row in rows],
            [position[row["model"]] for row in rows],
            profiles_of([profile.matrix for profile in known.values()]),
        ),
    )


_FILES = {"static": "synergy_static_100job.csv", "dynamic": "synergy_dynamic_100job.csv"}
SYNERGY_STATIC = Experiment("B10", static_parts, measure, static_found, needs=(("papers", _FILES["static"]),))
SYNERGY_DYNAMIC = Experiment("B11", dynamic_parts, measure, dynamic_found, needs=(("papers", _FILES["dynamic"]),))
