"""The experiments: the quick ones run, the long ones conclude from made-up rows what a person would. (12 s)"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from estimators.published import DATA, TRACES
from ganger_master.core.approval import approve
from ganger_master.simulator.run import simulate

from benchmarks.bench_cluster import BenchCluster
from benchmarks.move import MoveSample
from benchmarks.plan import optimus_pass
from experiments import (
    early_feedback,
    elastic_job,
    migration,
    packed_cluster,
    packed_copies,
    server_epochs,
    sliced_gpus,
    tetris_study,
)
from experiments.approvals import asked_of
from experiments.cpu_poster import CORES
from experiments.experiment import CoreUse, Experiment, MeasuredRows, Row, Setting, measured
from experiments.paper_claims import claims, meets, middle
from experiments.registry import EXPERIMENTS

QUICK = Setting(TRACES, DATA, is_quick=True)


def found(name: str, parts: Callable[[Row], bool] = lambda part: True) -> MeasuredRows:
    """Of the quick form, or of some of its parts."""
    experiment = EXPERIMENTS[name]
    if experiment.missing(QUICK):
        pytest.skip("published data are not beside the project")
    rows = [row for part in experiment.parts(QUICK) if parts(part) for row in measured(experiment, QUICK, part)]
    return experiment.conclude(rows)


def names_what_is_judged(name: str, one: MeasuredRows) -> bool:
    """Every figure with a threshold, and every one of the paper's that is a number, has ours beside it or is text."""
    return claims()[name].figures <= set(one.ours)


@pytest.mark.parametrize("name", ["B1", "B5", "B7", "B23"])
def test_quick_form_holds(name: str) -> None:
    one = found(name)
    assert names_what_is_judged(name, one)
    assert meets(claims()[name].holds, one.ours)


def test_tune_is_between_proportional_and_the_bound_in_one_draw() -> None:
    one = found("B13", lambda part: part["seed"] == 0)
    assert names_what_is_judged("B13", one)
    figures = {name: middle(figure) for name, figure in one.ours.items()}
    assert figures["proportional_of_bound"] < figures["tune_of_bound"] < figures["best_of_bound"] <= 1.0 + 1e-6


def test_closest_places_are_found_and_first_fit_is_worse() -> None:
    one = found("B16", lambda part: part["seed"] == 0)
    assert middle(one.ours["worse_than_free"]) == 0.0
    assert middle(one.ours["missed"]) == 0.0
    assert middle(one.ours["worse_first_fit"]) > 0.0


def test_deadlines_are_missed_by_turns_as_jobs_grow_more_and_met_by_an_order_that_knows_them() -> None:
    one = found("B24", lambda part: part["seed"] == 0)
    assert names_what_is_judged("B24", one)
    assert meets(claims()["B24"].holds, one.ours)
    assert meets(claims()["B24"].beats, one.ours)


@pytest.mark.system
@pytest.mark.torch
def test_an_epoch_over_a_parameter_server_is_that_of_real_programs() -> None:
    with BenchCluster(nodes=1, gpus=1, cores=2) as cluster:
        served, alone = (server_epochs.epoch_s(cluster, 16, is_served, epochs=2) for is_served in (True, False))
    assert 0.0 < alone < served


def test_schedulers_with_old_views_are_refused_and_no_device_is_given_twice() -> None:
    row = asked_of(nodes=30, requests=40, seed=0)
    assert row["double_allocations"] == 0
    assert 0.0 < row["rejected_share"] < 1.0
    assert 0.0 < row["p50_ms"] <= row["p99_ms"]
    assert names_what_is_judged("B17", EXPERIMENTS["B17"].conclude([{"seed": 0, **row}]))


