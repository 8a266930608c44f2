"""Trains a little and prints one numbered line per step, so that a reader of the log sees whether any is lost."""

from __future__ import annotations

import argparse
import os
import time

import ganger
import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--stop-file", required=True, help="ends at the next step once this file is there")
options = parser.parse_args()

torch.manual_seed(3)
torch.set_num_threads(1)
net = nn.Linear(4, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
job = ganger.attach(model=net, optimizer=optimizer)
for step in job.steps():
    if os.path.exists(options.stop_file):
        break
    loss = net(torch.ones(1, 4)).square().sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"line {step + 1}", flush=True)
    time.sleep(0.02)
    job.step(loss)
