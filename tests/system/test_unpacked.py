"""Two jobs on one GPU at once, each slower than alone: one moves to a GPU that becomes free. (chaos: 2 min)"""

from __future__ import annotations

from pathlib import Path

import pytest
from kit.cluster import Cluster
from kit.waiting import eventually
from system.harness import Run
from system.hasty import events, hasty_planner, story
from system.packing import WANTS, beside, has_quotas

pytestmark = [pytest.mark.system, pytest.mark.torch, pytest.mark.chaos, pytest.mark.timeout(600)]

# By itself each uses two thirds of its GPU: two make more of one than one does, and both are slower there. A GPU is so
# little of a core that a busy machine has it to give.
CORES = "0.15"
DUTY = ("--computes", "0.075", "--waits", "0.25")
STEPS = 512


def test_one_of_a_pair_moves_to_a_gpu_that_became_free_and_is_faster_there(tmp_path: Path) -> None:
    if not has_quotas():
        pytest.skip("waiting jobs differ from computing ones by the CPU time of a device, and there is no quota here")
    with (
        Cluster(
            tmp_path,
            nodes=1,
            virtual_gpus=2,
            topology="2",
            master_options=("--policy", "gandiva", "--plan-every", "5s", "--quantum", "never", "--no-planner"),
            daemon_options=("--virtual-gpu-cores", CORES),
        ) as cluster,
        hasty_planner(cluster),
    ):
        runs = [Run.submit(cluster, f"job-{number}", *WANTS, steps=STEPS, job=DUTY) for number in range(3)]
        kept = eventually(
            lambda: events(runs[0], "change_kept", "PACK"),
            what="two run at once, and that is kept",
            within_seconds=240,
            story=lambda: story(cluster, *runs),
            every_seconds=0.5,
        )
        names = {event["subject"] for event in kept}
        pair = [run for run in runs if run.name in names]
        (third,) = [run for run in runs if run.name not in names]
        assert [beside(run) for run in pair] == [[pair[1].name], [pair[0].name]]
        assert 1.05 < float(kept[0]["figures"]["gain"]) < 1.9
        third.wait_step(1, within_seconds=120)
        assert events(third, "move_begun", "UNPACK") == []

        third.hurry()
        third.wait_state("SUCCEEDED", within_seconds=120)
        (judged,) = eventually(
            lambda: events(third, "change_kept", "UNPACK"),
            what="one moves, and that is kept",
            within_seconds=120,
            story=lambda: story(cluster, *pair),
            every_seconds=0.5,
        )
        (begun,) = events(third, "move_begun", "UNPACK")
        (left,) = [run for run in pair if run.name == begun["subject"] == judged["subject"]]
        assert float(begun["figures"]["saved_gpu_seconds"]) > 0.0
        assert float(judged["figures"]["gain"]) > 1.05
        assert [beside(run) for run in pair] == [[], []]
        told = left.shell.try_("history", left.id).out
        assert "by planner, to have its GPUs to itself, to save" in told
        assert "the move to have its GPUs to itself was kept: its rate was" in told
        for run in pair:
            run.hurry()
        for run in pair:
            run.wait_state("SUCCEEDED", within_seconds=120)
            run.check(third)
