"""The contract of `ganger bench`: one object, figures and limits, exit 0 only if all hold."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner
from ganger.cli.bench import bench, benches, judge, write_samples


def test_report_is_ok_only_if_every_limit_holds() -> None:
    found = {"figures": {"a_ms": 1.0, "b": 5}, "limits": {"a_ms": {"max": 2.0}, "b": {"min": 4}}}
    report = judge("x", found)
    assert report["ok"]
    assert set(report) == {"name", "ok", "figures", "limits", "machine"}
    worse = judge("x", {**found, "figures": {"a_ms": 3.0, "b": 5}})
    assert (worse["ok"], worse["missed"]) == (False, ["a_ms"])


def test_limit_without_its_figure_does_not_hold() -> None:
    assert not judge("x", {"figures": {}, "limits": {"a": {"max": 1}}})["ok"]
    assert not judge("x", {"figures": {"a": float("nan")}, "limits": {"a": {"max": 1}}})["ok"]


def test_peer_that_is_missing_is_said_and_does_not_fail() -> None:
    report = judge("x", {"figures": {"a": 1}, "limits": {}, "skipped": "slurm is not installed"})
    assert report["ok"]
    assert report["skipped"] == "slurm is not installed"


def test_samples_are_one_object_a_line(tmp_path: Path) -> None:
    path = write_samples("x", [{"a": 1}, {"a": 2}], tmp_path / "bench")
    assert [json.loads(line) for line in path.read_text().splitlines()] == [{"a": 1}, {"a": 2}]


def test_list_names_every_registered_bench() -> None:
    result = CliRunner().invoke(bench, ["--list"])
    assert result.output.split() == list(benches())
    assert {"verdicts", "submit"} <= set(benches())


def test_unknown_bench_is_a_usage_error_that_names_the_known() -> None:
    result = CliRunner().invoke(bench, ["nosuch"])
    assert result.exit_code == 2
    assert "verdicts" in result.output
