"""The load at a small size: no call fails, every job is done, and every end is seen."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.load import LoadSize, main


def test_a_small_cluster_under_load_serves_every_caller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    size = LoadSize(
        nodes=5, jobs=20, users=2, submitters=4, watchers=4, seconds=5.0, runs_s=1.0, flood_rounds=1, flood_round_s=1.0
    )
    figures = main(size)["figures"]
    assert figures["errors"] == 0.0
    assert figures["jobs_done"] == figures["jobs"] == 20
    assert figures["ends_watched"] > 0
    assert figures["flood_accepted"] > 0
