"""Plots are drawn where Matplotlib is, and a clear word is said where it is not."""

from __future__ import annotations

import builtins
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ganger_master.simulator.report.files import PlotsUnavailable, cumulative, save_plots
from ganger_master.simulator.report.outcomes import Run, StepSeries, outcomes
from ganger_master.simulator.traces.workload import workload


def run(policy: str, jobs: int = 5) -> Run:
    made = workload([str(n) for n in range(jobs)], np.arange(jobs) * 10.0, np.arange(jobs) % 3 + 1, [100.0] * jobs)
    starts = made.submit_s + 5
    ends = starts + 100
    if jobs:
        starts[-1] = ends[-1] = np.nan
    series = {"used_gpus": StepSeries.of([0, 50], [3, 4], 400), "waiting_jobs": StepSeries.of([0], [1], 400)}
    return Run(policy, outcomes(made, starts, ends, 0.0), 8, 24, 0, 400, series, offered_load=0.9)


def test_missing_matplotlib_is_said_with_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real = builtins.__import__

    def without(
        name: str,
        globals: Mapping[str, object] | None = None,
        locals: Mapping[str, object] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, globals, locals, fromlist, level)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(PlotsUnavailable, match=r"pip install 'ganger\[plots\]'"):
        save_plots([run("fifo")], tmp_path)
    assert not list(tmp_path.iterdir())


def test_matplotlib_is_not_imported_until_something_is_drawn() -> None:
    code = "import sys, ganger_master.simulator.report.files; print('matplotlib' in sys.modules)"
    path = [entry for entry in sys.path if entry]
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {path!r}; {code}"], capture_output=True, text=True
    )
    assert (done.stdout, done.returncode) == ("False\n", 0), done.stderr


def test_all_pictures_of_several_runs_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    paths = save_plots([run("fifo"), run("fifo"), run("las 2d/x")], tmp_path)
    names = [path.name for path in paths]
    assert names == [
        "jct_cdf.png",
        "waiting_by_gang_size.png",
        "use_over_time.png",
        "timeline_fifo.png",
        "timeline_fifo_1.png",
        "timeline_las_2d_x.png",
    ]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)


def test_no_words_of_a_picture_lie_over_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every text lies within the picture and none of another axes' labels crosses it."""
    figure_module = pytest.importorskip("matplotlib.figure")
    drawn = []
    real = figure_module.Figure.savefig
    monkeypatch.setattr(
        figure_module.Figure, "savefig", lambda self, *a, **k: drawn.append(self) or real(self, *a, **k)
    )
    many = run("fifo")
    names = ("used_gpus", "used_cores", "fragmented_gpus", "waiting_jobs")
    series = {name: StepSeries.of([0, 50], [3, 4], 400) for name in names}
    save_plots(
        [Run(policy, many.outcomes, 8, 24, 0, 400, series, offered_load=0.9) for policy in ("fifo", "las")], tmp_path
    )
    for figure in drawn:
        labels = [label for axes in figure.axes for label in (axes.yaxis.label, axes.xaxis.label, axes._left_title)]
        boxes = [label.get_window_extent() for label in labels if label.get_text()]
        for number, box in enumerate(boxes):
            assert figure.bbox.x0 <= box.x0
            assert box.x1 <= figure.bbox.x1
            assert figure.bbox.y0 <= box.y0
            assert box.y1 <= figure.bbox.y1
            assert not any(box.overlaps(other) for other in boxes[number + 1 :])


def test_run_of_many_jobs_and_run_without_series_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    many = run("fifo", 5_000)
    assert len(save_plots([Run(many.policy, many.outcomes, 8, 24, 0, 60_000)], tmp_path)) == 4


def test_distribution_ends_at_the_largest_value_and_has_few_points() -> None:
    values, shares = cumulative(np.arange(100_000, dtype=float)[::-1])
    assert len(values) == len(shares) <= 2_000
    assert (values[0], values[-1], shares[-1]) == (0, 99_999, 1)
    assert cumulative(np.array([])) == ([], [])
    assert cumulative(np.array([3.0, 1.0])) == ([1, 3], [0.5, 1])
