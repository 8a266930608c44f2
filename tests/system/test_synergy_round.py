"""A round of Synergy with real processes: one plan stops a job, and puts it and a pending gang where both fit, with the
cores of their places. (15 s)"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from kit.cluster import Cluster
from kit.waiting import eventually
from system.harness import Run
from system.test_moves import node_of, one_of_each_node_ends

pytestmark = [pytest.mark.system, pytest.mark.torch]

OPTIONS = ("--policy", "fifo+synergy-tune", "--plan-every", "1s")


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path, nodes=2, virtual_gpus=2, topology="2", virtual_cores=4, master_options=OPTIONS) as running:
        yield running


def test_a_round_restarts_one_job_beside_another_and_starts_a_gang_in_its_place(cluster: Cluster) -> None:
    small = [Run.submit(cluster, f"small-{number}", steps=400) for number in range(4)]
    ended, stays = one_of_each_node_ends(small)
    assert len({node_of(job) for job in stays}) == 2, "no job is restarted while no other waits"

    pair = Run.submit(cluster, "pair", "--locality", "node", world=2)
    pair.wait_step(1, within_seconds=120)
    for job in stays:
        job.wait_step(job.last_step() + 1)
    assert len({node_of(job) for job in stays}) == 1
    assert node_of(pair) not in {node_of(job) for job in stays}
    claims = [claim for job in (*stays, pair) for claim in job.show()["gang"]["claims"]]
    assert sum(sum(claim["millicores"]) for claim in claims) <= 8_000
    assert sorted(sum(claim["millicores"]) for claim in claims) == [2_000, 2_000, 4_000]
    for job in (*stays, pair):
        job.hurry()
    for job in stays:
        job.wait_state("SUCCEEDED", within_seconds=120)
        job.check(ended[0])
    eventually(lambda: pair.state == "SUCCEEDED", what="the pair ends", within_seconds=120, story=pair.story)
