"""Jobs under `ganger` that are co-located while another one waits, until none waits or being together is slow."""

from __future__ import annotations

from pathlib import Path

import pytest
from kit.waiting import eventually
from system.hasty import events, story
from system.packing import beside, packed_pair, three_jobs, tried_together

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


def test_two_that_keep_each_other_waiting_go_apart_while_the_third_one_still_waits(tmp_path: Path) -> None:
    with three_jobs(tmp_path, COMPUTES_S, "--policy", "ganger", job=("--jealous",)) as runs:
        pair, third, gain = tried_together(runs, "change_undone")
        # In turns they would make 1.00 together; a machine that has other work scatters that.
        assert 0.7 < gain < 1.3
        eventually(
            lambda: [beside(run) for run in runs] == [[], [], []],
            what="each has its GPU to itself",
            within_seconds=120,
            story=lambda: story(third.cluster, *runs),
            every_seconds=0.5,
        )
        for run in runs:
            run.hurry()
        for run in runs:
            run.wait_state("SUCCEEDED", within_seconds=180)
        for run in pair:
            run.check(third)
