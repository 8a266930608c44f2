"""Policies side by side: means and intervals over seeds, and each against the best, seed by seed."""

from __future__ import annotations

import math
import sys
from dataclasses import replace

import click
import pytest
from ganger.console import groups, print_side_by_side
from ganger_master.simulator.report.figures import Figures, by_best, comparison, figures, side_by_side
from ganger_master.simulator.report.outcomes import Run, outcomes
from ganger_master.simulator.traces.workload import workload


def run_of(average_jct: float, **changes: float) -> Figures:
    jobs = workload("ab", [0.0, 10.0], [1, 2], [5.0, 5.0])
    done = outcomes(jobs, [0.0, 10.0], [5.0, 15.0], [5.0, 5.0])
    made = figures(Run("p", done, 4, 12.0, 0.0, 15.0, offered_load=0.5))
    return replace(made, avg_jct_s=average_jct, **changes)  # type: ignore[arg-type]  # names and numbers of Figures


def rows(table: tuple[list[str], list[list[str]]]) -> dict[str, list[str]]:
    return {name: cells for name, *cells in table[1]}


def test_one_seed_is_shown_as_it_is() -> None:
    shown = rows(side_by_side({"fifo": [run_of(120.0)], "srtf": [run_of(60.0)]}))
    assert shown["average JCT"] == ["2m", "1m"]
    assert shown["offered load"] == ["0.50", "0.50"]
    ratios = [row for row in side_by_side({"fifo": [run_of(120.0)], "srtf": [run_of(60.0)]})[1] if row[0] == "  x best"]
    assert ratios[0] == ["  x best", "2.00", "1.00"]


def test_several_seeds_are_a_mean_and_its_interval() -> None:
    group = {"fifo": [run_of(110.0), run_of(130.0)], "srtf": [run_of(55.0), run_of(65.0)]}
    # Student's t with one degree of freedom: 12.706 x 14.142 / sqrt(2).
    assert rows(side_by_side(group))["average JCT"][0] == "2m ±2m 7s"
    document = comparison(group)["fifo"]
    assert document["avg_jct_s"]["mean"] == 120.0
    assert document["avg_jct_s"]["half_width"] == pytest.approx(12.7062 * 10, rel=1e-5)
    # Seeds are paired: however much they vary, fifo takes twice as long in each.
    assert document["avg_jct_by_best"] == {"mean": 2.0, "half_width": 0.0, "runs": 2}


def test_what_is_not_known_is_no_number() -> None:
    group = {"fifo": [run_of(math.nan)], "srtf": [run_of(60.0)]}
    assert rows(side_by_side(group))["average JCT"] == ["-", "1m"]
    assert comparison(group)["fifo"]["avg_jct_s"] is None
    assert comparison(group)["fifo"]["avg_jct_by_best"] is None
    assert by_best({"a": [math.nan]}) == {"a": None}
    assert by_best({"a": [0.0], "b": [1.0]}) == {"a": None, "b": None}


def test_nothing_is_a_multiple_of_what_rounding_made_of_no_wait() -> None:
    assert by_best({"a": [2.0**-22], "b": [1024.0]}) == {"a": None, "b": None}


def test_figures_that_no_policy_has_take_no_room() -> None:
    shown = rows(side_by_side({"fifo": [run_of(1.0, fragmentation=math.nan)]}))
    assert "free GPUs no gang can use" not in shown
    assert "moves" not in shown
    assert "moves" in rows(side_by_side({"fifo": [run_of(1.0, migrations=3)], "las": [run_of(1.0)]}))


def test_a_load_that_is_not_known_is_said_so() -> None:
    assert rows(side_by_side({"fifo": [run_of(1.0, offered_load=math.inf)]}))["offered load"] == ["-"]


@pytest.mark.parametrize("available", range(1, 60))
def test_columns_that_do_not_fit_into_a_line_go_on_below(available: int) -> None:
    widths = [10, 7, 3, 12, 5, 5]
    found = groups(widths, available)
    assert [column for group in found for column in group] == list(range(1, len(widths)))
    for group, following in zip(found, [*found[1:], None], strict=True):

        def width(columns: range) -> int:
            return widths[0] + sum(2 + widths[column] for column in columns)

        assert width(group) <= available or len(group) == 1
        assert following is None or width(range(group.start, following.start + 1)) > available


def test_no_name_and_no_figure_is_cut_on_a_narrow_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    policies = ["fifo", "fifo-backfill", "las", "srtf+best-fit", "round-robin", "tiresias-gittins"]
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    print_side_by_side(*side_by_side({policy: [run_of(120.0)] for policy in policies}))
    lines = [line.rstrip() for line in click.unstyle(capsys.readouterr().out).splitlines()]
    assert max(map(len, lines)) <= 60
    text = "\n".join(lines)
    assert "…" not in text
    assert all(policy in text for policy in policies)
    assert text.count("jobs worse off than alone") == lines.count("") + 1 > 1
