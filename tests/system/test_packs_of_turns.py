"""Three jobs on two GPUs: two take turns, are measured there, leave them, and run at once on one GPU. (chaos: 2 min)"""

from __future__ import annotations

from pathlib import Path

import pytest
from kit.cluster import Cluster
from kit.waiting import eventually
from system.harness import Run
from system.packing import WANTS, beside, has_quotas
from system.test_turns import takes_turns

pytestmark = [pytest.mark.system, pytest.mark.torch, pytest.mark.chaos, pytest.mark.timeout(900)]


def test_jobs_in_turns_that_wait_most_of_the_time_are_packed_and_the_pack_is_kept(tmp_path: Path) -> None:
    if not has_quotas():
        pytest.skip("waiting jobs differ from computing ones by the CPU time of a device, and there is no quota here")
    with Cluster(
        tmp_path,
        nodes=1,
        virtual_gpus=2,
        topology="2",
        master_options=("--policy", "gandiva", "--plan-every", "10s", "--quantum", "5s"),
        daemon_options=("--virtual-gpu-cores", "0.3"),
    ) as cluster:
        # They step ten times a second and do nothing meanwhile: a pair that pays.
        runs = [Run.submit(cluster, f"job-{number}", *WANTS, steps=8192) for number in range(3)]
        eventually(
            lambda: sum(takes_turns(run) for run in runs) >= 2,
            what="two of them take turns",
            within_seconds=180,
            story=runs[2].story,
            every_seconds=0.5,
        )

        def kept() -> list[Run]:
            return [run for run in runs if "kept" in run.shell.try_("history", run.id).out]

        eventually(
            lambda: len(kept()) >= 2,
            what="two run at once, and that is kept",
            within_seconds=420,
            story=lambda: "".join(run.story() for run in runs),
            every_seconds=1.0,
        )
        assert [len(beside(run)) for run in kept()[:2]] == [1, 1]
        # No job needs to be time-sliced any more.
        for run in runs:
            run.wait_step(run.last_step() + 20)