def test_synergys_static_trace_takes_as_long_proportionally_as_with_its_authors() -> None:
    """15.25 h, to the round; one tuning of five, the others stand in as copies."""
    experiment = EXPERIMENTS["B10"]
    if experiment.missing(QUICK):
        pytest.skip("published data are not beside the project")
    (part,) = [part for part in experiment.parts(QUICK) if (part["order"], part["tuning"]) == ("fifo", "proportional")]
    (row,) = measured(experiment, QUICK, part)
    one = experiment.conclude([{**row, **other} for other in experiment.parts(QUICK)])
    assert names_what_is_judged("B10", one)
    assert middle(one.ours["proportional_makespan_hours"]) == pytest.approx(15.25, abs=1e-3)
    assert middle(one.ours["ratio"]) == 1.0


def of_moves(seed: int) -> Sequence[Row]:
    """A moved job waits half as long."""
    ways = (("still", 100.0), ("moved", 50.0), ("naive", 60.0))
    figures = ("jct_s", "large_wait_s")
    return [{"kind": "cluster", "seed": seed, "way": way, "moves": 3, **dict.fromkeys(figures, s)} for way, s in ways]


def moved_in(pause_s: float) -> MoveSample:
    return MoveSample(pause_s, 0.0, pause_s / 2, 0.0, 0.01, 10**9, 1e9)


@pytest.mark.parametrize(("pauses_s", "holds", "beats"), [((0.4, 0.5), True, True), ((0.4, 3.0), False, False)])
def test_a_migration_costs_what_real_programs_took(
    monkeypatch: pytest.MonkeyPatch, pauses_s: tuple[float, ...], holds: bool, beats: bool
) -> None:
    """The whole of one gang; what migrations do to a cluster is made up. No typed-in pause could be told apart."""
    monkeypatch.setattr(migration, "_moved_live", lambda: [moved_in(pause_s) for pause_s in pauses_s])
    experiment = EXPERIMENTS["B8"]
    parts = [part for part in experiment.parts(QUICK) if part["kind"] == "live" or part == {"kind": "gang", "seed": 0}]
    rows = [row for part in parts for row in measured(experiment, QUICK, part)]
    one = experiment.conclude([*rows, *of_moves(0)])
    assert names_what_is_judged("B8", one)
    assert middle(one.ours["downtime_seconds"]) == max(pauses_s)
    assert meets(claims()["B8"].holds, one.ours) is holds
    assert meets(claims()["B8"].beats, one.ours) is beats
    waits = {way: middle(one.ours[f"gang_waits_seconds_{way}"]) for way in ("still", "moved", "naive")}
    assert waits["moved"] < waits["naive"] < 60.0 < 3_000.0 < waits["still"]
    assert middle(one.ours["stopped_for_a_gang"]) == 0.0
    assert middle(one.ours["cluster_large_wait_moved"]) == 0.5


def test_shares_of_a_policy_that_does_not_rotate_are_not_equal() -> None:
    rows = sliced_gpus.shared("fifo-backfill", 1.0)
    one = sliced_gpus.conclude([{"case": case, **row} for case in ("judged", "least", "short") for row in rows])
    assert not meets(claims()["B5"].holds, one.ours)
    assert middle(one.ours["share_off_by"]) > 0.2


def test_a_policy_that_waits_for_the_whole_resize_misses_the_bound_of_a_shrink() -> None:
    """The bound is a mini-batch and a suspension: a wait that is drawn from these could not miss it."""
    one = elastic_job.conclude([{"seed": 0, **row} for row in elastic_job.waits("fifo-backfill+elastic", 0, 1)])
    assert not meets(claims()["B7"].holds, one.ours)
    assert middle(one.ours["shrink_over_batch_and_suspension"]) > 5.0
    assert middle(one.ours["shrunk_to"]) == 1.0


def test_copies_that_are_never_tried_together_are_other_decisions_than_the_tables() -> None:
    one = found("B6", lambda part: part["draw"] == 0)
    assert names_what_is_judged("B6", one)
    assert middle(one.ours["same_decisions"]) >= 7
    never = [{"draw": 0, **row} for row in packed_copies.pairs("fifo", 0)]
    assert middle(packed_copies.conclude(never).ours["same_decisions"]) == 3


