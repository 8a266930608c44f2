"""A master that is cut off from all its nodes: its jobs pause and go on, and none of them starts again."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from kit.cluster import NO_PRELOAD
from kit.machines import cut_off, heal
from kit.ticks import Ticks
from kit.waiting import eventually
from system.test_several_machines import two_servers_apart

pytestmark = pytest.mark.system

# Longer than lost_after and its margin.
CUT_SECONDS = 40.0


def test_jobs_go_on_with_the_same_attempt_after_the_master_was_cut_off_from_all_nodes(tmp_path: Path) -> None:
    # Nodes are silent after 31.25 s and lost after 35 s.
    with two_servers_apart(tmp_path, "5s", *NO_PRELOAD) as cluster:
        jobs = [Ticks(tmp_path / f"ticks{number}") for number in range(2)]
        for ticks in jobs:
            cluster.by("ann", "submit", "--gpus", "1", "--", *ticks.command())
        for ticks in jobs:
            eventually(lambda ticks=ticks: ticks.is_running(0), what="both jobs run", story=cluster.story)
        cut_off(cluster.machines["master"])
        cut = time.monotonic()
        eventually(
            lambda: not any(ticks.is_running(0) for ticks in jobs),
            within_seconds=30.0, what="both jobs are paused", story=cluster.story,
        )  # fmt: skip
        eventually(lambda: time.monotonic() > cut + CUT_SECONDS, within_seconds=CUT_SECONDS + 5.0)
        heal(cluster.machines["master"])
        eventually(
            lambda: all(ticks.is_running(0) for ticks in jobs),
            within_seconds=60.0, what="both jobs go on", story=cluster.story,
        )  # fmt: skip
        assert [len(ticks.attempts()) for ticks in jobs] == [1, 1]
        told = cluster.by("olga", "events")
        assert "all nodes fell silent at once: the master may be cut off" in told
        assert "node_lost" not in told
