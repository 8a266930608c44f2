"""Turns, packs, moves and changes of size in one cluster, several at once, while its parties are killed.

(chaos: eight to twenty minutes each, by how much else computes)"""

from __future__ import annotations

from pathlib import Path

import pytest
from kit.cluster import Cluster
from system.storm import Storm
from system.wishes import DEVICES

pytestmark = [pytest.mark.system, pytest.mark.torch]


def weather(directory: Path, seed: int, actions: int, told: list[str], *, spares_ranks: bool = True) -> None:
    """A storm, of which is told how it went, however it ended."""
    cluster = Cluster(
        directory,
        nodes=2,
        virtual_gpus=DEVICES,
        topology=str(DEVICES),
        virtual_cores=2 * DEVICES,
        virtual_memory="16G",
        # Only the storm proposes plans.
        master_options=("--policy", "gandiva", "--no-planner"),
    )
    with cluster:
        storm = Storm(cluster, seed, actions, spares_ranks=spares_ranks)
        try:
            storm.run()
        finally:
            storm.close()
            told.append(storm.report())


@pytest.mark.chaos
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("seed", [1, 2])
def test_every_job_ends_with_its_result_under_kills_in_two_hundred_changes(
    tmp_path: Path, storms: list[str], seed: int
) -> None:
    weather(tmp_path, seed, 200, storms)


@pytest.mark.chaos
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("seed", [3, 4])
def test_jobs_that_lose_ranks_and_launchers_restart_from_their_newest_checkpoint_in_two_hundred_changes(
    tmp_path: Path, storms: list[str], seed: int
) -> None:
    weather(tmp_path, seed, 200, storms, spares_ranks=False)
