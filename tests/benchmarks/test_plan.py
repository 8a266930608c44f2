"""The planning bench at a small size: every pass places the same gangs again, and its object keeps to the contract."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.plan import PASSES, main


def test_every_policy_is_timed_on_an_idle_and_a_used_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = main(nodes=200, jobs=60, rounds=2)
    figures, limits = result["figures"], result["limits"]
    assert set(limits) <= set(figures)
    # Every pass, the packing of a round and Optimus's sizes on both clusters, and the making of the what-if.
    assert len(limits) == 2 * (len(PASSES) + 2) + 1
    samples = [json.loads(line) for line in (tmp_path / "build/bench/plan.jsonl").read_text().splitlines()]
    assert len(samples) == 2 * 2 * (len(PASSES) + 2)
    for policy in (timed.name for timed in PASSES):
        for view in ("idle", "used"):
            rounds = [(one["jobs"], one["gpus"]) for one in samples if (one["policy"], one["view"]) == (policy, view)]
            assert rounds[0] == rounds[1]
            # 200 idle nodes with 1,600 GPUs have room for nearly all of the 1,500 asked for
            assert rounds[0][0] >= (40 if view == "idle" else 20)
