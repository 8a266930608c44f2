"""`ganger bench cpu` keeps its limits, and its modelled server reports what its planner does."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import cpu
from benchmarks.modelled_node import ModelledNode


def test_the_default_finds_the_cores_of_both_jobs_at_little_cost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = cpu.main(quick=True)
    assert found["missed"] == [], found
    assert found["figures"]["image_chosen_cores"] == 19.0
    assert found["figures"]["language_chosen_cores"] == 1.0
    assert (tmp_path / "build/bench/cpu.jsonl").read_text().count('"job"') >= 4


def test_a_job_of_a_series_that_was_measured_starts_with_the_cores_of_its_series() -> None:
    node = ModelledNode(2, 8)
    first = node.submit(cpu.bounded(3.0, 10.0), signature=1)
    node.run(600)
    assert node.cores(first) == 3
    second = node.submit(cpu.bounded(3.0, 10.0), signature=1)
    assert node.cores(second) == 3


def test_a_case_that_is_none_is_refused_with_those_that_are() -> None:
    with pytest.raises(ValueError, match="there are modelled, live"):
        cpu.main(only="magic")
