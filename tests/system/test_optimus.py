"""Under `optimus` a free GPU goes to the running job that it saves most time, and no job is stopped for it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from kit.cluster import Cluster
from kit.waiting import eventually
from system.test_resize_kills import Training

pytestmark = [pytest.mark.system, pytest.mark.torch, pytest.mark.timeout(600)]

OPTIONS = ("--policy", "optimus", "--plan-every", "2s")


def test_the_job_with_more_to_gain_grows_and_gives_back_what_a_newcomer_needs(tmp_path: Path) -> None:
    """Four GPUs: a long job and a brief one, which gains less by another GPU."""
    with Cluster(
        tmp_path, nodes=1, virtual_gpus=4, topology="4", virtual_cores=4, virtual_memory="8G", master_options=OPTIONS
    ) as cluster:
        long = Training.submit(cluster, "long", "1:4", "--step-seconds", "0.2")
        brief = Training.submit(cluster, "brief", "1:4", "--step-seconds", "0.2", "--epochs", "40")

        def have(*devices: int, of: tuple[Training, ...] = (long, brief)) -> None:
            eventually(
                lambda: tuple(training.devices() for training in of) == devices,
                what=f"they have {devices} GPUs",
                within_seconds=180,
                story=long.story,
                every_seconds=0.2,
            )

        have(1, 1)
        have(3, 1)
        shown = json.loads(long.shell("show", long.id, "--json"))
        assert int(shown["progress"]["training_epochs"]) == 200

        def remaining_s() -> float:
            found = json.loads(long.shell("show", long.id, "--json"))["remaining_time"]
            return 0.0 if found is None else float(found["expected"])

        eventually(
            lambda: remaining_s() > 1.0, what="its remaining time is shown", within_seconds=60, every_seconds=0.5
        )
        told = long.shell("history", long.id)
        assert "from 1 GPU to 3: " in told, told
        newcomer = Training.submit(cluster, "newcomer", "1:4", "--step-seconds", "0.2", "--epochs", "30")
        have(2, 1, 1, of=(long, brief, newcomer))
        for training in (brief, newcomer):
            Path(f"{training.record}.go").touch()
        # Every step was done once by every rank, with every sample of a pass once.
        long.ends()
        assert not int(json.loads(long.shell("show", long.id, "--json")).get("preemptions") or 0)
