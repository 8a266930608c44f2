"""The move bench at a small size: it measures a real move between two daemons, and says where the time went."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.move import main


@pytest.mark.torch
@pytest.mark.system
def test_a_move_of_a_small_state_is_measured_part_by_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = main(quick=True)
    assert {"name", "ok", "figures", "limits"} <= set(result)
    figures = result["figures"]
    assert isinstance(figures, dict)
    samples = [json.loads(line) for line in (tmp_path / "build/bench/move.jsonl").read_text().splitlines()]
    (move,) = [sample for sample in samples if "pause" in sample]
    assert move["state_bytes"] >= 20 * 10**6
    assert all(move[part] >= 0 for part in ("stop", "copy", "first_step"))
    # the parts lie within the pause, which begins with the end of the last step, a little before the source is at K
    assert 0 < move["first_step"] < move["pause"]
    # far from the limit of the bench, for a machine that runs other tests too
    assert figures["state_20MB_pause_p50_milliseconds"] < 10_000
