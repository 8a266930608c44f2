"""Ranks meet at the gang's store, and wherever else their script says."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from training.harness import Rank, Rendezvous, end_together

pytestmark = pytest.mark.torch

SCRIPT = """
import os, sys
from datetime import timedelta
from torch import distributed
address = sys.argv[1].format(**os.environ)
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
distributed.init_process_group("gloo", address, rank=rank, world_size=world, timeout=timedelta(seconds=20))
met = [None, None]
distributed.all_gather_object(met, distributed.get_rank())
print("met", met, os.environ["TORCHELASTIC_USE_AGENT_STORE"], flush=True)
distributed.destroy_process_group()
"""


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.parametrize("address", ["env://", "tcp://127.0.0.1:{port}", "tcp://{{MASTER_ADDR}}:{{MASTER_PORT}}"])
def test_ranks_meet_at_the_address_that_their_script_names(tmp_path: Path, address: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    meeting = Rendezvous()
    address = address.format(port=_free_port())
    ranks = [
        Rank(
            tmp_path / "run",
            script,
            [address],
            rank=rank,
            world=2,
            rendezvous=meeting,
            agent=True,
        )
        for rank in range(2)
    ]
    assert end_together(ranks) == [0, 0], [rank.output() for rank in ranks]
    assert all("met [0, 1] True" in rank.output() for rank in ranks)