def test_gpus_are_worth_more_only_where_jobs_are_co_located() -> None:
    alone, packed = (packed_cluster.worked(policy, 0, jobs_per_gpu=2) for policy in ("fifo-backfill", "ganger"))
    assert alone["gain"] == pytest.approx(0.0, abs=1e-3)
    assert alone["slowest"] == pytest.approx(1.0)
    assert packed["gain"] > 0.02
    assert packed["slowest"] < 0.99


def test_a_strict_queue_waits_for_its_head_and_the_other_passes_it_over() -> None:
    """A fills the node for 10 s and then half of it; B, which needs it whole, is second; C, which needs half, is third.

    Strict: A to 10 and 20, B from 20 to 30, C from 30 to 38. Skipping: C from 10 to 26 beside A, B from 26 to 36.
    """
    arrivals, demands = np.array([0.0, 1.0, 2.0]), np.repeat([[0.5], [1.0], [0.5]], 3, axis=1)
    seconds = np.array([[10.0, 20.0], [5.0, 5.0], [8.0, 8.0]])
    strict, skipping = (
        tetris_study.tasks_ended(policy, arrivals, demands, seconds, nodes=1)
        for policy in ("fifo+first-fit", "fifo-backfill+first-fit")
    )
    assert (strict[0].tolist(), strict[1]) == (pytest.approx([20.0, 29.0, 36.0]), pytest.approx(38.0))
    assert (skipping[0].tolist(), skipping[1]) == (pytest.approx([20.0, 35.0, 24.0]), pytest.approx(36.0))


def test_trials_of_a_search_get_their_first_slices_one_minute_after_another() -> None:
    """Eight trials on four GPUs, and a switch of a second: half of it for the stop, half of it for the start."""
    turns = early_feedback.first_slice_s("round-robin", 8, 0.5, 1.0)
    assert sorted(turns.tolist()) == [0.5] * 4 + [pytest.approx(61.0)] * 4
    whole = early_feedback.first_slice_s("fifo-backfill", 8, 0.5, 1.0)
    assert sorted(whole.tolist())[4:] == [pytest.approx(1801.0, abs=2.0)] * 4


def test_the_core_runs_where_an_experiment_reports_that_it_does() -> None:
    for experiment in EXPERIMENTS.values():
        module = sys.modules[experiment.measure.__module__]
        entries = {
            CoreUse.WHOLE: (simulate, BenchCluster),
            CoreUse.PLANNER: (optimus_pass,),
            CoreUse.APPROVAL: (approve,),
        }
        used = [use for use, some in entries.items() if any(each in vars(module).values() for each in some)]
        assert used == [experiment.core] * (experiment.core is not CoreUse.ARITHMETIC), experiment.name


# What a part of an experiment that takes long might have measured: the same for all.
def of_pairs(part: Row) -> Sequence[Row]:
    """Fair shares take twice as long with all tasks apart, and as long as Optimus with gangs together."""
    figures = {"jct_s": 100.0, "makespan_s": 3.35 * 3600.0 * part["load"], "resizes": 1.0, "overhead": 0.02}
    apart = {"jct_s": 200.0, "makespan_s": figures["makespan_s"] * 2.0}
    return [
        {"variant": variant, "policy": policy, **figures, **(apart if policy in ("drf", "optimus_apart") else {})}
        for variant, policy in (
            *(("usual", policy) for policy in ("optimus", "drf", "drf_packed", "tetris", "optimus_apart")),
            ("no_errors", "optimus"),
            *(("15_jobs", policy) for policy in ("optimus", "drf", "drf_packed")),
        )
    ]


def of_tasks(part: Row) -> Sequence[Row]:
    """As the report's FIFO in one of the distributions."""
    rules = ("fifo", "fifo-skipping", "cosine", "pass", "pass-defaults")
    scale = 1.0 if part["demands"] == "uniform .1-.6" else 3.0
    return [
        {
            "rule": rule,
            "makespan_s": 7083.0 * scale * (0.5 if rule == "cosine" and scale == 1.0 else 1.0),
            "jct_s": 2415.0 * scale,
            "jcts_s": [2415.0 * scale] * 2,
            "load": scale,
        }
        for rule in rules
    ]


