"""How cells of the comparison with the anchors are prepared and judged."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks.anchor_cells import ANCHORS, TRACES, AnchorRow, figures, judged, prepared, table
from benchmarks.anchors import gone_on

CSV = "job_id,submit_time_s,gpus,duration_s,gpu_spec,priority,vc\n"


def row(policy: str, jct_s: float, waiting_s: float, load: float = 1.0) -> AnchorRow:
    return AnchorRow(TRACES[0], load, 0, policy, 10, 64, jct_s, waiting_s, waiting_s / 2, 0, 0.1)


def cell_rows(ours: tuple[float, float], load: float = 1.0) -> list[AnchorRow]:
    rows = [row(name, 100.0 + place, 50.0 - place, load) for place, name in enumerate(ANCHORS)]
    return [*rows, row("ganger", *ours, load), row("srtf", 80.0, 10.0, load)]


def test_a_cell_is_judged_against_the_best_anchor_of_each_figure() -> None:
    (cell,) = judged(cell_rows((90.0, 66.0)))
    assert (cell.best, cell.jct_ratio) == (ANCHORS[0], 0.9)
    assert cell.best_waiting == ANCHORS[-1]
    assert cell.waiting_ratio == pytest.approx(66.0 / (51.0 - len(ANCHORS)))
    assert (cell.to_oracle, cell.best_to_oracle) == (90.0 / 80.0, 100.0 / 80.0)


def test_a_cell_that_lacks_an_anchor_is_not_judged() -> None:
    assert judged([each for each in cell_rows((90.0, 66.0)) if each.policy != ANCHORS[1]]) == []


def test_figures_say_the_share_and_the_worst() -> None:
    cells = judged([*cell_rows((90.0, 0.0), 0.7), *cell_rows((104.0, 50.0), 1.0)])
    found = figures(cells)
    assert (found["cells"], found["lowest_jct_share"], found["jct_ratio_max"]) == (2, 0.5, 1.04)
    assert found["p95_waiting_within_1.1_share"] == 0.5
    assert len(table(cells).splitlines()) == 4
    assert figures([]) == {"cells": 0}


def test_a_wait_where_the_reference_has_none_is_infinitely_worse() -> None:
    rows = [row(name, 100.0, 0.0) for name in (*ANCHORS, "srtf")]
    assert judged([*rows, row("ganger", 100.0, 0.0)])[0].waiting_ratio == 1.0
    assert judged([*rows, row("ganger", 100.0, 1.0)])[0].waiting_ratio == math.inf
    # What rounding leaves is nothing.
    assert judged([*rows, row("ganger", 100.0, 5e-10)])[0].waiting_ratio == 1.0


def test_a_window_is_of_neighbours_and_its_cluster_holds_twice_the_largest_gang(tmp_path: Path) -> None:
    lines = [f"{job},{100 * job},{1 if job else 99},{1000 if job % 2 else ''},T4,3,a\n" for job in range(41)]
    (tmp_path / "jobs_small.csv").write_text(CSV + "".join(lines))
    jobs, servers = prepared(tmp_path, "small", 1_000, 0)
    # Jobs without a run time are left out; the first, of 99 GPUs, is one.
    assert (len(jobs), servers.gpus) == (20, 64)
    assert jobs.submit_s[0] == 0.0
    assert set(jobs.gpu_type.names) == {""}
    assert set(jobs.priority.tolist()) == {0}
    assert prepared(tmp_path, "small", 7, 1)[0].job_ids == tuple(str(job) for job in range(15, 29, 2))
    (tmp_path / "jobs_large.csv").write_text(CSV + "".join(lines).replace("\n3,300,1,", "\n3,300,33,"))
    assert prepared(tmp_path, "large", 1_000, 0)[1].gpus == 72


def test_kept_runs_are_not_run_again(tmp_path: Path) -> None:
    kept = tmp_path / "runs.jsonl"
    kept.write_text("".join(json.dumps(asdict(each)) + "\n" for each in cell_rows((90.0, 66.0))))
    tasks = [(TRACES[0], 1.0, policy) for policy in ("ganger", "srtf")]
    assert [found.policy for found in gone_on(tasks, kept, 1_000, 1)] == ["ganger", "srtf"]
