"""What could keep a rank that is done from ending."""

from __future__ import annotations

from pathlib import Path

import pytest
from training.harness import Rank, Rendezvous

pytestmark = pytest.mark.torch

SCRIPT = """
import gc, weakref
import torch
from torch import distributed
from torch.utils.data import DataLoader, TensorDataset

distributed.init_process_group("gloo")
model = torch.nn.Linear(1, 1)
ranks = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(ranks.parameters(), lr=0.1)
for (batch,) in DataLoader(TensorDataset(torch.ones(2, 1))):
    optimizer.zero_grad()
    ranks(batch).sum().backward()
    optimizer.step()
group = weakref.ref(distributed.group.WORLD)
distributed.destroy_process_group()
del ranks
gc.collect()
print("freed" if group() is None else "kept")
"""


@pytest.mark.parametrize(("managed", "outcome"), [(True, "kept"), (False, "freed")])
def test_a_managed_rank_never_frees_its_gloo_group_as_that_may_wait_for_ever(
    tmp_path: Path, managed: bool, outcome: str
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    rank = Rank(tmp_path / "rank", script, rendezvous=Rendezvous(), managed=managed, agent=managed)
    assert rank.end() == 0, rank.output()
    assert rank.output().split()[-1] == outcome
