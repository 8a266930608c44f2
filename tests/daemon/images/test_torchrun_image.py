"""PyTorch's own trees of processes go on from an image: torchrun with two ranks, a loader with its workers."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from daemon.images.unit_job import real, restored, started
from ganger_daemon.images.contract import DumpRequest
from injob.launcher_kit import Place, launcher_place

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(os.geteuid() != 0, reason="units need root"),
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed"),
]

RANK = """
import time
import torch
import torch.distributed as dist
torch.set_num_threads(1)
dist.init_process_group("gloo")
count, total = torch.zeros(1), torch.zeros(1)
while True:
    count += 1
    share = count.clone()
    dist.all_reduce(share)
    assert float(share) == 2 * float(count), (share, count)
    if dist.get_rank() == 0:
        print(int(count), flush=True)
    time.sleep(0.02)
"""

# As a launcher would: the filter first, which is what lets the agent's rings be missed.
START = """
import os, sys
from ganger.injob.launcher.namespaces import refuse_io_uring
refuse_io_uring()
os.environ["OMP_NUM_THREADS"] = "1"
command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", sys.argv[1]]
os.execv(sys.executable, command)
"""


@pytest.fixture
def place() -> Iterator[Place]:
    yield from launcher_place(preload=False)


def test_two_ranks_of_torchrun_go_on_together(place: Place, tmp_path: Path) -> None:
    images = real()
    image = tmp_path / "image"
    image.mkdir()
    script = place.directory / "rank.py"
    script.write_text(RANK)
    job = started(place, START, str(script))
    facts = images.dump(DumpRequest(job.unit, image, goes_on=False))
    assert facts.processes >= 3

    again = restored(images, place, image, facts)
    again.goes_on_from(job, more=10)


# Batches come through shared memory from two workers that live as long as the loader.
LOADER = """
import torch
from torch.utils.data import DataLoader, Dataset
class Numbers(Dataset):
    def __len__(self): return 1_000_000
    def __getitem__(self, index): return torch.full((5000,), index)
if __name__ == "__main__":
    loader = DataLoader(Numbers(), batch_size=2, num_workers=2, persistent_workers=True)
    for number, batch in enumerate(loader):
        assert batch[:, 0].tolist() == [2 * number, 2 * number + 1], (number, batch)
        print(number + 1, flush=True)
"""


@pytest.mark.parametrize("sharing", ["file_descriptor", "file_system"])
def test_a_loader_goes_on_with_the_workers_that_it_had(place: Place, tmp_path: Path, sharing: str) -> None:
    images = real()
    image = tmp_path / "image"
    image.mkdir()
    chosen = f"import torch\ntorch.multiprocessing.set_sharing_strategy({sharing!r})\ntorch.set_num_threads(1)\n"
    job = started(place, chosen + LOADER)
    facts = images.dump(DumpRequest(job.unit, image, goes_on=False))
    assert facts.processes >= 3

    # as the daemon of a gang that an image has ended
    for shared in facts.shared_files:
        Path(shared).unlink()
    again = restored(images, place, image, facts)
    again.goes_on_from(job, more=20)
