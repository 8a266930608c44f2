"""Whatever happens to a cluster, what its master decided is decided again from the file, to the last byte."""

from __future__ import annotations

from pathlib import Path

import pytest
from decision_log.kit import busy, busy_for, recorded, rerun_of, stormy
from ganger_master.core.state_image import image_of
from ganger_master.decision_log.recording import digest_of


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


def test_a_master_that_is_recorded_decides_as_it_would_have(tmp_path: Path) -> None:
    one, other = stormy(4, "fifo-backfill"), stormy(4, "fifo-backfill")
    recorded(tmp_path, one, busy_for(6, 60.0))
    busy_for(6, 60.0)(other)
    assert one.master.history == other.master.history
    assert one.master.durable == other.master.durable
