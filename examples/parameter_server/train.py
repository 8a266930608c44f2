"""Train the digits network with parameter servers and workers on torch.distributed, attached to Ganger in five lines.

Each server keeps some of the parameters with their optimizer (`shard`), each worker a share of the samples; their
numbers may change between two steps. Synchronous: a server waits for the gradients of all workers and takes one step
for all of them. Asynchronous (`--asynchronous`): it takes a step for the gradients of each worker as they come; a
worker waits only when it is `--staleness` steps ahead of the slowest one.

    ganger submit --file train.yaml
    ganger resize JOB ps=3 worker=4
    torchrun --nproc-per-node 5 train.py --servers 2
"""

import argparse
import hashlib
import json
import os
import time

import ganger  # 1
import torch
from sklearn.datasets import load_digits
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.data import TensorDataset


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch", type=int, default=60, help="samples of a step over all workers")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--servers", type=int, default=1, help="so many ranks are servers; with Ganger: those of role ps"
    )
    parser.add_argument("--asynchronous", action="store_true")
    parser.add_argument("--staleness", type=int, default=2)
    parser.add_argument("--slow-until", help="a step takes 100 ms longer until there is this file")
    parser.add_argument(
        "--losses",
        help="the first worker appends a line a step: step, loss as a hexadecimal float, digests of the parameters"
        " before and after",
    )
    parser.add_argument("--samples", help="workers append a line a step: epoch, step, numbers of its samples")
    parser.add_argument("--weights", help="the first worker writes the digest of the final parameters")
    return parser.parse_args()


def make_network():
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Dropout(0.25), nn.Linear(128, 10),
    )  # fmt: skip


def load_data():
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    return TensorDataset(images, torch.tensor(digits.target), torch.arange(len(images)))


def shards(network, servers):
    """Return the parameters of each server: the largest first, each to the server that has the fewest numbers."""
    kept = [[] for _ in range(servers)]
    for parameter in sorted(network.parameters(), key=torch.numel, reverse=True):
        min(kept, key=lambda own: sum(map(torch.numel, own))).append(parameter)
    return kept


def digest(network):
    """Return the SHA-256 of all parameters."""
    return hashlib.sha256(parameters_to_vector(network.parameters()).detach().numpy().tobytes()).hexdigest()


def serve(network, arguments, servers, workers, steps):
    """Keep the parameters of one server, and take steps with the gradients of the workers."""
    own = shards(network, servers)[distributed.get_rank()]
    optimizer = torch.optim.Adam(own, lr=3e-3)
    job = ganger.attach(model=network, optimizer=optimizer, shard=own, seed=arguments.seed)  # 2
    gradients = torch.empty_like(parameters_to_vector(own))

    def take_step(gradient):
        vector = gradient.clone()
        for parameter, part in zip(own, vector.split([parameter.numel() for parameter in own]), strict=True):
            parameter.grad = part.view_as(parameter)
        optimizer.step()
        optimizer.zero_grad()

    sent = {}

    def send(worker):
        # Not to be waited for: the worker may be sending to another server, which sends to another worker.
        if worker in sent:
            sent[worker][0].wait()
        vector = parameters_to_vector(own).detach()
        sent[worker] = distributed.isend(vector, servers + worker), vector

    for worker in range(workers):
        send(worker)
    pushed = [job.step_count] * workers
    waiting = []
    for step in job.steps(steps):  # 4
        if arguments.asynchronous:
            while min(pushed) <= step:
                worker = distributed.recv(gradients) - servers
                take_step(gradients)
                pushed[worker] += 1
                waiting.append(worker)
                for ready in [other for other in waiting if pushed[other] <= min(pushed) + arguments.staleness]:
                    waiting.remove(ready)
                    send(ready)
        else:
            total = torch.zeros_like(gradients)
            for worker in range(workers):
                distributed.recv(gradients, servers + worker)
                total += gradients
            take_step(total / workers)
            for worker in range(workers):
                send(worker)
        job.step()  # 5
    for handle, _ in sent.values():
        handle.wait()


def work(network, arguments, servers, mesh):
    """Compute gradients of one worker's share of the samples, for ever newer parameters."""
    kept = shards(network, servers)
    job = ganger.attach(model=network, seed=arguments.seed)  # 2
    loader = job.dataloader(load_data(), global_batch=arguments.batch, shuffle=True, drop_last=True, mesh=mesh)  # 3
    criterion = nn.CrossEntropyLoss()
    is_first = distributed.get_rank() == servers

    def receive():
        for server, own in enumerate(kept):
            vector = parameters_to_vector(own).detach()
            distributed.recv(vector, server)
            vector_to_parameters(vector, own)

    receive()
    for epoch in job.epochs(arguments.epochs):  # 4
        for images, labels, numbers in loader:
            before = digest(network) if arguments.losses and is_first else ""
            loss = criterion(network(images), labels)
            network.zero_grad()
            loss.backward()
            for server, own in enumerate(kept):
                distributed.send(parameters_to_vector([parameter.grad for parameter in own]), server)
            receive()
            if arguments.losses and is_first:
                with open(arguments.losses, "a") as file:
                    file.write(f"{job.step_count + 1} {loss.item().hex()} {before} {digest(network)}\n")
            if arguments.samples:
                with open(arguments.samples, "a") as file:
                    file.write(f"{epoch} {job.step_count + 1} {','.join(map(str, numbers.tolist()))}\n")
            if arguments.slow_until and not os.path.exists(arguments.slow_until):
                time.sleep(0.1)
            job.step(loss)  # 5
    if arguments.weights and is_first:
        with open(arguments.weights, "w") as file:
            file.write(digest(network))


def main():
    arguments = parse_arguments()
    torch.set_num_threads(1)
    torch.manual_seed(arguments.seed)
    distributed.init_process_group("gloo")
    servers = json.loads(os.environ.get("GANGER_ROLE_SIZES", "{}")).get("ps", arguments.servers)
    workers = distributed.get_world_size() - servers
    # The ranks that share the samples; all ranks make it.
    mesh = DeviceMesh("cpu", list(range(servers, servers + workers)))
    network = make_network()
    steps = arguments.epochs * (len(load_data()) // arguments.batch)
    if distributed.get_rank() < servers:
        serve(network, arguments, servers, workers, steps)
    else:
        work(network, arguments, servers, mesh)


if __name__ == "__main__":
    main()
