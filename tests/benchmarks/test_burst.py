"""The burst at a small size: every job starts, whether its own scheduler or the planner places it."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.burst import POLICIES, main


@pytest.mark.parametrize("policy", ["fifo", "gandiva"])
def test_every_job_of_a_burst_starts(policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert policy in POLICIES
    figures = main(nodes=20, arrays=3, members=30, only=policy)["figures"]
    samples = (tmp_path / "build/bench/burst.jsonl").read_text().splitlines()
    assert len(samples) == figures["jobs"] == 90
    assert figures[f"{policy}_gangs_per_s"] > 0.0
