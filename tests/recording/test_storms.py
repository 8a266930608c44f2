"""Whatever happens to a cluster, what its master decided is decided again from the file, to the last byte."""

from __future__ import annotations

from pathlib import Path

import pytest
from ganger_master.core.image import image_of
from ganger_master.recording.lines import digest_of
from recording.kit import busy, busy_for, recorded, rerun_of, stormy


@pytest.mark.parametrize("seed", range(12))
def test_a_storm_recorded_from_any_batch_on_replays_to_its_end(tmp_path: Path, seed: int) -> None:
    cluster = stormy(seed, ["fifo", "fifo-backfill"][seed % 2])
    dice = cluster.engine.random
    busy(cluster, dice.randint(0, 6))
    cluster.run_for(dice.uniform(0.0, 60.0))
    cluster.run_until(lambda: cluster.master.is_up, 60.0)
    found = recorded(tmp_path, cluster, busy_for(5, 120.0))
    replayed = rerun_of(found.path)
    assert replayed.differences == []
    assert found.commands == len(replayed.decided) > 200
    if cluster.master.is_up:
        assert replayed.rerun.state is not None
        assert len(digest_of(image_of(replayed.rerun.state))) == 32
