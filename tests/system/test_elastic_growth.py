"""An elastic job grows onto idle GPUs and gives them back; under `gandiva` rigid ones share those that remain."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from ganger_master.core.settings import DEFAULT_POLICY
from kit.cluster import Cluster
from kit.waiting import eventually
from system.harness import Run
from system.test_resize_kills import Training
from system.test_turns import goes_on, takes_turns

pytestmark = [pytest.mark.system, pytest.mark.torch, pytest.mark.timeout(900)]

OPTIONS = ("--plan-every", "3s", "--quantum", "1s")
WANTS = ("--cpus-per-gpu", "1", "--memory", "512M", "--gpu-memory", "16M")


@contextmanager
def growing(directory: Path, policy: str) -> Iterator[tuple[Cluster, Callable[..., None], Training]]:
    """Run an elastic job of one to four GPUs on a node of four until it has grown; then wait for numbers of its GPUs
    by the function."""
    options = ("--policy", policy, *OPTIONS)
    with Cluster(
        directory, nodes=1, virtual_gpus=4, topology="4", virtual_cores=4, virtual_memory="8G", master_options=options
    ) as cluster:
        elastic = Training.submit(cluster, "elastic", "1:4", "--step-seconds", "0.4")

        def has(*devices: int) -> None:
            eventually(
                lambda: elastic.devices() in devices,
                what=f"the elastic job has {devices} GPUs",
                within_seconds=240,
                story=elastic.story,
                every_seconds=0.2,
            )

        has(2, 3, 4)
        yield cluster, has, elastic


def test_by_default_an_elastic_job_grows_and_gives_back_what_a_newcomer_needs(tmp_path: Path) -> None:
    with growing(tmp_path, DEFAULT_POLICY) as (cluster, has, elastic):
        newcomer = Run.submit(cluster, "newcomer", *WANTS, world=3, steps=400)
        newcomer.wait_step(3, within_seconds=120)
        has(1)
        newcomer.hurry()
        newcomer.wait_state("SUCCEEDED", within_seconds=180)
        elastic.ends()


@pytest.mark.chaos
def test_an_elastic_job_grows_and_gives_back_to_two_that_then_take_turns_with_each_other(tmp_path: Path) -> None:
    """Four GPUs: one to four for the elastic job, three and three for the others. (chaos: 2 to 4 min)"""
    with growing(tmp_path, "gandiva") as (cluster, has, elastic):
        first = Run.submit(cluster, "first", *WANTS, world=3, steps=400)
        first.wait_step(3, within_seconds=120)
        has(1)
        second = Run.submit(cluster, "second", *WANTS, world=3, steps=400)
        second.wait_step(3, within_seconds=120)
        assert [takes_turns(run) for run in (first, second)] == [True, True], second.story()
        assert "time-sliced with" not in elastic.shell("history", elastic.id), "they found devices with fewer on them"
        goes_on(first, second)

        for run in (first, second):
            run.hurry()
        for run in (first, second):
            run.wait_state("SUCCEEDED", within_seconds=180)
        second.check(first)
        has(2, 3, 4)
        elastic.ends()
