"""The elastic bench once through: a real training of one rank, then four, then one, under a real master and daemon."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.elastic import main


@pytest.mark.torch
@pytest.mark.system
def test_a_training_grows_and_shrinks_and_does_each_step_and_takes_each_sample_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = main(quick=True)
    figures = result["figures"]
    assert isinstance(figures, dict)
    for name in ("steps_missing", "samples_taken_twice", "samples_never_taken", "steps_not_done_once_by_every_rank"):
        assert figures[name] == 0, name
    assert figures["largest_difference_of_a_loss_in_billionths"] < 1
    samples = [json.loads(line) for line in (tmp_path / "build/bench/elastic.jsonl").read_text().splitlines()]
    resizes = [sample["resize"] for sample in samples if "resize" in sample]
    assert [(one["ranks"], one["becomes"]) for one in resizes] == [(1, 4), (4, 1)]
    assert {sample["world"] for sample in samples if "world" in sample} == {1, 4}
    # The new world began only when the old one had ended: no step of both.
    ends = {(sample["step"], sample["rank"]) for sample in samples if sample.get("epoch") is not None}
    assert len(ends) == figures["steps"] + 3 * sum(s.get("world") == 4 and s["rank"] == 0 for s in samples)
