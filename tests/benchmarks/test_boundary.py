"""The boundary bench at a small size: exactness holds, and what it prints keeps to the contract."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ganger.injob.page_layout import PageParkLevel

from benchmarks.bench_gang import BenchGang, StuckError
from benchmarks.boundary import GANGS, main
from benchmarks.report import BenchReport, quantile


@pytest.mark.torch
def test_gangs_with_stragglers_and_a_slow_relay_stop_at_one_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    gangs = GANGS[:2]
    monkeypatch.setattr("benchmarks.boundary.GANGS", gangs)
    result = main(quick=True)
    assert {"name", "ok", "figures", "limits"} <= set(result)
    figures = result["figures"]
    assert isinstance(figures, dict)
    for ranks, nodes, _, _ in gangs:
        for name in ("deadlocks", "skew_steps", "overrun_steps"):
            assert figures[f"ranks{ranks}_nodes{nodes}_{name}"] == 0
        assert figures[f"ranks{ranks}_nodes{nodes}_cycles"] == 4
    # on a machine that runs other tests too, these are far from the limits of the bench and still tell a blunder
    assert figures["boundary_microseconds"] < 10
    assert figures["zero_line_microseconds"] < 60
    # no figure where the machine has one CPU, or no cpuset
    assert figures.get("repin_boundaries_on_old_cores", 0) == 0
    samples = [json.loads(line) for line in (tmp_path / "build/bench/boundary.jsonl").read_text().splitlines()]
    assert sum("suspend_seconds" in sample for sample in samples) == 8


@pytest.mark.torch
def test_a_gang_whose_relay_is_cut_is_reported_as_stuck(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.bench_gang.DEADLOCK_S", 0.5)
    with BenchGang(tmp_path, ranks=2, nodes=2, delay_s=3600.0, seed=1) as gang:  # noqa: SIM117
        with pytest.raises(StuckError, match="rank 1: step"):
            gang.stop_and_go(PageParkLevel.PAUSE, 0.0)


def test_a_figure_past_its_limit_makes_the_report_not_ok(tmp_path: Path) -> None:
    report = BenchReport("example", tmp_path)
    report.at_most("wait_milliseconds", 2.0, 3.0)
    assert BenchReport("example", tmp_path).result()["ok"] is True
    report.at_least("rate_per_second", 2.0, 3.0)
    result = report.result()
    assert result["ok"] is False
    assert result["missed"] == ["rate_per_second"]


def test_quantiles_are_samples_that_were_seen() -> None:
    values = [float(i) for i in range(1, 101)]
    assert quantile(values, 0.5) == 50
    assert quantile(values, 0.99) == 99
    assert quantile([7.0], 0.99) == 7
    with pytest.raises(ValueError, match="no samples"):
        quantile([], 0.5)
