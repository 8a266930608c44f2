"""Train the digits network on several ranks with DistributedDataParallel. Plain PyTorch.

Start one process per rank with the usual variables (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT), e.g. by
`torchrun --nproc-per-node 2 plain.py`; without them it is a world of one.
"""

import argparse
import hashlib
import os
import random

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=0, help="end after so many steps; 0: all epochs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch", type=int, default=64, help="samples per step over all ranks")
    parser.add_argument("--width", type=int, default=16, help="channels of the first layer")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--workers", type=int, default=0, help="data loader processes")
    parser.add_argument("--losses", help="append one line per step: step, loss as a hexadecimal float")
    parser.add_argument("--weights", help="write the SHA-256 of the final weights")
    return parser.parse_args()


def make_network(width):
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(width, 2 * width, 3, padding=1),
        nn.BatchNorm2d(2 * width),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.25),
        nn.Linear(2 * width * 4, 10),
    )


def load_data():
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    return TensorDataset(images[:1500], labels[:1500]), TensorDataset(images[1500:], labels[1500:])


def accuracy(network, loader, device):
    network.eval()
    right = total = 0
    with torch.no_grad():
        for images, labels in loader:
            right += (network(images.to(device)).argmax(1).cpu() == labels).sum().item()
            total += len(labels)
    network.train()
    return right / total


def join_ranks():
    """Returns the device of this rank."""
    # A process alone has no such variables: it joins a group of one.
    alone = {} if "RANK" in os.environ else {"store": distributed.HashStore(), "rank": 0, "world_size": 1}
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        torch.cuda.set_device(device)
        distributed.init_process_group("nccl", device_id=device, **alone)
        return device
    distributed.init_process_group("gloo", **alone)
    return torch.device("cpu")


def digest(network):
    sha = hashlib.sha256()
    for name, tensor in network.state_dict().items():
        sha.update(name.encode())
        sha.update(tensor.cpu().contiguous().numpy().tobytes())
    return sha.hexdigest()


def main():
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    random.seed(arguments.seed)
    np.random.seed(arguments.seed)
    torch.manual_seed(arguments.seed)
    device = join_ranks()
    rank, world = distributed.get_rank(), distributed.get_world_size()

    train, test = load_data()
    sampler = DistributedSampler(train, world, rank, shuffle=True, seed=arguments.seed)
    loader = DataLoader(train, batch_size=arguments.batch // world, sampler=sampler, num_workers=arguments.workers)
    test_loader = DataLoader(test, batch_size=256)
    network = make_network(arguments.width).to(device)
    ranks = DistributedDataParallel(network)
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3)
    steps = arguments.steps or arguments.epochs * len(loader)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
    criterion = nn.CrossEntropyLoss()

    for epoch in range(arguments.epochs):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            loss = criterion(ranks(images.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            if arguments.losses and rank == 0:
                with open(arguments.losses, "a") as file:
                    file.write(f"{schedule.last_epoch} {loss.item().hex()}\n")
            if schedule.last_epoch >= steps:
                break
        right = accuracy(network, test_loader, device)  # On every rank: they stay together
        if rank == 0:
            print(f"epoch {epoch}: accuracy {right:.3f}", flush=True)
        if schedule.last_epoch >= steps:
            break
    if arguments.weights and rank == 0:
        with open(arguments.weights, "w") as file:
            file.write(digest(network) + "\n")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