def of_searches(part: Row) -> Sequence[Row]:
    """Slicing is twice as fast, and as fast for large ones."""
    if part["kind"] == "cluster":
        return [{"load": load, "fifo_s": 90.0, "default_s": 60.0} for load in (0.9, 1.3)]
    one = {"hours": 1.0, "noise": 0.0, "fifo_s": 200.0}
    return [
        {**one, "trials": trials, "switch_s": switch_s, "policy": policy, "sliced_s": sliced}
        for policy, switch_s, more_s in (("round-robin", 0.1, 0.0), ("round-robin", 1.0, 25.0), ("ganger", 0.1, 60.0))
        for trials, sliced in ((16, 100.0 + more_s), (100, 200.0))
    ]


def of_policies(*names: str) -> Callable[[Row], Sequence[Row]]:
    figures = ("avg_jct_s", "max_rho", "own_max_rho")
    return lambda part: [{"policy": name, **dict.fromkeys(figures, 60.0)} for name in names]


# Means of the first workload, of Pollux for the policy that is compared with it.
PUBLISHED = {"tiresias": 2473.65, "optimus": 4087.06, "goodput": 2088.77}
MADE_UP: dict[str, tuple[Callable[[Row], Sequence[Row]], dict[str, float]]] = {
    "B3": (
        of_pairs,
        {
            "jct_against_drf": 2.0,
            "makespan_against_drf_packed": 1.0,
            "jct_by_places": 2.0,
            "jct_by_sizes_apart": 1.0,
            # Of the amounts of work tried, that at which fair shares end closest to 6.7 h.
            "drf_makespan_h": 6.7,
            "jct_with_no_errors": 1.0,
            "jct_against_drf_15_jobs": 2.0,
        },
    ),
    "B4": (
        lambda part: [
            {"pass_cpu_s": cpu_s, "pass_wall_s": 2.0, "tasks": 9, "jobs": 4, "placed": 8} for cpu_s in (3.0, 1.0, 1.5)
        ],
        {"seconds": 1.5, "longest_seconds": 3.0, "wall_seconds": 2.0},
    ),
    "B9": (
        lambda part: [{"gain": 0.5, "slowest": 0.7, "jct_h": 3.0, "utilisation": 0.5}],
        {"throughput_gain": 0.5, "slowest_job": 0.7, "throughput_gain_ganger": 0.5},
    ),
    "B11": (
        lambda part: [{"jct_h": 3.19, "p99_h": 1.0, "work_h": 10.0, "span_h": 5.0}],
        {"jct_off_by": 0.0, "ratio": 1.0},
    ),
    "B12": (
        lambda part: [
            {"tuning": tuning, "jct_h": hours, "offered": 1.0}
            for tuning, hours in (("synergy-tune", 20.0), ("proportional", 60.0), ("exact", 15.0))
        ],
        {"jct_hours_at_9": 20.0, "ratio_at_9": 3.0, "largest_ratio": 3.0, "best_ratio_at_9": 4.0},
    ),
    "B14": (
        of_tasks,
        {
            "makespan_gain": 0.5,
            "jct_gain": 0.0,
            "pass_makespan_gain": 0.0,
            "fifo_jct_s": 2415.0,
            "cosine_jct_p90_s": 2415.0,
        },
    ),
    "B15": (
        lambda part: [
            {
                "load": load,
                "tuning": tuning,
                "utilisation": good,
                "jct_s": 100.0 / good,
                "cores": {**CORES, "Lenet": 12},
            }
            for load in (0.7, 1.0)
            for tuning, good in (("bind", 0.5), ("predictor", 0.75), ("in_place", 0.5))
        ],
        {
            "utilisation_gain": 0.5,
            "jct_gain": 1 / 3,
            "in_place_jct_gain": 0.0,
            "share_of_cells": 0.0,
            "cores_off_by": 1.0,
        },
    ),
    "B18": (
        lambda part: [
            {"load": load, "policy": policy, "avg_jct_s": load if policy == "fifo" else 1.0}
            for load in (1.0, 2.0)
            for policy in ("tiresias", "round-robin", "fifo", "srtf")
        ],
        {"jct_ratio": 1.0, "share_of_cells": 0.0, "fifo_ratio": 2.0},
    ),
    "B19": (of_policies("ftf-oracle", "ftf", "las2d", "fifo"), {"max_rho": 60.0}),
    "B20": (
        lambda part: [
            {
                "job": job,
                "jct_s": PUBLISHED[part["policy"].removesuffix("-own")] + late_s,
                "end_s": 1e5,
                "restarts": 1,
                "load": 2.0,
            }
            for job, late_s in enumerate((-100.0, 100.0))
        ],
        {"tiresias_off_by": 0.0, "optimus_off_by": 0.0, "goodput_over_pollux": 1.0, "goodput_restarts": 1.0},
    ),
    "B21": (
        lambda part: [
            {"tuning": tuning, "jct_h": hours, "offered": 1.0}
            for tuning, hours in (("synergy-tune", 10.0), ("proportional", 20.0 * part["load"]))
        ],
        {"largest_ratio": 2.4, "smallest_ratio": 2.0, "srtf_ratio_at_1.2": 2.4},
    ),
    "B22": (
        of_searches,
        {
            "largest_speed_up": 2.0,
            "largest_speed_up_at_1_s": 1.6,
            "largest_speed_up_ganger": 1.25,
            "smallest_speed_up": 1.0,
            "share_of_cells": 0.0,
            "first_minute_sooner_at_0.9": 1.5,
        },
    ),
    "B25": (
        lambda part: [
            {"batch": batch, "is_served": is_served, "epoch_s": 5.0 + (1600.0 / batch if is_served else 0.0)}
            for batch in (16, 32, 64, 128)
            for is_served in (True, False)
        ],
        {"served_16_over_128": 6.0, "alone_16_over_128": 1.0, "served_over_alone_at_16": 21.0},
    ),
}


