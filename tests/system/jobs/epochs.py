"""A job for system tests that trains in epochs and logs one value in each step and one in each epoch.

Usage: epochs.py EPOCHS STEPS GO. An epoch has STEPS steps, of a tenth of a second each until the file GO is there. The
value `place` of a step is epoch + batch / 100, so that a reader of the series sees which step it was logged in.
"""

from __future__ import annotations

import os
import sys
import time

import ganger
import torch
from torch import distributed, nn

epochs, steps, go = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
torch.manual_seed(3)
torch.set_num_threads(1)
distributed.init_process_group("gloo")
net = nn.Linear(4, 1)
ranks = nn.parallel.DistributedDataParallel(net)
optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
job = ganger.attach(model=net, optimizer=optimizer)
world = distributed.get_world_size()
loader = job.dataloader(torch.utils.data.TensorDataset(torch.ones(steps * world, 4)), global_batch=world)
for epoch in job.epochs(epochs):
    for (x,) in loader:
        loss = ranks(x).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if not os.path.exists(go):
            time.sleep(0.1)
        # After a restart inside an epoch the loader has the batches that are left.
        job.log(place=epoch + (job.step_count % steps) / 100, loss=loss.item())
        job.step()
    job.log(accuracy=1 - 1 / (epoch + 2))
