"""Two jobs on one GPU at once, each slower than alone: one moves to a GPU that becomes free. (chaos: 2 min)"""

from __future__ import annotations

from pathlib import Path

import pytest
from kit.waiting import eventually
from system.hasty import events, story
from system.packing import packed_pair

pytestmark = [pytest.mark.system, pytest.mark.torch, pytest.mark.chaos, pytest.mark.timeout(600)]

# By itself each uses two thirds of its GPU: two make more of one than one does, and both are slower there.
COMPUTES_S = 0.075


def test_one_of_a_pair_moves_to_a_gpu_that_became_free_and_is_faster_there(tmp_path: Path) -> None:
    with packed_pair(tmp_path, COMPUTES_S, "--policy", "gandiva", "--quantum", "never") as packed:
        pair, third = packed.pair, packed.third
        assert 1.05 < packed.gain < 1.9
        third.wait_step(1, within_seconds=120)
        assert events(third, "move_begun", "UNPACK") == []

        packed.end_third()
        (judged,) = eventually(
            lambda: events(third, "change_kept", "UNPACK"),
            what="one moves, and that is kept",
            within_seconds=120,
            story=lambda: story(packed.cluster, *pair),
            every_seconds=0.5,
        )
        (begun,) = events(third, "move_begun", "UNPACK")
        (left,) = [run for run in pair if run.name == begun["subject"] == judged["subject"]]
        assert float(begun["figures"]["saved_gpu_seconds"]) > 0.0
        assert float(judged["figures"]["gain"]) > 1.05
        assert packed.beside() == [[], []]
        told = left.shell.try_("history", left.id).out
        assert "by planner, to have its GPUs to itself, to save" in told
        assert "the move to have its GPUs to itself was kept: its rate was" in told
        packed.end_pair()
