"""The contract of a benchmark's object: figures and limits, ok only if all hold, samples to compute them from."""

from __future__ import annotations

import json
import math
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from click.testing import CliRunner
from ganger.cli.checkout import bench

from benchmarks.machine import stolen_share
from benchmarks.report import AtLeast, AtMost, report


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_report_is_ok_only_if_every_limit_holds() -> None:
    limits = {"a_ms": AtMost(2.0), "b": AtLeast(4.0)}
    good = report("x", {"a_ms": 2.0, "b": 4.0}, limits, ())
    assert good["ok"]
    assert set(good) == {"name", "ok", "figures", "limits", "missed"}
    bad = report("x", {"a_ms": 3.0, "b": 5.0}, limits, ())
    assert (bad["ok"], bad["missed"]) == (False, ["a_ms"])


def test_limit_without_its_figure_does_not_hold() -> None:
    assert not report("x", {}, {"a": AtMost(1.0)}, ())["ok"]
    assert not report("x", {"a": math.nan}, {"a": AtMost(1.0)}, ())["ok"]


def test_samples_are_one_object_a_line(tmp_path: Path) -> None:
    report("x", {}, {}, [{"a": 1}, {"a": 2}])
    lines = (tmp_path / "build" / "bench" / "x.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [{"a": 1}, {"a": 2}]


def test_list_names_the_benchmarks_of_the_master() -> None:
    named = CliRunner().invoke(bench, ["--list"]).output.split()
    assert {"verdicts", "submit"} <= set(named)


@pytest.mark.parametrize(("name", "said"), [("slice", "jobs6_on4"), ("boundary", "no cases")])
def test_a_case_that_a_benchmark_has_not_is_a_mistake_of_usage(name: str, said: str) -> None:
    done = CliRunner().invoke(bench, [name, "--only", "magic"])
    assert done.exit_code == 2
    assert said in done.output


def test_what_was_stolen_is_a_share_of_what_was_wanted_and_not_of_what_idled() -> None:
    # user, nice, system, idle, iowait, irq, softirq, steal, and guests, which are part of user
    before, after = [10, 0, 5, 100, 1, 0, 0, 2, 7], [40, 0, 15, 900, 1, 0, 0, 22, 30]
    assert stolen_share(before, after) == pytest.approx(20 / 60, abs=0.001)
    assert stolen_share([], after) == 0.0


def test_the_machine_is_told_beside_the_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("small", "tests.benchmarks.test_bench_command:small", "ganger.benches")
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [point])
    told = json.loads(CliRunner().invoke(bench, ["small", "--json"]).output)
    assert told["figures"] == {"a_ms": 1.0}
    assert told["machine"]["cpus"] >= 1
    assert 0 <= told["machine"]["stolen_share"] <= 1


def small() -> dict[str, object]:
    return report("small", {"a_ms": 1.0}, {}, ())


@pytest.mark.parametrize("case", ["", " "])
def test_a_case_without_a_name_does_not_run_all_of_them(case: str) -> None:
    done = CliRunner().invoke(bench, ["slice", "--only", case])
    assert (done.exit_code, "name a case" in done.output) == (2, True)
