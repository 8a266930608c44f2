"""Jobs under `ganger` that are co-located while another one waits, and separated once none does. (chaos: 2 min)"""

from __future__ import annotations

from pathlib import Path

import pytest
from kit.cluster import Cluster
from kit.waiting import eventually
from system.harness import Run
from system.hasty import events, hasty_planner, story
from system.packing import WANTS, beside, has_quotas

pytestmark = [pytest.mark.system, pytest.mark.torch, pytest.mark.chaos, pytest.mark.timeout(600)]

# By itself each uses a third of its GPU: two are nearly as fast beside each other. A GPU is so little of a core that a
# busy machine has it to give.
CORES = "0.15"
DUTY = ("--computes", "0.04", "--waits", "0.25")
STEPS = 512


def test_two_share_a_gpu_for_a_third_that_waits_and_go_apart_once_it_has_ended(tmp_path: Path) -> None:
    if not has_quotas():
        pytest.skip("waiting jobs differ from computing ones by the CPU time of a device, and there is no quota here")
    with (
        Cluster(
            tmp_path,
            nodes=1,
            virtual_gpus=2,
            topology="2",
            master_options=("--policy", "ganger", "--plan-every", "5s", "--no-planner"),
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
        assert 1.05 < float(kept[0]["figures"]["gain"]) < 2.2
        third.wait_step(1, within_seconds=120)

        third.hurry()
        third.wait_state("SUCCEEDED", within_seconds=120)
        eventually(
            lambda: [beside(run) for run in pair] == [[], []],
            what="they go apart",
            within_seconds=120,
            story=lambda: story(cluster, *pair),
            every_seconds=0.5,
        )
        (begun,) = events(third, "move_begun", "UNPACK")
        assert begun["subject"] in names
        told = pair[0].shell.try_("history", begun["subject"].removeprefix("jobs/")).out
        assert "by planner, to have its GPUs to itself" in told
        for run in pair:
            run.hurry()
        for run in pair:
            run.wait_state("SUCCEEDED", within_seconds=120)
            run.check(third)