@pytest.mark.parametrize("name", MADE_UP)
def test_conclusion_is_what_a_person_draws_from_the_rows(name: str) -> None:
    measure, expected = MADE_UP[name]
    experiment = EXPERIMENTS[name]
    one = experiment.conclude([{**part, **row} for part in experiment.parts(QUICK) for row in measure(part)])
    assert names_what_is_judged(name, one)
    for figure, value in expected.items():
        assert middle(one.ours[figure]) == pytest.approx(value), figure
    assert one.seeds >= 1


def test_every_experiment_is_tried_here_in_one_way_or_the_other() -> None:
    assert {*MADE_UP, "B1", "B2", "B5", "B6", "B7", "B8", "B10", "B13", "B16", "B17", "B23", "B24"} == set(EXPERIMENTS)


@pytest.mark.parametrize("experiment", EXPERIMENTS.values(), ids=EXPERIMENTS)
def test_five_seeds_or_none_and_fewer_when_quick(experiment: Experiment) -> None:
    """What chance has a part in is run at least five times."""

    def seeds(setting: Setting) -> set[Any]:
        found: set[Any] = set()
        for part in experiment.parts(setting):
            if "seed" in part:
                found.add(part["seed"])
            elif "seeds" in part:
                found.update(part["seeds"] if isinstance(part["seeds"], list) else range(part["seeds"]))
        return found

    full, quick = seeds(Setting(Path(), Path())), seeds(QUICK)
    assert len(full) >= 5 > len(quick) or not full


def test_a_paper_that_is_not_known_is_no_number() -> None:
    assert all(
        isinstance(value, str) or math.isfinite(value) for claim in claims().values() for value in claim.paper.values()
    )
