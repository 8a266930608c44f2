"""Train a small character transformer on text that every Python brings along, attached to Ganger in five lines."""

import argparse
import hashlib
import importlib.util
import random
from pathlib import Path

import ganger  # 1
import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--steps", type=int, default=0, help="end after so many steps; 0: all epochs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--workers", type=int, default=0, help="data loader processes")
    parser.add_argument("--losses", help="append one line per step: step, loss as a hexadecimal float")
    parser.add_argument("--weights", help="write the SHA-256 of the final weights")
    return parser.parse_args()


def read_text():
    """About 60,000 characters of English and Python: the documentation topics, or else a module of the library."""
    for module in ("pydoc_data.topics", "argparse", "typing"):
        found = importlib.util.find_spec(module)
        if found is not None and found.origin:
            return Path(found.origin).read_text(encoding="utf-8")[:60_000]
    raise SystemExit("no text found: this Python has no source files")


class Characters(Dataset):
    """Windows of `length` characters, each with the same window one further on."""

    def __init__(self, text, length):
        self.alphabet = sorted(set(text))
        numbers = {character: number for number, character in enumerate(self.alphabet)}
        self.data = torch.tensor([numbers[character] for character in text])
        self.length = length

    def __len__(self):
        return (len(self.data) - 1) // self.length

    def __getitem__(self, index):
        start = index * self.length
        return self.data[start : start + self.length], self.data[start + 1 : start + self.length + 1]


class Transformer(nn.Module):
    def __init__(self, symbols, length, width, layers=2):
        super().__init__()
        self.embedding = nn.Embedding(symbols, width)
        self.position = nn.Parameter(torch.randn(length, width) * 0.02)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.1, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, symbols, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("mask", torch.triu(torch.full((length, length), float("-inf")), 1), persistent=False)

    def forward(self, symbols):
        hidden = self.embedding(symbols) + self.position
        return self.head(self.norm(self.encoder(hidden, mask=self.mask)))


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
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    data = Characters(read_text(), length=64)
    network = Transformer(len(data.alphabet), data.length, arguments.width).to(device)
    optimizer = torch.optim.AdamW(network.parameters(), lr=2e-3)
    steps = arguments.steps or arguments.epochs * -(-len(data) // arguments.batch)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-3, total_steps=max(steps, 2) + 1)
    criterion = nn.CrossEntropyLoss()
    job = ganger.attach(model=network, optimizer=optimizer, scheduler=schedule, seed=arguments.seed)  # 2
    loader = job.dataloader(data, global_batch=arguments.batch, shuffle=True, num_workers=arguments.workers)  # 3

    loss = torch.tensor(0.0)
    for epoch in job.epochs(arguments.epochs):  # 4
        for symbols, following in loader:
            scores = network(symbols.to(device))
            loss = criterion(scores.flatten(0, 1), following.to(device).flatten())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            if arguments.losses:
                with open(arguments.losses, "a") as file:
                    file.write(f"{schedule.last_epoch} {loss.item().hex()}\n")
            job.step(loss)  # 5
            if schedule.last_epoch >= steps:
                break
        print(f"epoch {epoch}: loss {loss.item():.4f}", flush=True)
        if schedule.last_epoch >= steps:
            break
    if arguments.weights:
        with open(arguments.weights, "w") as file:
            file.write(digest(network) + "\n")


if __name__ == "__main__":
    main()
