"""Jobs under `ganger` that are co-located while another one waits, and separated once none does."""

from __future__ import annotations

from pathlib import Path

import pytest
from kit.waiting import eventually
from system.hasty import events, story
from system.packing import packed_pair

pytestmark = [pytest.mark.system, pytest.mark.torch, pytest.mark.timeout(600)]

# By itself each uses a third of its GPU: two are nearly as fast beside each other.
COMPUTES_S = 0.04


def test_two_share_a_gpu_for_a_third_that_waits_and_go_apart_once_it_has_ended(tmp_path: Path) -> None:
    with packed_pair(tmp_path, COMPUTES_S, "--policy", "ganger") as packed:
        pair, third = packed.pair, packed.third
        assert 1.05 < packed.gain < 2.2

        packed.end_third()
        eventually(
            lambda: packed.beside() == [[], []],
            what="they go apart",
            within_seconds=120,
            story=lambda: story(packed.cluster, *pair),
            every_seconds=0.5,
        )
        (begun,) = events(third, "move_begun", "UNPACK")
        assert begun["subject"] in [run.name for run in pair]
        told = pair[0].shell.try_("history", begun["subject"].removeprefix("jobs/")).out
        assert "by planner, to have its GPUs to itself" in told
        packed.end_pair()
