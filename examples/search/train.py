"""One member of a hyper-parameter search: a small network on handwritten digits, which reports its accuracy."""

import argparse

import ganger
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lr", type=float, required=True)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=30)
    asked = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16
    labels = torch.tensor(digits.target)
    network = nn.Sequential(nn.Linear(64, asked.width), nn.ReLU(), nn.Linear(asked.width, 10))
    optimizer = torch.optim.SGD(network.parameters(), lr=asked.lr)

    job = ganger.attach(model=network, optimizer=optimizer)
    loader = job.dataloader(TensorDataset(images[:1500], labels[:1500]), global_batch=50, shuffle=True)
    for epoch in job.epochs(asked.epochs):
        for batch, targets in loader:
            loss = nn.functional.cross_entropy(network(batch), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            job.step(loss)
        with torch.no_grad():
            accuracy = (network(images[1500:]).argmax(1) == labels[1500:]).float().mean()
        # What the stop rule of search.yaml goes by; `ganger show ARRAY` prints it.
        job.log(accuracy=accuracy, epoch=epoch + 1)
        print(f"epoch {epoch + 1}: accuracy {accuracy:.3f}", flush=True)


if __name__ == "__main__":
    main()
