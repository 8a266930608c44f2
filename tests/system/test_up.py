"""A cluster that `ganger up` started does what is promised of one: gangs over its nodes, and no job that is harmed by
the end of a part."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from kit.up import Up

pytestmark = pytest.mark.system

TWO_NODES = ("--nodes", "2", "--virtual-gpus", "2", "--virtual-cores", "4", "--virtual-memory", "4G")
OVER_BOTH = ("--gpus", "2", "--nodes", "2")
# What a rank takes of its host's memory, and holds until the other has taken as much.
TAKES_300_MB = "held = bytearray(b'x') * 300_000_000; import time; time.sleep(3); print(len(held))"


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    with Up(tmp_path_factory.mktemp("up") / "c", *TWO_NODES) as up:
        yield up


def end_of(up: Up, job: str) -> tuple[str, str]:
    up.try_("wait", job, "--timeout", "100s")
    return up.json("show", job)["state"], up("history", job)


@pytest.mark.parametrize("first", ["0", "1"])
def test_a_gang_over_two_nodes_whose_ranks_end_one_after_the_other_succeeds(up: Up, first: str) -> None:
    job = up.submit(*OVER_BOTH, "--", "bash", "-c", f"[ $RANK = {first} ] || sleep 3; exit 0")
    assert end_of(up, job)[0] == "SUCCEEDED", end_of(up, job)[1]


def test_a_gang_over_two_nodes_has_its_memory_limit_on_each_of_them(up: Up) -> None:
    job = up.submit(*OVER_BOTH, "--memory", "400M", "--", "python", "-c", TAKES_300_MB)
    assert end_of(up, job)[0] == "SUCCEEDED", end_of(up, job)[1]


def test_a_rank_that_takes_more_than_its_node_gives_it_is_out_of_memory(up: Up) -> None:
    job = up.submit(*OVER_BOTH, "--memory", "200M", "--max-failures", "0", "--", "python", "-c", TAKES_300_MB)
    state, told = end_of(up, job)
    assert state == "FAILED"
    assert "used more host memory than its claim" in told
